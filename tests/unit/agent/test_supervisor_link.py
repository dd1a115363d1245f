"""The agent's end of a supervisor's connection: what is reported of it, what it is sent, and who is disconnected."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.proc.entry import JobStep
from slurm_watchdog.agent.processes import supervisor_link
from slurm_watchdog.base import clock
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.supervisor import (
    MAX_LINE_BYTES,
    ORDER_LIFETIME_S,
    FromAgent,
    OrderAnswer,
    RestartOrder,
    SupervisorState,
)
from tests.builders.supervisor_links import JOB, RUN, STATUS, Peer, link_at, rows, until

ORDER = RestartOrder(decision="d1", step_id="0", start=1, avoid=("n1",), why="it hangs")
DIES = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.stdin.buffer.read()); print(flush=True); time.sleep(60)"


def test_a_status_is_reported_with_its_age_and_gets_old_when_nothing_comes(tmp_path: Path) -> None:
    link, peer = link_at(tmp_path), Peer(tmp_path)
    assert rows(link) == []
    peer.say()
    (row,) = until(link, bool, "the status")
    assert (row.job_id, row.restarts, row.status, row.read_age_s) == (JOB, RUN, STATUS, 0.0)
    time.sleep(0.3)
    (row,) = rows(link)
    assert 0.2 < row.age_s < 5
    assert row.read_age_s == 0.0, "it is connected, and silent: stopped, perhaps"
    link.close()


def test_several_lines_at_once_are_the_last_one_and_half_a_line_is_waited_for(tmp_path: Path) -> None:
    link, peer = link_at(tmp_path), Peer(tmp_path)
    for starts in range(1, 20):
        peer.say(replace(STATUS, starts=starts))
    (row,) = until(link, lambda found: found and found[0].status.starts == 19, "the last status")
    peer.sock.sendall(b'{"restarts": 2, ')
    assert rows(link)[0].status == row.status
    link.close()


def test_an_order_is_handed_over_at_once_and_to_one_that_connects_later_with_its_first_date(tmp_path: Path) -> None:
    link, peer = link_at(tmp_path), Peer(tmp_path)
    peer.say()
    until(link, bool, "the status")
    assert peer.heard(link) == FromAgent(beside=0)
    link.give(JOB, RUN, ORDER, clock.monotonic())
    first = peer.heard(link)
    assert first.order == ORDER
    assert abs(first.given_at - clock.wall()) < 5
    link.give(JOB, RUN, ORDER, clock.monotonic())
    assert peer.heard(link) == first, "the same order, and no younger"
    peer.sock.close()
    again = Peer(tmp_path)
    again.say()
    assert (again.heard(link), again.heard(link)) == (FromAgent(beside=0), first)
    link.withdraw("d1", clock.monotonic())
    assert again.heard(link) == FromAgent(withdrawn="d1")
    link.close()


@pytest.mark.parametrize("how", ["withdrawn", "too old", "of another run"])
def test_an_order_that_does_not_count_is_handed_to_no_one(tmp_path: Path, how: str) -> None:
    link = link_at(tmp_path)
    link.give(
        JOB,
        RUN - 1 if how == "of another run" else RUN,
        ORDER,
        clock.monotonic() - (ORDER_LIFETIME_S + 1) * (how == "too old"),
    )
    if how == "withdrawn":
        link.withdraw("d1", clock.monotonic())
    peer = Peer(tmp_path)
    peer.say()
    until(link, bool, "the status")
    assert peer.heard(link) == FromAgent(beside=0)
    rows(link)
    with pytest.raises(TimeoutError):
        peer.heard()
    link.close()


def test_two_of_one_run_learn_of_each_other_and_the_one_that_is_left_learns_that_it_is_alone(tmp_path: Path) -> None:
    link, one, other = link_at(tmp_path), Peer(tmp_path), Peer(tmp_path)
    one.say()
    until(link, bool, "the first")
    assert one.heard(link) == FromAgent(beside=0)
    other.say()
    assert other.heard(link) == FromAgent(beside=os.getpid())
    assert one.heard(link) == FromAgent(beside=os.getpid())
    other.say(replace(STATUS, state=SupervisorState.OVER))
    other.sock.close()
    until(link, lambda found: True, "the end of the second")
    assert one.heard(link) == FromAgent(beside=0)
    link.close()


def test_of_one_that_has_exited_its_last_word_stays_and_is_known_to_be_the_last(tmp_path: Path) -> None:
    """Where it took an order and starts nothing more, the ladder goes on; of one that may live it does not know."""
    said = b'{"restarts":2,"status":{"protocol":1,"state":"running","order":"d1","answer":"taken"}}\n'
    link = link_at(tmp_path)
    (known,) = link.entries.values()
    with subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path / "agent")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        link.entries = {child.pid: known}
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(said)
        child.stdin.close()
        assert child.stdout.readline()
        (row,) = until(link, bool, "its status")
        assert row.status.answer is OrderAnswer.TAKEN
        child.kill()
    time.sleep(0.3)
    (row,) = rows(link)
    assert (row.status.order, row.read_age_s) == ("d1", 0.0)
    assert row.age_s > 0.2
    link.close()


def test_of_one_that_is_disconnected_and_lives_it_is_not_known_what_it_has_said_since(tmp_path: Path) -> None:
    link, peer = link_at(tmp_path), Peer(tmp_path)
    peer.say()
    until(link, bool, "the status")
    peer.sock.close()
    until(link, lambda found: found[0].read_age_s > 0.2, "its last word to get old")
    link.close()


def test_what_is_of_another_run_is_no_word_of_this_one_and_a_job_that_left_is_forgotten(tmp_path: Path) -> None:
    link, peer = link_at(tmp_path), Peer(tmp_path)
    peer.say(restarts=RUN - 1)
    time.sleep(0.2)
    assert rows(link) == []
    peer.say()
    until(link, bool, "the status of this run")
    link.jobs.hear([JobWatch(job_id=JOB, restarts=RUN + 1, uid=os.getuid())])
    assert rows(link) == []
    assert peer.is_open
    link.close()


@pytest.mark.parametrize(
    "data",
    [b"x" * (MAX_LINE_BYTES * 2), b"garbage\n", b"{}\n", b"[" * 60_000 + b"\n", b'{"restarts":0,"status":{"protocol":9,"state":"running"}}\n'],
    ids=["endless", "garbage", "empty", "deep", "protocol"],
)  # fmt: skip
def test_what_says_nothing_is_disconnected_with_the_reason_in_the_log(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    link, peer = link_at(tmp_path), Peer(tmp_path)
    rows(link)
    peer.sock.settimeout(0.5)
    try:
        peer.sock.sendall(data)
    except OSError:
        pass  # more than the agent takes
    for _ in range(4):
        rows(link)
    assert not peer.is_open
    assert f"uid {os.getuid()}" in caplog.text
    link.close()


def test_a_job_that_is_not_known_yet_is_asked_for_again(tmp_path: Path) -> None:
    link = link_at(tmp_path, here={})
    peer = Peer(tmp_path)
    peer.say()
    time.sleep(0.2)
    assert rows(link) == []
    assert peer.is_open
    link.entries = (
        link_at(tmp_path / "..", here={os.getppid(): JOB}).entries
        if False
        else {  # an ancestor's is enough
            os.getppid(): type("E", (), {"member": None, "known": type("K", (), {"stepd": JobStep(JOB, "batch")})})()
        }
    )
    until(link, bool, "the job of its ancestor")
    link.close()


def test_a_socket_that_was_removed_is_made_again_and_without_a_directory_it_is_said(tmp_path: Path) -> None:
    link = link_at(tmp_path)
    (tmp_path / "agent").unlink()
    rows(link)
    Peer(tmp_path).say()
    until(link, bool, "a connection to the new one")
    link.close()
    missing = supervisor_link.SupervisorLink(str(tmp_path / "gone" / "agent"), link.jobs, {})
    rows(missing)
    assert "ENOENT" in missing.problem


def test_changes_are_news_and_one_that_changes_all_the_time_is_none_any_more(tmp_path: Path) -> None:
    link, peer = link_at(tmp_path), Peer(tmp_path)
    news = 0
    for number in range(40):
        peer.say(replace(STATUS, starts=number))
        time.sleep(0.01)
        link._rests_until = 0.0
        link.serve(clock.monotonic())
        news += link.has_news
        link.has_news = False
    assert 4 <= news <= 6
    link.close()
