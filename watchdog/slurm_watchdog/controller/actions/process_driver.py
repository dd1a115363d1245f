"""What an action about a process sees of the world, and how it pulls its levers; the rest is as for jobs, in
slurm_watchdog.controller.actions.driver."""

from __future__ import annotations

import re

from slurm_watchdog.actuate import gpu_process as lever
from slurm_watchdog.base import clock
from slurm_watchdog.controller.actions.ladder.process import SIGNALS, described
from slurm_watchdog.controller.actions.ladder.state import Observed
from slurm_watchdog.controller.actions.tools import Tools
from slurm_watchdog.controller.policy.orphan_process import objection, objection_by_slurm
from slurm_watchdog.model.actions import ActionRun, Operation, Outcome
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.protocol import ProcessEnd
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable


async def observe(run: ActionRun, process: GpuProcess, tools: Tools, taken_up_at: float) -> Observed:
    """Its node is asked once something was tried; Slurm about its job each time, and by its listing about its
    user's others."""
    seen = await lever.query(tools.commands.ask, process, tools.command_deadline_s) if run.records else None
    now = clock.monotonic()
    listed_at = tools.state.slurm_at
    known = listed_at is not None and now - listed_at <= tools.listing_lasts_s
    jobs = list(tools.state.jobs.values())
    try:
        job = await tools.slurm.read_job(process.job_id)
    except SlurmUnavailable:
        known = False
    except SlurmRefused:
        pass  # the id of a whole array as well: of its elements the listing knows
    else:
        jobs += [] if job is None else [job]
    if run.records:
        why_not = objection_by_slurm(process, jobs)
    else:
        reports = process.node in tools.state.reporting_nodes(now)
        why_not = objection(process, tools.state.nodes.view(process.node), reports, jobs)
    return Observed(
        now=clock.wall(),
        job_known=known,
        paused=tools.paused(),
        taken_up_at=taken_up_at,
        process=seen,
        process_objection=why_not,
    )


async def send(process: GpuProcess, operation: Operation, tools: Tools) -> Outcome:
    """The signal of this operation."""
    return await lever.send(tools.commands.ask, process, SIGNALS[operation], tools.command_deadline_s)


def drain_reason(run: ActionRun, process: GpuProcess, seen: ProcessEnd, prefix: str) -> str:
    """For the administrators, in Slurm's node listing. Names that a user gave go without what a terminal or a
    parser would mind."""
    text = f"unkillable {described(run, process, seen)}, incident {run.decision.incident_id}"
    return f"{prefix} {re.sub(r'[^A-Za-z0-9 ,.:;()/_@+-]', '_', text)}"
