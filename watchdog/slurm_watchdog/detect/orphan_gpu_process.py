"""`orphan_gpu_process`: processes hold GPUs and belong to no running job.

What one job of one user left behind is one finding, on however many nodes; of processes without a job, what each user
has on each node. A process may be ended, if a site wants that, only where nothing about it is a guess: it came from a
job of an ordinary user, which its control group shows or the agent saw, and it has the device itself open.

Fires: a process holds a GPU and belongs to no running job for longer than `agent.orphan_grace`.
Names: what one job left behind, on however many nodes, as one incident: processes, user, GPUs, memory in all.
Acts: `[end_process]` is the ladder for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slurm_watchdog.analysis.slurm_nodes import nodes_to_judge
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import duration, size
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.knowledge.gpu_daemons import MAX_SYSTEM_UID
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding, GpuProcess
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import GpuHolder

MAX_LISTED = 64  # Processes with a line of their own, and nodes with a command: a job may have a thousand loaders.
MAX_PROCESSES = 256  # Of one finding that may be ended; the others follow. An agent reports as many.
GPUS_IN_SENTENCE = 4  # Their UUIDs have 40 characters each: of more a sentence says how many.
NODES_IN_SENTENCE = 12  # Further ones are counted; the facts have a command for each.

Held = tuple[NodeView, GpuHolder]


@dataclass
class _Leftovers:
    """What is known of one subject."""

    held: list[Held] = field(default_factory=list)
    unknown: list[Held] = field(default_factory=list)  # Whether their job runs is not known, or their node is silent.
    released: list[Held] = field(default_factory=list)


def detect(view: ClusterView) -> list[Finding]:
    """One finding for what each job left, and for each user's processes without a job on a node. A holder of
    which no one knows whether its job runs, or whose node is silent, is unknown: it clears nothing."""
    silent = set(view.silent_nodes)
    found: dict[str, _Leftovers] = {}
    for node in nodes_to_judge(view):
        for holder in node.holders:
            group = found.setdefault(_subject(node, holder), _Leftovers())
            sure = holder.orphan_for_s is not None and node.name not in silent
            (group.held if sure else group.unknown).append((node, holder))
        if node.name in silent:
            continue
        for holder in node.released:
            found.setdefault(_subject(node, holder), _Leftovers()).released.append((node, holder))
    back = {each.job.process_id for each in (*view.ageless_jobs, *view.waiting) if each.job.restarts}
    return [_holder_finding(subject, group, back) for subject, group in found.items()]


def _subject(node: NodeView, holder: GpuHolder) -> str:
    """By user as well: the number of a job may come from an environment, which anybody can set."""
    if holder.job_id is None:
        return f"holders:{node.name}/{holder.uid}"
    return f"leftovers:{holder.job_id}/{holder.uid}"


def _holder_finding(subject: str, group: _Leftovers, back: set[str]) -> Finding:
    if group.held:
        return _reported(subject, group, back)
    known = group.unknown or group.released
    whose, nodes = _whose(known[0][1], back), _node_names(known)
    finding = SPEC.about(subject)
    return finding if group.unknown else finding.ok(f"no process {whose} holds a GPU on {nodes} any more")


def _reported(subject: str, group: _Leftovers, back: set[str]) -> Finding:
    held = sorted(group.held, key=lambda each: (each[0].name, _gpus(each[1]), each[1].pid))
    first, duration_s = held[0][1], max(holder.orphan_for_s or 0.0 for _, holder in held)
    one = len(held) == 1
    gpus = [f"{node.name} {gpu}" for node, holder in held for gpu in _gpus(holder)]
    gpus = [gpu.partition(" ")[2] for gpu in dict.fromkeys(gpus)]
    names = ", ".join(gpus) or "a GPU" if len(gpus) <= GPUS_IN_SENTENCE else f"{len(gpus)} GPUs"
    process_words = f"pid {first.pid} ({first.comm}), " if one else ""
    count = "1 process" if one else f"{len(held)} processes"
    processes = tuple(process for each in held if (process := _may_be_ended(*each)))[:MAX_PROCESSES]
    return SPEC.about(subject).bad(
        f"{count} {_whose(first, back)} still hold{'s' if one else ''} {names} on {_node_names(held)}: {process_words}"
        f"{_memory([holder for _, holder in held])}, for {duration(duration_s)}.",
        culprits=tuple(
            Culprit(
                node=node.name,
                rank=holder.rank,
                pid=holder.pid,
                gpu_uuid=uuid,
                reason=f"{holder.user}'s {holder.comm}, state {holder.state}",
            )
            for node, holder in held[:MAX_LISTED]
            for uuid in (holder.gpu_uuids or (None,))
        ),
        facts=tuple(_facts(held, group.unknown)),
        duration_s=duration_s,
        actionable=bool(processes),
        processes=processes,
    )


def _whose(holder: GpuHolder, back: set[str]) -> str:
    if holder.job_id is None:
        return f"of {holder.user}, of no job,"
    if holder.job_id in back:
        return f"of an earlier run of {holder.user}'s job {holder.job_id}"
    return f"of {holder.user}'s job {holder.job_id}, which is over,"


def _nodes(held: Iterable[Held]) -> list[str]:
    return list(dict.fromkeys(node.name for node, _ in held))


def _node_names(held: Iterable[Held]) -> str:
    names = _nodes(held)
    more = len(names) - NODES_IN_SENTENCE
    return ", ".join(names[:NODES_IN_SENTENCE]) + (f" and {more} more" if more > 0 else "")


def _gpus(holder: GpuHolder) -> tuple[str, ...]:
    return holder.gpu_uuids or tuple(f"/dev/nvidia{minor}" for minor in holder.minors)


def _memory(holders: Sequence[GpuHolder]) -> str:
    known = [holder.memory_bytes for holder in holders if holder.memory_bytes is not None]
    if not known:
        return "how much memory is not known"
    least = "at least " if len(known) < len(holders) else ""
    return f"{least}{size(sum(known))}{' in all' if len(holders) > 1 else ''}"


def _facts(held: Sequence[Held], unknown: Sequence[Held]) -> Iterable[str]:
    """A line for each process, what is not known, and how to look at them."""
    for node, holder in held[:MAX_LISTED]:
        index = f"GPU {', '.join(map(str, holder.minors))}" if holder.minors else "GPU"
        uuids = f" ({', '.join(holder.gpu_uuids)})" if holder.gpu_uuids else ""
        memory = "not listed by NVML" if holder.memory_bytes is None else size(holder.memory_bytes)
        rank = "" if holder.rank is None else f", rank {holder.rank}"
        yield f"{node.name}: pid {holder.pid} ({holder.comm}){rank}, {index}{uuids}, {memory}, state {holder.state}"
    if len(held) > MAX_LISTED:
        yield f"and {len(held) - MAX_LISTED} more processes"
    if unknown:
        yield f"{len(unknown)} more on {_node_names(unknown)}: what became of them is not known"
    for name in _nodes(held)[:MAX_LISTED]:
        pids = [str(holder.pid) for node, holder in held if node.name == name][:MAX_LISTED]
        yield f"on {name}: ps -o pid,user,lstart,stat,cmd -p {','.join(pids)}"


def _may_be_ended(node: NodeView, holder: GpuHolder) -> GpuProcess | None:
    """The process as everybody who acts on it has to find it again; None if something about it is a guess."""
    sure = node.boot_id and holder.job_id and holder.was_in_job and holder.minors and holder.uid > MAX_SYSTEM_UID
    return picked(GpuProcess, holder, node=node.name, boot_id=node.boot_id) if sure else None


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.PROCESS,
    needs_cluster=True,
    sentence="A process of a job that is over holds a GPU",
    site_may_act=True,
    alerts=("SlurmWatchdogNodeTrouble",),
    hint=Hint(
        usually="A process of an ended job still holds the GPU, often a DataLoader worker.",
        try_next="Check that its job is over, then kill it; proctrack/cgroup in slurm.conf ends all of a "
        "job's processes.",
        documented="slurm.conf, ProctrackType",
    ),
)
