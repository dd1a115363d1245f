"""`orphan_gpu_process`: a process holds a GPU and belongs to no job that runs. The agent counts its grace; here it is told.

It may be ended, if a site wants that, only where nothing about it is a guess: it came from a job of an ordinary user, which its control
group says or the agent saw when that job ran here, and it has the device itself open.
"""

from __future__ import annotations

from watchdog.detect.nodes import nodes_to_judge
from watchdog.detect.view import ClusterView, NodeView
from watchdog.knowledge.gpu_daemons import MAX_SYSTEM_UID
from watchdog.model.incidents import Culprit, Finding, GpuProcess, Kind, Severity, Truth
from watchdog.model.observed import GpuHolder


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each such process of a node that reports. A holder of whom nobody knows whether its job runs is unknown."""
    silent = set(view.silent_nodes)
    findings = []
    for node in nodes_to_judge(view):
        if node.name not in silent:
            findings += [_judge(node, holder) for holder in node.holders]
            findings += [_gone(node, pid, start_ticks) for pid, start_ticks in node.released]
    return findings


def _subject(node: NodeView, pid: int, start_ticks: int) -> str:
    return f"process:{node.name}/{pid}.{start_ticks}"


def _gone(node: NodeView, pid: int, start_ticks: int) -> Finding:
    return Finding(
        kind=Kind.ORPHAN_GPU_PROCESS,
        subject=_subject(node, pid, start_ticks),
        truth=Truth.OK,
        summary=f"process {pid} on {node.name} holds no GPU any more",
    )


def _judge(node: NodeView, holder: GpuHolder) -> Finding:
    orphan_s = holder.orphan_for_s
    gpus = ", ".join(holder.gpu_uuids) or ", ".join(f"/dev/nvidia{minor}" for minor in holder.minors)
    memory = (
        f"{holder.memory_bytes / 2**20:.0f} MiB on {gpus}"
        if holder.memory_bytes is not None
        else f"{gpus} open, which NVML does not list"
    )
    origin = f"of job {holder.job_id}, which is over" if holder.job_id else "of no job"
    known = orphan_s is not None
    return Finding(
        kind=Kind.ORPHAN_GPU_PROCESS,
        subject=_subject(node, holder.pid, holder.start_ticks),
        truth=Truth.BAD if known else Truth.UNKNOWN,
        summary=f"Process {holder.pid} ({holder.comm}) of {holder.user} on {node.name}, {origin}, still holds {memory}, "
        f"{f'since {orphan_s:.0f} s' if orphan_s is not None else 'and whether its job runs is not known'}.",
        severity=Severity.WARNING,
        culprits=tuple(
            Culprit(
                node=node.name,
                pid=holder.pid,
                gpu_uuid=uuid,
                reason=f"{holder.user}'s {holder.comm}, state {holder.state}",
            )
            for uuid in (holder.gpu_uuids or (None,))
        )
        if known
        else (),
        facts=(f"on {node.name}: ps -o pid,user,lstart,stat,cmd -p {holder.pid}",) if known else (),
        lasted_s=orphan_s or 0.0,
        process=(process := _may_be_ended(node, holder) if known else None),
        actionable=process is not None,
    )


def _may_be_ended(node: NodeView, holder: GpuHolder) -> GpuProcess | None:
    """The process as everybody who acts on it has to find it again; None if something about it is a guess."""
    if (
        not node.boot_id
        or not holder.job_id
        or not holder.was_in_job
        or not holder.minors
        or holder.uid <= MAX_SYSTEM_UID
    ):
        return None
    return GpuProcess(
        node=node.name, boot_id=node.boot_id, pid=holder.pid, start_ticks=holder.start_ticks, uid=holder.uid, user=holder.user,
        comm=holder.comm, job_id=holder.job_id, minors=holder.minors, gpu_uuids=holder.gpu_uuids,
        in_job_group=holder.in_job_group,
    )  # fmt: skip
