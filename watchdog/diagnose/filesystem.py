"""Whose fault is a blocked call: one file, one node, or the filesystem itself?"""

from __future__ import annotations

from enum import StrEnum

from watchdog.detect.view import ClusterView, FilesystemView, ProcessView
from watchdog.masking import MASK
from watchdog.model.incidents import Culprit, ProbeWanted
from watchdog.model.observed import Blocked, Role
from watchdog.model.value import Value

PROBED_PEERS = 4
"""How many other nodes are asked: enough for a vote, few enough not to load a filesystem in trouble."""


CLEARS_FOR_S = 120.0
"""An answer older than this clears nobody: in trouble every node is asked again every 15 s."""
CONVICTS_FOR_S = 600.0
"""A node that gave no answer counts so long, unless it is asked again: then it was rebooted or taken out."""


class Scope(StrEnum):
    OUTAGE = "outage"
    """Blocked, or not answering, on two nodes or more."""
    ONE_NODE = "one_node"
    """Other nodes get an answer, this one does not."""
    ONE_FILE = "one_file"
    """The node gets an answer from the filesystem, and yet the call on this file does not return."""
    UNKNOWN = "unknown"
    """Nobody else was asked, or has answered yet."""


class Assessment(Value, frozen=True, kw_only=True):
    scope: Scope
    blocked_s: float
    """Of the process that has been blocked longest."""
    answering: tuple[str, ...]
    unanswering: tuple[str, ...]


def blocked_call(view: ProcessView) -> Blocked:
    """The blocked call of a process that is known to have one."""
    assert view.process.blocked is not None
    return view.process.blocked


def assess(filesystem: FilesystemView, blocked_for_s: float) -> Assessment:
    """Weighs who is blocked for at least `blocked_for_s` against what the probes of other nodes say.

    A probe that answered before the trouble began is not in `filesystem.answers`, so it cannot clear anybody.
    """
    long_blocked = [p for p in filesystem.blocked if blocked_call(p).seconds >= blocked_for_s]
    blocked_nodes = {p.node for p in long_blocked}
    fresh = [
        (node, answer)
        for node, answer in filesystem.answers
        if answer.age_s <= (CLEARS_FOR_S if answer.responding else CONVICTS_FOR_S)
    ]
    answering = {node for node, answer in fresh if answer.responding and answer.same_filesystem}
    unanswering = {node for node, answer in fresh if not answer.responding and answer.same_filesystem}
    strangers = {node for node, answer in fresh if not answer.same_filesystem}
    affected = (blocked_nodes - answering) | unanswering
    longest_s = max((blocked_call(p).seconds for p in filesystem.blocked), default=0.0)
    if affected and len(blocked_nodes | unanswering) >= 2:
        scope = (
            Scope.OUTAGE
        )  # also where one of them answers a probe: a part of the storage, and no node's fault
    elif blocked_nodes and blocked_nodes <= answering:
        scope = Scope.ONE_FILE
    elif affected and (answering - affected or strangers - affected):
        scope = Scope.ONE_NODE
    else:
        scope = Scope.UNKNOWN
    return Assessment(
        scope=scope,
        blocked_s=longest_s,
        answering=tuple(sorted(answering)),
        unanswering=tuple(sorted(unanswering)),
    )


def probes_wanted(view: ClusterView, filesystem: FilesystemView) -> tuple[ProbeWanted, ...]:
    """Asks the node itself and a few others of the same jobs (or, for a job on one node, any others)."""
    if not filesystem.blocked:
        return ()
    first = min(filesystem.blocked, key=lambda p: (-blocked_call(p).seconds, p.node, p.process.pid))
    path = blocked_call(first).path or filesystem.mount
    jobs = {p.process.job_id for p in filesystem.blocked}
    affected = {p.node for p in filesystem.blocked} | {node for node, _ in filesystem.answers}
    peers = [node for job in view.jobs if job.job.job_id in jobs for node in job.job.nodes]
    others = [node for node in (*peers, *view.reporting_nodes) if node in view.reporting_nodes]
    asked = list(dict.fromkeys([*sorted(affected), *others]))[: len(affected) + PROBED_PEERS]
    # A masked name is no place: what is above it lies on the same mount.
    directory = (
        path.partition(MASK)[0].rpartition("/")[0] if path.startswith(filesystem.mount) else filesystem.mount
    )
    return (
        ProbeWanted(
            mount=filesystem.mount,
            directory=directory or "/",
            uid=first.process.uid,
            nodes=tuple(node for node in asked if node in view.reporting_nodes),
        ),
    )


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
            reason=f"{p.process.comm} in {blocked_call(p).syscall or 'a system call'}"
            f" for {blocked_call(p).seconds:.0f} s (state {blocked_call(p).state}"
            f"{f', {blocked_call(p).wchan}' if blocked_call(p).wchan else ''})",
        )
        for p in long_blocked(filesystem, blocked_for_s)
    )


def describe(culprit: Culprit) -> str:
    """`rank 2 (pid 4711 on n3)`, or what of it is known."""
    who = f"rank {culprit.rank}" if culprit.rank is not None else "a process"
    where = f"pid {culprit.pid} on {culprit.node}" if culprit.pid is not None else f"on {culprit.node}"
    return f"{who} ({where})"
