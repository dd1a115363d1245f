"""The section `agent` of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from slurm_watchdog.config.types import AbsolutePath, AddressOrNone, Seconds, Section, Span, template


class Agent(Section, frozen=True):
    """The daemon on every compute node."""

    node_name: str = "auto"
    """Slurm's name of this node; auto = SLURMD_NODENAME, otherwise the short host name."""
    interval: Span = 5.0
    """Time between two reports."""
    metrics_listen: AddressOrNone = "127.0.0.1:9766"
    """Address of the agent's /metrics for Prometheus: the node's own, to be scraped from elsewhere; empty =
    none."""
    give_up_after: Seconds = 0.0
    """An agent whose controller has not answered for so long ends; 0s = never, as a service should. Agents of
    `slurm-watchdog run --job` have 10min."""
    probe_deadline: Span = 10.0
    """A child that has not answered by then is reported as hung; it gets no new requests and is not
    replaced."""
    state_directory: AbsolutePath = "/var/lib/slurm-watchdog-agent"
    """Where the agent remembers how far it has read the kernel's log: on a local disk; empty = nowhere. Not the
    controller's directory, for a node may run both."""
    kernel_log: AbsolutePath = "/dev/kmsg"
    """The kernel's log, read for GPU, filesystem, memory and network faults; empty = not read."""
    helper_socket: AbsolutePath = "/run/slurm-watchdog-helper/socket"
    """Socket of the helper, which performs privileged operations for an agent without rights. Not used by root,
    nor where it does not exist or this user may not write to it; empty = never."""
    core_debugger: bool = False
    """Has gdb read the frames out of a job's core file, as the job's owner. gdb then is a program of that user
    outside of the job's limits, and the user can take it over (ptrace, /proc/PID/mem). The helper needs
    --core-debugger as well."""
    mount_probe_interval: Span = 60.0
    """Time between two probes of each filesystem that a job on this node uses."""
    mount_probe_write: tuple[str, ...] = ()
    """Mount points on which the probe also writes and reads back a small file, in a directory and as the owner
    of a job that runs there, such as [/scratch]. Without it, it only looks, which a frozen filesystem still
    answers."""
    checkpoint_interval: Span = 30.0
    """Time between two looks at the checkpoint directories of a job (by its batch host)."""
    orphan_grace: Seconds = 60.0
    """Time a job's processes get after its end to let go of their GPUs before they are reported."""
    log_patterns: tuple[Annotated[str, template("job_id", "user", "workdir", "node")], ...] = ()
    """Further logs of a job to follow, besides what Slurm and its processes name: paths with {job_id} {user}
    {node} {workdir}; * ? and [abc] stand for names, such as {workdir}/logs/rank*.out."""

    def problems(self) -> Iterator[str]:
        for index, mount in enumerate(self.mount_probe_write):
            if not mount.startswith("/"):
                yield f"mount_probe_write[{index}]: must be a mount point such as /scratch, got {mount!r}"
