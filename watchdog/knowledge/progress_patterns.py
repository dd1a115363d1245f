"""How frameworks write down that a step was done, that a phase began, that a checkpoint is complete.

A row is tried only if one of its `needles` is in the lower-cased line; the first row that matches wins, so special forms
stand before general ones. Groups: step, total, step_s, step_ms, rate (steps a second), loss, epoch.
Two `\\s*` never stand beside each other, not even around something optional: a line of blanks would take seconds.
See watchdog.knowledge.log_signatures for what a new needle costs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NUMBER = r"[-+]?(?:\d[\d_,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"


@dataclass(frozen=True)
class Pattern:
    """One way to write a count that rises."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    counted: bool = False
    """Tried only if COUNTED is in the lower-cased line, too."""


@dataclass(frozen=True)
class Sign:
    """One way to write that a phase began, or that a checkpoint is complete (`complete`)."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    phase: str | None = None
    complete: bool = False


def _pattern(name: str, needles: str | tuple[str, ...], regex: str, flags: int = 0) -> Pattern:
    return Pattern(name, (needles,) if isinstance(needles, str) else needles, re.compile(regex, flags))


def _counted(name: str, regex: str) -> Pattern:
    return Pattern(name, STEP_WORDS, re.compile(regex, re.IGNORECASE), counted=True)


def _sign(name: str, needle: str, regex: str, phase: str | None = None, complete: bool = False) -> Sign:
    return Sign(name, (needle,), re.compile(regex, re.IGNORECASE), phase, complete)


# Lines with a number that rises while nothing is trained: status reporters, queues, retries, loading, downloads.
NOT_PROGRESS = re.compile(
    r"\bPULSE\b|waiting to be scheduled|\bre-?try|\bretri|\battempt\b|\bresum(?:e|ed|ing)\b|\brestor|\bre-?start"
    r"|\bload(?:ed|ing)\b|\bdownload|\btokeniz|\bfetching\b|\bgenerating\b|\bfilter(?:ing)?\b|\bsanity\b|\bheartbeat\b"
    r"|\bcheckpoint(?:s|ing)?\b.*\b\d+\s*/\s*\d+|\bwarm-?up steps?\b|\bnum_(?:train_)?(?:steps|iters)\b|\bmax_(?:steps|iters)\b"
    r"|\btotal (?:optimization |training )?steps\b|\bNum (?:steps|batches)\b|^\s*Map\b",
    re.IGNORECASE,
)
NOT_PROGRESS_NEEDLES = (
    "pulse", "waiting to be", "retry", "re-try", "retri", "attempt", "resum", "restor", "restart", "re-start", "load",
    "tokeniz", "fetching", "generating", "filter", "sanity", "heartbeat", "checkpoint", "warm", "num_", "num ", "max_", "total ", "map",
)  # fmt: skip
"""One of them is in each lower-cased line that NOT_PROGRESS matches: to search for these is much quicker."""
# A step that is only spoken of: "starting from step 40", "timeout at step 30". "loss at step 10: 0.5" is one that was made.
SPOKEN_OF = re.compile(
    r"\b(?:at|from|to|until|till|since|after|every|before|beyond) (?:global[ _])?(?:step|iteration|iter|update)s?\b",
    re.IGNORECASE,
)
SPOKEN_OF_NEEDLES = {
    thing: tuple(
        f"{word}{thing}"
        for word in ("at", "from", "to", "until", "till", "since", "after", "every", "before", "beyond")
    )
    for thing in (" step", " iter", " update", " global")
}
"""What is counted, and then the words before it: one of them is in each lower-cased line that SPOKEN_OF matches."""
MADE = re.compile(r"\bloss\b", re.IGNORECASE)

SIGNS: tuple[Sign, ...] = (
    # Megatron-LM, Megatron-DeepSpeed
    _sign("megatron_saved", "successfully saved checkpoint", r"successfully saved checkpoint (?:from|at) iteration\s+(?P<step>\d+)", complete=True),
    _sign("megatron_saving", "saving checkpoint at iteration", r"saving checkpoint at iteration\s+(?P<step>\d+)", "checkpointing"),
    # Its result comes once for each of several data sets: the evaluation is over only with the next step.
    _sign("megatron_validation", "loss at iteration", r"(?:valid|validation|test) loss at iteration\s+(?P<step>\d+)", "evaluating"),
    # DeepSpeed engine
    _sign("deepspeed_saved", "checkpoint global_step", r"\[Torch\] Checkpoint global_step(?P<step>\d+) is ready now", complete=True),
    _sign("deepspeed_saving", "checkpoint global_step", r"Checkpoint global_step(?P<step>\d+) is about to be saved", "checkpointing"),
    # torchtitan and torch.distributed.checkpoint
    _sign("torchtitan_saved", "finished saving the checkpoint", r"Finished saving the checkpoint.*", complete=True),
    _sign("torchtitan_saving", "saving the checkpoint", r"Saving the checkpoint", "checkpointing"),
    # Hugging Face Trainer
    _sign("hf_saving", "saving model checkpoint to", r"Saving model checkpoint to .*checkpoint-(?P<step>\d+)", "checkpointing"),
    _sign("hf_evaluation", "running evaluation", r"\*{5} Running Evaluation", "evaluating"),
    # fairseq, Composer, MaxText, Lightning
    _sign("fairseq_saved", "saved checkpoint", r"Saved checkpoint .*@ \d+ epochs?, (?P<step>\d+) updates", complete=True),
    _sign("fairseq_saving", "preparing to save checkpoint", r"Preparing to save checkpoint .* @ (?P<step>\d+) updates", "checkpointing"),
    _sign("maxtext_saved", "saved a checkpoint at step", r"saved a checkpoint at step (?P<step>\d+)", complete=True),
    _sign("nanogpt_evaluation", "step ", r"^step (?P<step>\d+): train loss .*val loss", "evaluating"),
    _sign("validation_bar", "valid", r"\bValid(?:ation|ating)?\b(?: DataLoader \d+)?\s*:\s+\d+%\|", "evaluating"),
    _sign("evaluation_bar", "evaluat", r"\bEvaluat(?:ing|ion)\b(?:\s*:)?\s+\d+%\|", "evaluating"),
    # Anybody
    _sign("saved", "checkpoint", r"(?:checkpoint saved|saved checkpoint|checkpoint complete)\b.*?(?:step|iteration|iter)\D{0,3}(?P<step>\d+)", complete=True),
    _sign("saving", "saving checkpoint", r"saving checkpoint(?:.*?(?:step|iteration|iter)\D{0,3}(?P<step>\d+))?", "checkpointing"),
    _sign("evaluating", "evaluat", r"\b(?:start(?:ing|ed)?|begin(?:ning)?|running)\s+(?:the\s+)?(?:evaluation|validation)\b|\bevaluating\b(?! metrics)", "evaluating"),
    _sign("validating", "validat", r"\b(?:start(?:ing|ed)?|begin(?:ning)?|running)\s+(?:the\s+)?validation\b|\bvalidating\b", "evaluating"),
    _sign("finishing", "training", r"\btraining (?:is )?(?:complete[d]?|finished|done)\b|\bfinished training\b|\[after training is done\]", "finishing"),
)  # fmt: skip

# Half of all prose about training has one of these words; with a number behind it, few lines.
COUNTED = re.compile(r"(?:step|iter(?:ation)?|update|batch)[\s:#=\[]*\d")
STEP_WORDS = ("step", "iter", "update", "batch")
STEP_WORD = r"(?:global[ _]?step|train[ _]?step|step|iteration|iter|update|batch)"

PATTERNS: tuple[Pattern, ...] = (
    _pattern("nemo2", "global_step: ", r"Training epoch (?P<epoch>\d+), iteration \d+/(?P<total>\d+) .*?\bglobal_step: (?P<step>\d+)"),
    _pattern("megatron", "iteration", r"\biteration\s+(?P<step>\d+)\s*/\s*(?P<total>\d+)\s*\|"),
    _pattern("deepspeed", "step=", r"\bstep=(?P<step>\d+), skipped=\d+, lr="),
    _pattern("nemo", "global_step=", r"\d+%\|.*\bglobal_step=(?P<step>\d+)(?:\.0*)?\b"),
    _pattern("lightning", "%|", r"\bEpoch (?P<epoch>\d+)\s*:\s+(?::\s+)?\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+)"),
    _pattern("tqdm", "%|", r"\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+)\s*\[[\d:]+<[\d:?]+(?:,\s*(?:(?P<step_s>[\d.]+)\s*s/\w+|(?P<rate>[\d.]+)\s*\w+/s))?"),
    _pattern("torchtitan", "step:", r"\bstep:\s*(?P<step>\d+)\s+loss:"),
    _pattern("nanogpt", "iter ", r"\biter (?P<step>\d+): loss (?:.*?\btime (?P<step_ms>[\d.]+)\s*ms)?"),
    _pattern("maxtext", "completed step", r"\bcompleted step:\s*(?P<step>\d+), seconds:\s*(?P<step_s>[\d.]+)"),
    _pattern("composer", "[batch=", r"\[batch=(?P<step>\d+)/(?P<total>\d+)\]"),
    _pattern("fairseq", "epoch ", r"\bepoch (?P<epoch>\d+):\s+(?P<step>\d+) / (?P<total>\d+)\b"),
    _pattern("num_updates", "num_updates", r"\bnum_updates[\"']?\s*(?:[=:]\s*)?[\"']?(?P<step>\d+)"),
    _counted("key_value", r"(?<![\w.-])" + STEP_WORD + r"\s*=\s*(?P<step>\d+)(?:\s*/\s*(?P<total>\d+))?\b(?!\.\d*[1-9])"),
    _counted("step_of", r"(?<![\w.-])" + STEP_WORD + r"\s*(?:[:#]\s*)?\[?(?P<step>\d+)\s*(?:/|of)\s*(?P<total>\d+)\b"),
    _counted("bracketed", r"\[\s*" + STEP_WORD + r"\s*(?:[:#=]\s*)?(?P<step>\d+)\s*\]"),
    _counted("step", r"(?:^|[\s|>,;\]:(])" + STEP_WORD + r"\s*(?:[:#]\s*)?(?P<step>\d+)(?=\s*(?:$|[\s|:,;)\]]))(?!\.\d)"),
    _pattern("tokens", "tokens", r"\b(?:consumed|processed|seen|total|trained)[ _]tokens\s*[:=]\s*(?P<step>\d[\d,_]*)\b(?!\.\d|/s)|\btokens[ _](?:seen|processed|consumed)\s*[:=]\s*(?P<step_b>\d[\d,_]*)\b", re.IGNORECASE),
    _pattern("samples", "samples", r"\b(?:consumed|processed|seen|total|trained)[ _]samples\s*[:=]\s*(?P<step>\d[\d,_]*)\b(?!\.\d|/s)|\bsamples[ _](?:seen|processed|consumed)\s*[:=]\s*(?P<step_b>\d[\d,_]*)\b", re.IGNORECASE),
)  # fmt: skip

# What else such a line may say, whatever the framework.
# These are searched for in the lower-cased line, from where it has the needle.
_PLAIN = re.compile(
    rf"(?:step_time|iter_time|step time|time per step|sec_per_step|train_step_timing in s)\s*[=:]\s*(?P<value>{NUMBER})(?:\s*(?P<unit>ms)\b)?"
)
STEP_SECONDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("elapsed time per", re.compile(rf"elapsed time per iteration \((?P<unit>m?s)\):\s*(?P<value>{NUMBER})")),
    ("step_tim", _PLAIN),
    ("iter_time", _PLAIN),
    ("step time", _PLAIN),
    ("time per step", _PLAIN),
    ("sec_per_step", _PLAIN),
    ("train_step_timing", _PLAIN),
)
LOSS = re.compile(
    rf"loss(?:(?<!\wloss)|(?<=\btrain_loss)|(?<=\breduced_train_loss))[\"']?\s*(?:[=:]\s*)?[\"']?(?P<loss>{NUMBER})"
)

# Keys of a JSON line, or of the dictionary that the Hugging Face Trainer prints, in the order of trust.
STEP_KEYS = (
    "global_step",
    "step",
    "iteration",
    "iter",
    "num_updates",
    "trainer/global_step",
    "_step",
    "update",
)
MAPPING_NEEDLES = ("step", "iter", "update")
"""One of them is in each of STEP_KEYS: a mapping without any is not decoded."""
TOTAL_KEYS = ("total_steps", "max_steps", "num_steps", "total_iterations", "train_iters")
SECONDS_KEYS = ("step_time", "step_time_s", "step_seconds", "seconds_per_step", "iter_time", "sec_per_step")
LOSS_KEYS = ("loss", "train_loss", "train/loss", "lm loss", "lm_loss")

# What stands before a line and names the rank; `local` is a rank on an unnamed node and therefore names no rank.
PREFIXES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("torchrun", re.compile(r"\[(?:default|[A-Za-z_]*worker)(?P<local>\d+)\]:\s?")),
    ("rank", re.compile(r"\[rank(?P<rank>\d+)\]:?\s?")),
    ("host_rank", re.compile(r"\[(?P<host>[A-Za-z][\w.-]*):(?P<rank>\d+)\]:?\s?")),
    ("srun_label", re.compile(r"(?P<rank>\d{1,6}): ")),
    ("host", re.compile(r"(?P<host>[a-z][\w.]*-[\w.-]*\d): ")),
)
