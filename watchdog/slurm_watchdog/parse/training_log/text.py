"""The text of a log's line: without colours and control characters, without launchers' prefixes, bounded. Pure."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.knowledge.progress_patterns import PREFIXES
from slurm_watchdog.parse.training_log.numbers import whole_number

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
