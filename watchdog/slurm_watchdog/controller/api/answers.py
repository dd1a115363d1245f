"""What people read: the status, incidents with their evidence, diagnoses, nodes, reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import structs
from msgspec.structs import replace

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.failure import Failure
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import duration
from slurm_watchdog.controller.api.asking import UNKNOWN_CALLER, Asked, RequestRefused, Who, checked_nodes
from slurm_watchdog.controller.evidence.collection import progress_of
from slurm_watchdog.controller.health import views
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.controller.health.lost_time import report_asked
from slurm_watchdog.controller.health.views import Sees
from slurm_watchdog.controller.node_history.suspicion import node_history, node_table
from slurm_watchdog.controller.policy.access import may_see
from slurm_watchdog.journal.evidence import Piece
from slurm_watchdog.model import documents
from slurm_watchdog.model.actions import ActionRun
from slurm_watchdog.model.documents import DiagnosisProgress
from slurm_watchdog.model.headline import response
from slurm_watchdog.model.incidents import Incident, IncidentState, Silence
from slurm_watchdog.model.node_events import NodeHistory, NodeTable
from slurm_watchdog.model.page_documents import History, JobPage, Overview
from slurm_watchdog.model.run_record import Report

if TYPE_CHECKING:
    from slurm_watchdog.base.capped import Shortage
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.controller.actions.decider import Decider
    from slurm_watchdog.controller.actions.manager import Actions
    from slurm_watchdog.controller.actions.silences import Silences
    from slurm_watchdog.controller.evidence.collector import Collector
    from slurm_watchdog.controller.health.cluster import Health
    from slurm_watchdog.controller.incidents.judge import Judge
    from slurm_watchdog.controller.node_history.ledger import NodeLedger
    from slurm_watchdog.controller.state.cluster import ClusterState
    from slurm_watchdog.journal.journal import Journal
    from slurm_watchdog.notify.dispatcher import Notifier
    from slurm_watchdog.slurm.client import SlurmClient

LARGE_KINDS = frozenset({"node", "job"})  # Evidence that is fetched piece by piece.
SHOWN_LEFT_OUT = 20
MAX_REPORTS = 4  # Reports that are made or wait: one at a time, in a thread of their own.
FRESH_S = 2.0
"""All browsers of one person are shown the same overview for so long: the map of 10,000 nodes costs some tens of
milliseconds."""
SHOWN_HISTORY = 50  # Incidents of one job, the newest.
CURVE_POINTS = 120  # Step times of a chart, the newest: a point every few pixels of a phone's width.


class CommandSources(Protocol):
    """What is answered from: see slurm_watchdog.controller.controller."""

    config: Config
    journal: Journal
    judge: Judge
    state: ClusterState
    slurm: SlurmClient
    ledger: NodeLedger
    notifier: Notifier
    collector: Collector
    actions: Actions
    silences: Silences
    decider: Decider
    last_tick: float | None  # When a tick was last completed, monotonic.
    started_at: float
    warm_up_began: float
    slurm_error: str | None

    @property
    def journal_error(self) -> str | None: ...

    def health(self) -> Health: ...

    def left_out(self, now: float) -> tuple[Shortage, ...]: ...

    def slurm_notes(self) -> list[str]: ...


class Api:
    """What the handlers answer from: each is a function of it and of what is asked, to a document."""

    def __init__(self, controller: CommandSources):
        self.controller = controller
        self.who = Who(controller.config, lambda: controller.state.people)
        self.report_thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self.reports = 0
        self.overviews: dict[Hashable, tuple[float, Overview]] = {}  # Who asked -> when it was made, the document.

    def paused(self) -> documents.Pause | None:
        found = self.controller.journal.paused()
        return None if found is None else documents.Pause(reason=found[0], by=found[1], at=found[2])

    def silences(self, asked: Asked) -> tuple[Silence, ...]:
        """Those that hold; reasons, which are words of users, are for operators."""
        whole, held = self.who.is_operator(asked), self.controller.silences.listed()
        return tuple(replace(each, owner=None, reason=each.reason if whole else "") for each in held)

    def overall(self, asked: Asked) -> documents.Status:
        """The status as far as everybody who may open the page may see it."""
        c, only = self.controller, self.who.only(asked)
        view, known, found = c.judge.view, list(c.judge.incidents), c.health()
        if only is not None:
            view, known, found = views.own(view, known, found, only)
        silences = self.silences(asked) if only is None else ()
        over = sum(each.state is IncidentState.RESOLVED for each in c.journal.incidents(owner=only))
        sees, quiet = self.who.sees(asked), c.silences.words_of
        made = views.status_of(view, c.judge.limits_s, known, over, sees, found, quiet, self.done)
        slurm = documents.SlurmState(age_s=c.judge.view.slurm_age_s)
        return replace(made, mode=c.config.mode, paused=self.paused(), slurm=slurm, silences=silences)

    def done(self, incident: Incident) -> str:
        """What is done about an open incident."""
        journal = self.controller.journal
        return views.done_about(incident, journal.decisions(incident.id), journal.actions(incident.id))

    def find(self, asked: Asked) -> Incident:
        """The incident with the id in the path, or the only one whose id begins so, of those that may be shown: others
        are as if they were not there. Raises RequestRefused."""
        c, given, only = self.controller, asked.named["id"], self.who.only(asked)
        exact = c.journal.incident(given)
        there = [exact] if exact is not None and views.is_of(exact, only) else []
        there = there or [*c.judge.incidents, *c.journal.incidents(owner=only, beginning=given)]
        known = {each.id: each for each in there if each.id.startswith(given) and views.is_of(each, only)}
        if len(known) > 1:
            raise RequestRefused(400, f"{len(known)} incidents begin with {given[:40]!r}; give more of the id")
        if not known:
            raise RequestRefused(404, f"there is no incident {given[:40]!r}; `slurm-watchdog incidents` lists them")
        return next(iter(known.values()))


def status(api: Api, asked: Asked) -> documents.Status:
    """What is watched, and whether all is well."""
    c, now = api.controller, clock.monotonic()
    controller = documents.ControllerState(
        version=__version__,
        started_at=c.started_at,
        last_tick_age_s=None if c.last_tick is None else now - c.last_tick,
        warming_up=now - c.warm_up_began < c.config.controller.warm_up,
        journal_error=c.journal_error,
    )
    found = replace(api.overall(asked), controller=controller)
    if api.who.only(asked) is not None:
        return found
    is_operator = api.who.is_operator(asked)
    return replace(
        found,
        slurm=replace(found.slurm, error=c.slurm_error, notes=tuple(c.slurm_notes())),
        left_out=tuple(c.left_out(now)[:SHOWN_LEFT_OUT]),
        waiting=c.actions.stuck(),
        deliveries=tuple(  # what a receiver answered is for operators, for it may repeat a message
            each if is_operator else replace(each, error="") for each in c.notifier.deliveries()
        ),
    )


def incidents(api: Api, asked: Asked) -> list[documents.Incident]:
    """The newest incidents."""
    c, job_id, only, sees = api.controller, asked.query.get("job"), api.who.only(asked), api.who.sees(asked)
    stored, journal = c.journal.incidents(job_id=job_id, owner=only), c.journal
    known, current = {each.id for each in stored}, {each.id: each for each in c.judge.incidents}
    pending = [i for i in current.values() if i.id not in known and (job_id is None or job_id in i.job_ids)]
    found = [current.get(i.id, i) for i in (*pending, *stored)]
    return [views.shown(i, sees, journal.decisions(i.id), journal.actions(i.id)) for i in found if views.is_of(i, only)]


def explain(api: Api, asked: Asked) -> documents.Explanation:
    """One incident: who, since when, why, what was done."""
    c, incident, sees = api.controller, api.find(asked), api.who.sees(asked)
    runs = c.journal.actions(incident.id)
    head = views.shown(c.judge.incidents.get(incident.id) or incident, sees, c.journal.decisions(incident.id), runs)
    actions = tuple(views.action_of(run, c.actions.waiting(run.decision.id)) for run in runs)
    if not sees(incident):
        follows = api.who.follows(asked, incident, runs, c.state.jobs)
        return documents.Explanation(incident=head, actions=actions if follows else ())
    return documents.Explanation(
        incident=head,
        timeline=tuple(documents.Moment(at=at, text=text) for at, text in c.journal.timeline(incident.id)),
        evidence=tuple(_evidence(c.journal, incident, piece) for piece in _pieces(c.journal, incident, sees)),
        actions=actions,
    )


def _pieces(journal: Journal, incident: Incident, sees: Sees) -> list[Piece]:
    """The evidence of an incident; of what is stored with another one, that which the same person may see there."""
    pieces = journal.evidence.pieces(incident.id)
    others = {each.stored_with for each in pieces} - {incident.id}
    hidden = {each for each in others if (found := journal.incident(each)) is None or not sees(found)}
    return [each for each in pieces if each.stored_with not in hidden]


def _evidence(journal: Journal, incident: Incident, piece: Piece) -> documents.Evidence:
    """One piece; what a whole node said is fetched by its number, for there may be hundreds of megabytes of it."""
    document: Any = None
    if piece.kind not in LARGE_KINDS:
        document = json.loads(journal.evidence.document(piece.stored_with, piece.number) or b"null")
    taken_at = document.get("taken_at", piece.at) if isinstance(document, dict) else piece.at
    after_s = taken_at - incident.opened_at
    side = "after" if after_s >= 0 else "before"
    return picked(
        documents.Evidence, piece, "at", "kind", "number", incident=piece.stored_with, document=document,
        taken=f"taken {duration(abs(after_s))} {side} the incident began",
    )  # fmt: skip


def evidence(api: Api, asked: Asked) -> msgspec.Raw:
    """One piece of its evidence, as a node answered it."""
    incident, number = api.find(asked), asked.named["number"]
    if not api.who.sees(asked)(incident):
        raise RequestRefused(403, f"the evidence of incident {incident.id} is for {views.DETAILS_FOR}")
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
    """What a node answered, for a job's owner: its kernel's log names other people's programs (dmesg_restrict)."""
    found = json.loads(document) if b'"kernel_lines"' in document else None
    return encoded({**found, "kernel_lines": []}) if isinstance(found, dict) else document


def diagnosis(api: Api, asked: Asked) -> DiagnosisProgress:
    """How far a diagnosis is, and what came of it."""
    found = api.controller.collector.known(asked.named["id"])
    if found is None:
        raise RequestRefused(404, "that diagnosis is not known any more: start it again")
    api.who.require_sight(asked, found.job)
    return progress_of(found, clock.monotonic())


def overview(api: Api, asked: Asked) -> Overview:
    """The status with all open incidents, the map of the nodes, what is being done and what a person has to do."""
    now, key = clock.monotonic(), (asked.person, api.who.only(asked))
    api.overviews = {who: kept for who, kept in api.overviews.items() if now - kept[0] <= FRESH_S}
    if key not in api.overviews:
        api.overviews[key] = now, _overview(api, asked)
    return api.overviews[key][1]


def _overview(api: Api, asked: Asked) -> Overview:
    c, sees = api.controller, api.who.sees(asked)
    under_way, known = c.journal.open_actions(), c.judge.incidents
    quiet = {each.id: c.silences.words_of(each) for each in known}

    def doing(run: ActionRun) -> documents.ActionRun:
        """Whole for those who may see the incident: its words may repeat what Slurm or a node answered."""
        about = run.decision.incident_id
        found = known.get(about) or c.journal.incident(about)
        whole = found is not None and sees(found)
        return views.action_of(run, c.actions.waiting(run.decision.id) if whole else None, whole=whole)

    fields = structs.asdict(api.overall(asked)) | {
        "open": tuple(
            views.open_incident(
                each, sees, quiet[each.id], api.done(each) if number < views.SHOWN_OPEN else response(each)
            )
            for number, each in enumerate(known)
        )
    }
    handled = {run.decision.incident_id for run in under_way} | {each for each in quiet if quiet[each]}
    return Overview(
        **fields,
        cluster=c.config.cluster_name,
        at=clock.wall(),
        map=views.node_map(c.judge.view, known),
        doing=tuple(map(doing, under_way)),
        todo=views.todo(known, handled, c.journal.decisions_about, sees),
    )


def job(api: Api, asked: Asked) -> JobPage:
    """One job, or what is remembered of one that has ended."""
    c, job_id, sees = api.controller, asked.named["id"], api.who.sees(asked)
    view = next((job for job in c.judge.view.jobs if job.job.job_id == job_id), None)
    if view is None:
        owners = {run.uid for run in c.journal.run_records.of(job_id=[job_id])}
        if not owners or not (api.who.is_operator(asked) or owners == {asked.person.uid}):
            raise RequestRefused(404, f"job {job_id[:40]!r} is not running, or not watched")
        return JobPage(job_id=job_id, ended=True, history=history(c.journal, job_id, sees))
    row = replace(views.job_row(view, c.judge.limits_s.get(job_id)), health=c.health().of(job_id))
    shown = picked(JobPage, row, *documents.Job.__struct_fields__, step_times=view.step_times[-CURVE_POINTS:])
    if not may_see((view.job.uid,), asked.person, api.who.operators):
        return shown
    about = [each for each in c.judge.incidents if job_id in each.job_ids and is_announced(each)]
    named = {each.rank for incident in about for each in incident.culprits}
    return replace(
        shown, losses=view.losses, rank_rows=views.ranks_of(view, named), supervisor=view.supervisor,
        history=history(c.journal, job_id, sees),
    )  # fmt: skip


def history(journal: Journal, job_id: str, sees: Sees) -> History:
    """A job's runs, those of its incidents that the person may see and that were reported, and what was done. Raises
    JournalError."""
    incidents = [
        each
        for each in journal.incidents(job_id=job_id, limit=SHOWN_HISTORY)
        if each.fired_at is not None and each.inhibited_by is None and sees(each)
    ]
    done = (run for each in incidents for run in journal.actions(each.id) if run.decision.acts)
    fields = ("id", "kind", "severity", "opened_at", "resolved_at")
    return History(
        runs=tuple(sorted(journal.run_records.of(job_id=[job_id]), key=lambda run: run.began_at)),
        incidents=tuple(picked(documents.Incident, each, *fields) for each in incidents),
        actions=tuple(map(views.action_of, done)),
    )


def nodes(api: Api, asked: Asked) -> NodeTable:
    """Nodes by suspicion."""
    return node_table(api.controller.ledger.suspicions(), sees=api.who.is_operator(asked))


def node(api: Api, asked: Asked) -> NodeHistory:
    """One node with what happened to it."""
    (name,) = checked_nodes((asked.named["node"],))
    events = api.controller.ledger.history(name)
    if not events and name not in api.controller.state.node_addresses:
        raise RequestRefused(404, f"Slurm knows no node {name}, and nothing is remembered of one")
    return node_history(name, events, clock.wall(), asked.person, api.who.operators)


async def report(api: Api, asked: Asked) -> Report:
    """Where the jobs' time went: of all jobs for operators, of their own jobs for others."""
    uid, url = None if api.who.is_operator(asked) else asked.person.uid, api.controller.journal.url
    if uid is None and not api.who.is_operator(asked):
        raise RequestRefused(403, UNKNOWN_CALLER)
    if api.reports >= MAX_REPORTS:
        raise RequestRefused(429, "other reports are being made: retry in a moment")
    api.reports += 1
    work = asyncio.get_running_loop().run_in_executor(api.report_thread, report_asked, url, asked.query, uid)
    work.add_done_callback(lambda _: setattr(api, "reports", api.reports - 1))  # also where no one waits any more
    try:
        return await work
    except Failure as error:
        raise RequestRefused(400, error.what) from None
