"""`slurm-watchdog story`: one job from its first run to now, on one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from slurm_watchdog.cli.find_controller import Asked, asks_controller, own_place
from slurm_watchdog.cli.options import job_argument
from slurm_watchdog.cli.terminal import as_text, show
from slurm_watchdog.model.documents import Explanation, Incident
from slurm_watchdog.model.lost_time import Report
from slurm_watchdog.model.run_record import RunRecord
from slurm_watchdog.model.slurm_states import ALIVE

MAX_INCIDENTS: Final = 50
"""The newest; `incidents` lists all."""
MAX_FACTS: Final = 2
"""Of an incident, in its line of evidence; `explain` has all."""
SAME_S: Final = 120.0
"""A run of accounting that began so near to one of the controller's is the same."""


@click.command()
@job_argument
@click.option("--accounting/--no-accounting", default=True, help="Ask sacct, too: for runs from before the controller.")
@asks_controller(or_journal=True)
def story(
    asked: Asked,
    job_id: str,
    accounting: bool,
) -> None:
    """One job from its first run to now: its runs, what went wrong, what was done, and the hours that it cost.

    Also of a job that ended long ago: the controller keeps its runs for 400 days, and Slurm's accounting has those
    from before the controller, where the site keeps one.

    \b
    Examples:
      slurm-watchdog story 4711
      slurm-watchdog story 4711_3 --no-accounting
    """
    client = asked.client()
    found = client.get(Report, "/v1/report", job=job_id, **{"from": 0})
    incidents = client.get(list[Incident], "/v1/incidents", job=job_id)[:MAX_INCIDENTS]
    explained = [client.get(Explanation, "/v1/incidents/{}", each.id) for each in incidents]
    recorded, why_not = _recorded(job_id) if accounting and not is_of_run(client.path) else ([], "")
    before, ends = paired(found.runs, recorded)
    known = [{"run": place} | msgspec.to_builtins(each) for place, each in sorted(ends.items())]
    told = {"runs": msgspec.to_builtins(before), "known_runs": known, "problem": why_not}
    rows = [(each, each) for each in before] + [(run, ends.get(at, run)) for at, run in enumerate(found.runs)]
    rows.sort(key=lambda row: row[0].began_at)
    happened = [(each, evidence_words(each)) for each in explained]
    happened.sort(key=lambda each: each[0].incident.opened_at or 0.0)
    values: dict[str, Any] = {"job_id": job_id, "job": found.jobs[0] if found.jobs else None, "why_not": why_not}
    values |= {"rows": [run_row(*row) for row in rows], "incidents": happened}
    whole = {"report": found, "incidents": explained, "accounting": told}
    asked.answer(whole, lambda: show("story", **values))


def is_of_run(path: str) -> bool:
    """Whether a `run` of this user's is asked, by its socket or its journal: it is no job of accounting's."""
    from slurm_watchdog.standalone.own_runs import read_runs

    directory = str(Path(path).absolute().parent)
    return any(each.command == "run" and each.directory == directory for each in read_runs(own_place()))


def _recorded(job_id: str) -> tuple[list[RunRecord], str]:
    """The runs that accounting has, and why it is of no use."""
    import asyncio

    from slurm_watchdog.slurm.accounting import NoAccounting, read_accounting
    from slurm_watchdog.slurm.commands import Commands

    try:
        return asyncio.run(read_accounting(Commands("", os.environ), job_id)), ""
    except NoAccounting as error:
        return [], str(error)


def paired(known: Sequence[RunRecord], recorded: Sequence[RunRecord]) -> tuple[list[RunRecord], dict[int, RunRecord]]:
    """The runs that only accounting has; and accounting's record of those that the controller knows, by their place in
    `known`: the nearest beginnings first, for a job that is requeued at once begins twice within SAME_S."""
    near = sorted(
        (distance_s, place, number)
        for place, run in enumerate(known)
        for number, record in enumerate(recorded)
        if (distance_s := abs(run.began_at - record.began_at)) <= SAME_S
    )
    number_of: dict[int, int] = {}
    for _, place, number in near:
        if place not in number_of and number not in number_of.values():
            number_of[place] = number
    alone = [record for number, record in enumerate(recorded) if number not in number_of.values()]
    return alone, {place: recorded[number] for place, number in number_of.items()}


def run_row(run: RunRecord, record: RunRecord) -> tuple[RunRecord, RunRecord, str, list[str]]:
    """The run, the record with its end, its state at the end, and what accounting has of that. The end in `record`,
    accounting's, counts where it has one: the controller may not have seen it."""
    last = run if record.ended_at is None else record
    of_job, of_steps = _exit_words(last.exit_code), _exit_words(last.steps_exit_code)
    words = (
        of_job,
        f"of a step: {of_steps}" if of_steps and of_steps != of_job else "",
        f"node {last.failed_node} failed" if last.failed_node else "",
        f"had waited: {last.waited_for}" if last.waited_for else "",
    )
    state = "restarted" if last.ended_at is not None and last.state in ALIVE else last.state
    return run, last, state, [each for each in words if each]


def _exit_words(exit_code: str) -> str:
    """`exit code 1` or `signal 9`; empty where it is 0 or not known."""
    code, _, signal = exit_code.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return f"exit code {code}" if code not in ("", "0") else ""


def evidence_words(found: Explanation) -> str:
    """On what the incident rests, in a sentence: the newest diagnosis that says more than its summary, else its
    facts."""
    summary = found.incident.summary
    diagnoses = [each for each in found.evidence if each.kind == "diagnosis" and isinstance(each.document, dict)]
    for each in sorted(diagnoses, key=lambda each: -each.at):
        text = each.document.get("summary")
        if isinstance(text, str) and text and text.rstrip(".") != summary.rstrip("."):
            return text
    facts = [each for each in map(as_text, found.incident.evidence) if each.rstrip(".") != summary.rstrip(".")]
    more = f"; and {len(facts) - MAX_FACTS} more" if len(facts) > MAX_FACTS else ""
    return "; ".join(facts[:MAX_FACTS]) + more
