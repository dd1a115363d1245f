"""Words that STYLE.md keeps out of what people read: messages, help, options, metrics, sentences of incidents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "watchdog/slurm_watchdog"
PAGES = ("README.md", "docs/*.md", "deploy/README.md", "deploy/ansible/README.md", "hooks/README.md")
"""What readers are given. docs/development is for those who read the code, too."""
INSTEAD = {
    r"anew": "again, from the beginning",
    r"once more": "again",
    r"as ever": "unchanged",
    r"for ever": "indefinitely, without end",
    r"whoever|whosoever": "the user, the client",
    r"whom": "which user",
    r"can't be had": "is unavailable",
    r"is told|told of|are told": "is reported, alerts, sends",
    r"stands still|stood still|stand still": "hangs, stalls",
    r"goes on": "continues",
    r"wont to": "usually",
    r"no number any more": "NaN or infinite",
    r"fresh grace": "timeouts restarted",
    r"left alone until": "no new requests until",
}
"""A word, as an expression, and what the field says instead."""
WORDS = re.compile(r"\b(?:" + "|".join(INSTEAD) + r")\b", re.IGNORECASE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that is no docstring; one below a field of the configuration is its text in
    the options' page."""
    tree = ast.parse(source)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


def commands_help(source: str) -> Iterator[tuple[int, str]]:
    """(line, docstring) of each click command: its `--help`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(each) for each in node.decorator_list):
            yield node.lineno, ast.get_docstring(node) or ""


def test_what_people_read_has_none_of_the_words_to_avoid() -> None:
    bad = [
        f"{path.relative_to(PACKAGE)}:{line}: {found[0]!r} in {text[:80]!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "knowledge"  # patterns of what others write
        for source in [path.read_text()]
        for line, text in (*texts(source), *commands_help(source))
        if (found := WORDS.search(text))
    ]
    bad += [
        f"{path.name}: {found[0]!r}"
        for path in sorted(PACKAGE.rglob("*.j2"))
        for found in WORDS.finditer(path.read_text(encoding="utf-8"))
    ]
    assert bad == [], "\n".join(bad)


def test_the_pages_have_none_of_the_words_to_avoid() -> None:
    bad = [
        f"{path.relative_to(CHECKOUT)}:{number}: {found[0]!r} in {line[:160]!r}"
        for pattern in PAGES
        for path in sorted(CHECKOUT.glob(pattern))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := WORDS.search(line))
    ]
    assert bad == [], "\n".join(bad)


def test_a_word_is_found_in_a_message_and_in_help_and_not_in_a_docstring() -> None:
    source = '''
"""Whoever."""
@click.command()
def show() -> None:
    """Draws it anew."""
    log.warning("the helper can't be had: %s", error)
'''
    assert [bool(WORDS.search(text)) for _, text in (*texts(source), *commands_help(source))] == [True, True]
