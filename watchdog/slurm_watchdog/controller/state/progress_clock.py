"""The progress clock: only a count that rises is progress. Pure bookkeeping: `at` and `now` are the caller's
monotonic clock.

A run has one clock a counter, which is one pattern in one file. Any that rises proves that the loop turns;
one gives the step, see main_clock(). A counter that counts no steps (epochs, tokens, what was learnt) never
gives it while there is a better one.

A line of a form that anybody may write ("step 3") is believed when a second one counts on. Two programs that
count in one file in the same words hide each other: the one that continues shows as progress. That is seen,
and said (`Progress.shared`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.controller.state.counter_clock import KEPT_INTERVALS, Counter, CounterClock
from slurm_watchdog.controller.state.phases import SAVES, Lately
from slurm_watchdog.knowledge.progress_patterns import HEARTBEAT_PATTERN, progress_table
from slurm_watchdog.model.cluster_view import LossPoint, Progress, StepTime
from slurm_watchdog.model.observations import Event, StepLine


def add_time(clock: CounterClock, event: Event, at: float, phase: str | None) -> None:
    """The duration of the steps since the last line, and the loss, before the clock is set."""
    assert event.step is not None
    add_loss(clock, event, at)
    batch = _batch(clock, event)
    seconds, logged = event.step_s, True
    if seconds is None and event.written_s is not None:
        seconds = clock.lines.step_seconds(event.step, event.written_s, phase is not None)
    elif seconds is None and clock.rises:
        _add_time_by_report(clock, event, at, phase, batch)
        return
    if seconds is not None:
        time = StepTime(step=event.step, seconds=seconds, at=at, logged=logged, phase=phase, batch=batch)
        clock.times.append(time)
        clock.history.add(time)
        clock.grew()


def _add_time_by_report(clock: CounterClock, event: Event, at: float, phase: str | None, batch: float | None) -> None:
    """Where neither the line nor its date says how long a step takes: all steps of one look of the agent
    share the time since the look before. A line that came in the same look corrects it."""
    assert event.step is not None
    same = clock.rises[-1][0] == at
    if same and len(clock.rises) < 2:
        return
    from_at, from_step = clock.rises[-2] if same else clock.rises[-1]
    if event.step <= from_step or at <= from_at:
        return
    last = clock.times[-1] if clock.times and not clock.times[-1].logged else None
    if same and last is not None and last.at == at:
        phase = last.phase
        clock.times.pop()
    elif last is not None:
        clock.history.add(last)
    seconds = (at - from_at) / (event.step - from_step)
    clock.times.append(StepTime(step=event.step, seconds=seconds, at=at, logged=False, phase=phase, batch=batch))
    clock.grew()


def _batch(clock: CounterClock, event: Event) -> float | None:
    """Samples a step, as the line says itself or as what was consumed has risen since the line before; before
    the clock is set. To compare by: rounded to the three digits that a ramp changes."""
    if event.batch is not None:
        return float(event.batch)
    before, clock.consumed = clock.consumed, None
    if event.samples is None or event.step is None or event.step <= clock.step:
        return None
    clock.consumed = event.samples
    if before is None or clock.consumed <= before:
        return None
    return float(f"{(clock.consumed - before) / (event.step - clock.step):.3g}")


def add_loss(clock: CounterClock, event: Event, at: float) -> None:
    loss = math.nan if event.loss_is_no_number else event.loss
    if loss is not None and event.step is not None:
        clock.losses.append(LossPoint(step=event.step, loss=loss, at=at))
        clock.grew()


MOST_EARLIER = 8  # Lines of progress beside the newest of one row; an agent sends four.


def lines_of(event: Event) -> tuple[Event, ...]:
    """The lines of progress of which it has something, oldest first: of many, few."""
    if not event.earlier:
        return (event,)
    newest, counts_steps = replace(event, earlier=()), event.step is not None
    earlier = tuple(
        replace(
            newest,
            step=int(each.number) if counts_steps else None,
            count=None if counts_steps else each.number,
            **{name: getattr(each, name) for name in StepLine.__struct_fields__ if name != "number"},
        )
        for each in event.earlier[-MOST_EARLIER:]
        if abs(each.number) < 2.0**62
    )
    return *earlier, newest


BARS = ("tqdm", "ignite_bar")  # They count several things in turn: each total is a counter of its own.

TRUSTED_AFTER = 5  # Counts of a weak pattern, or a bar, after which its total is believed: not of a set-up.

MAX_CLOCKS = 64  # Of one run; of more, the one that rose longest ago goes.

SHARED_AFTER, ALONE_AFTER = 5, 20
"""Two programs write one log once the two counts have taken turns so often; one has it alone again after so
many of its counts."""

SAME_LOOK_S = 2.0  # What was read in one look has one date, and may come again in a later report.
MAY_BE_TOLD = 12
"""A new controller may have read so many steps of a file before its agent says what was before them; that they come
again is certain for as many (slurm_watchdog.agent.logs.job_logs.KEPT)."""

LEFT_AFTER, LEFT_AFTER_S = 10, 600.0
"""A counter that stood for so many of its slowest intervals, and so long, while another rose is one that was left."""


@dataclass(frozen=True)
class Stretch:
    """What lies between the last step and the next, apart from training."""

    troubled_at: float = float("-inf")  # The last moment with an open incident: such an interval teaches nothing.
    saved_at: float = float("-inf")  # When a checkpoint was complete last.
    lately: Lately | None = None  # What the log has announced since the last step.


TRAINS = Stretch()


def apply_step(clocks: dict[Counter, CounterClock], event: Event, at: float, stretch: Stretch = TRAINS) -> bool:
    """Takes a step, or another count, that was logged at `at`, into its clock. Returns whether it is progress. A lower
    count is a new epoch once it rises by itself, or at once where the last one was counted to its end. One that was
    read before the newest one is an old line that came late, or again."""
    number = event.count if event.step is None else event.step
    assert number is not None
    key = counter_of(event)
    clock = clocks.get(key)
    if clock is None:
        return _begin(clocks, key, event, number, at)
    if event.backlog:
        return _catch_up(clock, event, number, at)
    if number < clock.count and at != clock.rose_at and at < clock.rose_at + SAME_LOOK_S:
        if begins := at < clock.began_at and clock.seen <= MAY_BE_TOLD:
            clocks[key] = _new_clock(event, number, at)  # an agent tells a new controller what was before
        return begins
    if number > clock.count:
        if clock.other is not None and clock.count < clock.other < number:
            clock.turns, clock.other, clock.alone = clock.turns + 1, clock.count, 0
            if clock.turns >= SHARED_AFTER:
                # It is the other program's turn: how far apart the two are says nothing about steps.
                clock.count, clock.rose_at = number, max(at, clock.rose_at)
                clock.lower, clock.step = None, event.step or 0
                return True
        _rise(clock, event, number, at, stretch)
        clock.alone += 1
        if clock.alone > ALONE_AFTER:
            clock.turns, clock.other = 0, None
        return True
    if number == clock.count:
        if event.step is not None and (not clock.losses or clock.losses[-1].step != event.step):
            add_loss(clock, event, at)
        return False
    total = event.total_steps
    # At its end, and at its beginning now: the next epoch of the same length.
    if total is not None and total == clock.total_steps and clock.count >= 0.9 * total and number <= 0.1 * total:
        clock.first_step, clock.begun_anew = event.step or 0, clock.begun_anew + 1
        _rise(clock, event, number, at, stretch)
        return True
    if clock.lower is not None and number > clock.lower:
        new = clocks[key] = _reset(clock, event, number, at)
        new.other, new.turns = clock.count, clock.turns
        return True
    if clock.lower is None:
        # A second program continues where it was; an evaluation inside the training begins again.
        goes_on = clock.other is not None and number > clock.other
        clock.turns, clock.other, clock.alone = clock.turns + 1 if goes_on else 0, number, 0
    clock.lower = number
    return False


def _begin(clocks: dict[Counter, CounterClock], key: Counter, event: Event, number: float, at: float) -> bool:
    if len(clocks) >= MAX_CLOCKS:
        del clocks[min(clocks, key=lambda each: (clocks[each].is_step, clocks[each].rose_at))]
    if _is_side_line(clocks, event):
        return False
    clocks[key] = _new_clock(event, number, at)
    return not event.initial


def counter_of(event: Event) -> Counter:
    """Which counter the line is of."""
    pattern = event.pattern or ""
    return event.source, f"{pattern}/{event.total_steps}" if pattern in BARS else pattern


def _is_side_line(clocks: dict[Counter, CounterClock], event: Event) -> bool:
    """Whether a line in words that anybody may write names a step which was made long ago ("evaluated step
    400"): it counts nothing."""
    main = main_clock(clocks)
    if (event.pattern or "") not in progress_table().counted or event.step is None or main is None or not main.is_step:
        return False
    of_main = next(pattern for (_, pattern), clock in clocks.items() if clock is main)
    return of_main not in progress_table().counted and main.rose > 0 and event.step <= main.step


def _new_clock(event: Event, number: float, at: float) -> CounterClock:
    step = event.step or 0
    return CounterClock(
        count=number, rose_at=at, began_at=at, first_step=None if event.initial else step, step=step,
        is_step=event.step is not None, total_steps=event.total_steps,
    )  # fmt: skip


def _catch_up(clock: CounterClock, event: Event, number: float, at: float) -> bool:
    """Of an agent that opens the file in the middle: how far it is, and nothing about how long steps take."""
    if number <= clock.count:
        return False
    clock.count, clock.rose_at, clock.lower = number, max(at, clock.rose_at), None
    clock.step = max(clock.step, event.step or 0)
    return True


def _rise(clock: CounterClock, event: Event, number: float, at: float, stretch: Stretch) -> None:
    from_at, lately = clock.rose_at, stretch.lately
    phase = None if lately is None else lately.phase
    silent_s = at - from_at if lately is None else min(at - from_at, lately.silent_s)
    if at > from_at and clock.seen > 1:
        if from_at > stretch.troubled_at:
            if phase is not None:
                clock.phase_intervals_s.setdefault(phase, deque(maxlen=KEPT_INTERVALS)).append(at - from_at)
            if silent_s > 0.0:
                clock.intervals_s.append(silent_s)
        # A save leaves its run a pace: many save between any two reports. What it took is none.
        since = max(from_at, stretch.saved_at) if stretch.saved_at < at else from_at
        pace_s = at - since if phase is None else silent_s if phase == SAVES else 0.0
        if pace_s > 0.0:
            clock.paces.add(pace_s, at, troubled=from_at <= stretch.troubled_at)
    if event.step is not None:
        if clock.first_step is not None:  # from where a bar begins a run that was resumed jumps to its first step
            clock.stride = max(0, event.step - clock.step)
            clock.strides.append(clock.stride)
        add_time(clock, event, at, phase)
        clock.step = event.step
        clock.first_step = event.step if clock.first_step is None else clock.first_step
        if clock.rises and clock.rises[-1][0] == at:
            clock.rises.pop()
        clock.rises.append((at, event.step))
    clock.count, clock.rose_at, clock.lower = number, max(at, clock.rose_at), None
    clock.seen += 1
    clock.rose += 1
    clock.total_steps = event.total_steps or clock.total_steps


def _reset(clock: CounterClock, event: Event, number: float, at: float) -> CounterClock:
    """A count that fell and rises again. Where it began at its beginning before, and does so again, it is an
    epoch like the last one, and what was learnt of its pace holds; else the program was started again."""
    lower = clock.lower or 0.0
    new = _new_clock(event, number, at)
    new.first_step = int(lower) if new.is_step else 0
    new.seen, new.rose, new.begun_anew = 2, clock.rose + 1, clock.begun_anew + 1
    if new.is_step and max(clock.first_step or 0, lower) <= max(1, clock.stride):
        new.seen, new.intervals_s, new.paces = clock.seen + 1, clock.intervals_s, clock.paces
        new.phase_intervals_s = clock.phase_intervals_s
    return new


def apply_loss(clocks: dict[Counter, CounterClock], event: Event, at: float) -> None:
    """A loss that stands beside another count than the step, as in the dictionaries of the Hugging Face
    Trainer: it is of the step that the main clock shows."""
    main = main_clock(clocks)
    if event.step is None and main is not None and main.is_step:
        add_loss(main, replace(event, step=main.step), at)


def main_clock(clocks: dict[Counter, CounterClock]) -> CounterClock | None:
    """The clock that gives the step, None where nothing was ever counted. Of those that count steps, are not at their
    end (a bar of the data, or of an evaluation) and were not left, the one that was seen to rise most often."""
    found = main_counter(clocks)
    return None if found is None else found[1]


def main_counter(clocks: dict[Counter, CounterClock]) -> tuple[Counter, CounterClock] | None:
    """The same, with what it counts."""
    if not clocks:
        return None
    clocks = _trusted(clocks)
    newest = max(clock.rose_at for clock in clocks.values())
    return max(clocks.items(), key=lambda each: _rank(each[1], newest))


def _trusted(clocks: dict[Counter, CounterClock]) -> dict[Counter, CounterClock]:
    """The trainer's own heartbeat where it has been seen to rise and was not left; else all."""
    newest = max(clock.rose_at for clock in clocks.values())
    own = {
        key: clock
        for key, clock in clocks.items()
        if key[1] == HEARTBEAT_PATTERN and clock.rose and newest - clock.rose_at <= LEFT_AFTER_S
    }
    return own or clocks


def _rank(clock: CounterClock, newest: float) -> tuple[bool, bool, bool, int, float]:
    at_end = clock.total_steps is not None and clock.step >= clock.total_steps
    stood_s = newest - clock.rose_at
    left = stood_s > max(LEFT_AFTER_S, LEFT_AFTER * max(clock.intervals_s, default=0.0))
    return clock.is_step, not at_end, not left, clock.seen, clock.rose_at


def read_progress(
    clocks: dict[Counter, CounterClock],
    phase: tuple[str, float] | None,
    grace_from: float,
    now: float,
    saved_at: float = float("-inf"),
) -> Progress | None:
    """What the clocks say at `now`, None if nothing was ever counted, or once only in words that anybody may
    write. No age reaches back behind `grace_from`, nor behind `saved_at`, the end of a save; `phase` is its name and
    when it began."""
    found = main_counter(clocks)
    if found is None:
        return None
    (source, pattern), main = found
    if pattern in progress_table().counted and all(
        p in progress_table().counted and clock.seen < 2 for (_, p), clock in clocks.items()
    ):
        return None
    guessed = pattern in progress_table().counted or pattern.partition("/")[0] in BARS
    newest = max(saved_at, *(clock.rose_at for clock in clocks.values() if clock.seen > 1 or clock is main))
    rises = [clock.rose_at for clock in clocks.values() if clock.seen > 1]
    return Progress(
        step=main.step,
        step_known=main.is_step,
        age_s=max(0.0, now - max(newest, grace_from)),
        ungranted_age_s=max(0.0, now - newest),
        last_increase_age_s=max(0.0, now - max(rises)) if rises else None,
        steps_seen=main.seen,
        rises=main.rose,
        intervals_s=tuple(main.intervals_s) or tuple(s for each in main.phase_intervals_s.values() for s in each),
        paces_s=main.paces.recent_s(),
        longest_pace_s=main.paces.longest_s(now),
        step_s=main.step_s,
        stride=max(1, main.stride),
        widest_stride=max([1, *main.strides]),
        by_epochs=pattern in progress_table().by_epochs,
        total_steps=main.total_steps if main.seen >= TRUSTED_AFTER or not guessed else None,
        shared=any(clock.turns >= SHARED_AFTER for clock in clocks.values()),
        first_step=main.first_step if main.is_step else None,
        begun_anew=main.begun_anew,
        phase=phase[0] if phase else None,
        phase_age_s=now - phase[1] if phase else 0.0,
        phase_intervals_s=tuple(main.phase_intervals_s.get(phase[0], ())) if phase else (),
        source=source,
    )
