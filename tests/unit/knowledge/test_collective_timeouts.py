"""Which time-out of collectives a command line or an environment tells of: every row, and what says nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.children.requests import IdentifyProcesses, WorkerState
from slurm_watchdog.knowledge.trainer_options import (
    MAX_S,
    NCCL_DEFAULT_S,
    READ_VARIABLES,
    TIMEOUT_OPTIONS,
    VARIABLES,
    Timeout,
    timeout_in,
)
from tests.builders.requests import answer_to

CASES = [
    ("python pretrain_gpt.py --bf16 --distributed-timeout-minutes 60 --save /c", 3600.0),
    ("python pretrain_gpt.py --distributed-timeout-minutes=60 --distributed-timeout-seconds-after-init 90", 90.0),
    ("torchrun train.py --ddp_timeout 7200 --fp16", 7200.0),
    ("torchrun train.py --ddp-timeout=900", 900.0),
    ("python -m torchtitan.train --comm.train_timeout_seconds 300", 300.0),
    ("composer train.py c.yaml dist_timeout=1800.0", 1800.0),
    ("python -m verl.trainer.main_ppo actor_rollout_ref.nccl_timeout=1200", 1200.0),
    ("python -m verl.trainer.main_ppo ++actor_rollout_ref.nccl_timeout=1200", 1200.0),
    ("python cli.py fit --trainer.strategy.init_args.timeout=1:30:00", 5400.0),
    ("python cli.py fit --trainer.strategy.timeout 45:00", 2700.0),
    ("python t.py --ddp_timeout 100 --ddp_timeout 200", 200.0),
]  # fmt: skip


@pytest.mark.parametrize(("line", "seconds"), CASES)
def test_an_option_of_the_trainer_says_it(line: str, seconds: float) -> None:
    assert timeout_in({}, line.split()) == Timeout(seconds, assumed=False)


def test_every_option_of_the_table_has_a_case() -> None:
    told = " ".join(line for line, _ in CASES).replace("-", "_")
    assert [name for _, name, _ in TIMEOUT_OPTIONS if name not in told] == []


def test_a_variable_says_it_where_no_option_does() -> None:
    for _, name, scale in VARIABLES:
        assert timeout_in({name: "20", "MASTER_ADDR": "n1"}, ()) == Timeout(20 * scale, assumed=False)
        assert timeout_in({name: "20"}, ["x", "--ddp_timeout", "90"]) == Timeout(90.0, assumed=False)


def test_where_nothing_says_it_torchs_own_is_assumed_of_a_rank_that_meets_others() -> None:
    assert timeout_in({"MASTER_ADDR": "n1"}, ()) == Timeout(NCCL_DEFAULT_S, assumed=True)
    assert timeout_in({}, ["python", "train.py"]) is None


def test_a_shorter_heartbeat_of_nccl_is_taken_as_the_end_unless_its_monitor_is_off() -> None:
    environ = {"MASTER_ADDR": "n1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120"}
    assert timeout_in(environ, ()) == Timeout(120.0, assumed=True)
    assert timeout_in(environ | {"TORCH_NCCL_ENABLE_MONITORING": "0"}, ()) == Timeout(600.0, assumed=True)
    assert timeout_in(environ | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200"}, ()) == Timeout(600.0, assumed=True)


def test_where_the_handling_of_errors_is_switched_off_there_is_no_time_out() -> None:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        environ = {"MASTER_ADDR": "n1", name: "0"}
        assert timeout_in(environ, ()) is None
        assert timeout_in(environ | {"TORCH_NCCL_BLOCKING_WAIT": "1"}, ()) == Timeout(600.0, assumed=True)


@pytest.mark.parametrize(
    "words",
    [
        ["--ddp_timeout"],
        ["--ddp_timeout", "soon"],
        ["--ddp_timeout", "-5"],
        ["--ddp_timeout", "0"],
        ["--ddp_timeout", "nan"],
        ["--ddp_timeout", "1e300"],
        ["ddp_timeout", "90"],
        ["--my_ddp_timeout", "90"],
        ["--ddp_timeout_x=90"],
    ],
)
def test_nonsense_says_nothing(words: list[str]) -> None:
    assert timeout_in({}, words) is None


@given(
    st.dictionaries(st.sampled_from(sorted(READ_VARIABLES)), st.text(max_size=12)),
    st.lists(st.text(max_size=30), max_size=6),
)
def test_whatever_stands_there_a_time_out_is_positive_and_bounded(environ: dict[str, str], words: list[str]) -> None:
    found = timeout_in(environ, [*words, "--ddp_timeout", *words])
    assert found is None or 0 < found.seconds <= MAX_S


def test_a_real_rank_is_read_at_discovery_and_its_secrets_are_not_kept() -> None:
    program = "print(flush=True); import time; time.sleep(60)"
    environ = {"RANK": "0", "MASTER_ADDR": "n1", "DEEPSPEED_TIMEOUT": "45", "SECRET": "hush"}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program, "--bf16"], env=environ, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            answer = answer_to(IdentifyProcesses([process.pid]), WorkerState(os.getuid()))[0]
        finally:
            process.kill()
    assert answer.collective_timeout == Timeout(2700.0, assumed=False)
    assert answer.environ == {"RANK": "0"}
