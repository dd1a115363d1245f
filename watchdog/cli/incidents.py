"""`slurm-watchdog incidents`: what happened, one line each."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from watchdog.cli import complete
from watchdog.cli.answers import Culprit, Incident
from watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    failures_told,
    journal_option,
    operator_options,
    print_json,
)
from watchdog.cli.sources import choose_or_journal
from watchdog.cli.text import count, duration, moment, sentence, table

if TYPE_CHECKING:
    from watchdog.knowledge.hints import Hint

STYLES = {"firing": "bold red", "pending": "yellow", "resolved": "dim", "explained": "dim"}
HEADINGS = ("ID", "STATE", "KIND", "JOB", "OPENED", "FOUND AFTER", "WHO", "DECISION", "SUMMARY")
WANTED = [
    HEADINGS.index(name)
    for name in ("ID", "SUMMARY", "STATE", "JOB", "OPENED", "KIND", "WHO", "DECISION", "FOUND AFTER")
]
"""The order in which a narrow terminal leaves room for them."""


@click.command()
@click.option(
    "--job", "job_id", metavar="J", shell_complete=complete.jobs, help="Only incidents of this job."
)
@journal_option
@operator_options
def incidents(
    job_id: str | None, journal: str | None, socket_path: str | None, config_file: str | None, as_json: bool
) -> None:
    """What happened: pending, firing and resolved incidents. Exit code 1 while one of those listed is firing.

    \b
    Examples:
      slurm-watchdog incidents
      slurm-watchdog incidents --job 4711 --json
      slurm-watchdog incidents --journal ~/.slurm-watchdog/4711   of an `attach` that has ended
    """
    with failures_told(as_json):
        client = choose_or_journal(socket_path, config_file, journal)
        found, document = client.incidents(job_id)
    firing = [each for each in found if is_wrong(each)]
    if as_json:
        rows = [
            {**row, "hints": [hint.as_json() for hint in hints_of(each)]}
            for each, row in zip(found, document, strict=True)
        ]
        print_json(rows)
    else:
        _print(found, len(firing), job_id)
    sys.exit(EXIT_FOUND if firing else EXIT_FINE)


def is_wrong(each: Incident) -> bool:
    """Whether it fires, no other incident explains it, and it is no person's own restart: what `status` and the page count."""
    return each.state == "firing" and each.inhibited_by is None and each.kind != "operator_restart"


def _print(found: list[Incident], firing: int, job_id: str | None) -> None:
    of_job = f" of job {job_id}" if job_id else ""
    if not found:
        sentence(f"No incident{of_job} is known.")
        return
    sentence(f"{count(len(found), 'incident')}{of_job}, {firing or 'none'} firing.")
    table(
        HEADINGS,
        [_row(each) for each in found],
        [STYLES.get(shown_state(each), "") for each in found],
        wanted=WANTED,
        wraps=HEADINGS.index("SUMMARY"),
    )
    sentence("More: slurm-watchdog explain ID")


def shown_state(each: Incident) -> str:
    """Its state; `explained` if another incident that is open explains it, so that it is neither announced nor acted on."""
    return "explained" if each.inhibited_by is not None and each.state != "resolved" else each.state


def _row(each: Incident) -> tuple[str, ...]:
    first = who(each.culprits[0]) if each.culprits else "nobody"
    more = f" +{len(each.culprits) - 1}" if len(each.culprits) > 1 else ""
    last = each.decisions[-1] if each.decisions else None
    decided = (
        "alert only" if last and last.action == "none" else f"{last.action} {last.verdict}" if last else "-"
    )
    return (
        each.id,
        shown_state(each),
        each.kind,
        each.job_id or "-",
        moment(each.opened_at) if each.opened_at is not None else "-",
        duration(each.detected_after_s),
        f"{first}{more}",
        decided + (f": {last.outcome}" if last and last.outcome else ""),
        each.summary,
    )


def who(culprit: Culprit) -> str:
    """`rank 2 (pid 4711 on n3)`, or what of it is known."""
    parts = [f"rank {culprit.rank}"] if culprit.rank is not None else []
    if culprit.pid is not None:
        parts.append(f"pid {culprit.pid}")
    if culprit.node:
        parts.append(f"on {culprit.node}")
    if culprit.gpu_uuid:
        parts.append(culprit.gpu_uuid)
    if not parts and culprit.mount:
        parts.append(culprit.mount)
    return " ".join(parts) or "unknown"


def hints_of(incident: Incident) -> tuple[Hint, ...]:
    """What it usually is and what to try: advice, read from its kind and from the lines that it quotes."""
    from watchdog.diagnose.incident_hints import incident_hints

    return incident_hints(incident.kind, incident.summary, [as_text(fact) for fact in incident.evidence])


def as_text(document: object) -> str:
    """A piece of evidence for people: words as they are, anything else as JSON."""
    return document if isinstance(document, str) else json.dumps(document, indent=2, ensure_ascii=False)
