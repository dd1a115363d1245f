"""`save-all` of 500 jobs in simulated time, with the real controller and its journal: when each was proven to have saved,
beside when its trainer did. Some trainers do not look for their kill switch."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.bench.figures import Figures, say
from slurm_watchdog.model.actions import Operation, Wish
from slurm_watchdog.model.slurm import SlurmJob
from tests.behaviour.cluster import EPOCH, Job
from tests.behaviour.story import QUICK, Story

JOBS, DEAF = 500, 20
SLOWEST_STEP_S = 40
"""A trainer looks for its kill switch after each step."""
MORE_S = 10.0
"""What the project promises: so long after the slowest has saved all are known to have."""
WITHIN_S = 300.0


def run(figures: Figures) -> None:
    """All figures."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        story = Story(Path(directory), "mode: observe\n" + QUICK)
        try:
            _run(story, figures)
        finally:
            story.close()
    say(f"took {time.monotonic() - began:.0f} s")


def _run(story: Story, figures: Figures) -> None:
    jobs = _jobs(story)
    asked_at = story.timeline.now
    decisions: dict[str, Any] = {}

    async def ask() -> None:
        for job in jobs:
            seen = await story.cluster.read_job(job.id)
            assert isinstance(seen, SlurmJob)
            within: dict[str, Any] = {"wish": Wish.SAVE, "within_s": WITHIN_S}
            decisions[job.id] = story.controller.decider.ask_restart(seen, (), "maintenance", "root", **within)[1]

    story._run(ask())
    story.passes(seconds=WITHIN_S + 60)
    runs = {job.id: story.action(decisions[job.id]) for job in jobs}
    hear = jobs[DEAF:]
    proven = {
        job_id: record.outcome_at - EPOCH - asked_at
        for job_id, run in runs.items() if run.end is not None and run.end.ok
        for record in run.records if record.operation is Operation.WAIT_CHECKPOINT and record.outcome_at is not None
    }  # fmt: skip
    slowest_s = max(job.saved_at - asked_at for job in hear if job.saved_at is not None)
    say(f"{len(jobs)} jobs, {len(hear)} see their kill switch; the slowest trainer has saved after {slowest_s:.0f} s")
    figures.add("save_all.saved_and_proven", sum(job.id in proven for job in hear) / len(hear), "1", at_least=1)
    figures.add(
        "save_all.seconds_after_the_slowest", max(proven.values(), default=WITHIN_S) - slowest_s, "s", at_most=MORE_S
    )
    figures.add("save_all.unproven_called_saved", float(sum(job.id in proven for job in jobs[:DEAF])), "1", at_most=0)


def _jobs(story: Story) -> list[Job]:
    """All of them running, a node each, a while ago."""
    chance, cluster = random.Random(1), story.cluster
    cluster.add_nodes(*(f"m{number}" for number in range(JOBS)))
    jobs = []
    for number in range(JOBS):
        job = Job(str(100 + number), wants=1, user=f"u{number % 40}", step_s=float(chance.randint(2, SLOWEST_STEP_S)))
        job.save_every, job.exits_after_saving = 10**6, False  # what it saves it was asked to
        cluster.jobs[job.id] = job
        cluster.start(job)
        job.hears_switch = number >= DEAF
        jobs.append(job)
    story.passes(seconds=2.5 * SLOWEST_STEP_S)
    return jobs
