"""A run of which no line says why it ended: who is missing from the cascade, what launcher or Slurm saw die. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.text import listed, shortened
from slurm_watchdog.diagnose.logs.attribution import rank_of_dead_process, task_of
from slurm_watchdog.diagnose.logs.case import LogCase, LogVerdict, after_step, rank_words, sentence
from slurm_watchdog.diagnose.logs.collective_timeouts import Suspects, group_is_all, lost_rank, suspects_of
from slurm_watchdog.diagnose.logs.first_to_end import FirstToEnd, first_to_end
from slurm_watchdog.diagnose.logs.line import Who
from slurm_watchdog.diagnose.logs.ranks import short_host
from slurm_watchdog.diagnose.logs.tracebacks import FoundError
from slurm_watchdog.knowledge.launcher_exits import Ending
from slurm_watchdog.knowledge.log_signatures import log_table

TIMED_OUT = (
    "nccl_watchdog",
    "collective_timeout",
    "barrier_timeout",
    "collective_desync",
    "heartbeat_lost",
    "watchdog_stuck",
)
_REMOTE_DAEMON = late_regex(r"Remote daemon: \[\[\d+,\d+\],\d+\] on node (?P<host>[\w.-]+)")
_DEAD_NODE = late_regex(r"\baddress: (?P<host>[\w.:-]+)(?: and node name: \S+)? has been marked dead\b")
_CLOSED_BY = late_regex(
    r"\bNCCL WARN .{0,120}\bConnection (?:closed|reset) by (?:remote )?peer (?P<peer>[A-Za-z0-9][\w.-]{0,250})<\d+>"
)
FEW = 3  # So many are all in the sentence.
_OF_CPP = late_regex(r"\s*(?:what\(\):|terminate called|NCCL watchdog)|.*\bwatchdog thread")
"""Such an error ends its process by an abort, one of Python with code 1."""
OWN_CUDA = late_regex(r"unhandled cuda error|ncclUnhandledCudaError", re.IGNORECASE)
"""NCCL's word for a call of CUDA that failed in its own process: no peer has brought it."""
LAST_CHOICE = ("launcher", "task_exit", "killed", "mpi_abort", "terminated", "ray_actor_died")


def of_consequences(case: LogCase, felt_errors: list[FoundError], ended_by: FoundError | None) -> LogVerdict | None:
    """No line says why. What is known: who ended first by the words of a launcher or of Slurm, who is missing from the
    cascade.

    `ended_by` is the line with which someone ended the run from outside.
    """
    timeouts = [error for error in felt_errors if error.name in TIMED_OUT]
    felt = [
        error
        for error in felt_errors
        if error.name in log_table().felt and error.name not in LAST_CHOICE and not error.weak
    ]
    cut = _cut(case, ended_by)
    first = _first_to_end(case, felt, cut)
    one = first.one if first is not None else None
    if ended_by is not None and not timeouts and not _failed_before(ended_by, first):
        return None
    if one is not None and one.first_hand and (not timeouts or one.line < timeouts[0].line):
        return _of_end(case, one, felt_errors)
    if timeouts:
        return _of_timeouts(case, timeouts, felt_errors)
    died = [error for error in felt_errors if error.name == "ray_actor_died"]
    if died and rank_of_dead_process(case)[0] not in (None, *(case.ranks.rank_of(error.who) for error in felt)):
        return _of_ends(case, died, felt_errors)
    if one is not None and (one.rank is not None or not felt):
        return _of_end(case, one, felt_errors)
    if felt:
        return _of_lost(case, felt, felt_errors) or _unexplained(case, felt[0], felt_errors)
    last = [e for e in felt_errors if not _ends_nothing(e) and (cut is None or e.line < cut or e.name != "task_exit")]
    if not last:
        return None
    if first is not None and not any(error.name in ("ray_actor_died", "mpi_abort") for error in last):
        return _of_several(case, first, felt_errors)
    return _of_ends(case, last, felt_errors)


def _cut(case: LogCase, ended_by: FoundError | None) -> int | None:
    """The line from which on Slurm ended what was left: it says so of a step, too, one of whose tasks has failed."""
    lines = [error.line for error in case.errors if error.name == "cancelled" and error.role != "noise"]
    return min([*lines, *([ended_by.line] if ended_by is not None else [])], default=None)


def _first_to_end(case: LogCase, felt: Sequence[FoundError], cut: int | None) -> FirstToEnd | None:
    survived = {error.line for error in case.errors if error.role == "noise"}
    said_by = [(error, case.ranks.rank_of(error.who)) for error in felt]
    ranks = frozenset(rank for _, rank in said_by if rank is not None)
    codes = frozenset(-signal.SIGABRT if _OF_CPP.match(error.text) else 1 for error, rank in said_by if rank is None)
    return first_to_end(case.ranks, ranks, codes, cut, survived)


def _ends_nothing(error: FoundError) -> bool:
    """Whether someone ended the run, or a lost connection is only mentioned, as torch does retrying its store."""
    in_passing = error.weak and error.name in ("rendezvous", "peer_lost", "nccl_error")
    return in_passing or error.name in log_table().from_outside or error.name == "terminated"


def _failed_before(ended_by: FoundError, first: FirstToEnd | None) -> bool:
    """Whether a process had failed by itself before someone ended the run: a time limit or preemption needs no such
    reason, and some programs end with a code of their own when they are told to end."""
    if first is None:
        return False
    if first.one is not None and first.one.explains:
        return True
    own = any(end.signal is None or end.explains for end in first.ends)
    return own and ended_by.name == "cancelled" and "DUE TO" not in ended_by.raw_text


def _of_timeouts(case: LogCase, timeouts: list[FoundError], felt_errors: Sequence[FoundError]) -> LogVerdict:
    by_place = {place: case.ranks.rank_of(error.who) for place, error in enumerate(timeouts)}
    if group_is_all(timeouts, case.ranks):
        by_place = {place: timeouts[place].group_rank if rank is None else rank for place, rank in by_place.items()}
    suspects = suspects_of(timeouts, by_place, case.ranks.seen, case.ranks.world, _timed_out(case)) or lost_rank(
        felt_errors, case.ranks
    )
    if suspects is not None and suspects.silent and case.ranks.files and not set(suspects.ranks) <= case.ranks.files:
        suspects = None  # its file is not here
    logged_by = sorted({rank for rank in by_place.values() if rank is not None} | _timed_out(case))
    line = suspects.line if suspects is not None else None
    first = next((error for error in timeouts if error.line == line), timeouts[0])
    name = "collective_mismatch" if suspects is not None and "another collective" in suspects.reason else first.name
    first.role = "cascade"
    rank = suspects.ranks[0] if suspects is not None and len(suspects.ranks) == 1 else None
    host = (
        case.ranks.rank_hosts.get(rank) if rank is not None else _marked_dead(felt_errors) if suspects is None else None
    )
    waited = f"{len(logged_by)} ranks logged this" if len(logged_by) > 1 else "no line says why"
    suspected = (
        _suspected(suspects) if host is None or rank is not None else f"host {host} is suspect: it was marked dead"
    )
    summary = f"{log_table().means[name]}{after_step(case)} (line {first.line}): {waited}, {suspected}"
    return _unsure(name, first, felt_errors, summary, host, rank, suspects)


def _timed_out(case: LogCase) -> frozenset[int]:
    """The ranks that logged a timeout, of those whose lines are not all kept."""
    return frozenset[int]().union(*(case.said.get(name, frozenset()) for name in TIMED_OUT))


def _marked_dead(felt_errors: Sequence[FoundError]) -> str | None:
    hosts = {match["host"] for error in felt_errors if (match := _DEAD_NODE.search(error.raw_text))}
    return hosts.pop() if len(hosts) == 1 else None


def _of_lost(case: LogCase, felt: Sequence[FoundError], felt_errors: Sequence[FoundError]) -> LogVerdict | None:
    """Ranks say in a program's own words which rank they lost, and no line says why."""
    suspects = lost_rank([error for error in case.errors if error.role != "noise"], case.ranks)
    if suspects is None:
        return None
    first = next((error for error in felt if error.line == suspects.line), felt[0])
    first.role = "cascade"
    rank = suspects.ranks[0]
    nothing = f"no line says why, {_suspected(suspects)}"
    return _felt(case, first, felt_errors, nothing, case.ranks.host_of(Who(), rank), rank, suspects)


def _suspected(suspects: Suspects | None) -> str:
    if suspects is None:
        return (
            "and nothing shows which rank they waited for; look for an earlier error elsewhere, or "
            "for stacks of all ranks"
        )
    return f"{listed(suspects.ranks, 'rank')} {suspects.reason}"


def _of_end(case: LogCase, end: Ending, felt_errors: Sequence[FoundError]) -> LogVerdict:
    error = _error_at(case, end)
    host = end.host or (case.ranks.host_of(Who(), end.rank) if end.rank is not None else None)
    process = f"local rank {end.local}" if end.local is not None else "a process"
    who = rank_words(end.rank, host) if end.rank is not None else f"{process} on {host}" if host else process
    memory = end.signal == signal.SIGKILL and not end.out_of_memory
    likely, see = (", as the kernel does for memory", "see dmesg and sacct; ") if memory else ("", "")
    said = f"Slurm says {end.what}; " if end.what else ""
    name, words = end.name, end.words
    if error is not None and error.name == "mpi_abort":
        name, words = error.name, "called MPI_Abort"
    summary = f"{who} {words}{likely}{after_step(case, error)} (line {end.line}): {said}{see}it logged no error"
    return LogVerdict(
        name, end.line, error.source if error else 0, sentence(summary), host, end.rank, _words_of(end, error),
        followed=max(0, len(felt_errors) - 1), explained=end.explains, how=words,
    )  # fmt: skip


def _of_several(case: LogCase, first: FirstToEnd, felt_errors: Sequence[FoundError]) -> LogVerdict:
    if first.one is not None:
        return _of_end(case, first.one, felt_errors)
    end = first.ends[0]
    error = _error_at(case, end)
    alike = len({each.words for each in first.ends}) == 1
    ranks = sorted({each.rank for each in first.ends if each.rank is not None})
    what = "ranks" if ranks else "tasks" if end.what else "processes"
    where = f", all on {first.host}," if first.host is not None else ""
    who = f"{first.number} {what}{where}"
    if len(ranks) == first.number <= FEW:
        on = [f"{each.rank}{f' ({each.host})' if each.host else ''}" for each in first.ends]
        who = f"ranks {' and '.join(on)}"
    how = f"{end.words.replace('was ', 'were ', 1)} alike" if alike else "ended"
    summary = (
        f"{who} {how}{after_step(case, error)} (line {end.line}): nothing shows which of them was first, and their own "
        "words are not in the log"
    )
    names = {each.name for each in first.ends}
    return LogVerdict(
        end.name if len(names) == 1 else "launcher", end.line, error.source if error else 0, sentence(summary),
        first.host, None, _words_of(end, error), tuple(ranks), first.number, max(0, len(felt_errors) - 1),
        explained=False, how=end.words if alike else "",
    )  # fmt: skip


def _error_at(case: LogCase, end: Ending) -> FoundError | None:
    error = next((error for error in case.errors if error.line == end.line), None)
    if error is not None:
        error.role = "cause"
    return error


def _words_of(end: Ending, error: FoundError | None) -> str:
    """The line itself, and how that is read."""
    return f"{error.text} ({end.words})" if error is not None else end.what or end.words


def _of_ends(case: LogCase, last: list[FoundError], felt_errors: Sequence[FoundError]) -> LogVerdict:
    """Only the launcher or Slurm says that something ended, and nothing of how."""
    first = last[0]
    of_slurm = first.raw_text.startswith(("srun: StepId=", "pdsh@")) or "srun: error" in first.raw_text
    task = task_of(first, first.name, case.ranks) if of_slurm and not case.ranks.tasks else None
    of_ray = rank_of_dead_process(case) if first.name == "ray_actor_died" else (None, None)
    rank, host = task if task is not None else of_ray
    first.role = "cause"
    rank_text = rank_words(rank, host)
    summary = (
        f"{log_table().means[first.name]}{f' ({rank_text})' if rank_text else ''}{after_step(case)} "
        f"(line {first.line}): {shortened(first.text, 200)}; it logged no error"
    )
    return _unsure(first.name, first, felt_errors, summary, host, rank)


def _lost_daemon(error: FoundError) -> str | None:
    found = (_REMOTE_DAEMON.match(text) for text in error.detail)
    return next((match["host"] for match in found if match), None)


def _gone_peer(case: LogCase, felt_errors: Sequence[FoundError]) -> str | None:
    """The host that closed the connections of several others, where no one else did but those that say so of it."""
    tellers: dict[str, set[str]] = {}
    names: dict[str, str] = {}
    for error in felt_errors:
        match = _CLOSED_BY.search(error.raw_text)
        host = case.ranks.host_of(error.who, case.ranks.rank_of(error.who)) if match is not None else None
        if match is not None and host is not None:
            peer = match["peer"] if match["peer"][0].isdigit() else short_host(match["peer"])
            names.setdefault(peer, match["peer"])
            tellers.setdefault(peer, set()).add(short_host(host))
    told = set[str]().union(*tellers.values())
    silent = [peer for peer in tellers if peer not in told]
    return names[silent[0]] if len(silent) == 1 and len(tellers[silent[0]]) > 1 else None


def _of_own_call(case: LogCase, first: FoundError, rank: int | None, felt_errors: Sequence[FoundError]) -> LogVerdict:
    """The only rank of which NCCL says that a call of CUDA failed in its own process."""
    host = case.ranks.host_of(Who(), rank)
    first.role = "cause"
    alone = f"{rank_words(rank, host)} alone says that its own call of CUDA failed"
    return _felt(case, first, felt_errors, alone, host, rank)


def _unexplained(case: LogCase, first: FoundError, felt_errors: Sequence[FoundError]) -> LogVerdict:
    own = {
        case.ranks.rank_of(error.who)
        for error in felt_errors
        if error.name == "nccl_error" and OWN_CUDA.search(error.text)
    }
    if len(own) == 1 and None not in own:
        return _of_own_call(case, first, own.pop(), felt_errors)
    host = _lost_daemon(first)
    suspect = f"; {host} is suspect, for it is its daemon that was lost" if host else ""
    if host is None and (host := _gone_peer(case, felt_errors)) is not None:
        suspect = f"; {host} is suspect, for several hosts say that it closed their connection, and it says nothing"
    says = f"secondary error; root cause not in the log{suspect}"
    return _felt(case, first, felt_errors, says, host)


def _felt(
    case: LogCase,
    first: FoundError,
    felt_errors: Sequence[FoundError],
    beside: str,
    host: str | None,
    rank: int | None = None,
    suspects: Suspects | None = None,
) -> LogVerdict:
    """What `first` says, and `beside` it what else is known: no line says why."""
    said = f"{log_table().means[first.name]}{after_step(case)} (line {first.line}): {shortened(first.text, 200)}"
    return _unsure(first.name, first, felt_errors, f"{said}; {beside}", host, rank, suspects)


def _unsure(
    name: str,
    first: FoundError,
    felt_errors: Sequence[FoundError],
    summary: str,
    host: str | None,
    rank: int | None,
    suspects: Suspects | None = None,
) -> LogVerdict:
    """The verdict where no line says why."""
    missing, suspected = (suspects.ranks, suspects.reason) if suspects is not None else ((), "")
    return LogVerdict(
        name, first.line, first.source, sentence(summary), host, rank, first.text, followed=len(felt_errors) - 1,
        missing=missing, suspected=suspected, explained=False,
    )  # fmt: skip
