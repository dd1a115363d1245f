"""Text of users made harmless, and numbers in words. Pure.

Slack reads `<…>` and `&` in every text, and nothing else in a block of plain text:
https://docs.slack.dev/messaging/formatting-message-text#escaping
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.ticking import shown

ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_PLAIN = late_regex(r"[^ -~]|[&<>]")  # What has to be looked at one by one; most text holds none of it.
WRITTEN_OUT = 8  # Numbers or ranges that a sentence has one by one.
_NUMBERED = late_regex(r"(.*?)(\d{1,18})", re.DOTALL)


def one_line(text: str, limit: int) -> str:
    """`text` on one line without control, format, surrogate and private characters, at most `limit` long."""
    text = text[: 2 * limit]
    if _PLAIN.search(text):
        text = "".join(_harmless(char) for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def safe(text: str, limit: int) -> str:
    """The same with what Slack reads escaped, the limit counted after that."""
    out: list[str] = []
    size = 0
    for char in one_line(text, limit):
        char = ESCAPES.get(char, char)
        if size + len(char) > limit - 1:
            return "".join(out) + "…"
        out.append(char)
        size += len(char)
    return "".join(out)


def _harmless(char: str) -> str:
    if char.isspace():
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char)[0] == "C" else char


def duration(seconds: float | None) -> str:
    """0.83 s, 45 s, 12 min, 3 h 05 min, 2.5 d; `-` for None."""
    if seconds is None:
        return "-"
    seconds = shown(seconds)
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{round(seconds, 3):.2g} s"
    minutes = round(seconds / 60)
    if minutes >= 2880:
        return f"{seconds / 86400:.1f} d"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def size(value: float) -> str:
    """`732 B`, `3.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def plural(number: int, one: str, many: str = "") -> str:
    """`1 job`, `5,000 jobs`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def to_show(what: object) -> str:
    """What a person types to see an incident, a job or a node: the one place that knows this command's name."""
    return f"slurm-watchdog show {what}"


def listed(numbers: Iterable[int], one: str) -> str:
    """`rank 3`, `ranks 9 and 14`; of more than WRITTEN_OUT in ranges: `ranks 0-7, 12 and 14`; of many ranges the first,
    and how many more there are."""
    found = sorted(set(numbers))
    if len(found) <= WRITTEN_OUT:
        parts = [str(each) for each in found]
    else:
        ranges = list(_ranges(set(found)))
        parts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:WRITTEN_OUT]]
        if more := sum(high - low + 1 for low, high in ranges[WRITTEN_OUT:]):
            parts.append(f"{more} more")
    words = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
    return f"{one}{'' if len(found) == 1 else 's'} {words}"


def fold(names: Iterable[str]) -> list[str]:
    """Names of nodes or jobs with their numbers in ranges, as Slurm's users write them: `n[001-400]`,
    `4711-4713`, `12_[1-9]`.

    One string for each beginning and width; nothing is lost. Not ClusterShell's NodeSet.fold: it took 10.5 ms
    for 400 names where this takes 0.6, and reads names that users chose as sets (`a b[1]` becomes `a b1`).
    """
    groups: dict[tuple[str, int], set[int]] = defaultdict(set)
    others: list[str] = []
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            others.append(name)
            continue
        prefix, digits = match[1], match[2]
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups[prefix, width].add(int(digits))
    folded = []
    for (prefix, width), numbers in sorted(groups.items()):
        ranges = [
            f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}" for low, high in _ranges(numbers)
        ]
        if not prefix:
            folded.extend(ranges)
        elif len(numbers) == 1:
            folded.append(prefix + ranges[0])
        else:
            folded.append(f"{prefix}[{','.join(ranges)}]")
    return folded + sorted(others)


def width_of(text: str) -> int:
    """Columns of a terminal that it takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def _ranges(numbers: set[int]) -> Iterator[tuple[int, int]]:
    low = high = None
    for number in sorted(numbers):
        if high is not None and number == high + 1:
            high = number
            continue
        if low is not None and high is not None:
            yield low, high
        low = high = number
    if low is not None and high is not None:
        yield low, high


EXCERPT_CHARS = 160  # Characters of an error's line that a sentence takes up beside other things.
SHORTEST_WORD_CUT = 0.7  # A cut goes back to the end of a word, unless less than this would be left.


def shortened(text: str, limit: int) -> str:
    """`text` in at most `limit` characters; what was cut ends with `…`, at the end of a word where one is near."""
    text = text.strip()
    if len(text) <= limit:
        return text
    kept = text[: limit - 1]
    word = kept.rfind(" ") if text[limit - 1] != " " else len(kept)
    return (kept[:word] if word >= SHORTEST_WORD_CUT * limit else kept).rstrip() + "…"
