"""Whom `scan-log` names where the first line of a failure does not say whose it is, and what only looks like
a cause."""

from __future__ import annotations

import pytest

from tests.builders.failed_logs import AROUND, SPEAKERS, Expected, verdict_of

CASES = [*SPEAKERS, *AROUND]


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_log_gives_its_verdict(text: str, expected: Expected) -> None:
    assert verdict_of(text) == expected


@pytest.mark.parametrize("prefix", ["[pod/train-worker-4/pytorch] ", "2024-05-01T10:00:09.123456789Z stderr F "])
def test_what_a_container_runtime_puts_before_a_line_names_nobody_and_hides_nobody(prefix: str) -> None:
    raised = 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    x["a"]\nKeyError: \'a\'\n'
    text = "".join(f"{prefix}[rank2]: {line}\n" for line in raised.splitlines())
    assert verdict_of(text) == ("python_exception", 2, None)
    assert verdict_of("".join(f"{prefix}{line}\n" for line in raised.splitlines())) == ("python_exception", None, None)


def test_the_tasks_of_a_step_are_the_daemons_of_mpirun_and_no_ranks() -> None:
    raised = "".join(
        f"[1,1]<stderr>:{line}\n"
        for line in ("Traceback (most recent call last):", '  File "t.py", line 3, in f', "KeyError: 'a'")
    )
    ended = "srun: error: n3: task 0: Exited with exit code 1\nsrun: error: n4: task 1: Terminated\n"
    found = verdict_of(raised + ended)
    assert found is not None
    assert found[:2] == ("python_exception", 1)
    assert found[2] != "n4"


def test_tasks_that_died_alike_on_several_nodes_name_nobody() -> None:
    died = "srun: error: n{}: task {}: Segmentation fault\n"
    assert verdict_of(died.format(3, 15) + died.format(4, 16)) == ("segmentation_fault", None, None)
    assert verdict_of(died.format(3, 15) + died.format(3, 14)) == ("segmentation_fault", 15, "n3")


def test_hydra_says_that_its_program_raised_something() -> None:
    found = verdict_of("[2025-10-31 05:07:11,062][__main__][ERROR] - Error executing job with overrides: ['a=b']\n")
    assert found == ("launcher", None, None)


def test_a_rank_that_failed_is_not_on_the_host_of_a_task_that_was_ended_after_another_one_failed() -> None:
    raised = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"t.py\", line 3, in f\n[rank1]: KeyError: 'a'\n"
    )
    ended = "srun: error: n3: task 0: Exited with exit code 1\nsrun: error: n4: task 1: Terminated\n"
    found = verdict_of(raised + ended)
    assert found is not None
    assert found[:2] == ("python_exception", 1)
    assert found[2] != "n4"


@pytest.mark.parametrize("prefix", ["[n2:1] ", "[n2:1]"])
def test_a_logger_that_puts_the_time_before_the_header_alone_does_not_hide_the_exception(prefix: str) -> None:
    raised = (
        "2024-05-01 10:00:09 ERROR Traceback (most recent call last):", '  File "d.py", line 3, in read', "    x = f()",
        "OSError: [Errno 5] Input/output error: '/data/s-12.bin'",
    )  # fmt: skip
    found = verdict_of("".join(f"{prefix}{line}\n" for line in raised))
    assert found is not None
    assert (found[0], found[2]) == ("io_error", "n2")


@pytest.mark.parametrize(
    "prefix",
    ["[n2][rank5] ", "[n2] [rank5]: ", "n2:rank5: ", "[n2|rank 5] ", "[n2 rank=5/8] ", "n2.cluster.local: [rank5]: "],
)
def test_a_host_and_a_word_of_a_rank_before_a_line_name_both(prefix: str) -> None:
    found = verdict_of(f"{prefix}OSError: [Errno 5] Input/output error: '/data/s-12.bin'\n")
    assert found is not None
    assert found[:2] == ("io_error", 5)
    assert (found[2] or "").startswith("n2")


@pytest.mark.parametrize("prefix", ["[tp0][rank5] ", "[pg2 rank 5] ", "epoch3 rank 5: ", "step100: rank 3: "])
def test_a_group_or_a_step_before_the_word_of_a_rank_is_no_host_and_its_number_may_be_of_the_group(prefix: str) -> None:
    assert verdict_of(f"{prefix}OSError: [Errno 5] Input/output error: '/data/s-12.bin'\n") == ("io_error", None, None)


SETTINGS = (
    '  "storage": {"retry_on": ["OSError: [Errno 116] Stale file handle", "OSError: [Errno 5] Input/output error"]},\n',
    '  "on_timeout": "Watchdog caught collective operation timeout -> abort",\n',
    "  'alerts': {'patterns': ['CUDA out of memory', 'uncorrectable ECC error']},\n",
    '      "OSError: [Errno 28] No space left on device",\n',
    "    - 'RuntimeError: NCCL error: unhandled system error'\n",
    "config: {'retry_on': ['OSError: [Errno 116] Stale file handle'], 'oom': 'CUDA out of memory', 'lr': 0.1}\n",
    "Namespace(data='/d', on_error='raise RuntimeError: CUDA error: unknown', seed=1)\n",
    "TrainingArguments(output_dir='/o', on_full='OSError: [Errno 28] No space left on device')\n",
    "the options = {'on_full': 'OSError: [Errno 28] No space left on device'}\n",
)


@pytest.mark.parametrize("line", SETTINGS)
def test_a_configuration_that_names_errors_is_none_of_them(line: str) -> None:
    assert verdict_of("{\n" + line + "}\nbuilding the model\n") is None


@pytest.mark.parametrize("key", ["message", "error", "exc_info", "stack_trace", "error_message"])
def test_a_record_of_several_lines_says_what_happened(key: str) -> None:
    found = verdict_of('{\n  "rank": 3,\n  "' + key + '": "OSError: [Errno 28] No space left on device"\n}\n')
    assert found is not None
    assert found[0] == "disk_full"


@pytest.mark.parametrize("stamp", ["Nov 20 10:10:10", "Nov  2 10:10:10", "2026-11-20T10:10:10+0100"])
def test_what_journalctl_puts_before_a_line_is_a_host_and_hides_no_rank(stamp: str) -> None:
    said = f"{stamp} gpu-b02 train[405]: [rank5] OSError: [Errno 5] Input/output error: '/data/x'\n"
    assert verdict_of(said) == ("io_error", 5, "gpu-b02")
    module = "Nov 20 10:10:10 worker3 train[405]: OSError: [Errno 5] Input/output error: '/data/x'\n"
    assert verdict_of(module) == ("io_error", None, None)


def test_microseconds_are_nobody_who_tells_of_errors() -> None:
    queue = (
        ":0:rocdevice.cpp            :2984: 413432 us: [pid:4005 tid:0x7f] Callback: Queue 0x7f0 aborting with error : "
        "HSA_STATUS_ERROR_MEMORY_FAULT: Agent attempted to access an inaccessible address. code: 0x2b\n"
    )
    died = "srun: error: n6: task 5: Aborted (core dumped)\nsrun: Terminating StepId=5.0\nsrun: error: n5: tasks 0-3: Terminated\n"
    assert verdict_of(queue + died) == ("cuda_error", 5, "n6")
    told = "Yesterday rank 3 told us after some hours of training: CUDA error: unspecified launch failure, and we do not know why\n"
    assert verdict_of(told) is None


@pytest.mark.parametrize(
    "line",
    [
        "Error in config: OSError: [Errno 28] No space left on device\n",
        "OSError: [Errno 28] No space left on device: options={'a': 1}\n",
        "result: {'status': 'failed', 'error': 'OSError: [Errno 28] No space left on device'}\n",
    ],
)
def test_an_error_beside_the_word_of_a_configuration_is_one(line: str) -> None:
    assert verdict_of(line) == ("disk_full", None, None)
