"""What a job's environment asks of the watchdog: from its processes, by way of reports, to the run that it is
about and no other."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace

from slurm_watchdog.agent.collectors.job_directives import MAX_WISH, directives_of
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.knowledge.launchers import KILL_SWITCH_OPTION
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.report import JobDirectives, Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.wire.codec import decode_report, encode_report
from tests.builders.views import slurm_job

OFF = JobDirectives(job_id="7", restarts=0, variables=(("SLURM_WATCHDOG", "off"),), uid=1000)
REPORT = Report(node="n1", boot_id="b", agent_id="a", sequence=1, wishes=(OFF,))


def entry(job_id: str, role: Role, environ: dict[str, str] | None, uid: int = 1000) -> SimpleNamespace:
    known = SimpleNamespace(environ=environ, uid=uid)
    return SimpleNamespace(known=known, member=SimpleNamespace(job_id=job_id, role=role))


def test_ranks_speak_for_the_job_and_the_batch_shell_where_they_say_nothing() -> None:
    mine = [
        entry("7", Role.RANK, {"SLURM_WATCHDOG": "off"}, uid=1500),
        entry("7", Role.RANK, {"SLURM_WATCHDOG": "off"}, uid=0),
        entry("7", Role.HELPER, {"SLURM_WATCHDOG": "off"}),
        entry("7", Role.RANK, {"SLURM_WATCHDOG_KILL_SWITCH": "/k", "SLURM_RESTART_COUNT": "2", "HOME": "/x"}),
        entry("7", Role.RANK, {"SLURM_WATCHDOG_KILL_SWITCH": "/other"}),
        entry("8", Role.HELPER, {"SLURM_WATCHDOG": "x" * 5000}),
        entry("9", Role.RANK, {"HOME": "/x"}),
        entry("10", Role.RANK, None),
        entry("11", Role.RANK, {"SLURM_WATCHDOG": "off"}),
    ]
    owners = dict.fromkeys(("7", "8", "9", "10"), 1000)  # of job 11 Slurm has said nothing here
    found = {wish.job_id: wish for wish in directives_of(mine, owners)}  # type: ignore[arg-type]
    assert set(found) == {"7", "8", "9"}  # of job 10 nothing could be read
    first, second = found["7"], found["8"]
    assert found["9"] == JobDirectives(job_id="9", restarts=0, variables=(), uid=1000), "read, and it says nothing"
    assert first == JobDirectives(job_id="7", restarts=2, variables=(("SLURM_WATCHDOG_KILL_SWITCH", "/k"),), uid=1000)
    assert (second.job_id, len(second.variables[0][1])) == ("8", MAX_WISH)


def test_the_kill_switch_of_a_rank_s_command_line_is_added_and_takes_no_wish_away() -> None:
    named = {KILL_SWITCH_OPTION: "/scratch/stop"}
    batch = entry("7", Role.HELPER, {"SLURM_WATCHDOG": "off"})
    for order in ([entry("7", Role.RANK, named), batch], [batch, entry("7", Role.RANK, named)]):
        (wish,) = directives_of(order, {"7": 1000})  # type: ignore[arg-type]
        assert dict(wish.variables) == {"SLURM_WATCHDOG": "off", **named}
    helper = entry("7", Role.HELPER, named)
    assert directives_of([helper], {"7": 1000}) == ()  # type: ignore[arg-type, list-item]
    (alone,) = directives_of([entry("7", Role.RANK, named)], {"7": 1000})  # type: ignore[list-item]
    assert dict(alone.variables) == named


def test_the_wire_carries_them() -> None:
    assert decode_report(encode_report(REPORT)).wishes == (OFF,)


def test_they_count_for_the_run_that_said_so_and_are_forgotten_with_the_job() -> None:
    state = ClusterState(silent_after_s=45, report_lifetime_s=30)
    node = SlurmNode(name="n1", address="", state="ALLOCATED")
    job = slurm_job()
    state.apply_slurm(SlurmView(jobs=(job,), nodes=(node,)), 0.0)
    assert state.variables_of(job) == {}
    state.apply_report(REPORT, 1.0)
    assert state.variables_of(job) == {"SLURM_WATCHDOG": "off"}
    assert state.variables_of(slurm_job(restarts=1)) == {}, "the next run may have another environment"
    nothing = replace(REPORT, node="n2", agent_id="b", wishes=(replace(OFF, variables=()),))
    state.apply_report(nothing, 2.0)
    assert state.variables_of(job) == {"SLURM_WATCHDOG": "off"}, "ranks that say nothing take back no wish"
    assert state.variables_of(slurm_job(job_id="8")) == {}
    state.apply_slurm(SlurmView(jobs=(), nodes=(node,)), 2.0)
    assert state.variables_of(job) == {}
