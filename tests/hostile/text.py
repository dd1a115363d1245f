"""Strings that are meant to harm: markup, mentions, links, terminal sequences, labels, and characters that
change the direction of others."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterable, Iterator

BATCH = 50

PIECES = (
    "<!channel>", "<!here>", "<!everyone>", "<@U024BE7LH>", "<#C024BE91L>", "<!subteam^S0604QSJC>", "@channel", "@here", "@everyone",
    "<https://evil.example|your bank>", "<mailto:x@evil.example>", "https://evil.example", "[link](https://evil.example)",
    "&lt;!channel&gt;", "&amp;", "&", "<", ">", "<!date^0^{date}^https://evil.example|x>", "*bold*", "_it_", "~no~", "`code`", "```", ":skull:",
    "\x1b[31m", "\x1b[2J", "\x1b[H", "\x1b]0;title\x07", "\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\", "\x1bP$q\x1b\\", "\x1b(0",
    "\x9b31m", "\x9d0;t\x9c", "\x90", "\x85", "\x07", "\x08\x08\x08", "\x00", "\x7f", "\r", "\n", "\r\n", "\v", "\f", "\t", "\u2028", "\u2029",
    "\u202e", "\u202a", "\u2066", "\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\ue000", "\U000e0001", "\ud7ff", "\ufffe", "\u0300" * 30,
    "[red]", "[/]", "[bold red on white]x[/]", "[link=https://evil.example]y[/link]", "\\[", "{job_id}", "%n%s", "${IFS}", "$(id)", "'; --",
    '"', "'", "\\", "\\n", '",evil="1', '"} 1\nevil_total{a="b', "# HELP evil x", "\n# TYPE evil counter\nevil 1\n", "{{ .Labels }}", "{{range}}",
    "</text>", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "javascript:alert(1)", "名前", "naïve", "🦥", "İ", "ß", "x" * 4000, "", "\udcff", "\ud800", "=cmd|'/c calc'!A1", "@SUM(1+1)", "../../etc/passwd",
    "#/job/7", "%zz", "%00", "data:text/html,x", "<svg/onload=alert(1)>", "</script>", "' onmouseover=alert(1) x='", "__proto__", "${7*7}",
    "{{7*7}}", "\x1b[6n", "\x1b[c", "\x1b]52;c;ZXZpbA==\x07", "\x1b]1337;File=:x\x07", "\u2067\u2068\u2069", "\u0085", "\u061c", "\ufff9",
)  # fmt: skip


LONG = 200_000
"""Characters of a few of them: nobody shows all of it."""


def strings(number: int, seed: str = "hostile") -> Iterator[str]:
    """As many, the same each time: pieces alone, then put together, then any characters, some of them very long."""
    yield from PIECES[:number]
    chance = random.Random(seed)
    for index in range(number - len(PIECES)):
        if index % 5000 == 4999:
            piece = chance.choice(PIECES) or "x"
            yield _joined([piece] * (LONG // len(piece)))
        elif chance.random() < 0.7:
            yield _joined(chance.choices(PIECES, k=chance.randint(2, 6)))
        else:
            yield _joined(chr(_any(chance)) for _ in range(chance.randint(1, 60)))


def _joined(parts: Iterable[str]) -> str:
    """Put together; two halves of one character that meet are that character, as for everybody who reads JSON."""
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _any(chance: random.Random) -> int:
    """A character of any plane, a lone surrogate now and then."""
    return chance.randrange(chance.choice((0x80, 0x100, 0x3000, 0xE000, 0x10FFFF)))


def batches(number: int, size: int = BATCH) -> Iterator[list[str]]:
    """The same in lists of `size`."""
    batch = []
    for text in strings(number):
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def is_quiet(text: str, lines: bool = False) -> bool:
    """No control, format, surrogate, private or unassigned character, and no line or paragraph separator."""
    if text.isascii():
        return text.replace("\n", "" if lines else "\n").isprintable()
    return all(
        (char not in "\u2028\u2029" and unicodedata.category(char)[0] != "C") or (lines and char == "\n")
        for char in text
    )


def well_formed(text: str) -> str:
    """The text as a program has it that reads UTF-8: without lone surrogates."""
    return re.sub("[\ud800-\udfff]", "?", text)
