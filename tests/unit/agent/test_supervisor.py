"""A supervisor's status: from its file, as the owner of the job, to the run that it is about and no other."""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.model.supervisor import PROTOCOL, JobSupervisor, SupervisorState, SupervisorStatus
from slurm_watchdog.wire.codec import decode_report, encode_report
from tests.builders.views import slurm_job

STATUS = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id="0", nodes=("n1",), spares=("n2",))
ROW = JobSupervisor(job_id="7", restarts=0, age_s=1.0, status=STATUS)
REPORT = Report(node="n1", boot_id="b", agent_id="a", sequence=1, supervisors=(ROW,))


def test_the_wire_carries_them() -> None:
    assert decode_report(encode_report(REPORT)).supervisors == (ROW,)


def listed(**changes: object) -> ClusterState:
    state = ClusterState(silent_after_s=45, report_lifetime_s=30)
    nodes = tuple(SlurmNode(name=name, address="", state="ALLOCATED") for name in ("n1", "n2", "n3"))
    job = slurm_job(nodes=("n1", "n2", "n3"), batch_host="n1", **changes)
    state.apply_slurm(SlurmView(jobs=(job,), nodes=nodes), 0.0)
    return state


def test_it_counts_for_its_run_from_the_batch_host_alone_and_for_as_long_as_it_is_fresh() -> None:
    state = listed()
    job = state.jobs["7"]
    state.apply_report(replace(REPORT, node="n2"), 1.0)
    assert state.supervisors.of(job, 2.0) is None
    state.apply_report(REPORT, 1.0)
    assert state.supervisors.of(job, 2.0) == STATUS
    assert state.supervisors.of(replace(job, restarts=1), 2.0) is None
    assert state.supervisors.of(job, 40.0) is None


def test_a_silent_node_that_no_start_uses_does_not_hide_the_job() -> None:
    """A spare without power, or a node that a restart left out."""
    state = listed()
    for node in ("n1", "n2", "n3"):
        state.apply_report(Report(node=node, boot_id="b", agent_id=f"a{node}", sequence=1), 0.0)
    state.apply_report(Report(node="n1", boot_id="b", agent_id="an1", sequence=2, supervisors=(ROW,)), 100.0)
    view = state.job_view("7", 101.0)
    assert view is not None
    assert view.silent_nodes == ()
    state.apply_report(Report(node="n1", boot_id="b", agent_id="an1", sequence=3), 140.0)
    view = state.job_view("7", 141.0)
    assert view is not None
    assert view.silent_nodes == ("n2", "n3")
