"""What `slurm-watchdog run` starts again by itself, from reports and listings to incident, message and status: people
are told, which restart it is, and nobody is called before the last one."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from slurm_watchdog.controller.health.cluster import health
from slurm_watchdog.controller.health.job import HealthInputs
from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.log_error import detect
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.actions import RESTARTING
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.documents import Level
from slurm_watchdog.model.incidents import Finding, Incident, IncidentKind, IncidentState, Severity, Truth
from slurm_watchdog.model.past_runs import EndedJob
from slurm_watchdog.model.supervisor import PROTOCOL, JobSupervisor, SupervisorState, SupervisorStatus
from slurm_watchdog.notify.notification import Notice, Topic
from tests.builders import views
from tests.builders.logged_runs import NOW, past
from tests.builders.policy_inputs import LIMITS, SITUATION
from tests.builders.reported_cluster import Cluster, progress_event

FAILED = "its command ended with exit code 7, restarting (1 of 3)"


def judged(view: ClusterView) -> list[Finding]:
    return detect(view, CollectiveHang())


def incident_of(finding: Finding) -> Incident:
    return Incident(
        id="i", kind=finding.kind, subject=finding.subject, state=IncidentState.FIRING, severity=finding.severity,
        job_ids=finding.job_ids, opened_at=0, pending_mono=0, runs=(("7", 0),), summary=finding.summary,
    )  # fmt: skip


def level_of(view: ClusterView, finding: Finding) -> tuple[Level, str]:
    found = health(
        HealthInputs(view=view, limits_s={"7": 60.0}, incidents=(incident_of(finding),), mode="observe", tick_age_s=0.5)
    )
    return found.level, found.headline


def notice_of(finding: Finding, **situation: Any) -> Notice:
    rule = Rule(acts=True, ladder=spec_of(IncidentKind.LOG_ERROR).ladder, source="test")
    critical = replace(incident_of(finding), severity=Severity.CRITICAL)
    decision = decide(replace(SITUATION, rule=rule, **situation, incident=critical, config=LIMITS), "d")
    return Notice(topic=Topic.DECIDED, at=0.0, incident=critical, decision=decision)


def word(state: SupervisorState, step_id: str, starts: int, failed: str = "") -> tuple[JobSupervisor, ...]:
    status = SupervisorStatus(
        protocol=PROTOCOL, state=state, step_id=step_id, starts=starts, restarts_left=3 - (starts - 1), failed=failed
    )
    return (JobSupervisor(job_id="7", restarts=0, age_s=0.0, status=status),)


def test_a_command_that_a_supervisor_starts_again_is_a_warning_until_it_makes_steps() -> None:
    cluster = Cluster()
    cluster.slurm(batch_host="n1")

    def look(*ranks: Any, step: int | None = None, **said: Any) -> Finding:
        events = () if step is None else (progress_event(step),)
        cluster.report(*ranks, events=events, **said)
        (found,) = judged(views.cluster(cluster.job))
        return found

    first = views.process(0, step_id="0")
    for step in range(50, 54):
        assert look(first, step=step, supervisors=word(SupervisorState.RUNNING, "0", 1)).truth is not Truth.BAD
    waits = look(supervisors=word(SupervisorState.STARTING, "0", 1, FAILED))
    assert (waits.truth, waits.severity) == (Truth.BAD, Severity.WARNING)
    assert waits.summary == f"Job 7: {FAILED}, after step 53; no line says why"
    level, headline = level_of(views.cluster(cluster.job), waits)
    assert (level, headline.partition(";")[0]) == (Level.WARNING, "job 7 restarting")
    status = cluster.job.supervisor
    notice = notice_of(waits, supervisor=status)
    assert notice.decision is not None
    assert (notice.decision.by, notice.needs_person) == (RESTARTING, False)

    second = views.process(0, step_id="1", pid=77)
    runs = word(SupervisorState.RUNNING, "1", 2, FAILED)
    assert look(second, supervisors=runs).truth is Truth.BAD
    assert look(second, step=50, supervisors=runs).truth is Truth.BAD
    look(second, step=51, supervisors=runs)
    look(second, step=52, supervisors=runs)
    trains = look(second, step=53, supervisors=runs)
    assert (trains.truth, trains.summary) == (Truth.OK, "job 7 makes steps again")
    assert health(
        HealthInputs(
            view=views.cluster(cluster.job), limits_s={"7": 60.0}, incidents=(), mode="observe", tick_age_s=0.5
        )
    ).headline.startswith("1 job watched")  # fmt: skip


def test_a_command_without_a_word_is_an_incident_of_run_and_a_person_is_called_at_the_last_restart_alone() -> None:
    def ended(again: str) -> tuple[ClusterView, Finding]:
        job = views.slurm_job(state="FAILED", starts_again=again, ended_with="exit code 7")
        view = views.cluster(ended=(EndedJob(job=job, ended_at=NOW - 20.0, run=past(state="FAILED")),))
        (found,) = judged(view)
        return view, found

    view, again = ended(FAILED)
    assert (again.truth, again.severity) == (Truth.BAD, Severity.WARNING)
    assert level_of(view, again)[0] is Level.WARNING
    assert not notice_of(again, job=views.slurm_job(state="FAILED", starts_again=FAILED)).needs_person
    view, last = ended("")
    assert (last.truth, last.severity) == (Truth.BAD, Severity.CRITICAL)
    assert last.summary.startswith("Job 7 ended with exit code 7 after step")
    assert "Slurm" not in f"{last.summary} {last.facts}"
    assert level_of(view, last)[0] is Level.CRITICAL
    assert notice_of(last, job=views.slurm_job(state="FAILED")).needs_person


def test_a_failed_run_of_run_is_over_once_the_next_one_makes_steps() -> None:
    run = past(state="FAILED", started_again=FAILED)
    starting = views.job(job=views.slurm_job(restarts=1), past=(run,), progress=None)
    of = {each.subject: each for each in judged(views.cluster(starting))}
    assert of[f"run:7.{run.restarts}"].truth is Truth.BAD
    assert level_of(views.cluster(starting), of[f"run:7.{run.restarts}"])[0] is Level.WARNING
    trains = replace(starting, progress=replace(views.progress(1.0), rises=5))
    of = {each.subject: each for each in judged(views.cluster(trains))}
    assert (of[f"run:7.{run.restarts}"].truth, of[f"run:7.{run.restarts}"].summary) == (
        Truth.OK,
        "job 7 was started again, and makes steps",
    )


def test_of_several_failed_runs_only_the_newest_is_told() -> None:
    runs = tuple(past(state="FAILED", started_again=FAILED, restarts=number) for number in (0, 1))
    starting = views.job(job=views.slurm_job(restarts=2), past=runs, progress=None)
    of = {each.subject: each.truth for each in judged(views.cluster(starting))}
    assert (of.get("run:7.0"), of["run:7.1"]) == (None, Truth.BAD)
    job = views.slurm_job(state="FAILED", restarts=2, ended_with="exit code 7")
    over = EndedJob(job=job, ended_at=NOW - 20.0, run=past(state="FAILED", restarts=2), past=runs)
    found = {each.subject: (each.truth, each.severity) for each in judged(views.cluster(ended=(over,)))}
    assert found == {"run:7.2": (Truth.BAD, Severity.CRITICAL)}
