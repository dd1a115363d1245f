"""Who belongs to which job and rank: tables of processes as Slurm, torchrun and Open MPI make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from slurm_watchdog.agent.proc.entry import (
    JobMember,
    JobStep,
    ProcessFacts,
    parse_cgroup,
    parse_stepd,
)
from slurm_watchdog.agent.proc.job_membership import BY_CLAIM, BY_SLURM, assign, may_hold_a_rank
from slurm_watchdog.knowledge.launchers import NEVER_A_RANK, RANK_SOURCES
from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.model.observations import Role

USER = 1000


def process(
    pid: int, ppid: int, comm: str, environ: Mapping[str, str] | None = None, *, uid: int = USER, cgroup: JobStep | None = None, exe: str = ""
) -> ProcessFacts:  # fmt: skip
    return ProcessFacts(pid, pid * 10, ppid, comm, uid, cgroup, environ, exe)


def stepd(pid: int, step: str, job: str = "4") -> ProcessFacts:
    return ProcessFacts(pid, pid * 10, 1, "slurmstepd", 0, None, {}, "slurmstepd", JobStep(job, step))


def task(procid: int, **more: object) -> dict[str, str]:
    base = {
        "SLURM_JOB_ID": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(procid),
        "SLURM_LOCALID": str(procid),
    }
    return base | {"SLURM_NTASKS": "2"} | {name: str(value) for name, value in more.items()}


BATCH = {"SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}


OWNERS = {"4": USER}
"""What Slurm says runs here, and whose it is."""


def belonging(
    *processes: ProcessFacts,
    before: Mapping[tuple[int, int], JobMember] | None = None,
    owners: Mapping[str, int] | None = None,
) -> dict[int, JobMember]:
    return assign({each.pid: each for each in processes}, before or {}, OWNERS if owners is None else owners)


def roles(members: Mapping[int, JobMember]) -> dict[int, tuple[str, int | None]]:
    return {pid: (member.role.value, member.rank) for pid, member in sorted(members.items())}


def as_before(members: Mapping[int, JobMember]) -> dict[tuple[int, int], JobMember]:
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
    assert members[21] == JobMember("4", "0", Role.RANK, 0, 0, 2, by=BY_SLURM)
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
    assert members[23] == JobMember("4", "0", Role.RANK, 3, 1, 4, by=BY_SLURM)


def test_a_launcher_whose_ranks_have_gone_is_none_of_them() -> None:
    """`python -m torch.distributed.run` waits for other nodes when its own ranks have ended, and has only
    srun's variables."""

    def child(rank: int) -> dict[str, str]:
        return task(1, RANK=rank, LOCAL_RANK=rank - 2, WORLD_SIZE=4, TORCHELASTIC_RUN_ID="x")

    step, launcher = stepd(20, "0"), process(21, 20, "python", task(1))
    assert roles(belonging(step, launcher)) == {21: ("rank", 1)}, "so far it may well train itself"
    ranks = (process(22, 21, "python", child(2)), process(23, 21, "python", child(3)))
    before = as_before(belonging(step, launcher, *ranks))
    for _ in range(3):
        members = belonging(step, launcher, before=before)
        assert roles(members) == {21: ("helper", None)}
        before = as_before(members)
    again = (process(32, 21, "python", child(2)), process(33, 21, "python", child(3)))  # an elastic restart
    assert roles(belonging(step, launcher, *again, before=before)) == {
        21: ("helper", None), 32: ("rank", 2), 33: ("rank", 3),
    }  # fmt: skip


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
    assert members[21] == JobMember("4", "0", Role.RANK, 0, 0, 2, by=BY_SLURM)


def test_an_orphan_that_was_never_seen_belongs_by_its_environment_if_its_user_owns_the_job() -> None:
    step, rank = stepd(20, "0"), process(21, 20, "python", task(0))
    assert 30 in belonging(step, rank, process(30, 1, "python", task(0)))
    assert 30 not in belonging(step, rank, process(30, 1, "python", task(0), uid=USER + 1))
    assert roles(belonging(process(30, 1, "python", task(1)))) == {30: ("rank", 1)}


def test_before_its_environment_is_read_a_process_is_a_helper_of_its_step() -> None:
    assert belonging(stepd(20, "0"), process(21, 20, "python", None)) == {
        21: JobMember("4", "0", Role.HELPER, by=BY_SLURM)
    }


def test_the_control_group_names_the_job_where_slurmstepd_is_out_of_sight() -> None:
    members = belonging(process(21, 0, "python", task(0), cgroup=JobStep("4", "0")))
    assert roles(members) == {21: ("rank", 0)}


def test_processes_of_no_job_are_left_out() -> None:
    assert belonging(process(1, 0, "systemd", {}, uid=0), process(5, 1, "bash", {})) == {}


def test_the_external_step_has_no_ranks() -> None:
    assert roles(belonging(stepd(20, "extern"), process(21, 20, "sleep", task(0)))) == {21: ("helper", None)}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_1\n", JobStep("4", "0")),
        ("0::/system.slice/slurmstepd.scope/job_4/step_batch/slurm\n", JobStep("4", "batch")),
        ("9:freezer:/slurm_n1/uid_1000/job_4/step_extern\n8:pids:/\n0::/\n", JobStep("4", "extern")),
        (
            "4:memory:/slurm/uid_1000/job_12\n1:cpuset:/slurm/uid_1000/job_12/step_3/task_0\n",
            JobStep("12", "3"),
        ),
        ("0::/user.slice/user-1000.slice/session-4.scope\n", None),
        # Several slurmd on a host, another slice, a slurmd in a container, and a container inside of a job.
        ("0::/system.slice/n1_slurmstepd.scope/job_4/step_0/user/task_1\n", JobStep("4", "0")),
        ("0::/slurm.slice/slurmstepd.scope/job_4/step_1/user/task_0\n", JobStep("4", "1")),
        ("0::/docker/3fa9/system.slice/slurmstepd.scope/job_4/step_1/user/task_0\n", JobStep("4", "1")),
        ("3:cpuset:/kubepods/pod7/ab12/slurm/uid_1000/job_4/step_1/task_0\n", JobStep("4", "1")),
        ("0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_1/libpod-9c.scope\n", JobStep("4", "0")),
        ("0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_1 (deleted)\n", JobStep("4", "0")),
        ("0::/../../system.slice/slurmstepd.scope/job_4/step_0\n", JobStep("4", "0")),
        ("0::/system.slice/slurmstepd.scope/job_4/step_2+1/user/task_0\n", JobStep("4", "2")),  # srun A : B
    ],
)
def test_a_control_group_names_job_and_step(text: str, place: JobStep | None) -> None:
    assert parse_cgroup(text) == place


MINE = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    "path",
    [
        f"{MINE}/job_99/step_0/user/task_0",
        f"{MINE}/app.slice/slurmstepd.scope/job_99/step_0/user/task_0",
        f"{MINE}/system.slice/slurmstepd.scope/job_99/step_0/user/task_0",
        f"{MINE}/slurm/uid_1000/job_99/step_0",
        f"/docker/3fa9{MINE}/system.slice/slurmstepd.scope/job_99/step_0",
        "/user@1000.service/system.slice/slurmstepd.scope/job_99/step_0",
        "/system.slice/job_99/step_0",
        "/system.slice/mine.service/job_99",
        "/system.slice/slurmstepd.scope.d/job_99/step_0",
        "/slurmish/uid_1000/job_99",
        "/slurm/job_99/step_0",
        "/slurm/uid_me/job_99",
        "/system.slice/slurmstepd.scope/job_99x/step_0",
        "/system.slice/slurmstepd.scope/xjob_99/step_0",
        "/system.slice/slurmstepd.scope/system/slurmstepd",
    ],
)
def test_a_group_that_a_user_made_is_no_job(path: str) -> None:
    assert parse_cgroup(f"0::{path}\n") is None
    assert parse_cgroup(f"9:pids,freezer:{path}\n1:name=systemd:{path}\n") is None


def test_a_group_that_a_job_makes_below_its_own_does_not_make_it_another_job() -> None:
    inside = "0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_0/system.slice/slurmstepd.scope/job_99/step_0"
    assert parse_cgroup(inside) == JobStep("4", "0")


def test_a_named_hierarchy_of_a_user_does_not_outvote_slurms_groups() -> None:
    text = f"1:name=systemd:{MINE}/slurm/uid_1000/job_99/step_0\n8:memory:/slurm/uid_1000/job_4/step_1/task_0\n"
    assert parse_cgroup(text) == JobStep("4", "1")


@pytest.mark.parametrize(
    ("title", "place"),
    [
        ("slurmstepd: [4.0]", JobStep("4", "0")),
        ("slurmstepd: [4.batch]", JobStep("4", "batch")),
        ("slurmstepd: [4.extern]", JobStep("4", "extern")),
        ("/usr/sbin/slurmstepd", None),
    ],
)
def test_a_slurmstepd_names_its_step(title: str, place: JobStep | None) -> None:
    assert parse_stepd(title) == place


@pytest.mark.parametrize("source", RANK_SOURCES)
def test_every_launchers_variables_give_rank_local_rank_and_world_size(source: tuple[str, str, str]) -> None:
    def child(rank: int) -> dict[str, str]:
        return task(0) | {source[0]: str(rank + 2), source[1]: str(rank), source[2]: "4"}

    members = belonging(
        stepd(20, "0"), process(21, 20, "bash", task(0)), process(22, 21, "a.out", child(0)), process(23, 21, "a.out", child(1)),
    )  # fmt: skip
    assert roles(members) == {21: ("helper", None), 22: ("rank", 2), 23: ("rank", 3)}
    assert (members[23].local_rank, members[23].world_size) == (1, 4)


@pytest.mark.parametrize("launcher", ["hydra_pmi_proxy", "palsd", "flux-shell", "prted"])
def test_a_launchers_daemon_is_no_rank(launcher: str) -> None:
    members = belonging(
        stepd(20, "0"), process(21, 20, launcher, task(0)),
        process(22, 21, "python", task(0, PMI_RANK=0)), process(23, 21, "python", task(0, PMI_RANK=1)),
    )  # fmt: skip
    assert roles(members) == {21: ("helper", None), 22: ("rank", 0), 23: ("rank", 1)}


def test_ranks_of_deepspeed_by_ssh_are_found_by_their_control_group() -> None:
    extern = JobStep("4", "extern")

    def child(rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "LOCAL_RANK": str(rank - 8), "WORLD_SIZE": "16"}

    members = belonging(
        stepd(20, "extern"), process(21, 20, "sleep", {}, uid=0, cgroup=extern),
        process(30, 1, "sshd", {}, cgroup=extern), process(31, 30, "bash", {}, cgroup=extern),
        process(32, 31, "python", {}, cgroup=extern), process(33, 32, "python", child(8), cgroup=extern),
        process(34, 32, "python", child(9), cgroup=extern), process(35, 33, "pt_data_worker", child(8), cgroup=extern),
    )  # fmt: skip
    assert roles(members) == {
        21: ("helper", None), 30: ("helper", None), 31: ("helper", None), 32: ("helper", None),
        33: ("rank", 8), 34: ("rank", 9), 35: ("worker", 8),
    }  # fmt: skip
    assert members[34] == JobMember("4", "extern", Role.RANK, 9, 1, 16, by=BY_SLURM)


def test_somebodys_python_in_an_ssh_session_is_no_rank() -> None:
    extern = JobStep("4", "extern")
    members = belonging(
        stepd(20, "extern"),
        process(31, 1, "sshd", {}, cgroup=extern),
        process(32, 31, "python", {"SLURM_PROCID": "0", "SLURM_JOB_ID": "4"}, cgroup=extern),
    )
    assert roles(members) == {31: ("helper", None), 32: ("helper", None)}


@pytest.mark.parametrize(
    "wrapping",
    [
        ["unshare"], ["unshare", "tini"], ["starter-suid", "appinit"], ["apptainer", "starter"], ["enroot-nsenter"],
        ["bash", "conmon", "crun"], ["uv"], ["conda", "bash"], ["nsys", "nsys-launcher"], ["bwrap", "bwrap"], ["accelerate"],
    ],
)  # fmt: skip
def test_a_container_or_a_wrapper_around_the_trainer_is_a_helper(wrapping: list[str]) -> None:
    chain = [process(21 + depth, 20 + depth, comm, task(1)) for depth, comm in enumerate(wrapping)]
    inner = 21 + len(chain)
    members = belonging(stepd(20, "0"), *chain, process(inner, inner - 1, "python", task(1)))
    assert roles(members) == {each.pid: ("helper", None) for each in chain} | {inner: ("rank", 1)}


def test_an_environment_that_may_not_be_read_counts_as_the_parents() -> None:
    hidden = ProcessFacts(22, 220, 21, "python", USER, None, None, denied=True)
    below = ProcessFacts(23, 230, 22, "pt_data_worker", USER, None, None, denied=True)
    members = belonging(stepd(20, "0"), process(21, 20, "bash", task(1)), hidden, below)
    assert roles(members) == {21: ("helper", None), 22: ("rank", 1), 23: ("worker", 1)}
    unread = ProcessFacts(22, 220, 21, "python", USER, None, None)
    assert roles(belonging(stepd(20, "0"), process(21, 20, "bash", task(1)), unread))[22] == ("helper", None)


def test_torch_multiprocessing_and_ray_are_one_rank_with_workers() -> None:
    spawned = [process(22 + each, 21, "python", task(0)) for each in range(3)]
    members = belonging(stepd(20, "0"), process(21, 20, "python", task(0)), *spawned)
    assert [members[each.pid].role for each in spawned] == [Role.WORKER] * 3
    ray = belonging(
        stepd(20, "0"), process(21, 20, "ray", task(1)), process(22, 21, "raylet", task(1)),
        process(23, 22, "ray::RayTrainWo", task(1)), process(24, 22, "ray::IDLE", task(1)),
    )  # fmt: skip
    assert roles(ray) == {21: ("rank", 1), 22: ("worker", 1), 23: ("worker", 1), 24: ("worker", 1)}


RAY = [
    process(21, 20, "python", task(0)), process(22, 21, "gcs_server", task(0)), process(23, 21, "raylet", task(0)),
    process(24, 23, "ray::RayTrainWo", task(0)), process(25, 23, "ray::RayTrainWo", task(0)), process(26, 23, "ray::IDLE", task(0)),
    process(27, 25, "pt_data_worker", task(0)),
]  # fmt: skip
"""A driver that has started Ray on its own node, as it was seen with Ray 2.60."""


def seated(*processes: ProcessFacts, seats: Mapping[int, WorkerRank], before: Mapping[tuple[int, int], JobMember] | None = None) -> dict[int, JobMember]:  # fmt: skip
    return assign({each.pid: each for each in processes}, before or {}, OWNERS, {"4": seats})


def test_rays_workers_are_the_ranks_that_the_log_says_and_no_other_process_is_one() -> None:
    before = as_before(belonging(stepd(20, "0"), *RAY))
    members = seated(stepd(20, "0"), *RAY, seats={24: WorkerRank(1, 1, 2), 25: WorkerRank(0, 0, 2)}, before=before)
    nobody = dict.fromkeys((21, 22, 23, 26), ("helper", None))
    assert roles(members) == nobody | {24: ("rank", 1), 25: ("rank", 0), 27: ("worker", 0)}
    assert (members[24].local_rank, members[24].world_size) == (1, 2)


def test_a_worker_of_ray_that_the_log_has_not_named_yet_is_a_rank_without_a_number() -> None:
    members = seated(stepd(20, "0"), *RAY, seats={24: WorkerRank(0, 0, 2), 19: WorkerRank(1, 1, 2)})
    assert roles(members)[25] == ("rank", None)
    assert roles(members)[21] == ("helper", None)


def test_a_loader_of_a_dead_worker_of_ray_stays_that_ranks() -> None:
    seats = {24: WorkerRank(0, 0, 2), 25: WorkerRank(1, 1, 2)}
    before = as_before(seated(stepd(20, "0"), *RAY, seats=seats))
    left = [each for each in RAY if each.pid not in (25, 27)] + [process(27, 1, "pt_data_worker", task(0))]
    assert roles(seated(stepd(20, "0"), *left, seats=seats, before=before))[27] == ("worker", 1)


def test_in_a_container_a_worker_of_ray_is_known_by_the_pid_that_it_has_there() -> None:
    inside = [replace(each, own_pid=each.pid - 20) for each in RAY]
    members = seated(stepd(20, "0"), *inside, seats={4: WorkerRank(1, 1, 2), 5: WorkerRank(0, 0, 2)})
    assert roles(members)[24] == ("rank", 1)


def test_what_an_earlier_run_left_takes_no_seat_of_the_new_one() -> None:
    first = [stepd(20, "0"), process(21, 20, "python", task(0)), process(22, 21, "python", task(0))]
    before = as_before(belonging(*first))
    again = task(0, SLURM_RESTART_COUNT=1)
    old, new = process(22, 1, "python", task(0)), process(41, 40, "python", again)
    members = belonging(old, stepd(40, "0"), new, before=before)
    assert roles(members) == {22: ("helper", None), 41: ("rank", 0)}
    assert members[22].left_over
    assert not members[41].left_over
    later = belonging(old, new, before=as_before(members))  # the new step's slurmstepd is gone, too
    assert later[22].left_over


def test_a_rank_of_an_earlier_run_that_cannot_be_killed_takes_no_seat_either() -> None:
    place = JobStep("4", "0")
    old = process(21, 1, "python", task(0), cgroup=place)
    before = as_before(belonging(old))
    new = process(41, 40, "python", task(0, SLURM_RESTART_COUNT=1), cgroup=place)
    members = belonging(old, stepd(40, "0"), new, before=before)
    assert roles(members)[41] == ("rank", 0)
    assert roles(members)[21] == ("helper", None)


def test_a_count_of_restarts_that_a_user_made_up_makes_nobody_left_over() -> None:
    members = belonging(
        stepd(20, "0"), process(21, 20, "python", task(0)), process(22, 20, "python", task(1, SLURM_RESTART_COUNT=99)),
    )  # fmt: skip
    assert roles(members) == {21: ("rank", 0), 22: ("rank", 1)}
    assert not any(member.left_over for member in members.values())


@pytest.mark.parametrize(
    ("comm", "exe", "environ", "expected"),
    [
        ("python", "python3.11", {"RANK": "1"}, True),
        ("train.sh", "bash", {"SLURM_PROCID": "1"}, False),
        ("tee", "tee", {"SLURM_PROCID": "1"}, False),
        ("python", "python3.11", {"SLURM_JOB_ID": "1"}, False),
    ],
)
def test_who_may_hold_a_rank(comm: str, exe: str, environ: dict[str, str], expected: bool) -> None:
    assert may_hold_a_rank(comm, exe, environ) is expected


def test_names_of_launchers_are_as_the_kernel_cuts_them() -> None:
    assert not [name for name in NEVER_A_RANK if len(name) > 15 and name[:15] not in NEVER_A_RANK]


@pytest.mark.parametrize("uid", [0, USER, USER + 1, 65534])
@pytest.mark.parametrize("owners", [{}, {"4": USER}, {"4": USER + 1}, {"5": USER}, {"4": -1}])
@pytest.mark.parametrize("foreign", [False, True])
def test_an_environment_counts_for_the_owner_that_slurm_has_named_and_for_nobody_else(
    uid: int, owners: dict[str, int], foreign: bool
) -> None:
    """Before Slurm has said that the job is here it counts for nobody."""
    claims = replace(process(30, 1, "python", task(0), uid=uid), foreign=foreign)
    members = belonging(claims, owners=owners)
    assert (30 in members) == (owners.get("4") == uid and not foreign)
    if members:
        assert members[30].by == BY_CLAIM


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("owners", [{}, {"4": USER}])
def test_a_set_user_id_program_in_the_job_is_of_it_and_never_a_rank(foreign: bool, owners: dict[str, int]) -> None:
    step = stepd(20, "0")
    program = replace(process(21, 20, "passwd", {} if foreign else task(0)), foreign=foreign)
    inherits = replace(program, pid=22, start_ticks=220, environ=None, denied=True)
    members = belonging(step, program, inherits, owners=owners)
    assert {member.by for member in members.values()} == {BY_SLURM}
    assert (members[21].role is Role.RANK) != foreign
    assert members[22].role is not Role.RANK or not foreign
