"""The text of a log's line, without colours, control characters and launchers' prefixes, bounded; numbers as writers of
logs and of JSON put them; and what a line says, a value. Pure; nothing raises.
"""

from __future__ import annotations

from math import isfinite, nan
from typing import Any

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.knowledge.progress_patterns import PREFIXES
from slurm_watchdog.model.observations import Said
from slurm_watchdog.parse.timestamps import Stamp

MAX_DIGITS = 18
"""Of a whole number: what is longer counts nothing, and has no place in 64 bits (slurm_watchdog.wire.codec)."""
MAX_WHOLE = 2**62  # Whole numbers are below it: sums of two still fit into 64 bits.
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


def written_count(text: str | None) -> int | None:
    """A count as people write it: 1,234 or 12_000 or 12.0."""
    value = parse_number(text or "")
    return count_of(value) if value is not None and isfinite(value) and value >= 0 else None


def count_of(value: object) -> int | None:
    """A count in a value of JSON: a whole number from 0, also as text or as 12.0; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.partition("/")[0]  # "5/873"
        return whole_number(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < MAX_WHOLE else None
    return value if isinstance(value, int) and 0 <= value < MAX_WHOLE else None


def whole_number(text: str | None) -> int | None:
    """The whole number that these digits are, unless they are none, or too many."""
    return int(text) if text and text.isdecimal() and len(text) <= MAX_DIGITS else None


def float_of(value: object) -> float | None:
    """A value of JSON as a float, also from text; None for anything else."""
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # Python's whole numbers have no end
        return None


def parse_number(text: str) -> float | None:
    """What `float` makes of it: 1e999 is infinite. It raises for no length of text."""
    if "#" in text:  # 1.#QNAN, -1.#IND, 1.#INF of Windows' C library
        return nan
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None


def scaled(text: str, factor: float) -> float | None:
    """The number in `text` times `factor`; None if it is no number."""
    value = parse_number(text)
    return None if value is None else value * factor


MAX_LINE = 500  # Characters of a line that are kept as evidence.
_MAX_PARSED = 4096
"""No framework writes what we look for further to the right; a line of megabytes must not cost seconds."""
_ESCAPES = late_regex(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_CONTROL = late_regex(r"[\x00-\x1f\x7f-\x9f]+")


def clean_line(line: str) -> str:
    """`line` without colours and control characters, at most MAX_LINE characters."""
    return plain_line(line).strip()[:MAX_LINE]


def kept_line(line: str) -> str:
    """The same with secrets masked, as a line of a log leaves the child that reads it."""
    return mask_cut(plain_line(line).strip(), MAX_LINE)


def plain_line(line: str) -> str:
    """Without colours and control characters, at most _MAX_PARSED characters; blanks at its ends stay."""
    text = line[:_MAX_PARSED]
    if text.isprintable():  # nearly all are, and it shows quickly
        return text
    return _CONTROL.sub(" ", _ESCAPES.sub("", text))


def split_prefix(text: str) -> tuple[str, dict[str, Any]]:
    """The line without what launchers put in front, and what that names: `rank`, `local_rank`, `host`."""
    who: dict[str, Any] = {}
    for _ in range(3):  # a host's prefix before a rank's, and no deeper
        for name, regex in PREFIXES:
            match = regex.match(text)
            if match is None:
                continue
            groups = match.groupdict()
            if (rank := whole_number(groups.get("rank"))) is not None:
                # `12: ` of srun may stand before a rank's own word, which knows better.
                who["rank"] = rank
            if (local := whole_number(groups.get("local"))) is not None:
                who["local_rank"] = local
            if groups.get("host"):
                who["host"] = groups["host"]
            text = text[match.end() :]
            if name == "rank":
                return text, who
            break
        else:
            break
    return text, who


def has_needle(needles: tuple[str, ...], lower: str) -> bool:
    """Whether one of `needles` is in the lower-cased text."""
    for needle in needles:  # noqa: SIM110 - any() takes twice as long, and this is asked a hundred times a line
        if needle in lower:
            return True
    return False


class LogFact(Said):
    """What a line says. A line of progress has a `step` or a `count`; both compare within one pattern only."""

    pattern: str
    text: str = ""  # The line, without its end.
    line: int = 0  # Its place: in a block, counted from 0, or in a file, from 1.
    stands_for: int = 1  # How many lines like it, of which it is the one that was parsed.
    batch: int | None = None  # Samples of one step over all ranks, as the line says.
    stamp: Stamp | None = None
    until: Stamp | None = None
    """Of the last line of a log that says something, if it has no time: that of the next line with one."""
    at: float | None = None  # On the clock of the log; set when all is read.
    epoch: int | None = None
    """Epochs that were finished before, where steps are counted within one: `in_epoch` of `epoch_steps` are done."""
    in_epoch: int | None = None
    epoch_steps: int | None = None
    epochs: int | None = None  # How many there are to be.
    local_rank: int | None = None
    host: str | None = None

    @property
    def has_own_loss(self) -> bool:
        """Whether it gives a loss beside a count that is rounded (`'epoch': 0.01`): news at the same count, too."""
        return self.loss is not None and self.step is None
