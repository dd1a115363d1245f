"""What holds for every test: integration tests may not vanish in CI, and generated examples are the same each time there."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

CHECKOUT = Path(__file__).resolve().parent.parent
INTEGRATION = CHECKOUT / "tests" / "integration"
IN_CI = os.environ.get("CI", "").lower() in {"1", "true"}

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if IN_CI else "here")


def pytest_configure() -> None:
    """What was told to ignore a signal (a shell does that to what it starts in the background, with Ctrl-C) hands it on to all its
    children, and no shell among them can trap it: those of the tests have to hear."""
    for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGUSR1, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout, where pyproject.toml lies."""
    return CHECKOUT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in tests/integration/ is an integration test, marked or not."""
    for item in items:
        if item.path.is_relative_to(INTEGRATION):
            item.add_marker(pytest.mark.integration)


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
    if IN_CI and report.outcome == "skipped" and collector.path.is_relative_to(INTEGRATION):
        report.outcome = "failed"
        report.longrepr = (
            f"An integration test may not be skipped in CI. It gave as its reason: {reason(report.longrepr)}"
        )
    return report


def reason(longrepr: object) -> str:
    """The words of a skip, out of pytest's (file, line, words)."""
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
