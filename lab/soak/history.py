"""The history checker of the soak: what the journal says, what Slurm was asked and what it did, what the jobs
wrote, and what was done to them. Each rule is one function from a `History` to sentences; no sentence, no
violation.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise

from lab.soak.stage import BLIND_AFTER_S, WARM_UP_S, Deed, Run, Stage
from lab.soak.tools import Request
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, ActionRun, Operation, Verdict
from slurm_watchdog.model.incidents import Incident

SLACK_S = 3.0
"""Between two clocks, or between a decision's date and the moment it was made at: a busy machine is slow, not wrong."""


@dataclass
class History:
    """What was written, and what was."""

    deeds: Sequence[Deed]
    runs: Sequence[Run]
    requests: Sequence[Request]
    actions: Sequence[ActionRun]
    """Every decision to act, with its operations and its end."""
    incidents: Sequence[Incident]
    states: dict[str, dict[str, str]]
    """Job -> Slurm's word on it at the end."""
    logs: dict[str, str] = field(default_factory=dict)
    """Job -> what it printed, run after run."""
    integrity: str = "ok"
    switches_left: Sequence[str] = ()
    memory: Sequence[tuple[float, int]] = ()


def history_of(stage: Stage) -> History:
    """Of a stage on which everything has come to its end."""
    file = stage.state / "journal.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=10)) as sql:
        integrity = str(sql.execute("pragma integrity_check").fetchone()[0])
    journal = Journal(f"sqlite:///{file}")
    try:
        decisions = [d for d in journal.decisions() if d.verdict is Verdict.ALLOWED and d.action is not Action.NONE]
        ids = dict.fromkeys(decision.incident_id for decision in decisions)
        actions = [run for incident_id in ids for run in journal.actions(incident_id)]
        incidents = journal.incidents(limit=100_000)
    finally:
        journal.close()
    switches = [
        f"{node}:{file.parent.name}"
        for node in stage.cluster.nodes
        for file in stage.cluster.node_path(node, "/run/slurm-watchdog/jobs").glob("*/kill")
    ]
    return History(
        stage.deeds,
        stage.runs(),
        list(stage.tools.requests()),
        actions,
        incidents,
        {j: stage.job(j) for j in stage.jobs},
        {j: stage.log_of(j).read_text(errors="replace") for j in stage.jobs if stage.log_of(j).exists()},
        integrity,
        switches,
        stage.marks,
    )


def check(history: History) -> list[str]:
    """Every violation, as `rule: what`."""
    return [f"{rule.__name__}: {sentence}" for rule in RULES for sentence in rule(history)]


def _mine(h: History, job_id: str, restarts: int) -> list[ActionRun]:
    return [
        run
        for run in h.actions
        if run.decision.fence is not None
        and (run.decision.fence.job_id, run.decision.fence.restarts) == (job_id, restarts)
    ]


# ---------------------------------------------------------------------------------------- the rules


def nothing_is_lost(h: History) -> Iterator[str]:
    """Each decision to act has its end, each operation its outcome; the file is whole."""
    if h.integrity != "ok":
        yield f"the journal is damaged: {h.integrity}"
    for run in h.actions:
        if run.end is None or not run.end.detail:
            yield f"{run.decision.action} {run.decision.id} of {run.decision.fence} has no end"
        for record in run.records:
            if record.outcome is None:
                yield f"{record.operation} {record.attempt} of {run.decision.id} has no outcome"


def no_run_is_requeued_twice_or_without_a_decision(h: History) -> Iterator[str]:
    """By Slurm's restart count: each run that a request of ours put back belongs to a decision whose intent
    was written before."""
    done: Counter[tuple[str, int]] = Counter()
    for request in h.requests:
        run = request.requeued_run
        if run is None or "requeue" not in request.words:
            continue
        done[request.job_id, run] += 1
        intents = [
            record.intent_at for action in _mine(h, request.job_id, run) for record in action.records
            if record.operation is Operation.REQUEUE_HOLD
        ]  # fmt: skip
        if not any(at <= request.done + 0.1 for at in intents):
            yield f"run {request.job_id}.{run} was requeued at {request.done:.1f} ({request.words}), and no written intent was about it"
    for (job_id, run), count in done.items():
        if count > 1:
            yield f"run {job_id}.{run} was requeued {count} times"


def every_run_is_accounted_for(h: History) -> Iterator[str]:
    """A job began again because we, a person or Slurm itself requeued it, and each restart count was begun at
    most once."""
    began = Counter((run.job_id, run.restarts) for run in h.runs)
    for (job_id, restarts), count in began.items():
        if count > 1:
            yield f"run {job_id}.{restarts} began {count} times"
    ours = {(request.job_id, request.requeued_run) for request in h.requests}
    people = {(deed.job_id, deed.restarts) for deed in h.deeds if deed.what.startswith("person requeue")}
    for job_id, restarts in began:
        if (
            restarts > 0
            and (job_id, restarts - 1) not in ours | people
            and not _was_out_of_reach(h, job_id, restarts - 1)
        ):
            yield f"run {job_id}.{restarts} began, and nobody had requeued the one before"


def _was_out_of_reach(h: History, job_id: str, restarts: int) -> bool:
    """Whether Slurm may have given up a node of that run."""
    nodes = [run.nodes for run in h.runs if (run.job_id, run.restarts) == (job_id, restarts)]
    return not nodes or any(deed.what == "cut" for deed in h.deeds)


def what_is_over_stays_over(h: History) -> Iterator[str]:
    """Nothing that had completed, or that somebody had cancelled, was put back by us, but for a run that left
    for our kill switch."""
    for request in h.requests:
        state, run = request.before.get("JobState", ""), request.requeued_run
        if run is None or "requeue" not in request.words or state in ("RUNNING", "COMPLETING", "SUSPENDED"):
            continue
        heard = any((job_id, number) == (request.job_id, run) for job_id, number, _ in _heard(h))
        if state == "CANCELLED" or not heard:
            yield f"run {request.job_id}.{run} was {state} when it was requeued at {request.done:.1f}"


def _heard(h: History) -> Iterator[tuple[str, int, str]]:
    """(job, run, path) of every kill switch that a run found."""
    for job_id, text in h.logs.items():
        run = -1
        for line in text.splitlines():
            if line.startswith("RUN "):
                run = int(line.split()[1])
            found = re.search(r"kill switch (\S+) found", line)
            if found:
                yield job_id, run, found[1]


def no_switch_outlives_its_run(h: History) -> Iterator[str]:
    """No run ended for the kill switch of another one, or for one that nobody decided about; none is left."""
    for job_id, run, path in _heard(h):
        if f"{job_id}.{run}/" not in path:
            yield f"run {job_id}.{run} ended for the kill switch {path}"
        if not any(action.decision.kill_switch for action in _mine(h, job_id, run)):
            yield f"run {job_id}.{run} found a kill switch that no decision was about"
    for each in h.switches_left:
        yield f"a kill switch was left: {each}"


def the_switch_is_gone_before_the_restart(h: History) -> Iterator[str]:
    """In the journal: removed before released."""
    for action in h.actions:
        wrote = [r for r in action.records if r.operation is Operation.WRITE_KILL_SWITCH]
        removed = [
            r.outcome_at or 0.0
            for r in action.records
            if r.operation is Operation.REMOVE_KILL_SWITCH and r.outcome == "done"
        ]
        released = [r.intent_at for r in action.records if r.operation is Operation.RELEASE]
        if wrote and released and (not removed or min(removed) > min(released)):
            yield f"{action.decision.id} released the job before its kill switch was gone"


def no_healthy_run_is_acted_on(h: History) -> Iterator[str]:
    """Every action that nobody asked for is about a run that something was done to before."""
    hurt = defaultdict(list)
    for deed in h.deeds:
        if deed.what.startswith("fault "):
            hurt[deed.job_id, deed.restarts].append(deed.t)
    for action in h.actions:
        decision = action.decision
        if decision.asked_by or decision.fence is None:
            continue
        key = (decision.fence.job_id, decision.fence.restarts)
        if not any(t <= decision.decided_at for t in hurt[key]):
            incident = next((each for each in h.incidents if each.id == decision.incident_id), None)
            yield f"{decision.action} of the healthy run {key} was allowed by {decision.by}: {incident.summary if incident else '?'}"


def guards_hold(h: History) -> Iterator[str]:
    """Nothing was decided by a controller that had just started or woken, or whose Slurm had been away for long."""
    blind_from = blind = float("-inf")
    away: list[tuple[float, float]] = []
    seeing: list[float] = []
    for deed in h.deeds:
        if deed.what == "slurm stopped":
            blind_from = deed.t
        elif deed.what == "slurm started":
            away.append((blind_from, deed.t))
        elif deed.what in ("controller started", "controller continued"):
            seeing.append(deed.t)
    del blind
    # `controller started` is noted once it answers: it may have begun to look a moment earlier, never later.
    stopped = [
        (a.t, b.t)
        for a, b in pairwise([d for d in h.deeds if d.what.startswith("controller ")])
        if b.what == "controller continued"
    ]
    for action in h.actions:
        decision = action.decision
        what = f"{decision.action} of {decision.fence.job_id if decision.fence else '?'} at {decision.decided_at:.1f}"
        if any(a + BLIND_AFTER_S + SLACK_S < decision.decided_at < b - SLACK_S for a, b in away):
            yield f"{what} was decided while Slurm was away"
        for a, b in stopped:
            if b - a > 10 and b - SLACK_S < decision.decided_at < b + WARM_UP_S - SLACK_S:
                yield f"{what} was decided {decision.decided_at - b:.1f} s after the controller had been stopped for {b - a:.0f} s"


def memory_does_not_grow(h: History) -> Iterator[str]:
    """Between its middle and its end. A controller that was killed begins small again; so the largest of each
    half counts."""
    if len(h.memory) < 20:
        return
    half = len(h.memory) // 2
    before, after = max(m for _, m in h.memory[:half]), max(m for _, m in h.memory[half:])
    if after > 1.5 * before + 32 * 2**20:
        yield f"the controller's memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB"


Rule = Callable[[History], Iterator[str]]
RULES: tuple[Rule, ...] = (
    nothing_is_lost,
    no_run_is_requeued_twice_or_without_a_decision,
    every_run_is_accounted_for,
    what_is_over_stays_over,
    no_switch_outlives_its_run,
    the_switch_is_gone_before_the_restart,
    no_healthy_run_is_acted_on,
    guards_hold,
    memory_does_not_grow,
)
