"""`slurm-watchdog explain`: one incident from the first sign to the last rung."""

from __future__ import annotations

import json
from typing import Final

import click

from watchdog import clock
from watchdog.cli.answers import ActionRun, Evidence, Explanation, Rung
from watchdog.cli.incidents import STYLES, who
from watchdog.cli.options import failures_told, open_client, operator_options, print_json
from watchdog.cli.text import clean_lines, count, duration, moment, sentence, table

LINES_OF_EVIDENCE: Final = 40
"""Lines shown of one piece of evidence; `--json` has all of it."""


@click.command(short_help="One incident: who, since when, why, what was done.")
@click.argument("incident_id", metavar="INCIDENT")
@operator_options
def explain(incident_id: str, socket_path: str | None, config_file: str | None, as_json: bool) -> None:
    """One incident: who is named, the timeline, the evidence, every decision with its reason, every rung.

    \b
    Examples:
      slurm-watchdog incidents            lists the ids
      slurm-watchdog explain 7f3a         the first characters of an id are enough
    """
    client = open_client(socket_path, config_file)
    with failures_told(as_json):
        found, document = client.incident(incident_id)
    if as_json:
        print_json(document)
    else:
        _print(found, clock.wall())


def _print(found: Explanation, now: float) -> None:
    incident = found.incident
    of_job = f" of job {incident.job_id}" if incident.job_id else ""
    since = ""
    if incident.opened_at is not None:
        word = "" if incident.state == "resolved" else "since "
        since = f" {word}{moment(incident.opened_at)} ({duration(max(0.0, now - incident.opened_at))} ago)"
    after = f", found after {duration(incident.detected_after_s)}" if incident.detected_after_s else ""
    opened = "opened" if incident.state == "resolved" else incident.state
    state = "resolved, " if incident.state == "resolved" else ""
    sentence(
        f"{incident.id}: {incident.kind}{of_job}, {state}{opened}{since}{after}.",
        STYLES.get(incident.state, ""),
    )
    sentence(incident.summary)
    if incident.inhibited_by:
        sentence(f"It is not acted on and not announced, for this explains it: {incident.inhibited_by}.")
    if incident.resolution:
        sentence(f"Resolved: {incident.resolution}")
    _heading("Who")
    if incident.culprits:
        table(
            ("WHO", "WHERE", "WHY"),
            [(who(c), c.path or c.mount or "-", c.reason or "-") for c in incident.culprits],
        )
    else:
        sentence("Nobody is named.")
    if found.timeline:
        _heading("Timeline")
        table(("TIME", "WHAT"), [(moment(each.at), each.text) for each in found.timeline])
    if incident.evidence:
        _heading("Facts")
    for fact in incident.evidence:
        sentence(f"- {_as_text(fact)}")
    for each in found.evidence:
        _print_evidence(each)
    _heading("Decisions")
    for decision in incident.decisions:
        what = "no action" if decision.action == "none" else f"{decision.action} {decision.verdict}"
        sentence(f"- {what} by {decision.by}: {decision.reason}")
    if not incident.decisions:
        sentence("None yet.")
    for action in found.actions:
        _print_action(action)


def _heading(text: str) -> None:
    sentence("")
    sentence(text, "bold")


def _print_evidence(each: Evidence) -> None:
    _heading(f"Evidence: {each.kind}, {moment(each.at)}")
    lines = clean_lines(_as_text(each.document))
    if not isinstance(each.document, str) and len(lines) > LINES_OF_EVIDENCE:
        sentence(
            f"  {len(lines)} lines of JSON (processes, stacks, log lines): slurm-watchdog explain --json has them"
        )
        return
    for line in lines[:LINES_OF_EVIDENCE]:
        sentence(f"  {line}")
    if len(lines) > LINES_OF_EVIDENCE:
        sentence(f"  … {len(lines) - LINES_OF_EVIDENCE} more lines: slurm-watchdog explain --json has them")


def _as_text(document: object) -> str:
    return document if isinstance(document, str) else json.dumps(document, indent=2, ensure_ascii=False)


def _print_action(each: ActionRun) -> None:
    _heading(f"Action: {each.action}, {each.verdict} by {each.by}: {each.reason}")
    table(
        ("TIME", "RUNG", "ATTEMPT", "OUTCOME", "DETAIL"),
        [
            (_time(rung), rung.rung, str(rung.attempt), rung.outcome or "in progress", rung.detail or "")
            for rung in each.rungs
        ],
    )
    if each.end is not None:
        sentence(describe_end(each), "green" if each.end.ok else "bold red")
    elif each.verdict == "allowed":
        sentence("It is under way.")


def _time(rung: Rung) -> str:
    at = rung.intent_at if rung.intent_at is not None else rung.outcome_at
    return moment(at) if at is not None else "-"


def describe_end(action: ActionRun) -> str:
    """How an action ended, in one sentence. It must have ended."""
    end = action.end
    assert end is not None
    numbers = []
    # Most details name the steps already.
    if end.resumed_at_step is not None and "step" not in (end.detail or ""):
        numbers.append(f"resumed at step {end.resumed_at_step}")
        if end.steps_lost is not None:
            numbers.append(f"{count(end.steps_lost, 'step')} lost")
    if end.downtime_s is not None:
        numbers.append(f"{duration(end.downtime_s)} from requeue to first step")
    detail = f": {end.detail.rstrip('.')}" if end.detail else ""
    figures = f" ({', '.join(numbers)})" if numbers else ""
    return f"{action.action} {'succeeded' if end.ok else 'failed'}{detail}{figures}."
