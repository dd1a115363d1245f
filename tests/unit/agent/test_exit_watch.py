"""That a rank has ended is known at once, of ranks alone, and once."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.agent.processes.exit_watch import Exits
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import Process, Role

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(SLEEPER) for _ in range(3)]
    yield started
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def exits() -> Iterator[Exits]:
    made = Exits(is_there)
    yield made
    made.follow(())
    assert made.filenos() == []


def is_there(pid: int, start_ticks: int) -> bool:
    return read_stat(pid).start_ticks == start_ticks


def rank(child: subprocess.Popen[bytes], role: Role = Role.RANK) -> Process:
    return Process(
        pid=child.pid, start_ticks=read_stat(child.pid).start_ticks, job_id="7", role=role, comm="python", state="S", uid=0,
        rank=0,
    )  # fmt: skip


def wait_for(exits: Exits) -> bool:
    select.select(exits.filenos(), [], [], 30)
    return exits.any_ended(clock.monotonic())


def test_the_end_of_a_rank_wakes_whoever_waits_and_is_told_once(
    exits: Exits, children: list[subprocess.Popen[bytes]]
) -> None:
    ranks = [rank(child) for child in children]
    exits.follow(ranks)
    assert len(exits.filenos()) == 3
    assert not exits.any_ended(clock.monotonic())
    children[1].kill()
    assert wait_for(exits)  # a zombie has ended, too: nobody has waited for it yet
    assert not exits.any_ended(clock.monotonic())
    assert len(exits.filenos()) == 2
    exits.follow(ranks)  # the list of a moment ago
    assert len(exits.filenos()) == 2
    exits.follow([each for each in ranks if each.pid != children[1].pid])
    assert not exits.any_ended(clock.monotonic())


def test_workers_zombies_and_processes_that_took_over_a_pid_are_not_watched(
    exits: Exits, children: list[subprocess.Popen[bytes]]
) -> None:
    first, second, third = (rank(child) for child in children)
    exits.follow(
        [
            replace(first, role=Role.WORKER),
            replace(second, state="Z"),
            replace(third, start_ticks=third.start_ticks - 1),
            replace(third, pid=2**22 - 1),
        ]
    )
    assert exits.filenos() == []
    assert not exits.any_ended(clock.monotonic())


def test_descriptors_of_ranks_that_are_not_listed_any_more_are_closed(
    exits: Exits, children: list[subprocess.Popen[bytes]]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        exits.follow([rank(child) for child in children])
        exits.follow([])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_that_refuses_costs_nothing_but_the_hurry(
    exits: Exits, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(pid: int, flags: int = 0) -> int:
        asked.append(pid)
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    for _ in range(3):
        exits.follow([rank(children[0])])
    assert (exits.filenos(), len(asked)) == ([], 1)


def test_ranks_of_one_user_that_end_all_the_time_are_news_once_in_a_while_and_another_users_at_once() -> None:
    exits, news = Exits(is_there), []
    for number in range(6):
        mine, other = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
        rows = [rank_of(mine.pid, 1500), *([rank_of(other.pid, 1501)] if number == 4 else [])]
        exits.follow(rows)
        for each in (mine, other):
            each.kill()
            each.wait(20)
        news.append(exits.any_ended(100.0 + number))
    assert news == [True, False, False, False, True, False]
    exits.follow(())


def rank_of(pid: int, uid: int) -> Process:
    start = read_stat(pid).start_ticks
    return Process(pid=pid, start_ticks=start, job_id="4", role=Role.RANK, comm="python", state="S", uid=uid, rank=0)
