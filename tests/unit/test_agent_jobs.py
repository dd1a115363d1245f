"""Who belongs to which job and rank: tables of processes as Slurm, torchrun and Open MPI make them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from watchdog.agent.jobs import Known, Member, Place, assign, parse_cgroup, parse_stepd
from watchdog.model import Role

USER = 1000


def process(
    pid: int, ppid: int, comm: str, environ: Mapping[str, str] | None = None, *, uid: int = USER, cgroup: Place | None = None, exe: str = ""
) -> Known:  # fmt: skip
    return Known(pid, pid * 10, ppid, comm, uid, cgroup, environ, exe)


def stepd(pid: int, step: str, job: str = "4") -> Known:
    return Known(pid, pid * 10, 1, "slurmstepd", 0, None, {}, "slurmstepd", Place(job, step))


def task(procid: int, **more: object) -> dict[str, str]:
    base = {
        "SLURM_JOB_ID": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(procid),
        "SLURM_LOCALID": str(procid),
    }
    return base | {"SLURM_NTASKS": "2"} | {name: str(value) for name, value in more.items()}


BATCH = {"SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}


def belonging(*processes: Known, before: Mapping[tuple[int, int], Member] | None = None) -> dict[int, Member]:
    return assign({each.pid: each for each in processes}, before or {})


def roles(members: Mapping[int, Member]) -> dict[int, tuple[str, int | None]]:
    return {pid: (member.role.value, member.rank) for pid, member in sorted(members.items())}


def as_before(members: Mapping[int, Member]) -> dict[tuple[int, int], Member]:
    return {(pid, pid * 10): member for pid, member in members.items()}


def test_srun_starts_python_itself() -> None:
    members = belonging(
        stepd(10, "batch"), process(11, 10, "slurm_script", BATCH, exe="bash"), process(12, 11, "srun", BATCH),
        stepd(20, "0"),
        process(21, 20, "python3", task(0)), process(22, 20, "python3", task(1)),
        process(23, 21, "python3", task(0)), process(24, 23, "ptxas", task(0)),
    )  # fmt: skip
    assert roles(members) == {
        11: ("helper", None), 12: ("helper", None), 21: ("rank", 0), 22: ("rank", 1), 23: ("worker", 0), 24: ("worker", 0),
    }  # fmt: skip
    assert members[21] == Member("4", "0", Role.RANK, 0, 0, 2)
    assert members[12].step_id == "batch"


def test_a_shell_and_a_pipe_around_the_trainer_are_helpers() -> None:
    members = belonging(
        stepd(20, "0"), process(21, 20, "bash", task(1)), process(22, 21, "numactl", task(1)),
        process(23, 22, "python", task(1)), process(24, 21, "tee", task(1)), process(25, 23, "pt_data_worker", task(1)),
    )  # fmt: skip
    assert roles(members) == {
        21: ("helper", None), 22: ("helper", None), 23: ("rank", 1), 24: ("helper", None), 25: ("worker", 1),
    }  # fmt: skip


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_ranks_of_torchrun_come_from_its_children(launcher: str) -> None:
    def child(rank: int) -> dict[str, str]:
        return task(1, RANK=rank, LOCAL_RANK=rank - 2, WORLD_SIZE=4, TORCHELASTIC_RUN_ID="x")

    members = belonging(
        stepd(20, "0"), process(21, 20, launcher, task(1)),
        process(22, 21, "python", child(2)), process(23, 21, "python", child(3)), process(24, 22, "python", child(2)),
    )  # fmt: skip
    assert roles(members) == {
        21: ("helper", None),
        22: ("rank", 2),
        23: ("rank", 3),
        24: ("worker", 2),
    }
    assert members[23] == Member("4", "0", Role.RANK, 3, 1, 4)


def test_torchrun_in_the_batch_script_without_srun() -> None:
    members = belonging(
        stepd(10, "batch"), process(11, 10, "slurm_script", BATCH, exe="bash"), process(12, 11, "torchrun", BATCH),
        process(13, 12, "python", BATCH | {"RANK": "0"}), process(14, 12, "python", BATCH | {"RANK": "1"}),
    )  # fmt: skip
    assert roles(members) == {11: ("helper", None), 12: ("helper", None), 13: ("rank", 0), 14: ("rank", 1)}  # fmt: skip


def test_a_rank_that_hands_on_its_rank_to_a_compiler_stays_the_rank() -> None:
    members = belonging(
        stepd(20, "0"), process(21, 20, "python", task(1)), process(22, 21, "python", task(1, RANK=1, WORLD_SIZE=2)),
    )  # fmt: skip
    assert roles(members) == {21: ("rank", 1), 22: ("worker", 1)}


def test_a_rank_variable_that_all_tasks_inherit_means_nothing() -> None:
    members = belonging(
        stepd(20, "0"), process(21, 20, "python", task(0, RANK=0)), process(22, 20, "python", task(1, RANK=0)),
    )  # fmt: skip
    assert roles(members) == {21: ("rank", 0), 22: ("rank", 1)}


def test_plain_python_in_the_batch_script_is_rank_0() -> None:
    members = belonging(
        stepd(10, "batch"), process(11, 10, "slurm_script", BATCH, exe="bash"), process(12, 11, "bash", BATCH),
        process(13, 12, "python", BATCH),
    )  # fmt: skip
    assert roles(members)[13] == ("rank", 0)
    assert roles(members)[12] == ("helper", None)
    assert roles(members)[11] == ("helper", None)


def test_a_script_is_a_shell_whatever_its_name() -> None:
    members = belonging(
        stepd(20, "0"), process(21, 20, "train.sh", task(0), exe="bash"), process(22, 21, "python", task(0), exe="python3.11"),
    )  # fmt: skip
    assert roles(members) == {21: ("helper", None), 22: ("rank", 0)}


def test_python_in_a_batch_script_that_uses_srun_is_a_helper() -> None:
    members = belonging(
        stepd(10, "batch"), process(11, 10, "slurm_script", BATCH, exe="bash"), process(12, 11, "srun", BATCH),
        process(13, 11, "python", BATCH),
    )  # fmt: skip
    assert {role for role, _ in roles(members).values()} == {"helper"}


def test_ranks_of_open_mpi() -> None:
    def child(rank: int) -> dict[str, str]:
        more = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        return task(0, **more)

    members = belonging(
        stepd(20, "0"), process(21, 20, "orted", task(0)), process(22, 21, "a.out", child(0)),
        process(23, 21, "bash", child(1)), process(24, 23, "a.out", child(1)),
    )  # fmt: skip
    assert roles(members) == {
        21: ("helper", None),
        22: ("rank", 0),
        23: ("helper", None),
        24: ("rank", 1),
    }


def test_a_worker_of_a_dead_rank_stays_a_worker_and_takes_nobodys_place() -> None:
    step = stepd(20, "0")
    rank, worker = process(21, 20, "python", task(0)), process(22, 21, "python", task(0))
    before = as_before(belonging(step, rank, worker))
    orphan = process(22, 1, "python", task(0))
    assert roles(belonging(step, orphan, before=before)) == {22: ("worker", 0)}


def test_an_orphan_stays_with_the_job_although_its_step_is_gone() -> None:
    before = as_before(belonging(stepd(20, "0"), process(21, 20, "python", task(0))))
    members = belonging(process(21, 1, "python", None), before=before)
    assert members[21] == Member("4", "0", Role.RANK, 0, 0, 2)


def test_an_orphan_that_was_never_seen_belongs_by_its_environment_if_its_user_owns_the_job() -> None:
    step, rank = stepd(20, "0"), process(21, 20, "python", task(0))
    assert 30 in belonging(step, rank, process(30, 1, "python", task(0)))
    assert 30 not in belonging(step, rank, process(30, 1, "python", task(0), uid=USER + 1))
    assert roles(belonging(process(30, 1, "python", task(1)))) == {30: ("rank", 1)}


def test_before_its_environment_is_read_a_process_is_a_helper_of_its_step() -> None:
    assert belonging(stepd(20, "0"), process(21, 20, "python", None)) == {21: Member("4", "0", Role.HELPER)}


def test_the_control_group_names_the_job_where_slurmstepd_is_out_of_sight() -> None:
    members = belonging(process(21, 0, "python", task(0), cgroup=Place("4", "0")))
    assert roles(members) == {21: ("rank", 0)}


def test_processes_of_no_job_are_left_out() -> None:
    assert belonging(process(1, 0, "systemd", {}, uid=0), process(5, 1, "bash", {})) == {}


def test_the_external_step_has_no_ranks() -> None:
    assert roles(belonging(stepd(20, "extern"), process(21, 20, "sleep", task(0)))) == {21: ("helper", None)}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_1\n", Place("4", "0")),
        ("0::/system.slice/slurmstepd.scope/job_4/step_batch/slurm\n", Place("4", "batch")),
        ("9:freezer:/slurm_n1/uid_1000/job_4/step_extern\n8:pids:/\n0::/\n", Place("4", "extern")),
        (
            "4:memory:/slurm/uid_1000/job_12\n1:cpuset:/slurm/uid_1000/job_12/step_3/task_0\n",
            Place("12", "3"),
        ),
        ("0::/user.slice/user-1000.slice/session-4.scope\n", None),
    ],
)
def test_a_control_group_names_job_and_step(text: str, place: Place | None) -> None:
    assert parse_cgroup(text) == place


@pytest.mark.parametrize(
    ("title", "place"),
    [
        ("slurmstepd: [4.0]", Place("4", "0")),
        ("slurmstepd: [4.batch]", Place("4", "batch")),
        ("slurmstepd: [4.extern]", Place("4", "extern")),
        ("/usr/sbin/slurmstepd", None),
    ],
)
def test_a_slurmstepd_names_its_step(title: str, place: Place | None) -> None:
    assert parse_stepd(title) == place
