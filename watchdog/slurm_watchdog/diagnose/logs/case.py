"""The logs of one job while they are judged, the verdict over them, and which errors a run survived: it made steps,
came to its end, or said that it tries again. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.digest import Digest
from slurm_watchdog.diagnose.logs.line import Who
from slurm_watchdog.diagnose.logs.progress import Note, Progress, main_facts
from slurm_watchdog.diagnose.logs.ranks import Ranks
from slurm_watchdog.diagnose.logs.tracebacks import FoundError
from slurm_watchdog.knowledge.log_signatures import log_table


@dataclass
class Source:
    """One file of a job, with what was read in it."""

    path: str
    digest: Digest
    progress: Progress
    errors: list[FoundError]
    silence: Note | None = None
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
    """`was killed (SIGKILL)`, `exited with code 1`, by a launcher or Slurm, of a process that said nothing itself."""


class LogCase(msgspec.Struct):
    """All errors of a job in their order, and what was made of them."""

    sources: Sequence[Source]
    ranks: Ranks
    errors: list[FoundError]
    timed: bool = True  # Whether the errors of different files can be put in order.
    said: Mapping[str, frozenset[int]] = msgspec.field(default_factory=dict)
    """Row of the signatures -> ranks that said so, where more of them did than lines were kept."""


def after_step(case: LogCase, error: FoundError | None = None) -> str:
    """After which step; of an error the last one of its rank."""
    step = max((s.progress.last_step for s in case.sources if s.progress.last_step is not None), default=None)
    if error is not None and (own := _own_step(case, error)) is not None:
        return f", after step {own[0]}{'' if own[1] else ' or later'}"
    return f", after step {step}" if step is not None else ""


def _own_step(case: LogCase, error: FoundError) -> tuple[int, bool] | None:
    """The last one of its rank that was parsed, and whether it made none after it."""
    source, rank = case.sources[error.source], case.ranks.rank_of(error.who)
    steps = [fact for fact in main_facts(source.digest) if fact.step is not None]
    shared = len({fact.rank for fact in steps}) > 1
    if rank is not None and shared:
        steps = [fact for fact in steps if fact.rank == rank]
    elif len(case.sources) < 2:
        return None
    last = steps[-1] if steps else None
    return None if last is None or last.step is None else (last.step, not shared or last.stands_for == 1)


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


STEP_SLACK_S = 2.0
"""A step that is logged so soon after an error may have been made before it, by the ranks that had not noticed yet."""
ENOUGH_RISES = 2
"""So many new steps after an error, and it was no matter. One may have been made by ranks that had not noticed."""
USUAL = 2  # Exceptions of one type that a stream survived: another one by itself ends no run.
QUIET_LINES = 12  # Ordinary lines after an error in its stream, and nothing that ends the run: it continues.
LONG_AFTER = 200  # Lines between an error and the word that training is done, if it is to be of an earlier try.
SOFT = frozenset(
    {"python_exception", "permission", "network", "missing_file", "import_error", "config_error",
    "dataset_error", "shape_mismatch",
     "dtype_device", "too_many_files", "loss_nan", "checkpoint_mismatch", "checkpoint_corrupt", "assertion",
     "io_error", "cuda_unavailable",
     "xla_error", "port_in_use", "nccl_interface", "read_only", "stale_file_handle", "host_oom",
     "shared_memory", "traceback", "abort", "fatal_log", "process_limit", "program_error"}
)  # fmt: skip
"""Programs say so, too, of what they can do without: such a line alone, in the middle of a log, ends no run."""
OF_CHILDREN = frozenset({"segmentation_fault", "bus_error", "floating_point_trap", "abort", "glibc_abort", "killed"})
"""How a process ends, said by a shell: the code that a model wrote, and no rank."""
_SAID_BY_ITSELF = late_regex(
    r"\s*(?:\[|srun|slurmstepd|NVRM|Memory cgroup|Out of memory|[\w.]*(?:Error|Exception)\b)", re.IGNORECASE
)
AFTER_END = frozenset({"permission", "network", "loss_nan"})  # What is said in passing when training is done.


def is_root(error: FoundError) -> bool:
    return error.name not in log_table().consequences


def was_survived(error: FoundError, case: LogCase) -> bool:
    if error.ignored:
        return True
    source = case.sources[error.source]
    rises = rises_after(error, case)
    if rises >= ENOUGH_RISES or (rises and any(s.progress.trained_line is not None for s in case.sources)):
        return True
    # NCCL may only warn that it did not reach a peer, who may not listen yet.
    warns = not error.traceback and error.name == "peer_lost" and "NCCL WARN" in error.raw_text
    if error.retried and (is_root(error) or warns):
        return True
    finished, trained = source.progress.finished_line, source.progress.trained_line
    later = trained is not None and trained > error.line + (0 if not is_root(error) else LONG_AFTER)
    if trained is not None and later and error.line < trained <= _ends_at(error, source):
        return True  # an earlier try: the log continues to the end of training
    if (
        finished is not None
        and error.line > finished
        and (not is_root(error) or (error.name in log_table().after_sigterm | AFTER_END and not error.traceback))
    ):
        return True
    if trained is not None and error.line > trained and _is_told(error, source):
        return True
    trained_elsewhere = any(s.progress.trained_line is not None for s in case.sources)
    if len(case.sources) > 1 and trained_elsewhere and not error.traceback:
        return True
    return _goes_on_quietly(error, source)


def _is_told(error: FoundError, source: Source) -> bool:
    """Whether a sentence names it (a summary): no exception, no line of Slurm or the kernel, and nothing died of it."""
    if error.traceback or _SAID_BY_ITSELF.match(error.text):
        return False
    return not any(each.line > error.line and not is_root(each) for each in source.errors)


def is_usual(alive: Sequence[FoundError], case: LogCase) -> bool:
    """Whether all that was not survived are exceptions of a type that their stream had survived often (code that a
    model wrote, samples that are skipped)."""
    # A process with a name of its own may tell how one ended: that it survives itself.
    soft = [e.name in SOFT or (e.who.pid is not None and e.name in OF_CHILDREN and not e.traceback) for e in alive]
    if not alive or not all(soft):
        return False
    left = {id(error) for error in alive}
    survived = Counter(_sort(error) for error in case.errors if id(error) not in left)
    return all(survived[_sort(error)] >= USUAL for error in alive)


def _sort(error: FoundError) -> tuple[int, Who, bool, str]:
    return error.source, error.who, error.traceback, error.text.partition(":")[0]


def _ends_at(error: FoundError, source: Source) -> float:
    """The line at which the part of a file ends in which an error stands: its next heading, or the end of the file."""
    headings = source.digest.headings
    place = bisect_right(headings, error.line)
    return headings[place] if place < len(headings) else float("inf")


def rises_after(error: FoundError, case: LogCase) -> int:
    """How many new steps were logged after an error: by time where both have one, else by lines of the same file."""
    most = 0
    for number, source in enumerate(case.sources):
        rises = source.progress.rises
        if error.own_time and error.at is not None and source.rise_times:
            count = len(source.rise_times) - bisect_right(source.rise_times, error.at + STEP_SLACK_S)
            if number != error.source and not case.timed:
                count = 0
        elif number == error.source:
            places = [line for line, _ in rises]
            count = bisect_right(places, _ends_at(error, source)) - bisect_right(places, error.line)
        else:
            later = number > error.source and case.sources[error.source].goes_on_in(source)
            count = len(rises) if later else 0
        most = max(most, count)
    return most


def _goes_on_quietly(error: FoundError, source: Source) -> bool:
    """Whether its stream says many ordinary things after an error of the soft kind, and no further error is logged."""
    if error.name not in SOFT or error.line < source.last_error_line:
        return False
    ordinary = (
        line
        for line in reversed(source.digest.lines)
        if line.number > error.line and (line.stamp is not None or line.level == "info")
        and line.who == error.who and line.text.strip()
    )  # fmt: skip
    return len(list(islice(ordinary, QUIET_LINES))) == QUIET_LINES
