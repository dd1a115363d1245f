"""Secrets of users in text: masked where the text enters, once. Pure, and linear in the length of the text.

The kinds are rows of secret_kinds.conf; beside them stand long words without any order, as
generated keys are. Masking what is masked already changes nothing, and what surrounds a secret stays. A
masked run id costs less than a key that was sent to a colleague; hexadecimal words are the exception, for
commits and digests are read all the time: see the table's head.

Who cuts text masks it first (`mask_cut`): half a secret is no kind that anybody knows, and still half a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import mapped

Test = Callable[[re.Match[str]], bool]


class SecretKind(msgspec.Struct, frozen=True):
    """One way to write a secret."""

    name: str
    needles: tuple[str, ...]
    regex: re.Pattern[str]
    is_secret: Test | None = None  # A last look at what the expression matched; None: it is enough.
    in_long_word: bool = False  # It stands in a word of LONG_WORD characters: without one the row is skipped.


LONG_WORD = 20
_PARTS = {
    "{START}": r"(?<![A-Za-z0-9])",
    "{END}": r"(?![A-Za-z0-9_-])",
    "{QUOTED}": r"(?:\"[^\"]{1,512}\"|'[^']{1,512}'|[^\s&'\",;]{1,512})",
}  # What an expression of the table may have by name.
_PLAIN_WORD = late_regex(
    "none|null|nil|true|false|str|int|bytes|string|bool|optional|required|yes|no|empty|unset|missing|invalid|incorrect"
    "|authentication|expired|wrong|not|is|was|the|a|for|from|with|changed"
)
_NO_TOKEN = late_regex(
    r"(?:eos|bos|pad|unk|sep|cls|mask|image|next|last|first|prev|num|max|min|new|special|per|stop|start|end|of|the|added"
    r"|unknown)[ _-]?$",
    re.IGNORECASE,
)
_HASH = late_regex(
    r"(?:commit|revision|\brev|sha\d*|\bgit|hash|digest|version|checksum|md5|cache|snapshots?)\W{0,4}\w{0,12}\W{0,3}$",
    re.IGNORECASE,
)
_PLACEHOLDER = late_regex(r"%[sdr]|%\(\w+\)s|\$\{?\w+\}?|<[^>]*>?|\{[^}]*\}?|\*+|/[\w./-]+")


def _value(match: re.Match[str]) -> bool:
    """Behind a name that says password: whatever is no plain word of programs, no path and no placeholder."""
    value = match["secret"].strip("'\"")
    if len(value) < 3 or _PLAIN_WORD.fullmatch(value.lower().rstrip(".,:;)")) or _PLACEHOLDER.fullmatch(value):
        return False
    return not value.startswith(("os.environ", "os.getenv", "self.", "args.", "Optional", "Union", "getpass"))


def _mixed(match: re.Match[str]) -> bool:
    """Letters and digits, as generated words have them and names of things rarely do."""
    value = match["secret"]
    if any(c.isdigit() for c in value):
        return any(c.isalpha() for c in value)
    return len(value) >= 16 and _cased(match)


def _cased(match: re.Match[str]) -> bool:
    value = match["secret"]
    return any(c.isupper() for c in value) and any(c.islower() for c in value)


def _token(match: re.Match[str]) -> bool:
    """Behind `token`: no token of a vocabulary, no count of tokens."""
    assigned = match.string[match.start("secret") - 1] == "=" and not match["secret"].isdecimal()
    return (assigned or _mixed(match)) and not _NO_TOKEN.search(match.string, max(0, match.start() - 12), match.start())


def _no_hash(match: re.Match[str]) -> bool:
    at = match.start("secret")
    return not _HASH.search(match.string, max(0, at - 24), at)


def _not_a_path(match: re.Match[str]) -> bool:
    value = match["secret"].strip("'\"")
    cache = match.string[: match.start()].lower().endswith("cache")
    return value[:1] not in "/.$<{~" and _mixed(match) and not cache


def _value_of_option(match: re.Match[str]) -> bool:
    return _value(match) and ("token" not in match[0].lower() or _mixed(match))


TESTS: dict[str, Test] = {
    "basic": lambda match: _mixed(match) and _cased(match),
    "cased": _cased,
    "mixed": _mixed,
    "no_hash": _no_hash,
    "not_a_path": _not_a_path,
    "option": _value_of_option,
    "token": _token,
    "value": _value,
}


def _kind(row: str) -> SecretKind:
    """A row of the table."""
    what, _, rest = row.partition(": ")
    needles, _, text = rest.partition(" => ")
    (name, *words), prefixes = what.split(" "), needles.split("|")
    if "prefix" in words:
        text = f"{{START}}(?P<secret>(?:{'|'.join(map(re.escape, prefixes))}){text})"
    for part, meaning in _PARTS.items():
        text = text.replace(part, meaning)
    flags = (re.IGNORECASE if "i" in words else 0) | (re.DOTALL if "s" in words else 0)
    test = next((TESTS[word] for word in words if word in TESTS), None)
    return SecretKind(
        name, tuple(each.lower() for each in prefixes), late_regex(text, flags), test, in_long_word="prefix" in words
    )


_ROWS = Path(__file__).with_name("secret_kinds.conf").read_text(encoding="utf-8").splitlines()
KINDS = tuple(_kind(row) for row in _ROWS if row and not row.startswith("#"))

MASK = "(masked)"
MARGIN = 1024  # Characters behind a cut that are looked at: of a secret across it, so much shows what it is.
MAX_VALUE = 4096  # Characters of a variable that are looked at.
MAX_ROUNDS = 4  # Once one secret is masked, what stood beside it may be seen to be another.
PEM_LINES = 200  # A private key has at most so many lines (RSA of 16,384 bits: 198).

_ANYWHERE = tuple((needle, kind) for kind in KINDS for needle in kind.needles if not kind.in_long_word)
_IN_LONG_WORDS = tuple((needle, kind) for kind in KINDS for needle in kind.needles if kind.in_long_word)
_LONG_WORD = late_regex(rf"(?<!\S)\S{{{LONG_WORD}}}")

_SECRET_NAME = late_regex(
    r"(?:^|_)(?:TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|KEYS?|CREDENTIALS?|AUTH|COOKIES?|SESSION|DSN"
    r"|WEBHOOK|APIKEY|PAT|JWT)(?:_|$)"
)
_LONG = late_regex(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{32,}={0,2}")
_UUID = late_regex(r"(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
"""Names GPUs and runs, and opens nothing."""
_MARKS = late_regex(r"[_=-]+")
_HEX = late_regex(r"[0-9a-f]+|[0-9A-F]+")
_PEM_BEGIN = late_regex(r"-----BEGIN[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = late_regex(r"-----END[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")


def masked_value(name: str, value: str) -> str:
    """The value of variable `name`, or the mask if its name or the value itself looks like a secret."""
    if _SECRET_NAME.search(name.upper()) and not value.isdecimal() and value.lower() not in ("", "true", "false"):
        return MASK
    looked_at = f"{name}={value[:MAX_VALUE]}"
    return value if mask_line(looked_at) == looked_at else MASK


def mask_cut(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, masked before they are cut."""
    return mask_line(text[: limit + MARGIN])[:limit]


def mask_lines(lines: Iterable[str]) -> list[str]:
    """Lines that belong together, masked: a private key may reach over many of them."""
    given = list(lines)
    masked, left = [], _inside_of_a_key(given)
    for line in given:
        if left:
            left = 0 if _PEM_END.search(line) else left - 1
            masked.append(MASK)
            continue
        masked.append(mask_line(line))
        begin = _PEM_BEGIN.search(line)
        if begin and not _PEM_END.search(line, begin.end()):
            left = PEM_LINES
    return masked


def _inside_of_a_key(lines: list[str]) -> int:
    """How many lines to the end of a key that began before the first of them; 0 if they begin outside of one."""
    for number, line in enumerate(lines[:PEM_LINES]):
        if _PEM_BEGIN.search(line):
            return 0
        if _PEM_END.search(line):
            return number + 1
    return 0


def mask_text(text: str) -> str:
    """Text of several lines, masked."""
    return mask_line(text) if "\n" not in text else "\n".join(mask_lines(text.split("\n")))


def mask_line(text: str) -> str:
    """`text` with every secret in it masked."""
    if len(text) < 8:  # `mysql -pX` is longer
        return text
    for _ in range(MAX_ROUNDS):
        before, lower = text, text.lower()
        for needle, kind in _ANYWHERE:
            if needle in lower:
                text = _without(kind, text)
        if _LONG_WORD.search(text):
            for needle, kind in _IN_LONG_WORDS:
                if needle in lower:
                    text = _without(kind, text)
            text = _LONG.sub(lambda found: MASK if _is_random(found[0]) else found[0], text)
        if text == before:
            return text
    return text


def _without(kind: SecretKind, text: str) -> str:
    return kind.regex.sub(lambda match: _masked(kind, match), text)


def _masked(kind: SecretKind, match: re.Match[str]) -> str:
    if MASK in match["secret"] or (kind.is_secret is not None and not kind.is_secret(match)):
        return match[0]
    start, end = match.start("secret") - match.start(), match.end("secret") - match.start()
    return f"{match[0][:start]}{MASK}{match[0][end:]}"


def _is_random(word: str) -> bool:
    """A long word of capitals, small letters and digits in no order, as keys are: it changes between them all the time.

    Names have an order: words, numbers, and marks between them. Hexadecimal words are hashes.
    """
    slashes = word.count("/")
    if word.startswith(("_Z", "/")) or slashes > len(word) / 8:  # a symbol of C++, a path
        return False
    parts = _MARKS.split(_UUID.sub("-", word))
    letters = sum(len(part) for part in parts if _has_no_order(part, 0.45 if slashes else 1 / 3))
    return letters >= max(20, 0.6 * len(word))


def _has_no_order(part: str, least: float) -> bool:
    if len(part) < 8 or _HEX.fullmatch(part):
        return False
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" if c.islower() else "-" for c in part]
    changes = sum(1 for one, two in pairwise(kinds) if one != two)
    return {"d", "u", "l"} <= set(kinds) and changes >= len(part) * least


# ------------------------------------------------------------------------------------------------ whole values

UNMASKED_FIELDS: Final = frozenset({
    "agent_id", "agent_version", "boot_id", "comm", "command_id", "exclude_nodes", "fs_type", "gpu_uuid",
    "gpu_uuids", "job_id", "job_ids", "layout", "line", "local", "mig", "mount", "node", "nodes", "pattern",
    "pci_bus_id", "peer", "phase", "state", "step_id", "subject", "syscall", "throttle", "user", "uuid",
    "variables", "wanted", "wchan", "wishes", "Finding.mounts", "Gpu.name", "MountProbeRequest.directory",
    "NodeEvent.name", "NodeEvent.source",
})  # fmt: skip
"""Fields of values that are no text of users, or too short to hold a secret (`comm` has 15 characters): identifiers and
words, which are compared. Lines of events and of the kernel are masked where they are cut. Directives (`wishes`) and
mounts are used as they are, and masked where they become words."""
REMEMBERED = 8192  # Texts whose masked form is known: frames, paths and sentences come again in every report.
MAX_REMEMBERED = 1000  # Characters of such a text.
V = TypeVar("V")
_remembered = lru_cache(REMEMBERED)(mask_line)


def mask_words(text: str) -> str:
    """`text` masked; quick for one that was seen before."""
    return _remembered(text) if len(text) <= MAX_REMEMBERED else mask_line(text)


def masked(value: V) -> V:
    """`value` (struct, tuple, list, dictionary, text) with every text masked; the same object without secrets."""
    return mapped(value, (str,), _mask_row, UNMASKED_FIELDS)


def _mask_row(field: str, texts: Sequence[str]) -> Sequence[str]:
    if len(texts) > 1 and any("PRIVATE KEY" in each for each in texts):
        return mask_lines(texts)
    return list(map(mask_words, texts))
