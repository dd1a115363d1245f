"""What an agent's collectors and commands share, of stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slurm_watchdog.agent.collectors.collector import Sections
from slurm_watchdog.agent.processes.jobs_here import JobsHere


def context_of(children: Any, logs: Any, **given: Any) -> Any:
    """On node n1, where nothing is known of processes, and none is ended; but for what is `given`."""
    processes = SimpleNamespace(
        environ_of=lambda job_id: {},
        details_of=lambda pid, start_ticks: None,
        error_files_of=lambda job_id: {},
        table=SimpleNamespace(entries={}),
        ours=frozenset(),
    )
    usual = {
        "node": "n1",
        "boot_id": "now",
        "kernel_records": (),
        "settings": SimpleNamespace(probe_deadline=5.0, kernel_log=""),
        "sections": Sections(),
        "jobs": getattr(logs, "here", None) or JobsHere(),
        "processes": processes,
        "orphan_gpu_processes": SimpleNamespace(objection=lambda *asked: "no process is inspected here"),
    }
    return SimpleNamespace(children=children, logs=logs, **(usual | given))
