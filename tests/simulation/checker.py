"""The history checker: reads the journal and the record of what really happened, and says what must never have been.

It asks nobody who decided anything. Each invariant is one function from a `History` to sentences; no
sentence, no violation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

from slurm_watchdog.model.actions import Decision, Operation, OperationOutcome
from slurm_watchdog.model.incidents import IncidentKind
from tests.simulation.cluster import OVER
from tests.simulation.history import History
from tests.simulation.truth import Deed, Fault

HEALED_S = 100.0
"""A fault that went away so short a time ago may still be acted on: reports are up to 40 s on their way, a
request to Slurm up to 50 s."""
CLEAR_S = 2400.0
"""A fault that lasted so long while nothing hindered the view has to be in the journal: the start-up grace,
the widest floor of a phase that the log may have mentioned, and some."""
ACCUSES = frozenset(
    {
        IncidentKind.COLLECTIVE_HANG,
        IncidentKind.STALLED_PROGRESS,
        IncidentKind.FILESYSTEM_STALL,
        IncidentKind.FILESYSTEM_OUTAGE,
        IncidentKind.RANK_STOPPED,
        IncidentKind.DEAD_RANK,
        IncidentKind.LINGERING_JOB,
        IncidentKind.WEDGED_TEARDOWN,
    }
)
"""Kinds that say of a run that it stands, or that something in it is dead."""


def check(history: History) -> list[str]:
    """Every violation, as `invariant: what, when`."""
    return [f"{name}: {sentence}" for name, rule in INVARIANTS.items() for sentence in rule(history)]


# ---------------------------------------------------------------------------------------- the invariants


def nothing_is_lost(h: History) -> Iterator[str]:
    """Each decision to act has an end, each operation an outcome, and what was written is still there."""
    for run in h.actions:
        if run.end is None:
            yield f"decision {run.decision.id} ({run.decision.action} of {run.decision.fence}) has no end"
        elif not run.end.detail:
            yield f"decision {run.decision.id} ended without a word"
        for record in run.records:
            if record.outcome is None:
                yield f"{record.operation} {record.attempt} of {run.decision.id} has no outcome"
    for deed in h.ours("journal decision"):
        if deed.detail not in h.decisions:
            yield f"decision {deed.detail} was written at {deed.t:.0f} and is not in the journal"
    kept = {(run.decision.id, str(r.operation), r.attempt): r for run in h.actions for r in run.records}
    for deed in h.deeds:
        if deed.by == "us" and deed.what.startswith("journal intent "):
            decision_id, attempt = deed.detail.split()
            if (decision_id, deed.what.split()[2], int(attempt)) not in kept:
                yield f"{deed.what} of {deed.detail} was written at {deed.t:.0f} and is not in the journal"


def every_requeue_is_of_its_run_and_once(h: History) -> Iterator[str]:
    """No run is requeued by us but the one of a decision whose intent was written before, and none twice."""
    used: Counter[str] = Counter()
    for deed in h.ours("requeue"):
        mine = [
            run.decision
            for run in h.actions
            if run.decision.fence is not None
            and (run.decision.fence.job_id, run.decision.fence.restarts) == (deed.job_id, deed.restarts)
            and run.decision.fence.start_at == deed.start_at
            and any(t <= deed.t for t in h.intents(run.decision.id, Operation.REQUEUE_HOLD))
        ]
        if not mine:
            yield f"run {deed.job_id}.{deed.restarts} was requeued at {deed.t:.0f}, and no written intent was about it"
        used.update(decision.id for decision in mine[:1])
    for decision_id, count in used.items():
        if count > 1:
            yield f"decision {decision_id} was carried out {count} times"


LEVERS = {
    "cancel": Operation.CANCEL,
    "signal USR1": Operation.SIGNAL_USR1,
    "signal TERM": Operation.SIGNAL_TERM,
    "hold": Operation.HOLD,
}
"""What we did to a job -> the operation that has to be written before."""


def every_other_lever_is_of_its_run_too(h: History) -> Iterator[str]:
    """No job is cancelled, held or sent a signal but the run of a decision whose intent was written before;
    no signal comes twice."""
    signals: Counter[tuple[str, int, str]] = Counter()
    for deed in h.deeds:
        operation = LEVERS.get(deed.what) if deed.by == "us" else None
        if operation is None:
            continue
        mine = [
            run.decision for run in h.actions
            if run.decision.fence is not None and any(t <= deed.t for t in h.intents(run.decision.id, operation))
            and (run.decision.fence.job_id, run.decision.fence.restarts) == (deed.job_id, deed.restarts)
        ]  # fmt: skip
        if not mine:
            yield f"{deed.what} hit run {deed.job_id}.{deed.restarts} at {deed.t:.0f}, and no written intent was about it"
        if deed.what.startswith("signal"):
            signals[deed.job_id, deed.restarts, deed.what] += 1
    for (job_id, restarts, what), count in signals.items():
        sent = sum(
            run.decision.fence is not None
            and (run.decision.fence.job_id, run.decision.fence.restarts) == (job_id, restarts)
            for run in h.actions
        )
        if count > sent:
            yield f"run {job_id}.{restarts} got {what} {count} times for {sent} decisions"


def what_is_submitted_again_is_so_once_and_never_runs_beside_the_old_job(h: History) -> Iterator[str]:
    """By the mark in its comment: one new job for a decision, of which the intent was written before, and the
    old one is over first."""
    new: dict[str, str] = {}
    """New job -> the one in whose place it is."""
    by_decision: Counter[str] = Counter()
    for deed in h.ours("submit"):
        old, mark = deed.detail.split()[0], deed.detail.rpartition("=")[2]
        new[deed.job_id] = old
        by_decision[mark] += 1
        if not any(t <= deed.t for t in h.intents(mark, Operation.RESUBMIT)):
            yield f"job {deed.job_id} was submitted in the place of {old} at {deed.t:.0f}, and no intent of it was written"
    for decision_id, count in by_decision.items():
        if count > 1:
            yield f"{count} jobs were submitted for decision {decision_id}"
    running: set[str] = set()
    for deed in h.deeds:
        if deed.what == "start":
            running.add(deed.job_id)
            if deed.job_id in new and new[deed.job_id] in running:
                yield f"job {deed.job_id} began at {deed.t:.0f} while {new[deed.job_id]}, in whose place it is, still ran"
        elif deed.what == "requeue" or (deed.by == "job" and deed.what.startswith("ends ")):
            running.discard(deed.job_id)


def drains_are_written_and_bounded(h: History) -> Iterator[str]:
    """Each with an intent before, within the budget; what we did not drain we do not give back."""
    ours: set[str] = set()
    for deed in h.deeds:
        if deed.by == "us" and deed.what == "drain":
            node = deed.detail.split()[0]
            ours.add(node)
            if not any(
                node in run.decision.drain and any(t <= deed.t for t in h.intents(run.decision.id, Operation.DRAIN))
                for run in h.actions
            ):
                yield f"node {node} was drained at {deed.t:.0f}, and no written intent was about it"
        elif deed.by == "us" and deed.what == "undrain" and deed.detail not in ours:
            yield f"node {deed.detail} was returned to service at {deed.t:.0f}, and was not ours"
    if len(ours) > h.config.policy.max_drained_nodes:
        yield f"{len(ours)} nodes were drained"


def what_is_over_stays_over(h: History) -> Iterator[str]:
    """A job that has finished, or that somebody has cancelled, is not run again by us: but one that left for
    our kill switch."""
    for deed in h.ours("requeue"):
        state = deed.detail.split()[0]
        if state not in OVER and state != "COMPLETING":
            continue
        left = [
            d for d in h.deeds
            if d.what == "left for its kill switch" and (d.job_id, d.restarts) == (deed.job_id, deed.restarts)
        ]  # fmt: skip
        signalled = any(
            d.by == "us" and d.what.startswith("signal") and (d.job_id, d.restarts) == (deed.job_id, deed.restarts)
            for d in h.deeds
        )
        if state == "CANCELLED" or not (left or (signalled and state in ("FAILED", "COMPLETING"))):
            yield f"job {deed.job_id} was {state} when it was requeued at {deed.t:.0f}"


def nobody_else_s_hold_is_lifted(h: History) -> Iterator[str]:
    """We release what we hold. Who held it can't be told from outside unless our release was written as done."""
    done_at = {
        run.decision.fence.job_id: (run.decision, deed.t)
        for run in h.actions
        if run.decision.fence is not None
        for deed in h.ours(f"journal outcome {Operation.RELEASE} {OperationOutcome.DONE}")
        if deed.detail.split()[0] == run.decision.id
    }
    for deed in h.ours("release"):
        decision, written_at = done_at.get(deed.job_id, (None, float("inf")))
        if deed.detail.startswith("person") and decision is not None and decision.fence is not None:
            sent = [t for t in h.intents(decision.id, Operation.RELEASE) if t > written_at]
            if decision.fence.restarts == deed.restarts - 1 and sent:
                yield f"a person's hold of job {deed.job_id} was lifted at {deed.t:.0f}"


def guards_hold(h: History) -> Iterator[str]:
    """Nothing is decided while paused, blind, just started, or when a fifth of the nodes is silent; nothing
    at all by an observer."""
    warm_up_s = h.config.controller.warm_up
    patience_s = 3 * h.config.slurm.poll_interval + h.config.slurm.deadline
    for run in h.actions:
        decision, was = run.decision, h.circumstances.get(run.decision.id)
        if was is None:
            yield f"decision {decision.id} is in the journal and was never written by the journal's own hand"
            continue
        what = f"{decision.action} of {decision.fence.job_id if decision.fence else '?'} at {was.at:.0f}"
        if was.paused:
            yield f"{what} was allowed while paused"
        if was.at - max(was.started, was.seeing_from) < warm_up_s - 0.01:
            yield f"{what} was allowed {was.at - max(was.started, was.seeing_from):.0f} s after the controller began to look"
        if was.slurm_age_s > patience_s:
            yield f"{what} was allowed while Slurm had not answered for {was.slurm_age_s:.0f} s"
        if not decision.asked_by and was.nodes_silent > 0.2 * max(1, was.nodes_known):
            yield f"{what} was allowed while {was.nodes_silent} of {was.nodes_known} nodes were silent"
        if h.recipe.mode != "act" and not decision.asked_by:
            yield f"{what} was allowed in mode {h.recipe.mode}"
    yield from _nothing_while_paused(h)


def _nothing_while_paused(h: History) -> Iterator[str]:
    paused = False
    begun: set[str] = set()
    for deed in h.deeds:
        if deed.by == "person" and deed.what in ("pause", "resume"):
            paused = deed.what == "pause"
        if deed.by != "us" or not deed.what.startswith("journal intent "):
            continue
        operation, decision_id = deed.what.split()[2], deed.detail.split()[0]
        fresh_switch = operation == Operation.WRITE_KILL_SWITCH and decision_id not in begun
        begun.add(decision_id)
        if paused and (operation in (Operation.REQUEUE_HOLD, Operation.RELEASE) or fresh_switch):
            yield f"{operation} of {decision_id} was begun at {deed.t:.0f} while paused"


def budgets_hold(h: History) -> Iterator[str]:
    """On the cluster within its window, on one job within a week, and between two actions on one job."""
    policy = h.config.policy
    found = (run.decision for run in h.actions if run.decision.id in h.circumstances and not run.decision.asked_by)
    allowed = sorted(((h.circumstances[each.id].at, each) for each in found), key=lambda each: each[0])
    for index, (at, decision) in enumerate(allowed):
        was = h.circumstances[decision.id]
        if was.clock_moved_at > float("-inf") and was.started > was.clock_moved_at:
            continue  # a controller that was started since knows no other clock than the moved one
        # Allowed in the very moment in which the window was over (seed 1): the two clocks differ in the last digits.
        before = [t for t, _ in allowed[:index] if at - t < policy.budget_window - 1.0]
        if len(before) >= h.config.restarts_per_hour:
            yield f"{len(before) + 1} actions within {policy.budget_window:.0f} s at {at:.0f}: more than restarts_per_hour"
        same = [t for t, d in allowed[:index] if _job(d) == _job(decision)]
        if len(same) >= policy.attempts and decision.by != IncidentKind.SLOW_JOB:
            yield f"{len(same) + 1} actions on job {_job(decision)} at {at:.0f}"
        if same and at - same[-1] < policy.cooldown - 1.0:
            yield f"job {_job(decision)} was acted on again after {at - same[-1]:.0f} s at {at:.0f}"


def _job(decision: Decision) -> str:
    return decision.fence.job_id if decision.fence is not None else "?"


def no_healthy_job_is_acted_on(h: History) -> Iterator[str]:
    """Every action that nobody asked for is about a run with a fault, and that fault is there when the run is
    requeued."""
    for run in h.actions:
        decision, was = run.decision, h.circumstances.get(run.decision.id)
        if decision.asked_by or was is None or decision.fence is None:
            continue
        key = (decision.fence.job_id, decision.fence.restarts)
        faults = [f for f in h.faults if (f.job_id, f.restarts) == key]
        if not any(f.began <= was.at and (f.ended is None or f.ended >= was.at - HEALED_S) for f in faults):
            yield f"{decision.action} of the healthy run {key} was allowed at {was.at:.0f} by {decision.by}"
        for deed in h.ours("requeue"):
            # A run that our signal has ended stands no more: whether it may go on is the matter of
            # what_is_over_stays_over.
            if (
                (deed.job_id, deed.restarts) == key
                and deed.detail.startswith("RUNNING")
                and not any(f.began <= deed.t and (f.ended is None or f.ended >= deed.t - HEALED_S) for f in faults)
            ):
                yield f"run {key} was requeued at {deed.t:.0f} although it was well again"


def no_healthy_run_is_accused(h: History) -> Iterator[str]:
    """Nothing that fires says of a run that it stands when it does not."""
    for incident in h.incidents.values():
        if incident.kind not in ACCUSES or incident.fired_at is None:
            continue
        for job_id, restarts in incident.runs:
            if not any((f.job_id, f.restarts) == (job_id, restarts) for f in h.faults):
                yield f"{incident.kind} fired about {job_id}.{restarts}, which had no fault: {incident.summary}"


def every_lasting_fault_is_found(h: History) -> Iterator[str]:
    """One that lasted while nothing hindered the view is in an incident about its run."""
    for fault in h.faults:
        ended = h.recipe.until_s if fault.ended is None else fault.ended
        if _clear_s(h, fault, ended) < CLEAR_S:
            continue
        if not any((fault.job_id, fault.restarts) in incident.runs for incident in h.incidents.values()):
            yield f"{fault.kind} of {fault.job_id}.{fault.restarts} from {fault.began:.0f} to {ended:.0f} was not found"


def _clear_s(h: History, fault: Fault, ended: float) -> float:
    """The longest time within the fault in which nothing went wrong with the eyes."""
    if not fault.told:
        return 0.0  # before its first step nobody knows how long a run may take to begin
    agents = [d.t for d in h.deeds if d.by == "fault" and d.what.startswith("agent of") and fault.began < d.t < ended]
    if any(d.by == "fault" and d.what.startswith("controller ") and min(agents, default=ended) < d.t < ended
           for d in h.deeds):  # fmt: skip
        return 0.0  # both that knew its steps may have been started again since: it may be before its first step
    hindrances = (
        "controller ",
        "cut",
        "mended",
        "agent of",
        "slurmctld",
        "journal full",
        "journal has",
        "clock",
    )
    times = [d.t for d in h.deeds if d.by == "fault" and d.what.startswith(hindrances) and fault.began < d.t < ended]
    if h.recipe.until_s - h.recipe.calm_s > fault.began:
        times.append(min(ended, h.recipe.until_s - h.recipe.calm_s))
    edges = [fault.began, *sorted(times), ended]
    return max(b - a for a, b in pairwise(edges))


def no_switch_outlives_its_run(h: History) -> Iterator[str]:
    """No run ends for the kill switch of another; no job is released under one; none is left at the end."""
    by_run = {
        run.decision.id: (run.decision.fence.job_id, run.decision.fence.restarts)
        for run in h.actions
        if run.decision.fence is not None
    }
    for deed in h.deeds:
        if deed.what == "heard":
            wrote = json.loads(deed.detail)["decision"]
            if by_run.get(wrote) != (deed.job_id, deed.restarts):
                yield f"run {deed.job_id}.{deed.restarts} heard the switch of {by_run.get(wrote)} at {deed.t:.0f}"
        if deed.by == "us" and deed.what == "release" and "switch is out" in deed.detail:
            yield f"job {deed.job_id} was released at {deed.t:.0f} under a kill switch"
        if deed.what == "switch left" and not _is_harmless(h, deed):
            yield f"a kill switch was left: {deed.detail}"


def _is_harmless(h: History, left: Deed) -> bool:
    """Whether a switch that was left names its run in its path, and that run is over: nobody looks there any more."""
    path = left.detail.partition(" ")[2]
    wrote = [d.detail for d in h.ours("switch written") if d.detail.partition(" ")[2].startswith(f"{path} ")]
    by_run = {run.decision.id: run.decision.fence for run in h.actions if run.decision.fence is not None}
    fence = (
        by_run.get(json.loads(wrote[-1].partition("{")[1] + wrote[-1].partition("{")[2])["decision"]) if wrote else None
    )
    return (
        fence is not None
        and f"/{fence.job_id}.{fence.restarts}/" in path
        and any(
            (d.job_id, d.restarts) == (fence.job_id, fence.restarts)
            and (d.what == "requeue" or d.what.startswith("ends "))
            for d in h.deeds
        )
    )


def evidence_comes_first(h: History) -> Iterator[str]:
    """Before anything is done about an incident, what was known of its jobs is in the journal, if its ladder wants so."""
    for run in h.actions:
        if run.decision.asked_by or not run.records:
            continue
        deeds = {record.operation for record in run.records} - {Operation.EVIDENCE}
        first = min((t for operation in deeds for t in h.intents(run.decision.id, operation)), default=float("inf"))
        if first < h.evidence_at.get(run.decision.incident_id, float("inf")):
            yield f"{run.decision.action} {run.decision.id} began at {first:.0f} without evidence"


def exclusions_are_kept(h: History) -> Iterator[str]:
    """Slurm replaces the whole list: what was on it before stays on it."""
    before: dict[str, set[str]] = {}
    for deed in h.deeds:
        if deed.what == "exclude":
            now = set(deed.detail.split(",")) if deed.detail else set()
            if not before.get(deed.job_id, set()) <= now:
                yield f"exclusions of job {deed.job_id} were dropped at {deed.t:.0f}"
            before[deed.job_id] = now


def a_matter_is_not_dropped(h: History) -> Iterator[str]:
    """An action that failed while its run stands as before is not the last word about it, if there is time
    for another one."""
    policy, end = h.config.policy, h.recipe.until_s
    for run in h.actions:
        fence, ended = (
            run.decision.fence,
            next((d.t for d in h.ours("journal end") if d.detail == run.decision.id), None),
        )
        if run.end is None or run.end.ok or fence is None or run.decision.asked_by or ended is None:
            continue
        standing = any(
            (f.job_id, f.restarts) == (fence.job_id, fence.restarts) and f.ended is None and f.began <= ended
            for f in h.faults
        )
        if not standing or end - max(ended, end - h.recipe.calm_s) < policy.cooldown + policy.budget_window / 2:
            continue
        later = [
            d for d in h.decisions.values()
            if d.incident_id == run.decision.incident_id and d.id != run.decision.id
            and d.decided_at >= run.end.ended_at - 1.0
        ]  # fmt: skip
        if not later:
            yield f"{run.decision.action} of {fence.job_id}.{fence.restarts} failed at {ended:.0f} ({run.end.detail}) and nothing was decided since"


def an_open_incident_goes_on_under_its_id(h: History) -> Iterator[str]:
    """A matter is one incident, whichever controller is the active one: none fires beside the one that does. Its dates
    tell nothing once the clock was set back. A restart that a person asks for is a matter of its own each time."""
    if any(deed.what.startswith("clock moved by -") for deed in h.deeds):
        return
    by_matter: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for each in h.incidents.values():
        if each.fired_at is not None and each.kind != IncidentKind.OPERATOR_RESTART:
            ended = float("inf") if each.resolved_at is None else each.resolved_at
            by_matter.setdefault((str(each.kind), each.subject), []).append((each.fired_at, ended, each.id))
    for (kind, subject), found in by_matter.items():
        for (_, ended, one), (fired, _, other) in pairwise(sorted(found)):
            if fired < ended:
                yield f"{kind} of {subject}: incident {other} fired while {one} was open"


def nothing_raised(h: History) -> Iterator[str]:
    """No tick, poll or detector failed."""
    yield from h.complaints


Invariant = Callable[[History], Iterator[str]]
INVARIANTS: dict[str, Invariant] = {
    each.__name__: each
    for each in (
        nothing_is_lost,
        every_requeue_is_of_its_run_and_once,
        every_other_lever_is_of_its_run_too,
        what_is_submitted_again_is_so_once_and_never_runs_beside_the_old_job,
        drains_are_written_and_bounded,
        what_is_over_stays_over,
        nobody_else_s_hold_is_lifted,
        guards_hold,
        budgets_hold,
        no_healthy_job_is_acted_on,
        no_healthy_run_is_accused,
        every_lasting_fault_is_found,
        no_switch_outlives_its_run,
        evidence_comes_first,
        exclusions_are_kept,
        a_matter_is_not_dropped,
        an_open_incident_goes_on_under_its_id,
        nothing_raised,
    )
}
