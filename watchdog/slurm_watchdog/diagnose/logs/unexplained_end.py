"""A run of which no line says why it ended: who is missing from the cascade, what the launcher or Slurm saw
die. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from slurm_watchdog.base.shortened import shortened
from slurm_watchdog.diagnose.logs.attribution import SIGNAL_NAMES, rank_of_dead_process, task_of
from slurm_watchdog.diagnose.logs.case import LogCase, LogVerdict, after_step, rank_words, sentence
from slurm_watchdog.diagnose.logs.collective_timeouts import Suspects, suspects_of
from slurm_watchdog.diagnose.logs.line import Who
from slurm_watchdog.diagnose.logs.lost_ranks import lost_rank
from slurm_watchdog.diagnose.logs.ranks import Failure, Ranks, Task
from slurm_watchdog.diagnose.logs.tracebacks import FoundError
from slurm_watchdog.knowledge.launcher_exits import Ending
from slurm_watchdog.knowledge.log_signatures import log_table

TIMED_OUT = ("nccl_watchdog", "collective_timeout", "barrier_timeout", "collective_desync", "heartbeat_lost")
_REMOTE_DAEMON = re.compile(r"Remote daemon: \[\[\d+,\d+\],\d+\] on node (?P<host>[\w.-]+)")
_DEAD_NODE = re.compile(r"\baddress: (?P<host>[\w.:-]+)(?: and node name: \S+)? has been marked dead\b")
_TERMINATED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: Terminated\b")
_FAILED = re.compile(r"Exited with exit code (?!0\b|9\b|15\b|130\b|137\b|143\b)\d+")
"""Not by a signal that ends a run in order."""
OWN_CUDA = re.compile(r"unhandled cuda error|ncclUnhandledCudaError", re.IGNORECASE)
"""NCCL's word for a call of CUDA that failed in its own process: no peer has brought it."""
_CODE = re.compile(r"Exited with exit code (\d+)")
_SLURMS_HOW = (
    ("Killed", "was killed (SIGKILL)"), ("Segmentation fault", "died of SIGSEGV"), ("Bus error", "died of SIGBUS"),
    ("Aborted", "died of SIGABRT"), ("Out Of Memory", "was killed: out of memory"), ("Illegal instruction",
    "died of SIGILL"),
)  # fmt: skip
LAST_CHOICE = ("launcher", "task_exit", "killed", "mpi_abort", "terminated", "ray_actor_died")


def of_consequences(case: LogCase, felt_errors: list[FoundError], ended_by: FoundError | None) -> LogVerdict | None:
    """No line says why. What is known: who is missing from the cascade, or what the launcher saw die by a signal.

    `ended_by` is the line with which somebody ended the run from outside.
    """
    timeouts = [error for error in felt_errors if error.name in TIMED_OUT]
    felt = [
        error
        for error in felt_errors
        if error.name in log_table().felt and error.name not in LAST_CHOICE and not error.weak
    ]
    if ended_by is not None and not timeouts and not _failed_before(ended_by, felt_errors):
        return None
    row = _killed_first(case.ranks.failures)
    if row is not None and not timeouts:
        return _of_row(case, row, felt_errors)
    if timeouts:
        return _of_timeouts(case, timeouts, felt_errors)
    if any(task.signal for task in case.ranks.tasks):
        return _of_tasks(case, felt_errors)
    died = [error for error in felt_errors if error.name == "ray_actor_died"]
    if died and rank_of_dead_process(case)[0] not in (
        None,
        *(case.ranks.rank_of(error.who) for error in felt),
    ):
        return _of_ends(case, died, felt_errors)
    if felt:
        return _of_lost(case, felt, felt_errors) or _unexplained(case, felt[0], felt_errors)
    last = [error for error in felt_errors if not _ends_nothing(error)]
    if not last:
        return None
    failed = [row for row in case.ranks.failures if row.root and row.code not in (None, -15, -6, 0)]
    if failed and len({row.rank for row in failed}) == 1:
        return _of_row(case, failed[0], felt_errors)
    return _of_ends(case, last, felt_errors)


def _ends_nothing(error: FoundError) -> bool:
    """Whether somebody ended the run here, or a connection is said in passing to have been lost, as torch warns when it
    tries its store again."""
    in_passing = error.weak and error.name in ("rendezvous", "peer_lost", "nccl_error")
    return in_passing or error.name in log_table().from_outside or error.name == "terminated"


def _failed_before(ended_by: FoundError, felt_errors: Sequence[FoundError]) -> bool:
    """Whether tasks had failed by themselves before somebody cancelled the job: a time limit or preemption
    needs no such reason, and some programs end with a code of their own when they are told to end."""
    if ended_by.name != "cancelled" or "DUE TO" in ended_by.raw_text:
        return False
    return any(_FAILED.search(error.raw_text) for error in felt_errors if error.name == "task_exit")


def _of_timeouts(case: LogCase, timeouts: list[FoundError], felt_errors: Sequence[FoundError]) -> LogVerdict:
    by_place = {place: case.ranks.rank_of(error.who) for place, error in enumerate(timeouts)}
    for place, error in enumerate(timeouts):
        if by_place[place] is None and error.group_rank is not None and _group_is_all(timeouts, case.ranks.world):
            by_place[place] = error.group_rank
    suspects = suspects_of(
        timeouts, by_place, case.ranks.seen, case.ranks.world, _ranks_that_logged(case, TIMED_OUT)
    ) or lost_rank(felt_errors, case.ranks)
    if suspects is not None and suspects.silent and case.ranks.files and not set(suspects.ranks) <= case.ranks.files:
        suspects = None  # its file is not here
    logged_by = sorted({rank for rank in by_place.values() if rank is not None} | _ranks_that_logged(case, TIMED_OUT))
    first = timeouts[0]
    name = "collective_mismatch" if suspects is not None and "another collective" in suspects.reason else first.name
    case.role[id(first)] = "cascade"
    rank = suspects.ranks[0] if suspects is not None and len(suspects.ranks) == 1 else None
    host = (
        case.ranks.rank_hosts.get(rank) if rank is not None else _marked_dead(felt_errors) if suspects is None else None
    )
    waited = f"{len(logged_by)} ranks said so" if len(logged_by) > 1 else "no line says why"
    suspected = (
        _suspected(suspects) if host is None or rank is not None else f"host {host} is suspect: it was marked dead"
    )
    summary = f"{log_table().means[name]}{after_step(case)} (line {first.line}): {waited}, {suspected}"
    return LogVerdict(
        name, first.line, first.source, sentence(summary), host, rank, first.text,
        first_ranks=(), followed=len(felt_errors) - 1, missing=suspects.ranks if suspects is not None else (),
        suspected=suspects.reason if suspects is not None else "", explained=False,
    )  # fmt: skip


def _ranks_that_logged(case: LogCase, names: Iterable[str]) -> frozenset[int]:
    """The ranks that said so, of those whose lines are not all kept."""
    return frozenset[int]().union(*(case.said.get(name, frozenset()) for name in names))


def _marked_dead(felt_errors: Sequence[FoundError]) -> str | None:
    """The only node that Ray says is dead."""
    hosts = {match["host"] for error in felt_errors if (match := _DEAD_NODE.search(error.raw_text))}
    return hosts.pop() if len(hosts) == 1 else None


def _of_lost(case: LogCase, felt: Sequence[FoundError], felt_errors: Sequence[FoundError]) -> LogVerdict | None:
    """Ranks say in a program's own words which rank they lost, and no line says why."""
    suspects = lost_rank([error for error in case.errors if case.role.get(id(error)) != "noise"], case.ranks)
    if suspects is None:
        return None
    first = next((error for error in felt if error.line == suspects.line), felt[0])
    case.role[id(first)] = "cascade"
    rank = suspects.ranks[0]
    nothing = f"no line says why, {_suspected(suspects)}"
    return _felt(case, first, felt_errors, nothing, case.ranks.host_of(Who(), rank), rank, suspects)


def _suspected(suspects: Suspects | None) -> str:
    if suspects is None:
        return (
            "and nothing shows which rank they waited for; look for an earlier error elsewhere, or "
            "for stacks of all ranks"
        )
    names = ", ".join(str(rank) for rank in suspects.ranks[:8])
    return f"rank{'s' if len(suspects.ranks) > 1 else ''} {names} {suspects.reason}"


def _group_is_all(timeouts: Sequence[FoundError], world: int | None) -> bool:
    """Whether the ranks that ProcessGroupNCCL writes are those of the group of all: each says it of itself,
    or there are more than half of all, for other groups divide them."""
    named = [e for e in timeouts if e.who.rank is not None and e.group_rank is not None]
    if named:
        return all(e.who.rank == e.group_rank for e in named)
    if world is not None and max(e.group_rank or 0 for e in timeouts) >= world / 2:
        return True
    return any("default_pg" in e.raw_text for e in timeouts) and all(
        "default_pg" in e.raw_text or "[PG" not in e.raw_text for e in timeouts
    )


def _killed_first(failures: Sequence[Failure]) -> Failure | None:
    """The worker that died of a signal which nobody sends in order, as torchrun's table has it."""
    rows = [row for row in failures if row.code in SIGNAL_NAMES]
    roots = [row for row in rows if row.root]
    if any(row.root for row in failures):
        # The launcher kills who does not end by itself: such rows are none.
        return roots[0] if len({row.rank for row in roots}) == 1 else None
    return rows[0] if len(rows) == 1 else None


def _of_row(case: LogCase, row: Failure, felt_errors: Sequence[FoundError]) -> LogVerdict:
    name = SIGNAL_NAMES.get(row.code or 0, "launcher")
    rank_text = rank_words(row.rank, row.host) or "a worker"
    how = Ending(code=row.code).words
    for error in felt_errors:
        if abs(error.line - row.line) <= 8:
            case.role[id(error)] = "cause"
            break
    summary = f"{rank_text} {how}{after_step(case)} (line {row.line}), and its own words are not in the log"
    source = next((e.source for e in felt_errors if abs(e.line - row.line) <= 400), 0)
    return LogVerdict(
        name, row.line, source, sentence(summary), row.host, row.rank, how,
        followed=max(0, len(felt_errors) - 1), explained=row.code in SIGNAL_NAMES, how=how,
    )  # fmt: skip


def _of_tasks(case: LogCase, felt_errors: Sequence[FoundError]) -> LogVerdict | None:
    """Slurm saw tasks die of a signal: those are first, whatever the others felt."""
    died = [task for task in case.ranks.tasks if task.signal]
    first = died[0]
    aborted = next((e.line for e in case.errors if e.name == "cancelled"), None)
    if aborted is not None and first.line > aborted:
        return None  # srun's own kill
    alone = len([task for task in died if aborted is None or task.line < aborted]) == 1
    rank = first.task if alone and case.ranks.tasks_are_ranks else None
    host = first.host if len({task.host for task in died if aborted is None or task.line < aborted}) == 1 else None
    source = 0
    for error in felt_errors:
        if error.line == first.line:
            case.role[id(error)], source = "cause", error.source
    name = first.signal or "killed"
    rank_text = rank_words(rank, host)
    summary = (
        f"{log_table().means[name]}{f' ({rank_text})' if rank_text else ''}{after_step(case)} "
        f"(line {first.line}): Slurm says {first.what}; its own words are not in the log"
    )
    return LogVerdict(
        name, first.line, source, sentence(summary), host, rank, first.what,
        followed=max(0, len(felt_errors) - 1), explained=False, how=how_slurm_says(first.what),
    )  # fmt: skip


def _of_ends(case: LogCase, last: list[FoundError], felt_errors: Sequence[FoundError]) -> LogVerdict:
    """Only the launcher or Slurm says that something ended."""
    first = last[0]
    ranks = case.ranks
    name = SIGNAL_NAMES.get(_first_code(ranks), first.name)
    others = [task for task in ranks.tasks if task.line != first.line]
    told_after = all(task.line > first.line and _is_srun_s_kill(task) for task in others)
    of_slurm = (
        first.raw_text.startswith("srun: StepId=")
        or "srun: error" in first.raw_text
        or first.raw_text.startswith("pdsh@")
    )
    ended = _TERMINATED.search(first.raw_text) is not None  # by srun, for another one's failure
    task = task_of(first, name, ranks) if of_slurm and told_after and not ended else None
    of_ray = rank_of_dead_process(case) if first.name == "ray_actor_died" else (None, None)
    rank, host = task if task is not None else of_ray
    case.role[id(first)] = "cause"
    rank_text = rank_words(rank, host)
    summary = (
        f"{log_table().means[name]}{f' ({rank_text})' if rank_text else ''}{after_step(case)} "
        f"(line {first.line}): {shortened(first.text, 200)}; its own words are not in the log"
    )
    return LogVerdict(
        name, first.line, first.source, sentence(summary), host, rank, first.text,
        followed=len(felt_errors) - 1, explained=False,
        how=how_slurm_says(first.text) if of_slurm else _how(first, ranks),
    )  # fmt: skip


def how_slurm_says(what: str) -> str:
    """`was killed (SIGKILL)`, `exited with code 1`, from Slurm's word of a task; empty if that says nothing of it."""
    code = _CODE.search(what)
    if code:
        return f"exited with code {code[1]}"
    return next((how for word, how in _SLURMS_HOW if word in what), "")


def _how(first: FoundError, ranks: Ranks) -> str:
    code = _first_code(ranks) if first.name == "launcher" else 0
    return Ending(code=code).words if code else ""


def _first_code(ranks: Ranks) -> int:
    """The exit code that launchers reported first; 0 where none did, or where later ones may be first-hand, too:
    an ordinary code before others, or two different signals."""
    codes = [code for _, code in ranks.exits]
    by_signal = {code for code in codes if code in SIGNAL_NAMES}
    first_hand = len(set(codes)) == 1 or (bool(codes) and by_signal == {codes[0]})
    return codes[0] if first_hand else 0


def _is_srun_s_kill(task: Task) -> bool:
    return task.what.startswith(("Terminated", "Killed"))


def _lost_daemon(error: FoundError) -> str | None:
    """The node whose daemon mpirun lost."""
    found = (_REMOTE_DAEMON.match(text) for text in error.detail)
    return next((match["host"] for match in found if match), None)


def _of_own_call(case: LogCase, first: FoundError, rank: int | None, felt_errors: Sequence[FoundError]) -> LogVerdict:
    """The only rank of which NCCL says that a call of CUDA failed in its own process."""
    host = case.ranks.host_of(Who(), rank)
    case.role[id(first)] = "cause"
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
    says = f"that follows from something else, and no line says from what{suspect}"
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
    return LogVerdict(
        first.name, first.line, first.source, sentence(f"{said}; {beside}"), host, rank, first.text,
        followed=len(felt_errors) - 1, missing=suspects.ranks if suspects else (),
        suspected=suspects.reason if suspects else "", explained=False,
    )  # fmt: skip
