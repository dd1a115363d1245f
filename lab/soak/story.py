"""The two stories that are told on the stage: a soak of random faults, and a number of deaths of the
controller in the middle of actions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from lab.soak.faults import FAULTS, Mend, ask_restart, hang, kill_rank, stop_rank
from lab.soak.history import History, check, history_of
from lab.soak.stage import Stage, say

JOBS = (2, 1, 1)
"""Nodes of each of the jobs."""
STUCK_S = 90.0
"""So long nothing turns and nothing is done: then the hurt jobs are replaced."""
BETWEEN_S = (2.0, 8.0)
"""Between two faults."""


@dataclass
class Told:
    """What came of it."""

    history: History
    faults: Counter[str] = field(default_factory=Counter)
    deaths_in_actions: int = 0
    violations: list[str] = field(default_factory=list)


def soak(stage: Stage, minutes: float) -> Told:
    """Random faults until the minutes are over, then calm, and the judgement."""
    counted: Counter[str] = Counter()
    mending: list[tuple[float, Mend]] = []
    for nodes in JOBS:
        stage.submit(nodes)
    stage.wait_for(stage.turning, "a job to turn")
    names, weights = list(FAULTS), [weight for _, weight in FAULTS.values()]
    end = time.monotonic() + 60 * minutes
    next_at = 0.0
    while time.monotonic() < end:
        now = time.monotonic()
        mending = _mend(mending, now)
        if now >= next_at:
            next_at = now + stage.rng.uniform(*BETWEEN_S)
            name = stage.rng.choices(names, weights)[0]
            if not (stage.slurm_away or stage.frozen) or name in ("kill_controller", "garbage", "kill_agent"):
                counted[name] += 1
                lasting = FAULTS[name][0](stage)
                if lasting is not None:
                    mending.append((now + lasting[0], lasting[1]))
            _renew(stage)
            stage.mark()
            say(f"{name}: {sum(counted.values())} faults, {len(stage.open_actions())} open actions")
        time.sleep(0.2)
    _mend(mending, float("inf"))
    return judged(stage, counted)


def _mend(mending: list[tuple[float, Mend]], now: float) -> list[tuple[float, Mend]]:
    """What is still to be mended. A controller that did not come up is started again a second later."""
    left = [each for each in mending if each[0] > now]
    for _, mend in sorted((each for each in mending if each[0] <= now), key=lambda each: each[0]):
        if mend() is False:
            left.append((time.monotonic() + 1.0, mend))
    return left


def _renew(stage: Stage) -> None:
    """In the place of a job that is over comes another one; each third of them ends by itself after a minute."""
    if stage.slurm_away or stage.frozen:
        return
    live = [
        job for job in stage.cluster.squeue() if job["state"] in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING")
    ]
    if len(live) < len(JOBS):
        stage.submit(stage.rng.choice((1, 2)), steps=stage.rng.choice((120, 1_000_000, 1_000_000)))
    for job in live:
        if job["state"] == "PENDING" and job["reason"].startswith("JobHeld") and not stage.open_actions():
            stage.note("person release", job["job_id"])
            stage.cluster.slurm("scontrol", "release", job["job_id"], check=False)


def crash_points(stage: Stage, number: int, jobs: tuple[int, ...] = JOBS) -> Told:
    """The controller is killed that often in the middle of an action, at random moments, while Slurm answers
    as it likes."""
    counted: Counter[str] = Counter()
    deaths = 0
    for nodes in jobs:
        stage.submit(nodes)
    stage.wait_for(stage.turning, "a job to turn")
    while deaths < number:
        stage.tools.weather(stage.rng, 12, 0.5)
        for fault in stage.rng.sample((hang, stop_rank, kill_rank, ask_restart, ask_restart), 2):
            counted[fault.__name__] += 1
            fault(stage)
        for _ in _while_something_is_done(stage):
            stage.kill_controller()
            deaths += bool(stage.open_actions())
            say(f"{deaths} of {number} deaths, {len(stage.open_actions())} open actions")
            time.sleep(stage.rng.choice((0.1, 1.0, 4.0)))
            while not stage.start_controller():
                time.sleep(0.5)
            if deaths >= number:
                break
        _renew(stage)
        stage.mark()
    told = judged(stage, counted)
    told.deaths_in_actions = deaths
    return told


def _while_something_is_done(stage: Stage) -> Iterator[None]:
    """At random moments of the actions that are open now; a few to each round, so that they also come to their ends."""
    begun = time.monotonic()
    while not (stage.open_actions() or stage.turning()):
        if time.monotonic() > begun + STUCK_S:
            _give_up_hurt_jobs(stage)
            begun = time.monotonic()
        time.sleep(1.0)
    begun = time.monotonic()
    while not stage.open_actions() and time.monotonic() < begun + 45:
        time.sleep(0.05)
    for _ in range(stage.rng.randrange(1, 5)):
        moment = time.monotonic() + stage.rng.uniform(0, 9)
        while time.monotonic() < moment:
            time.sleep(0.02)
        if not stage.open_actions():
            return
        yield


def _give_up_hurt_jobs(stage: Stage) -> None:
    """What nothing is done about any more, for a reason that stands in the journal, a person ends."""
    hurt = set(stage.hurt_runs())
    for job_id in stage.jobs:
        job = stage.job(job_id)
        if job.get("JobState") == "RUNNING" and (job_id, int(job["Restarts"])) in hurt:
            stage.note("person scancel", job_id, int(job["Restarts"]))
            stage.cluster.slurm("scancel", job_id, check=False)
    _renew(stage)


def judged(stage: Stage, counted: Counter[str]) -> Told:
    """Calm, and then what the checker says."""
    say("calm")
    settle(stage)
    history = history_of(stage)
    return Told(history, counted, violations=check(history))


def settle(stage: Stage) -> None:
    """Everything that was begun comes to its end; every job turns, is over, or the journal says why not."""
    stage.tools.fates([])
    if not stage.controller_lives:
        stage.wait_for(stage.start_controller, "the controller to start")
    stage.wait_for(lambda: not stage.open_actions(), "every action to end in writing")
    stage.wait_for(
        lambda: not unexplained(stage),
        f"every job to turn, to be over or to be explained: {unexplained(stage)}",
    )
    stage.wait_for(lambda: not stage.open_actions(), "every action to end in writing")
    stage.wait_for(
        lambda: set(stage.watchdog.status()["nodes"]["reporting"]) >= set(stage.cluster.nodes),
        "every agent to report",
    )


def unexplained(stage: Stage) -> list[str]:
    """Jobs that stand, and nothing in the journal is about that run."""
    known = {
        run for incident in stage._read(lambda journal: journal.incidents(limit=10_000), []) for run in incident.runs
    }
    acted = {(d.fence.job_id, d.fence.restarts + 1) for d in stage.decisions() if d.fence is not None}
    hurt = set(stage.hurt_runs())
    found = []
    for job_id in stage.jobs:
        job = stage.job(job_id)
        run = (job_id, int(job.get("Restarts", 0)))
        if not job or job["JobState"] not in ("RUNNING", "PENDING", "COMPLETING"):
            continue
        if job["JobState"] == "PENDING" and (run in acted or job["Reason"] in ("Resources", "Priority", "JobHeldUser")):
            continue
        if job["JobState"] == "RUNNING" and (
            (run in known and run in hurt) or (run not in hurt and stage.steps_of(job_id) >= 2)
        ):
            continue
        found.append(f"{job_id}.{run[1]} {job['JobState']} {job['Reason']}")
    return found
