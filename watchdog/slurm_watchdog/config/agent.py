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
    """Where the agent serves /metrics to Prometheus; empty = nowhere."""
    give_up_after: Seconds = 0.0
    """An agent whose controller has not answered for so long ends; 0s = never."""
    probe_deadline: Span = 10.0
    """A child that has not answered by then is reported as hung, gets no new requests and is not replaced."""
    state_directory: AbsolutePath = "/var/lib/slurm-watchdog-agent"
    """Where the agent remembers how far it has read the kernel's log: on a local disk; empty = nowhere."""
    kernel_log: AbsolutePath = "/dev/kmsg"
    """The kernel's log, read for hardware, filesystem and memory faults; empty = not read."""
    helper_socket: AbsolutePath = "/run/slurm-watchdog-helper/socket"
    """Socket of the helper, for an agent that is not root; empty = never used."""
    mount_probe_interval: Span = 60.0
    """Time between two probes of each filesystem that a job on this node uses."""
    mount_probe_write: tuple[str, ...] = ()
    """Mount points on which the probe also writes a small file, as the owner of a job that runs there, such as
    [/scratch]."""
    checkpoint_interval: Span = 30.0
    """Time between two looks at a job's checkpoint directories."""
    orphan_grace: Seconds = 60.0
    """Time that processes of a job that is over get to let go of their GPUs before they are reported."""
    log_patterns: tuple[Annotated[str, template("job_id", "user", "workdir", "node")], ...] = ()
    """Further logs of a job: paths with {job_id} {user} {node} {workdir} and * ? [abc], such as
    '{workdir}/logs/*.out'."""

    def problems(self) -> Iterator[str]:
        for index, mount in enumerate(self.mount_probe_write):
            if not mount.startswith("/"):
                yield f"mount_probe_write[{index}]: must be a mount point such as /scratch, got {mount!r}"
