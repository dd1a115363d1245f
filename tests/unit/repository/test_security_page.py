"""tests/attacks/README.md: each finding of the review has its line, and each test that a line names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FINDINGS = [*(f"C{n}" for n in (1, 2)), *(f"H{n}" for n in range(1, 8)), *(f"M{n}" for n in range(1, 11)), *(f"L{n}" for n in range(1, 13))]  # fmt: skip
PAGE = Path(__file__).parents[3] / "tests/attacks/README.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows() -> dict[str, str]:
    """Finding -> the cell with its tests."""
    found = re.findall(r"^\| ([CHML]\d+) \|.*\| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(found) == len(dict(found)), "a finding has one line"
    return dict(found)


def test_every_finding_has_a_line_with_a_test() -> None:
    assert list(rows()) == FINDINGS
    assert [finding for finding, cell in rows().items() if not NAMED.search(cell)] == []


@pytest.mark.parametrize("finding", FINDINGS)
def test_the_tests_of_a_finding_exist(finding: str, checkout: Path) -> None:
    for file, name in NAMED.findall(rows()[finding]):
        text = (checkout / "tests" / file).read_text()
        assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), f"{file}::{name}"


def test_the_readme_links_to_the_page(checkout: Path) -> None:
    assert "(docs/security.md)" in (checkout / "README.md").read_text()
