"""Whether all is well: one judgement for the page's headline, `status`, Slack's pulse, /healthz, metrics,
`run` and `attach`. Pure.

OK is said of what was seen to be well, and of nothing else: a Slurm that has not answered, agents that are
silent, a job whose steps cannot be read or messages that are not delivered are never green. No word here
comes from a job's user: everybody may read it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, fold, one_line, plural
from slurm_watchdog.controller.health.job import HealthInputs, NotJudged, job_context, job_health, restarting_jobs
from slurm_watchdog.controller.policy.access import public_sentence
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.documents import JobHealth, Level, Reason
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.slurm_states import RUNNING

TICK_LATE_S = 30.0  # A controller whose last whole tick is older than this sees nothing; its default cadence is 1 s.
UNDELIVERED_S = 60.0  # Failures that are over within a minute (a restart of the receiver) are no one's concern.
NAMED = 3  # Jobs that a headline names for one reason.
ORDER = (Level.CRITICAL, Level.UNKNOWN, Level.WARNING, Level.OK)  # Blindness outranks a warning.


class Health(Struct):
    """How everything is."""

    level: Level
    headline: str  # One sentence, with the reasons; without the level.
    reasons: tuple[Reason, ...]
    jobs: tuple[JobHealth, ...]  # In the order of the view.

    def of(self, job_id: str) -> JobHealth | None:
        """How one job is."""
        return next((each for each in self.jobs if each.job_id == job_id), None)


def is_announced(incident: Incident) -> bool:
    """Whether it counts as wrong everywhere: it fires, no other one explains it, and it is no person's own request."""
    return (
        incident.state is IncidentState.FIRING
        and incident.inhibited_by is None
        and incident.kind != IncidentKind.OPERATOR_RESTART
    )


def health(seen: HealthInputs) -> Health:
    """The judgement."""
    view = seen.view
    age_s, blind = view.slurm_age_s, None
    if age_s is None or age_s > seen.slurm_patience_s or view.slurm_excused:  # no job can be judged at all
        blind = JobHealth(not_judged=NotJudged.SLURM_UNREACHABLE, reason="Slurm does not answer", todo="scontrol ping")
    seen = replace(seen, restarting=seen.restarting | restarting_jobs(view))
    sight = job_context(seen, blind)
    jobs = tuple(job_health(job, sight) for job in view.jobs)
    reasons = [*_incidents(seen), *_controller(seen), *_slurm(seen), *_agents(seen), *_jobs(jobs, blind), *_rest(seen)]
    reasons.sort(key=lambda each: ORDER.index(each.level))
    level = reasons[0].level if reasons else Level.OK
    said = [each.text for each in reasons]
    return Health(
        level=level, headline=f"{'; '.join([*said, _watched(seen, jobs)])}.", reasons=tuple(reasons), jobs=jobs
    )


def _incidents(seen: HealthInputs) -> Iterable[Reason]:
    firing = [each for each in seen.incidents if is_announced(each)]
    again = {job_id for each in firing if _is_in_hand(each, seen) for job_id in each.jobs_now or each.job_ids}
    firing = [each for each in firing if not _is_in_hand(each, seen)]
    if again:
        yield _warning(f"{'job' if len(again) == 1 else 'jobs'} {', '.join(sorted(again))} restarting")
    firing.sort(key=lambda each: (each.severity is not Severity.CRITICAL, each.opened_at))
    if firing:
        first = public_sentence(firing[0]).rstrip(".")
        yield Reason(level=Level.CRITICAL, text=f"{plural(len(firing), 'incident')} firing ({first})")
    pending = sum(each.state is IncidentState.PENDING for each in seen.incidents)
    if pending:
        yield Reason(level=Level.WARNING, text=f"{plural(pending, 'incident')} pending")


def _is_in_hand(incident: Incident, seen: HealthInputs) -> bool:
    jobs = incident.jobs_now or incident.job_ids
    return bool(jobs) and seen.restarting.issuperset(jobs)


def _controller(seen: HealthInputs) -> Iterable[Reason]:
    if seen.tick_age_s is None:
        yield _unknown("the controller has not completed a tick yet")
    elif seen.tick_age_s > TICK_LATE_S:
        yield _unknown(f"the controller's last complete tick was {duration(seen.tick_age_s)} ago")
    if seen.busy_share is not None and seen.busy_share >= FULL:
        yield _warning(
            f"the controller has taken {seen.busy_share:.0%} of a core for a minute: reports wait and decisions are "
            "late; a faster core helps"
        )
    if seen.journal_error:
        yield _unknown(f"the journal cannot be written, so nothing is done ({seen.journal_error})")


def _slurm(seen: HealthInputs) -> Iterable[Reason]:
    age_s = seen.view.slurm_age_s
    because = f" ({seen.slurm_error})" if seen.slurm_error else ""
    if age_s is None:
        yield _unknown(f"Slurm has not answered yet{because}")
    elif age_s > seen.slurm_patience_s:
        yield _unknown(f"Slurm last answered {duration(age_s)} ago{because}")
    elif seen.view.slurm_excused:
        yield _unknown(f"Slurm has not answered since the controller was stalled{because}")
    elif seen.slurm_error:
        yield _warning(f"Slurm's last answer was an error{because}")
    yield from map(_warning, seen.slurm_notes)


def _agents(seen: HealthInputs) -> Iterable[Reason]:
    view = seen.view
    if view.jobs and not view.reporting_nodes:
        yield _unknown("no node reports")
    elif view.silent_nodes:
        nodes = ",".join(fold(view.silent_nodes))
        yield _warning(f"{plural(len(view.silent_nodes), 'node')} silent: {nodes}")


def _jobs(jobs: Sequence[JobHealth], blind: JobHealth | None) -> Iterable[Reason]:
    """Jobs that no reason names yet: beyond their limit, not judged, with an action under way."""
    nothing = bool(jobs) and all(each.not_judged for each in jobs)
    groups: dict[tuple[str, str], list[JobHealth]] = {}
    for each in jobs:
        if (
            each.level is not Level.OK
            and not each.by_incident
            and (blind is None or each.not_judged is not blind.not_judged)
        ):
            groups.setdefault((each.state, each.reason), []).append(each)
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))
    for (state, reason), some in ranked[:NAMED]:
        judged = any(each.not_judged is None for each in some) or not nothing
        ids = [each.job_id for each in some]
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        text = f"{'job' if len(ids) == 1 else 'jobs'} {', '.join(ids[:NAMED])}{more}: {state}, {reason}"
        yield Reason(level=Level.WARNING if judged else Level.UNKNOWN, text=text)
    left = sum(len(some) for _, some in ranked[NAMED:])
    if left:
        yield _warning(f"{plural(left, 'more job')} not judged, or beyond their limit")


def _rest(seen: HealthInputs) -> Iterable[Reason]:
    if seen.paused is not None:
        reason, by = seen.paused
        yield _warning(f"actions are paused{f' by {by}' if by else ''}{f': {reason}' if reason else ''}")
    if seen.warming_up:
        yield _warning("the controller has just started and only observes")
    for each in seen.deliveries:
        if each.failing_s is not None and each.failing_s >= UNDELIVERED_S:
            waiting = f"{plural(each.waiting, 'message')} waiting, " if each.waiting else ""
            yield _warning(f"{each.channel} gets no messages for {duration(each.failing_s)} ({waiting}{each.error})")


def _watched(seen: HealthInputs, jobs: Sequence[JobHealth]) -> str:
    states = Counter(each.state for each in jobs)
    how = ", ".join(f"{number} {state}" for state, number in states.most_common(5))
    watched = f"{plural(len(jobs), 'job')} watched{f' ({how})' if how else ''}"
    return f"{watched}, {plural(len(seen.view.reporting_nodes), 'node')} reporting, mode {seen.mode}"


def _unknown(text: str) -> Reason:
    return Reason(level=Level.UNKNOWN, text=text)


def _warning(text: str) -> Reason:
    return Reason(level=Level.WARNING, text=text)


WINDOW_S = 60.0  # A start of all agents, or of a thousand jobs, is over by then.
FULL = 0.95
"""With 10,000 agents over TLS at 5 s a core was full, and decisions were late by seconds; at 10 s, with 0.68 of one,
they were not (docs/evaluation.md)."""


class BusyShare:
    """One event loop owns it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def note(self, now: float, cpu_s: float) -> None:
        """`cpu_s`: processor time of the loop's thread so far."""
        self._seen.append((now, cpu_s))
        while len(self._seen) > 1 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    def share(self) -> float | None:
        """Of a core, over the last WINDOW_S; None: it was not watched for so long yet."""
        if not self._seen or self._seen[-1][0] - self._seen[0][0] < WINDOW_S:
            return None
        (began, before_s), (ended, after_s) = self._seen[0], self._seen[-1]
        return (after_s - before_s) / (ended - began)


LINE_LIMIT = 300


def pulses(view: ClusterView, limits_s: Mapping[str, float], wall: float, health: Health) -> list[str]:
    """How many jobs there are, then those that make no steps, those that run, those that wait; empty for no jobs.
    `limits_s` by job id, `wall` is the date of now, `health` how they are."""
    found = {each.job_id: each for each in health.jobs}
    all_jobs = (*view.jobs, *view.waiting)
    lines = [_line(job, limits_s.get(job.job.job_id), wall, found.get(job.job.job_id)) for job in all_jobs]
    lines.sort(key=lambda each: each[0])
    running = sum(rank < 2 for rank, _ in lines)
    head = f"{plural(running, 'job')} running, {len(lines) - running} waiting"
    return [head, *(one_line(line, LINE_LIMIT) for _, line in lines)] if lines else []


def _line(view: JobView, limit_s: float | None, wall: float, health: JobHealth | None) -> tuple[int, str]:
    """One job, with its rank: 0 is late or unwell, 1 runs, 2 waits."""
    job, progress = view.job, view.progress
    whose = " ".join(filter(None, (job.name, f"of {job.user}" if job.user else "")))
    head = f"job {job.job_id}{f' ({whose})' if whose else ''}"
    if job.state not in RUNNING:
        reason = "" if job.reason in ("", "None") else f" ({job.reason})"
        return 2, f"{head} waits: {job.state}{reason}"
    running_s = view.run_age_s if job.start_at is None else max(0.0, wall - job.start_at)
    parts = [f"{head} runs since {duration(running_s)} on {','.join(fold(job.nodes)) or 'no node'}"]
    why = "" if health is None else health.reason
    step = progress.known_step if progress else None
    if progress is None or step is None:
        parts.append("no step yet" if why else f"no step yet ({'starting' if health is None else health.state})")
    else:
        of = f" of {progress.total_steps}" if progress.total_steps else ""
        parts.append(f"step {step}{of}")
        if progress.step_s:
            parts.append(f"{progress.step_s:.3g} s a step")
            if (left := (progress.total_steps or 0) - step) > 0:
                parts.append(f"{duration(left * progress.step_s)} to go")
    age_s = progress.age_s if progress else None
    late = age_s is not None and limit_s is not None and age_s > limit_s
    if late:
        parts.append(f"NO STEP for {duration(age_s or 0.0)}")
    if health is not None and (health.state not in ("training", "starting") or why):
        state = health.state.upper() if health.level is Level.CRITICAL else health.state
        parts.append(f"{state}: {why}" if why else state)
    unwell = health is None or health.level is not Level.OK
    return (0 if late or unwell else 1), ", ".join(parts)
