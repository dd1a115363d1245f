"""What Prometheus reads of jobs: series come and go with them, and there are never more than a server bears."""

from __future__ import annotations

from collections.abc import Sequence

from watchdog.controller.metrics import MAX_JOBS, ControllerMetrics
from watchdog.detect.view import ClusterView, JobView, Progress
from watchdog.model import Incident, IncidentState, Kind, Severity, SlurmJob


def job(number: int, *, phase: str | None = None, step: int | None = 5) -> JobView:
    progress = None if step is None else Progress(step=step, age_s=1.0, steps_seen=9, step_s=2.0, phase=phase)
    return JobView(
        job=SlurmJob(job_id=str(number), state="RUNNING", start_at=float(number)),
        run_age_s=9.0,
        progress=progress,
    )


def show(
    metrics: ControllerMetrics, jobs: Sequence[JobView], incidents: Sequence[Incident] = ()
) -> list[str]:
    metrics.show(ClusterView(now=0.0, jobs=tuple(jobs)), {}, incidents)
    return [line for line in metrics.text().decode().splitlines() if line and not line.startswith("#")]


def of_job(lines: list[str], number: int) -> set[str]:
    return {
        line.partition("{")[0].removeprefix("slurm_watchdog_")
        for line in lines
        if f'job_id="{number}"' in line
    }


def test_series_of_a_job_go_with_it_and_those_of_a_run_that_has_made_no_step_yet() -> None:
    metrics = ControllerMetrics()
    assert of_job(show(metrics, [job(1), job(2)]), 2) == {
        "job_progress_age_seconds", "job_step", "job_step_seconds", "job_stall_limit_seconds", "job_phase",
    }  # fmt: skip
    lines = show(metrics, [job(1), job(2, step=None)])
    assert of_job(lines, 2) == {"job_progress_age_seconds", "job_stall_limit_seconds", "job_phase"}
    assert of_job(show(metrics, [job(1)]), 2) == set()


def test_a_job_is_in_one_phase() -> None:
    metrics = ControllerMetrics()
    show(metrics, [job(1)])
    lines = show(metrics, [job(1, phase="evaluation")])
    assert [line for line in lines if "job_phase" in line] == [
        'slurm_watchdog_job_phase{job_id="1",phase="evaluation"} 1.0'
    ]


def test_there_are_never_more_than_20000_series_and_what_is_left_out_is_counted_and_not_the_job_in_trouble() -> (
    None
):
    metrics = ControllerMetrics()
    last = MAX_JOBS + 500
    incident = Incident(
        id="a", kind=Kind.COLLECTIVE_HANG, subject=f"job:{last}", state=IncidentState.FIRING,
        severity=Severity.CRITICAL, job_ids=(str(last),), opened_at=0.0, pending_mono=0.0,
    )  # fmt: skip
    lines = show(metrics, [job(number) for number in range(1, last + 1)], [incident])
    assert len(lines) <= 20_000
    assert "slurm_watchdog_jobs_without_series 500.0" in lines
    assert of_job(lines, last) and of_job(lines, 1) and not of_job(lines, last - 1)
