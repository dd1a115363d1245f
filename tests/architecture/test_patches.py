"""No test replaces a constant of the product: what a test needs smaller or sooner is an argument, or its input is made
for the real constant. A patched constant misses each module that has imported its value already.

The table of tests/attacks takes the defences out of a build, by names that it computes: it is not looked at here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PRODUCT = "slurm_watchdog"
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
OF_NAME = {"setattr", "delattr", "patch", "object"}
"""The calls that replace what a path, or a module and a name, leads to (monkeypatch, mock, Python's own)."""
OF_ITEM = {"setitem", "delitem", "dict"}
"""The methods that replace what a constant holds."""


def imports(tree: ast.AST) -> dict[str, str]:
    """Each name that the module imports -> its full dotted name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
            found |= {root: root for each in node.names if not each.asname for root in (each.name.partition(".")[0],)}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name that an expression or the text of a path leads to; empty where that cannot be read off."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def replaced(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full name) of all that the module replaces, as far as it can be read off."""
    names = imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            first, *more = node.args
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = method or getattr(node.func, "id", "")
            if method in OF_ITEM or (called in OF_NAME and isinstance(first, ast.Constant)):
                yield node.lineno, dotted(first, names)
            elif called in OF_NAME and more:
                yield node.lineno, f"{dotted(first, names)}.{dotted(more[0], names)}"
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]:
                if isinstance(target, ast.Attribute | ast.Subscript):
                    place = target.value if isinstance(target, ast.Subscript) else target
                    yield node.lineno, dotted(place, names)


def replaced_constants(source: str) -> list[tuple[int, str]]:
    return [
        (line, name)
        for line, name in replaced(ast.parse(source))
        if name.startswith(f"{PRODUCT}.") and CONSTANT.fullmatch(name.rpartition(".")[2])
    ]


def test_no_test_replaces_a_constant_of_the_product() -> None:
    bad = [
        f"{path.relative_to(TESTS.parent)}:{line}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in replaced_constants(path.read_text())
    ]
    assert not bad, "Make it an argument, or make the input for the real one:\n" + "\n".join(bad)


@pytest.mark.parametrize(
    ("line", "is_bad"),
    [
        ('monkeypatch.setattr("slurm_watchdog.a.b.MOST", 3)', True),
        ('monkeypatch.setattr(b, "MOST", 3)', True),
        ('monkeypatch.setattr(slurm_watchdog.a.b, "MOST", 3)', True),
        ('with pytest.MonkeyPatch.context() as patch: patch.setattr(other, "_MOST", 3)', True),
        ('monkeypatch.delattr(b, "MOST")', True),
        ('setattr(b, "MOST", 3)', True),
        ("monkeypatch.setitem(LIMITS, 'most', 3)", True),
        ('mock.patch("slurm_watchdog.a.b.MOST", 3)', True),
        ('mock.patch.object(Thing, "MOST", 3)', True),
        ("b.MOST = 3", True),
        ("LIMITS['most'] = 3", True),
        ("del b.MOST", True),
        ('monkeypatch.setattr("slurm_watchdog.a.b.function", None)', False),
        ('monkeypatch.setattr(b, "function", None)', False),
        ('monkeypatch.setattr(rig, "MOST", 3)', False),
        ('monkeypatch.setattr(os, "O_PATH", 3)', False),
        ('monkeypatch.setitem(sys.modules, "torch", None)', False),
        ("MOST = b.MOST", False),
        ("dict(LIMITS)['most']", False),
        ("self.b.MOST = 3", False),
    ],
)
def test_a_constant_of_the_product_that_is_replaced_is_seen(line: str, is_bad: bool) -> None:
    source = (
        "import os, slurm_watchdog.a.b\nfrom slurm_watchdog.a import b, c as other\n"
        f"from slurm_watchdog.a.b import LIMITS, Thing\nfrom tests import rig\n{line}\n"
    )
    assert bool(replaced_constants(source)) is is_bad
