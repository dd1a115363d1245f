"""`slurm-watchdog story`: one job from its first run to now, on one page."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from slurm_watchdog.analysis.report_sentences import to_be_noticed
from slurm_watchdog.cli.client import Client
from slurm_watchdog.cli.diagnosis_text import heading
from slurm_watchdog.cli.find_controller import choose_or_journal
from slurm_watchdog.cli.incidents import as_text
from slurm_watchdog.cli.options import job_argument, journal_option, operator_options, print_json, reported_errors
from slurm_watchdog.cli.terminal import count, duration, moment, sentence, table
from slurm_watchdog.model.documents import ActionRun, Explanation
from slurm_watchdog.model.lost_time import Report
from slurm_watchdog.model.run_record import RunRecord
from slurm_watchdog.model.slurm_states import ALIVE

MAX_INCIDENTS: Final = 50
"""The newest; `incidents` lists all."""
MAX_FACTS: Final = 2
"""Of an incident, in its line of evidence; `explain` has all."""
SAME_S: Final = 120.0
"""A run of accounting that began so near to one of the controller's is the same."""


@click.command(short_help="One job from its first run to now: runs, incidents, actions, lost hours.")
@job_argument
@click.option("--accounting/--no-accounting", default=True, help="Ask sacct, too: for runs from before the controller.")
@journal_option
@operator_options
def story(
    job_id: str,
    accounting: bool,
    journal: str | None,
    socket_path: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """One job from its first run to now: its runs, what went wrong, what was done, and the hours that it cost.

    Also of a job that ended long ago: the controller keeps its runs for 400 days, and Slurm's accounting has those
    from before the controller, where the site keeps one.

    \b
    Examples:
      slurm-watchdog story 4711
      slurm-watchdog story 4711_3 --no-accounting
    """
    with reported_errors(as_json):
        client = choose_or_journal(socket_path, config_file, journal)
        found, document = client.report({"job": job_id, "from": "0"})
        explained = _explained(client, job_id)
        recorded, why_not = _recorded(job_id) if accounting and not is_of_run(client.path) else ([], "")
        before, ends = paired(found.runs, recorded)
        if as_json:
            print_json(_as_json(document, explained, before, ends, why_not))
        else:
            _print(job_id, found, [each for each, _ in explained], before, ends, why_not)


def _explained(client: Client, job_id: str) -> list[tuple[Explanation, Any]]:
    incidents, _ = client.incidents(job_id)
    return [client.incident(each.id) for each in incidents[:MAX_INCIDENTS]]


def is_of_run(path: str) -> bool:
    """Whether a `run` of this user's is asked, by its socket or its journal: it is no job of accounting's."""
    from slurm_watchdog.cli.find_controller import own_place
    from slurm_watchdog.standalone.own_runs import read_runs

    directory = str(Path(path).absolute().parent)
    return any(each.command == "run" and each.directory == directory for each in read_runs(own_place()))


def _recorded(job_id: str) -> tuple[list[RunRecord], str]:
    """The runs that accounting has, and why it is of no use."""
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


def _as_json(
    document: Any,
    explained: Iterable[tuple[Any, Any]],
    before: Sequence[RunRecord],
    ends: Mapping[int, RunRecord],
    why_not: str,
) -> Any:
    names = (
        "began_at", "ended_at", "state", "nodes", "exit_code", "steps_exit_code", "waited_for", "failed_node",
    )  # fmt: skip
    plain = [{name: getattr(each, name) for name in names} for each in before]
    known = [{"run": place} | {name: getattr(each, name) for name in names} for place, each in sorted(ends.items())]
    return {
        "report": document,
        "incidents": [each for _, each in explained],
        "accounting": {"runs": plain, "known_runs": known, "problem": why_not},
    }


def _print(
    job_id: str,
    found: Report,
    explained: Sequence[Explanation],
    before: Sequence[RunRecord],
    ends: Mapping[int, RunRecord],
    why_not: str,
) -> None:
    if not found.runs and not before:
        sentence(f"No run of job {job_id} is known{f': {why_not}' if why_not else ' to the controller or to sacct'}.")
        return
    rows: list[tuple[RunRecord, RunRecord | None]] = [(each, each) for each in before]
    rows += [(run, ends.get(place)) for place, run in enumerate(found.runs)]
    rows.sort(key=lambda row: row[0].began_at)
    sentence(_head(job_id, found, len(rows), len(explained)))
    heading("Runs")
    table(("BEGAN", "FOR", "END", "NODES", "STEPS", "STEP TIME"), [_run_row(*each) for each in rows])
    events = sorted((event for each in explained for event in _events(each)), key=lambda event: event[0])
    if events:
        heading("What happened")
        table(("TIME", "WHAT", "INCIDENT"), [(moment(at), what, name) for at, what, name in events], wraps=1)
    for job in found.jobs:
        heading("Node-hours")
        table(("LOST TO", "NODE-HOURS"), [(cause, f"{hours:,.1f}") for cause, hours in job.lost_h])
        if waited := to_be_noticed(job.to_be_noticed_h):
            sentence(waited)
        if job.queued_h >= 0.1:
            sentence(f"Between its runs it waited {duration(job.queued_h * 3600)} in the queue.")
    if why_not:
        sentence(f"Runs from before the controller are not known: {why_not}")


def _head(job_id: str, found: Report, runs: int, incidents: int) -> str:
    job = found.jobs[0] if found.jobs else None
    of = f" ({job.name}, {job.user})" if job is not None else ""
    share = (
        "" if job is None or job.share is None else f", {job.share:.1%} of its measured time in steps that were kept"
    )
    hours = "" if job is None else f", {job.allocated_h:,.1f} node-hours"
    return f"Job {job_id}{of}: {count(runs, 'run')}, {count(incidents, 'incident')}{hours}{share}."


def _run_row(run: RunRecord, record: RunRecord | None) -> tuple[str, ...]:
    """`record`: accounting's, whose end counts: the controller may not have seen it."""
    last = run if record is None or record.ended_at is None else record
    took = "-" if last.ended_at is None else duration(last.ended_at - run.began_at)
    steps = (
        "-" if run.last_step is None else f"{run.first_step if run.first_step is not None else '?'} to {run.last_step}"
    )
    step_s = "-" if run.step_s is None else duration(run.step_s)
    end = "restarted" if last.ended_at is not None and last.state in ALIVE else last.state or "-"
    if isinstance(last, RunRecord):
        end += end_words(last)
    return moment(run.began_at), took, end, str(run.nodes), steps, step_s


def end_words(record: RunRecord) -> str:
    """What accounting says of an end: ` (exit code 1; of a step: signal 9; node n7 failed)`."""
    of_job, of_steps = _exit_words(record.exit_code), _exit_words(record.steps_exit_code)
    said = [
        of_job,
        f"of a step: {of_steps}" if of_steps and of_steps != of_job else "",
        f"node {record.failed_node} failed" if record.failed_node else "",
        f"had waited: {record.waited_for}" if record.waited_for else "",
    ]
    words = "; ".join(each for each in said if each)
    return f" ({words})" if words else ""


def _exit_words(exit_code: str) -> str:
    """`exit code 1` or `signal 9`; empty where it is 0 or not known."""
    code, _, signal = exit_code.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return f"exit code {code}" if code not in ("", "0") else ""


def _events(found: Explanation) -> Iterable[tuple[float, str, str]]:
    incident = found.incident
    if incident.opened_at is not None:
        yield incident.opened_at, incident.summary, incident.id
        if evidence := _evidence_words(found):
            yield incident.opened_at, f"evidence: {evidence}", incident.id
    for action in found.actions:
        if action.end is not None:
            yield action.end.ended_at, f"{action.action}: {action.end.detail or action.end.outcome}", incident.id
        elif action.verdict == "allowed":
            at = max((each.intent_at for each in action.operations), default=None)
            yield at or incident.fired_at or incident.opened_at or 0.0, _under_way(action), incident.id


def _evidence_words(found: Explanation) -> str:
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


def _under_way(action: ActionRun) -> str:
    """An action that has not ended: what it does now, or waits for."""
    now = action.operations[-1] if action.operations else None
    doing = "" if now is None else f", {now.operation}{'' if now.outcome is None else f' ({now.outcome})'}"
    waits = "" if action.waiting is None else f", waits: {action.waiting.what}"
    return f"{action.action}: under way{doing}{waits}"
