"""Stories of a training that saves, evaluates and compiles, as its logs and its checkpoints tell them; and how they come
to a controller: read by real followers of logs, in reports that come late, twice or not at all, while agents and the
controller are restarted."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import FollowedLogs
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import Follow
from slurm_watchdog.agent.logs.follow import _bound, _row
from slurm_watchdog.agent.logs.job_logs import JobLogs, LogMemory
from slurm_watchdog.agent.logs.log_file import LogFollower
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, Process
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.summed import Memory, framed
from tests.builders.views import process, slurm_job

WALL = 1_790_000_000.0
BEGAN = 1000.0
"""Of the story, on the clock of everybody."""
SCAN_S, SOON_S = 30.0, 5.0
"""Between two looks at the checkpoints, and while one grows."""
LIFETIME_S = 30.0
"""Of a report, as shipped."""
KEPT_REPORTS_S = 300.0
UP_S = 86400.0
"""A node's own clock is ahead of the controller's."""


@dataclass
class Save:
    """Files of one checkpoint."""

    path: str
    step: int | None
    began: float
    done: float
    grows: bool
    """They are of a name that is known while they are written."""


@dataclass
class Story:
    lines: list[tuple[float, int, str]] = field(default_factory=list)
    """(when, file, text)."""
    saves: list[Save] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    ends_at: float = 0.0
    """The last thing that shows in time that a phase is over, or the last step: from here on it hangs."""
    in_phase: bool = False
    """It hangs in a phase, or in something that no line announces the end of."""
    last_sign: str = ""


def make_story(rng: random.Random) -> Story:
    """Some steps, then one to three long phases or short saves with steps between them; at last it hangs."""
    story, dated = Story(), rng.random() < 0.5
    t, step, pace = BEGAN, rng.choice((0, 100)), rng.uniform(3.0, 7.0)
    who = rng.choice(("", "", "[rank0]: "))
    other_file = rng.random() < 0.3
    """What is announced is written into another file than the steps."""

    def say(text: str, file: int = 0) -> None:
        stamp = f"2026-09-21 {int(t) // 3600:02d}:{int(t) // 60 % 60:02d}:{int(t) % 60:02d} " if dated else ""
        story.lines.append((t, file, f"{stamp}{text}\n"))

    def train(count: int) -> None:
        nonlocal t, step
        for _ in range(count):
            t += pace * rng.uniform(0.8, 1.2)
            step += 1
            say(f"step {step} loss 2.{step}")
            story.steps.append(t)
        story.ends_at, story.in_phase, story.last_sign = t, False, "step"

    train(rng.randint(7, 10))
    for _ in range(rng.randint(1, 3)):
        t, told = t + rng.uniform(0.0, 2.0), 1 if other_file else 0
        kinds = ("numbered", "numbered", "unnumbered", "evaluate", "compile", "quiet", "quiet")
        kind = rng.choice(kinds if story.last_sign == "step" else kinds[:5])
        short = kind == "quiet" or rng.random() < 0.4  # begun and over between two looks, too
        takes_s = rng.uniform(0.1, 25.0) if short else rng.uniform(20.0, 240.0)
        began = t
        if kind == "evaluate":
            say(f"{who}Evaluating on 10240 samples", told)
        elif kind == "compile":
            say("Compiling each TransformerBlock with torch.compile", told)
        elif kind == "numbered":
            say(f"{who}saving checkpoint at step {step}", told)
        elif kind == "unnumbered":
            say(f"{who}Saving the checkpoint", told)
        if kind == "evaluate" and rng.random() < 0.5:
            for part in range(1, 4):
                t = began + part * takes_s / 4
                say(f"Evaluating:  {25 * part}%|##        | {part}/4 [00:01<00:04,  2.00it/s]", told)
        t = began + takes_s
        story.in_phase, story.last_sign, story.ends_at = kind != "quiet", kind, began
        written = kind == "quiet" or (kind in ("numbered", "unnumbered") and rng.random() < 0.8)
        if written:
            single = kind != "numbered" and rng.random() < 0.5
            path = "last.pt" if single else f"ckpt_{step}.pt"
            from_s = rng.uniform(0.0, takes_s)
            story.saves.append(Save(path, None if single else step, began + from_s, t, rng.random() < 0.5))
            if kind != "quiet":
                story.ends_at, story.in_phase, story.last_sign = t + 30.0, takes_s < 15.0, "file"
        if kind in ("numbered", "unnumbered") and rng.random() < 0.5:
            say(
                f"{who}checkpoint saved at step {step}"
                if kind == "numbered"
                else f"{who}Finished saving the checkpoint",
                told,
            )
            story.ends_at, story.in_phase, story.last_sign = t, False, "end line"
        if kind in ("quiet", "compile") or rng.random() < 0.7:
            train(rng.randint(3, 5) + (3 if other_file else 0))
    return story


class Disk:
    """What an agent reports of the checkpoints, look by look (slurm_watchdog.agent.collectors.checkpoint)."""

    def __init__(self, story: Story):
        self.story = story
        self.due, self.looked_at = 0.0, None
        self.row, self.row_at = Checkpoint(job_id="7", directory="/c", error="not read yet"), 0.0
        self.reported: tuple[str, float] | None = None
        self.event: tuple[float, Event] | None = None

    def look(self, now: float) -> tuple[tuple[Checkpoint, ...], list[Event]]:
        new: list[Event] = []
        if now >= self.due:
            complete = max((s for s in self.story.saves if s.done <= now), key=lambda s: s.done, default=None)
            growing = any(s.grows and s.began < now < s.done for s in self.story.saves) and self.looked_at is not None
            self.row, self.row_at = Checkpoint(job_id="7", directory="/c", layout="plain", writing=growing), now
            if complete is not None:
                age_s = now - complete.done
                self.row = Checkpoint(
                    job_id="7", directory="/c", layout="plain", step=complete.step, path=f"/c/{complete.path}",
                    age_s=age_s, writing=growing,
                )  # fmt: skip
                if self.reported != (complete.path, complete.done):
                    self.reported = (complete.path, complete.done)
                    event = Event(
                        kind=EventKind.CHECKPOINT, job_id="7", source=f"/c/{complete.path}", step=complete.step,
                        age_s=age_s, pattern="directory",
                    )  # fmt: skip
                    self.event = (now, event)
                    new.append(event)
            self.due, self.looked_at = now + (SOON_S if growing else SCAN_S), now
        row = self.row if self.row.age_s is None else replace_age(self.row, now - self.row_at)
        return (replace(row, looked_age_s=now - self.row_at),), new

    def again(self, now: float) -> list[Event]:
        """What `retell` puts before the new."""
        return [] if self.event is None else [replace_age(self.event[1], now - self.event[0])]


def replace_age(value: Any, more_s: float) -> Any:
    return replace(value, age_s=value.age_s + more_s)


class InProcess:
    """The pool of an agent's children, without children: its followers read at the time of the story."""

    def __init__(self) -> None:
        self.tails: dict[tuple[str, str], LogFollower] = {}
        self.now = 0.0

    def ask(
        self, key: str, request: Any, deadline_s: float, now: float, then: Callable[[Any], None], uid: int = -1,
        *, idle_s: float | None = None,
    ) -> int | None:  # fmt: skip
        if not isinstance(request, Follow):
            return None
        held: dict[Any, Any] = {}
        tails = {
            (job, path): self.tails.get((job, path)) or LogFollower(path, start) for job, path, start in request.files
        }
        self.tails = tails
        for tail in tails.values():
            tail.refresh(now, WALL + now, held)
            while tail.has_more:
                tail.read(now, WALL + now)
        news = {each: tail.drain_events() for each, tail in tails.items()}
        _bound(news)
        rows = tuple(_row(each, tail, tail, news[each], now) for each, tail in tails.items())
        then(Answer(0, key, FollowedLogs(files=rows, token="t", globs=())))
        return 0

    def close(self) -> None:
        for tail in self.tails.values():
            tail.close()

    def settle(self, seconds: float, requests: Any) -> None:
        return None

    def names(self) -> list[str]:
        return []

    def hung_since(self, key: str, now: float) -> float | None:
        return None


class Agent:
    """One node's: it reads one file, and where it has rank 0, looks at the checkpoints."""

    def __init__(self, name: str, path: Path, disk: Disk | None, ranks: tuple[Process, ...]):
        self.name, self.path, self.disk, self.ranks = name, path, disk, ranks
        self.starts = self.sequence = 0
        self.heard: object = None
        self.again = self.closely = False
        self.memory = Memory()
        self.start(None)

    def start(self, memory: LogMemory | None) -> None:
        """It, or another after it, with what was handed over."""
        if self.starts:
            self.pool.close()
        self.starts += 1
        self.sequence = 0
        self.pool = InProcess()
        looks = UserLooks(self.pool, ProcessTable())  # type: ignore[arg-type]
        mounts = (Mount("/", "ext4", "/dev/sda1"),)
        self.logs = JobLogs(looks, mounts, self.name, (), become_owner=False, mount_news=lambda: False)
        if memory is not None:
            self.logs.remember(memory)
            self.watch()
        self.heard = self.heard if memory is not None else None
        if self.disk is not None and memory is None:
            self.disk.reported, self.disk.due, self.disk.looked_at = None, 0.0, None

    def hear(self, controller: object) -> None:
        """A reply."""
        if self.heard is not controller:
            self.again = True
        self.watch()
        self.heard = controller

    def watch(self) -> None:
        """It knows which file it is to read."""
        watch = JobWatch(job_id="7", restarts=0, uid=os.getuid(), log_paths=(str(self.path),))
        self.logs.here.hear([watch])

    def report(self, now: float) -> Report:
        if self.again:
            self.logs.retell()
        logs, events, _ = self.logs.collect(now, (), {}, 5.0)
        rows, found = self.disk.look(now) if self.disk is not None else ((), [])
        if self.again and self.disk is not None:
            found = [*(each for each in self.disk.again(now) if each not in found), *found]
        self.again = False
        self.sequence += 1
        report = Report(
            node=self.name, boot_id="b", agent_id=f"{self.name}:{self.starts}", sequence=self.sequence,
            processes=self.ranks, logs=logs, events=(*events, *found), checkpoints=rows, made_s=now + UP_S,
        )  # fmt: skip
        return framed(report, now, self.memory, self.closely)


class Delivery:
    """A story as it comes to a controller. `calm`: every report at once, and nothing is restarted."""

    def __init__(self, story: Story, rng: random.Random, where: Path, *, calm: bool):
        self.story, self.rng, self.calm = story, rng, calm
        self.worst_gap_s = 0.0
        """The longest time in which no news of a node came to a controller."""
        self.notes: list[str] = []
        paths = [where / "7.out", where / "7.err"]
        self.files = [path.open("w") for path in paths]
        ranks = tuple(process(n) for n in range(2))
        others = tuple(process(n) for n in (2, 3))
        self.agents = [
            Agent("n1", paths[0], Disk(story), ranks),
            Agent("n2", paths[1], None, others),
        ]
        self.spools: dict[str, list[tuple[float, Report]]] = {"n1": [], "n2": []}
        self.delivered_at = dict.fromkeys(self.spools, BEGAN)
        self.cut_until = dict.fromkeys(self.spools, 0.0)
        self.stalled_until = 0.0
        self.held: dict[str, list[Report]] = {"n1": [], "n2": []}
        """Sent to a controller that is stalled; their agents send them again."""
        first, last = story.steps[0], story.ends_at + 20.0
        self.troubles = sorted(rng.uniform(first, last) for _ in range(0 if calm else rng.randint(0, 4)))
        self.forgot_at = BEGAN
        """Nothing that was read before is known to anybody any more."""
        self.killed_at = BEGAN
        self.controller = self.new_controller(BEGAN - 5.0)

    def new_controller(self, now: float) -> ClusterState:
        state = ClusterState(silent_after_s=15.0, report_lifetime_s=LIFETIME_S)
        nodes = tuple(SlurmNode(name=name, address=name, state="IDLE") for name in ("n1", "n2"))
        job = slurm_job(nodes=("n1", "n2"), start_at=WALL + BEGAN - 30.0)
        state.apply_slurm(SlurmView(jobs=(job,), nodes=nodes), now, WALL + now)
        return state

    def moments(self, until: float) -> Iterator[float]:
        """The times at which agents have looked and the controller judges."""
        try:
            yield from self._moments(until)
        finally:  # also where nobody asks for the rest
            for file in self.files:
                file.close()
            for agent in self.agents:
                agent.pool.close()

    def _moments(self, until: float) -> Iterator[float]:
        now, at = BEGAN, 0
        lines = sorted(self.story.lines, key=lambda each: each[0])
        while now < until:
            if now > self.story.ends_at + 250.0:
                now += 45.0  # nothing new is to come
            else:
                now += 5.0 if self.calm else self.rng.uniform(1.5, 10.0)
            while at < len(lines) and lines[at][0] <= now:
                when, file, text = lines[at]
                self.files[file].write(text)
                self.files[file].flush()
                os.utime(self.files[file].name, (WALL + when, WALL + when))
                at += 1
            while self.troubles and self.troubles[0] <= now:
                self.troubles.pop(0)
                self._trouble(now)
            for agent in self.agents:
                self._tick(agent, now)
            yield now

    def _trouble(self, now: float) -> None:
        agent, kind = (
            self.rng.choice(self.agents),
            self.rng.choice(("controller", "kill", "reload", "cut", "lost", "stall")),
        )
        self.notes.append(f"{now:.0f} {kind} {agent.name}")
        if kind == "controller":
            self.controller = self.new_controller(now)
            self.stalled_until, self.held = 0.0, {name: [] for name in self.held}
            self.forgot_at = self.killed_at
        elif kind == "kill":
            if agent.name == "n1":
                self.killed_at = now
                untold = agent.heard is not self.controller or agent.again or self.spools["n1"]
                self.forgot_at = now if untold else self.forgot_at
            agent.start(None)
            self.spools[agent.name].clear()
        elif kind == "reload":
            agent.start(agent.logs.memory())
        elif kind == "cut":
            self.cut_until[agent.name] = now + self.rng.uniform(5.0, 70.0)
        elif kind == "stall":
            self.stalled_until = now + self.rng.uniform(5.0, 45.0)
        elif self.spools[agent.name]:
            self.spools[agent.name].pop()
            agent.again = True

    def _tick(self, agent: Agent, now: float) -> None:
        spool = self.spools[agent.name]
        spool.append((now, agent.report(now)))
        if not self.calm and self.rng.random() < 0.1:
            return  # the next one goes first: late, and in order
        if now < self.cut_until[agent.name]:
            return
        held = self.held[agent.name]
        if now < self.stalled_until:
            held += [replace_age(report, now - made_at) for made_at, report in spool] if not held else []
            return
        late = now - self.delivered_at[agent.name] > 15.0
        for told in held:
            self.controller.apply_report(told, now)
        held.clear()
        for made_at, report in spool:
            age_s = now - made_at
            arrives = now + (0.0 if self.calm else self.rng.uniform(0.0, 0.4))
            told = replace_age(report, age_s) if age_s > 0.05 else report
            outcome = self.controller.apply_report(told, arrives)
            if not self.calm and self.rng.random() < 0.1:
                assert self.controller.apply_report(told, arrives + 0.1) == "duplicate"
            agent.closely = agent.name in self.controller.unsure_of
            if outcome in ("accepted", "unknown"):
                gap = made_at - self.delivered_at[agent.name]
                self.worst_gap_s = max(self.worst_gap_s, gap)
                self.delivered_at[agent.name] = made_at
        spool.clear()
        if agent.name == "n1" and agent.heard is None:
            self.forgot_at = self.killed_at = now
        agent.hear(self.controller)
        if late:
            agent.again = True
