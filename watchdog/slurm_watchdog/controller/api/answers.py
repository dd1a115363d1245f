"""What people read: the status, incidents with their evidence, diagnoses, nodes, reports."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
from msgspec import structs

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.controller.api import journal_view, node_views
from slurm_watchdog.controller.api.asking import UNKNOWN_CALLER, Asked, Who, checked_nodes
from slurm_watchdog.controller.api.journal_view import RequestRefused
from slurm_watchdog.controller.api.report_view import report_asked
from slurm_watchdog.controller.api.sources import CommandSources
from slurm_watchdog.controller.api.status_view import own_status, status_of
from slurm_watchdog.controller.state.evidence_collection import Collected, diagnosis_of, node_rows
from slurm_watchdog.model import documents
from slurm_watchdog.model.diagnosis_documents import DiagnosisProgress
from slurm_watchdog.model.documents import ControllerState, Pause, SlurmState, Status
from slurm_watchdog.model.incidents import Incident, IncidentState
from slurm_watchdog.model.lost_time import Report
from slurm_watchdog.model.node_documents import NodeHistory, NodeTable
from slurm_watchdog.model.silence import Silence

SHOWN_LEFT_OUT: Final = 20
MAX_REPORTS: Final = 4
"""Reports that are made or wait: one at a time, in a thread of their own."""


class Api:
    """What the handlers answer from: each is a function of it and of what is asked, to a document."""

    def __init__(self, controller: CommandSources):
        self.controller = controller
        self.who = Who(controller.config, lambda: controller.state.people)
        self.report_thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self.reports = 0

    def paused(self) -> Pause | None:
        found = self.controller.journal.paused()
        return None if found is None else Pause(reason=found[0], by=found[1], at=found[2])

    def silences(self, asked: Asked) -> tuple[Silence, ...]:
        """Those that hold; reasons, which are words of users, are for operators."""
        whole, held = self.who.is_operator(asked), self.controller.silences.listed()
        return tuple(structs.replace(each, owner=None, reason=each.reason if whole else "") for each in held)

    def overall(self, asked: Asked) -> Status:
        """The status as far as everybody who may open the page may see it."""
        c, only = self.controller, self.who.only(asked)
        resolved = sum(each.state is IncidentState.RESOLVED for each in c.journal.incidents(owner=only))
        known = (c.judge.view, c.judge.limits_s, c.judge.incidents, resolved)
        slurm = SlurmState(age_s=c.judge.view.slurm_age_s)
        if only is not None:
            found = own_status(*known, c.health(), only, self.done)
        else:
            found = status_of(*known, self.who.sees(asked), c.health(), c.silences.words_of, self.done)
            found = structs.replace(found, silences=self.silences(asked))
        return structs.replace(found, mode=c.config.mode, paused=self.paused(), slurm=slurm)

    def done(self, incident: Incident) -> str:
        """What is done about an open incident."""
        journal = self.controller.journal
        return journal_view.done(incident, journal.decisions(incident.id), journal.actions(incident.id))

    def find(self, asked: Asked) -> Incident:
        """The incident with the id in the path, or the only one whose id begins so, of those that may be shown. Raises
        RequestRefused."""
        c = self.controller
        return journal_view.find(c.journal, asked.named["id"], c.judge.incidents, self.who.only(asked))


def status(api: Api, asked: Asked) -> Status:
    """What is watched, and whether all is well."""
    c, now = api.controller, clock.monotonic()
    controller = ControllerState(
        version=__version__,
        started_at=c.started_at,
        last_tick_age_s=None if c.last_tick is None else now - c.last_tick,
        warming_up=now - c.warm_up_began < c.config.controller.warm_up,
        journal_error=c.journal_error,
    )
    found = structs.replace(api.overall(asked), controller=controller)
    if api.who.only(asked) is not None:
        return found
    is_operator = api.who.is_operator(asked)
    return structs.replace(
        found,
        slurm=SlurmState(age_s=found.slurm.age_s, error=c.slurm_error, notes=tuple(c.slurm_notes())),
        left_out=tuple(c.left_out(now)[:SHOWN_LEFT_OUT]),
        waiting=c.actions.stuck(),
        deliveries=tuple(  # what a receiver answered is for operators, for it may repeat a message
            each if is_operator else structs.replace(each, error="") for each in c.notifier.deliveries()
        ),
    )


def incidents(api: Api, asked: Asked) -> list[documents.Incident]:
    """The newest incidents."""
    c, job_id = api.controller, asked.query.get("job")
    return journal_view.listed(c.journal, job_id, api.who.sees(asked), c.judge.incidents, api.who.only(asked))


def explain(api: Api, asked: Asked) -> documents.Explanation:
    """One incident: who, since when, why, what was done."""
    c, incident = api.controller, api.find(asked)
    return journal_view.explained(
        c.journal, incident, c.judge.incidents.get(incident.id) or incident, api.who.sees(asked), c.actions.waiting,
        lambda about, runs: api.who.follows(asked, about, runs, c.state.jobs),
    )  # fmt: skip


def evidence(api: Api, asked: Asked) -> msgspec.Raw:
    """One piece of its evidence, as a node answered it."""
    incident, number = api.find(asked), asked.named["number"]
    if not api.who.sees(asked)(incident):
        raise RequestRefused(403, f"the evidence of incident {incident.id} is for {journal_view.DETAILS_FOR}")
    if not number.isascii() or not number.isdecimal() or len(number) > 18:
        raise RequestRefused(400, f"{number[:40]!r} is not a number of a piece of evidence")
    document = api.controller.journal.evidence.document(incident.id, int(number))
    if document is None:
        raise RequestRefused(404, f"incident {incident.id} has no piece of evidence {number}; it may be too old")
    if not api.who.is_operator(asked):
        document = without_kernel_lines(document)
    return msgspec.Raw(encoded(json.loads(document)) if b"\\ud" in document else document)


def encoded(document: object) -> bytes:
    """The JSON of an answer; half a character, which JSON in UTF-8 cannot have, is a question mark in it."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(document), ensure_ascii=False).encode("utf-8", "replace")


def without_kernel_lines(document: bytes) -> bytes:
    """What a node answered, for a job's owner: its kernel's log names other people's programs, too
    (kernel.dmesg_restrict)."""
    if b'"kernel_lines"' not in document:
        return document
    found = json.loads(document)
    if isinstance(found, dict):
        found.pop("kernel_lines", None)
    return encoded(found)


def diagnosis(api: Api, asked: Asked) -> DiagnosisProgress:
    """How far a diagnosis is, and what came of it."""
    found = api.controller.collector.known(asked.named["id"])
    if found is None:
        raise RequestRefused(404, "that diagnosis is not known any more: start it again")
    api.who.require_sight(asked, found.job)
    return progress_of(found)


def progress_of(found: Collected) -> DiagnosisProgress:
    """How far a collection is, with its diagnosis once it is over."""
    over = found.finished.is_set()
    return DiagnosisProgress(
        id=found.id,
        job_id=found.job.job_id,
        state="done" if over else "collecting",
        age_s=clock.monotonic() - found.began if found.took_s is None else found.took_s,
        nodes=node_rows(found),
        diagnosis=diagnosis_of(found) if over and found.diagnosis is not None else None,
    )


def nodes(api: Api, asked: Asked) -> NodeTable:
    """Nodes by suspicion."""
    return node_views.node_table(api.controller.ledger.suspicions(), sees=api.who.is_operator(asked))


def node(api: Api, asked: Asked) -> NodeHistory:
    """One node with what happened to it."""
    (name,) = checked_nodes((asked.named["node"],))
    events = api.controller.ledger.history(name)
    if not events and name not in api.controller.state.node_addresses:
        raise RequestRefused(404, f"Slurm knows no node {name}, and nothing is remembered of one")
    return node_views.node_history(name, events, clock.wall(), asked.person, api.who.operators)


async def report(api: Api, asked: Asked) -> Report:
    """Where the jobs' time went: of all jobs for operators, of their own jobs for others."""
    uid = None if api.who.is_operator(asked) else asked.person.uid
    if uid is None and not api.who.is_operator(asked):
        raise RequestRefused(403, UNKNOWN_CALLER)
    if api.reports >= MAX_REPORTS:
        raise RequestRefused(429, "other reports are being made: ask again in a moment")
    api.reports += 1
    url = api.controller.journal.url
    work = asyncio.get_running_loop().run_in_executor(api.report_thread, report_asked, url, asked.query, uid)
    work.add_done_callback(lambda _: setattr(api, "reports", api.reports - 1))  # also where nobody waits any more
    return await work
