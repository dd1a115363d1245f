"""What the time of one run went to, as pieces of that time, so that of a run which is longer than a report exactly what
lies within the report's days is counted. Pure.

A run is divided in this order; each takes what is left of its time:
  start       from its beginning to its first new step: `first start`, or `restart` where a run came before;
  waiting     from its last new step to its end, under the kind of the incident that was open then, else `ended STATE`;
              what of it came before the incident was reported is beside that its time `to be noticed`;
  recomputed  steps that the next run made again, which are its last ones, and those before an incident that a restart
              in its allocation made again;
  effective   the steps that were kept: it is known how many, not when; they are spread over what is left;
  incidents   in between, for as long as they were open, divided in the same way;
  other       what remains: evaluations, checkpoints, steps slower than usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.run_record import RunRecord, Spell
from slurm_watchdog.model.slurm_states import ALIVE, FAILED

FIRST_START, RESTART, RECOMPUTED, OTHER = "first start", "restart", "recomputed steps", "other"
KEPT = "kept"
SLACK_S = 60.0  # An incident that began so long after a run's end is still about it.
PROMPT_STEPS = 3.0
"""The end of a run is no wait if it came within so many steps (and PROMPT_S) of the last, without an incident."""
PROMPT_S = 30.0
LEAST_S = 1e-5  # Less than this is an error of rounding: dates are exact to some tenths of a microsecond.
Piece = tuple[float, float]  # From one date to another.


class Part(Struct):
    """What some time of a run went to."""

    cause: str  # KEPT, or what it was lost to.
    pieces: tuple[Piece, ...]
    share: float = 1.0  # Of these pieces; the rest of them is in another part.


class Division(Struct):
    """All of a run's time, and what of it waited to be noticed."""

    parts: tuple[Part, ...]
    to_be_noticed: tuple[Part, ...] = ()


def seconds_within(parts: Iterable[Part], since: float, until: float) -> dict[str, float]:
    """Cause -> seconds between two dates."""
    found: dict[str, float] = defaultdict(float)
    for part in parts:
        found[part.cause] += part.share * sum(max(0.0, min(high, until) - max(low, since)) for low, high in part.pieces)
    return {cause: seconds for cause, seconds in found.items() if seconds >= LEAST_S}


def divide(run: RunRecord, following: RunRecord | None, spells: Iterable[Spell], *, is_first: bool) -> Division | None:
    """What a run's time went to; None if its steps are not known. `spells`: the incidents of this run; `is_first`: no
    run of the job came before it."""
    ordered = sorted(spells, key=lambda each: each.began_at)
    if run.first_rise_at is None or run.last_rise_at is None or run.first_step is None or run.last_step is None:
        return _stepless(run, ordered)
    parts: list[Part] = []
    unseen: list[Part] = []

    def wait(cause: str, pieces: Sequence[Piece], about: Iterable[Spell], share: float = 1.0) -> None:
        parts.append(Part(cause=cause, pieces=tuple(pieces), share=share))
        reported = [each.fired_at for each in about if each.fired_at is not None]
        if reported:
            before, _ = _split(pieces, float("-inf"), min(reported))
            unseen.append(Part(cause=cause, pieces=tuple(before), share=share))

    ended_at = end_of(run)
    started, free = _split([(run.began_at, ended_at)], run.began_at, run.first_rise_at)
    parts.append(Part(cause=FIRST_START if is_first else RESTART, pieces=tuple(started)))
    about = _about(run, ordered)
    is_prompt = ended_at - run.last_rise_at <= max(PROMPT_S, PROMPT_STEPS * (run.step_s or 0.0) * run.stride)
    if run.ended_at is not None and (about or not is_prompt):
        waited, free = _split(free, run.last_rise_at, ended_at)
        wait(_why_it_waited(run, about), waited, about)

    made = max(0, run.last_step - run.first_step)
    again = 0
    if following is not None and following.first_step is not None:
        again = min(made, max(0, run.last_step - following.first_step))
    step_s = run.step_s or max(0.0, run.last_rise_at - run.first_rise_at) / max(1, made)
    recomputed, free = _split_last(free, again * step_s, ended_at)
    for each in (each for each in ordered if each.recomputed_s > 0):
        near, free = _split_last(free, each.recomputed_s, each.began_at)
        more, free = _split_last(free, each.recomputed_s - _length(near), ended_at)
        recomputed += near + more
    parts.append(Part(cause=RECOMPUTED, pieces=tuple(recomputed)))

    kept_s = min(_length(free), (made - again) * step_s)
    left_s, rest = _length(free) - kept_s, list[Part]()
    for each in ordered:
        if run.first_rise_at <= each.began_at < run.last_rise_at:
            open_, free = _split(free, each.began_at, min(each.ended_at, run.last_rise_at))
            open_s = _length(open_)
            share = min(max(0.0, left_s), open_s) / open_s if open_s > 0 else 0.0
            left_s -= share * open_s
            wait(each.kind, open_, [each], share)
            rest.append(Part(cause=OTHER, pieces=tuple(open_), share=1.0 - share))
    rest.append(Part(cause=OTHER, pieces=tuple(free)))
    rest_s = sum(each.share * _length(each.pieces) for each in rest)
    kept = kept_s / rest_s if rest_s > 0 else 0.0
    for part in rest:
        parts.append(Part(cause=KEPT, pieces=part.pieces, share=part.share * kept))
        parts.append(Part(cause=OTHER, pieces=part.pieces, share=part.share * (1.0 - kept)))
    return Division(parts=tuple(parts), to_be_noticed=tuple(unseen))


def _stepless(run: RunRecord, spells: Sequence[Spell]) -> Division | None:
    """A run that failed before its first step has done nothing that counts, if its job is one whose steps are read."""
    if run.ended_at is None or not has_failed(run, spells):
        return None
    whole = ((run.began_at, end_of(run)),)
    return Division(parts=(Part(cause=_why_it_waited(run, _about(run, spells)), pieces=whole),))


def _about(run: RunRecord, spells: Iterable[Spell]) -> list[Spell]:
    """The incidents that were open from its last new step on, the first of them first."""
    last_at = run.last_rise_at or run.began_at
    about = (each for each in spells if last_at - SLACK_S <= each.began_at <= end_of(run) + SLACK_S)
    return sorted(about, key=lambda each: each.began_at)


def _why_it_waited(run: RunRecord, about: Sequence[Spell]) -> str:
    if about:
        return about[0].kind
    return f"ended {run.state}" if run.state and run.state not in ALIVE else "waiting"


def has_failed(run: RunRecord, spells: Iterable[Spell]) -> bool:
    """Whether it ended by itself with an error, or by an action for an incident."""
    if run.ended_at is None:
        return False
    about = [each for each in spells if run.began_at <= each.began_at <= end_of(run) + SLACK_S]
    if any(each.acted and not each.planned for each in about):
        return True
    as_planned = any(each.planned and each.ended_at >= end_of(run) - SLACK_S for each in about)
    return run.state in FAILED and not as_planned


def end_of(run: RunRecord) -> float:
    """When it ended, or was seen last (a date)."""
    return run.seen_at if run.ended_at is None else run.ended_at


def _length(pieces: Iterable[Piece]) -> float:
    return sum(high - low for low, high in pieces)


def _split(pieces: Iterable[Piece], begin: float, end: float) -> tuple[list[Piece], list[Piece]]:
    """What of the pieces lies between two dates, and the rest, both in order of time."""
    inside, outside = list[Piece](), list[Piece]()
    for low, high in pieces:
        cut = max(low, begin), min(high, end)
        if cut[0] < cut[1]:
            inside.append(cut)
            outside += [each for each in ((low, cut[0]), (cut[1], high)) if each[0] < each[1]]
        elif low < high:
            outside.append((low, high))
    return inside, outside


def _split_last(pieces: Sequence[Piece], seconds: float, before: float) -> tuple[list[Piece], list[Piece]]:
    """The last so many seconds of the pieces before a date, and the rest."""
    if seconds <= 0:
        return [], list(pieces)
    begin = before
    for low, high in reversed(pieces):
        if seconds > 0 and low < (end := min(high, before)):
            begin = max(low, end - seconds)
            seconds -= end - begin
    return _split(pieces, begin, before)
