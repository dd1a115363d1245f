"""From findings to incidents: pending -> firing -> resolved, one incident a cause, the unknown freezes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.redact import mask_words
from slurm_watchdog.base.structs import Struct, picked
from slurm_watchdog.detect.registry import causes_of, spec_of
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.model.incidents import (
    HARDWARE_FAULTS,
    NOBODY,
    Culprit,
    Finding,
    Incident,
    IncidentKind,
    IncidentState,
    Truth,
)

RESOLVE_AFTER_S = 10.0  # Gone for so long before its incident closes: a flapping one stays one incident.

UNREPORTED_HOLDS_S = 90.0
"""A suspicion, or an incident that is pending itself, holds another incident back for so long at most: the
shipped floor of a hang's limit (60 s) and the dumps after it. Two that waited for each other kept the right
rank, with its exception, from ever being reported."""

AFTERMATH_S = 300.0
"""After an incident has ended, what it explained from its first moment on is given so long to end, too: Slurm
takes a node back at its next ping (SlurmdTimeout, 300 s by default), a job that was requeued logs on."""
AFTERMATH_OF_RUNS_S = 900.0  # The same of what a run logged that is over (detectors.log_error.recent, 600 s).
BEGINS_AFTER_S = 30.0  # What begins so soon after the end of a trouble of nodes is of it: reports come one by one.

NOT_ACTIONABLE: dict[str, Any] = {"actionable": False, "good_checkpoint": ""}
"""Of an incident of which the newest finding says nothing bad."""
_OF_NODES = frozenset({Subject.NODE, Subject.CLUSTER})
_PLACES = frozenset({Subject.NODE, Subject.GPU})  # What is about a place, and names no job.

HOST_FAULT_EXPLAINS_S = 600.0  # What begins later than a line of the kernel, a moment, is no consequence of it.

HARDWARE = ("gpu:", "node:", "host:")  # Beginnings of subjects that outlive the jobs which suffer from them.

FORGET_AFTER_S = 3600.0  # An incident about what is not there any more (a node, a GPU) ends after this.


class CorrelateContext(Struct):
    """When, and in which world, findings are turned into incidents."""

    mono: float
    wall: float
    hold_s: Mapping[str, float]  # Kind -> for how long its condition has to last before it fires.
    resolve_after_s: float = RESOLVE_AFTER_S
    restarts: Mapping[str, int]  # Restart count of every job that is active now.
    over: frozenset[str] = frozenset()  # Jobs that Slurm says have ended.
    blind: bool = False  # Nothing is judged at this moment: that no detector says anything means nothing.
    unheard_nodes: frozenset[str] = frozenset()  # Nodes that Slurm lists and that do not report.
    owners: Mapping[str, int] = {}  # Uid of the owner of every job that Slurm has listed.
    acting: frozenset[str] = frozenset()  # Incidents with an action under way: they stay as they are meanwhile.


def correlate(
    open_incidents: Sequence[Incident],
    findings: Sequence[Finding],
    moment: CorrelateContext,
    new_id: Callable[[], str],
    settled: Sequence[Incident] = (),
) -> list[Incident]:
    """The open incidents after these findings: changed, newly opened, or resolved just now. A pending incident whose
    condition goes away vanishes without a trace. UNKNOWN, and no finding at all, open, fire and close nothing, unless
    every job concerned is over or has restarted. An incident that is not BAD at this moment is not to be acted on: what
    was true a while ago is no evidence. `settled` are incidents that have ended lately."""
    by_subject = {(f.kind, f.subject): f for f in findings}
    after = []
    known = set()
    for incident in open_incidents:
        known.add((incident.kind, incident.subject))
        changed = _update(incident, by_subject.get((incident.kind, incident.subject)), moment)
        if changed is not None:
            after.append(changed)
    for (kind, subject), finding in by_subject.items():
        if finding.truth is Truth.BAD and (kind, subject) not in known:
            after.append(_open(finding, moment, new_id()))
    suspected = [f for f in findings if f.truth is not Truth.OK and f.duration_s > 0 and f.wanted]
    bad = {subject for subject, finding in by_subject.items() if finding.truth is Truth.BAD}
    causes = _by_what_they_explain(after, moment)
    ended = (*settled, *(incident for incident in after if incident.state is IncidentState.RESOLVED))
    found = []
    for incident in after:
        if incident.state is not IncidentState.RESOLVED:  # what was explained to its end is no news
            explained_by = incident.inhibited_by
            incident = _inhibit(incident, causes.get(incident.kind, ()), suspected, moment)
            incident = _in_aftermath(incident, explained_by, ended, moment)
        found.append(_fire(incident, moment) if (incident.kind, incident.subject) in bad else incident)
    return found


def _open(finding: Finding, moment: CorrelateContext, incident_id: str) -> Incident:
    return picked(
        Incident,
        finding,
        *("kind", "subject", "severity", "job_ids", "culprits"),
        id=incident_id,
        state=IncidentState.PENDING,
        opened_at=moment.wall - finding.lasts_s(moment.mono),
        pending_mono=moment.mono,
        runs=_runs(finding, moment),
        owners=_owners(finding, (), moment),
        **_said(finding, moment),
    )


def _said(finding: Finding, moment: CorrelateContext) -> dict[str, Any]:
    """The fields of an incident that are as its newest finding has them."""
    same = ("summary", "facts", "actionable", "good_checkpoint", "exclude_nodes", "mounts", "processes")
    now = {name: getattr(finding, name) for name in same}
    return now | {"summary_at": moment.wall, "jobs_now": finding.job_ids}


def _owners(finding: Finding, before: tuple[int, ...], moment: CorrelateContext) -> tuple[int, ...]:
    """Whose evidence it is: of everybody whose job, or process, it has been about."""
    uids = {moment.owners.get(job, NOBODY) for job in finding.job_ids}
    uids |= {process.uid for process in finding.processes}
    return tuple(sorted({*before, *uids}))


def run_named(subject: str) -> tuple[str, int] | None:
    """(job id, restart count) of a subject that is one run, `run:7.0`, which may be over; None for any other."""
    job, dot, restarts = subject.removeprefix("run:").rpartition(".")
    return (job, int(restarts)) if subject.startswith("run:") and dot and restarts.isdecimal() else None


def _runs(finding: Finding, moment: CorrelateContext) -> tuple[tuple[str, int], ...]:
    named = run_named(finding.subject)
    if named is not None:
        return (named,)
    return tuple((job, moment.restarts[job]) for job in finding.job_ids if job in moment.restarts)


def _update(incident: Incident, finding: Finding | None, moment: CorrelateContext) -> Incident | None:
    """The incident after one finding; None if a pending one came to nothing."""
    if incident.id in moment.acting:
        return incident
    if incident.kind == IncidentKind.OPERATOR_RESTART:  # it ends with its action, unless a controller died before that
        why = "the run that it was asked for has ended, and nothing is under way for it"
        return _resolve(incident, moment, why) if _runs_are_over(incident, moment) else incident
    by_hardware = incident.subject.startswith(HARDWARE)
    about_runs = incident.subject.startswith("job:") or (finding is None and not by_hardware)
    if about_runs and _runs_are_over(incident, moment):
        return _resolve(incident, moment, "the run that it was about has ended")
    if finding is None:
        heard = incident.pending_mono if incident.heard_mono is None else incident.heard_mono
        # That no one speaks of a node that Slurm has and that does not report says nothing.
        named = {each.node for each in incident.culprits if each.node} | {incident.subject.removeprefix("node:")}
        waits = moment.blind or not named.isdisjoint(moment.unheard_nodes)
        if (by_hardware or not incident.runs) and not waits and moment.mono - heard > FORGET_AFTER_S:
            return _resolve(
                incident, moment, "no finding about it for 1 h, and its node reports or is no longer in Slurm"
            )
        return replace(incident, **NOT_ACTIONABLE, heard_mono=moment.mono if waits else heard)
    incident = replace(incident, heard_mono=moment.mono)
    if finding.truth is Truth.UNKNOWN:
        return replace(incident, clear_mono=None, **NOT_ACTIONABLE)
    if finding.truth is Truth.BAD:
        job_ids = tuple(dict.fromkeys((*finding.job_ids, *incident.job_ids)))
        return replace(
            incident,
            clear_mono=None,
            job_ids=job_ids,
            runs=tuple({**dict(_runs(finding, moment)), **dict(incident.runs)}.items()),
            culprits=_with_ranks(finding.culprits, incident.culprits) or (() if finding.clears else incident.culprits),
            owners=_owners(finding, incident.owners, moment),
            **_said(finding, moment),
        )
    if incident.state is IncidentState.PENDING:
        return None
    since = moment.mono if incident.clear_mono is None else incident.clear_mono
    if moment.mono - since >= moment.resolve_after_s:
        return _resolve(incident, moment, mask_words(finding.summary))
    return replace(incident, clear_mono=since, **NOT_ACTIONABLE)


def _with_ranks(named: tuple[Culprit, ...], before: tuple[Culprit, ...]) -> tuple[Culprit, ...]:
    """Who is named, with the rank and the pid that the same GPU or process had when it was named first: a
    rank that died of its GPU is not known any more once its job runs again."""
    ranked: dict[tuple[str | None, str | None], Culprit]
    ranked = {(each.node, each.gpu_uuid): each for each in before if each.gpu_uuid and each.rank is not None}
    found = []
    for each in named:
        old = ranked.get((each.node, each.gpu_uuid)) if each.rank is None else None
        same = old is not None and each.pid in (None, old.pid)
        found.append(replace(each, rank=old.rank, pid=old.pid) if old is not None and same else each)
    return tuple(found)


def _runs_are_over(incident: Incident, moment: CorrelateContext) -> bool:
    if not incident.runs:
        return bool(incident.job_ids) and all(job in moment.over for job in incident.job_ids)
    return all(job in moment.over or moment.restarts.get(job, restarts) != restarts for job, restarts in incident.runs)


def _resolve(incident: Incident, moment: CorrelateContext, why: str) -> Incident | None:
    if incident.state is IncidentState.PENDING:
        return None
    return replace(incident, state=IncidentState.RESOLVED, resolved_at=moment.wall, resolution=why)


def _by_what_they_explain(incidents: Sequence[Incident], moment: CorrelateContext) -> dict[str, list[Incident]]:
    """Kind -> the incidents that may explain one of that kind. Of thousands that came at once most explain nothing."""
    present = {incident.kind for incident in incidents}
    standing = [incident for incident in incidents if _may_explain(incident, moment)]
    return {kind: [other for other in standing if other.kind in causes_of(kind)] for kind in present}


def _may_explain(incident: Incident, moment: CorrelateContext) -> bool:
    """Whether it may keep others from being reported: it is reported itself, or it may be within moments. One
    that is held back in turn, or that has been pending for long, would hide what it is said to explain."""
    if incident.state is IncidentState.PENDING:
        return incident.inhibited_by is None and moment.mono - incident.pending_mono <= UNREPORTED_HOLDS_S
    return incident.state is IncidentState.FIRING


def _inhibit(
    incident: Incident, causes: Sequence[Incident], suspected: Sequence[Finding], moment: CorrelateContext
) -> Incident:
    """Notes the one of `causes` that explains this incident; what is not reported itself, such as a mere
    suspicion, keeps a pending one from firing for UNREPORTED_HOLDS_S at most."""
    kinds = causes_of(incident.kind)
    patient = moment.mono - incident.pending_mono <= UNREPORTED_HOLDS_S
    for other in causes:
        if _same_matter(incident, other) and (patient or other.state is IncidentState.FIRING):
            return replace(incident, inhibited_by=other.id)
    for finding in suspected:
        if (
            patient
            and incident.state is IncidentState.PENDING
            and finding.kind in kinds
            and finding.kind not in spec_of(incident.kind).not_delayed_by
            and set(finding.job_ids) & set(incident.job_ids)
        ):
            return replace(incident, inhibited_by=f"suspicion:{finding.kind}")
    return replace(incident, inhibited_by=None) if incident.inhibited_by else incident


def lasts_in_aftermath(ended: Incident, wall: float) -> bool:
    """Whether an incident that has ended may still explain another one."""
    return ended.resolved_at is not None and wall - ended.resolved_at <= AFTERMATH_OF_RUNS_S


def _in_aftermath(
    incident: Incident, explained_by: str | None, ended: Sequence[Incident], moment: CorrelateContext
) -> Incident:
    """An incident that nothing explains now, held back by one that has ended: one that is pending, and that it
    explained from its first moment on; one that fires, and that was `explained_by` it until then."""
    if incident.inhibited_by is not None or not spec_of(incident.kind).has_aftermath:
        return incident
    lasts_s = AFTERMATH_OF_RUNS_S if run_named(incident.subject) is not None else AFTERMATH_S
    for other in ended:
        if incident.state is IncidentState.FIRING and other.id != explained_by:
            continue
        if other.kind not in causes_of(incident.kind) or other.resolved_at is None:
            continue
        of_nodes = spec_of(other.kind).subject in _OF_NODES
        # An action, or the end of its run, has ended it while it lasted; else it was gone for so long by then.
        gone_s = 0.0 if other.clear_mono is None else moment.resolve_after_s
        began_before = other.resolved_at + (BEGINS_AFTER_S if of_nodes else -gone_s)
        young = moment.wall - other.resolved_at <= lasts_s
        if young and incident.opened_at < began_before and _same_matter(incident, other):
            return replace(incident, inhibited_by=other.id)
    return incident


def _same_matter(incident: Incident, cause: Incident) -> bool:
    """Of two kinds of which one may explain the other: whether they are about the same filesystem, node or job."""
    if cause.subject == "cluster":
        return True
    if cause.kind == IncidentKind.HOST_FAULT and incident.opened_at - cause.opened_at > HOST_FAULT_EXPLAINS_S:
        return False
    if incident.subject.startswith(("mount:", "node:")):
        return incident.subject == cause.subject
    if not _same_run(incident, cause):
        return False
    return bool(set(incident.job_ids) & set(cause.job_ids)) or (
        spec_of(cause.kind).subject in _PLACES and _same_place(incident, cause)
    )


def _same_run(incident: Incident, cause: Incident) -> bool:
    """False if one is about one run of a job, and the other about another run of it."""
    if cause.kind == IncidentKind.CRASH_LOOP:
        return True
    for one, other in ((incident, cause), (cause, incident)):
        named = run_named(one.subject)
        runs = dict(other.runs)
        if named is not None and named[0] in runs and runs[named[0]] != named[1]:
            return False
    return True


def _same_place(incident: Incident, cause: Incident) -> bool:
    """Whether both name the same node, and not two different GPUs of it."""
    return any(
        a.node is not None and a.node == b.node and (not a.gpu_uuid or not b.gpu_uuid or a.gpu_uuid == b.gpu_uuid)
        for a in incident.culprits
        for b in cause.culprits
    )


def _fire(incident: Incident, moment: CorrelateContext) -> Incident:
    held_s = moment.mono - incident.pending_mono
    if (
        incident.state is not IncidentState.PENDING
        or incident.inhibited_by is not None
        or held_s < moment.hold_s.get(incident.kind, 0.0)
    ):
        return incident
    return replace(
        incident,
        state=IncidentState.FIRING,
        fired_at=moment.wall,
        detected_after_s=max(0.0, moment.wall - incident.opened_at),
    )


BEFORE_S = 60.0  # A fault so soon before the last step may be the cause: data that was read ahead lasts some steps.


def with_hardware_cause(findings: Sequence[Finding], mono: float) -> list[Finding]:
    """The findings; those of a job that makes no steps name the fault of its nodes' hardware that came before."""
    broken = [each for each in findings if each.kind in HARDWARE_FAULTS and each.truth is Truth.BAD and each.job_ids]
    return [_with_cause(each, broken, mono) if broken and _stands(each) else each for each in findings]


def _stands(finding: Finding) -> bool:
    return finding.truth is Truth.BAD and spec_of(finding.kind).stops_steps


def _with_cause(finding: Finding, broken: Sequence[Finding], mono: float) -> Finding:
    """A hang lasts since the last step."""
    lasts_s = finding.lasts_s(mono)
    causes = [
        each
        for each in broken
        if not set(each.job_ids).isdisjoint(finding.job_ids) and each.lasts_s(mono) <= lasts_s + BEFORE_S
    ]
    if not causes:
        return finding
    first = max(causes, key=lambda each: each.lasts_s(mono))
    after_s = lasts_s - first.lasts_s(mono)
    when = f"{abs(after_s):.0f} s {'after' if after_s >= 0 else 'before'} the last step"
    words = first.summary.removesuffix(".")
    if first.culprits:
        words = f"{first.culprits[0].reason} on {first.culprits[0].node}"
    return replace(
        finding,
        summary=f"{finding.summary.removesuffix('.')}; probable cause: {words}, {when}.",
        facts=(first.summary, *finding.facts),
    )
