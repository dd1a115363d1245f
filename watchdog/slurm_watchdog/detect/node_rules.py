"""Rows about nodes, and about all of them: agents and a Slurm that do not answer, a node with a past; and `node_down`.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_watchdog.analysis.lateness import is_overdue
from slurm_watchdog.analysis.slurm_nodes import asked_nodes, away_nodes, jobs_by_node, may_be_starting, share_silent
from slurm_watchdog.detect.rule import About, Answer, Rule, Seen, Sign
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, IncidentKind, Severity
from slurm_watchdog.model.node_events import GPU_PLACE, NodeSuspicion
from slurm_watchdog.model.node_view import NodeView, SlurmNodeView, UnreachedNode
from slurm_watchdog.model.slurm_states import is_away, is_lost, is_out

# ------------------------------------------------------------------------------------------------ many at once

NODES = 3  # So many silent nodes at least, …
PERCENT = 20.0  # … of those that have reported, besides: three of ten thousand are no outage.


def _many_silent(view: ClusterView) -> Iterator[About]:
    """Nothing before any agent has reported."""
    silent, known = share_silent(view)
    many = silent == known > 1 or (silent >= NODES and 100.0 * silent > PERCENT * known)
    if known and not many:
        unheard = set(view.excused_nodes) - set(view.silent_nodes)
        yield "cluster", (), None if unheard else f"{known - silent} of {known} agents report"
    elif known:
        mute = set(view.silent_nodes) - away_nodes(view)
        ages_s = {node.name: view.now - view.last_heard(node) for node in view.nodes if node.name in mute}
        shortest_s = min(ages_s.values())
        signs = tuple(_mute(name, age_s) for name, age_s in ages_s.items())
        facts = (f"the last of them fell silent {shortest_s:.0f} s ago", "compare with: sinfo -R")
        yield "cluster", (), Seen(signs, {"silent": silent, "known": known}, {"facts": facts, "duration_s": shortest_s})


def _mute(name: str, age_s: float) -> Sign:
    return Sign(Culprit(node=name, reason=f"no report for {age_s:.0f} s"), lasts_s=age_s)


OUTAGE = Rule(
    kind=IncidentKind.PARTITION_OR_OUTAGE,
    signal=_many_silent,
    says="{silent} of {known} agents are silent: the network, the power, or this machine's own link. What happens "
    "there is unknown, and nothing is done about any job while it lasts.",
    named=16,  # The number says the rest.
    subject=Subject.CLUSTER,
    needs_cluster=True,
    severity=Severity.CRITICAL,
    sentence="Many nodes do not report",
    why_no_action="many nodes at once: the cause is shared, not one of them",
    alerts=("SlurmWatchdogManyAgentsSilent",),
    doc="""
Fires: three agents or more, and more than 20 % of all, fell silent; or all of them.
Names: the silent nodes, without blame.
Acts: no action is taken anywhere while it lasts.
""",
)

# ------------------------------------------------------------------------------------------------ down

LISTINGS, LISTINGS_REPORTING = 2, 3
"""So many listings in a row, of a node whose agent is silent, too, and of one whose agent reports: after a broken
connection Slurm's own ping (SlurmdTimeout of slurm.conf(5)) has to come through before it takes a node back."""
TRIES = 3  # Connections in vain, 5 s apart.
LAST_STEPS = 3  # Intervals of reports: it lived for one after its last, steps are read one later, reports come late.
FRESH_S = 12.0  # An agent that reports every 5 s was heard within this time, or it is as quiet as its node.


def _down(view: ClusterView) -> Iterator[About]:
    """Each node that has ever reported and that Slurm knows, as far as it is asked about or down."""
    silent = set(view.silent_nodes)
    gone = {each.name: each for each in view.unreached if each.tries >= TRIES and each.name in silent}
    meant = asked_nodes(view) | gone.keys()
    states = {node.name: node for node in view.slurm_nodes if is_lost(node.state) or node.name in meant}
    nodes = [node for node in view.nodes if node.name in states] if states else []
    jobs = jobs_by_node(view) if nodes else {}
    for node in nodes:
        name, its = node.name, jobs.get(node.name, ())
        seen = _lost(view, node, states[name], gone.get(name), name in silent, its)
        yield f"node:{name}", its if isinstance(seen, Seen) else (), seen


def _lost(
    view: ClusterView,
    node: NodeView,
    slurm: SlurmNodeView,
    gone: UnreachedNode | None,
    silent: bool,
    jobs: Sequence[str],
) -> Answer:
    name, age_s = node.name, view.now - view.last_heard(node)
    quiet, is_down = silent or age_s > FRESH_S, is_lost(slurm.state)
    if is_away(slurm.state, slurm.runs_job) or not (is_down or gone):
        return f"Slurm has {name} as {slurm.state}"
    if gone is not None and not is_down:  # BAD if the machine is gone for its jobs as well
        stand = [
            each
            for each in view.jobs
            if each.job.job_id in jobs and each.progress is not None and is_overdue(each)
            if each.progress.age_s >= age_s - LAST_STEPS * each.read_later_s
        ]
        if not stand or len(stand) < len(jobs):
            return None
        tries = f"{gone.tries} connections in {gone.seconds:.0f} s"
        fact = f"neither its agent, for {age_s:.0f} s, nor its slurmd ({tries}) answers, while other nodes do"
        reason = "neither its agent nor its slurmd answers"
        what = f"{name} is down: {fact}; Slurm reports it as {slurm.state}. No step since in its jobs: "
        what += f"{', '.join(jobs)}."
    else:
        if slurm.lost_listings is not None and slurm.lost_listings < (LISTINGS if quiet else LISTINGS_REPORTING):
            return None
        agent = "yet its agent reports: the node runs, and Slurm does not reach its slurmd"
        agent = f"its agent has not reported for {age_s:.0f} s, too" if quiet else agent
        fact, reason, why = f"{name}: {agent}", f"Slurm says {slurm.state}", slurm.reason
        what = f"Slurm has lost {name}: {slurm.state}{f' ({why})' if why else ''}; {agent}."
        what += f" Jobs there: {', '.join(jobs)}." if jobs else ""
    fields = {
        "severity": Severity.CRITICAL if jobs else Severity.WARNING,
        "facts": (f"scontrol show node {name}", fact),
        "actionable": quiet and bool(jobs),
        "exclude_nodes": (name,),
    }
    sign = Sign(Culprit(node=name, reason=reason), lasts_s=age_s if silent else None)
    return Seen((sign,), {"what": what}, fields)


DOWN = Rule(
    kind=IncidentKind.NODE_DOWN,
    signal=_down,
    says="{what}",
    subject=Subject.NODE,
    needs_cluster=True,
    severity=Severity.CRITICAL,
    blames_node=1.0,
    sentence="A node is down",
    explained_by=(IncidentKind.PARTITION_OR_OUTAGE,),
    ladder=(Rung.RESTART_STEP,),
    alerts=("SlurmWatchdogNodeTrouble",),
    doc="""
Fires: Slurm lists the node as DOWN, not responding or the like. Or, before Slurm has noticed: its agent is silent
(`controller.agent_silent_after`), its slurmd does not answer three connections while others do, and its job makes no
step.
Names: the node.
Acts: Slurm requeues the jobs of the node; one with a supervisor and `--no-kill` is started again in place.
""",
)

# ------------------------------------------------------------------------------------------------ silent

MIN_TOGETHER, TOGETHER_S = 10, 10.0
"""So many that fell silent within this time of each other are a switch, a room, or the network: whether it is
still more, and thus one matter (partition_or_outage), shows as soon as all of them had a report due. Twice
the agent's default interval."""


def _silent(view: ClusterView) -> Iterator[About]:
    """Each node that has ever reported, or is asked about or silent: after the controller's `agent_silent_after`."""
    silent = set(view.silent_nodes)
    meant = silent | asked_nodes(view)
    nodes = [node for node in view.nodes if node.name in meant] if meant else []
    if not nodes:
        return
    states, jobs, share = {node.name: node for node in view.slurm_nodes}, jobs_by_node(view), share_silent(view)
    together, excused = _just_fell_silent(view, nodes, silent), frozenset(view.excused_nodes)
    for node in nodes:
        name, slurm, age_s = node.name, states.get(node.name), view.now - view.last_heard(node)
        state = "" if slurm is None else slurm.state
        seen: Answer = None
        if name not in silent:
            seen = None if name in excused else f"the agent of {name} reports"
        elif view.slurm_nodes and (slurm is None or not state or is_away(state, slurm.runs_job) or is_lost(state)):
            # Told as node_down, or as nothing at all: a node that is switched off or not in the cluster has no agent.
            seen = f"Slurm says that {name} is {state or 'no node of this cluster'}"
        elif slurm is not None and not may_be_starting(view, node, slurm) and name not in together:
            there = ", ".join(jobs.get(name, ()))
            where = f"Jobs there: {there}." if there else "No watched job runs there."
            words = {"name": name, "age_s": age_s, "state": state, "where": where}
            agents = f"{share[0]} of {share[1]} agents are silent"
            facts = (f"on {name}: systemctl status slurm-watchdog-agent", agents)
            seen = Seen((_mute(name, age_s),), words, {"facts": facts})
        yield f"node:{name}", (), seen


def _just_fell_silent(view: ClusterView, nodes: list[NodeView], silent: set[str]) -> frozenset[str]:
    """Nodes that have counted as silent for a moment only, where they are many."""
    if view.silent_after_s is None:
        return frozenset()
    since = view.now - view.silent_after_s - TOGETHER_S
    found = frozenset(node.name for node in nodes if node.name in silent and view.last_heard(node) > since)
    return found if len(found) >= MIN_TOGETHER else frozenset()


SILENT = Rule(
    kind=IncidentKind.AGENT_SILENT,
    signal=_silent,
    says="The agent of {name} has not reported for {age_s:.0f} s, while Slurm has the node as {state}: what happens "
    "there is unknown. {where}",
    subject=Subject.NODE,
    sentence="An agent does not report",
    explained_by=(IncidentKind.PARTITION_OR_OUTAGE, IncidentKind.NODE_DOWN),
    why_no_action="silence proves nothing about the jobs on the node",
    doc="""
Fires: no report for 40 s (`controller.agent_silent_after`), and Slurm still has the node.
Names: the node.
""",
)


def _slurm_away(view: ClusterView) -> Iterator[About]:
    """Before the first answer the time since the controller's start counts."""
    age_s = view.watched_s if view.slurm_age_s is None else view.slurm_age_s
    if age_s < SILENT_FOR_S:
        yield "slurm", (), None if view.slurm_age_s is None or view.slurm_excused else "Slurm answers"
        return
    what = f"Slurm has not answered for {age_s:.0f} s"
    if view.slurm_problem:
        what = f"Slurm answers, but for {age_s:.0f} s nothing that can be used ({view.slurm_problem})"
    facts = ("on this machine: scontrol ping; squeue", "journalctl -u slurm-watchdog-controller says what it answered")
    yield "slurm", (), Seen((Sign(lasts_s=age_s),), {"what": what}, {"facts": facts})


SILENT_FOR_S = 60.0  # Without an answer to a listing: several of them, 10 s apart.
SLURM = Rule(
    kind=IncidentKind.SLURM_UNREACHABLE,
    signal=_slurm_away,
    says="{what}: no job is judged and nothing is done until it does.",
    subject=Subject.CLUSTER,
    needs_slurm=False,
    severity=Severity.CRITICAL,
    sentence="Slurm does not answer",
    why_no_action="what runs is unknown while Slurm does not answer",
    alerts=("SlurmWatchdogBlind",),
    doc="""
Fires: Slurm has not answered a listing for 60 s.
Names: nothing.
Acts: no action is taken until Slurm answers.
""",
)

# ------------------------------------------------------------------------------------------------ a past

SUSPECT_FROM = 2.25  # An event of broken hardware weighs 1: tests/simulation/lemons.py says what names lemons best.
UNTIL = 1.5  # A suspicion below which the incident ends: events weigh half after 28 days.


def _suspects(view: ClusterView) -> Iterator[About]:
    """Each node with a past, and each that is asked about: events that name a node are remembered, and weigh by kind
    and age; those of one part (one GPU, one link) add up, those of different parts do not (docs/nodes.md)."""
    known = {each.node: each for each in view.suspects or ()}
    asked = asked_nodes(view) if view.suspects is not None and view.asked is not None else frozenset()
    out = {node.name for node in view.slurm_nodes if is_out(node.state)}
    for name in sorted(asked | known.keys()):
        suspect = known.get(name, NodeSuspicion(node=name))
        if suspect.score >= SUSPECT_FROM:
            yield f"node:{name}", (), None if name in out else _suspect(suspect)
        elif name in asked:
            yield f"node:{name}", (), None if suspect.score >= UNTIL else f"{name} is not suspect any more"


def _suspect(suspect: NodeSuspicion) -> Seen:
    node, place = suspect.node, suspect.place
    reason = f"suspicion {suspect.score:.2f}{f', most of it {place}' if place else ''}"
    drain = f'to drain it: scontrol update NodeName={node} State=DRAIN Reason="suspect node"'  # to be pasted
    culprit = Culprit(node=node, gpu_uuid=place if place.startswith(GPU_PLACE) else None, reason=reason)
    words = {"node": node, "recent": suspect.recent, "reason": reason}
    return Seen((Sign(culprit),), words, {"facts": (suspect.reasons, f"slurm-watchdog nodes {node}", drain)})


SUSPECT = Rule(
    kind=IncidentKind.SUSPECT_NODE,
    signal=_suspects,
    says="{node} fails again and again: {recent} events within 14 days ({reason}).",
    subject=Subject.NODE,
    needs_cluster=True,
    sentence="A node fails again and again",
    why_no_action="restarts avoid such nodes with policy.suspects",
    hint=Hint(
        usually="One part of it (a GPU, a link, a memory module) fails under load and looks well at rest.",
        try_next="Test it under load (slurm-watchdog test-nodes), drain it (scontrol) and, "
        "once it is repaired, record that (slurm-watchdog nodes, with --mended).",
    ),
    alerts=("SlurmWatchdogNodeTrouble",),
    doc="""
Fires: three events of one part within 14 days, give or take (a suspicion of 2.25); stays until 1.5.
Names: the node, the part of it that failed most, and each event.
Acts: `policy.suspects` has restarts avoid it, `policy.quarantine` drains it. After a repair: `slurm-watchdog nodes
NODE --mended WHY`.
""",
)
