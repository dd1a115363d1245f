"""SIGHUP at the agent: the file is taken whole or not at all, and what goes over to the next agent is what
this one knew."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.delivery.spool import Spool, Waiting
from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses, OrphanMemory
from slurm_watchdog.agent.logs.open_logs import LogMemory
from slurm_watchdog.agent.proc.entry import Entry, JobMember, JobStep, ProcessFacts, Stat
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory, SystemCall
from slurm_watchdog.agent.processes.identity_cache import UnidentifiedProcess
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.reader import ProcessMemory
from slurm_watchdog.agent.reload.reload import COMMANDS_S, Handover, Reload, read_handover, write_handover
from slurm_watchdog.agent.reload.settings import NO_CONTROLLER, Settings, settings_of
from slurm_watchdog.agent.sums import NodeSums, recall
from slurm_watchdog.agent.validate_config import validate, why_not
from slurm_watchdog.agent.workers.answer_types import ConfigCheck
from slurm_watchdog.agent.workers.child import frame
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import Follow, WorkerState
from slurm_watchdog.agent.workers.worker import Answer, InheritedWorker
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.model.observations import Event, EventKind, Gpu, LogFile, Process, Role
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.report import Report
from tests.builders.gpu_node import GRACE_S, Node
from tests.builders.requests import plain_request

MODEST = settings_of(parse_config("agent: {metrics_listen: '', state_directory: ''}"))


# -- what is refused, and what is taken ------------------------------------------------------------------------


class Asked:
    """In place of the children: keeps what was asked, and answers when the test says."""

    def __init__(self, has_children: bool = True) -> None:
        self.then: list[Callable[[Answer], None]] = []
        self.has_children = has_children

    def ask(
        self, key: str, request: Any, deadline_s: float, now: float, then: Callable[[Answer[Any]], None], *, idle_s: float
    ) -> int | None:  # fmt: skip
        self.then.append(then)
        return len(self.then) if self.has_children else None

    def answer(self, value: object, error: str | None = None) -> None:
        self.then[-1](Answer(len(self.then), "config", value, error))


def reload_of(asked: Asked, secrets: list[str], file: str = "/etc/x.yaml") -> Reload:
    return Reload(file, MODEST, asked, lambda: secrets.append("read"))  # type: ignore[arg-type]


def outcome(text: str) -> ConfigCheck:
    return ConfigCheck(settings=msgspec.json.encode(settings_of(parse_config(text))).decode())


def test_a_file_with_errors_changes_nothing_and_each_is_said(caplog: pytest.LogCaptureFixture) -> None:
    asked, secrets = Asked(), list[str]()
    reload = reload_of(asked, secrets)
    reload.ask(1.0)
    asked.answer(ConfigCheck(problems=("x.yaml:1: mode: must be", "x.yaml:3: interval")))
    assert (reload.settings, secrets) == (None, [])
    assert "x.yaml:1: mode" in caplog.text
    assert "not taken (2 errors); the one before stays, whole" in caplog.text


@pytest.mark.parametrize("has_children", [True, False])
def test_a_check_that_does_not_come_off_is_a_refusal(has_children: bool, caplog: pytest.LogCaptureFixture) -> None:
    asked, secrets = Asked(has_children), list[str]()
    reload = reload_of(asked, secrets)
    reload.ask(1.0)
    if has_children:
        asked.answer(None, "no answer within 60 s")
    assert (reload.settings, secrets) == (None, [])
    assert "the one before stays, whole" in caplog.text
    reload.ask(2.0)
    assert len(asked.then) == 2  # and the next one is looked at


def test_settings_that_are_the_same_take_no_new_start_and_secrets_are_read_again() -> None:
    asked, secrets = Asked(), list[str]()
    reload = reload_of(asked, secrets)
    reload.ask(1.0)
    asked.answer(outcome("mode: act\nagent: {metrics_listen: '', state_directory: ''}"))
    assert (reload.settings, secrets) == (None, ["read"])


def test_a_file_that_was_written_again_while_it_was_checked_is_checked_again() -> None:
    asked, secrets = Asked(), list[str]()
    reload = reload_of(asked, secrets)
    reload.ask(1.0)
    reload.ask(1.1)
    reload.ask(1.2)
    assert len(asked.then) == 1
    asked.answer(outcome("agent: {interval: 7s}"))
    assert reload.settings is None
    assert len(asked.then) == 2
    asked.answer(outcome("agent: {interval: 8s}"))
    assert reload.settings is not None
    assert reload.settings.agent.interval == 8.0


def test_a_new_start_waits_for_commands_under_way_and_not_for_ever() -> None:
    asked = Asked()
    reload = reload_of(asked, [])
    assert not reload.wants_restart(0.0, busy=False)
    reload.ask(1.0)
    asked.answer(outcome("agent: {interval: 7s}"))
    assert not reload.wants_restart(reload.since, busy=True)
    assert reload.wants_restart(reload.since, busy=False)
    assert reload.wants_restart(reload.since + COMMANDS_S, busy=True)


def test_without_a_file_secrets_alone_are_read_again() -> None:
    asked, secrets = Asked(), list[str]()
    reload_of(asked, secrets, file="").ask(1.0)
    assert (asked.then, secrets) == ([], ["read"])


def test_what_would_keep_an_agent_from_working_is_found_before(tmp_path: Path) -> None:
    def of(text: str) -> Settings:
        return settings_of(parse_config(text))

    assert why_not(of("agent: {metrics_listen: '', state_directory: ''}"), MODEST) == [NO_CONTROLLER]
    tls = f"security: {{tls_directory: {tmp_path}}}\nagent: {{controller_url: 'https://m:1', metrics_listen: ''}}"
    assert why_not(of(tls), MODEST)[0].startswith("expert.security.tls_directory: ")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        there = of(f"agent: {{controller_url: 'http://m:1', metrics_listen: '127.0.0.1:{port}', state_directory: ''}}")
        assert "in use" in why_not(there, MODEST)[0]
        assert why_not(there, there) == []  # its own port is its own


def test_a_look_gives_settings_or_every_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mode: obey\nagent: {intervall: 5s}\n")
    found = validate(str(file), MODEST)
    assert len(found.problems) == 2
    assert found.settings == ""
    file.write_text("agent: {controller_url: 'http://m:1', interval: 9s, metrics_listen: '', state_directory: ''}\n")
    assert '"interval":9.0' in validate(str(file), MODEST).settings


# -- what goes over --------------------------------------------------------------------------------------------


def test_all_that_an_agent_knew_comes_back_as_it_was_odd_names_included(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = b"/scratch/\xff\xfe.log".decode(errors="surrogateescape")
    known = ProcessFacts(
        7, 70, 1, "python", 1000, JobStep("4", "0"), {"RANK": "3"}, cwd=odd, collective_timeout=(600.0, True)
    )
    stat = Stat("python", "D", 1, 0, 5, 70)
    track = BlockedCallHistory(
        b"1 0x3 \xff",
        SystemCall(1, (3, 2**64 - 1)),
        "D",
        "rpc_wait",
        "write",
        1,
        2,
        None,
        100.0,
        sightings=9,
        path=odd,
    )
    jobs = JobsHere(awaiting_checkpoints={"4"})
    jobs.hear((JobWatch(job_id="4", uid=1000, restarts=0),), ("4",), 98.0)
    handover = Handover(
        children=(
            InheritedWorker(
                key=f"files:{odd}:1000",
                uid=1000,
                fd=9,
                request=4,
                asked_at=1.0,
                deadline=2.0,
                hung=True,
                born=True,
                inbox=b"\x00\xff",
            ),
        ),
        reports=(Waiting(5.0, 3, b'{"a":1}'),),
        processes=ProcessMemory(
            entries=(Entry(known, stat, 5, 1, JobMember("4", "0", Role.RANK, 3), 90.0),),
            stuck={7: UnidentifiedProcess("identify:7", True)},
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
    assert read_handover(write_handover(handover)) == handover
    assert caplog.text == ""


def test_what_is_no_handover_is_a_start_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    fd = os.memfd_create("x", 0)
    os.write(fd, b'{"children": 7, "commands": ["c1"], "jobs": {"watch": []}}')
    os.lseek(fd, 0, os.SEEK_SET)
    assert read_handover(fd) == Handover(commands=("c1",)), "no command is done twice for what else has another form"
    assert caplog.text.count("starts without that") == 2


def test_reports_that_wait_go_over_within_the_bounds_of_the_new_spool() -> None:
    before = Spool(1000, 60.0)
    for number in range(5):
        before.put(number, b"x" * 10, float(number))
    left = before.left()
    after = Spool(30, 60.0)
    after.take_back(left, 5.0)
    assert ([each.sequence for each in after.left()], after.size, after.dropped) == ([2, 3, 4], 30, 2)


def test_a_child_that_hangs_goes_over_keeps_its_age_and_is_not_replaced_until_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    ours, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    now = clock.monotonic()
    left = InheritedWorker(
        key="files:/shared:1000",
        uid=1000,
        fd=ours.detach(),
        request=41,
        asked_at=now - 500,
        deadline=now - 490,
        hung=True,
        born=True,
    )
    probes = WorkerPool({}, inherited=[left])
    try:
        probes.poll(now)
        assert probes.hung_since("files:/shared:1000", now) == pytest.approx(500)
        assert probes.ask("files:/shared:1000", Follow([]), 1.0, now, lambda answer: None, uid=1000) is None
        child.sendall(frame([41, "late", None]))
        wait_readable(probes.filenos(), 10)
        probes.poll(clock.monotonic())
        assert probes.is_free("files:/shared:1000")
        assert "it is free again" in caplog.text
    finally:
        probes.close()
        child.close()


def test_children_at_work_are_waited_for_over_the_new_start_and_those_of_our_own_end_with_their_spawner() -> None:
    def sleep(args: Any, worker: WorkerState) -> None:
        wait_readable((), args["value"])

    before = WorkerPool({"sleep": sleep})
    now = clock.monotonic()
    before.ask("probe:/a", plain_request("sleep", 600.0), 300.0, now, lambda answer: None)
    left = before.hand_off()
    assert [(each.key, each.hung) for each in left] == [("probe:/a", False)]
    assert os.get_inheritable(left[0].fd)
    before.close()  # with it goes the child, for it can be killed
    after = WorkerPool({"sleep": sleep}, inherited=left)
    try:
        assert not os.get_inheritable(left[0].fd)
        deadline = clock.monotonic() + 30
        while not after.is_free("probe:/a"):
            assert clock.monotonic() < deadline
            wait_readable(after.filenos(), 1.0)
            after.poll(clock.monotonic())
        assert after.names() == []
    finally:
        after.close()


def test_an_orphan_that_was_told_of_is_told_of_by_the_next_agent_at_once(tmp_path: Path) -> None:
    probes = WorkerPool({})
    node = Node(tmp_path, probes)
    try:
        pid = node.add(node.start("0"), "7")
        node.tick(0, "7")
        node.tick(1)
        (before,) = node.tick(GRACE_S + 1)
        memory = node.holders.memory()
        node.holders = OrphanGpuProcesses(probes, GRACE_S, devices=node.devices, trusts_nvml=True)
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


def test_what_a_node_has_summed_up_is_known_to_the_agent_after_a_reload() -> None:
    sums, rank = NodeSums(), Process(pid=3, start_ticks=4, job_id="7", role=Role.RANK, comm="x", state="R", uid=1)
    for look in range(20):
        gpu = Gpu(uuid="GPU-1", index=0, utilization_ratio=1.0, power_w=300.0, throttle=("sw_power_cap",))
        report = Report(
            node="n1", boot_id="b", agent_id="a", sequence=look, processes=(replace(rank, cpu_s=5.0 * look),), gpus=(gpu,)
        )  # fmt: skip
        sums.add(report, 5.0 * look)
    after = recall(read_handover(write_handover(Handover(sums=sums.memory()))).sums)
    assert after == sums
    report = replace(report, gpus=(replace(gpu, power_w=310.0),))
    assert after.add(report, 100.0) == sums.add(report, 100.0)
    assert recall({"processes": {"3": {"of": "another release"}}}) == NodeSums() == recall({})
