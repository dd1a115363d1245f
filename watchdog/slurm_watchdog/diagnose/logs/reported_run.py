"""The error lines that agents reported of one run, as a case for the engine that judges whole logs. Pure.

Of a file only the lines that look like errors are known here, and of the run what only a cluster knows: where
each rank runs and with which process id, the job's nodes, when its last step was made. Which line came first,
whose it is and what it follows from is decided by slurm_watchdog.diagnose.logs.verdict for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.case import STEP_SLACK_S, LogCase, Source
from slurm_watchdog.diagnose.logs.digest import Digest, put_on_clock, take_apart
from slurm_watchdog.diagnose.logs.grouping import local_is_rank, named_by, with_rank
from slurm_watchdog.diagnose.logs.line import Line, without_numbers
from slurm_watchdog.diagnose.logs.progress import Progress
from slurm_watchdog.diagnose.logs.ranks import Ranks, read_ranks, short_host
from slurm_watchdog.diagnose.logs.tracebacks import find_errors
from slurm_watchdog.diagnose.logs.verdict import ordered_case
from slurm_watchdog.model.past_runs import LoggedError, PastRun, RankLocation

APART_S = 10.0
"""Lines of two files without times came one after the other if so much lay between: twice an agent's interval."""
READ_APART_S = 6.0
"""So much earlier than a step of another log an error may be read that came after it: an agent's interval and 1 s."""
MAX_RUNS_REMEMBERED = 256
"""Runs whose answer is remembered: each is asked for several times a tick, and few have new lines."""


def lines_since_last_step(run: PastRun, read_apart_s: float = 0.0) -> list[LoggedError]:
    """The error lines that may have ended the run, in the order of their coming. What came after an action of
    ours is its echo. `read_apart_s`: so long before the last step those of other logs count, too."""
    others_s = max(STEP_SLACK_S, read_apart_s) if run.step_log else STEP_SLACK_S
    lines = [
        e
        for e in run.errors
        if run.rose_at is None or e.at > run.rose_at - (STEP_SLACK_S if e.source == run.step_log else others_s)
    ]
    lines = [e for e in lines if run.touched_at is None or e.at < run.touched_at]
    return sorted(lines, key=lambda e: e.at)  # stable: what was read at once stays in its order


class ReportedRun(Struct, kw_only=False):
    """What is judged of a run, without what changes from one look to the next: two that are equal come to the same."""

    lines: tuple[LoggedError, ...]  # In the order of coming; `at`: whole seconds since the first.
    seats: tuple[RankLocation, ...]
    nodes: tuple[str, ...]
    batch_host: str | None
    ranks: int
    error_ranks: tuple[tuple[str, tuple[int, ...]], ...]

    def numbered(self) -> dict[int, LoggedError]:
        """The lines by number. A second between two counts as a line more: what stands far apart is no traceback."""
        return {place + int(line.at): line for place, line in enumerate(self.lines, 1)}


def reported(run: PastRun, lines: Sequence[LoggedError]) -> ReportedRun:
    """`lines` of `run`, which are in the order of their coming."""
    began = lines[0].at if lines else 0.0
    reported_lines = [replace(error, at=float(round(error.at - began))) for error in lines]
    seats = tuple(replace(seat, gone_at=None) for seat in run.seats)
    return ReportedRun(tuple(reported_lines), seats, run.nodes, run.batch_host, run.ranks, run.error_ranks)


def case_of(run: ReportedRun) -> LogCase:
    """The run as a case for the engine; its lines have the numbers that they have here."""
    files: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for number, line in run.numbered().items():
        files.setdefault((line.read_on, line.source), []).append((number, line.line))
    read = _named_by_files(list(files), [_lines(of_file, run) for of_file in files.values()], run)
    ranks = read_ranks([line for lines in read for line in lines])
    if not run.seats:
        read = [_without_unknown_tasks(lines, ranks) for lines in read]
    ranks = _with_seats(ranks, run)
    sources = [_source(path, lines) for (_, path), lines in zip(files, read, strict=True)]
    case = ordered_case(sources, ranks)
    case.said = _beyond_what_was_kept(run)
    if not case.timed:
        _order_by_arrival(case, run)
    return case


def _lines(of_file: list[tuple[int, str]], run: ReportedRun) -> list[Line]:
    """The lines of one file taken apart. A name before a line is a host only if it is one of the job's nodes."""
    hosts = frozenset(name for node in run.nodes for name in (node, short_host(node)))
    lines, _ = take_apart(of_file, hosts)
    # A host and a number that are no node of the job and no rank: a logger puts a module and its line there.
    return without_numbers(lines, lambda who: who.number is not None and _is_strange(who.host, run))


def _is_strange(host: str | None, run: ReportedRun) -> bool:
    return host is not None and bool(run.nodes) and _node_of(host, run) is None


def _without_unknown_tasks(lines: Sequence[Line], ranks: Ranks) -> list[Line]:
    """The lines of a run of which no rank was seen, without the numbers in front that Slurm does not name as
    tasks: they may be those of a list, of `grep -n`, of anything."""
    tasks = {task.task for task in ranks.tasks}
    return without_numbers(lines, lambda who: who.labelled and who.number not in tasks)


def _named_by_files(files: Sequence[tuple[str, str]], read: list[list[Line]], run: ReportedRun) -> list[list[Line]]:
    """The lines, each with the rank that its file's name has, where there are several files. Only a name that
    says `rank` is believed, and only on the node where that rank runs: of a job's files few are here, and
    `log_1.txt` may be the first try."""
    if len(files) < 2:
        return read
    seats = {(seat.rank, seat.node) for seat in run.seats}
    paths = [path for _, path in files]
    as_rank = bool(run.ranks) and local_is_rank(paths, run.ranks)
    filled = []
    for (node, path), lines in zip(files, read, strict=True):
        name = named_by(path)
        rank = name.local if as_rank and name.rank is None else name.rank if "rank" in path.lower() else None
        known = (rank, node) in seats
        filled.append(with_rank(lines, rank if known else None, name.local, None))
    return filled


def _beyond_what_was_kept(run: ReportedRun) -> dict[str, frozenset[int]]:
    """The ranks of rows of which more ranks were counted than lines are kept; of the others the lines know better."""
    kept = Counter(line.pattern for line in run.lines)
    return {pattern: frozenset(ranks) for pattern, ranks in run.error_ranks if len(ranks) > kept[pattern]}


def _source(path: str, lines: list[Line]) -> Source:
    digest = Digest(lines=lines)
    put_on_clock(digest)
    return Source(path, digest, Progress(), find_errors(lines, origin=digest.origin))


def _with_seats(ranks: Ranks, run: ReportedRun) -> Ranks:
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
            task.task in seats and short_host(seats[task.task].node) == short_host(task.host) for task in tasks
        )
    _name_failures(ranks, run)
    return ranks


def _name_failures(ranks: Ranks, run: ReportedRun) -> None:
    for row in ranks.failures:
        if row.rank is None and row.pid is not None:
            row.rank = ranks.rank_of_pid(row.pid, _node_of(row.host, run))
        if row.rank is None and row.local is not None and len(run.nodes) == 1 and not run.seats:
            row.rank = row.local
        if row.host is None and row.rank is not None:
            row.host = ranks.rank_hosts.get(row.rank)


def _order_by_arrival(case: LogCase, run: ReportedRun) -> None:
    """Files without comparable times: what was read long before all of the others came first."""
    lines = run.numbered()
    first: dict[int, float] = {}
    for error in case.errors:
        at = lines[error.line].at
        first[error.source] = min(at, first.get(error.source, at))
    times = sorted(first.values())
    case.errors.sort(key=lambda error: error.line)
    case.timed = len(times) > 1 and times[1] - times[0] >= APART_S


def _node_of(host: str | None, run: ReportedRun) -> str | None:
    """The node of the job that a host's name means; None if it is none of them, or an address."""
    return next((node for node in run.nodes if host is not None and short_host(node) == short_host(host)), None)


class AttributedError(Struct, kw_only=False):
    """An error line, and who said it as far as that is known."""

    error: LoggedError
    node: str | None
    rank: int | None
    pid: int | None


def attributed_errors(run: PastRun) -> list[AttributedError]:
    """All error lines of a run, each with its speaker."""
    errors = sorted(run.errors, key=lambda e: e.at)
    return [AttributedError(error, *who) for error, who in zip(errors, _speakers(reported(run, errors)), strict=True)]


@lru_cache(maxsize=MAX_RUNS_REMEMBERED)
def _speakers(run: ReportedRun) -> tuple[tuple[str | None, int | None, int | None], ...]:
    case = case_of(run)
    taken = {line.number: line for source in case.sources for line in source.digest.lines}
    found = []
    for number, line in run.numbered().items():
        who = taken[number].who
        rank = case.ranks.rank_of(who)
        node = node_of(case.ranks.host_of(who, rank), rank, line, run)
        found.append((node, rank, pid_of(rank, node, run)))
    return tuple(found)


def pid_of(rank: int | None, node: str | None, run: ReportedRun) -> int | None:
    """The process of a rank, if it is the one that runs on that node."""
    return next((seat.pid for seat in run.seats if (seat.rank, seat.node) == (rank, node)), None)


def node_of(host: str | None, rank: int | None, line: LoggedError, run: ReportedRun) -> str | None:
    """The job's node that a verdict means: by its host, its rank's node, or where the line was read, if only one."""
    named = _node_of(host, run)
    if named is not None:
        return named
    seat = next((seat for seat in run.seats if seat.rank == rank), None)
    if seat is not None:
        return seat.node
    if host is not None and run.nodes and not host[:1].isdigit():
        return None
    if run.nodes == (line.read_on,):
        return line.read_on
    elsewhere = run.batch_host not in (None, line.read_on) and line.read_on in run.nodes
    return line.read_on if elsewhere else None
