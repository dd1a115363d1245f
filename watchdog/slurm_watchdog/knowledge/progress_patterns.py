"""How frameworks write down that a step was done, that a phase began, that a checkpoint is complete: the rows of
`data/progress_patterns.conf`, and what all of them have in common.

A row is tried only if one of its `needles` is in the lower-cased line; the first row that matches wins, so
special forms stand before general ones. Groups: step, total, step_s, step_ms, rate (steps a second), updates,
and
  epoch  with `step` of `total` in this epoch: together they rise on where `step` starts again (`in_epoch`; the first epoch has
         the number `first_epoch`), and `epochs`, how many there are to be;
  count  a number that rises and is no step (samples, tokens, epochs): it proves that the loop turns and is never shown as a step.
Two `\\s*` never stand beside each other, not even around something optional: a line of blanks would take seconds.
See slurm_watchdog.knowledge.log_signatures for what a new needle costs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields, read_shipped
from slurm_watchdog.knowledge.site_rows import SiteRows

NUMBER = r"[-+]?(?:\d\.#\w+|\d[\d_,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"


class Pattern(msgspec.Struct, frozen=True):
    """One way to write a count that rises."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    counted: bool = False  # Tried only if COUNTED is in the lower-cased line, too, and no progress in prose: see PROSE.
    in_epoch: bool = False  # `step` starts again with each `epoch`.
    first_epoch: int = 0  # The number that it gives to its first epoch.


class Sign(msgspec.Struct, frozen=True):
    """One way to write that a phase began, or that a checkpoint is complete (`complete`)."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    phase: str | None = None
    complete: bool = False


class ProgressRow(msgspec.Struct, frozen=True):
    """One section [progress NAME]."""

    pattern: Pattern
    framework: str  # Whose way of writing it is, where it is one framework's.


def progress_row(fields: Fields) -> ProgressRow:
    """The row of a section [progress NAME]."""
    counted = fields.flag("counted")
    any_case = fields.choice("case", CASES, required=False) == "any" or counted
    pattern = Pattern(
        fields.name(),
        fields.needles(),
        fields.expression(re.IGNORECASE if any_case else 0),
        counted,
        fields.flag("in_epoch"),
        fields.number("first_epoch"),
    )
    return ProgressRow(pattern, fields.text("framework"))


def sign_row(fields: Fields) -> Sign:
    """The row of a section [sign NAME]."""
    exact = fields.choice("case", CASES, required=False) == "exact"
    complete = fields.flag("complete")
    return Sign(
        fields.name(),
        fields.needles(),
        fields.expression(0 if exact else re.IGNORECASE),
        fields.choice("phase", PHASES, required=not complete) or None,
        complete,
    )


CASES = ("any", "exact")
PHASES = ("starting", "evaluating", "checkpointing", "finishing")

# Lines with a number that rises while nothing is trained: status reporters, queues, retries, loading, downloads.
NOT_PROGRESS = late_regex(
    r"\bPULSE\b|waiting to be scheduled|\bre-?try|\bretri|\battempt\b|\bresum(?:e|ed|ing)\b|\brestor|\bre-?start"
    r"|\bload(?:ed|ing)\b|\bdownload|\btokeniz|\bfetching\b|\bgenerating\b|\bfilter(?:ing)?\b|\bsanity\b|\bheartbeat\b"
    r"|\bcheckpoint(?:s|ing)?\b.*\b\d+\s*/\s*\d+|\bwarm-?up steps?\b|\bnum_(?:train_)?(?:steps|iters)\b|(?<!/)\bmax_(?:steps|iters)\b"
    r"|\btotal (?:optimization |training )?steps\b|\bNum (?:steps|batches)\b|^\s*Map\b|\bgradient accumulation\b"
    r"|\b(?:warm-?up|auto-?tun\w+|compil\w+|pre-?process\w*|micro|denois\w+|sampling|inference|install\w*|build\w*|set-?up|export\w*"
    r"|convert\w*|profil\w+|calibrat\w+|quantiz\w+)\b[\]\s|:>-]{0,3}(?:step|iter(?:ation)?|batch)\b[\s:#=\[]*\d",
    re.IGNORECASE,
)
NOT_PROGRESS_NEEDLES = (
    "pulse", "waiting to be", "retry", "re-try", "retri", "attempt", "resum", "restor", "restart", "re-start", "load",
    "tokeniz", "fetching", "generating", "filter", "sanity", "heartbeat", "checkpoint", "warm", "num_", "num ", "max_", "total ", "map",
    "accumulation", "auto", "compil", "process", "micro", "denois", "sampling", "inference", "install", "build", "set-up", "setup", "export",
    "convert", "profil", "calibrat", "quantiz",
)  # fmt: skip
"""One of them is in each lower-cased line that NOT_PROGRESS matches: to search for these is much quicker."""
# A step that is only spoken of: "starting from step 40", "timeout at step 30". "loss at step 10: 0.5" is one
# that was made.
SPOKEN_OF = late_regex(
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
MADE = late_regex(r"\bloss\b", re.IGNORECASE)

# Half of all prose about training has one of these words; with a number behind it, few lines.
COUNTED = late_regex(r"(?:step|iter(?:ation)?|update|batch)s?[\s:#=\[]*\d")

_SHIPPED = read_shipped("progress_patterns.conf", {"progress": progress_row, "sign": sign_row})
SIGNS: tuple[Sign, ...] = _SHIPPED["sign"]
PATTERNS: tuple[Pattern, ...] = tuple(row.pattern for row in _SHIPPED["progress"])
"""Both of the package; those in force, a site's included, are in `progress_table()`."""


class ProgressTable(msgspec.Struct, frozen=True, eq=False):
    """The rows in force; the first that matches wins."""

    patterns: tuple[Pattern, ...]
    signs: tuple[Sign, ...]
    frameworks: Mapping[str, str]
    """Pattern -> whose way of writing it is, where it is one framework's; the others stand for themselves."""
    by_epochs: frozenset[str]  # Patterns whose steps restart with each epoch.
    counted: frozenset[str]  # Patterns that prose matches as well: one line alone may be an accident.


def progress_table() -> ProgressTable:
    """The rows in force in this process."""
    return _table(site_rows.current())


@lru_cache(maxsize=2)
def _table(site: SiteRows) -> ProgressTable:
    rows = site.before("progress", _SHIPPED["progress"], lambda row: row.pattern.name)
    return ProgressTable(
        tuple(row.pattern for row in rows),
        site.before("sign", SIGNS, lambda row: row.name),
        {**{row.pattern.name: row.framework for row in rows if row.framework}, **OF_DICTIONARIES},
        frozenset(row.pattern.name for row in rows if row.pattern.in_epoch),
        frozenset(row.pattern.name for row in rows if row.pattern.counted),
    )


# "Step 2: load the model": behind the number two words or more, and nothing that was measured ("loss=nan" was).
PROSE = late_regex(
    r"(?!.*(?:[=:]|(?:loss|ppl|perplexity|norm|reward)\b)\s*[-+]?(?:nan|inf)(?:inity)?\b)[^A-Za-z\d]*[A-Za-z]+[^A-Za-z\d]+[A-Za-z][^\d]*",
    re.IGNORECASE,
)
# A bar of tqdm whose description (what stands before it), or whose unit, says that it is of something else
# than training.
OTHER_LABEL = late_regex(
    r"\b(?!(?:pre-?)?training|fine-?tuning|learning|running\b)[a-z]+ing\b"
    r"|\b(?:eval|evaluation|test|val|valid|dev|predict|inference|rollout|sample|prompts|shapes|shards|tokens|download|upload|epoch_eval|ddim|plms)\b"
)
OTHER_EPOCH = late_regex(
    r"\b(?:valid\w*|val|eval\w*|test\w*|infer\w*|predict\w*|(?:pre-?)?process\w*|token\w*|download\w*|load\w*)\b"
)
"""The same of a line about an epoch."""
OTHER_UNIT = late_regex(
    r"\d\s?(?:[kmgt]?i?b|examples?|docs?|documents?|files?|shards?|texts?|prompts?|rows?|records?|lines?|requests?|modules?|layers?)/s\b"
)
"""All are searched for in the lower-cased line."""

# What else such a line may say, whatever the framework. These are searched for in the lower-cased line, from
# where it has the needle.
_PLAIN = late_regex(
    rf"(?:step_time(?:_s)?|iter_time|step time(?: \(s\))?|time per step|(?:sec|seconds)_per_(?:step|iter(?:ation)?)|batch_cost|train_step_timing in s)\s*[=:]\s*(?P<value>{NUMBER})(?:\s*(?P<unit>ms)\b)?"
)
STEP_SECONDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("elapsed_time_per", late_regex(rf"elapsed_time_per_iteration_(?P<unit>m?s): (?P<value>{NUMBER})(?P<kilo>k)?")),
    ("iter time: ", late_regex(rf"iter time: (?P<value>{NUMBER})\s?(?P<unit>m?s)\b")),
    ("dt: ", late_regex(rf"\bdt: (?P<value>{NUMBER})\s?(?P<unit>m?s)\b")),
    ("elapsed time per", late_regex(rf"elapsed time per iteration \((?P<unit>m?s)\):\s*(?P<value>{NUMBER})")),
    ("step_tim", _PLAIN),
    ("iter_time", _PLAIN),
    ("step time", _PLAIN),
    ("time per step", _PLAIN),
    ("sec_per_step", _PLAIN),
    ("seconds_per_", _PLAIN),
    ("batch_cost", _PLAIN),
    ("train_step_timing", _PLAIN),
)
PER_STEP = late_regex(r"(?<![\w.])(?P<value>\d[\d.]*)\s?(?P<unit>ms|us|s|sec)/(?:step|it|iter|iteration|batch)\b")
"""40ms/step, 1.2 s/it: of a lower-cased line."""
STEPS_PER_SECOND = late_regex(
    r"(?:(?<![\w.])(?P<value>\d[\d.]*)\s?(?:steps?|its?|iters?|iterations?|batch(?:es)?)/s(?:ec(?:ond)?)?\b"
    r"|\b(?:train_|interval_)?(?:steps|iterations|iters|batches)[ _/]?(?:per[ _])?s(?:ec(?:ond)?)?[\"']?\s*[:=]\s*[\"']?(?P<named>\d[\d.]*))"
)
SAMPLES_PER_SECOND = late_regex(
    r"(?<![\w.,])(?P<value>\d[\d.,]{0,20})\s?(?:samples?|images|imgs?|sequences|seqs?|sentences)/s(?:ec(?:ond)?)?\b"
    r"|\b(?:samples|sequences|images)[ _/]?(?:per[ _])?s(?:ec(?:ond)?)?[\"']?\s*[:=]\s*[\"']?(?P<named>\d[\d.,]{0,20})"
)
GLOBAL_BATCH = late_regex(
    r"(?:(?:global|total|effective)[ _]?(?:train[ _])?batch(?:[ _]?size)?|(?<!micro)(?<!micro[ _])(?<![a-z])gbs)['\"]?\s*[:=]\s*(\d+)"
)
"""A batch over all ranks: with the samples a second of all it gives a step's seconds. `batch_size` may be of one."""
LOSS = late_regex(
    rf"loss(?:(?<!\wloss)|(?<=\btrain_loss)|(?<=\breduced_train_loss)|(?<=\blm_loss))[\"']?\s*(?:[=:]\s*)?[\"']?(?P<loss>{NUMBER})"
)

OTHER_LOSS = late_regex(
    r"(?<![\w/.-])(?:(?P<log>ppl|perplexity)|nll|(?:nll|ce|ctc|mlm|cross[_-]entropy|total|train(?:ing)?|step|avg|average|mean|batch|running|epoch)[_/-]?loss)"
    rf"[\"']?\s*[=:]\s*[\"']?(?P<loss>{NUMBER})"
)
"""Of a lower-cased line without a plain loss: `nll_loss=nan`; the logarithm of a perplexity is a loss."""
GRADIENT_IS_NONE = late_regex(
    r"\b(?:grad(?:ient)?[_ ]?norm|gnorm)[\"']?\s*[=:]\s*[\"']?[-+]?(?:nan|\d\.#\w+)", re.IGNORECASE
)
LEFT_OUT = late_regex(r"\bnumber of nan iterations:\s*[1-9]")
"""Megatron leaves out a loss that is NaN, and counts: of a lower-cased line."""

LONE_LOSS_NEEDLES = (b"loss/train/total: ", b"train/CrossEntropyLoss=", b"train/CE loss=")
LONE_LOSS = late_regex(rb"(?:loss/train/total: |train/CrossEntropyLoss=|train/CE loss=) {0,8}([-+.\w]{1,24})")
"""Composer (LLM Foundry) and OLMo write the loss in a line of its own, below the one that counts."""

# Keys of a JSON line, or of the dictionary that the Hugging Face Trainer prints, in the order of trust.
STEP_KEYS = (
    "global_step",
    "global_step/max_steps",
    "current_steps",
    "step",
    "iteration",
    "iter",
    "num_updates",
    "trainer/global_step",
    "train/global_step",
    "training/global_step",
    "_step",
    "update",
)
EPOCH_KEYS = ("epoch", "train/epoch")
"""Where there is no step, the epoch rises, too: often it is fractional. It is a count, and no step."""
TRAINING_KEYS = ("loss", "train_loss", "train/loss", "lm loss", "lm_loss", "learning_rate", "lr", "grad_norm")
"""One of them has to stand beside an epoch: results of an evaluation carry the epoch as well."""
HEARTBEAT_PATTERN = "heartbeat"
HEARTBEAT_KEY = '"slurm_watchdog_heartbeat"'
"""In the line of JSON of `slurm_watchdog_hooks`: the trainer's own count, which is believed before all others."""
MAPPING_NEEDLES = ("step", "iter", "update", "epoch")
"""One of them is in each of STEP_KEYS and EPOCH_KEYS: a mapping without any is not decoded."""
TOTAL_KEYS = ("total_steps", "max_steps", "num_steps", "total_iterations", "train_iters")
RATE_KEYS = (
    "steps_per_second",
    "steps_per_sec",
    "train_steps_per_second",
    "it/s",
    "its_per_sec",
    "iterations_per_second",
    "perf/steps_per_sec",
)
"""Steps a second."""
SECONDS_KEYS = (
    "step_time", "step_time_s", "step_seconds", "seconds_per_step", "iter_time", "sec_per_step", "seconds_per_iteration", "time/step", "perf/step_time", "timing_s/step",
    "time_per_step", "train/step_time", "step_duration_s",
)  # fmt: skip
MILLISECONDS_KEYS = ("step_time_ms", "iter_time_ms", "ms_per_step", "step_ms")
LOSS_KEYS = ("loss", "train_loss", "train/loss", "lm loss", "lm_loss")

# What stands before a line, most often to name the rank (Ray names a process: `(RayTrainWorker pid=7,
# ip=10.0.0.4) `); `local` is a rank on an unnamed node and therefore names no rank.
PREFIXES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("torchrun", late_regex(r"\[(?:default|[A-Za-z_]*worker)(?P<local>\d+)\]:\s?")),
    ("rank", late_regex(r"\[rank(?P<rank>\d+)\]:?\s?")),
    (
        "host_rank",
        late_regex(
            r"\[(?P<host>(?!\w*_)(?=[\w.-]*\d[\w.-]*:)(?![\w.-]+\.(?:py|cc|cpp|cu|h|rs|go)\d?:)[A-Za-z][\w.-]*):(?P<rank>0|[1-9]\d{0,4})\]:?\s?"
        ),
    ),
    ("module", late_regex(r"\[[A-Za-z][\w./-]*:\d{1,5}\]:?\s?")),  # a logger's, of no one
    (
        "ray",
        late_regex(
            r"\((?:raylet|[A-Za-z_]\w{0,60}(?:\([^()]{0,80}\))? (?:\w{1,20}=[^\s)]{1,80} )?pid=\d{1,9})(?:, ip=[\w.:-]{1,60})?\) ?"
        ),
    ),
    ("srun_label", late_regex(r" {0,5}(?P<rank>\d{1,6}): ")),
    ("host", late_regex(r"(?P<host>[a-z][\w.]*-[\w.-]*\d): ")),
)

OF_DICTIONARIES = {"hf_trainer": "huggingface", "hf_trainer_epoch": "huggingface"}
"""Frameworks of lines that are dictionaries, which have no row."""
