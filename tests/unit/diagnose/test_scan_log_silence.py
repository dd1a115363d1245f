"""`scan-log` and silence: where lines have no date, no year or only the time of day, it claims what is known
and never more."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from tests.builders.failed_logs import read, verdict_of


def log(begin: str, form: str, steps: int = 60, every_s: float = 30.0) -> str:
    """A step every half a minute, dated as `form` says."""
    first = datetime.fromisoformat(begin)
    return "".join(
        f"{(first + timedelta(seconds=every_s * n)).strftime(form)} step {n}/1000 loss: 2.5\n" for n in range(steps)
    )  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        "0: INFO    %y-%m-%d %H:%M:%S.123 - 0:01:00 -",
        "[%m/%d/%y %H:%M:%S] INFO",
        "%Y%m%d-%H:%M:%S.123",
        "\x1b[2m%H:%M:%S\x1b[0m INFO |",
    ],
)
def test_the_time_of_a_step_is_read_from_short_years_and_coloured_clocks(form: str) -> None:
    assert read(log("2026-05-01 10:00:00", form)).rows()[0]["progress"]["step_seconds_median"] == 30.0


def silence_of(text: str, at: str | None = None) -> str | None:
    verdict = read(text, at).verdict
    return None if verdict is None else verdict.summary.split(" after step")[0]


@pytest.mark.parametrize(
    "form", ["%b %e %H:%M:%S n1 train[7]:", "%m-%d %H:%M:%S", "I%m%d %H:%M:%S.000 1 t.py:1]", "%H:%M:%S"]
)
def test_a_log_without_a_year_is_silent_for_hours_and_never_for_years(form: str) -> None:
    text = log("2026-05-01 10:00:00", form)
    assert verdict_of(text, at="2026-05-01 10:30:00") is None
    assert silence_of(text, at="2026-05-01 13:29:30") == "Hang: no progress for 3 h 00 min"


@pytest.mark.parametrize("form", ["%b %e %H:%M:%S n1 train[7]:", "%m-%d %H:%M:%S"])
def test_a_log_without_a_year_goes_on_behind_new_years_eve(form: str) -> None:
    text = log("2025-12-31 23:45:00", form)
    assert verdict_of(text) is None
    assert verdict_of(text, at="2026-01-01 00:15:00") is None
    assert silence_of(text, at="2026-01-01 03:14:30") == "Hang: no progress for 3 h 00 min"


def test_a_log_of_the_old_year_that_is_read_in_the_new_one_is_silent_for_hours() -> None:
    text = log("2025-12-31 20:00:00", "%b %e %H:%M:%S n1 train[7]:")
    assert silence_of(text, at="2026-01-01 00:29:30") == "Hang: no progress for 4 h 00 min"


def test_a_launchers_lines_without_a_year_take_no_date_from_the_lines_below_them() -> None:
    head = "W0501 09:59:58.123000 4021 torch/distributed/run.py:774] Setting OMP_NUM_THREADS to 1\n" * 3
    text = head + log("2026-05-01 10:00:00", "%Y-%m-%d %H:%M:%S")
    assert read(text).rows()[0]["progress"]["step_seconds_median"] == 30.0
    assert silence_of(text, at="2026-05-01 13:29:30") == "Hang: no progress for 3 h 00 min"


def undated(minutes: int, moved: int = 20) -> str:
    """Dated lines of a monitor, and between the first of them steps without any date."""
    first, lines = datetime(2026, 5, 1, 10), []
    for minute in range(minutes):
        lines.append(f"{first + timedelta(minutes=minute)} INFO memory ok\n")
        if minute < moved:
            lines += [f"step {10 * minute + n}/1000 loss: 2.5\n" for n in range(10)]
    return "".join(lines)


def test_steps_without_a_date_among_dated_lines_fell_silent_before_the_next_date() -> None:
    assert silence_of(undated(200)) == "Hang: no progress for 2 h 59 min"
    assert verdict_of(undated(40)) is None  # less than any limit that could be known
    assert verdict_of(undated(200, moved=200)) is None


def test_steps_without_a_date_behind_the_last_date_say_nothing_of_silence() -> None:
    text = "2026-05-01 10:00:00 INFO begin\n" + "".join(f"step {n}/1000 loss: 2.5\n" for n in range(200))
    assert verdict_of(text) is None
    assert verdict_of(text, at="2026-05-02 10:00:00") is None


TRACKERS = """\
wandb: Network error (ConnectTimeout), entering retry loop.
wandb: ERROR Error while calling W&B API: Max retries exceeded with url: /graphql (<Response [500]>)
COMET ERROR: Failed to send batch: HTTPSConnectionPool(host='www.comet.com', port=443): Max retries exceeded with url: /clientlib
[neptune] [error  ] Error occurred during asynchronous operation processing: ConnectionAborted('Connection aborted.')
2026/05/01 10:30:10 WARNING mlflow.tracking: could not log metrics: Max retries exceeded with url: /api/2.0/mlflow/runs/log-batch
2026-05-01 10:30:11,100 - clearml.Metrics - ERROR - Action failed: Read timed out
swanlab: Upload failed, Max retries exceeded with url: /metrics
"""


def test_scan_log_takes_network_errors_of_an_experiment_tracker_for_no_error() -> None:
    text = log("2026-05-01 10:00:00", "%Y-%m-%d %H:%M:%S")
    assert read(text + TRACKERS).sources[0].errors == []
    assert verdict_of(text + TRACKERS, at="2026-05-01 10:31:00") is None
    assert verdict_of(text + TRACKERS, at="2026-05-01 14:31:00") == ("hang", None, None)


def test_a_tracker_that_ended_the_program_is_named() -> None:
    text = (
        "Traceback (most recent call last):\nwandb.errors.errors.CommError: Run initialization has "
        "timed out after 90.0 sec.\n"
    )
    assert verdict_of(text) is not None


@pytest.mark.parametrize(
    "written", ["loss: -nan", "loss=1.#QNAN", "nll_loss=nan", "ppl: nan", "total_loss: NaN", "loss: -inf", "ce_loss=NaN"]
)  # fmt: skip
def test_a_loss_that_is_nan_is_found_however_it_is_written(written: str) -> None:
    good = log("2026-05-01 10:00:00", "%Y-%m-%d %H:%M:%S", 40).replace("loss: 2.5", written.partition("nan")[0] + "2.5" if "nan" in written else "loss: 2.5")  # fmt: skip
    bad = "".join(f"2026-05-01 10:2{n}:00 step {40 + n}/1000 {written}\n" for n in range(5))
    assert verdict_of(good) is None
    found = verdict_of(good + bad)
    assert found is not None and found[0] == "loss_nan"


def hourly(begin: str, steps: int, first: int = 0, every_s: float = 60.0) -> str:
    at = datetime.fromisoformat(begin)
    return "".join(
        f"{at + timedelta(seconds=every_s * n)} INFO step {first + n}/5000 loss: 2.5\n" for n in range(steps)
    )


def test_a_clock_that_was_set_back_or_an_hour_that_comes_twice_is_no_silence() -> None:
    text = hourly("2026-10-25 01:00:00", 120) + hourly("2026-10-25 02:00:00", 10, 120)
    assert verdict_of(text) is None
    monitor = "".join(f"2026-10-25 {3 + n:02d}:00:00 INFO memory ok\n" for n in range(4))
    assert verdict_of(text + monitor) == ("hang", None, None)


def test_a_date_ahead_that_stands_above_the_steps_is_not_when_the_log_ends() -> None:
    text = hourly("2026-10-25 01:00:00", 120)
    assert verdict_of("2027-01-01 00:00:00 INFO the certificate ends\n" + text) is None


def test_midnight_is_twelve_in_the_morning() -> None:
    text = log("2026-05-01 22:00:00", "%m/%d/%Y %I:%M:%S %p INFO", steps=600)
    assert verdict_of(text) is None
    assert silence_of(text, at="2026-05-02 05:59:30") == "Hang: no progress for 3 h 00 min"


STOPPED = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-10-25T03:00:20 DUE TO {} ***\n"


@pytest.mark.parametrize("reason", ["TIME LIMIT", "PREEMPTION"])
def test_a_run_that_somebody_ended_has_not_hung_since(reason: str) -> None:
    text = hourly("2026-10-25 01:00:00", 120) + STOPPED.format(reason)
    assert verdict_of(text, at="2026-10-25 09:00:00") is None


def test_a_run_that_was_requeued_and_then_hangs_is_found() -> None:
    again = hourly("2026-10-25 04:00:00", 60, 110)
    text = hourly("2026-10-25 01:00:00", 120) + STOPPED.format("PREEMPTION") + again
    assert verdict_of(text) is None
    assert silence_of(text, at="2026-10-25 07:59:00") == "Hang: no progress for 3 h 00 min"
    monitor = "".join(f"2026-10-25 {5 + n:02d}:00:00 INFO memory ok\n" for n in range(4))
    assert silence_of(text + monitor) == "Hang: no progress for 3 h 01 min"
