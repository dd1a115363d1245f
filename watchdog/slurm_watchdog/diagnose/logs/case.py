"""The logs of one job while they are judged, the verdict over them, and the words for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from slurm_watchdog.diagnose.logs.digest import Digest
from slurm_watchdog.diagnose.logs.progress import Change, LossJump, NoNumber, Progress, main_facts
from slurm_watchdog.diagnose.logs.ranks import Ranks
from slurm_watchdog.diagnose.logs.silence import Silence, Waiting
from slurm_watchdog.diagnose.logs.tracebacks import FoundError


@dataclass
class Source:
    """One file of a job, with what was read in it."""

    path: str
    digest: Digest
    progress: Progress
    errors: list[FoundError]
    silence: Silence | None = None
    no_number: NoNumber | None = None
    loss_jump: LossJump | None = None
    slower: Change | None = None
    waiting: Waiting | None = None
    roles: dict[int, str] = field(default_factory=dict)  # Of each error's place its role.
    rank: int | None = None
    host: str | None = None  # Whose file it is, by its name.
    part_of: str | None = None
    """Of an older part of a log that was rotated: the newest one's path. What comes after its end stands there."""

    def goes_on_in(self, other: Source) -> bool:
        """Whether this is an older part, and `other`, which comes later among the sources, a newer one of the same."""
        return self.part_of is not None and self.part_of in (other.path, other.part_of)

    @cached_property
    def rise_times(self) -> list[float]:
        """When its steps were made, in order; empty where the last ones have no time."""
        rises = self.progress.rises
        return sorted(at for _, at in rises if at is not None) if all(at is not None for _, at in rises[-3:]) else []

    @cached_property
    def last_error_line(self) -> int:
        """0 if there is no error."""
        return max((error.line for error in self.errors), default=0)


class LogVerdict(msgspec.Struct, frozen=True):
    name: str
    line: int | None
    source: int
    summary: str
    host: str | None = None
    rank: int | None = None
    text: str = ""
    first_ranks: tuple[int, ...] = ()
    alike: int = 0  # Processes that ended alike, where a launcher or Slurm says so of several.
    followed: int = 0
    missing: tuple[int, ...] = ()
    suspected: str = ""  # Why the missing ones are suspect, half a sentence.
    explained: bool = True  # Whether a line says what went wrong; else only what follows from it is known.
    how: str = ""
    """`was killed (SIGKILL)`, `exited with code 1`, where a launcher or Slurm says it of a process that said
    nothing itself."""


class LogCase(msgspec.Struct):
    """All errors of a job in their order, and what was made of them."""

    sources: Sequence[Source]
    ranks: Ranks
    errors: list[FoundError]
    role: dict[int, str] = msgspec.field(default_factory=dict)  # By id of the error.
    timed: bool = True  # Whether the errors of different files can be put in order.
    said: Mapping[str, frozenset[int]] = msgspec.field(default_factory=dict)
    """Row of the signatures -> ranks that said so, where more of them did than lines were kept."""


def after_step(case: LogCase, error: FoundError | None = None) -> str:
    """After which step; of an error the last one of its rank, or that was logged before it in its excerpt."""
    step = max((s.progress.last_step for s in case.sources if s.progress.last_step is not None), default=None)
    if error is not None:
        own = _own_step(case, error)
        step = step if own is None else own
    segments = case.sources[error.source].digest.segments if error is not None else None
    if error is not None and segments is not None:
        steps = case.sources[error.source].digest.facts
        before = [f.fact.step for f in steps if segments.get(f.line) == error.segment and f.line < error.line]
        step = next((each for each in reversed(before) if each is not None), None)
    return f", after step {step}" if step is not None else ""


def _own_step(case: LogCase, error: FoundError) -> int | None:
    """The last step in the log of the rank that said it, or in its lines where several ranks log their steps."""
    source, rank = case.sources[error.source], case.ranks.rank_of(error.who)
    steps = [(fact.fact.rank, fact.fact.step) for fact in main_facts(source.digest) if fact.fact.step is not None]
    if rank is not None and len({each for each, _ in steps}) > 1:
        steps = [(each, step) for each, step in steps if each == rank]
    elif len(case.sources) < 2:
        return None
    return steps[-1][1] if steps else None


def said_whole(error: FoundError) -> str:
    """What an error says; with the line below it where it announces that one."""
    announces = error.text.rstrip().endswith(":") and error.detail
    return f"{error.text.rstrip()} {error.detail[0]}" if announces else error.text


def rank_words(rank: int | None, host: str | None) -> str:
    """`rank 3 on n1`, or what of it is known; empty if nothing is."""
    if rank is None:
        return f"host {host}" if host is not None else ""
    return f"rank {rank}" + (f" on {host}" if host is not None else "")


def sentence(text: str) -> str:
    """`text` with a capital and one full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."
