"""Rows about devices: clocks of GPUs, links, drivers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import has_ended
from slurm_watchdog.analysis.lateness import is_overdue, is_unheard_of, late_after_s
from slurm_watchdog.analysis.links import DOWN_S, PEERS, Rates, complaints, rates_of, rises, rising_of
from slurm_watchdog.analysis.progress_limit import saves_now
from slurm_watchdog.analysis.slurm_nodes import nodes_to_judge
from slurm_watchdog.base.averages import median
from slurm_watchdog.detect.rank_rules import gpu_values
from slurm_watchdog.detect.rule import About, Answer, Rule, Seen, Sign
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.diagnose.culprit_words import describe
from slurm_watchdog.knowledge.drivers import Driver, driver_of
from slurm_watchdog.knowledge.limits import most_odd
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView, RankGpu
from slurm_watchdog.model.incidents import Culprit, IncidentKind, Severity
from slurm_watchdog.model.node_view import LinkView, NodeView
from slurm_watchdog.model.observations import Blocked, Role

# ------------------------------------------------------------------------------------------------ clocks

CHOSEN = frozenset({"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"})
"""Throttle reasons that someone chose, or that are none."""
PEERS_SHARE = 0.1  # Slower than the median of the job's busy GPUs by more than this.
OWN_SHARE = 0.07  # And slower than its own past by more than this, unless the card says what holds it back.
LEAST_PEERS = 3  # Busy GPUs of the same model to compare with, at least: a median of fewer is one of them.


def _low_clocks(_: ClusterView, job: JobView) -> Answer:
    """Of averages over a minute under load: slower than the median of the job's busy GPUs of the same model, and than
    its own past where that is known. Where it is not, only a single card is suspected: a node, or more than a few
    cards, that runs as slowly may be another model, or capped."""
    groups: dict[str, list[tuple[RankGpu, float]]] = {}
    for each in job.gpus:
        clock_hz = each.view.gpu.recent_sm_clock_hz
        if each.view.busy_since is not None and clock_hz is not None:
            groups.setdefault(each.view.gpu.name, []).append((each, clock_hz))
    compared = [group for group in groups.values() if len(group) > LEAST_PEERS]
    if job.silent_nodes or not compared:
        return None
    slow: list[tuple[RankGpu, float, float]] = []
    for group in compared:
        usual_hz = median(clock_hz for _, clock_hz in group)
        least_hz = usual_hz * (1 - PEERS_SHARE)
        low = [(each, hz, usual_hz) for each, hz in group if hz < least_hz and _is_low(each, hz)]
        slow += [each for each in low if _has_a_past(each[0]) or _is_odd(each[0], each[1], group)]
    if 2 * len(slow) > sum(len(group) for group in groups.values()):
        slow = []
    slow.sort(key=lambda each: each[1] / each[2])
    if not slow:
        return f"the busy GPUs of job {job.job.job_id} run alike"
    signs = tuple(
        Sign(
            each.culprit(f"{clock_hz / 1e6:.0f} MHz under load, its peers {usual_hz / 1e6:.0f} MHz{_why(each)}"),
            _clock_fact(each),
        )
        for each, clock_hz, usual_hz in slow
    )
    nodes = tuple(dict.fromkeys(each.view.node for each, _, _ in slow))
    return Seen(signs, fields={"exclude_nodes": nodes, "actionable": all(_has_a_past(each) for each, _, _ in slow)})


def _is_low(each: RankGpu, clock_hz: float) -> bool:
    """Whether a clock that is low for its peers is low for this GPU, too."""
    own_hz = each.view.gpu.usual_sm_clock_hz
    return own_hz is None or clock_hz < own_hz * (1 - OWN_SHARE) or _is_held_back(each)


def _has_a_past(each: RankGpu) -> bool:
    """Whether more than its peers speaks against it."""
    return each.view.gpu.usual_sm_clock_hz is not None or _is_held_back(each)


def _is_odd(each: RankGpu, clock_hz: float, group: list[tuple[RankGpu, float]]) -> bool:
    """Whether few of the group run about as slowly, and others on its node, if there are any, do not."""
    beside = sum(1 for other, _ in group if other.view.node == each.view.node)
    alike = [other for other, hz in group if hz * (1 - OWN_SHARE) <= clock_hz]
    alike_beside = sum(1 for other in alike if other.view.node == each.view.node)
    return len(alike) <= most_odd(len(group)) and (beside == 1 or alike_beside < beside)


def _is_held_back(each: RankGpu) -> bool:
    """Whether the card itself says that something no one chose holds its clock down."""
    return bool(set(each.view.gpu.throttle or ()) - CHOSEN - {"sw_power_cap"})


def _why(each: RankGpu) -> str:
    reasons = [reason for reason in each.view.gpu.throttle or () if reason not in CHOSEN]
    return f", held back by {', '.join(reasons)}" if reasons else ""


def _clock_fact(each: RankGpu) -> str:
    gpu = each.view.gpu
    shares = (f", {share:.0%} of five minutes held back by {why}" for why, share in gpu.throttled if why not in CHOSEN)
    usual_hz = gpu.usual_sm_clock_hz
    usual = "" if usual_hz is None else f", usually {usual_hz / 1e6:.0f} MHz under load"
    return f"{gpu_values(each)}{''.join(shares)}{usual}"


CLOCK_LOW = Rule(
    kind=IncidentKind.GPU_CLOCK_LOW,
    signal=_low_clocks,
    applies=lambda _, job: bool(job.gpus),
    says="The GPU of rank {first.rank} on {first.node} ({first.gpu_uuid}){more} of job {job} is slower than its peers: "
    "{first.reason}.",
    hold_s=60.0,
    blames_node=0.5,
    sentence="A GPU runs at a low clock",
    site_may_act=True,
    asks=True,
    steps_continue=True,
    explained_by=(IncidentKind.SLOW_NODE,),
    wants_evidence=True,
    alerts=("SlurmWatchdogSlow",),
    doc="""
Fires: under load 10 % below the median of the job's busy GPUs of its model, *and* 7 % below its own past,
or throttled by its own report, for a minute.
Names: rank, node, GPU, throttle reasons.
Acts: the job is asked to save first; each card's own past, or its own report, has to be evidence against it.
""",
)

# ------------------------------------------------------------------------------------------------ links

LINKS_PROBE = "links"  # The agent's child that reads counters (slurm_watchdog.agent.collectors.link).


def _links(view: ClusterView) -> Iterator[About]:
    """Each link of the nodes that have something to tell, and the adapters of each as a whole."""
    unlike, silent = _unlike(view), set(view.silent_nodes)
    asked = {node.name: node for node in nodes_to_judge(view)}
    asked |= {node.name: node for node, _ in unlike.values()}
    for name, node in sorted(asked.items()):
        if name not in silent:
            yield from _adapters(view, node)
            yield from (_link(view, node, link, unlike[name][1] if name in unlike else {}) for link in node.links)


def _adapters(view: ClusterView, node: NodeView) -> Iterator[About]:
    """An adapter whose counters cannot be read: its driver or its firmware does not answer."""
    subject, name = f"link:{node.name}/adapters", node.name
    hung = next((probe for probe in node.hung_probes if probe.probe == LINKS_PROBE), None)
    if hung is not None:
        reason = f"a network adapter has not let its counters be read for {hung.seconds:.0f} s"
        sign = Sign(Culprit(node=name, reason=reason), lasts_s=hung.seconds)
        what = f"On {name} {reason}: its driver or its firmware does not answer"
        yield subject, (), Seen((sign,), {"what": what}) if hung.seconds >= DOWN_S else None
    elif node.links and (view.asked is None or subject in view.asked):
        yield subject, (), f"the adapters of {name} answer"


def _link(view: ClusterView, node: NodeView, link: LinkView, rates: Rates) -> About:
    name = link.link.name
    jobs = {job.job.job_id: job.job.nodes for job in view.ageless_jobs if node.name in job.job.nodes}
    peers = {each for nodes in jobs.values() for each in nodes} if rises(link) else set()
    wrong = complaints(node, link, view.now, rates, rising_of(each for each in view.nodes if each.name in peers))
    seen: Seen | str | None = f"link {name} of {node.name} is up" if link.link.up else None
    if wrong:
        first = wrong[0]
        culprit = Culprit(node=node.name, link=name, reason=first.text)
        sign = Sign(culprit, lasts_s=max(0.0, view.now - first.since))
        signs = (sign, *(Sign(fact=f"{name} {each.text}") for each in wrong[1:]))
        words = {"what": f"Link {name} ({link.link.kind}) of {node.name} {first.text}"}
        severity = Severity.INFO if first.signal == "errors" else Severity.WARNING
        seen = Seen(signs, words, {"severity": severity})
    return f"link:{node.name}/{name}", tuple(jobs), seen


def _unlike(view: ClusterView) -> dict[str, tuple[NodeView, Rates]]:
    """The nodes of jobs whose links do not all run at the same rates, with the rates of all nodes of the job."""
    found: dict[str, tuple[NodeView, Rates]] = {}
    nodes: dict[str, NodeView] = {}
    for job in view.ageless_jobs:
        if len(job.job.nodes) <= PEERS:
            continue
        nodes = nodes or {node.name: node for node in view.nodes}
        mine = [nodes[name] for name in job.job.nodes if name in nodes]
        if len({node.rates for node in mine if node.rates}) > 1:
            rates = rates_of(mine)
            found |= {node.name: (node, rates) for node in mine}
    return found


LINK_FAULT = Rule(
    kind=IncidentKind.LINK_FAULT,
    signal=_links,
    says="{what}.",
    subject=Subject.NODE,
    blames_node=0.5,
    sentence="A network link has a fault",
    steps_continue=True,
    why_no_action="a job that hangs or slows for it is acted on as that",
    alerts=("SlurmWatchdogSlow",),
    hint=Hint(
        usually="A cable, a transceiver or a port of the switch; an adapter that is too hot.",
        try_next="mlxlink -d DEVICE, ibdiagnet, ethtool -m; the same port with another cable.",
        documented="sysfs-class-infiniband (counters); mlxlink",
    ),
    doc="""
Fires: a link that has been up is down for a minute; went down twice within an hour; runs slower than before, or than
that of all other nodes of its job (three at least); its errors rose in ten looks, a minute apart; or its counters
cannot be read for a minute.
Names: the node and the link, with the times.
""",
)

# ------------------------------------------------------------------------------------------------ drivers

STEP_SLACK_S = 10.0  # As in `filesystem_stall`: a step may be read so late, and a call be seen so late.
MOST_NODES = 2  # More at once is a fabric or a release of the driver: no restart elsewhere mends it.
HUNG_TASK = "hung_task"
ENDED = "its main thread has ended (a zombie, as after SIGKILL); another thread of it is in this call"
BLOCKED_FOR_S = 60.0  # In the same call before it is reported.
UNSURE_FOR_S = 300.0  # In the same call before it is acted on, where no step is known to be overdue.

InDriver = tuple[ProcessView, Blocked, Driver]


def _in_drivers(view: ClusterView, job: JobView) -> Answer:
    """Processes in uninterruptible sleep in a driver's call, about no file of any filesystem: no signal ends them, and
    their job waits for them."""
    if job.silent_nodes:
        return None
    sleeping = list(_sleeping(job))
    stuck = [(p, b, d) for p, b in sleeping if (d := driver_of(b.path, b.wchan)) is not None]
    stuck.sort(key=lambda each: (each[0].process.role is not Role.RANK, -each[1].seconds, each[0].process.pid))
    long = [each for each in stuck if each[1].seconds >= BLOCKED_FOR_S]
    if not long:
        if sleeping or not job.ranks or not job.every_rank_known or job.unlisted:
            return None
        return f"no process of job {job.job.job_id} sleeps in a driver"
    (process, blocked, driver), rose_s = long[0], None if job.progress is None else job.progress.last_increase_age_s
    longest_s = max(each[1].seconds for each in long)
    # A job that makes steps does not wait for it; where steps are not known, only a rank shows that it does.
    if process.process.role is not Role.RANK if rose_s is None else rose_s + STEP_SLACK_S < longest_s:
        return None
    over, saves = has_ended(job), saves_now(job)
    overdue = is_overdue(job) and not saves
    patient = longest_s < UNSURE_FOR_S or _is_usual(job) or saves
    if rose_s is not None and not over and not overdue and patient:
        return None
    sure = not over and (overdue or (longest_s >= UNSURE_FOR_S and not saves))
    signs = tuple(
        Sign(culprit := _culprit(view, *each), f"{describe(culprit)} {culprit.reason}", each[1].seconds)
        for each in long
    )
    nodes = tuple(sorted({each.who.node for each in signs if each.who and each.who.node}))
    few, who = len(nodes) <= MOST_NODES, describe(_culprit(view, *long[0]))
    words = {
        "who": f"{who[0].upper()}{who[1:]}",
        "what": _what(blocked, driver),
        "where": "" if few else f"; {len(nodes)} nodes have it at once",
    }
    fields = {
        "facts": (
            *(each.fact for each in signs[:8]),
            *(f"pid {each.process.pid} on {each.node}: {ENDED}" for each, _, _ in long[:8] if each.unending),
            *_kernels_words(view, long),
            "what sleeps there ends when the driver lets it, else with a restart of the node",
        ),
        "severity": Severity.CRITICAL if sure else Severity.WARNING,
        "actionable": sure and few,
        "exclude_nodes": nodes if few else (),
    }
    return Seen(signs, words, fields)


def _sleeping(job: JobView) -> Iterator[tuple[ProcessView, Blocked]]:
    for each in job.processes:
        blocked = each.process.blocked
        if blocked is None or blocked.state != "D" or blocked.mount or blocked.candidates:
            continue
        if each.alive or each.unending is not None:
            yield each, blocked


def _is_usual(job: JobView) -> bool:
    """Whether the run is known to take so long for a step."""
    progress, late_s = job.progress, late_after_s(job.progress)
    return progress is not None and late_s is not None and (progress.age_s < late_s or not is_unheard_of(progress))


def _what(blocked: Blocked, driver: Driver) -> str:
    call = blocked.syscall or "a system call"
    on = f" on {blocked.path}" if blocked.path else ""
    wchan = f", at {blocked.wchan}" if blocked.wchan else ""
    return f"has been in state D in {driver.name} ({call}{on}{wchan}) for {blocked.seconds:.0f} s"


def _culprit(view: ClusterView, process: ProcessView, blocked: Blocked, driver: Driver) -> Culprit:
    minor = (blocked.path or "").removeprefix("/dev/nvidia")
    gpus = [gpu.gpu for node in view.nodes if node.name == process.node for gpu in node.gpus] if minor.isdigit() else ()
    uuid = next((gpu.uuid for gpu in gpus if gpu.minor is not None and str(gpu.minor) == minor), None)
    named = process.culprit(_what(blocked, driver))
    return replace(named, gpu_uuid=uuid or None, path=blocked.path, is_worker=process.process.role is Role.WORKER)


def _kernels_words(view: ClusterView, long: Iterable[InDriver]) -> tuple[str, ...]:
    pids = {(process.node, process.process.pid) for process, _, _ in long}
    return tuple(
        f"the kernel of {node.name}: {seen.event.line}"
        for node in view.nodes
        for seen in node.events
        if seen.event.name == HUNG_TASK and (node.name, seen.event.pid) in pids
    )[:4]


DRIVER_STALL = Rule(
    kind=IncidentKind.DRIVER_STALL,
    signal=_in_drivers,
    says="{who} of job {job}{more} {what}: no signal ends it{where}.",
    named=16,
    severity=Severity.CRITICAL,
    blames_node=0.9,
    sentence="A process hangs in a driver",
    job_state="waits for a driver",
    explained_by=(IncidentKind.NODE_DOWN,),
    explains=(
        IncidentKind.COLLECTIVE_HANG,
        IncidentKind.WEDGED_TEARDOWN,
        IncidentKind.STALLED_PROGRESS,
        IncidentKind.GPU_IDLE_RANK,
    ),
    has_aftermath=False,
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs",),
    hint=Hint(
        usually="The GPU or adapter, or the firmware of it, does not answer, and the driver waits for it under a lock.",
        try_next="dmesg for Xid, mlx5 and hung tasks; cat /proc/PID/stack as root; drain and restart the node.",
        documented="proc(5), /proc/PID/stack; NVIDIA, XID Errors",
    ),
    doc="""
Fires: a thread has been in state D in one call of a driver for 60 s (`ioctl` on /dev/nvidia0, the release of a
context), no step was made since, and the next one is overdue by the run's own measure, in no phase. Where that is not
known, after 5 min. Before the first step, after the last one, or where steps cannot be read: a warning after 60 s.
Names: the rank, its pid, the driver, the wait channel, and the GPU where the call is on its file.
Acts: requeues the job without the node, on at most two nodes; where no step is known to be overdue, after 5 min.
Never after the last step, before the next is due, or while a checkpoint is written.
""",
)
