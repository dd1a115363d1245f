"""Who holds a GPU without a job: real processes with open devices, made-up jobs and lists of NVML."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.gpu.orphan_processes import NVML_AGE_S, UNSEEN_JOB_GRACE_S
from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.knowledge.gpu_daemons import COMMS, MAX_NAME, is_daemon, is_system_service
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.protocol import EndProcess
from tests.builders.gpu_node import GPUS, GRACE_S, USER, Node
from tests.builders.requests import tasks

KERNEL_THREAD = 0x00200000


@pytest.fixture(scope="module")
def probes() -> Iterator[Children]:
    probes = Children(tasks("name_users"))
    yield probes
    probes.close()


@pytest.fixture
def node(tmp_path: Path, probes: Children) -> Iterator[Node]:
    node = Node(tmp_path, probes)
    yield node
    for process in node.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_what_outlives_its_job_is_told_of_after_the_grace_and_not_before(node: Node) -> None:
    pid = node.add(node.start("1", "0"), "7")
    assert node.tick(0, "7") == ()
    assert node.tick(100, "7") == ()
    assert node.tick(5) == ()
    assert node.tick(GRACE_S - 0.1) == ()
    (row,) = node.tick(0.2)
    assert (row.pid, row.job_id, row.uid, row.user) == (pid, "7", USER, str(USER))
    assert (row.minors, row.gpu_uuids) == ((0, 1), ("GPU-a", "GPU-b"))
    assert (row.listed_by_nvml, row.memory_bytes) == (False, None)
    assert row.orphan_for_s == pytest.approx(GRACE_S + 0.1)
    assert row.start_ticks == read_stat(pid).start_ticks
    assert 0 <= row.age_s < 60


def test_a_job_that_runs_again_here_takes_its_processes_back(node: Node) -> None:
    node.add(node.start("0"), "7")
    node.tick(0, "7")
    node.tick(1)
    assert node.tick(GRACE_S) != ()
    assert node.tick(1, "7") == ()
    assert node.tick(1) == ()  # and the grace begins anew
    assert node.tick(GRACE_S) != ()


def test_what_an_earlier_run_left_is_an_orphan_although_the_job_runs(node: Node) -> None:
    pid = node.add(node.start("0"), "7", left_over=True)
    assert [row.pid for row in node.rows_after("7")] == [pid]


def test_without_word_of_the_jobs_nobody_is_an_orphan(node: Node) -> None:
    node.add(node.start("0"), "7")
    stranger = node.add(node.start("0"), uid=USER + 1)
    node.tick(0, unknown=True)
    rows = node.tick(500, unknown=True)
    assert [(row.pid, row.orphan_for_s) for row in rows] == [(stranger, None)]


def test_a_job_that_the_controller_has_not_named_yet_has_a_longer_grace(node: Node) -> None:
    node.add(node.start("0"), "8")
    assert node.tick(0, "7") == ()
    assert node.tick(UNSEEN_JOB_GRACE_S - 1, "7") == ()
    assert node.tick(2, "7") != ()


NOT_ORPHANS: dict[str, Callable[[Node], object]] = {
    "a rank of a running job": lambda node: node.add(node.start("0"), "9"),
    "no GPU": lambda node: node.add(node.start(), "7"),
    "the control device": lambda node: node.add(node.start("ctl", "-uvm", "-modeset"), "7"),
    "root's": lambda node: node.add(node.start("0"), uid=0),
    "a kernel thread": lambda node: node.add(node.start("0"), flags=KERNEL_THREAD),
    "a daemon": lambda node: node.add(node.start("0"), uid=120, comm="nvidia-persiste"),
    "not identified": lambda node: node.add(node.start("0"), identified=False),
    "perhaps of its user's job": lambda node: (
        node.add(node.start("0")),
        node.add(node.start(), "9", uid=USER),
    ),
    "says it is of a job nobody saw, its user has another": lambda node: (
        node.add(node.start("0"), "6"),
        node.add(node.start(), "9", uid=USER),
    ),
}


@pytest.mark.parametrize("case", NOT_ORPHANS)
def test_nobody_is_accused_who_may_be_there(node: Node, case: str) -> None:
    NOT_ORPHANS[case](node)
    assert node.rows_after("9") == ()


ORPHANS: dict[str, Callable[[Node], int]] = {
    "root's, from a job": lambda node: node.add(node.start("0"), "7", uid=0),
    "a user's with a daemon's name": lambda node: node.add(node.start("0"), comm="nvidia-persiste"),
    "a daemon's name, from a job": lambda node: node.add(node.start("0"), "7", uid=0, comm="dcgmi"),
    "from no job": lambda node: node.add(node.start("0")),
    "in the control group of a job": lambda node: node.add(node.start("0"), "7", cgroup=True, identified=False),
}


@pytest.mark.parametrize("case", ORPHANS)
def test_these_are_told_of(node: Node, case: str) -> None:
    pid = ORPHANS[case](node)
    assert [row.pid for row in node.rows_after("9")] == [pid]


def with_list(pid: int, size: int | None) -> tuple[Gpu, ...]:
    return (Gpu(uuid="GPU-a", index=1, minor=0, pids=(pid,), process_memory_bytes=(size,)), GPUS[1])


def test_what_nvml_lists_has_its_memory_told(node: Node) -> None:
    pid = node.add(node.start("0"), "7")
    (row,) = node.rows_after(gpus=with_list(pid, 5 << 30))
    assert (row.listed_by_nvml, row.memory_bytes, row.gpu_uuids) == (True, 5 << 30, ("GPU-a",))


def test_a_list_older_than_its_process_accuses_nobody(node: Node) -> None:
    pid = node.add(node.start(), "7")  # the number is another's now, who has no GPU open
    assert node.rows_after(gpus=with_list(pid, 1)) == ()
    gone = node.started[0]
    gone.kill()
    gone.wait()
    del node.table[pid]
    assert node.rows_after(gpus=with_list(pid, 1)) == ()


def test_where_links_may_not_be_read_an_old_process_on_the_list_counts_and_a_young_one_does_not(node: Node) -> None:
    pid = node.add(node.start("0"), "7")

    node.holders.devices_of = lambda threads: [None for _ in threads]
    assert node.rows_after(gpus=with_list(pid, 1)) == ()
    entry = node.table.pop(pid)
    long_ago = entry.known.start_ticks - int((NVML_AGE_S + 60) * os.sysconf("SC_CLK_TCK"))
    known = ProcessFacts(pid, long_ago, 1, "python", USER, None, {})
    node.table[pid] = Entry(known, entry.stat, member=entry.member)
    assert [row.pid for row in node.rows_after(gpus=with_list(pid, 1))] == [pid]


def test_another_namespaces_numbers_mean_nothing(node: Node) -> None:
    node.holders.trusts_nvml = False
    pid = node.add(node.start("0"), "7")
    (row,) = node.rows_after(gpus=with_list(pid, 1))
    assert (row.listed_by_nvml, row.minors) == (False, (0,))


def test_a_pid_that_comes_back_begins_anew(node: Node) -> None:
    pid = node.add(node.start("0"), "7")
    node.tick(0, "7")
    node.tick(1)
    assert node.tick(GRACE_S) != ()
    old = node.table[pid]
    known = ProcessFacts(pid, old.known.start_ticks + 1, 1, "python", USER, None, {})
    node.table[pid] = Entry(known, old.stat, member=old.member)
    assert node.tick(1) == ()


def test_the_descriptors_of_a_process_whose_main_thread_has_ended_are_found(node: Node) -> None:
    code = (
        "import ctypes, threading, time\n"
        f"f = open({node.devices!r} + '1')\n"
        "threading.Thread(target=time.sleep, args=(99,)).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    node.started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(100):
        if read_stat(process.pid).state == "Z":
            break
        time.sleep(0.02)
    pid = node.add(process.pid, "7")
    node.table[pid].stat = read_stat(pid)
    assert node.table[pid].stat.state == "Z"
    assert [row.minors for row in node.rows_after()] == [(1,)]


def test_many_strangers_take_turns(node: Node) -> None:
    for _ in range(12):
        node.add(node.start(*["ctl"] * 20))
    pid = node.add(node.start(*["ctl"] * 20, "1"))
    for _ in range(12):
        rows = node.tick(20)
    assert [row.pid for row in rows] == [pid]


def test_the_same_process_is_not_read_in_every_tick(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add(node.start("0"), "7")
    real, read = os.listdir, []

    def count(path: str) -> list[str]:
        read.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", count)
    for _ in range(24):
        node.tick(5)
    assert 1 < len(read) <= 6


def test_what_lets_go_of_its_gpu_is_told_of_no_more(node: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = (
        f"import os, time\nf = open({node.devices!r} + '0')\nprint(flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "f.close()\nprint(flush=True)\ntime.sleep(99)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    node.started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    node.add(process.pid, "7")
    assert len(node.rows_after()) == 1
    go.touch()
    process.stdout.readline()
    node.tick(60)
    assert node.tick(60) == ()


def test_a_node_without_gpus_reads_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for minor in (0, 1):
        os.unlink(f"{node.devices}{minor}")
    node.add(node.start("ctl"), "7")

    def refuse(path: str) -> list[str]:
        raise AssertionError(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert node.rows_after(gpus=()) == ()


SERVICE = "0::/system.slice/nvidia-dcgm.service\n"


@pytest.mark.parametrize("comm", sorted(COMMS))
def test_a_daemon_is_one_as_root_or_as_a_service_and_not_as_a_user(comm: str) -> None:
    assert len(comm) <= MAX_NAME
    assert is_daemon(comm, 0, "")
    assert is_daemon(comm, 120, "")
    assert is_daemon(comm, 1000, SERVICE)
    assert not is_daemon(comm, 1000, "0::/user.slice/user-1000.slice/session-2.scope\n")
    assert not is_daemon(comm, -1, "")
    assert not is_daemon("python", 0, SERVICE)


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (SERVICE, True),
        ("12:pids:/system.slice/dcgm.service\n0::/\n", True),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", False),
        ("0::/user.slice/user-1000.slice/system.slice/x.service\n", False),
        ("broken", False),
    ],
)
def test_what_a_system_service_is(cgroup: str, expected: bool) -> None:
    assert is_system_service(cgroup) is expected


# ------------------------------------------------------------------------------------------------ may it be ended


def asked(pid: int, job: str = "7") -> EndProcess:
    start = read_stat(pid).start_ticks
    return EndProcess(
        id="e",
        boot_id="b",
        pid=pid,
        start_ticks=start,
        uid=USER,
        comm="python",
        job_id=job,
        minors=(0,),
        how="term",
    )


def objection(node: Node, command: EndProcess, *running: str, unknown: bool = False) -> str:
    here = None if unknown else frozenset(running)
    return node.holders.objection(command, node.table, frozenset(), here) or ""


def test_how_surely_a_holder_came_from_its_job_is_told(node: Node) -> None:
    seen, said, grouped = (node.start("0") for _ in range(3))
    node.add(seen, "7")
    node.tick(0, "7")
    node.add(said, "8")
    node.add(grouped, "9", cgroup=True)
    rows = {row.pid: (row.was_in_job, row.in_job_group) for row in node.rows_after()}
    assert rows == {seen: (True, False), said: (False, False), grouped: (True, True)}


def test_nothing_speaks_against_ending_what_is_left_of_a_job_that_is_over(node: Node) -> None:
    pid = node.add(node.start("0"), "7")
    node.add(node.start("0"), "8", uid=USER + 1)
    assert objection(node, asked(pid), "8") == ""


def test_the_agent_objects_while_it_does_not_know_the_jobs_or_the_job_is_there(node: Node) -> None:
    pid = node.add(node.start("0"), "7")
    assert "is not known" in objection(node, asked(pid), unknown=True)
    assert "Slurm has job 7 here" in objection(node, asked(pid), "7")
    assert "it is part of job 8" in objection(node, asked(node.add(pid, "8")), "8")


def test_a_new_job_of_the_same_user_protects_all_that_no_control_group_ties_to_the_old_one(
    node: Node,
) -> None:
    pid = node.add(node.start("0"), "7")
    node.add(node.start("1"), "8")
    assert "its user has job 8 here now" in objection(node, asked(pid), "8")
    node.add(pid, "7", cgroup=True)
    assert objection(node, asked(pid), "8") == ""


def test_the_agent_never_lets_itself_be_ended(node: Node) -> None:
    pid = node.add(node.start("0"), "7")
    assert node.holders.objection(asked(pid), node.table, frozenset({pid}), frozenset()) == "it is the system's or ours"
