"""docs/why.md quotes what the watchdog prints: each reason is in the product, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
PACKAGE = CHECKOUT / "watchdog/slurm_watchdog"


def sentences() -> Iterator[str]:
    """Each string of the package, an f-string with `…` for its values."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def quoted() -> list[str]:
    """What the tables of reasons have in code, in their column `it prints`."""
    found, column = list[str](), 0
    for line in (CHECKOUT / "docs/why.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            column = -1
        elif "it prints" in cells:
            column = cells.index("it prints")
        elif column >= 0:
            found += [words.strip("` ") for words in re.findall(r"``` .+? ```|`[^`]+`", cells[column])]
    return found


@pytest.fixture(scope="module")
def product() -> str:
    return "\n".join(sentences())


@pytest.mark.parametrize("words", quoted())
def test_a_reason_on_the_page_for_owners_is_printed_by_the_product(words: str, product: str) -> None:
    assert words in product


def test_the_page_quotes_reasons() -> None:
    assert len(quoted()) > 30
