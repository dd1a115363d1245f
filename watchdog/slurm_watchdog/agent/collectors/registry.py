"""All collectors, in the order in which they look: each may use what those before it saw in the same tick."""

from __future__ import annotations

from slurm_watchdog.agent.collectors import (
    checkpoint,
    gpu,
    job_directives,
    job_log,
    kernel_log,
    link,
    mount,
    orphan_gpu_process,
    process,
    supervisor,
    usage,
)
from slurm_watchdog.agent.collectors.collector import CollectorSpec

COLLECTORS: tuple[CollectorSpec, ...] = (
    process.SPEC,
    job_log.SPEC,
    mount.SPEC,
    checkpoint.SPEC,
    gpu.SPEC,
    orphan_gpu_process.SPEC,
    kernel_log.SPEC,
    job_directives.SPEC,
    supervisor.SPEC,
    usage.SPEC,
    link.SPEC,
)
