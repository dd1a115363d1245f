"""Progress, phases, speed and silence of a run, from what is kept of its log. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate, pairwise, takewhile
from math import isfinite
from typing import TypeVar

from slurm_watchdog.analysis.level_shift import find_rise, quantum
from slurm_watchdog.analysis.loss_spikes import LEAST, NEWEST, PERCENT, find_spikes
from slurm_watchdog.analysis.step_statistics import BASELINE, CONFIRMED, segments
from slurm_watchdog.base.averages import median, median_low
from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.digest import HEAD_LINES, Digest
from slurm_watchdog.knowledge.frameworks import recognise
from slurm_watchdog.knowledge.limits import NAN_STEPS
from slurm_watchdog.knowledge.progress_patterns import progress_table
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.text import LogFact

T = TypeVar("T")

SKIPPED = 3  # First steps of a run, which compile, warm caches and fill pipelines.
LEAST_SPLIT = 5
"""Values on either side of a change in a series that is too short for slurm_watchdog.analysis.level_shift."""
EXCERPT_BEFORE, EXCERPT_AFTER, EXCERPT_APART = 3, 2, 3.0
"""The same in an excerpt from the middle of a run, whose steps take EXCERPT_STEP_S or more and are averages therefore:
it may be short, where both sides are that much further apart than each of them is wide."""
EXCERPT_STEP, EXCERPT_STEP_S = 100, 10.0
LEAST_LOSSES = 5
"""Losses before a spike in an excerpt, or at the beginning of a run; there it has to be FEW_PERCENT high."""
FEW_PERCENT = 25.0
AS_BEFORE = 0.1  # Of a spike's height: the loss is as before where less is left of it at a log's end.
SHIFT = 0.05
LEAST_SURE, RISE_BATCH, RISE_WINDOW = 60, 10, 160
"""Steps from which on analysis.level_shift can judge, by batches and windows as `slow_job` takes them."""
MAX_TIMES = 1000  # Step times that are searched for changes: what is compared with all before it costs the square.
RECENT = 20  # Intervals that a limit is learnt from.
BUSY_SHAPES = 25  # Sorts of lines that were not seen before: a log that says so much new is no silent one.
AVERAGED = frozenset({
    "tqdm", "tqdm_open", "tqdm_count", "nemo", "levanter", "lightning", "lightning_open", "lightning_rich",
    "yolo", "yolo_line", "torchtune", "keras",
})  # fmt: skip
"""Their rates are averages: a change shows late and smeared, so the times of the lines are compared instead."""
_NO_GRADIENT = late_regex(r"grad(?:ient)?[_ ]norm\W{1,4}nan\b", re.IGNORECASE)
SILENT_LOSSES = 5
"""So many times the usual steps between two losses may stand behind the last one: then it was the last of the run."""
BARS = frozenset({"tqdm", "tqdm_open", "tqdm_count", "ignite_bar"})
CLOCK_STEP_S = 1.0
LEAST_TICKS = 10
"""Most logs write whole seconds: steps are compared by them over 10 s and more, which a tick changes by a tenth."""


class Progress(Struct):
    framework: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    total_steps: int | None = None
    lines: int = 0
    last_line: int | None = None
    advancing: bool = False
    step_seconds_median: float | None = None
    rises: tuple[tuple[int, float | None], ...] = ()
    """(line, time) of each line whose count was higher than the one before."""
    finished: bool = False  # The log says that training is done, or its last step is the last of all.
    finished_line: int | None = None
    trained_line: int | None = None
    """Where it says so in words that no program writes that dies: who falls over is torn down and summed up, too."""


class Change(Struct):
    line: int
    step: int | None
    before_s: float
    after_s: float
    percent: float


class Note(Struct, kw_only=False):
    """What the numbers of a log show, as half a sentence, and the line at which it begins."""

    line: int
    words: str
    sure: bool = True  # Enough for a verdict; else it is only worth a word.


SPIKE_IS_NEWS = 100
"""Steps since the loss is as before: three times what most spikes take. A run that came so far has left it behind."""
ALSO_WHEN_IT_DIES = frozenset({"wandb_summary", "torn_down"})
"""Signs of an end from a `finally` or an exit handler: they say that nothing hangs, and not that all went well."""


def once(read: Callable[[Digest], T]) -> Callable[[Digest], T]:
    """The same, worked out once for each digest."""

    @wraps(read)
    def known(digest: Digest) -> T:
        if read.__name__ not in digest.known:
            digest.known[read.__name__] = read(digest)
        found: T = digest.known[read.__name__]
        return found

    return known


@once
def main_facts(digest: Digest) -> list[LogFact]:
    """The lines of the one counter that tells the run's progress: the most frequent one that counts steps."""
    steps = [fact for fact in digest.facts if fact.kind is EventKind.PROGRESS]
    if not steps:
        return []
    counted = Counter((fact.pattern, fact.step is not None) for fact in steps)
    highest: dict[tuple[str, bool], float] = {}
    rises: Counter[tuple[str, bool]] = Counter()  # beyond all before: of bars in bars each begins again
    for fact in steps:
        key = (fact.pattern, fact.step is not None)
        if key not in highest or _count(fact) > highest[key]:
            highest[key] = _count(fact)
            rises[key] += 1
    best = max(counted, key=lambda key: (rises[key] > 1, key[1], rises[key], counted[key]))
    return [fact for fact in steps if (fact.pattern, fact.step is not None) == best]


def _count(fact: LogFact) -> float:
    return float(fact.step) if fact.step is not None else fact.count or 0.0


def read_progress(digest: Digest) -> Progress:
    """How far the run came."""
    facts = main_facts(digest)
    ends = [fact for fact in digest.facts if fact.kind is EventKind.PHASE and fact.phase == "finishing"]
    if not facts:
        line = ends[-1].line if ends else None
        head = "\n".join(each.text for each in digest.lines[:HEAD_LINES]).encode(errors="replace")
        return Progress(framework=recognise(head), finished=bool(ends), finished_line=line, trained_line=_trained(ends))
    rises, before, seen = [], None, 0
    for fact in facts:
        count = _count(fact)
        # A count that goes back is a new epoch of the run; from there it rises again.
        if before is not None and count > before:
            rises.append((fact.line, fact.at))
            seen += 1
        elif before is None and not fact.initial:
            rises.append((fact.line, fact.at))
        before = count
    first, last = facts[0], facts[-1]
    total = next((f.total_steps for f in reversed(facts) if f.total_steps is not None), None)
    # What is said before the last step may be the end of an earlier run in the same log; a bar is drawn once
    # more when it is closed, and its total may be that of one bar of many.
    last_rise = rises[-1][0] if rises else facts[-1].line
    said_end = bool(ends) and ends[-1].line >= last_rise
    reached = total is not None and last.step is not None and last.step >= total and last.pattern not in BARS
    median_s = _median_step(facts)
    return Progress(
        framework=progress_table().frameworks.get(last.pattern, last.pattern),
        first_step=first.step,
        last_step=last.step,
        total_steps=total,
        lines=sum(fact.stands_for for fact in facts),
        last_line=facts[-1].line,
        advancing=seen > 0,
        step_seconds_median=None if median_s is None else round(median_s, 4),
        rises=tuple(rises),
        finished=said_end or reached,
        finished_line=ends[-1].line if said_end else facts[-1].line if reached else None,
        trained_line=facts[-1].line
        if reached and not said_end
        else _trained([fact for fact in ends if fact.line >= last_rise]),
    )


def _trained(ends: Sequence[LogFact]) -> int | None:
    return max((fact.line for fact in ends if fact.pattern not in ALSO_WHEN_IT_DIES), default=None)


def _steps_taken(facts: Sequence[LogFact]) -> list[tuple[LogFact, float]]:
    taken, before = [], None
    for fact in facts:
        if before is not None and fact.at is not None and before.at is not None:
            steps = _count(fact) - _count(before)
            seconds = fact.at - before.at
            if steps >= 1 and seconds > 0:
                taken.append((fact, seconds / steps))
            elif steps >= 1 and seconds == 0:
                continue  # within one tick of the log's clock: counted with the steps that follow
        if before is None or _count(fact) != _count(before):
            before = fact
    return taken


def _logged(facts: Sequence[LogFact]) -> list[tuple[LogFact, float]]:
    pairs, seen = [], None
    for fact in facts:
        if fact.step_s and isfinite(fact.step_s) and fact.step_s > 0 and _count(fact) != seen:
            pairs.append((fact, fact.step_s))
            seen = _count(fact)
    return pairs


def step_times(facts: Sequence[LogFact]) -> list[tuple[LogFact, float]]:
    """(line, seconds of one step): as the lines say it or, where they don't or only as an average, from their times."""
    logged, taken = _logged(facts), _steps_taken(facts)
    averaged = bool(facts) and facts[0].pattern in AVERAGED
    if logged and not averaged:
        return logged
    if len(taken) >= max(LEAST_SPLIT, len(facts) // 2):
        return taken
    return logged


def _median_step(facts: Sequence[LogFact]) -> float | None:
    times = step_times(facts)
    return median(seconds for _, seconds in times) if times else None


@once
def read_changes(digest: Digest) -> tuple[Change, ...]:
    """Where the time of a step changed by SHIFT or more and stayed so; of one batch size each."""
    facts = main_facts(digest)
    if not facts or (facts[0].pattern in AVERAGED and not _steps_taken(facts)):
        return ()
    times = step_times(facts)
    # It begins in the middle of a run whose steps are long.
    excerpt = _count(facts[0]) > EXCERPT_STEP and min((s for _, s in times), default=0.0) >= EXCERPT_STEP_S
    times = times if excerpt and len(times) < BASELINE else _without_first(times)
    logged = any(fact.step_s for fact, _ in times) and facts[0].pattern not in AVERAGED
    changes: list[Change] = []
    for whole in _of_one_batch(times):
        same = _thinned(whole if logged else _over_ticks(whole))
        values = [round(seconds, 6) for _, seconds in same]
        if len(values) >= BASELINE + CONFIRMED:
            for before, after in pairwise(segments(tuple(values), SHIFT)):
                changes.append(_change(same[after.begin][0], before.level, after.level))
        else:
            split = _short_split(values, excerpt)
            if split is not None:
                changes.append(_change(same[split][0], median(values[:split]), median(values[split:])))
    return tuple(change for change in changes if abs(change.percent) >= 100 * SHIFT * 0.8)


@once
def read_slower(digest: Digest) -> Note | None:
    """The change after which steps take longer, up to the end; in a long run sure only where `slow_job` would be."""
    changes = read_changes(digest)
    if not changes or changes[-1].percent <= 0:
        return None
    change, sure = changes[-1], True
    newest = _of_one_batch(_without_first(step_times(main_facts(digest))))[-1:]
    seconds = [each for _, each in newest[0]] if newest else []
    if len(seconds) >= LEAST_SURE:
        found = find_rise(seconds, list(accumulate(seconds)), SHIFT, RISE_BATCH, RISE_WINDOW, quantum(seconds))
        sure = found is not None
    since = f"step {change.step}" if change.step is not None else f"line {change.line}"
    steps, noise = ("steps take", "") if sure else ("steps may take", "; its other steps vary as much")
    words = f"{steps} {change.percent:.1f} % longer since {since} (line {change.line}): "
    return Note(change.line, f"{words}{change.after_s:.4g} s, {change.before_s:.4g} s before{noise}", sure)


def _over_ticks(times: list[tuple[LogFact, float]]) -> list[tuple[LogFact, float]]:
    """The same, each over as many steps as take LEAST_TICKS ticks of a clock of whole seconds, at the first's place."""
    found: list[tuple[LogFact, float]] = []
    begun: tuple[LogFact, float, float] | None = None
    for fact, _ in times:
        count, at = _count(fact), fact.at
        if at is None or begun is None or count < begun[1]:
            begun = None if at is None else (fact, count, at)
        elif at - begun[2] >= LEAST_TICKS * CLOCK_STEP_S and count > begun[1]:
            found.append((begun[0], (at - begun[2]) / (count - begun[1])))
            begun = (fact, count, at)
    return found


def _thinned(times: list[tuple[LogFact, float]]) -> list[tuple[LogFact, float]]:
    """At most MAX_TIMES of them: of more, the median of so many neighbours each, with the first one's place."""
    apart = -(-len(times) // MAX_TIMES)
    if apart < 2:
        return times
    groups = [times[at : at + apart] for at in range(0, len(times), apart)]
    return [(group[0][0], median_low([seconds for _, seconds in group])) for group in groups]


def steps_between(times: Sequence[tuple[LogFact, float]]) -> float:
    counts = [_count(fact) for fact, _ in times]
    gaps = [b - a for a, b in pairwise(counts) if b > a]
    return median(gaps) if gaps else 1.0


def _without_first(times: list[tuple[LogFact, float]]) -> list[tuple[LogFact, float]]:
    kept, run = [], 0
    before: float | None = None
    for fact, seconds in times:
        count = _count(fact)
        run = 0 if before is not None and count <= before else run + 1
        if run >= (SKIPPED if len(times) >= BASELINE else 1):
            kept.append((fact, seconds))
        before = count
    return kept


def _of_one_batch(times: list[tuple[LogFact, float]]) -> list[list[tuple[LogFact, float]]]:
    parts: list[list[tuple[LogFact, float]]] = []
    for pair in times:
        if parts and parts[-1][-1][0].batch == pair[0].batch:
            parts[-1].append(pair)
        else:
            parts.append([pair])
    return parts


def _short_split(values: list[float], excerpt: bool) -> int | None:
    """In a short series: where all values from there lie beyond all before, by SHIFT and far beyond their scatter."""
    least_before, least_after = (EXCERPT_BEFORE, EXCERPT_AFTER) if excerpt else (LEAST_SPLIT, LEAST_SPLIT)
    for place in range(least_before, len(values) - least_after + 1):
        before, after = values[:place], values[place:]
        low, high = sorted((before, after), key=median)
        apart = min(high) - max(low)
        spread = max(max(low) - min(low), max(high) - min(high))
        few = min(len(before), len(after)) < LEAST_SPLIT
        if median(high) >= median(low) * (1 + SHIFT) and apart > spread * (EXCERPT_APART if few else 1):
            return place
    return None


def _change(fact: LogFact, before: float, after: float) -> Change:
    return Change(
        line=fact.line,
        step=fact.step,
        before_s=round(before, 4),
        after_s=round(after, 4),
        percent=round(100 * (after / before - 1), 1) if before else 0.0,
    )


def read_phases(digest: Digest) -> list[dict[str, object]]:
    """The phases that the log names, in order; repeated lines of one are one phase. Training is what lies between."""
    phases: list[dict[str, object]] = []
    counts: dict[str, float] = {}
    for fact in digest.facts:
        kind = fact.kind
        if kind is EventKind.PROGRESS:
            count = counts.get(fact.pattern)
            counts[fact.pattern] = _count(fact)
            if count == _count(fact) and phases:
                continue  # drawn again
        name = (
            fact.phase
            if kind is EventKind.PHASE
            else fact.phase or "training"
            if kind is EventKind.PROGRESS
            else "checkpoint_complete"
        )
        if name is None:
            continue
        if phases and phases[-1]["phase"] == name:
            phases[-1]["last_line"] = fact.line
            if fact.step is not None:
                phases[-1]["last_step"] = fact.step
            continue
        step = fact.step
        phases.append({"phase": name, "line": fact.line, "last_line": fact.line, "step": step, "last_step": step})
    return phases[:200]


def _is_no_number(fact: LogFact) -> bool:
    """A loss that is no number, or one of zero whose gradient is none: so half precision shows it when summed up."""
    loss = fact.loss
    return loss is not None and (not isfinite(loss) or (loss == 0.0 and _NO_GRADIENT.search(fact.text) is not None))


def _with_loss(digest: Digest) -> list[LogFact]:
    """The lines that tell the loss: those of the run's progress or, where a bar counts and has none, those beside."""
    main = main_facts(digest)
    with_loss = [fact for fact in main if fact.loss is not None]
    if with_loss or not main:
        return with_loss
    beside: dict[str, list[LogFact]] = {}
    for fact in digest.facts:
        if fact.kind is EventKind.PROGRESS and fact.loss is not None:
            beside.setdefault(fact.pattern, []).append(fact)
    with_loss = max(beside.values(), key=len, default=[])
    if len(with_loss) < 2:
        return with_loss
    reached = [
        max((_count(f) for f in main if f.line <= each.line), default=0.0) for each in (with_loss[0], with_loss[-1])
    ]
    usual = (reached[1] - reached[0]) / (len(with_loss) - 1)
    return with_loss if _count(main[-1]) - reached[1] <= SILENT_LOSSES * max(usual, 1.0) else []


@once
def read_loss_jump(digest: Digest) -> Note | None:
    """The last spike of the loss in the last run of the log."""
    facts = [fact for fact in _with_loss(digest) if fact.loss is not None and isfinite(fact.loss)]
    begin = max((at for at in range(1, len(facts)) if _count(facts[at]) < _count(facts[at - 1])), default=0)
    facts = [
        fact for at, fact in enumerate(facts) if at == begin or (at > begin and _count(fact) > _count(facts[at - 1]))
    ]
    losses = [fact.loss or 0.0 for fact in facts]
    few = len(losses) < LEAST + NEWEST
    spikes = find_spikes(losses, FEW_PERCENT if few else PERCENT, LEAST_LOSSES if few else LEAST)
    if not spikes:
        return None
    last = spikes[-1]
    high = last.usual + AS_BEFORE * (losses[last.peak] - last.usual)
    end = last.end
    if end is None and losses[-1] < high:  # too few since to be sure in a run that continues
        end = next(at + 1 for at in range(len(losses) - 1, -1, -1) if losses[at] >= high)
    peak, back = facts[last.peak], None if end is None else facts[end]
    since = 0 if back is None else _count(facts[-1]) - _count(back)
    at = f"step {peak.step}" if peak.step is not None else f"line {peak.line}"
    where = f"step {back.step}" if back is not None and back.step is not None else "the end"
    after = "it is still high at the end" if back is None else f"it was back by {where}"
    words = f"the loss jumped from {last.usual:.3g} to {losses[last.peak]:.3g} at {at} (line {peak.line}); {after}"
    return Note(peak.line, words, since <= SPIKE_IS_NEWS)


def read_no_number(digest: Digest) -> Note | None:
    """The loss that is no number NAN_STEPS times in a row, up to the end of the log."""
    facts = _with_loss(digest)
    times, line = digest.lone_losses
    step = None
    if facts or times < NAN_STEPS:
        bad = list(takewhile(_is_no_number, reversed(facts)))
        if len(bad) < NAN_STEPS:
            return None
        times, line, step = sum(fact.stands_for for fact in bad), bad[-1].line, bad[-1].step
    step = _step_at(digest, line) if step is None else step
    since = f"step {step}" if step is not None else f"line {line}"
    words = f"the loss has been NaN or infinite since {since} (line {line}), {times} times in a row up to the end"
    return Note(line, words)


def _step_at(digest: Digest, line: int) -> int | None:
    return next((f.step for f in reversed(main_facts(digest)) if f.line <= line), None)
