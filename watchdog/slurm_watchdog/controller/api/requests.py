"""What people ask for: that a job restarts or saves, that messages or actions stop for a while, that ranks or nodes are
looked at. Each request is a type of slurm_watchdog.model.documents."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict

from slurm_watchdog.base import clock
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import plural
from slurm_watchdog.controller.api.answers import Api
from slurm_watchdog.controller.api.asking import Asked, RequestRefused, checked_job, checked_nodes
from slurm_watchdog.controller.evidence.collection import progress_of
from slurm_watchdog.controller.health.views import action_of, is_of
from slurm_watchdog.controller.incidents.judge import proves_stuck
from slurm_watchdog.controller.node_history.suspicion import ADDED, DAY_S, USERS_OWN, event_of
from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.model import documents
from slurm_watchdog.model.actions import Decision
from slurm_watchdog.model.documents import DiagnosisProgress
from slurm_watchdog.model.incidents import Incident, Silence
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind, NodeEventRequest
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RESTARTABLE, RUNNING

MAX_REASON = 300  # Characters of why a person wants it, without the secrets that were pasted with it.
MAX_SILENCES = 500  # Each is looked at for each message.
MAX_OF_OWNER = 10  # Of one user who may silence what is about his own jobs alone.
MAX_ADDED_A_DAY = 2000  # Events that people and their tests may add in a day: a test of 1,000 nodes twice.


async def restart(api: Api, asked: Asked, given: documents.RestartRequest) -> documents.Answered:
    """Restarts a job gracefully, without some nodes if given; answers what policy decided."""
    c, job_id = api.controller, checked_job(given.job_id)
    exclude = checked_nodes(given.exclude)
    job = await c.slurm.read_job(job_id)
    if job is None:  # who may know his own jobs alone learns of no other whether it is there
        raise RequestRefused(404 if asked.only_own is None else 403, f"Slurm knows no job {job_id}")
    name = api.who.require(asked, "restart", (job.uid,), f"job {job_id} belongs to {job.user}", (job.account,))
    checked_nodes(exclude, c.state.node_addresses)
    c.state.apply_job(job, clock.monotonic(), clock.wall())
    hang = proves_stuck(c.judge.incidents, job.job_id)
    if hang is not None and not given.now:
        raise RequestRefused(409, _needs_now(api, hang, job.job_id), code="hangs")
    incident, decision = c.decider.ask_restart(
        job, exclude, mask_cut(given.reason, MAX_REASON), name, at_once=given.now
    )
    return _answered(job, incident, decision)


def _answered(job: SlurmJob, incident: Incident, decision: Decision) -> documents.Answered:
    ids = {"job_id": job.job_id, "incident_id": incident.id, "decision_id": decision.id}
    return picked(documents.Answered, decision, "verdict", "by", "reason", **ids)


def _needs_now(api: Api, hang: Incident, job_id: str) -> str:
    """Why a graceful restart is not begun: the loop that would have to see the kill switch is stuck."""
    view = api.controller.state.job_view(job_id, clock.monotonic())
    saved = view.checkpoint if view is not None else None
    step = view.progress.known_step if view is not None and view.progress is not None else None
    from_where = "its last complete checkpoint" if saved is None else f"checkpoint {saved.step}"
    lost = "" if saved is None or step is None else f", {plural(max(0, step - saved.step), 'step')} lost"
    return (
        f"job {job_id} hangs ({hang.kind}, incident {hang.id}): its loop cannot see a kill switch. "
        f"It can be requeued now, from {from_where}{lost}: ask with --now"
    )


def cancel_restart(api: Api, asked: Asked, given: documents.JobRequest) -> documents.Cancelled:
    """Ends a restart that still waits for the job to save; its kill switch is removed."""
    job_id = checked_job(given.job_id)
    job = api.controller.state.jobs.get(job_id)
    whose = ((job.uid,), f"job {job_id} belongs to {job.user}", (job.account,)) if job is not None else ()
    problem = api.controller.actions.abandon(job_id, api.who.require(asked, "restart", *whose))
    if problem is not None:
        raise RequestRefused(409, problem)
    return documents.Cancelled(job_id=job_id)


def diagnose(api: Api, asked: Asked, given: documents.JobRequest) -> DiagnosisProgress:
    """All ranks of a running job are asked where they stand; how far that is is read by the answer's id."""
    job_id, now = checked_job(given.job_id), clock.monotonic()
    only, job = api.who.only(asked), api.controller.state.jobs.get(job_id)
    if only is not None and (job is None or job.uid != only):
        raise RequestRefused(403, f"job {job_id} is not yours")
    view = api.controller.state.job_view(job_id, now)
    if view is None or view.job.state not in RUNNING:
        state = "it is not watched" if view is None else f"it is {view.job.state}"
        raise RequestRefused(404, f"job {job_id} has no ranks to be asked: {state}. See: slurm-watchdog status")
    api.who.require_sight(asked, view.job)
    return progress_of(api.controller.collector.collect(view.job, now), now)


def selected(api: Api, asked: Asked) -> list[documents.SelectedJob]:
    """The running jobs, each with why it cannot be asked to save."""
    found, state = [], api.controller.state
    for job in (each for each in state.jobs.values() if each.state in RESTARTABLE):
        view = state.job_view(job.job_id, clock.monotonic())
        step = view.progress.known_step if view is not None and view.progress is not None else None
        saved = view.checkpoint.step if view is not None and view.checkpoint is not None else None
        about = {"step": step, "checkpoint_step": saved, "why_not": _why_not(api, job)}
        found.append(picked(documents.SelectedJob, job, "job_id", "user", "name", "partition", "nodes", **about))
    return found


def _why_not(api: Api, job: SlurmJob) -> str:
    """Why the job cannot see a kill switch, or is not to be asked, a sentence; empty: as far as is known it can."""
    alone = api.controller.decider.why_left_alone(job)
    if alone:
        return alone
    stuck = proves_stuck(api.controller.judge.incidents, job.job_id)
    if stuck is not None:
        return f"it hangs ({stuck.kind}, incident {stuck.id}): its loop cannot see a kill switch"
    view = api.controller.state.job_view(job.job_id, clock.monotonic())
    if view is None or view.silent_nodes:
        silent = "its nodes" if view is None else ", ".join(view.silent_nodes[:3])
        return f"no agent answers on {silent}: a kill switch cannot be written there"
    return "" if view.living_ranks else "no process of a training is known in it"


async def ask_jobs(api: Api, asked: Asked, given: documents.SaveRequest) -> list[documents.Answered]:
    """Asks the same of some jobs; each answer says what policy says to it. Others continue to be served."""
    within_s = None if given.before is None else given.before - clock.wall()
    if within_s is not None and within_s <= 0:
        raise RequestRefused(400, "that time is over")
    if within_s is not None and within_s > documents.LONGEST_S:
        raise RequestRefused(400, f"before has to be a date within the next {documents.LONGEST_S / 86400:.0f} days")
    exclude = checked_nodes(given.exclude, api.controller.state.node_addresses)
    rows = []
    for job_id in map(checked_job, given.job_ids):
        try:
            rows.append(_ask_one(api, asked, job_id, given, exclude, within_s))
        except RequestRefused as error:
            rows.append(documents.Answered(job_id=job_id, verdict="refused", reason=str(error)))
        await asyncio.sleep(0)
    return rows


def _ask_one(
    api: Api, asked: Asked, job_id: str, given: documents.SaveRequest, exclude: tuple[str, ...], within_s: float | None
) -> documents.Answered:
    job = api.controller.state.jobs.get(job_id)
    if job is None:
        raise RequestRefused(404, "Slurm does not list it any more")
    name = api.who.require(asked, "restart", (job.uid,), f"it belongs to {job.user}", (job.account,))
    if why_not := _why_not(api, job):
        raise RequestRefused(409, why_not)
    incident, decision = api.controller.decider.ask_restart(
        job, exclude, mask_cut(given.reason, MAX_REASON), name, wish=given.wish, within_s=within_s
    )
    return _answered(job, incident, decision)


async def progress(api: Api, asked: Asked, given: documents.FollowRequest) -> dict[str, documents.ActionRun]:
    """How far the actions of these incidents are: the newest of each."""
    c, found, only = api.controller, {}, api.who.only(asked)
    for incident_id in given.incident_ids:
        incident = c.journal.incident(incident_id)
        if incident is not None and is_of(incident, only):
            runs = c.journal.actions(incident_id)
            if runs and api.who.follows(asked, incident, runs, c.state.jobs):
                found[incident_id] = action_of(runs[-1], c.actions.waiting(runs[-1].decision.id))
        await asyncio.sleep(0)
    return found


def pause(api: Api, asked: Asked, given: documents.PauseRequest) -> documents.Paused:
    """Pauses all automatic actions until `/v1/resume`."""
    name = api.who.require(asked, "pause")
    api.controller.journal.pause(mask_cut(given.reason, MAX_REASON), name, clock.wall())
    return documents.Paused(paused=api.paused())


def resume(api: Api, asked: Asked) -> documents.Paused:
    """Ends a pause."""
    api.controller.journal.resume(api.who.require(asked, "pause"), clock.wall())
    return documents.Paused(paused=api.paused())


def silences(api: Api, asked: Asked) -> documents.Silences:
    """The silences that hold."""
    return documents.Silences(silences=api.silences(asked))


def silence(api: Api, asked: Asked, given: documents.SilenceRequest) -> documents.Silences:
    """No messages about some kinds, jobs or nodes, for a while."""
    now, state = clock.wall(), api.controller.state
    kinds, jobs = tuple(dict.fromkeys(given.kinds)), tuple(dict.fromkeys(map(checked_job, given.jobs)))
    unknown = [each for each in kinds if each not in KINDS]
    if unknown:
        raise RequestRefused(400, f"{unknown[0][:60]!r} is not a kind of incident; known: {', '.join(KINDS)}")
    nodes = checked_nodes(given.nodes)
    if not (kinds or jobs or nodes):
        raise RequestRefused(400, "name what is silenced: --kind, --job or --node")
    named = defaultdict[str, list[SlurmJob]](list)
    for job in state.jobs.values():
        for job_id in {job.job_id, job.job_id.partition("_")[0]}:  # an array's stands for its elements
            named[job_id].append(job)
    of_jobs = [job for each in jobs for job in named[each]] if all(map(named.get, jobs)) else []
    owners, accounts = {each.uid for each in of_jobs}, {each.account for each in of_jobs}
    name = api.who.require(asked, "silence", owners, accounts=accounts)
    owner = None if api.who.may(asked, "silence", (), accounts) else asked.person.uid
    most = MAX_SILENCES if owner is None else MAX_OF_OWNER
    if sum(each.owner == owner for each in api.controller.silences.listed()) >= most:
        raise RequestRefused(429, f"there are {most} silences already: end some")
    made = Silence(
        id=uuid.uuid4().hex[:8], by=name, at=now, reason=mask_cut(given.reason, MAX_REASON), until=now + given.for_s,
        kinds=kinds, jobs=jobs, nodes=nodes, owner=owner,
    )  # fmt: skip
    api.controller.silences.add(made)
    return documents.Silences(id=made.id, silences=api.silences(asked))


def end_silence(api: Api, asked: Asked) -> documents.Silences:
    """Ends a silence."""
    given, silences = asked.named["id"], api.controller.silences
    found = next((each for each in silences.listed() if each.id == given), None)
    if found is None:
        raise RequestRefused(404, f"no silence {given[:40]!r} holds; `slurm-watchdog silence` lists them")
    name = api.who.name(asked)
    if name != found.by:
        name = api.who.require(asked, "silence", about=f"silence {found.id} was made by {found.by}")
    silences.end(found, f"ended by {name}")
    return documents.Silences(silences=api.silences(asked))


def add_node_event(api: Api, asked: Asked, given: NodeEventRequest) -> NodeEvent:
    """A test's result, or that a node is mended."""
    (node,), c, now = checked_nodes((asked.named["node"],)), api.controller, clock.wall()
    if node not in c.state.node_addresses:
        raise RequestRefused(404, f"Slurm knows no node {node}")
    name, is_operator = api.who.name(asked), api.who.is_operator(asked)
    if given.kind == NodeEventKind.MENDED and not is_operator:
        api.who.require(asked, "mend")
        is_operator = True
    kinds = {*ADDED, *USERS_OWN.values()}
    added = sum(each.kind in kinds and now - each.at < DAY_S for each in c.ledger.events())
    if added >= (MAX_ADDED_A_DAY if is_operator else MAX_ADDED_A_DAY // 2):  # users leave half of it to operators
        raise RequestRefused(429, "so many events were added today that no more is taken")
    try:
        event = event_of(node, given, now, name, is_operator=is_operator)
    except ValueError as error:
        raise RequestRefused(400, str(error)) from None
    c.ledger.record(event)
    return event
