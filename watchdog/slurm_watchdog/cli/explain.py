"""`slurm-watchdog explain`: one incident from the first sign to the last operation."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.cli.bundle import Fetch, check_name, write_bundle
from slurm_watchdog.cli.diagnosis_text import heading, print_diagnosis
from slurm_watchdog.cli.find_controller import choose_or_journal
from slurm_watchdog.cli.incidents import STYLES, as_text, culprit_text, hints_of
from slurm_watchdog.cli.options import (
    Refusal,
    journal_option,
    operator_options,
    print_json,
    reported_errors,
)
from slurm_watchdog.cli.terminal import clean_lines, count, duration, moment, sentence, table
from slurm_watchdog.model.diagnosis_documents import Diagnosis
from slurm_watchdog.model.documents import ActionRun, Evidence, Explanation, Incident

LINES_OF_EVIDENCE: Final = 40
"""Lines shown of one piece of evidence; `--json` has all of it."""


@click.command(short_help="One incident: who, since when, why, what was done.")
@click.argument("incident_id", metavar="INCIDENT")
@click.option(
    "--bundle",
    "bundle_file",
    metavar="F.tar.zst",
    type=click.Path(dir_okay=False),
    help="Write everything that is kept of it into one file (.tar.zst or .tar.gz).",
)
@journal_option
@operator_options
def explain(
    incident_id: str,
    bundle_file: str | None,
    journal: str | None,
    socket_path: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """One incident: who is named, the timeline, the evidence, every decision with its reason, every operation.

    A bundle holds the stacks of every rank as text, the state of each in the kernel, sockets, the ends of
    logs and of the kernel's log; what looks like a secret is masked.

    \b
    Examples:
      slurm-watchdog incidents            lists the ids
      slurm-watchdog explain 7f3a         the first characters of an id are enough
      slurm-watchdog explain 7f3a --bundle incident.tar.zst
    """
    if not incident_id.strip():
        raise Refusal(["The incident's id is empty."], "List the ids with: slurm-watchdog incidents")
    with reported_errors(as_json):
        client = choose_or_journal(socket_path, config_file, journal, incident_id)
        if bundle_file is not None:
            check_name(bundle_file)
        found, document = client.incident(incident_id)

        def fetch(piece: Any) -> Any:
            return client.piece(document, piece)

        if bundle_file is not None:
            files = write_bundle(bundle_file, document, fetch)
            if as_json:
                print_json({"incident": found.incident.id, "bundle": bundle_file, "files": files})
            else:
                sentence(f"{bundle_file}: incident {found.incident.id} in {count(files, 'file')}.")
            return
        if as_json:
            _fetch_all(document, fetch)
            document["hints"] = [hint.as_json() for hint in hints_of(found.incident)]
    if as_json:
        print_json(document)
    else:
        print_explanation(found, clock.wall())


def _fetch_all(document: Any, fetch: Fetch) -> None:
    """Replaces evidence that came by number only by its document: programs get one document."""
    for piece in document["evidence"]:
        if piece.get("document") is None and piece.get("number") is not None:
            piece["document"] = fetch(piece)


def print_explanation(found: Explanation, now: float) -> None:
    """The whole incident, for people; `now` in seconds since the epoch."""
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
        kind = incident.inhibited_by.removeprefix("suspicion:")
        held = f"It is held back for a moment: {kind} is suspected, and would explain it."
        explained = f"Incident {kind} explains it and is reported in its place: nothing is done about this one."
        sentence(explained if kind == incident.inhibited_by else held)
    if incident.resolution:
        sentence(f"Resolved: {incident.resolution}")
    if incident.details_for:
        sentence(f"Log lines, frames, paths and variables are for {incident.details_for}.")
    heading("Who")
    if incident.culprits:
        table(
            ("WHO", "WHERE", "WHY"),
            [(culprit_text(c), c.path or c.mount or "-", c.reason or "-") for c in incident.culprits],
        )
    else:
        sentence("No rank, node or device is identified as the cause.")
    if found.timeline:
        heading("Timeline")
        # The incident's sentence is printed above.
        table(
            ("TIME", "WHAT"),
            [(moment(each.at), each.text.removesuffix(f": {incident.summary}")) for each in found.timeline],
        )
    facts = [text for fact in incident.evidence if (text := as_text(fact)).rstrip(".") != incident.summary.rstrip(".")]
    if facts:
        heading("Facts")
    for text in facts:
        sentence(f"- {text}")
    _print_hints(incident)
    large = [each for each in found.evidence if each.document is None]
    for each in found.evidence:
        if each.document is not None:
            _print_evidence(each)
    if large:
        heading("Documents")
        sentence(
            f"{count(len(large), 'document')} of nodes and jobs (stacks, sockets, last lines){_when(large)}: "
            f"slurm-watchdog explain {incident.id} --bundle F.tar.zst"
        )
    heading("Decisions")
    for decision in incident.decisions:
        what = "no action" if decision.action == "none" else f"{decision.action} {decision.verdict}"
        sentence(f"- {what} by {decision.by}: {decision.reason}")
    if not incident.decisions:
        sentence("None yet.")
    for action in found.actions:
        _print_action(action)


def _print_hints(incident: Incident) -> None:
    """Prints what such an incident usually is and what to try, marked as advice."""
    hints = hints_of(incident)
    if hints:
        heading("Usually (advice, not what was found)")
    for hint in hints:
        see = f" See: {hint.documented}." if hint.documented else ""
        sentence(f"- {hint.usually} Try: {hint.try_next}{see}")


def _when(pieces: list[Evidence]) -> str:
    """The first and the last of them, seen from the incident; older controllers do not say it."""
    first, last = pieces[0].taken, pieces[-1].taken
    if first and last and first != last:
        return f", the first {first}, the last {last}"
    return f", {first or last}" if first or last else ""


def _print_evidence(each: Evidence) -> None:
    heading(f"Evidence: {each.kind}, {moment(each.at)}{f', {each.taken}' if each.taken else ''}")
    if each.kind == "diagnosis":
        try:
            print_diagnosis(msgspec.convert(each.document, Diagnosis))
        except msgspec.ValidationError as error:
            sentence(f"It is not what this release expects: {error}")
        return
    lines = clean_lines(as_text(each.document))
    if not isinstance(each.document, str) and len(lines) > LINES_OF_EVIDENCE:
        sentence(f"  {len(lines)} lines of JSON (processes, stacks, log lines): slurm-watchdog explain --json has them")
        return
    for line in lines[:LINES_OF_EVIDENCE]:
        sentence(f"  {line}")
    if len(lines) > LINES_OF_EVIDENCE:
        sentence(f"  … {len(lines) - LINES_OF_EVIDENCE} more lines: slurm-watchdog explain --json has them")


def _print_action(each: ActionRun) -> None:
    heading(f"Action: {each.action}, {each.verdict} by {each.by}: {each.reason}")
    if each.ladder:
        sentence(f"Ladder: {', '.join(each.ladder)} (rule: {each.rule or 'what is shipped'})")
    table(
        ("TIME", "OPERATION", "ATTEMPT", "OUTCOME", "DETAIL"),
        [
            (
                moment(operation.intent_at),
                operation.operation,
                str(operation.attempt),
                operation.outcome or "in progress",
                operation.detail or "",
            )
            for operation in each.operations
        ],
    )
    if each.end is not None:
        sentence(describe_end(each), ENDS[each.end.outcome][1])
    elif each.verdict == "allowed":
        waiting = f", and waits: {each.waiting.what}" if each.waiting is not None else ""
        sentence(f"It is under way{waiting}.")


ENDS = {
    "ok": ("succeeded", "green"),
    "needless": ("was not needed", "yellow"),
    "failed": ("failed", "bold red"),
}
"""Words and style for the end of an action, by its outcome."""


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
        numbers.append(f"{duration(end.downtime_s)} to its first new step")
    detail = f": {end.detail.rstrip('.')}" if end.detail else ""
    figures = f" ({', '.join(numbers)})" if numbers else ""
    return f"{action.action} {ENDS[end.outcome][0]}{detail}{figures}."
