"""What nodes and Slurm say, a line each, as the frames and listings of a recording; and what its replay finds.

A line has `t`, `kind` and what is known; kinds are `job`, `node`, `report`, `proc`, `gpu`, `log`,
`kmsg`, `mount`, `checkpoint`, `fault`. A node that says anything of itself in a moment reports then; what its log and
its kernel said in between comes with that report. Nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.observations import Blocked, Checkpoint, Gpu, MountProbe, Process, Role
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.recording.entries import Entry
from slurm_watchdog.replay.player import Outcome, Player
from tests.accuracy.feed import Reader, report_of
from tests.accuracy.training import Node
from tests.accuracy.world import Said
from tests.builders.entries import frame, listing, ticks
from tests.builders.summed import Memory, summed

Line = dict[str, Any]
TICK_S, LISTED_EVERY_S = 2.5, 10.0
SPARE = ("spare1", "spare2")
"""Nodes that could take over from one that is excluded."""
REPORTS = ("report", "proc", "gpu", "mount", "checkpoint")
STARTED_S = 100.0
"""The controller has been there for so long before the first line: it is warm."""


class Told:
    """The nodes and the jobs that the lines name."""

    def __init__(self) -> None:
        self._nodes = {name: Node(name, n, boot_id=f"boot-{name}") for n, name in enumerate(SPARE)}
        self._states: dict[str, SlurmNode] = {}
        self._jobs: dict[str, SlurmJob] = {}
        self._readers: dict[str, Reader] = {}
        self._waiting: dict[str, list[Line]] = {}
        self._memory = Memory()

    def entries(self, lines: Iterable[Line]) -> Iterator[Entry]:
        """In order, with ticks between them, and an answer of Slurm now and then."""
        listed_at, before = float("-inf"), 0.0
        for t, group in groupby(lines, key=lambda line: line["t"]):
            moment = list(group)
            at = t + STARTED_S
            for tick in ticks(before or t, at, TICK_S):
                if tick.at - listed_at >= LISTED_EVERY_S:
                    listed_at = tick.at
                    yield from self._listing(tick.at)
                yield tick
            words = [line for line in moment if line["kind"] in ("job", "node")]
            for line in words:
                self._take_word(line)
            for node in {line["node"]: None for line in moment if line["kind"] in (*REPORTS, "log", "kmsg")}:
                known = node in self._nodes
                self._nodes.setdefault(node, Node(node, len(self._nodes), boot_id=f"boot-{node}"))
                words += [] if known else [{}]
            if words:
                listed_at = at
                yield from self._listing(at)
            yield from self._reports(moment, at)
            before = at + 0.5
        yield from ticks(before, before + 2.0, TICK_S)

    def _take_word(self, line: Line) -> None:
        if line["kind"] == "node":
            self._states[line["node"]] = SlurmNode(name=line["node"], address="", state=line["state"])
            return
        job_id, given = (
            str(line["job_id"]),
            {k: v for k, v in line.items() if k not in ("t", "kind", "job_id", "fault")},
        )
        given |= {"nodes": tuple(given["nodes"])} if "nodes" in given else {}
        old = self._jobs.get(job_id, SlurmJob(job_id=job_id, state="RUNNING", uid=1000, requeueable=True))
        self._jobs[job_id] = replace(old, **given)
        for node in self._jobs[job_id].nodes:
            self._nodes.setdefault(node, Node(node, len(self._nodes), boot_id=f"boot-{node}"))

    def _listing(self, at: float) -> Iterator[Entry]:
        """Slurm answers, and the nodes without a job report."""
        busy = {node for job in self._jobs.values() if job.state in RUNNING for node in job.nodes}
        nodes = {
            name: SlurmNode(name=name, address="", state="ALLOCATED" if name in busy else "IDLE")
            for name in self._nodes
        }
        yield listing(at, self._jobs.values(), (nodes | self._states).values())
        for name in SPARE:
            yield self._frame(Said(self._nodes[name], at), name)

    def _reports(self, moment: list[Line], at: float) -> Iterator[Entry]:
        for line in moment:
            if line["kind"] in ("log", "kmsg"):
                self._waiting.setdefault(line["node"], []).append({**line, "t": at})
        for name in {line["node"]: None for line in moment if line["kind"] in REPORTS}:
            said = Said(self._nodes[name], at)
            for line in (*self._waiting.pop(name, ()), *(each for each in moment if each.get("node") == name)):
                _say(said, line)
            yield self._frame(said, name)

    def _frame(self, said: Said, name: str) -> Entry:
        report = report_of(said, self._readers.setdefault(name, Reader()))
        return frame(summed(report, said.at, self._memory), said.at)


def _say(said: Said, line: Line) -> None:
    """What a line adds to a report. Fields that it does not have are as good as none."""
    match line["kind"]:
        case "log" if line["t"] >= STARTED_S and "stream" in line:
            said.lines.append((line["t"], str(line["job_id"]), line["stream"], line["line"]))
        case "kmsg":
            said.kernel.append((line["t"], line["line"]))
        case "proc":
            said.processes.append(_process(line))
        case "gpu":
            said.gpus.append(_gpu(line))
        case "mount":
            seconds = line["probe_s"] or 0.0 if line["responding"] else 31.0
            said.probes.append(
                MountProbe(mount=line["mount"], responding=line["responding"], seconds=seconds, wrote=True)
            )
        case "checkpoint":
            done, step = line["complete"], line["step"]
            said.checkpoints.append(
                Checkpoint(job_id=line["job_id"], directory="checkpoints", step=step if done else None,
                           writing_step=None if done else step, writing=not done)
            )  # fmt: skip


def _process(line: Line) -> Process:
    blocked, age_s = None, line.get("state_age_s")
    if age_s is not None and ("path" in line or "mount" in line):
        blocked = Blocked(thread_id=line["pid"], seconds=age_s, state=line["state"],
                          **{name: line.get(name) for name in ("wchan", "syscall", "path", "mount")})  # fmt: skip
    return Process(
        pid=line["pid"], start_ticks=round(100 * line.get("start", 0)), job_id=str(line["job_id"]), role=Role.RANK, comm="python",
        state=line["state"], state_age_s=age_s, uid=1000, rank=line["rank"], cpu_s=line.get("cpu_s", 0.0), blocked=blocked,
    )  # fmt: skip


def _gpu(line: Line) -> Gpu:
    def scaled(name: str, factor: float) -> float | None:
        return None if line.get(name) is None else factor * line[name]

    memory = scaled("mem_used_mib", 1 << 20)
    return Gpu(
        uuid=line.get("uuid", ""), index=line["gpu"], utilization_ratio=scaled("util", 0.01), sm_clock_hz=scaled("sm_clock_mhz", 1e6),
        power_w=line.get("power_w"), temperature_c=line.get("temp_c"), memory_used_bytes=None if memory is None else int(memory),
        throttle=tuple(line["throttle"]) if "throttle" in line else None, pids=tuple(line["pids"]) if "pids" in line else None,
        error=line.get("error"),
    )  # fmt: skip


def patient(config: Config, every_s: float) -> Config:
    """A configuration under which agents report every so many seconds."""
    silent_s = max(config.controller.agent_silent_after, 3.0 * every_s)
    return replace(config, controller=replace(config.controller, agent_silent_after=silent_s))


def play(lines: Iterable[Line], config: str | Config = "", every_s: float = 5.0) -> Outcome:
    """What a controller finds in it whose agents report every so many seconds. Times are those of the lines, and an
    incident is found so long after the newest `fault` before it."""
    told = list(lines)
    given = parse_config(config) if isinstance(config, str) else config
    with Player(patient(given, every_s)) as player:
        for entry in Told().entries(told):
            player.take(entry)
        outcome = player.outcome()
    assert outcome.tally.skipped == {}
    faults = [line["t"] + STARTED_S for line in told if line["kind"] == "fault"]
    found = tuple(_dated(each, faults) for each in outcome.incidents)
    return Outcome(found, outcome.decided, outcome.tally)


def _dated(incident: Incident, faults: list[float]) -> Incident:
    times = {
        name: None if (at := getattr(incident, name)) is None else at - STARTED_S
        for name in ("opened_at", "fired_at", "resolved_at")
    }
    begun = [at for at in faults if incident.fired_at is not None and at <= incident.fired_at]
    after_s = incident.fired_at - max(begun) if begun and incident.fired_at is not None else incident.detected_after_s
    return replace(incident, detected_after_s=after_s, **times)


def verdict(outcome: Outcome) -> list[Any]:
    return [
        (i.kind, i.state, i.opened_at, i.fired_at, i.resolved_at, i.job_ids, i.culprits, i.summary)
        for i in outcome.incidents
    ]
