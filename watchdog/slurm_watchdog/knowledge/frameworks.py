"""Which framework wrote a log, and what its user can do so that steps can be read from it.

Of value where nothing counts: several frameworks write no step at their defaults (bars of Rich that are drawn
once at the end, DeepSpeed's quiet logger). A row is known by words that only this framework writes before and
beside its steps: paths of its own modules in warnings, names of its loggers, its headings. Rows that build on
others stand first: Lightning trains with DeepSpeed, too.
"""

from __future__ import annotations

import msgspec


class Framework(msgspec.Struct, frozen=True):
    """One row. `advice` continues "Its progress cannot be read: "."""

    name: str
    title: str
    signs: tuple[bytes, ...]  # Of the lower-cased text of a log: one is enough.
    advice: str


ANY_FRAMEWORK = (
    "print a line with the step every minute or more often (`step 120/1000 loss 2.31`), unbuffered (`python -u`, `flush=True`), or name its own form in "
    "`progress_patterns`"
)
"""What to do where the framework is not known, or has no row."""


def _row(name: str, title: str, signs: tuple[str, ...], advice: str) -> Framework:
    return Framework(name, title, tuple(sign.encode() for sign in signs), advice)


# fmt: off
FRAMEWORKS: tuple[Framework, ...] = (
    _row("nemo", "NeMo", ("nemo/collections/", "nemo.collections.", "nemo_logging:", "[nemo i ", "[nemo w ", "nemo/lightning/"),
         "keep `trainer.enable_progress_bar: true` with NeMo's TQDMProgressBar, or the logger's `global_step` lines"),
    _row("composer", "Composer", ("composer_version:", "composer/trainer/", "composer.trainer", "composer_commit_hash:"),
         "pass `Trainer(log_to_console=True, console_log_interval='10ba')`, or keep `progress_bar=True`"),
    _row("lightning", "Lightning",
         ("lightning/pytorch/", "lightning.pytorch.", "pytorch_lightning/", "pytorch_lightning.", "lightning/fabric/", "`trainer.fit` stopped", "litlogger",
          "all distributed processes registered. starting with"),
         "pass `callbacks=[TQDMProgressBar()]` to the Trainer: the bar of Rich, the default where `rich` is installed, writes to a file only at the end, and "
         "`enable_progress_bar=False` writes nothing"),
    _row("mmengine", "MMEngine", ("- mmengine - ", "mmengine/", "- mmcv - ", "- mmdet - ", "- mmseg - "),
         "lower `default_hooks.logger.interval` (LoggerHook), for it logs a line only every so many iterations"),
    _row("fastai", "fastai", ("epoch     train_loss  valid_loss", "fastai/learner", "fastai/callback"),
         "keep the progress bar (no `no_bar()`), or add a callback that prints `step N` in `after_batch`"),
    _row("keras", "Keras", ("keras/src/", "keras.src.", "keras/engine/", "keras/callbacks", "tensorflow/core/"),
         "use `fit(verbose=1)`, or `verbose=2` with short epochs: `verbose=0` writes nothing; or a callback that prints `step N` in `on_train_batch_end`"),
    _row("ray", "Ray Train", ("(raytrainworker ", "(traincontroller ", "(trainworker ", "started a local ray instance", "ray/train/"),
         "call `ray.train.report({'step': step, 'loss': loss})` often, or print the step in the training loop"),
    _row("megatron", "Megatron", ("megatron/core/", "megatron/training/", "megatron.core", "megatron.training", "> setting tensorboard", "megatron-core"),
         "lower `--log-interval` (1 to 10)"),
    _row("torchtitan", "torchtitan", ("[titan]", "torchtitan"), "lower `metrics.log_freq`"),
    _row("torchtune", "torchtune", ("torchtune",), "keep the recipe's tqdm bar, or set `metric_logger: torchtune.training.metric_logging.StdoutLogger`, `log_every_n_steps: 1`"),
    _row("maxtext", "MaxText", ("maxtext", "max_utils.py"), "lower `log_period`"),
    _row("levanter", "Levanter", ("levanter",), "keep `levanter.callbacks.pbar_logger` in the trainer's hooks"),
    _row("olmo", "OLMo", ("olmo_core", "/olmo/", "olmo."), "lower `console_log_interval` (ConsoleLoggerCallback's `log_interval`)"),
    _row("litgpt", "LitGPT", ("litgpt",), "lower `--train.log_interval`"),
    _row("huggingface", "Hugging Face Trainer",
         ("[transformers]", "transformers/trainer", "transformers.trainer", "transformers/training_args", "***** running training *****", "|trainer.py:", "trl/trainer"),
         "pass `disable_tqdm=False`, or `logging_steps=10`: without its bar it logs every 500 steps only"),
    _row("accelerate", "accelerate", ("`accelerate launch`", "accelerate/", "accelerate."),
         "draw a bar (`tqdm(range(steps))`) or print the step in the training loop: accelerate itself writes none"),
    _row("deepspeed", "DeepSpeed",
         ("deepspeed/runtime/", "deepspeed.runtime", "deepspeed.launcher", "deepspeed/ops", "deepspeed.ops", "[engine.py:", "deepspeed info:", "deepspeedzero"),
         "print the step yourself, or raise its logger to INFO (`deepspeed.utils.logger.setLevel('INFO')`, `steps_per_print` in its configuration): since 0.17 it is "
         "at WARNING and writes no steps"),
    _row("fairseq", "fairseq", ("fairseq",), "pass `--log-format simple --log-interval 10`"),
    _row("paddle", "Paddle", ("paddle/", "paddle.distributed", "ppcls info", "ppdet", "ppocr info", "paddlenlp"), "lower `logging_steps`, `log_iter` or `print_batch_step`"),
    _row("mindspore", "MindSpore", ("mindspore", "mindformers", "mindcv"), "add `LossMonitor(per_print_times=10)` and `TimeMonitor()` to the model's callbacks"),
    _row("mxnet", "MXNet", ("mxnet", "gluoncv", "gluonnlp"), "use `mx.callback.Speedometer(batch_size, 20)`, or lower `--log-interval`"),
    _row("colossalai", "Colossal-AI", ("colossalai",), "keep its tqdm bar on rank 0, or print the step in the training loop"),
    _row("ignite", "Ignite", ("ignite/", "ignite.engine"), "attach `ProgressBar(persist=True)`, or a handler that prints `engine.state.iteration`"),
    _row("jax", "JAX", ("orbax", "jax/_src", "flax/"), ANY_FRAMEWORK + ": JAX itself writes none"),
)
# fmt: on
_PLACE = {row.name: place for place, row in enumerate(FRAMEWORKS)}


def recognise(text: bytes, known: str | None = None) -> str | None:
    """The name of the framework whose signs are in a part of a log; `known` is what earlier parts showed, and
    stays unless a row that stands before it is found. None: not known."""
    lower = text.lower()
    limit = _PLACE.get(known or "", len(FRAMEWORKS))
    for row in FRAMEWORKS[:limit]:
        if any(sign in lower for sign in row.signs):
            return row.name
    return known


def title_of(name: str | None) -> str | None:
    """As its people write it; None of one without a row."""
    place = _PLACE.get(name or "")
    return None if place is None else FRAMEWORKS[place].title


def what_to_do(name: str | None) -> str:
    """What the user of framework `name` can do so that the progress of a job can be read: the rest of a
    sentence that begins "Its progress cannot be read: …". `name` as `recognise` gives it, or a progress
    pattern's framework; None: not known."""
    place = _PLACE.get(name or "")
    return ANY_FRAMEWORK if place is None else FRAMEWORKS[place].advice
