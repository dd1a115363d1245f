"""`scan-log`'s verdict on whole logs: the cause and not the cascade, and nobody named where nothing names him."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.diagnose.logs.digest import Collector
from slurm_watchdog.diagnose.logs.report import judge_job
from tests.builders.failed_logs import (
    DEFAULTS,
    DISK,
    LOST,
    VERDICTS,
    read,
    steps,
    timeout,
    traceback,
    verdict_of,
)


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in VERDICTS], ids=[case[0] for case in VERDICTS])
def test_a_log_gives_its_verdict(text: str, expected: tuple[str, int | None, str | None] | None) -> None:
    assert verdict_of(text) == expected


@pytest.mark.parametrize(
    ("kind", "losses"),
    [
        ("loss_spike", dict.fromkeys(range(7941, 7961), 5.0)),
        ("loss_nan", dict.fromkeys(range(7996, 8001), float("nan"))),
        (None, dict.fromkeys(range(10, 8001, 10), 5.0)),
        (None, dict.fromkeys(range(10, 8001, 10), float("nan"))),
    ],
)
def test_what_a_long_log_ends_with_is_seen_although_most_of_its_steps_are_not_read(
    kind: str | None, losses: dict[int, float]
) -> None:
    text = "".join(f"iteration {n}/ 90000 | lm loss: {losses.get(n, 2 + n % 7 / 100)} |\n" for n in range(1, 8001))
    found = verdict_of(text)
    assert (found and found[0]) == kind


NOISE = (
    "n1:77:78 [0] NCCL INFO Channel 00/24 : 0 1 2 3",
    "loading shard 3 of 8",
    "Bonjour à tous, tout va bien",
    "学習を開始します。エラーはありません",
    "WARNING: the tokenizer is slow",
    "GPU 3: 41234MiB / 81559MiB, 98 %",
    "",
    "    ",
    "wandb: Run data is saved locally",
)
HAVE_NO_NOISE_BETWEEN = (
    "a chain",
    "a lookup",
    "what a DataLoader",
    "the table",
    "nobody knows",
    "a row that",
    "a restart",
    "a destructor",
    "Ray's guesses",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [case[1:] for case in VERDICTS if not case[0].startswith(HAVE_NO_NOISE_BETWEEN)],
    ids=[case[0] for case in VERDICTS if not case[0].startswith(HAVE_NO_NOISE_BETWEEN)],
)
@settings(max_examples=15, deadline=None)
@given(noise=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(NOISE)), max_size=12))
def test_lines_of_no_matter_change_no_verdict(
    text: str, expected: tuple[str, int | None, str | None] | None, noise: list[tuple[int, str]]
) -> None:
    lines = text.splitlines()
    for place, line in noise:
        lines.insert(place % (len(lines) + 1), line)
    assert verdict_of("\n".join(lines) + "\n") == expected


PARTS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([line.encode() for case in VERDICTS for line in case[1].splitlines()]),
    st.sampled_from([b"```", b"> ", b"[rank", b"1]: ", b"Traceback (most recent call last):", b"step 5/10", b"\r", b"\0", b"\x1b[0m", b"2024-13-77 99:99:99 "]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PARTS, max_size=60), st.sampled_from([b"\n", b"", b"\r\n"]))
def test_nothing_that_stands_in_a_file_breaks_it(parts: list[bytes], between: bytes) -> None:
    judged = read(between.join(parts), at="2024-05-01 12:00:00")
    for row in judged.rows():
        assert row["healthy"] is (None if row["unread"] else row["verdict"] is None)


@pytest.mark.parametrize(
    "text", [case[1] for case in VERDICTS if case[2] is not None and case[2][1] is not None], ids=[case[0] for case in VERDICTS if case[2] is not None and case[2][1] is not None]
)  # fmt: skip
def test_a_rank_that_is_named_stands_in_the_log(text: str) -> None:
    verdict = read(text).verdict
    assert verdict is not None
    assert str(verdict.rank) in text or verdict.missing == (verdict.rank,)


def test_a_silent_log_is_a_hang_only_after_its_own_limit() -> None:
    text = steps(1, 300)
    assert verdict_of(text, at="2024-05-01 10:05:30") is None
    assert verdict_of(text, at="2024-05-01 10:30:00") == ("hang", None, None)


def test_pulses_are_no_progress_and_show_how_long_it_is_silent() -> None:
    pulses = "".join(
        f"[2024-05-01 {hour}:04:59] PULSE: tr is running for 1:00 since 2024-05-01T10:00:00\n" for hour in (10, 11, 12)
    )
    assert verdict_of(steps(1, 300) + pulses) == ("hang", None, None)


def test_an_evaluation_may_take_its_time() -> None:
    text = steps(1, 300) + "2024-05-01 10:05:01,000 - INFO - starting evaluation\n"
    assert verdict_of(text, at="2024-05-01 10:30:00") is None
    assert verdict_of(text, at="2024-05-01 12:30:00") == ("hang", None, None)


def test_a_log_that_is_finished_is_silent_for_ever() -> None:
    assert verdict_of(steps(1, 300) + "Training completed.\n", at="2024-05-03 10:00:00") is None


def test_without_any_clock_nothing_is_said_of_silence() -> None:
    text = "".join(f"step {n}/5000 | loss: 2.5 |\n" for n in range(100))
    assert verdict_of(text) is None


def test_a_change_of_speed_is_told_with_its_step() -> None:
    text = "".join(
        f" iteration {n:8d}/  115311 | elapsed time per iteration (s): "
        f"{(105.2 if n < 60 else 111.3) + n % 5 / 10:.2f} | global batch size:  2048 | lm loss: 2.1E+00 "
        "|\n"
        for n in range(1, 121)
    )
    (change,) = read(text).rows()[0]["throughput_changes"]
    assert abs(change["step"] - 60) <= 2
    assert change["percent"] == pytest.approx(5.8, abs=0.3)


def test_a_ramp_of_the_batch_is_no_change_of_speed() -> None:
    text = "".join(
        f" iteration {n:8d}/  115311 | elapsed time per iteration (s): {10 + n // 40}.{n % 4} | global "
        f"batch size:  {256 * (1 + n // 40)} | lm loss: 2.1E+00 |\n"
        for n in range(1, 161)
    )
    assert read(text).rows()[0]["throughput_changes"] == []


def test_scan_log_takes_prose_about_errors_for_no_error() -> None:
    told = (
        "Last week we had CUDA errors, NCCL errors and nodes that ran out of memory, but our run went "
        "on after each of them.\n"
    )
    assert verdict_of(told) is None


def test_a_try_that_failed_before_the_one_that_came_to_its_end_is_over() -> None:
    text = (
        "Killing subprocess 77\nKilling subprocess 78\n" + "loading\n" * 9 + "{'train_runtime': 120.5, 'epoch': 1.0}\n"
    )
    assert verdict_of(text) is None


def test_a_letter_with_two_excerpts_tells_of_two_incidents() -> None:
    def pasted(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.splitlines())

    letter = (
        "Hello,\non Monday this "
        f"came:\n\n{pasted(traceback('[rank3]: ', 'RuntimeError: mat1 and mat2 shapes cannot be multiplied'))}\n"
        "and on Friday, after we had mended "
        f"that:\n\n{pasted(''.join(timeout(r) for r in range(8) if r != 6))}\nAny ideas?\n"
    )
    judged = read(letter)
    assert judged.verdict is not None
    assert (judged.verdict.name, judged.verdict.rank, judged.verdict.followed) == ("shape_mismatch", 3, 0)


def test_a_log_whose_lines_are_indented_is_one_log() -> None:
    assert verdict_of("start\n" + "".join(f"    {line}\n" for line in traceback("", DISK).splitlines())) == (
        "disk_full",
        None,
        None,
    )


def test_progress_between_indented_lines_is_no_letter() -> None:
    log = "".join(f"step {n}/900 loss 2.5\n    forward: 1.2 s\n    backward: 2.2 s\n" for n in range(1, 40))
    judged = read(log)
    assert judged.sources[0].progress.last_step == 39


def test_the_counter_that_rises_beyond_all_before_tells_the_steps() -> None:
    """A bar with a loss that begins again in every step is drawn more often than the steps."""
    text = "".join(
        f"Train epoch:  {done}%|    | {done}/64 [00:40<00:20,  1.60it/s, act_loss=0.001]\n"
        + (f"Global step {n}: {{'policy_loss': 0.001}}\n" if done == 64 else "")
        for n in range(1, 20)
        for done in (0, 20, 40, 64)
    )
    progress = read(text + text[:60] + "\n").rows()[0]["progress"]
    assert (progress["first_step"], progress["last_step"]) == (1, 19)


def test_a_number_that_is_no_step_breaks_nothing() -> None:
    assert read(steps(1, 9) + f"step {'9' * 400}/5000 | loss: 2.5 |\n").sources[0].progress.last_step == 8


@pytest.mark.parametrize(
    "how", ["error 12, opcode 0", "status=12 opcode=129", "status=IBV_WC_RETRY_EXC_ERR(12) opcode=1"]
)
def test_of_a_transfer_that_got_no_answer_both_ends_are_told(how: str) -> None:
    text = f"n2:57:59 [0] net_ib.cc:1296 NCCL WARN NET/IB: Got completion from peer 10.2.0.5<33092> with {how}, len 0\n"
    verdict = read(steps(1, 9) + text).verdict
    assert verdict is not None
    assert "host n2 did not reach 10.2.0.5; the cause is either end" in verdict.summary


ENDS = (
    traceback("[rank5]: ", DISK) + "".join(timeout(r) for r in range(8) if r != 5),
    "".join(timeout(r) for r in range(8) if r != 5),
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\nsrun: error: n3: task 9: Out Of Memory\n",
    "world_size: 64\n" + traceback("n2: ", LOST),
    "",
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ENDS), st.lists(st.integers(1, 4000), min_size=1, max_size=12), st.integers(1, 900))
def test_in_whatever_pieces_a_log_is_read_the_verdict_is_the_same(end: str, sizes: list[int], many: int) -> None:
    text = ("world_size: 8\n" + steps(1, many) + end).encode()
    whole = Collector()
    whole.add(text, 1)
    split, at, line, turn = Collector(), 0, 1, 0
    while at < len(text):
        stop = text.find(b"\n", min(len(text) - 1, at + sizes[turn % len(sizes)])) + 1 or len(text)
        split.add(text[at:stop], line)
        line, at, turn = line + text.count(b"\n", at, stop), stop, turn + 1
    one, other = (judge_job(["a.log"], [each.digest()], DEFAULTS, None) for each in (whole, split))
    assert one.verdict == other.verdict
    assert one.ranks.world == other.ranks.world
    assert one.rows()[0]["progress"]["last_step"] == other.rows()[0]["progress"]["last_step"]
