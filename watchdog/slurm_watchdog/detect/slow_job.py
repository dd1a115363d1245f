"""`slow_job`: the job makes steps, but they take longer than they did.

Fires: the step time rose by 5 % or more and stays so for 30 steps and 5 minutes at least; in a noisier log only
larger changes, and of a rise over hours what the hour of the day does not explain.
Names: no rank or node: since which step, by how much. Where processes on one node wait for the processor, memory or
storage, or its links are congested, unlike all others of the job, that is a fact, and suspects none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.level_shift import Rise, comparable, find_creep, find_rise, quantum
from slurm_watchdog.analysis.links import complaints, facts_of, rates_of, rising_of
from slurm_watchdog.analysis.slow_node_suspects import is_first_run, present_speed, search_facts
from slurm_watchdog.base.averages import median
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import shortened
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import and_more
from slurm_watchdog.knowledge.limits import most_odd, option
from slurm_watchdog.knowledge.remediation_hints import hints_for
from slurm_watchdog.model.cluster_view import ClusterView, JobView, RankGpu, StepTime
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Truth
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.past_runs import SlowSearch

LEAST_STEPS = 30  # Steps that were slow before it is reported.
BASELINE = 20  # Steps without which a job's speed is not known.
BATCH, WINDOW = 10, 160  # Recent steps of one batch, and at most to both sides of a change.
WINDOW_BLOCKS = 48  # The same of the history's blocks.
CREEP_BLOCKS = 24  # Of the history, whose means are compared where nothing changed at once.
HARDLY = 0.55  # Of the change that is looked for: newest steps that are slower by less need no closer look.
NEWEST = 10  # Steps of which the median is compared so.


@dataclass(frozen=True, kw_only=True)
class SlowJob:
    """The steps of a job take longer than they did. Never acted on."""

    percent: float = option(
        5.0,
        "Change of the step time that is looked for; in a noisier log only larger ones are reported.",
        ge=2,
        le=1000,
    )
    lasts: float = 300.0  # So long it has to be slower: what jobs share is slow for some minutes now and then.


@each_job
def detect(view: ClusterView, job: JobView, settings: SlowJob) -> Finding:
    """One finding for each running job."""
    finding = slowdown_finding(job, view.now, settings.percent / 100, settings.lasts)
    search = next((each for each in view.searches if each.job_id == job.job.job_id), None)
    finding = finding if search is None else _with_search(finding, job, search)
    if finding.truth is not Truth.BAD:
        return finding
    mine = {*job.job.nodes} - {*job.silent_nodes}
    seen = facts_of([node for node in view.nodes if node.name in mine], job.job.process_id)
    return replace(finding, facts=(*finding.facts, *seen))


def slowdown_finding(job: JobView, now: float, shift: float, least_s: float) -> Finding:
    """What the step times of one job say; `shift` is the change that is looked for, 0.05 for 5 %, and has to have
    lasted for `least_s`."""
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id)
    recent = _recent(job.step_times, shift) if job.job.state == "RUNNING" else None
    if recent is None:
        return finding
    found = list(_slowdowns(job, recent, shift))
    slow = next((each for each in found if _is_long(each, least_s)), None)
    if slow is None:  # of slower steps that are too few yet nothing is said
        return finding if found else finding.ok(f"the steps of job {job_id} take {recent.step_s:.3g} s, as they did")
    rise, percent = slow.rise, 100 * slow.rise.share
    return finding.bad(
        f"Job {job_id} is {percent:.1f} % slower since step {slow.first.step}: {rise.before_s:.4g} s a step before, "
        f"{rise.after_s:.4g} s now.",
        facts=(f"{slow.steps} steps since, {slow.compared} before to compare with",),
        duration_s=max(0.0, now - slow.first.at),
    )


def _with_search(finding: Finding, job: JobView, search: SlowSearch) -> Finding:
    """The same; a run that has not become slow itself is compared with the job as it was."""
    job_id, speed = job.job.job_id, present_speed(search, job)
    if finding.truth is Truth.BAD:
        # A run that was fast and has become slow is another matter: see controller/slow_nodes.py.
        facts = search_facts(search) if is_first_run(search, job) else ()
        return replace(finding, facts=(*finding.facts, *facts))
    if speed is None:  # the run in which it became slow, or one that cannot be told yet
        return finding if is_first_run(search, job) else finding.unknown()
    is_slow, words = speed
    if not is_slow:
        return finding.ok(f"job {job_id} is as fast as it was before step {search.step}: {words}")
    return finding.bad(
        f"Job {job_id} is still slower than before step {search.step}: {words}.",
        facts=search_facts(search),
        duration_s=job.run_age_s,
    )


class Slowdown(Struct, kw_only=False):
    """A change to slower steps that lasts: measured."""

    first: StepTime
    rise: Rise
    steps: int  # That were slower for sure: of the newest ones some may be missing.
    compared: int  # Steps of the level before.


class Recent(Struct, kw_only=False):
    """What the recent steps say."""

    step_s: float  # Median of the newest ones.
    quantum_s: float
    newest: StepTime
    slowdown: Slowdown | None


def slowdown_of(job: JobView, shift: float, least_s: float) -> Slowdown | None:
    """The change to slower steps that is reported of this run; None: there is none."""
    recent = _recent(job.step_times, shift)
    found = () if recent is None else _slowdowns(job, recent, shift)
    return next((slow for slow in found if _is_long(slow, least_s)), None)


def _slowdowns(job: JobView, recent: Recent, shift: float) -> Iterator[Slowdown]:
    """By its recent steps, then by its whole history: newer changes first."""
    if recent.slowdown is not None:
        yield recent.slowdown
    lasting = _lasting(job.step_history, recent, shift)
    if lasting is not None:
        yield lasting


def _is_long(slow: Slowdown, least_s: float) -> bool:
    return slow.steps >= LEAST_STEPS and slow.steps * slow.rise.after_s >= least_s


@by_identity
def _recent(step_times: tuple[StepTime, ...], shift: float) -> Recent | None:
    """What the recent steps say; None: they are too few."""
    times = comparable(step_times)
    if len(times) < BASELINE:
        return None
    values = [time.seconds for time in times]
    digit, newest = quantum(values), median(values[-NEWEST:])
    blocks = (values[begin : begin + BASELINE] for begin in range(0, len(values) - BASELINE + 1, BASELINE))
    fastest = min(median(block) for block in blocks)
    as_ever = newest < fastest * (1 + HARDLY * shift)
    rise = None if as_ever else find_rise(values, [time.at for time in times], shift, BATCH, WINDOW, digit)
    return Recent(newest, digit, times[-1], _slowdown(times, rise))


def _lasting(history: tuple[StepTime, ...], recent: Recent, shift: float) -> Slowdown | None:
    """A slow-down that began before the recent times, or crept in over hours; `history` has the mean of each
    block of steps of the whole run, oldest first. None: there is none, or no one can tell."""
    if not history or recent.step_s < (1 + HARDLY * shift) * min(block.seconds for block in history):
        return None
    return _rise_of_blocks(history, shift, recent.quantum_s, (recent.newest.batch, recent.newest.logged))


@by_identity
def _rise_of_blocks(
    history: tuple[StepTime, ...], shift: float, quantum_s: float, alike: tuple[float | None, bool]
) -> Slowdown | None:
    same = [block for block in history if (block.batch, block.logged) == alike]
    values, times = [block.seconds for block in same], [block.at for block in same]
    rise = find_rise(values, times, shift, 1, WINDOW_BLOCKS, quantum_s)
    return _slowdown(same, rise or find_creep(values, times, shift, CREEP_BLOCKS, quantum_s))


def _slowdown(times: Sequence[StepTime], rise: Rise | None) -> Slowdown | None:
    if rise is None:
        return None
    first, before, last = times[rise.begin], times[rise.compared], times[rise.last]
    compared = first.step - before.step
    return Slowdown(first, rise, last.step - first.step + 1, max(1, compared))


SPEC = DetectorSpec(
    detect=detect,
    settings=SlowJob,
    sentence="The job is slower than it was",
    steps_continue=True,
    explained_by=(IncidentKind.SLOW_NODE,),
    wants_evidence=True,
    why_no_action="no restart is made for it: those that happen anyway narrow down which node it is",
    alerts=("SlurmWatchdogSlow",),
    hint=hints_for("slow_job", "")[0],
)


# ---------------------------------------------------------------------------------------- which node

LOW_CLOCK = 0.95  # Of the median of the other nodes' GPUs: a step is no slower than its slowest GPU.
OWN_CLOCK = 0.97  # Of the card's own past: one that was always so is not what changed.
LOW_POWER = 0.88  # Of its own past, against the others' change: what all do (another phase or batch) is no sign.
HOT_C, HOTTER_C = 85.0, 12.0  # And so much hotter than the median of the others: cards slow down at 85 to 90 C.
HELD_BACK = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Throttle reasons that no one chose. sw_power_cap is not among them: a card at its full power shows it all
the time."""
OFTEN = 0.2  # Share of five minutes under load from which a reason counts that is not there in this very look.
LEAST_S = 60.0  # So long the job has to be slower: the sign on a node says itself that it is no burst.
SLOW_VALUES_S = 150.0  # Links are read about once a minute; two looks, and a report.
HEAT_EVENTS = frozenset({"cpu_throttled", "overheated", "nic_hot", "nic_power"})  # Kernel lines of which one is enough.
CORRECTIONS = frozenset(
    {"memory_corrected", "hardware_corrected", "machine_check", "pcie_corrected", "rdma_error", "nic_firmware"}
)
"""Kernel lines of which only a stream means something."""
STREAM = 10  # Lines since the change.
RISES = 5  # Looks, a minute or so apart, in which a counter of corrections rose without a break.
CARDS_NAMED = 2  # What more cards of one node have in common is the node's.
AROUND_S = 900.0  # What began this long before the change, or later, may have to do with it.


class Sign(Struct):
    """One thing in which a node, or a GPU of it, is unlike the others."""

    node: str
    signal: str  # What kind of thing: signs of one kind on many nodes suspect none of them.
    text: str
    gpu: RankGpu | None = None


@each_job
def slow_node(view: ClusterView, job: JobView, settings: SlowJob) -> Finding | None:
    """One finding for each running job of more than one node; `settings` are those of slow_job.

    All ranks wait for the slowest, so step times name no node. What may name one is what its hardware reports: clocks
    under load, what holds them back, power against the card's own past, the width of a link, heat, corrected errors
    that began with the slowness and do not end. What more than a few nodes have in common blames none.
    """
    if len(job.job.nodes) < 2:
        return None
    slow = slowdown_finding(job, view.now, settings.percent / 100, min(LEAST_S, settings.lasts))
    finding = replace(slow, kind=SLOW_NODE.kind, severity=SLOW_NODE.severity, facts=())
    if slow.truth is not Truth.BAD:
        return finding
    finding, mine = finding.unknown(), set(job.job.nodes)
    nodes = [node for node in view.nodes if node.name in mine]
    if job.silent_nodes or len(nodes) < len(mine):
        return finding
    since = view.now - slow.duration_s - AROUND_S
    signs = [
        Sign(node=each.view.node, signal=signal, text=f"GPU {each.view.gpu.index} (rank {each.rank}) {text}", gpu=each)
        for each, signal, text in (*_under_load(job), *_read_rarely(job, view.now, since))
    ]
    signs += [*_kernel(nodes, since), *_network(nodes, view.now, since)]
    few = most_odd(len(job.job.nodes))
    odd = [sign for sign in signs if len({s.node for s in signs if s.signal == sign.signal}) <= few]
    named = sorted({sign.node for sign in odd})
    if not named or len(named) > few:
        return finding
    first = next(sign for sign in odd if sign.node == named[0])
    return finding.bad(
        f"{slow.summary} Unlike the others is {named[0]}{and_more(len(named))}: {first.text}.",
        culprits=tuple(culprit for name in named for culprit in _culprits(odd, name)),
        facts=(*(f"{sign.node}: {sign.text}" for sign in odd[:12]), *facts_of(nodes, job.job.process_id)),
        exclude_nodes=tuple(named),
        actionable=True,
    )


def _culprits(odd: list[Sign], node: str) -> list[Culprit]:
    """The cards of an odd node that have a sign, equal suspects all of them; the node alone where they are
    many, or none."""
    signs = [sign for sign in odd if sign.node == node]
    cards = {sign.gpu.view.gpu.uuid: sign for sign in reversed(signs) if sign.gpu is not None}
    if not 0 < len(cards) <= CARDS_NAMED:
        return [_culprit(replace(signs[0], gpu=None))]
    return [_culprit(sign) for sign in reversed(cards.values())]


def _culprit(sign: Sign) -> Culprit:
    return Culprit(node=sign.node, reason=sign.text) if sign.gpu is None else sign.gpu.culprit(sign.text)


# ---------------------------------------------------------------------------------------- signs of GPUs


def _busy(job: JobView) -> list[RankGpu]:
    """An idle card is slow because it idles: it is no sign."""
    return [each for each in job.gpus if each.view.busy_since is not None]


def _compared(job: JobView, value_of: Callable[[RankGpu], float | None]) -> Iterator[tuple[RankGpu, float, float]]:
    """Each busy GPU with its value, and the median of the GPUs of the same model on other nodes; nothing if one of the
    job's is not known: without it another may look odd that is not."""
    with_gpu = {each.rank for each in job.gpus}
    whole = all(rank.process.rank in with_gpu for rank in job.ranks)
    looked = all(each.view.busy_since is not None or each.view.idle_since is not None for each in job.gpus)
    values = [(each, value_of(each)) for each in _busy(job)]
    known = [(each, value) for each, value in values if value is not None]
    for each, value in known if whole and looked and len(known) == len(values) else ():
        view = each.view
        others = [v for o, v in known if o.view.node != view.node and o.view.gpu.name == view.gpu.name]
        if others:
            yield each, value, median(others)


def _power_change(each: RankGpu) -> float | None:
    recent, usual = each.view.gpu.recent_power_w, each.view.gpu.usual_power_w
    return recent / usual if recent is not None and usual else None


def _under_load(job: JobView) -> Iterator[tuple[RankGpu, str, str]]:
    """(GPU, signal, the rest of a sentence), the most telling first."""
    for each, hz, others_hz in _compared(job, lambda each: each.view.gpu.recent_sm_clock_hz):
        own_hz = each.view.gpu.usual_sm_clock_hz
        if hz < LOW_CLOCK * others_hz and (own_hz is None or hz < OWN_CLOCK * own_hz):
            others = f"those of other nodes at {others_hz / 1e6:.0f} MHz"
            yield each, "clock", f"runs at {hz / 1e6:.0f} MHz under load, {others}"
    for each in _busy(job):
        shares = {why: share for why, share in each.view.gpu.throttled if share >= OFTEN}
        reasons = sorted(HELD_BACK & {*(each.view.gpu.throttle or ()), *shares})
        if reasons:
            words = (f"{why} ({shares[why]:.0%} of five minutes)" if why in shares else why for why in reasons)
            yield each, "throttle", f"is held back by {', '.join(words)}"
    for each, change, usual in _compared(job, _power_change):
        if change < LOW_POWER * usual:
            others = f"those of other nodes {100 * usual:.0f} %"
            yield each, "power", f"draws {100 * change:.0f} % of its usual power, {others}"
    for each, celsius, others_c in _compared(job, lambda each: each.view.gpu.temperature_c):
        if celsius >= HOT_C and celsius >= others_c + HOTTER_C:
            yield each, "heat", f"is at {celsius:.0f} C, those of other nodes at {others_c:.0f} C"


def _read_rarely(job: JobView, now: float, since: float) -> Iterator[tuple[RankGpu, str, str]]:
    """The same of links, unless they may have been read while it idled, and of counters of corrections."""
    for each in _busy(job):
        gpu = each.view.gpu
        if now - (each.view.busy_since or now) < SLOW_VALUES_S:
            continue
        for used, full, what in (
            (gpu.pcie_link_width, gpu.pcie_link_width_max, "lanes"),
            (gpu.pcie_link_generation, gpu.pcie_link_generation_max, "as its PCIe generation"),
        ):
            if used is not None and full is not None and 0 < used < full:
                yield each, f"pcie {what}", f"runs its PCIe link with {used} of {full} {what} under load"
        if gpu.nvlinks_down:
            yield each, "nvlink", f"has {gpu.nvlinks_down} NVLinks down"
    for each in job.gpus:
        for rise in each.view.rising:
            if rise.times >= RISES and rise.first_at >= since and now - rise.last_at <= AROUND_S:
                began = f"has {rise.counter} that began to rise {now - rise.first_at:.0f} s ago"
                yield each, rise.counter, f"{began} and continues ({rise.times} times)"


# ---------------------------------------------------------------------------------------- signs of nodes


def _kernel(nodes: Iterable[NodeView], since: float) -> Iterator[Sign]:
    for node in nodes:
        counts: dict[str, int] = {}
        lines: dict[str, str] = {}
        for seen in node.events:
            name = seen.event.name
            if seen.at >= since and name in HEAT_EVENTS | CORRECTIONS:
                counts[name] = counts.get(name, 0) + 1 + seen.event.repeats
                lines[name] = seen.event.line
        for name, count in counts.items():
            if name in HEAT_EVENTS or count >= STREAM:
                times = f" {count} times" if count > 1 else ""
                text = f"its kernel logged{times}: {shortened(lines[name], 160)}"
                yield Sign(node=node.name, signal=name, text=text)


def _network(nodes: list[NodeView], now: float, since: float) -> list[Sign]:
    """Links that went down, slowed or began to have errors about that time; a rate that was always lower is no news."""
    rates, rising = rates_of(nodes), rising_of(nodes)
    return [
        Sign(node=node.name, signal=f"link {complaint.signal}", text=f"its link {each.link.name} {complaint.text}")
        for node in nodes
        for each in node.links
        for complaint in complaints(node, each, now, rates, rising)
        if complaint.since >= since
    ]


SLOW_NODE = DetectorSpec(
    kind=IncidentKind.SLOW_NODE,
    detect=slow_node,
    also=(SlowJob,),
    blames_node=1.0,
    sentence="A node slows its job",
    steps_continue=True,
    wants_evidence=True,
    site_may_act=True,
    alerts=("SlurmWatchdogSlow",),
    doc="""
Fires: `slow_job` fires, and one node, or few of many, differs from the others: clocks, what throttles them,
power, heat, links, corrected errors, kernel lines since then.
Names: the node, with the sign; where nothing tells the nodes apart, it is searched for: docs/nodes.md.
""",
)
