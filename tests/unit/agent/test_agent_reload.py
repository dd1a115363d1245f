"""SIGHUP at the agent: the file is taken whole or not at all; and what one agent leaves is what the next one knows."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.children.become_user import Kind
from slurm_watchdog.agent.children.children import Children, HungChild
from slurm_watchdog.agent.children.requests import Follow, WorkerState
from slurm_watchdog.agent.delivery.spool import Spool, Waiting
from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses, OrphanMemory
from slurm_watchdog.agent.logs.job_logs import LogMemory
from slurm_watchdog.agent.memory import FILE, LIFETIME_S, Memory, MemoryFile
from slurm_watchdog.agent.proc.entry import Entry, JobMember, JobStep, ProcessFacts, Stat, parse_status
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory, SeenCall
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.reader import ProcessMemory
from slurm_watchdog.agent.reload import COMMANDS_S, DEADLINE_S, Reload
from slurm_watchdog.agent.settings import NO_CONTROLLER, Settings, settings_of
from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.agent.tasks import TASKS
from slurm_watchdog.agent.validate_config import why_not
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.model.observations import Event, EventKind, Gpu, LogFile, Process, Role
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.report import Report
from tests.builders.gpu_node import GRACE_S, Node
from tests.builders.requests import plain, plain_request, tasks

MODEST = settings_of(parse_config("agent: {controller_url: 'http://m:1', state_directory: ''}"))


# -- what is refused, and what is taken ------------------------------------------------------------------------


class Place:
    """A file that is reloaded, and how often certificates were read again."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (directory / "bin").mkdir()
        (directory / "bin/munge").write_text("#!/bin/sh\n")
        (directory / "bin/munge").chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}/bin:{os.environ['PATH']}")
        self.file, self.secrets = directory / "c.yaml", 0
        self.write("5s")
        self.reload = Reload(str(self.file), self.settings(), self._look)

    def write(self, interval: str, more: str = "") -> None:
        self.file.write_text(
            f"agent: {{controller_url: 'http://m:1', interval: {interval}, state_directory: ''}}\n{more}"
        )

    def settings(self) -> Settings:
        return settings_of(parse_config(self.file.read_text()))

    def _look(self) -> None:
        self.secrets += 1

    def settle(self) -> None:
        """Until there is nothing more to follow."""
        end = time.monotonic() + 60
        while self.reload.due_at(0.0) < float("inf"):
            assert time.monotonic() < end
            time.sleep(0.02)
            self.reload.follow(clock.monotonic())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_a_file_with_errors_changes_nothing_and_each_is_logged(
    place: Place, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    place.file.write_text("mode: obey\nagent: {intervall: 5s}\n")
    place.reload.ask(clock.monotonic())
    place.settle()
    assert (place.reload.settings, place.secrets) == (None, 0)
    assert "not taken; the one before stays, whole" in caplog.text
    errors = capfd.readouterr().err
    assert "c.yaml:1: mode" in errors
    assert "intervall" in errors


def test_a_check_that_does_not_end_is_a_refusal(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    os.unlink(place.file)
    os.mkfifo(place.file)  # whoever reads it waits
    now = clock.monotonic()
    place.reload.ask(now)
    place.reload.follow(now + DEADLINE_S - 1)
    assert place.reload.due_at(0.0) < float("inf")
    place.reload.follow(now + DEADLINE_S + 1)
    assert place.reload.settings is None
    assert "was not checked within 60 s" in caplog.text
    os.unlink(place.file)
    place.write("7s")
    place.reload.ask(clock.monotonic())
    place.settle()
    assert place.reload.settings is not None, "and the next one is looked at"


def test_settings_that_are_the_same_take_no_new_start_and_secrets_are_read_again(place: Place) -> None:
    place.write("5s", "mode: act\n")
    place.reload.ask(clock.monotonic())
    place.settle()
    assert (place.reload.settings, place.secrets) == (None, 1)


def test_a_file_that_was_written_again_while_it_was_checked_is_checked_again(place: Place) -> None:
    place.write("7s")
    place.reload.ask(clock.monotonic())
    place.write("8s")
    place.reload.ask(clock.monotonic())
    place.settle()
    assert place.reload.settings is not None
    assert place.reload.settings.agent.interval == 8.0


def test_a_new_start_waits_for_commands_under_way_and_not_for_ever(place: Place) -> None:
    assert not place.reload.wants_restart(0.0, busy=False)
    place.write("7s")
    place.reload.ask(clock.monotonic())
    place.settle()
    since = place.reload.since
    assert not place.reload.wants_restart(since, busy=True)
    assert place.reload.wants_restart(since, busy=False)
    assert place.reload.wants_restart(since + COMMANDS_S, busy=True)


def test_without_a_file_secrets_alone_are_read_again() -> None:
    secrets = list[str]()
    reload = Reload("", MODEST, lambda: secrets.append("read"))
    reload.ask(1.0)
    assert (reload.due_at(1.0), secrets) == (float("inf"), ["read"])


def test_what_would_keep_an_agent_from_working_is_found_before(place: Place, tmp_path: Path) -> None:
    def of(text: str) -> Settings:
        return settings_of(parse_config(text))

    assert why_not(of("agent: {state_directory: ''}")) == [NO_CONTROLLER]
    tls = f"security: {{tls_directory: {tmp_path}}}\nagent: {{controller_url: 'https://m:1'}}"
    assert why_not(of(tls))[0].startswith("expert.security.tls_directory: ")
    assert why_not(place.settings()) == []
    (tmp_path / "bin/munge").unlink()
    os.environ["PATH"] = f"{tmp_path}/bin"  # put back with the fixture
    assert "munge is not installed" in why_not(place.settings())[0]


# -- what goes over --------------------------------------------------------------------------------------------


def over(memory: Memory, directory: Path, later_s: float = 1.0, boot_id: str = "b") -> Memory:
    """What the next agent has of what one leaves."""
    MemoryFile(str(directory), "b", "n1").write(memory, 100.0)
    found = MemoryFile(str(directory), boot_id, "n1").take(100.0 + later_s)
    return replace(found, boot_id="", node="", written_at=0.0)


def test_all_that_an_agent_knew_comes_back_as_it_was_odd_names_included(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = b"/scratch/\xff\xfe.log".decode(errors="surrogateescape")
    known = ProcessFacts(
        7, 70, 1, "python", 1000, JobStep("4", "0"), {"RANK": "3"}, cwd=odd, collective_timeout=(600.0, True)
    )
    stat = Stat("python", "D", 1, 0, 5, 70)
    seen = SeenCall("1 0x3 \xff", "D", "rpc_wait", "write", odd, 1, 2)
    track = BlockedCallHistory(seen, 100.0, 101.0, sightings=9)
    jobs = JobsHere(awaiting_checkpoints={"4"})
    jobs.hear((JobWatch(job_id="4", uid=1000, restarts=0),), ("4",), 98.0)
    memory = Memory(
        kernel_log=7,
        hung=(HungChild(key=f"files:{odd}:1000", uid=1000, kind=Kind.FILES, asked_at=1.0, pid=9),),
        reports=(Waiting(5.0, 3, b'{"a":1}'),),
        processes=ProcessMemory(
            entries=(Entry(known, stat, 5, 1, JobMember("4", "0", Role.RANK, 3), 90.0),),
            stuck={7: "look:1000:7"},
            tracks=(((7, 70, 7), track),),
        ),
        logs=LogMemory(
            rows=((LogFile(job_id="4", path=odd, offset=2**40), 100.0),),
            recent=((99.0, Event(kind=EventKind.PROGRESS, job_id="4", age_s=1.0, source=odd)),),
        ),
        orphans=OrphanMemory(since=(((7, 70), 50.0),), seen_running=("4",)),
        jobs=jobs,
        commands=("c1",),
        controller_id="k",
    )
    assert over(memory, tmp_path) == memory
    assert caplog.text == ""


def test_what_one_agent_left_counts_once_and_on_the_same_boot_of_the_same_node(tmp_path: Path) -> None:
    memory = Memory(kernel_log=7, commands=("c1",))
    assert over(memory, tmp_path) == memory
    assert MemoryFile(str(tmp_path), "b", "n1").take(102.0).commands == ()
    assert over(memory, tmp_path, boot_id="other") == Memory() == over(memory, tmp_path, boot_id="")
    assert MemoryFile(str(tmp_path), "b", "n2").take(101.0) == Memory()
    assert MemoryFile("", "b", "n1").take(101.0) == Memory()


def test_of_what_is_old_the_position_in_the_kernel_log_alone_counts(tmp_path: Path) -> None:
    memory = Memory(kernel_log=7, commands=("c1",))
    assert over(memory, tmp_path, LIFETIME_S + 1) == Memory(kernel_log=7)


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "{", "[]", "null", "3", "[" * 4000, "\x00", '{"boot_id": "b"}', '{"boot_id": "b", "node": "n1", "kernel_log": "7"}',
     '{"boot_id": "b", "node": "n1", "kernel_log": -7}', '{"boot_id": "b", "node": "n1", "kernel_log": true}',
     '{"boot_id": "b", "node": "n1", "kernel_log": 1e300}', '{"boot_id": "other", "node": "n1", "kernel_log": 1}'],
)  # fmt: skip
def test_what_is_no_memory_is_a_start_like_any_other(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    found = MemoryFile(str(tmp_path), "b", "n1").take(1.0)
    assert replace(found, boot_id="", node="") == Memory()


def test_a_part_that_another_release_wrote_differently_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"boot_id": "b", "node": "n1", "hung": 7, "commands": ["c1"], "jobs": {"watch": []}}
    (tmp_path / FILE).write_text(json.dumps({**text, "sums": {"processes": {"3": {"of": "another release"}}}}))
    found = MemoryFile(str(tmp_path), "b", "n1").take(1.0)
    assert found.commands == ("c1",), "no command is done twice for what else has another form"
    assert (found.hung, found.sums) == ((), NodeSums())
    assert caplog.text.count("starts without that") == 3


def test_the_file_is_replaced_in_one_step_for_no_other_eyes_and_no_link_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, victim = MemoryFile(str(tmp_path / "new"), "b", "n1"), tmp_path / "victim"
    file.write(Memory(kernel_log=1), 1.0)
    assert Path(file.path).stat().st_mode & 0o777 == 0o600
    victim.write_text("precious")
    Path(f"{file.path}.new").symlink_to(victim)
    file.write(Memory(kernel_log=2), 2.0)
    assert victim.read_text() == "precious"
    assert file.take(3.0).kernel_log == 2
    broken = MemoryFile(str(victim), "b", "n1")
    broken.write(Memory(), 1.0)
    broken.write(Memory(), 1.0)
    assert caplog.text.count("cannot be written") == 1


def test_reports_that_wait_go_over_within_the_bounds_of_the_new_spool() -> None:
    before = Spool(1000, 60.0)
    for number in range(5):
        before.put(number, b"x" * 10, float(number))
    left = before.left()
    after = Spool(30, 60.0)
    after.take_back(left, 5.0)
    assert ([each.sequence for each in after.left()], after.size, after.dropped) == ([2, 3, 4], 30, 2)


NAMED = "import signal; open('/proc/self/comm', 'w').write('swd files'); print(flush=True); signal.pause()"


def wait_in_d(args: object, worker: WorkerState) -> None:
    """In place of a call that does not return: nothing ends it but a signal."""
    signal.pause()


def test_what_a_child_hangs_on_is_not_touched_by_the_next_agent_until_that_child_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        now = clock.monotonic()
        left = HungChild(key="files:/shared:1000", uid=1000, kind=Kind.FILES, asked_at=now - 500, pid=child.pid)
        probes = Children(TASKS, former=[left])
        try:
            probes.poll(now)
            assert probes.hung_since("files:/shared:1000", now) == pytest.approx(500)
            assert probes.ask("files:/shared:1000", Follow([]), 1.0, now, lambda answer: None, uid=1000) is None
            assert probes.unanswered(now) == (left,), "nor by the one after that"
            child.kill()
            child.wait()
            probes.poll(clock.monotonic())
            assert probes.is_free("files:/shared:1000")
            assert "it is free again" in caplog.text
        finally:
            probes.close()


def test_a_program_that_a_child_could_not_end_counts_for_the_next_agent_while_it_is_there_in_d() -> None:
    now = clock.monotonic()
    # Between vfork and exec a process waits in D for its child.
    command = "import ctypes; ctypes.CDLL(None).vfork() or __import__('time').sleep(600)"
    with subprocess.Popen([sys.executable, "-c", command], start_new_session=True) as held:
        try:
            while parse_status(Path(f"/proc/{held.pid}/status").read_bytes()).state != "D":
                assert clock.monotonic() - now < 30
                time.sleep(0.02)
            row = HungChild(
                key="", uid=os.getuid(), kind=Kind.PROCESSES, asked_at=now - 60.0, pid=held.pid, is_program=True
            )
            other = replace(row, uid=row.uid + 1)
            after = Children((plain(wait_in_d),), former=[row, other, replace(row, pid=os.getpid())])
            assert [(each.probe, round(each.seconds)) for each in after.hung(now)] == [
                (f"stacks:{row.uid}:{row.pid}", 60)
            ]
            (left,) = after.unanswered(now)
            assert (left.pid, left.asked_at, left.is_program) == (row.pid, row.asked_at, True)
        finally:
            os.killpg(held.pid, signal.SIGKILL)
        held.wait()
        after.poll(clock.monotonic())
        assert after.hung(now) == ()
        after.close()


def test_children_that_were_asked_a_moment_ago_end_with_their_agent_and_those_at_work_are_known_to_the_next() -> None:
    before = Children((plain(wait_in_d),))
    now = clock.monotonic()
    before.ask("probe:/a", plain_request("wait_in_d", 600.0), 300.0, now, lambda answer: None)
    while not (left := before.unanswered(now + 2.0)):
        assert clock.monotonic() - now < 30
        wait_readable(before.filenos(), 1.0)
        before.poll(clock.monotonic())
    assert before.unanswered(now) == ()
    assert [each.key for each in left] == ["probe:/a"]
    before.close()  # with it goes the child, for it can be killed
    after = Children((plain(wait_in_d),), former=left)
    try:
        while not after.is_free("probe:/a"):
            assert clock.monotonic() - now < 30
            time.sleep(0.02)
            after.poll(clock.monotonic())
        assert after.names() == []
    finally:
        after.close()


def test_an_orphan_that_was_told_of_is_told_of_by_the_next_agent_at_once(tmp_path: Path) -> None:
    probes = Children(tasks("name_users"))
    node = Node(tmp_path, probes)
    try:
        pid = node.add(node.start("0"), "7")
        node.tick(0, "7")
        node.tick(1)
        (before,) = node.tick(GRACE_S + 1)
        memory = node.holders.memory()
        node.holders = OrphanGpuProcesses(probes, GRACE_S, node.devices_of, devices=node.devices, trusts_nvml=True)
        node.holders.remember(memory)
        (after,) = node.tick(1)
        assert (before.pid, after.pid) == (pid, pid)
        assert before.orphan_for_s is not None
        assert after.orphan_for_s == pytest.approx(before.orphan_for_s + 1)
    finally:
        for process in node.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        probes.close()


def test_what_a_node_has_summed_up_is_known_to_the_agent_after_a_reload(tmp_path: Path) -> None:
    sums, rank = NodeSums(), Process(pid=3, start_ticks=4, job_id="7", role=Role.RANK, comm="x", state="R", uid=1)
    for look in range(20):
        gpu = Gpu(uuid="GPU-1", index=0, utilization_ratio=1.0, power_w=300.0, throttle=("sw_power_cap",))
        report = Report(
            node="n1", boot_id="b", agent_id="a", sequence=look, processes=(replace(rank, cpu_s=5.0 * look),), gpus=(gpu,)
        )  # fmt: skip
        sums.add(report, 5.0 * look)
    after = over(Memory(sums=sums), tmp_path).sums
    assert after == sums
    report = replace(report, gpus=(replace(gpu, power_w=310.0),))
    assert after.add(report, 100.0) == sums.add(report, 100.0)
