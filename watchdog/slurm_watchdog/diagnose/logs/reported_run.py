"""The error lines that agents reported of one run, as a case for the engine that judges whole logs. Pure.

Of a file only the lines that look like errors are known here, and of the run what only a cluster knows: where each rank runs and with which
process id, the job's nodes, when its last step was made. Which line came first, whose it is and what it follows from is decided by
slurm_watchdog.diagnose.logs.verdict for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.case import Case, Source
from slurm_watchdog.diagnose.logs.digest import Digest, put_on_clock, take_apart
from slurm_watchdog.diagnose.logs.grouping import local_is_rank, named_by
from slurm_watchdog.diagnose.logs.line import Line
from slurm_watchdog.diagnose.logs.progress import Progress
from slurm_watchdog.diagnose.logs.ranks import Failure, Ranks, read_ranks
from slurm_watchdog.diagnose.logs.tracebacks import find_errors
from slurm_watchdog.diagnose.logs.verdict import STEP_SLACK_S, ordered_case, with_rank
from slurm_watchdog.knowledge.launcher_exits import Ending, ending_of
from slurm_watchdog.model.cluster_view import LoggedError, PastRun

APART_S = 10.0
"""Lines of two files without times are known to have come one after the other when so much time lay between: twice an agent's interval."""


def lines_since_last_step(run: PastRun) -> list[LoggedError]:
    """The error lines that may have ended the run, in the order of their coming. What came after an action of ours is its echo."""
    lines = [e for e in run.errors if run.rose_at is None or e.at > run.rose_at - STEP_SLACK_S]
    lines = [e for e in lines if run.touched_at is None or e.at < run.touched_at]
    return sorted(lines, key=lambda e: e.at)  # stable: what was read at once stays in its order


def case_of(run: PastRun, lines: Sequence[LoggedError]) -> tuple[Case, Mapping[int, LoggedError]]:
    """(the case, each line by its number) of `lines`, which are in the order of their coming. A second between two lines counts as one
    line more: what stands far apart in a log is no traceback."""
    began = lines[0].at if lines else 0.0
    numbered = {place + 1 + int(error.at - began): error for place, error in enumerate(lines)}
    files: dict[tuple[str, str], list[tuple[int, LoggedError]]] = {}
    for number, error in numbered.items():
        files.setdefault((error.read_on, error.source), []).append((number, error))
    paths = [path for _, path in files]
    read = [_lines(of_file, run) for of_file in files.values()]
    read = _named_by_files(paths, read, run)
    ranks = read_ranks([line for lines in read for line in lines])
    if not run.seats:
        read = [_without_unknown_tasks(lines, ranks) for lines in read]
    ranks = _with_seats(ranks, read, run)
    sources = [_source(path, lines) for path, lines in zip(paths, read, strict=True)]
    case = ordered_case(sources, ranks)
    case.said = _beyond_what_was_kept(run, lines)
    if not case.timed:
        _order_by_arrival(case, numbered)
    return case, numbered


def _lines(of_file: Sequence[tuple[int, LoggedError]], run: PastRun) -> list[Line]:
    """The lines of one file taken apart. A name before a line is a host only if it is one of the job's nodes."""
    hosts = frozenset(name for node in run.nodes for name in (node, _short(node)))
    lines, _ = take_apart([(number, error.line) for number, error in of_file], hosts)
    return [_without_strangers(line, run) for line in lines]


def _without_strangers(line: Line, run: PastRun) -> Line:
    """The line without a host and a number that are no node of the job and no rank: a logger puts a module and its line there."""
    who = line.who
    if who.number is None or who.host is None or not run.nodes or _is_node(who.host, run):
        return line
    return replace(line, who=replace(who, host=None, number=None))


def _without_unknown_tasks(lines: Sequence[Line], ranks: Ranks) -> list[Line]:
    """The lines of a run of which no rank was seen, without the numbers in front that Slurm does not name as tasks: they may be those of a
    list, of `grep -n`, of anything."""
    tasks = {task.task for task in ranks.tasks}
    return [
        replace(line, who=replace(line.who, number=None))
        if line.who.number is not None and line.who.host is None and line.who.number not in tasks
        else line
        for line in lines
    ]


def _named_by_files(paths: Sequence[str], read: list[list[Line]], run: PastRun) -> list[list[Line]]:
    """The lines, each with the rank that its file's name has, where there are several files."""
    if len(paths) < 2:
        return read
    as_rank = local_is_rank(paths, run.ranks or None)
    filled = []
    for path, lines in zip(paths, read, strict=True):
        name = named_by(path)
        host = name.host if name.host is not None and _is_node(name.host, run) else None
        rank = name.local if as_rank and name.rank is None else name.rank
        filled.append(with_rank(lines, rank, name.local, host))
    return filled


def _beyond_what_was_kept(run: PastRun, lines: Sequence[LoggedError]) -> dict[str, frozenset[int]]:
    """The ranks of rows of which more ranks were counted than lines are kept; of the others the lines tell it better."""
    kept = Counter(error.pattern for error in lines)
    return {pattern: frozenset(said) for pattern, said in run.error_ranks if len(said) > kept[pattern]}


def _source(path: str, lines: list[Line]) -> Source:
    digest = Digest(lines=lines, total_lines=lines[-1].number)
    put_on_clock(digest)
    return Source(path, digest, Progress(), find_errors(lines))


def _with_seats(ranks: Ranks, read: Sequence[Sequence[Line]], run: PastRun) -> Ranks:
    """What the lines say about ranks, with what is known of their processes."""
    ranks.world, ranks.excerpt = max(ranks.world or 0, run.ranks) or None, True
    for seat in run.seats:
        ranks.rank_hosts.setdefault(seat.rank, seat.node)
        # On a single node an address in a log can only mean that one.
        node = seat.node if len(run.nodes) != 1 else None
        ranks.by_pid.setdefault(str(seat.pid), set()).add((seat.rank, node))
    seats = {seat.rank: seat for seat in run.seats}
    if seats:
        tasks = [task for task in ranks.tasks if task.task is not None]
        one_a_node = len({seat.node for seat in run.seats}) == len(run.seats)
        many = any((task.task or 0) >= max(1, len(run.nodes)) for task in tasks)
        ranks.several_a_host = ranks.several_a_host or one_a_node or many
        ranks.tasks_are_ranks = ranks.tasks_are_ranks and all(
            task.task in seats and _short(seats[task.task].node) == _short(task.host) for task in tasks
        )
    _name_failures(ranks, read, run)
    return ranks


def _name_failures(ranks: Ranks, read: Sequence[Sequence[Line]], run: PastRun) -> None:
    """Gives the rows of launchers that name a process or a local rank their ranks."""
    known = {row.pid for row in ranks.failures}
    for lines in read:
        for line in lines:
            ending = ending_of(line.raw) or ending_of(line.text)
            if ending is None or ending.pid is None or ending.local is None or str(ending.pid) in known:
                continue
            known.add(str(ending.pid))
            ranks.failures.append(_row(ending, line.number, not ranks.failures))
    for row in ranks.failures:
        if row.rank is None and row.pid is not None:
            row.rank = ranks.rank_of_pid(row.pid, _node_of(row.host, run))
        if row.rank is None and row.local is not None and len(run.nodes) == 1 and not run.seats:
            row.rank = row.local


def _row(ending: Ending, line: int, root: bool) -> Failure:
    return Failure(
        line, root, ending.host, ending.rank, ending.local, ending.code, None if ending.pid is None else str(ending.pid)
    )  # fmt: skip


def _order_by_arrival(case: Case, numbered: Mapping[int, LoggedError]) -> None:
    """Files without comparable times: what was read long before all of the others came first."""
    first: dict[int, float] = {}
    for error in case.errors:
        at = numbered[error.line].at
        first[error.source] = min(at, first.get(error.source, at))
    times = sorted(first.values())
    case.errors.sort(key=lambda error: error.line)
    case.timed = len(times) > 1 and times[1] - times[0] >= APART_S


def _is_node(host: str, run: PastRun) -> bool:
    return _short(host) in {_short(node) for node in run.nodes}


def _node_of(host: str | None, run: PastRun) -> str | None:
    """The node of the job that a host's name means; None if it is none of them, or an address."""
    return next((node for node in run.nodes if host is not None and _short(node) == _short(host)), None)


def _short(host: str) -> str:
    return host.partition(".")[0]


class Said(Struct, frozen=True):
    """An error line, and who said it as far as that is known."""

    error: LoggedError
    node: str | None
    rank: int | None
    pid: int | None


def who_said(run: PastRun) -> list[Said]:
    """All error lines of a run, each with its speaker."""
    case, numbered = case_of(run, sorted(run.errors, key=lambda e: e.at))
    found = []
    for line in sorted(
        (line for source in case.sources for line in source.digest.lines), key=lambda each: each.number
    ):
        rank, error = case.ranks.rank_of(line.who), numbered[line.number]
        node = node_of(case.ranks.host_of(line.who, rank), rank, error, run)
        found.append(Said(error, node, rank, pid_of(rank, node, run)))
    return found


def pid_of(rank: int | None, node: str | None, run: PastRun) -> int | None:
    """The process of a rank, if it is the one that runs on that node."""
    return next((seat.pid for seat in run.seats if (seat.rank, seat.node) == (rank, node)), None)


def node_of(host: str | None, rank: int | None, error: LoggedError, run: PastRun) -> str | None:
    """The job's node that a verdict means: by its host, by where its rank runs, or by where the line was read, if that can be only one."""
    named = _node_of(host, run)
    if named is not None:
        return named
    seat = next((seat for seat in run.seats if seat.rank == rank), None)
    if seat is not None:
        return seat.node
    if host is not None and run.nodes and not host[:1].isdigit():
        return None
    if run.nodes == (error.read_on,):
        return error.read_on
    elsewhere = run.batch_host not in (None, error.read_on) and error.read_on in run.nodes
    return error.read_on if elsewhere else None
