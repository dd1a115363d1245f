"""Errors that a run survived: it made steps, came to its end, or said that it tries again. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.case import LogCase, Source
from slurm_watchdog.diagnose.logs.line import Who
from slurm_watchdog.diagnose.logs.tracebacks import FoundError
from slurm_watchdog.knowledge.log_signatures import log_table

STEP_SLACK_S = 2.0
"""A step that is logged so soon after an error may have been made before it, by the ranks that had not noticed yet."""
ENOUGH_RISES = 2
"""So many new steps after an error, and it was no matter. One may have been made before it, by the ranks that
had not noticed."""
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
    """Whether a sentence names it, such as the summary of a run that is done: no exception, no word of Slurm or the
    kernel, and nothing died of it."""
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
    """How many new steps were logged after an error: by time where both have one, else by their lines in the
    same file."""
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
        if source.digest.segments is not None:
            segments = source.digest.segments
            count = sum(1 for line, _ in rises if line > error.line and segments.get(line) == error.segment)
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
