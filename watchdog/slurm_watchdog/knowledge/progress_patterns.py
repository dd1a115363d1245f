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
from slurm_watchdog.knowledge.entries import CASES, COMMON, Fields, read_shipped
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


PHASES = ("starting", "evaluating", "checkpointing", "finishing")

SPOKEN_OF_NEEDLES = {
    thing: tuple(
        f"{word}{thing}"
        for word in ("at", "from", "to", "until", "till", "since", "after", "every", "before", "beyond")
    )
    for thing in (" step", " iter", " update", " global")
}
"""What is counted, and then the words before it: one of them is in each lower-cased line that SPOKEN_OF matches."""


READERS = {"progress": progress_row, "sign": sign_row, **COMMON}
_SHIPPED = read_shipped("progress_patterns.conf", READERS)
_EXPRESSIONS: dict[str, re.Pattern[str]] = dict(_SHIPPED["expression"])
_WORDS: dict[str, tuple[str, ...]] = dict(_SHIPPED["words"])
NOT_PROGRESS = _EXPRESSIONS["NOT_PROGRESS"]
SPOKEN_OF = _EXPRESSIONS["SPOKEN_OF"]
MADE = _EXPRESSIONS["MADE"]
COUNTED = _EXPRESSIONS["COUNTED"]
PROSE = _EXPRESSIONS["PROSE"]
OTHER_LABEL = _EXPRESSIONS["OTHER_LABEL"]
OTHER_EPOCH = _EXPRESSIONS["OTHER_EPOCH"]
OTHER_UNIT = _EXPRESSIONS["OTHER_UNIT"]
PER_STEP = _EXPRESSIONS["PER_STEP"]
STEPS_PER_SECOND = _EXPRESSIONS["STEPS_PER_SECOND"]
SAMPLES_PER_SECOND = _EXPRESSIONS["SAMPLES_PER_SECOND"]
GLOBAL_BATCH = _EXPRESSIONS["GLOBAL_BATCH"]
LOSS = _EXPRESSIONS["LOSS"]
OTHER_LOSS = _EXPRESSIONS["OTHER_LOSS"]
GRADIENT_IS_NONE = _EXPRESSIONS["GRADIENT_IS_NONE"]
LEFT_OUT = _EXPRESSIONS["LEFT_OUT"]
NOT_PROGRESS_NEEDLES = _WORDS["NOT_PROGRESS_NEEDLES"]
STEP_KEYS = _WORDS["STEP_KEYS"]
RATE_KEYS = _WORDS["RATE_KEYS"]
SECONDS_KEYS = _WORDS["SECONDS_KEYS"]
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
    *(
        (needle, _PLAIN)
        for needle in (
            "step_tim", "iter_time", "step time", "time per step", "sec_per_step", "seconds_per_", "batch_cost",
            "train_step_timing",
        )
    ),
)  # fmt: skip
LONE_LOSS_SHAPES = (
    b"losstraintotal",
    b"traincrossentropyloss",
    b"trainceloss",
)  # As shapes have them: see line_scan.letters.
LONE_LOSS = late_regex(rb"(?:loss/train/total: |train/CrossEntropyLoss=|train/CE loss=) {0,8}([-+.\w]{1,24})")
"""Composer (LLM Foundry) and OLMo write the loss in a line of its own, below the one that counts."""

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
MILLISECONDS_KEYS = ("step_time_ms", "iter_time_ms", "ms_per_step", "step_ms")
LOSS_KEYS = ("loss", "train_loss", "train/loss", "lm loss", "lm_loss")

PREFIXES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name.partition("/")[2], regex) for name, regex in _EXPRESSIONS.items() if name.startswith("prefix/")
)
"""(name, what stands before a line), in the order in which they are tried."""

OF_DICTIONARIES = {"hf_trainer": "huggingface", "hf_trainer_epoch": "huggingface"}
"""Frameworks of lines that are dictionaries, which have no row."""
