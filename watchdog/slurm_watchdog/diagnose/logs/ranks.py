"""Who is meant by the numbers in a log: ranks, local ranks, tasks. Pure.

A number counts as a rank only where nothing speaks against it. torchrun prints local ranks in front of lines
and the truth in its table of failures; `srun --label` prints tasks, which are ranks only if no other launcher
starts several in each.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.line import Line, Who
from slurm_watchdog.knowledge.launcher_exits import Ending, code_in_words, code_of, ending_of
from slurm_watchdog.knowledge.ray_train import died_of, seat_of
from slurm_watchdog.parse.timestamps import stamp_of

LOCAL_RANKS = 16  # More ranks than on any node.
LIKELY_WORLD = 1 << 14  # Numbers from here on are no ranks where the log does not say how many there are.
MAX_WORLD = 1 << 20
_LAUNCHER = late_regex(
    r"torch[./]distributed[./](?:run|launch|elastic)|\btorchrun\b|ChildFailedError|torchelastic"
    r"|accelerate[ ./](?:launch|commands)|deepspeed[./]launcher|\[launch\.py:|nproc_per_node|local_rank: "
    r"\d+ \(pid|mp\.spawn|\bmpirun (?:noticed|detected|has exited)|^\s*(?:\d+: )?\[\d+,\d+\]\s?<\w+>:"
)
"""Open MPI's prefix as well: where mpirun starts the ranks, the tasks of a step are its daemons, one a node."""
_TEED = late_regex(r"(?:\d+: |[\w.-]+: )?\[default\d+\]:")  # torchrun's prefix: Slurm's tasks are its launchers.
_WORLD = late_regex(
    r"\bworld[ _]?size\W{1,4}(?P<a>\d{1,7})\b|\bWORLD_SIZE\W{1,3}(?P<b>\d{1,7})\b|\bnranks "
    r"(?P<c>\d{1,7})\b|\bnum_processes\W{1,4}(?P<d>\d{1,7})\b|"
    r"GLOBAL_RANK: \d+, MEMBER: \d+/(?P<e>\d+)|distributed_backend=\w+ with (?P<g>\d+) processes|All "
    r"distributed processes registered\. Starting with (?P<f>\d+) processes",
    re.IGNORECASE,
)  # fmt: skip
DYING = late_regex(
    r"\s*(?:\*\*\* (?:Process received signal|End of error message)|Signal: |Signal code: |Failing at "
    r"address|\[ ?\d+\] /)"
)
_WORLD_WORDS = ("orld", "WORLD", "nranks", "rocesses", "MEMBER")
_FIELD = late_regex(r"^\s*(?P<key>time|host|rank|exitcode|error_file|traceback|message)\s*: ?(?P<value>.*)$")
_ENTRY = late_regex(r"^\s*\[\d+\]:\s*$")
_ROOT = late_regex(r"Root Cause(?: \(first observed failure\))?:")
_RANK_ROW = late_regex(r"\s*rank\s*: ?\d+ \(local_rank: \d+\)")
_IN_TABLE = late_regex(r"(?:^|\W)rank\s*: ?(?P<rank>\d{1,7}) \(local_rank: \d+\)\s*$")
_CLOSED = late_regex(r"Sending process (?P<pid>\d{1,10}) closing signal ")
_RANK_LOCAL = late_regex(r"(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_EXIT = late_regex(r"(?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")
BOX_LINES = 20  # Of a box or a wrapped sentence: so many lines after the one that says who, one says how.
TASKS_ENDED = late_regex(r"srun: error: (?P<host>[A-Za-z0-9][\w.-]*): tasks? (?P<tasks>[\d,-]+): (?P<what>.+)")
_RAY_RANK = late_regex(r"Setting up process group .*\[rank=(?P<rank>\d+),")


class Ranks(msgspec.Struct):
    """What a log says about its ranks."""

    world: int | None = None
    launcher: bool = False
    tasks_are_ranks: bool = True
    several_a_host: bool = False
    """Several tasks on one host, or lines labelled by task: then a task is no launcher of several ranks."""
    host_numbers_are_ranks: bool = True
    failures: list[Ending] = msgspec.field(default_factory=list)
    tasks: list[Ending] = msgspec.field(default_factory=list)
    """Slurm's words of tasks that ended, `srun: error: n2: task 5: Segmentation fault`."""
    closed: list[int] = msgspec.field(default_factory=list)  # Processes that torchrun ended for another one's failure.
    failed: set[int] = msgspec.field(default_factory=set)  # Tasks that ended otherwise than with code 0, as srun says.
    in_tables: set[int] = msgspec.field(default_factory=set)  # Ranks in torchrun's tables, failed or ended for that.
    seen: set[int] = msgspec.field(default_factory=set)  # Ranks that said anything.
    rank_hosts: dict[int, str] = msgspec.field(default_factory=dict)
    pids: set[tuple[str | None, int]] = msgspec.field(default_factory=set)
    """(host, number) that mpirun puts in front of what a dying process says: its pid."""
    files: frozenset[int] = frozenset()
    """Of logs with a file for each rank: whose are here. What the others said is not known."""
    by_pid: dict[str, set[tuple[int, str | None]]] = msgspec.field(default_factory=dict)
    """Pid -> (rank, host) of lines that name both."""
    excerpt: bool = False
    """Only some lines are known, and the one that says how many ranks there are may not be among them."""
    dead: set[tuple[str, str | None]] = msgspec.field(
        default_factory=set
    )  # (pid, host) of processes that Ray says have died.

    def rank_of(self, who: Who) -> int | None:
        """The global rank of who said a line; None if that is not certain."""
        if who.rank is not None:
            return who.rank
        if who.number is not None and (
            who.number >= (self.world or LIKELY_WORLD) or (who.host, who.number) in self.pids
        ):
            return None  # a process's number
        if who.number is not None and who.host is None:
            return who.number if self.tasks_are_ranks else None
        if who.number is not None:
            by_table = self._by_table(who.number, who.host)
            if by_table is not None:
                return by_table
            return who.number if self.host_numbers_are_ranks else None
        if who.local is not None:
            return self._by_table(who.local, who.host)
        return self.rank_of_pid(who.pid, who.host) if who.pid is not None else None

    def rank_of_pid(self, pid: str, host: str | None) -> int | None:
        """The rank that other lines give for a process; None if there is none, or if several are possible."""
        ranks = {rank for rank, where in self.by_pid.get(pid, ()) if host is None or where in (None, host)}
        return ranks.pop() if len(ranks) == 1 else None

    def is_one_process(self, who: Who) -> bool:
        """Whether all lines of a `who` are one process's: a host has several, a local rank but on a single node."""
        if who.rank is not None or who.number is not None or who.pid is not None:
            return True
        if who.local is None:
            return False
        if who.host is not None:
            return True
        several = any(row.rank != row.local for row in self.failures if row.rank is not None)
        return not several and max(self.seen, default=0) <= LOCAL_RANKS and (self.world or 0) <= LOCAL_RANKS

    def host_of(self, who: Who, rank: int | None) -> str | None:
        """Where that was."""
        if who.host is not None:
            return who.host
        if rank is not None:
            for failure in self.failures:
                if failure.rank == rank and failure.host:
                    return failure.host
            where = self.rank_hosts.get(rank) or self._task_host(rank)
            if where is not None:
                return where
        return self._host_of_label(who)

    def _host_of_label(self, who: Who) -> str | None:
        """Where the task runs whose number `srun --label` put in front of a line, whatever it started there."""
        if who.number is None:
            return None
        hosts = {task.host for task in self.tasks if task.task == who.number}
        return hosts.pop() if len(hosts) == 1 else None

    def _task_host(self, rank: int) -> str | None:
        if not self.tasks_are_ranks:
            return None
        mine = next((task for task in self.tasks if task.task == rank), None)
        if mine is None or (mine.what.startswith("Terminated") and self._may_be_launchers()):
            return None
        return mine.host

    def _may_be_launchers(self) -> bool:
        """Whether each task that Slurm speaks of ran on a host of its own and one of them failed: it may be a launcher
        that left, and its number no rank's."""
        return not self.several_a_host and any("Exited with exit code" in task.what for task in self.tasks)

    def _by_table(self, local: int, host: str | None) -> int | None:
        rows = [f for f in self.failures if f.local == local and f.rank is not None]
        if host is not None:
            rows = [f for f in rows if f.host is not None and short_host(f.host) == short_host(host)] or rows
        ranks = {f.rank for f in rows}
        return ranks.pop() if len(ranks) == 1 else None


def short_host(host: str | None) -> str:
    """A host's name without its domain; empty for None."""
    return (host or "").partition(".")[0]


def read_ranks(lines: Sequence[Line]) -> Ranks:
    """What the lines (of one log or of several of the same job) say about ranks."""
    ranks = Ranks()
    on_hosts: dict[int, set[str]] = {}
    worlds: list[int] = []
    mixed = False
    for line in lines:
        who = line.who
        ranks.launcher = ranks.launcher or _LAUNCHER.search(line.raw) is not None
        worlds += _worlds(line.raw)
        _read_ends(line, ranks)
        _read_ray(line, ranks)
        if who.number is not None and DYING.match(line.text):
            ranks.pids.add((who.host, who.number))
        if who.rank is not None:
            ranks.seen.add(who.rank)
            if who.host is not None:
                ranks.rank_hosts.setdefault(who.rank, who.host)
            mixed = mixed or (who.number is not None and who.number != who.rank)
        elif who.number is not None and who.host is not None:
            on_hosts.setdefault(who.number, set()).add(who.host)
        mixed = mixed or (who.local is not None and (who.number is not None or _TEED.match(line.raw) is not None))
    tables = list(_read_tables(lines))
    ranks.failures = [*tables, *_read_words(lines, {row.pid for row in tables})]
    ranks.launcher = ranks.launcher or any(row.rank is not None or row.local is not None for row in ranks.failures)
    ranks.tasks_are_ranks = not ranks.launcher and not mixed
    ranks.host_numbers_are_ranks = all(len(each) == 1 for each in on_hosts.values())
    if ranks.host_numbers_are_ranks:
        ranks.seen |= set(on_hosts)
    if ranks.tasks_are_ranks:
        ranks.seen |= {line.who.number or 0 for line in lines if line.who.labelled}
    hosts = [task.host for task in ranks.tasks]
    labelled = any(line.who.labelled for line in lines)
    ranks.several_a_host = labelled or len(set(hosts)) < len(hosts) or any(task.task is None for task in ranks.tasks)
    plausible = [world for world in worlds if 0 < world < MAX_WORLD]
    if plausible:
        ranks.world = max(plausible)
    return ranks


def _read_ray(line: Line, ranks: Ranks) -> None:
    who = line.who
    row = seat_of(line.text) if "world_rank=" in line.text else None
    if row is not None:
        ranks.by_pid.setdefault(str(row.pid), set()).add((row.rank, row.address))
    if who.pid is not None:
        rank_match = _RAY_RANK.search(line.text) if who.rank is None and "rank=" in line.text else None
        rank = int(rank_match["rank"]) if rank_match else who.rank
        if rank is not None:
            ranks.by_pid.setdefault(who.pid, set()).add((rank, who.host))
    died = died_of(line.raw) if "Worker PID: " in line.raw else None
    if died is not None:
        ranks.dead.add((str(died[0]), died[1]))


def _worlds(text: str) -> list[int]:
    if not any(word in text for word in _WORLD_WORDS):
        return []
    match = _WORLD.search(text)
    return [next(int(value) for value in match.groupdict().values() if value)] if match else []


def _read_ends(line: Line, ranks: Ranks) -> None:
    if "srun: error" in line.text:
        task = TASKS_ENDED.search(line.text)
        if task:
            tasks = _tasks_in(task["tasks"])
            how = Ending(host=task["host"], code=code_in_words(task["what"]), line=line.number, what=task["what"])
            how.task, how.number = int(task["tasks"]) if task["tasks"].isdecimal() else None, len(tasks) or 1
            ranks.tasks.append(how)
            if not task["what"].endswith("exit code 0"):
                ranks.failed.update(tasks)
    if "closing signal" in line.text and (closed := _CLOSED.search(line.text)) is not None:
        ranks.closed.append(int(closed["pid"]))
    if "local_rank: " in line.raw and (row := _IN_TABLE.search(line.raw)) is not None:
        ranks.in_tables.add(int(row["rank"]))


def _tasks_in(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5); empty if it is no such list."""
    tasks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) >= MAX_WORLD:
            return ()
        tasks += range(int(first), int(last or first) + 1)
    return tuple(tasks)


def _read_tables(lines: Iterable[Line]) -> Iterable[Ending]:
    open_rows: dict[Who, Ending] = {}
    roots: dict[Who, bool] = {}
    for line in lines:
        text, key = line.text, line.who
        if _ROOT.search(text):
            roots[key] = True
        elif text.strip() == "Failures:" or "FAILED" in text:
            roots[key] = False
        if _ENTRY.match(text):
            if key in open_rows:
                yield _closed(open_rows.pop(key), line.number)
            open_rows[key] = Ending(line=line.number, root=roots.get(key, False))
            continue
        row = open_rows.get(key)
        match = _FIELD.match(text) if row is not None or _RANK_ROW.match(text) else None
        if match is not None and match["key"] == "rank" and (row is None or row.rank is not None):
            # Of lines that agents report only these are here: a row begins with its rank.
            if row is not None:
                yield _closed(row, line.number)
            open_rows[key] = row = Ending(line=line.number, root=roots.get(key, False))
        if row is None or match is None:
            if row is not None and text.strip().startswith(("---", "===")):
                yield _closed(open_rows.pop(key), line.number)
            continue
        _fill(row, match["key"], match["value"].strip(), line)
    yield from open_rows.values()


def _read_words(lines: Iterable[Line], in_tables: Collection[str | None]) -> list[Ending]:
    """What launchers and shells say of a process that ended, in one line or in those of a box."""
    found: list[Ending] = []
    for line in lines:
        ending = ending_of(line.raw) or ending_of(line.text)
        if ending is None or (ending.host is None and ending.rank is None and "received by PID" in line.text):
            continue  # `traceback : Signal 9 (SIGKILL) received by PID 4711`, in a row that is read as a whole
        if ending.pid is not None and ending.pid in in_tables:
            continue
        if not ending.named and ending.pid is None:
            near = found[-1] if found and line.number - found[-1].line <= BOX_LINES else None
            if near is not None and ending.code is not None:
                near.code = ending.code if near.code in (None, -ending.code) else near.code
            if near is not None or ending.code is None:
                continue
        if ending.rank is None and ending.pid is not None and ending.local is None:
            ending.rank = line.who.rank
        ending.host, ending.line, ending.root = ending.host or line.who.host, line.number, not found and not ending.each
        found.append(ending)
    return found


def _fill(row: Ending, key: str, value: str, line: Line) -> None:
    if key == "time":
        stamp = stamp_of(value)
        row.at = None if stamp is None else stamp.seconds
    elif key == "host":
        row.host = value if value and value not in ("localhost", "127.0.0.1", "localhost.localdomain") else None
    elif key == "rank":
        match = _RANK_LOCAL.match(value)
        if match:
            row.rank, row.local = int(match["rank"]), int(match["local"])
    elif key == "exitcode":
        match = _EXIT.match(value)
        if match:
            row.code, row.pid, row.line = code_of(int(match["code"])), match["pid"], line.number


def _closed(row: Ending, line: int) -> Ending:
    row.end = line
    return row
