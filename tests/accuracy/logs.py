"""How frameworks write their logs. Each `Format` is one framework's own words, as its source or its users'
logs show them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

DAY0 = "2024-03-01"
"""All simulated jobs start at midnight of this day: logs need dates, and nothing depends on them."""


@dataclass(frozen=True)
class Step:
    """What a trainer knows when it writes its line about a step."""

    number: int
    total: int
    seconds: float
    loss: float
    batch: int
    world: int
    t: float
    """Seconds since the start of the simulation."""


Lines = list[str]
StepWriter = Callable[[Step], Lines]
Writer = Callable[[int, float], Lines]
"""Given step and time."""


@dataclass(frozen=True)
class Format:
    """One framework. What it does not write is an empty list."""

    name: str
    step: StepWriter
    start: Writer
    saving: Writer
    saved: Writer
    evaluating: Writer
    evaluated: Writer
    every: int = 1
    """Steps between two lines, usually."""
    finished: Writer = lambda step, t: []
    tells_saved: bool = True
    """Whether its log says that a checkpoint is complete, with its step."""
    redraws: Callable[[Step], str] | None = None
    """A bar that is redrawn, several times a step, without its count rising."""


def stamp(t: float) -> str:
    """`t` as the date and time that most logs begin with."""
    day, rest = divmod(max(0.0, t), 86400.0)
    whole = int(rest)
    return f"2024-03-{1 + int(day):02d} {whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _ms(t: float) -> str:
    return f"{stamp(t)},{int(1000 * (t % 1)):03d}"


def _number(value: float, digits: str) -> str:
    return "nan" if math.isnan(value) else format(value, digits)


def _silent(step: int, t: float) -> Lines:
    return []


def _bar(done: int, total: int) -> str:
    filled = 10 * done // max(1, total)
    return f"{100 * done // max(1, total):3d}%|{'█' * filled}{' ' * (10 - filled)}|"


def _clock(seconds: float) -> str:
    whole = int(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def _pace(seconds: float) -> str:
    return f"{seconds:.2f}s/it" if seconds >= 1 else f"{1 / seconds:.2f}it/s"


# ------------------------------------------------------------------------------------ Megatron


def _bloom_step(s: Step) -> Lines:
    tflops = 149.0 * 105.0 / s.seconds if s.seconds > 50 else 149.0
    return [
        f"[default7]: iteration {s.number:8d}/{s.total:8d} | consumed samples: {s.number * s.batch:12d} | consumed tokens: "
        f"{s.number * s.batch * 2048:12d} | elapsed time per iteration (s): {s.seconds:.2f} | learning rate: 5.973E-05 | "
        f"global batch size: {s.batch:5d} | lm loss: {_number(s.loss, '.6E')} | grad norm: 0.174 | num zeros: 0.0 | "
        f"number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: "
        f"{s.batch / s.seconds:.3f} | TFLOPs: {tflops:.2f} |"
    ]


def _megatron_step(s: Step) -> Lines:
    return [
        f" [{stamp(s.t)}] iteration {s.number:8d}/{s.total:8d} | consumed samples: {s.number * s.batch:12d} | "
        f"elapsed time per iteration (ms): {1000 * s.seconds:.1f} | throughput per GPU (TFLOP/s/GPU): 412.3 | "
        f"learning rate: 3.000000E-04 | global batch size: {s.batch:5d} | lm loss: {_number(s.loss, '.6E')} | "
        "loss scale: 1.0 | grad norm: 0.523 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    ]


def _megatron_start(step: int, t: float) -> Lines:
    lines = [
        "using world size: 8, data-parallel size: 8, context-parallel size: 1, tensor-model-parallel size: 1",
        "> initializing torch distributed ...",
        "> building train, validation, and test datasets for GPT ...",
        " > loading indexed mapping from /gpfs/data/index-cache/train_doc_idx.npy",
        f"time to initialize megatron (seconds): {t % 97:.3f}",
    ]
    if step:
        lines.append(f"  successfully loaded checkpoint from /gpfs/m4/checkpoints [ t 1/1, p 1/1 ] at iteration {step}")
    return [*lines, "[before the start of training step] datetime: " + stamp(t)]


def _megatron_saving(step: int, t: float) -> Lines:
    return [f"saving checkpoint at iteration {step:7d} to /gpfs/m4/checkpoints in torch_dist format"]


def _megatron_saved(step: int, t: float) -> Lines:
    return [
        f"  successfully saved checkpoint at iteration {step:7d} to /gpfs/m4/checkpoints",
        "(min, max) time across ranks (ms):",
        "    save-checkpoint ................................: (40012.31, 40013.02)",
    ]


def _megatron_evaluated(step: int, t: float) -> Lines:
    rule = "-" * 98
    text = f" validation loss at iteration {step} | lm loss value: 2.351712E+00 | lm loss PPL: 1.050354E+01 | "
    return [rule, text, rule]


# ------------------------------------------------------------------------------------ DeepSpeed


def _deepspeed_step(s: Step) -> Lines:
    head = f"[{_ms(s.t)}] [INFO]"
    return [
        f"{head} [logging.py:96:log_dist] [Rank 0] step={s.number}, skipped=0, lr=[9.65e-06], mom=[(0.9, 0.95)]",
        f"steps: {s.number} loss: {_number(s.loss, '.4f')} iter time (s): {s.seconds:.3f} samples/sec: {s.batch / s.seconds:.3f}",
        f"{head} [timer.py:260:stop] epoch=0/micro_step={4 * s.number}/global_step={s.number}, RunningAvgSamplesPerSec="
        f"{s.batch / s.seconds:.2f}, CurrSamplesPerSec={s.batch / s.seconds:.2f}, MemAllocated=12.9GB, MaxMemAllocated=47.2GB",
    ]


def _deepspeed_saving(step: int, t: float) -> Lines:
    head = f"[{_ms(t)}] [INFO]"
    return [
        f"{head} [logging.py:96:log_dist] [Rank 0] [Torch] Checkpoint global_step{step} is about to be saved!",
        f"{head} [torch_checkpoint_engine.py:21:save] [Torch] Saving /gpfs/ds/global_step{step}/mp_rank_00_model_states.pt...",
    ]


def _deepspeed_saved(step: int, t: float) -> Lines:
    return [
        f"[{_ms(t)}] [INFO] [torch_checkpoint_engine.py:33:commit] [Torch] Checkpoint global_step{step} is ready now!"
    ]


# ------------------------------------------------------------------------------------ Hugging Face Trainer


def _hf_bar(s: Step) -> str:
    left = (s.total - s.number) * s.seconds
    return f"{_bar(s.number, s.total)} {s.number}/{s.total} [{_clock(s.number * s.seconds)}<{_clock(left)}, {_pace(s.seconds)}]"


def _hf_step(s: Step) -> Lines:
    lines = ["\r" + _hf_bar(s)]
    if s.number % 10 == 0:
        lines.append(
            f"{{'loss': {_number(s.loss, '.4f')}, 'grad_norm': 0.5312, 'learning_rate': 4.95e-05, 'epoch': {s.number / s.total:.2f}}}"
        )
    return lines


def _hf_start(step: int, t: float) -> Lines:
    return [
        "Map: 100%|██████████| 51760/51760 [00:12<00:00, 4123.11 examples/s]",
        "***** Running training *****",
        "  Num examples = 51,760",
        "  Instantaneous batch size per device = 4",
        "  Total optimization steps = 12,940",
        *([f"  Continuing training from global step {step}"] if step else []),
    ]


def _hf_evaluating(step: int, t: float) -> Lines:
    return ["", "***** Running Evaluation *****", "  Num examples = 2000", "  Batch size = 8"]


def _hf_evaluated(step: int, t: float) -> Lines:
    return ["{'eval_loss': 1.2034, 'eval_runtime': 120.31, 'eval_samples_per_second': 16.6, 'epoch': 0.1}"]


# ------------------------------------------------------------------------------------ Lightning, NeMo


def _lightning_bar(s: Step) -> str:
    per_epoch = 1000
    epoch, inner = divmod(s.number - 1, per_epoch)
    inner += 1
    loss = _number(s.loss, ".3f")
    return (
        f"Epoch {epoch}: {_bar(inner, per_epoch)} {inner}/{per_epoch} [{_clock(inner * s.seconds)}<"
        f"{_clock((per_epoch - inner) * s.seconds)}, {_pace(s.seconds).strip()}, v_num=3, train_loss={loss}]"
    )


def _nemo_bar(s: Step) -> str:
    return (
        f"Epoch 0: : {_bar(s.number, s.total)} {s.number}/{s.total} [{_clock(s.number * s.seconds)}<"
        f"{_clock((s.total - s.number) * s.seconds)}, reduced_train_loss={_number(s.loss, '.3f')}, global_step={s.number - 1}.0, "
        f"consumed_samples={s.number * s.batch}.0, train_step_timing in s={s.seconds:.3f}]"
    )


def _nemo2_step(s: Step) -> Lines:
    return [
        f"Training epoch 0, iteration {s.number - 1}/{s.total - 1} | lr: 0.0003 | global_batch_size: {s.batch} | "
        f"global_step: {s.number - 1} | reduced_train_loss: {_number(s.loss, '.3f')} | train_step_timing in s: {s.seconds:.3f} | "
        f"consumed_samples: {s.number * s.batch}"
    ]


def _validation_bar(step: int, t: float) -> Lines:
    return [
        f"\rValidation DataLoader 0: {_bar(done, 20)} {done}/20 [00:{done:02d}<00:10,  1.10s/it]" for done in (0, 1)
    ]


# ------------------------------------------------------------------------------------ torchtitan, nanoGPT,
# MaxText, own ones


def _titan(t: float, text: str) -> str:
    return f"[rank0]:[titan] {_ms(t)} - root - INFO - {text}"


def _titan_step(s: Step) -> Lines:
    tps = int(s.batch * 8192 / s.seconds / s.world)
    return [
        _titan(
            s.t,
            f"step: {s.number:2d}  loss: {_number(s.loss, '7.4f')}  grad_norm:  0.5102  memory: 41.50GiB(52.4%)  tps: {tps:,}  tflops: 310.02  mfu: 31.35%",
        )
    ]


def _titan_start(step: int, t: float) -> Lines:
    return [
        _titan(t, "Starting job: llama3_8b"),
        _titan(t, "Building 1-D device mesh with ['dp_shard'], [8]"),
        _titan(t, "Compiling each TransformerBlock with torch.compile"),
        *([_titan(t, f"Loading the checkpoint from outputs/checkpoint/step-{step}.")] if step else []),
        _titan(
            t,
            f"Training starts at step {step + 1}, with local batch size 1, global batch size 64, sequence length 8192",
        ),
    ]


def _nanogpt_step(s: Step) -> Lines:
    return [f"iter {s.number}: loss {_number(s.loss, '.4f')}, time {1000 * s.seconds:.2f}ms, mfu 41.21%"]


def _maxtext_step(s: Step) -> Lines:
    return [
        f"completed step: {s.number}, seconds: {s.seconds:.3f}, TFLOP/s/device: 181.204, Tokens/s/device: 12033.117, "
        f"total_weights: 65536, loss: {_number(s.loss, '.3f')}"
    ]


def _json_step(s: Step) -> Lines:
    loss = "NaN" if math.isnan(s.loss) else f"{s.loss:.5f}"
    return [
        f'{{"time": "{stamp(s.t)}", "step": {s.number}, "total_steps": {s.total}, "loss": {loss}, "step_time": {s.seconds:.4f}}}'
    ]


def _plain_step(s: Step) -> Lines:
    return [f"{stamp(s.t)} INFO train: step={s.number} loss={_number(s.loss, '.4f')} lr=3.0e-04 tok/s=182311"]


def _quiet_start(step: int, t: float) -> Lines:
    return [
        f"{stamp(t)} INFO world size 8",
        f"{stamp(t)} INFO building the model",
        f"{stamp(t)} INFO compiling",
    ]


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("bloom", _bloom_step, _megatron_start, _megatron_saving, _megatron_saved, _silent, _megatron_evaluated,
               finished=lambda step, t: ["[after training is done] datetime: " + stamp(t)]),
        Format("megatron", _megatron_step, _megatron_start, _megatron_saving, _megatron_saved, _silent, _megatron_evaluated,
               finished=lambda step, t: ["[after training is done] datetime: " + stamp(t)]),
        Format("deepspeed", _deepspeed_step, _quiet_start, _deepspeed_saving, _deepspeed_saved, _silent, _silent, every=10),
        Format("hf", _hf_step, _hf_start, lambda step, t: [f"Saving model checkpoint to out/checkpoint-{step}"], _silent,
               _hf_evaluating, _hf_evaluated, tells_saved=False, redraws=_hf_bar,
               finished=lambda step, t: ["Training completed. Do not forget to share your model on huggingface.co/models =)"]),
        Format("lightning", lambda s: ["\r" + _lightning_bar(s)], _quiet_start, _silent, _silent, _validation_bar, _silent,
               tells_saved=False, redraws=_lightning_bar,
               finished=lambda step, t: [f"`Trainer.fit` stopped: `max_steps={step}` reached."]),
        Format("nemo", lambda s: ["\r" + _nemo_bar(s)], _quiet_start, _silent, _silent, _validation_bar, _silent,
               tells_saved=False, redraws=_nemo_bar),
        Format("nemo2", _nemo2_step, _quiet_start, _silent, _silent, _silent, _silent, tells_saved=False),
        Format("torchtitan", _titan_step, _titan_start,
               lambda step, t: [_titan(t, "Saving the checkpoint (or staging if async is enabled).")],
               lambda step, t: [_titan(t, "Finished saving the checkpoint (or staging if async is enabled) in 38.21 seconds.")],
               _silent, _silent, every=10, tells_saved=False),
        Format("nanogpt", _nanogpt_step, _quiet_start, lambda step, t: ["saving checkpoint to out"], _silent, _silent,
               lambda step, t: [f"step {step}: train loss 2.2310, val loss 2.2871"], every=10, tells_saved=False),
        Format("maxtext", _maxtext_step, _quiet_start, _silent,
               lambda step, t: [f"saved a checkpoint at step {step}"], _silent, _silent),
        Format("json", _json_step, _quiet_start, _silent, _silent, _silent, _silent, tells_saved=False),
        Format("key_value", _plain_step, _quiet_start, _silent, _silent, _silent, _silent, tells_saved=False),
    )
}  # fmt: skip


def pulse(t: float, job_id: str) -> str:
    """BLOOM's status reporter: a line an hour in the training log that is no progress."""
    return f"[{stamp(t).replace(' ', 'T')}] PULSE: tr11-176B-ml is running for {_clock(t)} since {DAY0}T00:00:00 ({job_id} on 'gpu_p5' partition (node001)"


HARMLESS = (
    "W0301 error_if_nonfinite is set to False; gradient norms are not checked",
    "INFO: 0 errors, 0 warnings in tokenizer self-test",
    "wandb: WARNING Network error (ReadTimeout), entering retry loop. Will retry in 8 s",
    "UserWarning: torch.utils.checkpoint: please pass in use_reentrant=True or use_reentrant=False explicitly.",
    "NCCL INFO NCCL_IB_RETRY_CNT set by environment to 7. error handling: async",
    "Failed to open the cache of the tokenizer, building it (this is harmless)",
    "INFO mean absolute error on probe set 0.0312",
    "[aim] exception-free run so far",
)
"""Lines with words like error, exception or fail, which healthy jobs write."""


def overflow_skip(step: int, t: float) -> Lines:
    """DeepSpeed's fp16 optimizer skips a step: no progress is lost, and nothing is wrong."""
    return [
        f"[{_ms(t)}] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
        f"Attempted loss scale: 65536, reducing to 32768"
    ]
