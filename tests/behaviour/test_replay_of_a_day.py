"""A day on which every guard takes an action away, recorded by the real controller: its replay decides the
same, reason for reason.

Everything is found by the real detectors in what the scripted nodes report, for a replay has nothing else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.policy.guards import GUARDS
from slurm_watchdog.model.actions import Action, Decision, Verdict
from slurm_watchdog.model.incidents import Incident, IncidentKind
from slurm_watchdog.model.observations import Blocked, Gpu, GpuHolder, LogFile, MountProbe, Process
from slurm_watchdog.model.protocol import Command, CommandResult, EndProcess, ProcessEnd
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.recording.recorder import Recorder
from slurm_watchdog.replay.player import Outcome, replay
from slurm_watchdog.slurm.client import Refusal, SlurmRefused
from tests.behaviour.cluster import LOG, UID, Job, Scripted
from tests.behaviour.story import DyingJournal, Story

TICK_S = 5.0
NOT_THAT_DAY = frozenset({"same_hang", "switch_unknown", "shared_switch", "chained", "disk_full"})
"""What objects by stacks, step times and kill switches, which the nodes of this day do not report: see
tests/unit/controller/test_hang_memory.py and tests/behaviour/test_graceful.py."""
CONFIG = """
mode: act
controller: {warm_up: 60s, tick: 6s}
slurm: {poll_interval: 5s, deadline: 5s}
ladder: {step_limit: 60s}
detectors: {gpu_fault: {recent: 60s}}
policy:
  cooldown: 4min
  attempts: 2
  budget: 3
  budget_percent: 100
  budget_window: 8min
  storm_jobs: 3
  storm_cooldown: 1min
  max_excluded_nodes: 1
  max_drained_nodes: 1
  drained_percent: 100
  kinds:
    gpu_fault: {ladder: [requeue]}
    orphan_gpu_process: {ladder: [end_process]}
    rank_stopped: {mode: observe}
  overrides:
    - {match: {job_name: gentle}, kinds: [gpu_fault], ladder: [kill_switch, requeue]}
    - {match: {job_name: drained}, kinds: [gpu_fault], drain: true}
    - {match: {job_name: eager}, kinds: [gpu_fault], cooldown: 0s, exclude_nodes: false}
    - {match: {job_name: watched}, mode: observe}
    - {match: {job_name: asleep}, no_action: ['00:00-24:00']}
"""


@dataclass
class Sick(Scripted):
    """The scripted cluster, whose GPUs fall off the bus, whose ranks are stopped and whose filesystem freezes."""

    lost: set[tuple[str, int]] = field(default_factory=set)
    """(node, index) of GPUs that are gone."""
    broken_memory: set[str] = field(default_factory=set)
    """Nodes with a memory error on GPU 1."""
    stopped: set[str] = field(default_factory=set)
    """Jobs whose first rank was stopped by a signal."""
    frozen: set[str] = field(default_factory=set)
    """Jobs that are blocked on the filesystem."""
    orphans: dict[str, int] = field(default_factory=dict)
    """Node -> the pid of a process there that outlived its job."""
    unreadable: set[str] = field(default_factory=set)
    """Jobs of which Slurm does not say where they run."""

    def _as_slurm_has_it(self, job: Job) -> SlurmJob:
        listed = super()._as_slurm_has_it(job)
        return replace(listed, unreadable=("start_at",)) if job.id in self.unreadable else listed

    def report(self, node: str, sequence: int, agent_id: str, *, again: bool = False) -> Report:
        made = super().report(node, sequence, agent_id, again=again)
        pids = tuple(each.pid for each in made.processes)
        return replace(
            made,
            processes=tuple(self._shown(each) for each in made.processes),
            logs=tuple(LogFile(job_id=each.job_id, path=LOG, growth_age_s=1.0, offset=sequence) for each in made.processes if each.rank == 0),
            gpus=tuple(self._gpu(node, index, pids) for index in (0, 1)),
            mounts=tuple(
                MountProbe(mount="/s", responding=False, seconds=90.0, device="srv:/s", fs_type="nfs4")
                for each in made.processes if each.job_id in self.frozen
            ),
            gpu_holders=(self._orphan(node),) if node in self.orphans else (),
        )  # fmt: skip

    def _shown(self, process: Process) -> Process:
        if process.job_id in self.stopped and process.rank == 0:
            return replace(process, state="T", state_age_s=300.0)
        if process.job_id in self.frozen:
            call = Blocked(
                thread_id=process.pid, seconds=90.0, state="D", syscall="write", path="/s/log", mount="/s", fs_type="nfs4",
                device="srv:/s",
            )  # fmt: skip
            return replace(process, state="D", state_age_s=90.0, blocked=call)
        return process

    def _gpu(self, node: str, index: int, pids: tuple[int, ...]) -> Gpu:
        return Gpu(
            uuid=f"GPU-{node}-{index}", index=index, minor=index, pids=pids,
            error="NVML_ERROR_GPU_IS_LOST: GPU is lost" if (node, index) in self.lost else None,
            ecc_uncorrected=int(index == 1 and node in self.broken_memory),
        )  # fmt: skip

    def _orphan(self, node: str) -> GpuHolder:
        return GpuHolder(
            pid=self.orphans[node], start_ticks=5, uid=UID, user="ann", comm="python", state="S", job_id="900",
            gpu_uuids=(f"GPU-{node}-0",), minors=(0,), orphan_for_s=600.0, was_in_job=True,
        )  # fmt: skip

    def obey(self, node: str, command: Command) -> None:
        if not isinstance(command, EndProcess):
            super().obey(node, command)
            return
        sent = command.how != "look"
        if sent:
            self.orphans.pop(node, None)
        end = ProcessEnd(gone=node not in self.orphans, sent=sent, state="S")
        self.answers.setdefault(node, []).append(CommandResult(command_id=command.id, ok=True, process=end))


class Noting(DyingJournal):
    """Keeps the order in which decisions were written, which their dates do not tell within a tick."""

    decided: list[Decision]

    def add_decision(self, decision: Decision) -> None:
        super().add_decision(decision)
        self.decided.append(decision)


class Day(Story):
    """A recorded one, with whole ticks."""

    cluster_type = Sick
    journal_type = Noting
    cluster: Sick
    journal: Noting

    def __init__(self, directory: Path, config: str) -> None:
        self.recorder = Recorder(str(directory / "day.rec"))
        super().__init__(directory, config)
        self.journal.decided = []
        self.cluster.add_nodes(*(f"n{number}" for number in range(5, 11)))

    async def _live(self, until: float) -> None:
        while self.timeline.now < until:
            await self.controller.read_slurm()
            self.controller.tick()
            await asyncio.sleep(TICK_S)

    def runs(self, job_id: str, **how: Any) -> Job:
        """A job of one node that makes steps."""
        job = Job(job_id, **{"wants": 1, **how})
        self.cluster.jobs[job_id] = job
        self.cluster.start(job)
        self.passes(seconds=20)
        return job

    def ends(self, *jobs: Job) -> None:
        for job in jobs:
            self.cluster.end(job, "COMPLETED")

    def loses(self, *jobs: Job, index: int = 0, seconds: float = 30.0) -> None:
        """A GPU of each job's first node falls off the bus, all in one moment, and is there again after a while."""
        places = {(job.nodes[0], index) for job in jobs}
        self.cluster.lost |= places
        self.passes(seconds=seconds)
        self.cluster.lost -= places
        self.passes(seconds=20)

    def pauses(self, reason: str) -> None:
        self.journal.pause(reason, "root", 0.0)

    def resumes(self) -> None:
        self.journal.resume("root", 1.0)


def morning(day: Day) -> None:
    """Blind, paused, busy, cooldown and budget: three jobs are restarted."""
    first = day.runs("1")
    day.loses(first, seconds=120)  # the controller has just started
    for bystander in ("b1", "b2", "b3"):
        day.runs(bystander, total_steps=None)
    day.loses(first)  # it was restarted a moment ago
    second = day.runs("2")
    day.pauses("maintenance")
    day.cluster.lost.add((second.nodes[0], 0))
    day.passes(seconds=30)
    day.resumes()
    day.loses(second, seconds=60)
    third = day.runs("3")
    day.cluster.lost.add((third.nodes[0], 1))
    day.loses(third, seconds=60)  # both of its GPUs
    day.cluster.lost.clear()
    fourth = day.runs("4")
    day.loses(fourth)  # too many
    day.ends(first, second, third, fourth)
    day.passes(minutes=8)


def noon(day: Day) -> None:
    """What speaks against touching a job, whatever is wrong with it."""
    day.cluster.unreadable.add("5")
    for job in (
        day.runs("5"),
        day.runs("7", comment="watchdog=off"),
        day.runs("8", is_batch=False),
        day.runs("9", excluded=("elsewhere",)),
        day.runs("10", name="watched"),
        day.runs("10a", name="asleep"),
    ):
        day.loses(job, seconds=20)
        day.ends(job)
    weak = day.runs("11")
    day.cluster.broken_memory.add(weak.nodes[0])
    day.passes(seconds=20)
    day.ends(weak)
    frozen = day.runs("12", wants=2)
    day.cluster.frozen.add("12")
    day.passes(seconds=20)
    day.loses(frozen)
    day.cluster.frozen.clear()
    day.ends(frozen)
    gentle = day.runs("13", name="gentle")
    gentle.hangs = True
    day.cluster.stopped.add("13")
    day.passes(seconds=80)
    day.loses(gentle)
    gentle.state = "SUSPENDED"
    day.passes(seconds=10)
    day.cluster.stopped.clear()
    day.ends(gentle)
    back = day.runs("25")
    day.at("after decision", lambda: day.pauses("wait a minute"))
    for _ in range(2):  # what is acted on is one incident, also when its fault goes away meanwhile and comes back
        day.loses(back, seconds=10)
    day.resumes()
    day.passes(seconds=60)
    day.ends(back)


def afternoon(day: Day) -> None:
    """A storm and what is left of it, attempts, an action that fails, drains."""
    stormy = [day.runs(str(number)) for number in (14, 15, 16)]
    day.loses(*stormy)
    day.ends(*stormy)
    after = day.runs("17")
    day.loses(after, seconds=10)
    day.ends(after)
    day.passes(minutes=5)
    eager = day.runs("18", name="eager")
    day.loses(eager, seconds=60)
    day.cluster.refuses["requeue_hold"] = SlurmRefused(
        "Requested operation is presently disabled", Refusal.NOT_REQUEUEABLE
    )
    day.loses(eager, seconds=60)
    day.cluster.refuses.clear()
    day.ends(eager)
    day.passes(minutes=8)
    drained = [day.runs(number, name="drained") for number in ("19", "20")]
    for job in drained:
        day.loses(job, seconds=60)
        for node in day.cluster.nodes.values():  # a person returns what we drained, and our ledger still has it
            day.cluster.nodes[node.name] = replace(node, state="IDLE", reason="")
    day.ends(*drained)


def evening(day: Day) -> None:
    """Orphans, an operator's requests, a crash loop."""
    other = day.runs("21")
    day.cluster.orphans[other.nodes[0]] = 77  # its user has a job there
    day.passes(seconds=20)
    day.cluster.orphans.clear()
    day.cluster.add_nodes("idle")
    day.cluster.orphans["idle"] = 78
    day.passes(seconds=30)
    day.operator_restarts(other, now=True)
    day.passes(seconds=60)
    day.pauses("no more today")
    day.operator_restarts(other, now=True)
    day.resumes()
    day.ends(other)
    loop = day.runs("23", hangs_again=True)
    for _ in range(3):
        day.cluster.requeued(loop, held=False)
        day.passes(seconds=20)
    day.loses(loop)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Day, Outcome]]:
    """The day, and what its replay gave."""
    directory = tmp_path_factory.mktemp("day")
    lived = Day(directory, CONFIG)
    for part in (morning, noon, afternoon, evening):
        part(lived)
    assert lived.recorder is not None
    lived.recorder.close()
    with (directory / "day.rec").open("rb") as file:
        found = replay(file.readline, parse_config(CONFIG))
    yield lived, found
    lived.close()


def told(decisions: list[Decision], incidents: list[Incident]) -> list[str]:
    """Each decision in a line. Incidents are called by what they are about: their ids are new in every life."""
    names: dict[str, str] = {}
    for each in sorted(incidents, key=lambda each: (each.opened_at, each.subject)):
        same = sum(1 for name in names.values() if name.startswith(f"{each.kind} {each.subject} "))
        names[each.id] = f"{each.kind} {each.subject} {same}"
    lines = []
    for each in decisions:
        about = "" if each.fence is None else f", run {each.fence.job_id}.{each.fence.restarts}"
        reason = re.sub(r"(?<=incident )\w+", lambda found: names[found[0]], each.reason)
        what = f"{each.action} {each.verdict} by {each.by} ({each.rule}): {reason}; without {each.exclude}, drains {each.drain}"
        lines.append(f"{names[each.incident_id]}{about}: {what}; {each.ladder} {each.loop_turns} {each.asked_by}")
    return lines


def test_a_recorded_day_on_which_every_guard_objects_is_decided_the_same_by_its_replay(
    day: tuple[Day, Outcome],
) -> None:
    lived, found = day
    assert lived.recorder is not None and lived.recorder.dropped == 0
    assert found.tally.skipped == {} and found.differs == ()
    in_life = told(lived.journal.decided, lived.journal.incidents(limit=10_000))
    assert told(list(found.decided), list(found.incidents)) == in_life


def test_on_that_day_every_guard_objected_that_its_reports_reach(day: tuple[Day, Outcome]) -> None:
    by = {each.by for each in day[1].decided if each.verdict is Verdict.SUPPRESSED}
    assert by == {name for name, _ in GUARDS if name not in NOT_THAT_DAY}
    assert any(each.verdict is Verdict.OBSERVED for each in day[1].decided)
    reasons = " ".join(each.reason for each in day[1].decided)
    assert "a storm was over only" in reasons
    assert "not drained: out of service already: 0 nodes" in reasons
    actions = {each.action for each in day[1].decided if each.verdict is Verdict.ALLOWED}
    assert actions >= {Action.REQUEUE, Action.END_PROCESS}
    assert {each.kind for each in day[1].incidents} >= {
        IncidentKind.OPERATOR_RESTART,
        IncidentKind.CRASH_LOOP,
    }
