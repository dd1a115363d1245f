"""The loop: its grid, its isolation, and when it says that it is alive."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from slurm_watchdog.base import loop
from slurm_watchdog.base.loop import Isolated, Signals, isolate, next_due, run_cadence, sd_notify, share_of


@pytest.mark.parametrize(
    ("due", "now", "expected"),
    [(100.0, 100.1, 105.0), (100.0, 104.9, 105.0), (100.0, 105.1, 110.0), (100.0, 3700.0, 3705.0)],
)
def test_ticks_stay_on_their_grid_and_never_come_in_bursts(due: float, now: float, expected: float) -> None:
    assert next_due(due, now, 5.0) == expected


def test_one_failing_part_is_one_sentence_and_the_others_go_on() -> None:
    seen = Isolated()

    def broken() -> int:
        raise ValueError("no such file")

    assert isolate("broken", broken, -1, seen) == -1
    assert isolate("fine", lambda: 7, -1, seen) == 7
    assert seen.problems == ["broken: ValueError: no such file"]
    assert seen.failed == {"broken"}
    assert set(seen.seconds) == {"broken", "fine"}


def test_systemd_hears_of_whole_ticks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        signals = Signals()
        outcomes = [False, True, False, True]

        def tick(now: float) -> bool:
            whole = outcomes.pop(0)
            signals.stop = not outcomes
            return whole

        run_cadence(tick, 0.01, signals)
        listener.setblocking(False)
        heard = [listener.recv(100) for _ in range(3)]
        assert heard == [b"READY=1\nWATCHDOG=1", b"WATCHDOG=1", b"STOPPING=1"]


def test_without_systemd_nobody_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert sd_notify("READY=1") is False


def test_signals_set_flags_and_end_the_wait() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signals = Signals()
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        ticks = []

        def tick(now: float) -> bool:
            ticks.append(now)
            os.kill(os.getpid(), signal.SIGTERM)
            return True

        run_cadence(tick, 60.0, signals)
        assert (signals.stop, signals.reload, len(ticks)) == (True, True, 1)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_each_machine_has_a_moment_of_its_own_within_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands that were started at once."""
    at, signals = [0.0], Signals()

    def wait(fds: object, seconds: float) -> list[int]:
        at[0] += seconds
        return []

    monkeypatch.setattr(loop.clock, "monotonic", lambda: at[0])
    monkeypatch.setattr(loop, "wait_readable", wait)

    def ticks(name: str) -> list[float]:
        at[0], signals.stop, seen = 0.0, False, list[float]()

        def tick(now: float) -> bool:
            seen.append(now)
            signals.stop = now > 100.0
            return True

        run_cadence(tick, 13.0, signals, share_of(name))
        return seen

    last = []
    for number in range(300):
        seen = ticks(f"n{number:03d}")
        gaps = [after - before for before, after in pairwise(seen)]
        assert seen[0] == 0.0
        assert 6.5 <= gaps[0] <= 19.5
        assert {round(gap, 6) for gap in gaps[1:]} == {13.0}
        last.append(seen[-1] % 13.0)
    of_each_second = Counter(map(int, last))
    assert all(10 <= of_each_second[second] <= 40 for second in range(13))
