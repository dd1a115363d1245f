"""What a line of progress means after the lines before it, in one file: epochs that are named in a line of
their own, epochs of different lengths, bars inside of bars. Pure bookkeeping, bounded; one Context a file.

A bar inside of the training's (an evaluation, a generation, DDIM steps: often without any label) counts
something else: it shows that the program works, and it is no step. It is known by how bars stand to each
other, not by its words:

- a bar that is not at its end, and that has risen by itself STEADY times while no other bar began, is the
  training's (outer): a bar of another total that begins then is inside of it. Epochs around batches
  never rise by themselves: there the batches are the steps;
- a bar with a loss is not inside of one that shows none;
- of two bars that take turns, each drawn to its end, the shorter one (or the one without a loss) is inside.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.text import LogFact

LEFT_AFTER = 3
"""Inner bars drawn to their ends in a row, and the outer one never rose: it was left, and theirs is the training."""
STEADY = 2
"""Rises of a bar with no other beginning between them, after which it is the training's: a bar of epochs has one."""
MAX_BARS = 32  # Totals of one file that are remembered; of more, the one that was drawn longest ago goes.
MAX_PATTERNS = 32
INNER = "inner_bar"
"""The pattern of what a bar inside of the training's counts: all of them together, so that the count rises on."""
HEADED = frozenset({"keras", "keras_line", "paddle_hapi"})
"""Patterns that count within an epoch which a line of its own named (`Epoch 2/3`)."""


class _Bar(msgspec.Struct):
    total: int
    count: int
    inner: bool
    rises: int = 0  # Since any bar began.
    steady: bool = False  # Rose STEADY times by itself.
    begun: int = 0  # When it began last, in bars that began.
    begins: int = 1
    alone: int = 0  # How often it began in a row with no outer bar having risen since.
    has_loss: bool = False


class _Epoch(msgspec.Struct):
    """The epoch of one pattern."""

    number: int
    steps: int
    longest: int


class Context(msgspec.Struct):
    """What is known of the lines of one file so far."""

    _header: tuple[int, int] | None = None  # (epochs finished, all epochs), as the last header named them.
    _epochs: dict[str, _Epoch] = msgspec.field(default_factory=dict)
    _bars: dict[int, _Bar] = msgspec.field(default_factory=dict)
    _begins: int = 0
    _inner: float = 0.0
    _ended: int | None = None
    """The step that the log called the last one: a bar whose epoch was cut short by it, and is closed, is there."""

    def with_context(self, fact: LogFact) -> LogFact:
        """The fact of the next line, with what the lines before it add."""
        if fact.kind is not EventKind.PROGRESS:
            if fact.kind is EventKind.PHASE and fact.phase == "finishing":
                self._ended = fact.step
            return fact
        if fact.pattern == "epoch_header":
            self._header = (max(0, int(fact.count or 0) - 1), fact.total_steps or 0)
            return fact
        if fact.pattern in HEADED and self._header is not None:
            fact = _headed(fact, *self._header)
        if fact.epoch is not None:
            return self._in_epoch(fact)
        if fact.pattern == "tqdm" and fact.total_steps and fact.step is not None:
            return self._bar(fact, fact.step, fact.total_steps)
        return fact

    # -- epochs ------------------------------------------------------------------------------------------------

    def _in_epoch(self, fact: LogFact) -> LogFact:
        """The step over all epochs, where this one is shorter than those before, or is of unknown length."""
        assert fact.epoch is not None and fact.in_epoch is not None
        name = fact.pattern.removesuffix("_open")
        known, steps = self._epochs.get(name), fact.epoch_steps
        if fact.in_epoch != steps:
            self._ended = None
        elif self._ended is not None:
            return replace(fact, step=self._ended)
        if steps is None:
            longest = known.longest if known is not None else 0
            if fact.epoch == 0 or longest:
                step = fact.epoch * longest + fact.in_epoch
                return replace(fact, pattern=name, step=step, count=None)
            return fact
        if known is None:
            if len(self._epochs) < MAX_PATTERNS:
                self._epochs[name] = _Epoch(fact.epoch, steps, steps)
            return fact
        if fact.epoch == known.number and steps != known.steps:
            return self._as_inner(fact, fact.in_epoch)  # fastai validates under the label of the epoch
        known.number, known.steps, known.longest = fact.epoch, steps, max(steps, known.longest)
        if steps < known.longest:
            return replace(fact, step=fact.epoch * known.longest + fact.in_epoch)
        return fact

    # -- bars --------------------------------------------------------------------------------------------------

    def _bar(self, fact: LogFact, count: int, total: int) -> LogFact:
        bar = self._bars.pop(total, None)
        if bar is None or (count < bar.count and count <= max(1, total // 10)):
            bar = self._begin(bar, fact, count, total)
        elif count > bar.count:
            if bar.inner:
                self._inner += count - bar.count
            bar.rises += 1
            bar.steady = bar.steady or (bar.rises >= STEADY and not bar.inner)
            bar.count = count
        bar.has_loss = bar.has_loss or fact.loss is not None
        if bar.inner and bar.has_loss and not any(each.has_loss for each in self._bars.values()):
            bar.inner = False
        if len(self._bars) >= MAX_BARS:
            del self._bars[next(iter(self._bars))]
        self._bars[total] = bar  # the one that was drawn last stands last
        return self._as_inner(fact) if bar.inner else fact

    def _begin(self, before: _Bar | None, fact: LogFact, count: int, total: int) -> _Bar:
        """A bar that is drawn for the first time, or again from its beginning."""
        others = [bar for bar in self._bars.values() if not bar.inner]
        alone = 0
        if before is not None and before.inner and not any(bar.rises for bar in others):
            alone = before.alone + 1
        self._begins += 1
        was_inner = (
            before is not None and before.inner
        )  # it was inside before; the last one comes when the training is at its end
        inside = alone < LEFT_AFTER and any(bar.steady and (was_inner or bar.count < bar.total) for bar in others)
        inner = inside or (before is not None and _takes_turns(before, fact, total, others))
        if not inner:
            for bar in self._bars.values():
                bar.rises, bar.steady = 0, False
        else:
            self._inner += count
            for bar in self._bars.values():
                bar.rises = 0
        begins = 1 if before is None else before.begins + 1
        return _Bar(total, count, inner, begun=self._begins, begins=begins, alone=alone)

    def _as_inner(self, fact: LogFact, done: int | None = None) -> LogFact:
        if done is not None:
            last = self._epochs.setdefault(f"{INNER}/{fact.pattern}/{fact.epoch_steps}", _Epoch(0, 0, 0))
            self._inner += max(0, done - last.number) if done >= last.number else done
            last.number = done
        return replace(
            fact, pattern=INNER, step=None, count=self._inner, total_steps=None, step_s=None, loss=None,
            epoch=None, in_epoch=None, epoch_steps=None, epochs=None, phase="evaluating",
        )  # fmt: skip


def _takes_turns(before: _Bar, fact: LogFact, total: int, others: list[_Bar]) -> bool:
    has_loss = before.has_loss or fact.loss is not None
    for bar in others:
        if bar.total == total or bar.begun < before.begun or bar.begins < 2 or bar.count < bar.total:
            continue
        if bar.has_loss != has_loss:
            return bar.has_loss
        return bar.total > total
    return False


def _headed(fact: LogFact, epoch: int, epochs: int) -> LogFact:
    done = int(fact.count) if fact.step is None and fact.count is not None else fact.step
    total = fact.total_steps
    if done is None or not total or not 0 <= done <= total:
        return fact
    return replace(
        fact, step=epoch * total + done, count=None, total_steps=epochs * total if epochs > epoch else None,
        epoch=epoch, in_epoch=done, epoch_steps=total, epochs=epochs,
    )  # fmt: skip
