"""What holds for every test: live tests may not vanish in CI nor be retried at will, and examples are the
same each time there."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

CHECKOUT = Path(__file__).resolve().parent.parent
LIVE = tuple(CHECKOUT / "tests" / name for name in ("integration", "attacks"))
"""Real parts on this machine. `make test` runs them in workers, each as on a machine of its own."""
LONGEST_FIRST = (
    "test_nspawn.py",
    "integration/test_supervisor.py",
    "test_identity_cluster.py",
    "test_soak.py",
    "test_end_of_orphans.py",
    "test_diagnose.py",
    "test_demo.py",
    "integration/test_node_tests.py",
    "integration/test_quarantine.py",
    "test_administration.py",
    "test_proven_hang.py",
    "integration/test_run.py",
    "test_phase_stories.py",
    "test_main_job.py",
    "test_ladder_live.py",
    "test_agent_cannot_hang.py::test_what_hangs_at_once",
    "test_agent_endurance.py",
    "test_ends_of_jobs.py",
    "test_attach.py",
    "test_agent_rights.py",
    "test_prometheus.py",
    "test_grafana.py",
    "test_page.py",
    "test_agent_live.py",
    "test_trainers_batch.py",
    "test_package_rpm.py",
    "test_bench.py",
    "test_bench_controller.py",
    "simulation/test_",
    "test_missing_data.py",
    "test_rolling_upgrade.py",
    "test_two_controllers.py",
    "test_replay_of_a_day.py",
    "test_new_collector.py",
    "test_recipe_of_a_detector.py",
)
"""Tests and files to begin with, so that no worker is left with one of them when the others are done."""
FIXTURE_FOR_ALL = re.compile(r"""^@pytest\.fixture\(.*scope=["'](module|class)""", re.MULTILINE)
RETRIES_ALLOWED = 5
"""More tests of one `make test` that passed only when repeated are a defect: of the tests, or of what they test. One in a
hundred of the live ones: none to three were seen on a machine with nothing else to do, five where it was half as fast.
`Retries` counts them, and prints why each failed at first."""
MOST_OF_A_REASON = 600
IN_CI = os.environ.get("CI", "").lower() in {"1", "true"}

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if IN_CI else "here")


def pytest_configure(config: pytest.Config) -> None:
    """What was told to ignore a signal (a shell does that to what it starts in the background, with Ctrl-C)
    hands it on to all its children, and no shell among them can trap it: those of the tests have to hear."""
    for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGUSR1, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end_session)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Retries(os.environ.get("RETRIED_TESTS")))


def end_session(number: int, _: object) -> None:
    """Asked to end, the whole session ends and cleans up; what a test raises would end that test only."""
    pytest.exit(f"ended by {signal.Signals(number).name}", 128 + number)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout, where pyproject.toml lies."""
    return CHECKOUT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in a directory of LIVE is an integration test, marked or not."""
    for item in items:
        if is_live(item.path):
            item.add_marker(pytest.mark.integration)
    items.sort(key=lambda item: place_in_order(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """With `--dist loadscope`, what `Spread` says goes to one worker together."""
    return Spread(config, log) if config.getoption("dist") == "loadscope" else None


class Spread(LoadScopeScheduling):
    """Each live test, and each of LONGEST_FIRST, goes to a free worker; those of a file with a fixture for all of
    them, and all others of a file, go to one together. What xdist calls loadgroup needs a mark on every test, and
    does not work with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        path = self.config.rootpath / file
        alone = is_live(path) or place_in_order(nodeid) < len(LONGEST_FIRST)
        return nodeid if alone and not makes_fixture_for_all(path) else file


@functools.cache
def makes_fixture_for_all(file: Path) -> bool:
    """Does this file make a fixture once for all of its tests?"""
    return FIXTURE_FOR_ALL.search(file.read_text()) is not None


def place_in_order(nodeid: str) -> int:
    """Row of LONGEST_FIRST that names the test or its file; those without a row come last, as they were collected."""
    return next((row for row, name in enumerate(LONGEST_FIRST) if name in nodeid), len(LONGEST_FIRST))


@functools.cache
def is_live(path: Path) -> bool:
    """Is this a test, or a directory of tests, that needs real parts?"""
    return any(path.is_relative_to(directory) for directory in LIVE)


class Retries:
    """Collects which tests had to be repeated. `journal`: where the parts of one run add theirs."""

    def __init__(self, journal: str | None) -> None:
        self.journal = Path(journal) if journal else None
        self.tests: dict[str, str] = {}
        """Why each of them failed at first."""

    def pytest_sessionstart(self) -> None:
        """What the parts before this one repeated counts, too."""
        if self.journal is not None and self.journal.exists():
            self.tests.update(json.loads(self.journal.read_text()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for every report, those of the workers included."""
        if report.outcome == "rerun":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.tests.setdefault(report.nodeid, " ".join(str(crash or report.longrepr).split())[:MOST_OF_A_REASON])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a run that would pass with more than RETRIES_ALLOWED."""
        if self.journal is not None:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            self.journal.write_text(json.dumps(self.tests))
        if len(self.tests) > RETRIES_ALLOWED and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The list, and what it means."""
        if not self.tests:
            return
        count = len(self.tests)
        verdict = f"more than {RETRIES_ALLOWED}: the run fails" if count > RETRIES_ALLOWED else "allowed"
        terminalreporter.section(f"repeated: {count} ({verdict})")
        for test, why in sorted(self.tests.items()):
            terminalreporter.line(f"{test}: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped integration test is a failed one: a green run must mean that the real parts were there."""
    report = yield
    must_run = item.get_closest_marker("integration") and not item.get_closest_marker("hardware")
    if IN_CI and must_run and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = (
            f"An integration test may not be skipped in CI. It gave as its reason: {reason(report.longrepr)}"
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file that takes itself out of the run (importorskip, skip at module level)."""
    report = yield
    if IN_CI and report.outcome == "skipped" and is_live(collector.path):
        report.outcome = "failed"
        report.longrepr = (
            f"An integration test may not be skipped in CI. It gave as its reason: {reason(report.longrepr)}"
        )
    return report


def reason(longrepr: object) -> str:
    """The words of a skip, out of pytest's (file, line, words)."""
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
