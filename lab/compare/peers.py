"""What is compared: how each is started in a batch script, what its verdict looks like, and what the training has to
change for it. A row is a peer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lab.compare.changes import HEARTBEATS, SECTIONS, Change

MAX_RESTARTS = 3
"""torchrun's and ft_launcher's default is 0 or unlimited; no case needs more than one."""
LOG_AGE_S = 300.0
"""After which a log that does not grow counts as a hang: five minutes, as FlagScale has it."""

ELASTIC = (
    "--nnodes={nnodes} --nproc-per-node=1 --max-restarts=" + str(MAX_RESTARTS) + " --rdzv-backend=c10d "
    "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT --rdzv-id=$SLURM_JOB_ID"
)
_EXIT = r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\)"
_NVRX_LATE = r"Did not get (?:initial|subsequent) heartbeat|Section '[^']*' has been open|Was out of section"


@dataclass(frozen=True)
class Peer:
    """One of those who restart trainings."""

    name: str
    what: str
    """For the table: release and settings."""
    distribution: str
    """Of which package; empty: none."""
    command: str
    """On each node; {python}, {nnodes}, {trainer} (with its words) are filled in."""
    verdict: str
    """A line with it, as a regular expression. Who is named is where it comes from, or the node that it says."""
    before: str = ""
    """Shell lines of the batch script before that; {python} and {nodes} are filled in."""
    options: tuple[str, ...] = ()
    """Of the trainer."""
    changes: tuple[Change, ...] = ()
    also_changed: int = 0
    """Lines of the training besides, which the trainer has as options."""
    log_age_s: float | None = None
    """Of the script that looks at the log from outside."""
    directories: tuple[str, ...] = ()
    """Fixed paths that it writes to: the nodes share the machine's /tmp, so each gets its own there."""
    probe: str = ""
    """A module that has to be importable."""
    remark: str = ""

    def line_of_verdict(self) -> re.Pattern[str]:
        return re.compile(self.verdict)


PEERS: tuple[Peer, ...] = (
    Peer(
        "torchrun",
        "restarts; the process group's time-out as PyTorch ships it (gloo: 30 min)",
        "torch",
        "{python} -m torch.distributed.run " + ELASTIC + " {trainer}",
        _EXIT,
        options=("--group-timeout=0",),
        probe="torch.distributed.run",
    ),
    Peer(
        "torchrun_60s",
        "restarts; a process group's time-out of 60 s",
        "torch",
        "{python} -m torch.distributed.run " + ELASTIC + " {trainer}",
        _EXIT,
        options=("--group-timeout=60",),
        also_changed=1,
        probe="torch.distributed.run",
    ),
    Peer(
        "nvrx_heartbeats",
        "`ft_launcher`; limits learnt from its heartbeats (5 × the longest pause)",
        "nvidia-resiliency-ext",
        "{python} -m nvidia_resiliency_ext.fault_tolerance.launcher " + ELASTIC + " {trainer}",
        f"{_EXIT}|{_NVRX_LATE}",
        options=("--group-timeout=0",),
        changes=HEARTBEATS,
        probe="nvidia_resiliency_ext.fault_tolerance.launcher",
    ),
    Peer(
        "nvrx_sections",
        "`ft_launcher`; sections with the limits of its Slurm example (step 60 s, checkpoint 300 s, outside 90 s)",
        "nvidia-resiliency-ext",
        "{python} -m nvidia_resiliency_ext.fault_tolerance.launcher "
        + ELASTIC
        + " --ft-rank-section-timeouts=setup:900,step:60,checkpointing:300 "
        "--ft-rank-out-of-section-timeout=90 {trainer}",
        f"{_EXIT}|{_NVRX_LATE}",
        options=("--group-timeout=0",),
        changes=SECTIONS,
        probe="nvidia_resiliency_ext.fault_tolerance.launcher",
    ),
    Peer(
        "dlrover",
        "`dlrover-run` with its local master",
        "dlrover",
        "NODE_ID=$SLURM_NODEID NODE_RANK=$SLURM_NODEID NODE_NUM=$SLURM_NNODES POD_NAME=worker-$SLURM_NODEID "
        "DLROVER_MASTER_ADDR=$MASTER_ADDR:$MASTER_PORT {python} -m dlrover.trainer.torch.main --nnodes={nnodes} --nproc-per-node=1 "
        f"--max-restarts={MAX_RESTARTS} " + "{trainer}",
        _EXIT,
        before="{python} -m dlrover.python.master.main --platform local --node_num {nodes} --job_name $SLURM_JOB_ID "
        "--port $MASTER_PORT &\n",
        options=("--group-timeout=0",),
        directories=("/tmp/dlrover", "/tmp/ckpt_sock"),
        probe="dlrover.trainer.torch.main",
        remark="its hang detection reads the GPUs' tensor units, and is part of its master for Kubernetes only",
    ),
    Peer(
        "log_age",
        "a script that looks at the log's age: 5 min, then `scontrol requeue`",
        "",
        "{python} {trainer}",
        "",
        options=("--group-timeout=0",),
        log_age_s=LOG_AGE_S,
    ),
)


def named(wanted: Sequence[str]) -> tuple[Peer, ...]:
    """The peers with one of these in their names; all without any."""
    return tuple(peer for peer in PEERS if not wanted or any(each in peer.name for each in wanted))
