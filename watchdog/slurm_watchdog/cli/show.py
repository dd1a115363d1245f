"""`slurm-watchdog show`: one incident, job or node on one screen; `--all` has the rest."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.text import plural, to_show
from slurm_watchdog.cli.client import Client, find, own_place, told
from slurm_watchdog.cli.options import ASKS, JOB_ID, JOURNAL, NODE_SET, Answer, Asked, ClientError, Refusal, command
from slurm_watchdog.cli.terminal import drawn_columns, print_lines, render
from slurm_watchdog.model.documents import Diagnosis, Evidence, Explanation, Incident
from slurm_watchdog.model.node_events import NodeHistory
from slurm_watchdog.model.run_record import Report, RunRecord
from slurm_watchdog.report.story import done_words, evidence_words, facts_of, hints_of, paired, run_row, todo_words
from slurm_watchdog.report.words import as_text
from slurm_watchdog.slurm.accounting import NoAccounting, read_accounting
from slurm_watchdog.slurm.commands import Commands

SCREEN_LINES = 20  # What is printed without `--all`: it fits a terminal of 24 lines with the prompt.
CELL_LINES = 3  # Of one sentence on that screen.
NEWEST = {"rows": 3, "incidents": 4, "history": 16}  # Runs, incidents of a job and events of a node on that screen.
LINES_OF_EVIDENCE = 40  # Lines shown of one piece of evidence; `--json` has all of it.
MAX_INCIDENTS = 50  # Of a job, the newest; `incidents` lists all.


@command(
    """
    what INCIDENT|JOB|NODE
    --all  Everything that is kept, not one screen.
    --bundle F.tar.zst  Write all that is kept of an incident into one file (.tar.zst or .tar.gz).
    --accounting/--no-accounting  Of a job, ask sacct for runs from before, too.
    """,
    ASKS,
    JOURNAL,
)
def show(asked: Asked, what: str, bundle: str | None, accounting: bool, **given: bool) -> Answer:
    """One incident, job or node on one screen; --all has the rest.

    \b
    INCIDENT  who is named, since when, why, what was done, what to do; with --all the timeline, the evidence, every
              decision with its reason, every operation. The first characters of its id are enough.
    JOB       its runs, what went wrong, what was done, the node-hours that it cost; also of a job that ended long ago.
    NODE      what happened to it, and whether it is suspect. Exit code 1 if it is.

    A bundle holds the stacks of every rank as text, the state of each in the kernel, sockets, the ends of
    logs and of the kernel's log; what looks like a secret is masked.

    \b
    Examples:
      slurm-watchdog show 7f3a            an incident; `slurm-watchdog incidents` lists the ids
      slurm-watchdog show 7f3a --bundle incident.tar.zst
    """
    if not what.strip():
        raise Refusal(["The incident's id is empty."], "List the ids with: slurm-watchdog incidents")
    everything, is_job = given["all"], bundle is None and JOB_ID.fullmatch(what) is not None
    client = find(asked, None if is_job else what)
    if bundle is not None:
        from slurm_watchdog.report.bundle import check_name

        with told():
            check_name(bundle)
    job, is_known = _job(client, what, everything, accounting) if is_job else (None, False)
    if job is not None and (is_known or "_" in what):
        return job
    client = find(asked, what) if is_job else client  # the journal that has it may be another one
    try:
        found = client.get(Explanation, "/v1/incidents/{}", what)
    except ClientError as error:
        if error.http_status != 404 or bundle is not None or not NODE_SET.fullmatch(what):
            raise
        if job is not None:
            return job
        try:
            return of_node(client.get(NodeHistory, "/v1/nodes/{}", what), everything)
        except ClientError as other:  # where no node of this name is known either: no incident is
            raise (error if other.http_status in (400, 404, 409, None) else other) from other
    return _incident(client, found, everything, bundle, asked.json)


def _print(everything: bool, what: str, template: str, **values: Any) -> None:
    """A template, cut to one screen unless `everything` is asked for."""
    lines = render(template, drawn_columns(), 999 if everything else CELL_LINES, everything=everything, **values)
    if not everything and len(lines) > SCREEN_LINES:
        left = len(lines) - SCREEN_LINES + 1
        lines[SCREEN_LINES - 1 :] = [f"… and {plural(left, 'more line')}: {to_show(what)} --all"]
    print_lines(lines)


def _incident(client: Client, found: Explanation, everything: bool, bundle: str | None, as_json: bool) -> Answer:
    document = msgspec.to_builtins(found)

    def fetch(piece: Any) -> Any:
        stored_with = piece["incident"] or found.incident.id
        return client.get(dict, "/v1/incidents/{}/evidence/{}", stored_with, piece["number"])

    if bundle is not None:
        from slurm_watchdog.report.bundle import write_bundle

        with told():
            files = write_bundle(bundle, document, fetch)
        written = {"incident": found.incident.id, "bundle": bundle, "files": files}
        return Answer(written, [f"{bundle}: incident {found.incident.id} in {plural(files, 'file')}."])
    for piece in document["evidence"] if as_json else ():  # what came by its number alone: programs get one document
        if piece.get("document") is None and piece.get("number") is not None:
            piece["document"] = fetch(piece)
    document["hints"] = [hint.as_json() for hint in hints_of(found.incident)]
    return Answer(document, lambda: print_incident(found, clock.wall(), everything))


def print_incident(found: Explanation, now: float, everything: bool = True) -> None:
    """One incident, for people; `now` in seconds since the epoch."""
    incident = found.incident
    evidence = [(each, *_shown(each)) for each in found.evidence if each.document is not None]
    values: dict[str, Any] = {"found": found, "now": now, "facts": facts_of(incident), "evidence": evidence}
    values |= {"hints": hints_of(incident), "why": evidence_words(found)}
    _print(everything, incident.id, "explain", done=done_words(found), todo=todo_words(found), **values)


def _shown(each: Evidence) -> tuple[Diagnosis | None, list[str]]:
    """A piece of evidence as a diagnosis, or as lines."""
    if each.kind == "diagnosis":
        try:
            return msgspec.convert(each.document, Diagnosis), []
        except msgspec.ValidationError as error:
            return None, [f"It is not what this release expects: {error}"]
    lines = as_text(each.document).splitlines()
    if not isinstance(each.document, str) and len(lines) > LINES_OF_EVIDENCE:
        return None, [f"{len(lines)} lines of JSON (processes, stacks, log lines): --json has them"]
    return None, lines


def _job(client: Client, job_id: str, everything: bool, accounting: bool) -> tuple[Answer, bool]:
    """A job, and whether one of this id is known."""
    from slurm_watchdog.standalone.own_runs import read_runs

    found = client.get(Report, "/v1/report", job=job_id, **{"from": 0})
    incidents = client.get(list[Incident], "/v1/incidents", job=job_id)[:MAX_INCIDENTS]
    explained = [client.get(Explanation, "/v1/incidents/{}", each.id) for each in incidents]
    recorded, why_not = list[RunRecord](), ""
    directory = str(Path(client.path).absolute().parent)  # of a `run`, which is no job of accounting's
    if accounting and not any(each.command == "run" and each.directory == directory for each in read_runs(own_place())):
        try:
            recorded = asyncio.run(read_accounting(Commands("", os.environ), job_id))
        except NoAccounting as error:
            why_not = str(error)
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
    print_all = partial(_print, everything, job_id, "story", newest=NEWEST, **values)
    return Answer(whole, print_all), bool(found.runs or incidents or recorded)


def of_node(found: NodeHistory, everything: bool = True) -> Answer:
    """What happened to a node, the newest first; code 1 while it is suspect."""
    shown = found.history[: None if everything else NEWEST["history"]]
    return Answer(found, partial(_print, everything, found.node, "node", found=found, history=shown), found.suspect)
