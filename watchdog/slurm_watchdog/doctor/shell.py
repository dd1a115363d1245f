"""A batch script as commands: continued lines, quotes, comments and variables that hold plain text. Pure.

No shell: what a `source`d file or a substitution sets is not known, and stays as written (`$NAME`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from slurm_watchdog.base.structs import Struct

MAX_BYTES = 1 << 20
MAX_DEPTH = 2
"""Values are filled in when they are assigned: what is left are variables that were set later."""
MAX_VALUE = 16 * 1024
MAX_COMMANDS = 5000
MAX_WORDS = 20_000
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
_KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "time", "!", "{", "(", "exec",
    "eval", "nohup", "command", "env"})  # fmt: skip
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset", "set"})


class Command(Struct, frozen=True, kw_only=True):
    """One simple command."""

    line: int
    words: tuple[str, ...]
    """Quotes removed, variables filled in as far as they are known."""
    environment: tuple[tuple[str, str], ...] = ()
    """Assignments before it: `NAME=value command`."""


def parse_shell(text: str) -> tuple[tuple[Command, ...], dict[str, str]]:
    """(simple commands in their order, variables that are assigned, with their last value)."""
    commands: list[Command] = []
    variables: dict[str, str] = {}
    for line, raw in islice(_simple_commands(text[:MAX_BYTES]), MAX_COMMANDS):
        words = _strip_keywords(raw)
        if words and words[0] in _DECLARATIONS:
            words = [word for word in words[1:] if not word.startswith("-")]
            _assign(words, variables)
            continue
        environment = []
        while words and _ASSIGNMENT.fullmatch(words[0]):
            environment.append(words.pop(0))
        if not words:
            _assign(environment, variables)
            continue
        own: dict[str, str] = {}
        _assign(environment, own, variables)
        filled = [part for word in words[:MAX_WORDS] for part in _fill(word, variables)]
        if filled:
            commands.append(Command(line=line, words=tuple(filled), environment=tuple(own.items())))
    return tuple(commands), variables


def _strip_keywords(words: list[str]) -> list[str]:
    while words and words[0] in _KEYWORDS:
        words = words[1:]
    return words


def _assign(words: list[str], variables: dict[str, str], known: Mapping[str, str] | None = None) -> None:
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is not None:
            value = _expand(match[3], known if known is not None else variables)
            variables[match[1]] = (variables.get(match[1], "") + value if match[2] else value)[:MAX_VALUE]


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with variables that are known filled in; at most MAX_VALUE long if anything was."""
    for _ in range(MAX_DEPTH):
        if "$" not in text:
            break
        parts: list[str] = []
        size = end = 0
        for match in _VARIABLE.finditer(text):
            value = variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])
            parts += (text[end : match.start()], value)
            size += match.start() - end + len(value)
            end = match.end()
            if size > MAX_VALUE:
                break
        text = ("".join(parts) + text[end:])[:MAX_VALUE] if parts else text
    return text


def _fill(word: str, variables: Mapping[str, str]) -> list[str]:
    """An unquoted variable may hold several words; a quoted one with a whole command line is taken apart just the same,
    for such a line is handed to a shell (`bash -c "$CMD"`)."""
    filled = _expand(word, variables)
    if "$" not in word or filled == word:
        return [word] if word else []
    return filled.replace("\\\n", " ").split()


def _simple_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of each simple command, quotes of single words removed."""
    words: list[str] = []
    word: str | None = None
    line, started, index, heredoc = 1, 1, 0, ""
    while index < len(text):
        match = _TOKEN.match(text, index)
        assert match is not None
        piece, index = match[0], match.end()
        kind = match.lastgroup or ""
        if kind in ("space", "separator") and word is not None:
            words.append(word)
            word = None
        if kind == "separator" and words:
            yield started, words
            words = []
        if not words and word is None:
            started = line
        line += piece.count("\n")
        if kind == "heredoc":
            heredoc = match["mark"]
        elif kind == "separator" and piece == "\n" and heredoc:
            end = re.compile(rf"^\s*{heredoc}\s*$", re.MULTILINE).search(text, index)
            after = end.end() if end is not None else index
            line, index, heredoc = line + text.count("\n", index, after), after, ""
        elif kind not in ("space", "separator", "comment", "continued"):
            word = (word or "") + _unquoted(kind, piece)
    words += [word] if word is not None else []
    if words:
        yield started, words


_TOKEN = re.compile(
    r"""(?P<continued>\\\n)|(?P<escaped>\\.?)|(?P<single>'[^']*'?)|(?P<double>"(?:[^"\\]|\\.)*"?)
    |(?P<comment>(?<![^\s;|&()])\#[^\n]*)|(?P<heredoc><<-?[ \t]*['"]?(?P<mark>\w+)['"]?)|(?P<redirect>&>|[<>]&)
    |(?P<separator>[\n;|&()`])|(?P<space>[ \t\r]+)|(?P<plain>[^\\'"\#<>\n;|&()`\ \t\r]+|.)""",
    re.VERBOSE | re.DOTALL,
)


def _unquoted(kind: str, piece: str) -> str:
    if kind == "single":
        return piece.strip("'")
    if kind == "double":
        return re.sub(r"\\([\"\\`])", r"\1", piece[1:].removesuffix('"').replace("\\\n", " "))
    return piece[1:] if kind == "escaped" else piece
