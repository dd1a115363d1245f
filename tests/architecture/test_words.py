"""Words that STYLE.md keeps out of what people read: messages, help, options, metrics, sentences of incidents.

`words_to_avoid.txt` has each of them with what to write instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "watchdog/slurm_watchdog"
PAGES = ("README.md", "docs/*.md", "deploy/README.md", "deploy/ansible/README.md", "hooks/README.md")
"""What readers are given. docs/development is for those who read the code, too."""
ROWS = [
    line.rsplit(" | ", 1)
    for line in Path(__file__).with_name("words_to_avoid.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
WORDS = re.compile("|".join(rf"(?P<w{number}>\b(?:{row[0]})(?!\w))" for number, row in enumerate(ROWS)), re.IGNORECASE)
OPTIONS = ("config", "detect")
"""Packages where a string below a field is its text in the options' page."""
GENERATED = ("cli.md", "options.md", "detectors.md", "metrics.md")
"""Pages that are made of texts of the package, which are looked at there."""
OTHERS_WORDS = ("parse", "knowledge")
"""Packages that quote what others write, in patterns; the hints are ours."""
TEMPLATES = ("*.j2", "doctor/rules.conf", "*.html")
QUOTED = re.compile(r"`[^`]*`|```.*?```", re.DOTALL)
"""Commands, keys and other people's lines in a page."""


def texts(source: str, *, options: bool) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that a person may read: literals and f-strings that are sentences, the help of
    commands, and, with `options`, the texts below fields."""
    tree = ast.parse(source)
    ours = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            below = zip(node.body, node.body[1:], strict=False)
            described = {id(text) for field, text in below if options and isinstance(field, ast.AnnAssign)}
            ours |= {id(each.value) for each in node.body if isinstance(each, ast.Expr) and id(each) not in described}
        elif isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(each) for each in node.decorator_list):
            continue
        elif isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            section = isinstance(node, ast.Module) and "\nFires:" in (
                ast.get_docstring(node) or ""
            )  # docs/detectors.md
            ours |= {id(each.value) for each in node.body[section:] if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            ours |= {id(part) for part in node.values}
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ours:
            yield node.lineno, node.value


def found_in(text: str) -> list[str]:
    """`'nobody': no one, no rank, unknown` for each word to avoid in a text that is more than a name."""
    if " " not in text.strip():
        return []
    return [f"{found[0]!r}: {ROWS[int(str(found.lastgroup)[1:])][1]}" for found in WORDS.finditer(text)]


def test_what_people_read_has_none_of_the_words_to_avoid() -> None:
    bad = [
        f"{path.relative_to(PACKAGE)}:{line}: {found} in {text[:100]!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not set(OTHERS_WORDS) & set(path.relative_to(PACKAGE).parts) or path.name == "remediation_hints.py"
        for line, text in texts(path.read_text(), options=path.relative_to(PACKAGE).parts[0] in OPTIONS)
        for found in found_in(text)
    ]
    bad += [
        f"{path.relative_to(PACKAGE)}:{number}: {found}"
        for pattern in TEMPLATES
        for path in sorted(PACKAGE.rglob(pattern))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.startswith("#")
        for found in found_in(re.sub(r"\{[{%].*?[}%]\}", "…", line))
    ]
    assert bad == [], "\n".join(bad)


def test_alerts_dashboards_and_the_script_for_trainers_have_none_of_them() -> None:
    said = re.compile(r'^ *(?:summary|action|"description"|"title"): .*|\bsay ".*', re.MULTILINE)
    bad = [
        f"{path.name}: {found} in {line.strip()[:160]!r}"
        for name in ("prometheus/alerts.yaml", "grafana/dashboards/*.json", "trainers/batch.sh")
        for path in sorted((CHECKOUT / "deploy").glob(name))
        for line in said.findall(path.read_text(encoding="utf-8"))
        for found in found_in(line)
    ]
    assert bad == [], "\n".join(bad)


def test_the_pages_have_none_of_the_words_to_avoid() -> None:
    bad = [
        f"{path.relative_to(CHECKOUT)}: {found} in {block[:160]!r}"
        for pattern in PAGES
        for path in sorted(CHECKOUT.glob(pattern))
        if path.name not in GENERATED
        for block in QUOTED.sub("…", path.read_text(encoding="utf-8")).splitlines()
        for found in found_in(block)
    ]
    assert bad == [], "\n".join(bad)


def test_a_word_is_found_in_a_message_in_help_and_in_an_option_and_not_in_a_docstring() -> None:
    source = '''
"""Whoever."""
class Section:
    """Whoever."""
    age: int = 0
    """Nobody else's."""
@click.command()
def show() -> None:
    """Draws it anew."""
    log.warning(f"the helper {name} can't be had: %s", error)
'''
    assert sum(bool(found_in(text)) for _, text in texts(source, options=True)) == 3
    assert sum(bool(found_in(text)) for _, text in texts(source, options=False)) == 2
