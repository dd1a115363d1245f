"""What Prometheus reads of jobs: series come and go with them, and there are never more than a server bears."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.controller.health.metrics import MAX_JOBS, ControllerMetrics, GpuTime
from slurm_watchdog.knowledge.log_signatures import SIGNATURES
from slurm_watchdog.model.cluster_view import ClusterView, ErrorLine, JobView, Progress, RankGpu
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.node_view import GpuView
from slurm_watchdog.model.observations import Event, EventKind, Gpu
from slurm_watchdog.model.slurm import SlurmJob


def job(number: int, *, phase: str | None = None, step: int | None = 5) -> JobView:
    progress = None if step is None else Progress(step=step, age_s=1.0, steps_seen=9, step_s=2.0, phase=phase)
    return JobView(
        job=SlurmJob(job_id=str(number), state="RUNNING", start_at=float(number)),
        run_age_s=9.0,
        progress=progress,
    )


def show(metrics: ControllerMetrics, jobs: Sequence[JobView], incidents: Sequence[Incident] = ()) -> list[str]:
    metrics.show(ClusterView(now=0.0, jobs=tuple(jobs)), {}, incidents, {}, lambda each: False)
    return [line for line in metrics.text().decode().splitlines() if line and not line.startswith("#")]


def of_job(lines: list[str], number: int) -> set[str]:
    return {line.partition("{")[0].removeprefix("slurm_watchdog_") for line in lines if f'job_id="{number}"' in line}


def test_series_of_a_job_go_with_it_and_those_of_a_run_that_has_made_no_step_yet() -> None:
    metrics = ControllerMetrics()
    assert of_job(show(metrics, [job(1), job(2)]), 2) == {
        "job_progress_age_seconds", "job_step", "job_step_seconds", "job_stall_limit_seconds", "job_phase",
    }  # fmt: skip
    lines = show(metrics, [job(1), job(2, step=None)])
    assert of_job(lines, 2) == {"job_progress_age_seconds", "job_stall_limit_seconds", "job_phase"}
    assert of_job(show(metrics, [job(1)]), 2) == set()


def test_a_job_has_a_rung_while_there_is_an_action_and_its_error_lines_by_signature() -> None:
    def error(pattern: str) -> ErrorLine:
        line = Event(kind=EventKind.ERROR, job_id="1", age_s=0.0, source="x", pattern=pattern)
        return ErrorLine(node="n1", age_s=1.0, event=line)

    metrics, name = ControllerMetrics(), SIGNATURES[0].name
    said = replace(job(1), errors=(error(name), error(name), error('"} 1\nevil 1')))
    metrics.show(ClusterView(now=0.0, jobs=(said,)), {}, (), {"1": "requeue_hold"}, lambda each: False)
    lines = metrics.text().decode().splitlines()
    assert f'slurm_watchdog_job_log_errors{{job_id="1",pattern="{name}"}} 2.0' in lines
    assert 'slurm_watchdog_job_log_errors{job_id="1",pattern="other"} 1.0' in lines
    assert 'slurm_watchdog_job_operation{job_id="1",operation="requeue_hold"} 1.0' in lines
    assert not [line for line in show(metrics, [job(1)]) if "job_operation" in line or "log_errors{" in line]


def test_gpu_time_is_lost_while_a_job_stands_still_once_for_all_its_incidents() -> None:
    gpus = tuple(
        RankGpu(rank=rank, pid=rank, view=GpuView(node="n1", gpu=Gpu(uuid=f"GPU-{rank}", index=rank)))
        for rank in range(8)
    )  # fmt: skip
    busy = replace(job(1), gpus=gpus)
    hang = Incident(
        id="a", kind=IncidentKind.COLLECTIVE_HANG, subject="job:1", state=IncidentState.FIRING, severity=Severity.CRITICAL,
        job_ids=("1",), opened_at=0.0, pending_mono=0.0, detected_after_s=60.0,
    )  # fmt: skip
    dead = replace(hang, id="b", kind=IncidentKind.DEAD_RANK, detected_after_s=10.0)
    slow = replace(hang, id="c", kind=IncidentKind.SLOW_JOB)
    time = GpuTime()
    assert time.add(ClusterView(now=0.0, jobs=(busy,)), ()) == 0.0
    assert time.add(ClusterView(now=5.0, jobs=(busy,)), (slow,)) == 0.0
    assert time.add(ClusterView(now=10.0, jobs=(busy,)), (hang, dead)) == 8 * 60.0
    assert time.add(ClusterView(now=15.0, jobs=(job(1),)), (hang, dead)) == 8 * 5.0  # the ranks have died, not the job
    assert time.add(ClusterView(now=20.0), (hang,)) == 0.0  # it is queued again
    assert time.add(ClusterView(now=25.0, jobs=(busy,)), (hang,)) == 8 * 5.0  # it starts
    assert time.add(ClusterView(now=9999.0, jobs=(busy,)), (hang,)) == 8 * 60.0  # we stood still ourselves
    assert time.add(ClusterView(now=10004.0, jobs=(busy,)), ()) == 0.0
    assert time.gpus_of("1") == 8
    time.add(ClusterView(now=10009.0), ())
    assert time.gpus_of("1") == 0


def test_a_job_is_in_one_phase() -> None:
    metrics = ControllerMetrics()
    show(metrics, [job(1)])
    lines = show(metrics, [job(1, phase="evaluation")])
    assert [line for line in lines if "job_phase" in line] == [
        'slurm_watchdog_job_phase{job_id="1",phase="evaluation"} 1.0'
    ]


def test_there_are_never_more_than_20000_series_and_what_is_left_out_is_counted_and_not_the_job_in_trouble() -> None:
    metrics = ControllerMetrics()
    last = MAX_JOBS + 500
    incident = Incident(
        id="a", kind=IncidentKind.COLLECTIVE_HANG, subject=f"job:{last}", state=IncidentState.FIRING,
        severity=Severity.CRITICAL, job_ids=(str(last),), opened_at=0.0, pending_mono=0.0,
    )  # fmt: skip
    lines = show(metrics, [job(number) for number in range(1, last + 1)], [incident])
    assert len(lines) <= 20_000
    assert "slurm_watchdog_jobs_without_series 500.0" in lines
    assert of_job(lines, last) and of_job(lines, 1) and not of_job(lines, last - 1)
