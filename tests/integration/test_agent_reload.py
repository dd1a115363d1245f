"""SIGHUP at a real agent that watches a real process: nothing is reported twice, and
nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.controller.state.progress_clock import lines_of
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.frames import FrameError
from tests.agent_tree import PERSONAL, watched
from tests.munged import munged
from tests.proven_server import serving

pytestmark = pytest.mark.integration
DEADLINE_S = 120.0
JOB = "900000001"
TRAINER = """
import sys, time
with open(sys.argv[1], "w", buffering=1) as log:
    for step in range(1, 100000):
        print(f"iteration {step}/ 100000 | loss 2.5", file=log)
        time.sleep(0.25)
"""


class Controller:
    """Takes reports, or none while it is `away`."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.away = False
        self._open = ExitStack()
        self.munged = self._open.enter_context(munged())
        self.port = self._open.enter_context(serving(self.munged, self._take)).number

    def _take(self, report: Report) -> Reply:
        if self.away:
            raise FrameError("busy", "away")
        self.reports.append(report)
        return Reply(controller_id="k", watch=(watched(JOB),), closely=True)

    def close(self) -> None:
        self._open.close()

    @property
    def newest(self) -> Report | None:
        return self.reports[-1] if self.reports else None


class Node:
    """An agent as a service would be, and one rank with a log."""

    def __init__(self, place: Path) -> None:
        self.place, self.controller = place, Controller()
        self.configure("400ms")
        environment = {"SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
                       "SLURM_NTASKS": "1", "PATH": os.environ["PATH"]}  # fmt: skip
        self.rank = subprocess.Popen([sys.executable, "-c", TRAINER, str(place / "train.log")], env=environment)
        with (place / "agent.log").open("wb") as out:
            self.agent = subprocess.Popen(
                [*run_code(PERSONAL), str(place / "c.yaml")],
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def configure(self, interval: str, more: str = "") -> None:
        place, port = self.place, self.controller.port
        (self.place / "c.yaml").write_text(
            f"agent: {{node_name: n1, interval: {interval}, controller_url: 'http://127.0.0.1:{port}', metrics_directory: '', "
            f"kernel_log: '', state_directory: {place}/state}}\nsecurity: {json.dumps(self.controller.munged.security())}\n{more}"
        )

    def reload(self) -> None:
        os.kill(self.agent.pid, signal.SIGHUP)

    @property
    def log(self) -> str:
        return (self.place / "agent.log").read_text()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.agent.poll() is None, f"the agent has ended: {self.log}"
            assert time.monotonic() < deadline, f"no sign of {what}\n{self.log}"
            time.sleep(0.05)

    def family(self) -> set[int]:
        """All processes of the agent's session that live."""
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == self.agent.pid and state != "Z":
                found.add(int(entry.name))
        return found

    def close(self) -> None:
        for process in (self.agent, self.rank):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        self.controller.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    try:
        yield node
    finally:
        node.close()


def steps(reports: list[Report]) -> list[int]:
    """Of our rank: others may have jobs on this machine."""
    events = (event for report in reports for event in report.events if event.job_id == JOB)
    lines = (line for each in events if each.kind is EventKind.PROGRESS for line in lines_of(each))
    return [line.step for line in lines if line.step is not None]


def interval(node: Node) -> float | None:
    return round(node.controller.newest.interval_s, 3) if node.controller.newest is not None else None


def test_a_reload_changes_all_or_nothing_and_no_word_is_lost_or_told_twice(node: Node) -> None:
    controller = node.controller
    node.wait(lambda: len(steps(controller.reports)) > 5 and len(controller.reports) > 5, "steps of the rank")
    met = len(controller.reports)
    """By then the agent knows its controller, to which it tells its short past once more when they meet."""

    # A file with an error: the same agent continues with what it had.
    node.configure("700ms", "mode: obey\n")
    node.reload()
    node.wait(lambda: "the one before stays, whole" in node.log, "the agent's word about the error")
    assert "c.yaml:3: mode: must be" in node.log
    count = len(controller.reports)
    node.wait(lambda: len(controller.reports) > count + 2, "more reports")
    assert len({report.agent_id for report in controller.reports}) == 1
    assert interval(node) == 0.4

    # A good one, while the controller is away: what waits goes over to the new start, and so does how far the
    # log was read.
    children = node.family()
    assert len(children) > 2
    controller.away = True
    node.configure("700ms")
    node.reload()
    node.wait(lambda: "the agent restarts with it" in node.log, "the new start")
    node.wait(lambda: node.log.count("watching n1") == 2, "the agent's second life")
    controller.away = False
    node.wait(lambda: interval(node) == 0.7, "a report of the new configuration")
    count = len(controller.reports)
    node.wait(lambda: len(controller.reports) > count + 3, "more reports")
    assert node.log.count("watching n1") == 2

    reports = list(controller.reports)
    by_agent: dict[str, list[int]] = {}
    for report in reports:
        by_agent.setdefault(report.agent_id, []).append(report.sequence)
    assert len(by_agent) == 2
    for sequences in by_agent.values():
        assert sequences == list(range(1, len(sequences) + 1))  # each once, none left out
    # A row of progress is its newest line, and how many it stands for: on a busy machine not each has its own step.
    rows = [each for report in reports[met:] for each in report.events if each.job_id == JOB and each.step is not None]
    told = [max(steps(reports[:met])), *(each.step for each in rows if each.step is not None)]
    assert [later - earlier for earlier, later in pairwise(told)] == [each.lines for each in rows]
    # In each report after the first that knows it the rank is there, by its rank: no look without it, which
    # would be an end.
    known = [any(p.rank == 0 and p.job_id == JOB for p in report.processes) for report in reports]
    assert all(known[known.index(True) :])
    # The same process, and nobody of those who were its children before.
    node.wait(lambda: node.family() & children == {node.agent.pid}, "the end of the children of the first life")


@pytest.mark.thorough
def test_many_signals_at_once_end_nobody(node: Node) -> None:
    node.wait(lambda: node.controller.reports, "a report")
    for number in range(12):
        node.configure(f"{400 + number}ms")
        node.reload()
        time.sleep(0.15)
    node.wait(lambda: interval(node) == 0.411, "the last configuration")
    node.agent.terminate()
    assert node.agent.wait(60) == 0


ROW = """[log acme_iteration]
means: the ACME solver counts what it should not
needle: iteration
pattern: iteration \\d+/ 100000 \\| loss
source: the trainer of this test
example: iteration 12/ 100000 | loss 2.5
not: iteration 12/ 200000 | loss 2.5
"""


@pytest.mark.thorough
def test_rows_of_the_site_are_taken_at_a_reload_by_the_children_that_read_logs(node: Node) -> None:
    def errors() -> list[Event]:
        events = [event for report in node.controller.reports for event in report.events]
        return [each for each in events if each.job_id == JOB and each.kind is EventKind.ERROR]

    knowledge = node.place / "knowledge.d"
    knowledge.mkdir(mode=0o755)
    more = f"knowledge: {{directory: {knowledge}}}\n"
    node.configure("400ms", more)
    node.wait(lambda: len(steps(node.controller.reports)) > 2, "steps of the rank")

    (knowledge / "acme.conf").write_text(ROW.replace("needle: ", "neddle: "))
    node.reload()
    node.wait(lambda: "the one before stays, whole" in node.log, "the agent's word about the broken file")
    assert f"{knowledge}/acme.conf:1: [log acme_iteration]: unknown key `neddle`" in node.log

    (knowledge / "acme.conf").write_text(ROW)
    node.reload()
    node.wait(errors, "an error that only the site's row knows")
    assert {each.pattern for each in errors()} == {"acme_iteration"}
