"""`slurm-watchdog explain`: one incident from the first sign to the last operation."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.incidents import hints_of
from slurm_watchdog.cli.options import Refusal
from slurm_watchdog.cli.terminal import as_text, count, sentence, show
from slurm_watchdog.model.diagnosis_documents import Diagnosis
from slurm_watchdog.model.documents import Evidence, Explanation

LINES_OF_EVIDENCE: Final = 40
"""Lines shown of one piece of evidence; `--json` has all of it."""


@click.command()
@click.argument("incident_id", metavar="INCIDENT")
@click.option(
    "--bundle",
    "bundle_file",
    metavar="F.tar.zst",
    type=click.Path(dir_okay=False),
    help="Write everything that is kept of it into one file (.tar.zst or .tar.gz).",
)
@asks_controller(or_journal=True)
def explain(
    asked: Asked,
    incident_id: str,
    bundle_file: str | None,
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
    from slurm_watchdog.cli.bundle import check_name, write_bundle

    client = asked.client(incident_id)
    if bundle_file is not None:
        check_name(bundle_file)
    found = client.get(Explanation, "/v1/incidents/{}", incident_id)
    document = msgspec.to_builtins(found)

    def fetch(piece: Any) -> Any:
        stored_with = piece["incident"] or found.incident.id
        return client.get(dict, "/v1/incidents/{}/evidence/{}", stored_with, piece["number"])

    if bundle_file is not None:
        files = write_bundle(bundle_file, document, fetch)
        written = {"incident": found.incident.id, "bundle": bundle_file, "files": files}
        said = f"{bundle_file}: incident {found.incident.id} in {count(files, 'file')}."
        asked.answer(written, lambda: sentence(said))
        return
    if asked.as_json:
        for piece in document["evidence"]:  # what came by its number alone: programs get one document
            if piece.get("document") is None and piece.get("number") is not None:
                piece["document"] = fetch(piece)
        document["hints"] = [hint.as_json() for hint in hints_of(found.incident)]
    asked.answer(document, lambda: print_explanation(found, clock.wall()))


def print_explanation(found: Explanation, now: float) -> None:
    """The whole incident, for people; `now` in seconds since the epoch."""
    incident = found.incident
    facts = [text for text in map(as_text, incident.evidence) if text.rstrip(".") != incident.summary.rstrip(".")]
    evidence = [(each, *_shown(each)) for each in found.evidence if each.document is not None]
    large = [each for each in found.evidence if each.document is None]
    hints = hints_of(incident)
    show("explain", found=found, now=now, facts=facts, hints=hints, evidence=evidence, large=large)


def _shown(each: Evidence) -> tuple[Diagnosis | None, list[str]]:
    """A piece of evidence as a diagnosis, or as lines."""
    if each.kind == "diagnosis":
        try:
            return msgspec.convert(each.document, Diagnosis), []
        except msgspec.ValidationError as error:
            return None, [f"It is not what this release expects: {error}"]
    lines = as_text(each.document).splitlines()
    if not isinstance(each.document, str) and len(lines) > LINES_OF_EVIDENCE:
        where = "slurm-watchdog explain --json has them"
        return None, [f"{len(lines)} lines of JSON (processes, stacks, log lines): {where}"]
    return None, lines
