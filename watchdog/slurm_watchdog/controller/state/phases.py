"""Which phase the logs of a run announce, and whether it is over. Pure bookkeeping.

A phase that was announced is over by evidence alone: a step after it, the end line of the log (and rank) that
announced it, or the complete checkpoint that it announced. Each fact counts by its own date, so that the answer is the
same in whatever order, how late and how often the facts come; what is lost makes a phase longer, never shorter.

Lines of one file are in order. Between two files only dates tell, and a line may be read later than one that was
written after it: there one more step is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from slurm_watchdog.base.capped import put_newest
from slurm_watchdog.controller.state.counter_clock import Counter, CounterClock
from slurm_watchdog.model.observations import Event

SAVES = "checkpointing"
SETTLED_S = 30.0  # Files at rest for so long are no longer written: agents look every 5 s at what grows, else 30 s.
AFTER_S = 2.0  # So long after an announcement a checkpoint that is complete is its own: dates are not more exact.
NEAR_S = 10.0  # Between the date of a save and what a log says of it.
LOOKS_OF_STEPS = 2  # Looks with steps of another file after an announcement that names none: the first may be older.
MOST = 64  # Files and ranks whose announcements are kept, and checkpoints; of more, the oldest goes.

Announcer = tuple[str, str, int | None]  # (node, file, the rank that the line names).


@dataclass(frozen=True)
class Announcement:
    """One line that says that a phase begins."""

    phase: str
    at: float
    event: Event


@dataclass(frozen=True)
class Lately:
    """What was announced between two steps."""

    phase: str  # The newest one.
    silent_s: float  # The longest time of which no line says what it was for; some logs speak afterwards.


@dataclass(frozen=True)
class _Span:
    phase: str
    spoke_at: float
    from_at: float
    to_at: float  # Infinite where no line was the end of it: the next step was.
    file: tuple[str, str] | None = None  # (node, path) whose lines, in their order, told of both ends.

    def is_after(self, step_at: float, file: tuple[str, str] | None = None) -> bool:
        """Whether it is not over with a step of that date, that a line of `file` tells of. Lines of one look have one
        date: in one file their order says more."""
        if file is not None and file == self.file and step_at >= self.to_at:
            return False
        return self.from_at >= step_at or step_at < self.to_at < float("inf")


@dataclass
class _Open:
    said: Announcement
    first_at: float  # When it, or one that it replaces, was announced.


@dataclass
class Phases:
    """Those of one run."""

    _open: dict[Announcer, _Open] = field(default_factory=dict)
    """The newest announcement of each, until it is over by a step or by its end line."""
    _heard: dict[Announcer, float] = field(default_factory=dict)  # Date of the newest line of each.
    _ends: dict[Announcer, tuple[float, int | None]] = field(default_factory=dict)
    """(when, step) of the newest end line of each."""
    _complete: dict[str, tuple[int | None, float]] = field(default_factory=dict)
    """Path of a checkpoint, or of the log that speaks of one -> (step, when it was complete)."""
    _past: list[_Span] = field(default_factory=list)  # What was announced since the last step and may be over.

    @property
    def is_open(self) -> bool:
        """Whether a phase was announced that a step would end, or that counts until the next one."""
        return bool(self._open or self._past)

    def announce(self, node: str, event: Event, at: float, main: tuple[Counter, CounterClock] | None) -> None:
        """A line of a log says that a phase begins. `main`: the counter of the steps, as far as it was read."""
        assert event.phase is not None
        who = (node, event.source, event.rank)
        said = Announcement(event.phase, at, event)
        before = self._open.get(who)
        if self._heard.get(who, at) > at or self._has_ended(who, said):
            self._note_past(_Span(event.phase, at, at, float("inf")))
            return  # what is known is newer
        self._hear(who, at)
        replaces = before is not None and before.said.phase != said.phase
        opened = _Open(said, at if before is None or replaces else min(at, before.first_at))
        if main is not None and main[1].rose_at > at and (main[0][0] == event.source or _is_passed(main[1], said)):
            return
        if before is not None:
            del self._open[who]
            if replaces:
                self._note_past(_Span(before.said.phase, before.said.at, before.first_at, at, who[:2]))
        self._open[who] = opened
        while len(self._open) > MOST:
            del self._open[min(self._open, key=lambda each: self._open[each].said.at)]

    def step(self, node: str, event: Event, at: float, clock: CounterClock) -> None:
        """The step has risen, as a line of a log says; `clock` is its counter."""
        for who, opened in list(self._open.items()):
            same_file = who[:2] == (node, event.source)  # lines of one look have one date, and come in order
            if at >= opened.said.at if same_file else _is_passed(clock, opened.said):
                del self._open[who]
        self._past = [each for each in self._past if each.is_after(at, (node, event.source))]

    def end(self, node: str, event: Event, at: float) -> bool:
        """A line of a log says that a checkpoint is complete. Returns whether a save that it announced is over."""
        who = (node, event.source, event.rank)
        self._hear(who, at)
        before = self._ends.get(who)
        put_newest(self._ends, who, (at, event.step) if before is None or at >= before[0] else before, MOST)
        ended = [
            each
            for each, opened in self._open.items()
            if opened.said.phase == SAVES and opened.said.at <= at and _is_end_of(who, event.step, each, opened.said)
        ]
        for opened in map(self._open.pop, ended):
            self._note_past(_Span(SAVES, opened.said.at, opened.first_at, at, who[:2]))
        return bool(ended)

    def complete(self, path: str, step: int | None, at: float) -> None:
        """A checkpoint was complete at that moment."""
        before = self._complete.get(path)
        same = before is not None and before[0] == step and at - before[1] < AFTER_S
        put_newest(self._complete, path, before if before is not None and same else (step, at), MOST)

    def current(self, now: float, grew_at: float | None = None, *, in_saver: bool = False) -> Announcement | None:
        """The newest announcement that is not over at `now`. `grew_at`: when files of a checkpoint were last seen to
        grow; `in_saver`: the newest dump shows a rank that saves."""
        live = [
            each.said
            for each in self._open.values()
            if in_saver or self._files_were_whole_at(each.said, now, grew_at) is None
        ]
        return max(live, key=lambda said: said.at, default=None)

    def lately(self, since: float, until: float, saved_at: float, grew_at: float | None = None) -> Lately | None:
        """What was announced between two steps; None: nothing was. `saved_at`: when a checkpoint was complete last."""
        spans = [each for each in self._past if each.is_after(since)]
        for opened in self._open.values():
            over_at = self._files_were_whole_at(opened.said, until, grew_at)
            to_at = until if over_at is None else over_at
            spans.append(_Span(opened.said.phase, opened.said.at, opened.first_at, to_at))
        spans = [each for each in spans if each.from_at <= until]
        if not spans:
            return None
        spans.sort(key=lambda each: each.from_at)
        silent_s, heard_at = 0.0, since
        for each in spans:
            silent_s, heard_at = max(silent_s, each.from_at - heard_at), max(heard_at, min(each.to_at, until))
        newest = max(spans, key=lambda each: (each.to_at, each.spoke_at))
        saves = (each for each in spans if each.phase == SAVES)
        if since < saved_at <= until and not any(s.from_at - NEAR_S <= saved_at <= s.to_at + NEAR_S for s in saves):
            heard_at = min(heard_at, newest.spoke_at)  # a save that no line announced: it may come without a phase
        return Lately(newest.phase, max(silent_s, until - max(heard_at, since)))

    def _note_past(self, span: _Span) -> None:
        """Agents repeat what was announced last, and tell a new controller what was before."""
        known = any(s.phase == span.phase and abs(s.from_at - span.from_at) < NEAR_S for s in (*self._past, *self))
        if span.to_at < float("inf") or not known:
            self._past.append(span)
            del self._past[:-MOST]

    def __iter__(self) -> Iterator[_Span]:
        return (_Span(each.said.phase, each.said.at, each.said.at, float("inf")) for each in self._open.values())

    def _hear(self, who: Announcer, at: float) -> None:
        put_newest(self._heard, who, max(at, self._heard.get(who, at)), MOST)

    def _has_ended(self, who: Announcer, said: Announcement) -> bool:
        return said.phase == SAVES and any(
            at > said.at and _is_end_of(each, step, who, said) for each, (at, step) in self._ends.items()
        )

    def _files_were_whole_at(self, said: Announcement, now: float, grew_at: float | None) -> float | None:
        """When the checkpoint that was announced was complete, if its files are at rest."""
        if said.phase != SAVES:
            return None
        found = [at for step, at in self._complete.values() if _is_of(step, at, said)]
        if not found or now - max(*found, max(found) if grew_at is None else grew_at) < SETTLED_S:
            return None
        return max(found)


def _is_of(step: int | None, at: float, said: Announcement) -> bool:
    """Whether a checkpoint of this step, complete at that moment, is the one that was announced."""
    return at > said.at + AFTER_S and (step is None or said.event.step is None or step >= said.event.step)


def _is_end_of(who: Announcer, step: int | None, announcer: Announcer, said: Announcement) -> bool:
    """Whether an end line of `who` is about what the announcer said: the same file, and the same rank as far as both
    name one; of no earlier step."""
    same_rank = who[2] is None or announcer[2] is None or who[2] == announcer[2]
    earlier = step is not None and said.event.step is not None and step < said.event.step
    return who[:2] == announcer[:2] and same_rank and not earlier


def _is_passed(clock: CounterClock, said: Announcement) -> bool:
    """Whether steps that another file tells of were made after the announcement."""
    if not clock.is_step:
        return clock.rose_at > said.at + NEAR_S
    looks = sum(1 for rose_at, _ in clock.rises if rose_at > said.at)
    return looks >= LOOKS_OF_STEPS or (looks > 0 and said.event.step is not None and clock.step > said.event.step)
