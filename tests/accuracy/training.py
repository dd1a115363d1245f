"""One simulated training job, run after run: its steps, phases, checkpoints and log lines, and what its ranks do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slurm_watchdog.model.observations import GpuHolder, Link, Pressure, Usage
from tests.accuracy import looks
from tests.accuracy.logs import FORMATS, Format, Step, pulse
from tests.accuracy.looks import Look

LOG = "/gpfs/m4/logs/main_log.txt"
DIRECTORY = "/gpfs/m4/checkpoints"


@dataclass(frozen=True)
class Plan:
    """How one training job is made. Durations are seconds, `*_every` are steps; 0: never."""

    nodes: int = 2
    per_node: int = 8
    format: str = "megatron"
    every: int = 0
    """Steps between two lines; 0: as its framework usually does."""
    step_s: float = 10.0
    jitter: float = 0.02
    start_s: float = 60.0
    prepare_s: float = 0.0
    """Rank 0 builds the index of the data while the others wait in a barrier."""
    compile_s: float = 20.0
    total: int = 100_000
    first: int = 0
    """The step it resumes from."""
    save_every: int = 0
    save_s: float = 40.0
    save_told: bool = True
    save_on_disk: bool = True
    eval_every: int = 0
    eval_s: float = 0.0
    eval_told: bool = True
    batch: int = 256
    ramp: int = 0
    """So many steps until the batch, and with it the time of a step, has grown to its full size."""
    pulse_s: float = 0.0
    redraws: bool = True
    loss: float = 2.4
    loss_noise: float = 0.01
    workers: int = 0
    """Of each rank's data loader."""
    pause_s: float = 0.0
    """Every hundred steps or so one step takes this much longer (garbage collection, a slow read)."""
    name: str = "m4"
    user: str = "ura81os"


@dataclass
class Worker:
    """One of a data loader."""

    pid: int
    start_ticks: int
    counted_at: float
    cpu_s: float = 5.0
    io_bytes: float = 1e8


@dataclass
class Rank:
    number: int
    node: str
    local: int
    pid: int
    start_ticks: int
    since: float
    """Since when it has looked like this."""
    look: Look
    cpu_s: float = 10.0
    io_bytes: float = 1e9
    counted_at: float = 0.0
    gone: bool = False
    zombie: bool = False
    workers: list[Worker] = field(default_factory=list)
    late: float = 0.0
    """For this share of each step its GPU has nothing to do: its host is late."""


@dataclass
class Span:
    """A stretch of a job's life in which it does one thing."""

    doing: str
    seconds: float
    step: int | None = None
    """The step that is done at its end."""
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    saved: int | None = None
    """The checkpoint that is complete at its end."""
    redraw: str = ""


@dataclass
class Node:
    name: str
    index: int
    gpus: int = 8
    boot_id: str = ""
    agent: int = 0
    sequence: int = 0
    phase: float = 0.0
    silent: bool = False
    """Its agent says nothing."""
    urgent: bool = False
    """A rank has died: its agent reports that at once, and not with the next report."""
    state: str = ""
    """Slurm's word, where it is another than ALLOCATED or IDLE."""
    kernel: list[tuple[float, str]] = field(default_factory=list)
    holders: list[GpuHolder] = field(default_factory=list)
    hung: dict[str, float] = field(default_factory=dict)
    """Probe -> since when it is out."""
    gpu_changes: dict[int, dict[str, object]] = field(default_factory=dict)
    """Index of a GPU -> fields that are not as usual."""
    usages: tuple[Usage, ...] = ()
    pressures: tuple[Pressure, ...] = ()
    links: tuple[Link, ...] = ()
    probed_at: float = -1e9

    def uuid(self, index: int) -> str:
        return f"GPU-{0xEB00 + self.index:06x}{index:02x}-a100"


class Job:
    """One training job, run after run."""

    def __init__(self, job_id: str, plan: Plan, nodes: list[Node], rng: random.Random, at: float):
        self.job_id, self.plan, self.nodes, self.rng = job_id, plan, nodes, rng
        self.format: Format = FORMATS[plan.format]
        self.state = "PENDING"
        self.restarts = 0
        self.submitted_at = at
        self.lines: list[tuple[float, str, str]] = []
        """(when, stream, line): not read by an agent yet."""
        self.ranks: list[Rank] = []
        self.step = plan.first
        self.saved: tuple[int, float] | None = None
        self.writing_since: float | None = None
        self.frozen_at: float | None = None
        self.slow: Callable[[int, float], float] = lambda step, t: 1.0
        """Factor on the time of a step."""
        self.loss_at: Callable[[int, float], float] = lambda step, loss: loss
        self.saves = True
        """Whether it still writes checkpoints."""
        self.on_begin: Callable[[Span, float], None] | None = None
        """Called when a span begins; may freeze the job."""
        self.extra: Callable[[Span, float], list[str]] = lambda span, t: []
        """Lines that are written when a span ends."""
        self.overrides: dict[int, Look] = {}
        self.others: Look | None = None
        self.ended_at: float | None = None
        self.told_at: list[float] = []
        """When this run's log said that a step was done."""
        self._span = Span("wait", 0.0)
        self._span_at = self._span_end = at
        self._script: Iterator[Span] = iter(())
        self._pulse_at = float("inf")
        self.started_at = at

    @property
    def host(self) -> Node:
        return self.nodes[0]

    @property
    def doing(self) -> str:
        return self._span.doing

    # ------------------------------------------------------------------------------------ life

    def start(self, t: float, nodes: list[Node] | None = None, first: int | None = None) -> None:
        """A run begins at `t`."""
        if nodes is not None:
            self.nodes = nodes
        self.state, self.started_at, self.ended_at = "RUNNING", t, None
        self.step = first if first is not None else (self.saved[0] if self.saved else self.plan.first)
        self.frozen_at, self.overrides, self.others, self.writing_since = None, {}, None, None
        self.told_at = []
        self._lay_out(t)
        self._script = _script(self, self.step)
        self._pulse_at = t + self.plan.pulse_s if self.plan.pulse_s else float("inf")
        self._begin(next(self._script), t)

    def _lay_out(self, t: float) -> None:
        base = 20_000 + 7 * self.rng.randrange(1000) + 3000 * self.restarts
        ticks = int(100 * t) + 100_000
        self.ranks = []
        for place, node in enumerate(self.nodes):
            for local in range(self.plan.per_node):
                number = place * self.plan.per_node + local
                self.ranks.append(
                    Rank(
                        number,
                        node.name,
                        local,
                        base + 40 * place + local,
                        ticks + local,
                        t,
                        looks.LOAD,
                        counted_at=t,
                        workers=[
                            Worker(base + 9000 + 40 * number + n, ticks + 100 + n, t) for n in range(self.plan.workers)
                        ],
                    )
                )

    def end(self, t: float, state: str) -> None:
        """Slurm ends it: nobody is left."""
        self.advance(t)
        self.state, self.ended_at = state, t
        self.frozen_at = t
        for rank in self.ranks:
            rank.gone = True

    def requeue(self, t: float) -> None:
        """Slurm puts it back into the queue, and counts that."""
        self.end(t, "PENDING")
        self.restarts += 1

    def freeze(self, t: float, others: Look | None, named: dict[int, Look] | None = None) -> None:
        """From `t` on nothing ends any more: `named` ranks look so, the others like that."""
        self.frozen_at = t
        self.others = others
        self.overrides.update(named or {})
        self._look_anew(t)

    def rewind(self, step: int, t: float) -> None:
        """The trainer goes back to `step` within the same run, and counts from there."""
        self._script = _script(self, step, again=True)
        self.step = step
        self._begin(next(self._script), t)

    def stretch(self, span: Span, t: float) -> None:
        """The span that has just begun at `t` takes as long as it says now."""
        self._span_end = t + span.seconds

    def say(self, t: float, *lines: str, stream: str = LOG) -> None:
        """Lines that are written at `t`, whatever the training does."""
        self.lines.extend((t, stream, line) for line in lines)

    def kill(self, t: float, numbers: list[int], *, zombie: bool = False) -> None:
        """These ranks die."""
        for number in numbers:
            rank = self.ranks[number]
            self.count(rank, t)
            rank.zombie, rank.gone = zombie, not zombie
            rank.since = t
            for node in self.nodes:
                node.urgent = node.urgent or node.name == rank.node

    # ------------------------------------------------------------------------------------ time

    def advance(self, t: float) -> None:
        """Everything that happens until `t`."""
        if self.state != "RUNNING":
            return
        while self._pulse_at <= t:
            self.say(self._pulse_at, pulse(self._pulse_at, self.job_id))
            self._pulse_at += self.plan.pulse_s
        while self.frozen_at is None and self._span_end <= t:
            self._end_span()
            following = next(self._script, None)
            if following is None:
                self.state, self.ended_at, self.frozen_at = "COMPLETED", self._span_end, self._span_end
                for rank in self.ranks:
                    rank.gone = True
                return
            self._begin(following, self._span_end)

    def _begin(self, span: Span, t: float) -> None:
        self._span, self._span_at, self._span_end = span, t, t + span.seconds
        if span.before:
            self.say(t, *span.before)
        self.writing_since = t if span.saved is not None else None
        self._look_anew(t)
        if self.on_begin is not None:
            self.on_begin(span, t)

    def _end_span(self) -> None:
        span, t = self._span, self._span_end
        if span.redraw and self.plan.redraws:
            self.say(t - 0.4 * span.seconds, "\r" + span.redraw)
        if span.step is not None:
            self.step = span.step
            if span.after:
                self.told_at.append(t)
        if span.after:
            self.say(t, *span.after)
        extra = self.extra(span, t)
        if extra:
            self.say(t, *extra)
        if span.saved is not None:
            self.saved, self.writing_since = (span.saved, t), None

    # ------------------------------------------------------------------------------------ looks

    def _look_anew(self, t: float) -> None:
        for rank in self.ranks:
            look = self._usual(rank)
            if look is not rank.look:
                self.count(rank, t)
                old = rank.look
                if (look.state, look.syscall, look.path) != (old.state, old.syscall, old.path):
                    rank.since = t
                rank.look = look

    def look_again(self, t: float) -> None:
        """After somebody changed `overrides` or `others`."""
        self._look_anew(t)

    def _usual(self, rank: Rank) -> Look:
        if rank.number in self.overrides:
            return self.overrides[rank.number]
        if self.others is not None:
            return self.others
        return _LOOKS[self._span.doing][0 if rank.number == 0 else 1]

    def count(self, rank: Rank, t: float) -> None:
        """Lets the counters of a rank catch up."""
        elapsed_s = max(0.0, t - rank.counted_at)
        rank.cpu_s += rank.look.cpu * elapsed_s
        rank.io_bytes += rank.look.io * elapsed_s
        rank.counted_at = max(t, rank.counted_at)
        look = self.worker_look(rank)
        for worker in rank.workers:
            worker.cpu_s += look.cpu * elapsed_s
            worker.io_bytes += look.io * elapsed_s

    def gpu_look(self, rank: Rank, t: float) -> Look:
        """What its GPU looks like at this moment."""
        late = self.doing == "step" and t - self._span_at < rank.late * self._span.seconds
        return looks.IDLE_GPU if late else rank.look

    def worker_look(self, rank: Rank) -> Look:
        """What the workers of a rank look like: they fill their queue while it trains, and then wait for work."""
        return rank.look.worker or (looks.WORKER_WORKS if rank.look is looks.WORK else looks.WORKER_WAITS)


_LOOKS: dict[str, tuple[Look, Look]] = {
    "wait": (looks.LOAD, looks.LOAD),
    "start": (looks.LOAD, looks.LOAD),
    "prepare": (looks.INDEX, looks.SPIN),
    "compile": (looks.COMPILE, looks.COMPILE),
    "step": (looks.WORK, looks.WORK),
    "evaluate": (looks.EVALUATE, looks.EVALUATE),
    "save": (looks.SAVE, looks.SPIN),
    "end": (looks.LOAD, looks.LOAD),
}
"""What rank 0 and the others look like, by what the job does."""


def _script(job: Job, done: int, *, again: bool = False) -> Iterator[Span]:
    """The life of one run, from its start (or, `again`, from a step in the middle of it) to its last step."""
    plan, rng, form = job.plan, job.rng, job.format
    every = plan.every or form.every
    world = plan.per_node * len(job.nodes)
    if not again:
        yield Span("start", plan.start_s, before=form.start(done, job.started_at))
    if plan.prepare_s and not again:
        yield Span("prepare", plan.prepare_s)
    if plan.compile_s and not again:
        yield Span("compile", plan.compile_s)
    first, since_line = done + 1, 0.0
    for step in range(first, plan.total + 1):
        batch = plan.batch
        if plan.ramp:
            batch = max(16, int(plan.batch * min(1.0, step / plan.ramp)) // 16 * 16)
        seconds = plan.step_s * rng.lognormvariate(0.0, plan.jitter) * job.slow(step, job._span_end)
        seconds *= batch / plan.batch
        if plan.pause_s and rng.random() < 0.01:
            seconds += plan.pause_s * rng.random()
        since_line += seconds
        loss = job.loss_at(step, plan.loss * rng.lognormvariate(0.0, plan.loss_noise))
        after: list[str] = []
        said = Step(step, plan.total, seconds, loss, batch, world, job._span_end + seconds)
        if step % every == 0 or step == plan.total:
            lined = Step(step, plan.total, since_line / min(every, step - done), loss, batch, world, said.t)
            after, since_line, done = form.step(lined), 0.0, step
        yield Span("step", seconds, step=step, after=after, redraw=form.redraws(said) if form.redraws else "")
        if plan.save_every and step % plan.save_every == 0 and step < plan.total and job.saves:
            t, lasts = job._span_end, plan.save_s * rng.lognormvariate(0.0, 0.1)
            told = plan.save_told
            yield Span(
                "save", lasts, saved=step,
                before=form.saving(step, t) if told else [], after=form.saved(step, t + lasts) if told else [],
            )  # fmt: skip
        if plan.eval_every and step % plan.eval_every == 0 and step < plan.total:
            t, lasts = job._span_end, plan.eval_s * rng.lognormvariate(0.0, 0.05)
            told = plan.eval_told
            yield Span(
                "evaluate", lasts,
                before=form.evaluating(step, t) if told else [], after=form.evaluated(step, t + lasts) if told else [],
            )  # fmt: skip
    yield Span("end", 20.0, before=form.finished(plan.total, job._span_end))
