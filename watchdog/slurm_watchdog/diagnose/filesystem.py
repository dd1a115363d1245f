"""Whose fault is a blocked call: one file, one node, or the filesystem itself?"""

from __future__ import annotations

from typing import NamedTuple

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.redact import MASK
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.syscalls import PAGE_FAULT
from slurm_watchdog.model.cluster_view import ClusterView, FilesystemView, MountAnswer, ProcessView
from slurm_watchdog.model.incidents import Culprit, MountProbeRequest
from slurm_watchdog.model.observations import Blocked, Role

FLUSH_CALLS = frozenset({"fsync", "fdatasync", "syncfs", "sync", "sync_file_range", "msync", "close"})
FLUSH_PATIENCE_S = 1800.0
"""One such call writes all that is dirty, and a checkpoint may take half an hour (case book): where the filesystem
answers on the node, it is let run so long."""
PROBED_PEERS = 4  # How many other nodes are asked: enough for a vote, few enough not to load a filesystem in trouble.
PROBED_USERS = 4  # As so many of the users whose processes are blocked, those blocked longest.
ANSWER_COUNTS_FOR_S = 120.0  # An answer older than this clears no one: in trouble every node is asked again every 15 s.
FAILURE_COUNTS_FOR_S = 600.0
"""A node that gave no answer counts so long, unless it is asked again: then it was rebooted or taken out."""


class Scope(StrEnum):
    OUTAGE = "outage"  # Blocked on two nodes or more, or two other nodes that were asked do not answer either.
    ONE_NODE = "one_node"  # Other nodes get an answer, this one does not.
    ONE_FILE = "one_file"  # The node gets an answer from the filesystem, and yet the call on this file does not return.
    UNKNOWN = "unknown"  # No one else was asked, or has answered yet.


class Assessment(Struct):
    scope: Scope
    blocked_s: float  # Of the process that has been blocked longest.
    answering: tuple[str, ...]
    unanswering: tuple[str, ...]
    strangers: tuple[str, ...]  # Nodes with another filesystem there.


def blocked_call(view: ProcessView) -> Blocked:
    """The blocked call of a process that is known to have one."""
    assert view.process.blocked is not None
    return view.process.blocked


def assess(filesystem: FilesystemView, blocked_for_s: float) -> Assessment:
    """Weighs who is blocked for at least `blocked_for_s` against what the probes of other nodes say.

    A probe that answered before the trouble began is not in `filesystem.answers`, so it cannot clear anybody.
    A probe that ran as a user counts for that user's processes alone: only he could have a hand in it.
    """
    long_blocked = [p for p in filesystem.blocked if blocked_call(p).seconds >= blocked_for_s]
    nodes_of: dict[int, set[str]] = {}
    for process in long_blocked:
        nodes_of.setdefault(process.process.uid, set()).add(process.node)
    fresh = [
        (node, answer)
        for node, answer in filesystem.answers
        if answer.age_s <= (ANSWER_COUNTS_FOR_S if answer.responding else FAILURE_COUNTS_FOR_S)
    ]
    answers = {uid: _answers(fresh, uid) for uid in nodes_of}
    scopes = {uid: _scope(nodes, answers[uid]) for uid, nodes in nodes_of.items()} or {
        -1: _scope(set(), _answers(fresh, None))
    }
    together = zip(*(answers.values() or [_answers(fresh, None)]), strict=True)
    answering, unanswering, strangers = (tuple(sorted(frozenset[str]().union(*each))) for each in together)
    return Assessment(
        scope=_common(list(scopes.values()), set().union(*nodes_of.values())),
        blocked_s=max((blocked_call(p).seconds for p in filesystem.blocked), default=0.0),
        answering=answering,
        unanswering=unanswering,
        strangers=strangers,
    )


class _Answers(NamedTuple):
    """What nodes said to one user, or to no one's child: whether they reach the filesystem."""

    answering: frozenset[str]
    unanswering: frozenset[str]
    strangers: frozenset[str]  # Nodes with another filesystem there.


def _answers(fresh: list[tuple[str, MountAnswer]], uid: int | None) -> _Answers:
    heard = [(node, answer) for node, answer in fresh if answer.uid is None or answer.uid == uid]
    return _Answers(
        frozenset(node for node, answer in heard if answer.responding and answer.same_filesystem),
        frozenset(node for node, answer in heard if not answer.responding and answer.same_filesystem),
        frozenset(node for node, answer in heard if not answer.same_filesystem),
    )


def _scope(blocked: set[str], answers: _Answers) -> Scope:
    """For the processes of one user, blocked on these nodes. Where one node stalls, one other node's word
    makes no outage of it, unless that node's own probe fails, too, and no one reaches the filesystem."""
    affected = (blocked - answers.answering) | answers.unanswering
    others = answers.unanswering - blocked
    reaching = (answers.answering | answers.strangers) - affected
    unreached = bool(blocked & answers.unanswering and others) and not reaching
    if affected and (unreached or len(blocked) >= 2 or len(others) >= 2):
        return Scope.OUTAGE  # also where one of them answers a probe: a part of the storage, and no node's fault
    if blocked and blocked <= answers.answering:
        return Scope.ONE_FILE
    if blocked and affected and len(reaching) > len(others):
        return Scope.ONE_NODE
    return Scope.UNKNOWN


def _common(scopes: list[Scope], blocked: set[str]) -> Scope:
    """What holds for several users: an outage that only some see is not the others'. None is restarted on a guess."""
    if len(set(scopes)) == 1 and scopes[0] is not Scope.UNKNOWN:
        return scopes[0]
    if scopes.count(Scope.OUTAGE) >= 2:
        return Scope.OUTAGE
    left = {scope for scope in scopes if scope is not Scope.OUTAGE}
    if len(left) == 1 and left != {Scope.UNKNOWN}:
        return left.pop()
    return Scope.OUTAGE if len(blocked) >= 2 and left == {Scope.UNKNOWN} else Scope.UNKNOWN


def probes_wanted(view: ClusterView, filesystem: FilesystemView) -> tuple[MountProbeRequest, ...]:
    """Asks the node itself and a few others of its jobs (for a job on one node, any others), as each user concerned."""
    if not filesystem.blocked:
        return ()
    longest = sorted(filesystem.blocked, key=lambda p: (-blocked_call(p).seconds, p.node, p.process.pid))
    first_of: dict[int, ProcessView] = {}
    for process in longest:
        first_of.setdefault(process.process.uid, process)
    jobs = {p.process.job_id for p in filesystem.blocked}
    affected = {p.node for p in filesystem.blocked} | {node for node, _ in filesystem.answers}
    peers = [node for job in view.jobs if job.job.job_id in jobs for node in job.job.nodes]
    others = [node for node in (*peers, *view.reporting_nodes) if node in view.reporting_nodes]
    asked = list(dict.fromkeys([*sorted(affected), *others]))[: len(affected) + PROBED_PEERS]
    nodes = tuple(node for node in asked if node in view.reporting_nodes)
    return tuple(
        MountProbeRequest(mount=filesystem.mount, directory=_directory(first, filesystem.mount), uid=uid, nodes=nodes)
        for uid, first in list(first_of.items())[:PROBED_USERS]
    )


def _directory(process: ProcessView, mount: str) -> str:
    path = blocked_call(process).path or mount
    # A masked name is no place: what is above it lies on the same mount.
    return (path.partition(MASK)[0].rpartition("/")[0] if path.startswith(mount) else mount) or "/"


def long_blocked(filesystem: FilesystemView, blocked_for_s: float) -> list[ProcessView]:
    """Every process that is blocked long enough: ranks before their workers and helpers, the longest first."""
    order = {Role.RANK: 0, Role.WORKER: 1, Role.HELPER: 2}
    return sorted(
        (p for p in filesystem.blocked if blocked_call(p).seconds >= blocked_for_s),
        key=lambda p: (order[p.process.role], -blocked_call(p).seconds, p.node, p.process.pid),
    )


def culprits(filesystem: FilesystemView, blocked_for_s: float) -> tuple[Culprit, ...]:
    """Who is blocked long enough, in the order of `long_blocked`."""
    return tuple(
        Culprit(
            node=p.node,
            rank=p.process.rank,
            pid=p.process.pid,
            path=blocked_call(p).path,
            mount=filesystem.mount,
            is_worker=p.process.role is Role.WORKER,
            reason=f"{p.process.comm} in {call_words(blocked_call(p))}"
            f" for {blocked_call(p).seconds:.0f} s (state {blocked_call(p).state}"
            f"{f', {blocked_call(p).wchan}' if blocked_call(p).wchan else ''})",
        )
        for p in long_blocked(filesystem, blocked_for_s)
    )


def call_words(call: Blocked) -> str:
    """What a thread is in: `write`, `a page fault`."""
    return "a page fault" if call.syscall == PAGE_FAULT else call.syscall or "a system call"
