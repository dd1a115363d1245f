"""What a report counts from, read from a journal while a controller writes it: a connection of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, Documents
from slurm_watchdog.journal.tables import ACTION_ENDS, DECISIONS, INCIDENTS, JOB_RUNS
from slurm_watchdog.model.actions import Action, ActionEnd, Decision, Verdict
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.run_record import RunRecord, Spell

LONGEST_S = 30 * 86400.0  # An incident that began so long before the time of a report is not looked for.


def read_report(url: str, since: float, until: float) -> tuple[list[RunRecord], list[Spell]]:
    """The runs of that time (dates), and the incidents, each once for every job of it. Raises JournalError."""
    database = Database(url, read_only=True)
    try:
        with database.together():
            runs = Documents(database, JOB_RUNS, RunRecord, order="began_at job_id")
            found = runs.find(JOB_RUNS.c.seen_at >= since, JOB_RUNS.c.began_at <= until)
            spells = _spells(database, since, until)
    finally:
        database.close()
    return found, spells


def _spells(database: Database, since: float, until: float) -> list[Spell]:
    incidents = Documents(database, INCIDENTS, Incident, order="opened_at").find(
        INCIDENTS.c.opened_at.between(since - LONGEST_S, until)
    )
    in_time = DECISIONS.c.decided_at.between(since - LONGEST_S, until)
    done = sa.select(DECISIONS.c.document.label("decision"), ACTION_ENDS.c.document.label("ended")).join(
        ACTION_ENDS, ACTION_ENDS.c.decision_id == DECISIONS.c.id
    )
    ends: dict[str, list[tuple[Decision, ActionEnd]]] = defaultdict(list)
    for row in database.rows(done.where(in_time)):
        decision = database.decode(row.decision, Decision)
        ends[decision.incident_id].append((decision, database.decode(row.ended, ActionEnd)))
    observed: dict[str, list[Decision]] = defaultdict(list)
    undone = Documents(database, DECISIONS, Decision, order="decided_at")
    for decision in undone.find(DECISIONS.c.verdict == Verdict.OBSERVED.value, in_time):
        observed[decision.incident_id].append(decision)
    return [spell for each in incidents for spell in spells_of(each, ends[each.id], until, observed[each.id])]


def spells_of(
    incident: Incident, ends: list[tuple[Decision, ActionEnd]], until: float, observed: Sequence[Decision] = ()
) -> list[Spell]:
    """One a job; nothing of an incident that was never reported, or that another one explains. `observed`: decisions
    that its mode left undone."""
    if incident.fired_at is None or incident.inhibited_by is not None:
        return []
    runs = dict(incident.runs)
    acted: set[str] = set()
    recomputed_s: dict[str, float] = defaultdict(float)
    for decision, end in ends:
        if end.ok and decision.fence is not None:  # one about a process has none, and ends no run
            acted.add(decision.fence.job_id)
            if decision.action == Action.RESTART_STEP:
                recomputed_s[decision.fence.job_id] += end.seconds_lost or 0.0
    would_act: dict[str, float] = {}
    for each in observed:
        if each.fence is not None and each.fence.restarts == runs.get(each.fence.job_id):
            would_act[each.fence.job_id] = min(each.decided_at, would_act.get(each.fence.job_id, each.decided_at))
    nodes = tuple(dict.fromkeys(each.node for each in incident.culprits if each.node))
    return [
        Spell(
            job_id=job_id,
            restarts=runs.get(job_id),
            kind=incident.kind,
            began_at=incident.opened_at,
            ended_at=until if incident.resolved_at is None else incident.resolved_at,
            fired_at=incident.fired_at,
            nodes=nodes if number == 0 else (),
            acted=job_id in acted,
            recomputed_s=recomputed_s[job_id],
            would_act_at=would_act.get(job_id),
        )
        for number, job_id in enumerate(incident.job_ids or ("",))
    ]
