"""One case on the stage: what was said, when, about whom; and whether anybody was harmed."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lab.live.cases import DIAGNOSIS_S, Fault, Healthy
from lab.live.stage import Job, Stage, typical

SLACK_S = 90.0
"""Past a bound the verdict is still waited for, so that the figure says by how much it was missed."""
LOOK_EVERY_S = 0.3
SETTLE_S = 4.0
"""After the diagnosis: what else is said about the same job."""
QUIET_STEPS = 40
FEW_STEPS, SLOWER = 15, 1.04
"""`slow_job` tells of 5 %; its estimate and a median over a few steps differ a little."""
HARM = 1.25
"""A step may take so much longer while evidence is taken, compared with the median before it: other load
moves it by a tenth."""


@dataclass
class Result:
    """Of one fault, or of one healthy phase."""

    name: str
    bound_s: float | None = None
    asks_ranks: bool = True
    """Whether ranks are asked for evidence, and a diagnosis comes of it."""
    verdict_s: float | None = None
    diagnosis_s: float | None = None
    culprit_right: bool = False
    diagnosis_right: bool = False
    false_incidents: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    acted: bool = False
    resumed: bool | None = None
    steps_lost: int | None = None
    step_ratio: float | None = None
    remarks: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.remarks.append(text)
        tell(f"{self.name}: {text}")


def tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} live: {text}\n")
    sys.stderr.flush()


def alone_on_scratch(stage: Stage, options: tuple[str, ...]) -> AbstractContextManager[object]:
    """For a training that writes to the nodes' own filesystems: no other one does meanwhile."""
    return stage.scratch if any("{scratch}" in each for each in options) else nullcontext()


def run_fault(stage: Stage, fault: Fault, launcher: str, *, act: bool = False) -> Result:
    """Breaks a training and looks at what is said. With `act` it is waited for until it is restarted and
    makes new steps."""
    with alone_on_scratch(stage, fault.options):
        return _run_fault(stage, fault, launcher, act=act)


def _run_fault(stage: Stage, fault: Fault, launcher: str, *, act: bool) -> Result:
    result = Result(
        f"{'act.' if act else ''}{fault.name}.{launcher}", bound_s=fault.within_s, asks_ranks=fault.asks_ranks
    )
    options = [each.format(scratch=stage.cluster.scratch) for each in fault.options]
    job = stage.submit(fault.name, *options, launcher=launcher, steps=fault.steps)
    try:
        stage.training(job, 22 if act else 15)
        at = fault.break_it(job)
        incident = _first(job, fault, result, at)
        if incident is None:
            return result
        result.verdict_s = max(0.0, incident["seen"] - at)
        result.culprit_right = _named(job, fault, incident["culprits"], "node")
        result.say(f"{incident['kind']} after {result.verdict_s:.1f} s: {incident['summary']}")
        if fault.asks_ranks:
            _diagnosis(job, fault, result, incident)
        if not act and fault.asks_ranks:
            result.stopped = [each for each in job.stopped() if fault.name != "stopped"]
        if act:
            _restarted(job, result)
        else:
            result.acted = int(stage.cluster.job(job.job_id)["Restarts"]) > 0
        return result
    finally:
        fault.mend(job)
        job.end()


def _first(job: Job, fault: Fault, result: Result, at: float) -> dict[str, Any] | None:
    """The first incident of a kind that is expected; what else fires before is false, unless it is true as well."""
    told: set[str] = set()
    while time.time() < at + fault.within_s + SLACK_S:
        for each in job.incidents():
            if each["kind"] in fault.kinds:
                return each | {"seen": time.time()}
            if each["id"] not in told and each["kind"] not in fault.also:
                told.add(each["id"])
                result.false_incidents.append(f"{each['kind']}: {each['summary']}")
                result.say(f"FALSE {each['kind']}: {each['summary']}")
        job.stage.pause(LOOK_EVERY_S)
    result.say(f"NOTHING was said; its log ends with: {job.text()[-300:]}")
    return None


def _named(job: Job, fault: Fault, culprits: list[dict[str, Any]], node: str) -> bool:
    """Whether the culprits are the ranks to blame, with the node and the process id that they themselves know."""
    said = sorted((each["rank"], each[node], each["pid"]) for each in culprits)
    wanted = sorted((rank, job.rank(rank)["node"], job.rank(rank)["pid"]) for rank in fault.ranks)
    return said == wanted or (fault.or_nobody and not said)


def _diagnosis(job: Job, fault: Fault, result: Result, incident: dict[str, Any]) -> None:
    deadline = time.time() + DIAGNOSIS_S + SLACK_S
    while (document := job.diagnosis()) is None:
        if time.time() > deadline:
            result.say("no diagnosis came")
            return
        job.stage.pause(LOOK_EVERY_S)
    result.diagnosis_s = time.time() - incident["seen"]
    spared = fault.may_work and not document["culprits"]
    result.diagnosis_right = spared or _named(job, fault, document["culprits"], "host")
    result.say(f"diagnosis after {result.diagnosis_s:.1f} s: {document['class']}: {document['summary']}")
    if not (result.culprit_right and result.diagnosis_right):
        result.say(f"WRONG culprits: {incident['culprits']} and {document['culprits']}")
        for group in document["groups"]:
            result.say(f"  ranks {group['ranks']}: {group['place']}: {' < '.join(group['frames'][:6])}")


def _restarted(job: Job, result: Result) -> None:
    """Waits for the end of the action, whichever of the job's incidents it is about."""

    def ended() -> Any:
        watchdog = job.stage.watchdog
        actions = [a for each in watchdog.incidents(job.job_id) for a in watchdog.explain(each["id"])["actions"]]
        return next((a for a in actions if a["end"]), None)

    end = job.stage.until(ended, 400, f"the action for {result.name} to end")["end"]
    result.acted = True
    result.resumed = bool(end["ok"])
    result.steps_lost = end["steps_lost"]
    result.say(f"restarted: {end}")


def run_healthy(stage: Stage, thing: Healthy, launcher: str) -> Result:
    """Watches a training that is well. Midway its ranks are asked for evidence: its steps may not suffer."""
    with alone_on_scratch(stage, thing.options):
        return _run_healthy(stage, thing, launcher)


def _run_healthy(stage: Stage, thing: Healthy, launcher: str) -> Result:
    result = Result(f"healthy.{thing.name}.{launcher}")
    options = [each.format(scratch=stage.cluster.scratch) for each in thing.options]
    job = stage.submit(thing.name, *options, launcher=launcher, steps=120 if thing.ends else 100000)
    try:
        stage.training(job, 15)
        end = time.time() + thing.watch_s
        thing.disturb(job)
        if not (thing.options or thing.ends):
            _ask(job, result)
        told: set[str] = set()
        while time.time() < end:
            for each in job.incidents():
                if each["id"] not in told:
                    told.add(each["id"])
                    if each["kind"] == "slow_job" and _is_slower(job):
                        result.say(f"the machine has slowed it down: {each['summary']}")
                        continue
                    result.false_incidents.append(f"{each['kind']}: {each['summary']}")
                    result.say(f"FALSE {each['kind']}: {each['summary']}")
            job.stage.pause(LOOK_EVERY_S)
        result.stopped = job.stopped()
        result.acted = not thing.ends and int(stage.cluster.job(job.job_id)["Restarts"]) > 0
        result.say(f"{len(result.false_incidents)} incidents in {thing.watch_s:.0f} s, {job.steps()[-1][0]} steps")
        return result
    finally:
        job.end()


def _is_slower(job: Job) -> bool:
    """Whether the trainer itself says that its last steps took longer: other work on the machine is no
    mistake of the watchdog's."""
    steps = [seconds for _, seconds in job.steps()[5:]]
    return len(steps) > 3 * FEW_STEPS and median(steps[-FEW_STEPS:]) > SLOWER * median(steps[:FEW_STEPS])


def _ask(job: Job, result: Result) -> None:
    """Evidence of a training that makes steps: nobody may be named, and nothing may get slower."""
    job.stage.until(lambda: len(job.steps()) >= QUIET_STEPS, 120, "quiet steps")
    before = job.steps()
    done = job.stage.watchdog.command("diagnose", job.job_id, "--json")
    during = job.steps()[len(before) :]
    result.step_ratio = typical(during) / typical(before[5:])
    result.say(
        f"a step took {typical(before[5:]):.4f} s before evidence was taken and {typical(during):.4f} s meanwhile ({len(during)} steps)"
    )
    if done.returncode != 0:
        result.false_incidents.append(f"diagnose: {done.stdout[-300:]}{done.stderr[-300:]}")
