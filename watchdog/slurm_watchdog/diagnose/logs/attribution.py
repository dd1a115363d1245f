"""The rank and host of an error: those of its line, or the only ones that launcher, Slurm or driver can mean. Pure.

No rank is identified where two could be meant, where so many failed alike that none of them is the one, or where a
number may be a local rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.case import LogCase
from slurm_watchdog.diagnose.logs.line import Who
from slurm_watchdog.diagnose.logs.ranks import LIKELY_WORLD, TASKS_ENDED, Ranks, short_host
from slurm_watchdog.diagnose.logs.tracebacks import FoundError
from slurm_watchdog.knowledge.launcher_exits import CLASSES, Ending

ALIKE_SHARE = 0.5
"""Where so many ranks say the same, no rank is identified: it is the program, its input or what all share."""
GPU_NAMES = frozenset({"cuda_error", "cuda_oom", "gpu_ecc", "gpu_lost", "device_assert"})
_NODE_FAILURE = late_regex(r"Node failure on ([\w.-]+)")
_NOT_STARTED = late_regex(
    r"(?:srun: error: Task launch for StepId=\S+ failed on node |\bssh: connect to host )(?P<host>[\w.-]+)"
    r"(?: port \d+)?: (?P<why>.*\S)"
)
_LAUNCH_FAILED = late_regex(r"srun: error: Application launch failed: (?P<why>.*\S)")
_FIRST_OF_STEP = late_regex(r"^srun: StepId=\S+ task (?P<task>\d+): exited abnormally")
"""Of one task alone, after `srun --wait` has waited for the others."""
_SSH_ENDED = late_regex(r"pdsh@\S+: (?P<host>[\w.-]+): ssh exited with exit code")
_OF_NODE = late_regex(r"\bat node \(ID: \w+, IP: (?P<host>[\w.:-]+)\)")
"""Ray's word of the node on which it ended workers for want of memory."""
_OWN_NODE = late_regex(r"\bnode: (?P<host>[\w.-]+)\b")
_OWN_RANK = late_regex(r"(?:\bUnexpected result \w+ on rank |^[A-Z]\w+Error: \[Rank:)(?P<rank>\d+)\b")
_QUOTED = late_regex(
    r"(?:^|: )(?:[Ww]orker (?:on|of|at) )?[Rr]ank[ =:#]?(?P<rank>\d{1,6})\b[^:;]{0,40}"
    r"\b(?:failed|crashed|died|raised|(?:an? )?(?:error|exception))(?: with| by)?(?: an? \w+)?: "
    r"|\b(?:[Ee]rror|[Ee]xception|[Ff]ailure) (?:from|on|of|at|in) (?:worker )?[Rr]ank[ =:#]?(?P<rank2>\d{1,6}): "
)
"""One rank repeats what another one, which it names, has said of itself."""
_RANK_AND_NODE = late_regex(r"\bRank (?P<rank>\d+), node (?P<host>[\w.-]+),")
"""As Megatron-LM's rerun_state_machine says whose result it is."""
_DEAD_PID = late_regex(r"\bpid: (?P<pid>\d+)\b")
_ADDRESS = late_regex(r"\bip: (?P<host>[\w.:-]+?)\b(?=\s|,|$)")
NEAR_LINES = 60
_CUDA = frozenset({"cuda_error", "gpu_ecc", "gpu_lost", "cuda_unavailable"})
_FELT_AS = {
    "gpu_lost": _CUDA, "gpu_ecc": _CUDA,
    "shared_memory": frozenset({"dataloader_worker", "bus_error"}), "bus_error": frozenset({"dataloader_worker"}),
    "oom_kill": frozenset({"dataloader_worker"}), "segmentation_fault": frozenset({"dataloader_worker"}),
}  # fmt: skip
"""What the process that it happened to says of it."""
_SLURM_WHAT = {
    **dict.fromkeys(("cuda_error", "gpu_lost", "gpu_ecc", "device_assert", "abort", "glibc_abort"), ("Aborted",)),
    "segmentation_fault": ("Segmentation fault",), "bus_error": ("Bus error",), "oom_kill": ("Out Of Memory",),
    "illegal_instruction": ("Illegal",),
}  # fmt: skip


def who_felt_it(first: FoundError, alive: Sequence[FoundError], case: LogCase) -> int | None:
    """The rank whose process NCCL spoke for: the only one to which NCCL's call failed with an error of CUDA."""
    said = {
        case.ranks.rank_of(error.who)
        for error in alive
        if error.name == "nccl_error" and re.search(r"unhandled cuda error", error.text, re.IGNORECASE)
    }
    return said.pop() if len(said) == 1 and "NCCL" in first.raw_text else None


def rank_beside(first: FoundError, roots: Sequence[FoundError], case: LogCase) -> int | None:
    """The rank of an error that names no one, from the one that says next what its process felt of it: the
    kernel, a driver or a library wrote the first line, Python the second. Only if that can be a single
    rank."""
    felt = _FELT_AS.get(first.name, frozenset()) | {first.name}
    near = [e for e in roots if e.name in felt and 0 <= e.line - first.line <= NEAR_LINES]
    ranks = {case.ranks.rank_of(error.who) for error in near if error.who.named}
    return ranks.pop() if len(ranks) == 1 else None


def rank_of_dead_process(case: LogCase) -> tuple[int | None, str | None]:
    """(rank, host) of the only process that Ray says has died, if other lines say which rank it is."""
    dead = set(case.ranks.dead)
    for error in case.errors:
        text = "\n".join((error.text, *error.detail)) if error.name in ("ray_actor_died", "oom_kill") else ""
        if (match := _DEAD_PID.search(text)) is not None:
            where = _ADDRESS.search(text)
            dead.add((match["pid"], where["host"] if where else None))
    named = {(case.ranks.rank_of_pid(pid, host), host) for pid, host in dead}
    return named.pop() if len(named) == 1 else (None, None)


def node_of_workers(error: FoundError) -> str | None:
    """The node that Ray names where it says that it ended workers."""
    match = _OF_NODE.search(error.raw_text)
    return match["host"] if match else None


def node_of_all(case: LogCase) -> str | None:
    """The only node whose tasks ended by themselves, where Slurm says of tasks elsewhere that it ended them then."""
    tasks = case.ranks.tasks
    own = {task.host for task in tasks if task.what.startswith("Exited with exit code")}
    ended = {task.host for task in tasks if task.what.startswith(("Terminated", "Killed"))}
    return own.pop() if len(own) == 1 and ended - own else None


def failed_node(case: LogCase) -> str | None:
    """The only node that Slurm says has failed."""
    nodes = {match[1] for error in case.errors if (match := _NODE_FAILURE.search(error.raw_text))}
    return nodes.pop() if len(nodes) == 1 else None


def speaker_of(error: FoundError, case: LogCase) -> tuple[int | None, str | None]:
    """(rank, host) that logged a line, as far as its prefix or its own words have them."""
    quoted = _QUOTED.search(error.text)
    if quoted is not None:
        return _of_rank(int(quoted["rank"] or quoted["rank2"]), case.ranks)
    rank = case.ranks.rank_of(error.who)
    host = case.ranks.host_of(error.who, rank)
    if rank is None and (own := _OWN_RANK.search(error.text)) is not None:
        rank = int(own["rank"])
    if host is not None or rank is None:
        return rank, host
    own = _OWN_NODE.search(error.text)
    if own is not None:
        return rank, own["host"]
    nodes = {
        match["host"]
        for other in case.errors
        for text in (other.text, *other.detail)
        if (match := _RANK_AND_NODE.search(text)) and int(match["rank"]) == rank
    }
    return rank, nodes.pop() if len(nodes) == 1 else None


def _of_rank(rank: int, ranks: Ranks) -> tuple[int | None, str | None]:
    """A rank that another one names, and its host; (None, None) where the job has or may have no such rank."""
    size = ranks.world or (0 if ranks.excerpt else LIKELY_WORLD)
    return (rank, ranks.host_of(Who(), rank)) if rank < size else (None, None)


def is_everybody(ranks: Sequence[int], alike: Sequence[FoundError], case: LogCase) -> bool:
    """Whether so many failed alike that none of them is the one."""
    if len(ranks) < 2:
        locals_ = {(error.who.local, error.who.host) for error in alike}
        hosts = {error.who.host for error in alike} - {None}
        speak = {line.who.host for source in case.sources for line in source.digest.lines} - {None}
        return len(locals_) >= 3 or len(hosts) >= max(2, ALIKE_SHARE * len(speak))
    world = case.ranks.world or len(case.ranks.seen) or len(ranks)
    return len(ranks) >= max(3, ALIKE_SHARE * world) or len(ranks) >= world > 1


def place_in_table(error: FoundError, ranks: Ranks) -> None:
    """An error that stands in torchrun's table of failures is that row's."""
    if error.who.rank is not None or ranks.excerpt:
        return  # of lines that agents report the one that ends a table is not known
    for row in ranks.failures:
        if row.line < error.line < row.end and row.rank is not None:
            error.who = type(error.who)(rank=row.rank, local=row.local, host=row.host)
            return


def locate_errors(error: FoundError, name: str, case: LogCase, host: str | None) -> tuple[int | None, str | None]:
    """(rank, host) of a line that does not say whose it is, from what the launcher or Slurm says of who ended first."""
    ranks = case.ranks
    unknown = () if ranks.excerpt else ("",)  # the line with a row's host may be one that was not reported
    there = [row for row in ranks.failures if host is None or short_host(row.host) in (*unknown, short_host(host))]
    row = _first_failure(there, name, error.traceback)
    if row is not None:
        return row.rank, host or row.host
    task = task_of(error, name, ranks)
    if task is not None and (host is None or host == task[1]):
        return task
    return None, host


def _first_failure(failures: Sequence[Ending], name: str, raised: bool) -> Ending | None:
    """The row of torchrun's tables that an error without a name belongs to, if it can be only one.

    Workers that the launcher ended, or that aborted because a peer was lost, are other rows; a launcher may
    list such a one first. What Python `raised` ends a process with code 1.
    """
    codes = {-signal for signal, row in CLASSES.items() if row == name} or {1, 2}
    if name in ("oom_kill", "killed"):
        codes = {-9}
    if name in ("abort", "cuda_error", "glibc_abort", "device_assert", "gpu_ecc"):
        codes = {1} if raised and any(row.code == 1 for row in failures) else {1, -6}
    rows = [row for row in failures if row.code in codes]
    if len(rows) == 1:
        return rows[0]
    roots = [row for row in rows if row.root]
    if len(roots) != 1 or roots[0].at is None:
        return None
    others = [row.at for row in rows if row is not roots[0] and row.at is not None]
    return roots[0] if others and min(others) - roots[0].at >= 1 else None


def reason_of_launch(first: FoundError, roots: Sequence[FoundError]) -> FoundError:
    """Of a step that did not start on several nodes the line with srun's reason for all: others only gave up."""
    whole = next((found for error in roots if (found := _LAUNCH_FAILED.search(error.raw_text))), None)
    if whole is None or _NOT_STARTED.search(first.raw_text) is None:
        return first
    why = whole["why"]
    nodes = ((error, _NOT_STARTED.search(error.raw_text)) for error in roots)
    return next((error for error, found in nodes if found is not None and found["why"] == why), first)


def is_launch_of_several(first: FoundError, alike: Sequence[FoundError]) -> bool:
    """Whether srun could not launch on several nodes, and does not give the reason of one of them for all."""
    mine = _NOT_STARTED.search(first.raw_text)
    found = [match for error in alike if (match := _NOT_STARTED.search(error.raw_text)) is not None]
    whole = any(_LAUNCH_FAILED.search(error.raw_text) for error in alike)
    return mine is not None and len({each["host"] for each in found if not whole or each["why"] == mine["why"]}) > 1


def task_of(error: FoundError, name: str, ranks: Ranks) -> tuple[int | None, str | None] | None:
    """Slurm's word of the one task that ended so; of several no one knows which was first."""
    not_started = _NOT_STARTED.search(error.raw_text) or _SSH_ENDED.match(error.raw_text)
    if not_started:
        return None, not_started["host"]
    match = TASKS_ENDED.search(error.raw_text)
    if match:
        alike = [task for task in ranks.tasks if task.what == match["what"] and task.row not in (None, "killed")]
        if len({task.host for task in alike}) > 1:
            return None, None  # they died alike on several nodes
        single = match["tasks"].isdecimal()
        return (int(match["tasks"]) if single and ranks.tasks_are_ranks else None), match["host"]
    alone = _FIRST_OF_STEP.match(error.raw_text)
    if alone:
        return (int(alone["task"]) if ranks.tasks_are_ranks else None), None
    words = _SLURM_WHAT.get(name, ())
    tasks = [t for t in ranks.tasks if any(word in t.what for word in words)] if words else []
    # A launcher that leaves says nothing about its node: it may have lost the ranks of another one.
    left = () if ranks.launcher else ranks.tasks
    tasks = tasks or [t for t in left if "Exited with exit code" in t.what]
    if len(tasks) != 1:
        return None
    # What ends with a code may be a launcher, one a node; what dies of a signal is hardly one.
    own = "Exited with exit code" not in tasks[0].what or error.raw_text.startswith("slurmstepd: ")
    sure = ranks.tasks_are_ranks and (ranks.several_a_host or own)
    return (tasks[0].task if sure else None), tasks[0].host
