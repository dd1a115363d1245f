"""Where a job looks for its kill switch is known once an agent has read a rank of it, or none is to be expected."""

from __future__ import annotations

import pytest

from slurm_watchdog.config.controller import Jobs
from slurm_watchdog.controller.actions.owned_paths import READ_WITHIN_S, OwnedPaths, is_named_after
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.report import JobDirectives, Report
from slurm_watchdog.model.slurm import SlurmView
from tests.builders.views import process, slurm_job

BEGAN = 1000.0


@pytest.mark.parametrize(
    ("comment", "role", "is_read", "age_s", "unknown"),
    [
        ("", None, False, 2.0, True),
        ("", Role.HELPER, False, 2.0, True),
        ("", Role.RANK, False, 2.0, True),
        ("", Role.RANK, True, 2.0, False),
        ("", None, False, READ_WITHIN_S, False),
        ("watchdog: kill_switch=/run/slurm-watchdog/jobs/{job_id}.0/kill", None, False, 2.0, False),
    ],
)
def test_no_kill_switch_is_written_before_the_ranks_that_may_name_it_were_read(
    comment: str, role: Role | None, is_read: bool, age_s: float, unknown: bool
) -> None:
    job = slurm_job(comment=comment)
    state = ClusterState(silent_after_s=600, report_lifetime_s=60)
    state.apply_slurm(SlurmView(jobs=(job,), nodes=()), BEGAN)
    seen = () if role is None else (process(0, role=role),)
    read = (JobDirectives(job_id=job.job_id, restarts=job.restarts, variables=(), uid=job.uid),) if is_read else ()
    report = Report(node="n1", boot_id="b", agent_id="a", sequence=1, processes=seen, wishes=read)
    assert state.apply_report(report, BEGAN + 1) == "accepted"
    why = OwnedPaths(Jobs(), state).why_switch_unknown(job, BEGAN + age_s)
    assert bool(why) is unknown and ("retry in" in why) is unknown


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/scratch/team.2/kill", False),
        ("/scratch/team.2/kill-2", True),
        ("/scratch/team.2/2/kill", True),
        ("/home/u/2/kill", True),
        ("/home/u/12/kill", False),
    ],
)
def test_a_number_of_a_directory_that_was_there_before_the_job_is_not_the_jobs(path: str, named: bool) -> None:
    job = slurm_job(job_id="2", stdout="/scratch/team.2/logs/2.out")
    assert is_named_after(path, job) is named
