"""One literal line for each row of the tables: progress, phases, checkpoints, errors, and what is none of them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.knowledge.log_signatures import SIGNATURES, Signature, log_table
from slurm_watchdog.knowledge.progress_patterns import PATTERNS, SIGNS, Pattern, Sign
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.text import clean_line, split_prefix

CAPTURES = Path(__file__).parents[2] / "captures/logs"

BLOOM = (
    "[default7]: iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  "
    "20155564032 | elapsed time "
    "per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch size:  2048 | lm loss: "
    "2.463556E+00 | grad norm: 0.174 "
    "| num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per "
    "second: 19.463 | TFLOPs: 149.02 |"
)
MEGATRON = (
    " [2024-05-01 10:00:00] iteration       10/   15000 | consumed samples:         2560 | elapsed time "
    "per iteration (ms): 1234.5 | "
    "throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.5E-06 | global batch size:   256 | lm "
    "loss: nan | loss scale: 1.0 | "
)

# pattern, line, step, total, seconds a step, loss
PROGRESS = [
    ("megatron", BLOOM, 12695, 115311, 105.22, 2.463556),
    ("megatron", MEGATRON, 10, 15000, 1.2345, math.nan),
    ("deepspeed", "[2024-05-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, "
        "skipped=0, lr=[0.001], mom=[(0.9, 0.999)]", 10, None, None, None),
    ("nemo2", "Training epoch 0, iteration 9/999 | lr: 1.499e-07 | global_batch_size: 512 | global_step: "
        "9 | reduced_train_loss: 11.03 | train_step_timing in s: 5.2", 9, None, 5.2, 11.03),
    ("nemo", "Epoch 0: :   1%|          | 10/1000 [00:52<1:26:40, v_num=0, reduced_train_loss=10.90, "
        "global_step=9.000, consumed_samples=2560.0]", 9, None, None, 10.9),
    ("lightning", "Epoch 2:  10%|#         | 12/120 [00:10<01:30,  1.20it/s, v_num=0, loss=2.31]", 252, None, 1 / 1.2, 2.31),
    ("tqdm", " 12%|█▏        | 120/1000 [00:10<01:13, 1.25s/it]", 120, 1000, 1.25, None),
    ("tqdm", " 12%|█▏        | 120/1000 [00:10<01:13, 4.00it/s, loss=3.5]", 120, 1000, 0.25, 3.5),
    ("torchtitan", "[rank0]:\x1b[31mstep: 10  \x1b[32mloss:  7.5467  \x1b[33mmemory: 12.00GiB(15.1%)  "
        "tps: 1,234", 10, None, None, 7.5467),
    ("nanogpt", "iter 100: loss 3.1234, time 250.50ms, mfu 30.12%", 100, None, 0.2505, 3.1234),
    ("maxtext", "completed step: 5, seconds: 0.400, TFLOP/s/device: 180.5, loss: 10.1", 5, None, 0.4, 10.1),
    ("composer", "[batch=10/1000]:", 10, 1000, None, None),
    ("fairseq", "2024-05-01 10:00:00 | INFO | train_inner | epoch 001:     10 / 1000 loss=15.2, "
        "ppl=37000, wps=1000", 10, None, None, 15.2),
    ("num_updates", "| train | loss 4.2 | num_updates 100 | lr 0.0001", 100, None, None, 4.2),
    ("json", '{"global_step": 120, "loss": 2.5, "step_time": 0.5}', 120, None, 0.5, 2.5),
    ("json", '{"epoch": 1, "update": 0.1, "loss": "5.3", "num_updates": "100", "lr": "0.01"}', 100, None, None, 5.3),
    ("json", '{"step": 7, "loss": NaN}', 7, None, None, math.nan),
    ("hf_trainer", "{'loss': 2.31, 'learning_rate': 5e-05, 'epoch': 0.5, 'step': 500}", 500, None, None, 2.31),
    ("key_value", "2024-05-01 10:00:00 INFO train step=12 loss=2.5", 12, None, None, 2.5),
    ("step_of", "2024-05-01 10:00:00,123 INFO step 12/100 loss 2.0", 12, 100, None, 2.0),
    ("step_of", "Iteration 12 of 100", 12, 100, None, None),
    ("bracketed", "[step 12] loss: 2.0", 12, None, None, 2.0),
    ("step", "Step: 12 | Loss: 2.0", 12, None, None, 2.0),
    ("step", "iteration 5", 5, None, None, None),
    ("key_value", "step=12 train_loss=2.5 time per step: 250 ms", 12, None, 0.25, 2.5),
    ("key_value", "step=12 val_loss=9 reduced_train_loss: 2.5 iter_time = 2", 12, None, 2.0, 2.5),
]  # fmt: skip

# sign, line, kind, step, phase
SIGN_LINES = [
    ("megatron_saved", "  successfully saved checkpoint at iteration   45000 to /ckpt", EventKind.CHECKPOINT, 45000, None),
    ("megatron_saved", "  successfully saved checkpoint from iteration     100 to /ckpt [ t 1/1, p 1/1 ]", EventKind.CHECKPOINT, 100, None),
    ("megatron_saving", "[default0]: saving checkpoint at iteration   45000 to /ckpt", EventKind.PHASE, 45000, "checkpointing"),
    ("megatron_validation", "[default7]:valid loss at iteration 45000 | lm loss value: 2.327091E+00 | lm "
        "loss PPL: 1.024808E+01 |", EventKind.PHASE, 45000, "evaluating"),
    ("deepspeed_saved", "[INFO] [torch_checkpoint_engine.py:33:commit] [Torch] Checkpoint global_step100 "
        "is ready now!", EventKind.CHECKPOINT, 100, None),
    ("deepspeed_saving", "[INFO] [logging.py:96:log_dist] [Rank 0] [Torch] Checkpoint global_step100 is "
        "about to be saved!", EventKind.PHASE, 100, "checkpointing"),
    ("torchtitan_saved", "Finished saving the checkpoint (or staging if async is enabled)in 3.15 seconds.", EventKind.CHECKPOINT, None, None),
    ("ray_saved", "(RayTrainWorker pid=17) Checkpoint successfully created at: "
        "Checkpoint(filesystem=local, path=/results/a/checkpoint_2026-11-20_10-00-00.1)", EventKind.CHECKPOINT, None, None),
    ("torchtitan_saving", "Saving the checkpoint (or staging if async is enabled).", EventKind.PHASE, None, "checkpointing"),
    ("hf_saving", "Saving model checkpoint to out/checkpoint-500", EventKind.PHASE, 500, "checkpointing"),
    ("hf_evaluation", "***** Running Evaluation *****", EventKind.PHASE, None, "evaluating"),
    ("fairseq_saved", "Saved checkpoint checkpoints/checkpoint_1_100.pt (epoch 1 @ 100 updates, score "
        "None) @ 1 epochs, 100 updates", EventKind.CHECKPOINT, 100, None),
    ("fairseq_saving", "Preparing to save checkpoint for epoch 1 @ 100 updates", EventKind.PHASE, 100, "checkpointing"),
    ("maxtext_saved", "saved a checkpoint at step 300", EventKind.CHECKPOINT, 300, None),
    ("nanogpt_evaluation", "step 250: train loss 3.1, val loss 3.2", EventKind.PHASE, 250, "evaluating"),
    ("validation_bar", "Validation DataLoader 0:  20%|##        | 2/10 [00:01<00:04,  2.00it/s]", EventKind.PHASE, None, "evaluating"),
    ("evaluation_bar", "Evaluating:  20%|##        | 2/10 [00:01<00:04,  2.00it/s]", EventKind.PHASE, None, "evaluating"),
    ("saved", "checkpoint saved at step 40", EventKind.CHECKPOINT, 40, None),
    ("saving", "saving checkpoint, step 40", EventKind.PHASE, 40, "checkpointing"),
    ("transferring", "Uploading checkpoint to s3://runs/m4/global_step500", EventKind.PHASE, None, "checkpointing"),
    ("transferring", "[rank0] gathering full checkpoint on rank 0", EventKind.PHASE, None, "checkpointing"),
    ("evaluation_step", "[rank0]:[titan] 2026-03-09 04:04:40,000 - root - INFO - validate step: 30  "
        "loss: 3.1", EventKind.PHASE, None, "evaluating"),
    ("initializing", "> initializing torch distributed ...", EventKind.PHASE, None, "starting"),
    ("initializing", "> setting random seeds to 42 ...", EventKind.PHASE, None, "starting"),
    ("initializing", "[rank 0] Initialized process group, world size 8", EventKind.PHASE, None, "starting"),
    ("evaluating", "starting evaluation at step 100", EventKind.PHASE, None, "evaluating"),
    ("validating", "validating on 3 data sets", EventKind.PHASE, None, "evaluating"),
    ("finishing", "[after training is done] datetime: 2024-05-01 10:00:00", EventKind.PHASE, None, "finishing"),
    ("finishing", "Training loop finished, exiting", EventKind.PHASE, None, "finishing"),
    ("finishing", "Total training time: 3:20:11", EventKind.PHASE, None, "finishing"),
    ("finishing", "End of training.", EventKind.PHASE, None, "finishing"),
    ("max_steps", "Reached maximum number of steps 500. Exiting.", EventKind.PHASE, None, "finishing"),
    ("max_steps", "max_steps (500) reached, stopping", EventKind.PHASE, None, "finishing"),
    ("torn_down", "[rank0] destroying process group", EventKind.PHASE, None, "finishing"),
    ("torn_down", "Process group destroyed", EventKind.PHASE, None, "finishing"),
    ("wandb_summary", "wandb: Run summary:", EventKind.PHASE, None, "finishing"),
]  # fmt: skip

# signature, line, rank: the others are beside their rows, in knowledge/data
ERRORS_OF_RANKS = [
    ("cuda_oom", "[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 3),
    ("nccl_watchdog", "slurm0-a3-ghpc-8: [rank17]:[E ProcessGroupNCCL.cpp:1182] [Rank 2] NCCL watchdog "
        "thread terminated with exception: [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=4, OpType=ALLREDUCE)", 17),
    ("stale_file_handle", "17: OSError: [Errno 116] Stale file handle: '/data/x'", 17),
    ("host_oom", "[rank1]:   what():  std::bad_alloc", 1),
    ("interrupted", "[rank1]: KeyboardInterrupt", 1),
    ("launcher", "[host1:0]ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) "
        "local_rank: 0 (pid: 5)", 0),
    ("collective_mismatch", "[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank "
        "1 is running another one", 1),
    ("nccl_watchdog", "[rank3]:[E626 06:24:44.90 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID "
        "0(default_pg) Rank 3] Exception (either an error or timeout) detected by watchdog at work: "
        "8, last enqueued NCCL work: 9, last completed NCCL work: 7.", 3),
    ("python_exception", "[host1:2]AttributeError: 'list' object has no attribute 'sum'", 2),
]  # fmt: skip

NOTHING = [
    "[2022-05-01 03:56:11] PULSE: tr11-176B-ml is waiting to be scheduled (1528874_[1-3%1] on 'gpu_p5' partition)",
    "[2022-05-01 03:56:11] PULSE: tr11-176B-ml is running for 1-07:27:33 since 2022-04-29T20:28:38 "
    "(1528763 on 'gpu_p5' partition (jean-zay-iam[01-34,36-49])",
    "2024-05-01 10:00:00,123 INFO nothing happens",
    "PID 756282:  After clip in _do_batch",
    "starting from step 40",
    "Timeout at step 30",
    "checkpoint every iteration 100",
    "retrying request, step 3/5",
    "attempt 3/5 failed, step 3",
    "resuming from step 100",
    "Loading checkpoint shards: 100%|##########| 4/4 [00:10<00:00,  2.5s/it]",
    "Map: 50%|#####     | 500/1000 [00:10<00:10, 50.00it/s]",
    "{'eval_loss': 2.31, 'epoch': 0.5}",
    "{'loss': 2.31, 'epoch': nan}",
    "{'loss': 2.31, 'epoch': -1}",
    "{'loss': 2.31, 'epoch': True}",
    "tokens per second: 123456",
    "elapsed time 10 s, 3 errors were handled",
    "0 errors found",
    "ConnectionError: will be retried in 5 s",
    "UserWarning: CUDA initialization: CUDA error: unknown error (Triggered internally at x.cpp:108.)",
    "CUDA out of memory, skipping this sample",
    "flash attention: undefined symbol, falling back to eager",
    "n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.4<0>",
    "INFO: loss info: class loss 1, inf norm of the gradients 2.5, nan checks are on",
    "rate: 4.475E-05 | global batch size: 2048 | lm loss: 2.117073E+00",
    "max_steps: 1000 warmup steps: 10",
    "",
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "line", "step", "total", "seconds", "loss"), PROGRESS)
def test_a_line_of_progress(
    pattern: str, line: str, step: int, total: int | None, seconds: float | None, loss: float | None
) -> None:
    fact = parse_line(line)
    assert fact is not None
    assert (fact.kind, fact.pattern, fact.step, fact.total_steps) == (
        EventKind.PROGRESS,
        pattern,
        step,
        total,
    )
    assert fact.step_s == pytest.approx(seconds)
    assert fact.loss == pytest.approx(loss, nan_ok=True)


@pytest.mark.parametrize(("name", "line", "kind", "step", "phase"), SIGN_LINES)
def test_a_line_that_ends_or_begins_something(
    name: str, line: str, kind: EventKind, step: int | None, phase: str | None
) -> None:
    fact = parse_line(line)
    assert fact is not None
    assert (fact.pattern, fact.kind, fact.step, fact.phase) == (name, kind, step, phase)


@pytest.mark.parametrize(("name", "line", "rank"), ERRORS_OF_RANKS)
def test_a_line_of_an_error_names_its_rank(name: str, line: str, rank: int) -> None:
    fact = parse_line(line)
    assert fact is not None
    assert (fact.kind, fact.pattern, fact.rank) == (EventKind.ERROR, name, rank)


@pytest.mark.parametrize("line", NOTHING)
def test_a_line_that_says_nothing(line: str) -> None:
    assert parse_line(line) is None


def test_every_row_of_the_tables_has_its_line() -> None:
    captured = {line.split()[0] for path in CAPTURES.glob("*.txt") for line in path.read_text().splitlines()}
    assert {row.name for row in PATTERNS} <= {row[0] for row in PROGRESS} | captured
    assert {row.name for row in SIGNS} <= {row[0] for row in SIGN_LINES} | captured


def test_every_signature_has_its_words_and_the_sets_name_signatures() -> None:
    table = log_table()
    assert set(table.means) == {row.name for row in table.signatures}
    assert all(means != name for name, means in table.means.items())
    assert set(table.means) >= table.from_outside | table.headers | table.storage_full
    assert table.from_outside <= table.consequences
    for name in table.consequences:
        assert all(row.consequence for row in table.signatures if row.name == name)


@pytest.mark.parametrize("row", [*SIGNATURES, *SIGNS, *PATTERNS], ids=lambda row: row.name)
def test_no_expression_has_two_runs_of_blanks_beside_each_other(row: Signature | Sign | Pattern) -> None:
    """`\\s*x?\\s*` tries every way to part a line of blanks in two: seconds for a line."""
    assert not re.search(r"\\s[*+](?:\[[^\]]*\]|\\.|[^\\(\[])[?*]\\s[*+]", row.regex.pattern)


@pytest.mark.parametrize(
    ("line", "rest", "who"),
    [
        ("[default7]: iteration", "iteration", {"local_rank": 7}),
        ("[rank17]: x", "x", {"rank": 17}),
        ("17: x", "x", {"rank": 17}),
        ("[host1:2]x", "x", {"host": "host1", "rank": 2}),
        ("slurm0-a3-ghpc-8: [rank17]:x", "x", {"host": "slurm0-a3-ghpc-8", "rank": 17}),
        ("3: [default1]:x", "x", {"rank": 3, "local_rank": 1}),
        ("epoch 1: x", "epoch 1: x", {}),
    ],
)
def test_a_prefix_names_its_rank(line: str, rest: str, who: dict[str, object]) -> None:
    assert split_prefix(line) == (rest, who)


def test_a_line_kept_as_evidence_is_short_and_has_no_control_characters() -> None:
    assert clean_line("\x1b[31mred\x1b[0m\x07\ttext") == "red text"
    assert len(clean_line("x" * 10_000_000)) == 500


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser(line: str) -> None:
    parse_line(line)


@pytest.mark.parametrize(
    "line", ["step=251 loss=nan", "step=251 loss=inf", "step: 251, loss: NaN", "step 251 loss=-inf"]
)
def test_a_loss_that_is_no_number_makes_no_prose_of_a_step(line: str) -> None:
    fact = parse_line(line)
    assert fact is not None
    assert fact.step == 251
    assert fact.loss is not None and not math.isfinite(fact.loss)
