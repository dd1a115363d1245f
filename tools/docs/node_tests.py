"""Writes the table of docs/test-nodes.md from the kept run of `make bench ARGS='bad-nodes --write'`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.docs.marks import between

CHECKOUT = Path(__file__).parents[2]
FILE = CHECKOUT / "docs/test-nodes.md"
RESULTS = CHECKOUT / "tests/bench/bad_nodes.json"


def write() -> str:
    """The whole page: its text as it is, with a new table."""
    return between(
        FILE.read_text(encoding="utf-8"), "bad nodes", bad_nodes(json.loads(RESULTS.read_text(encoding="utf-8")))
    )


def bad_nodes(results: Mapping[str, Any]) -> str:
    """A row for each way in which a node was made slow, and one for nodes that are well."""
    tries, names = results["tries"], list(results["words"])
    tried = {name: len(range(place, tries, len(names))) for place, name in enumerate(names)}
    lines = [
        f"On {results['date']}, {2 * tries} tests of {results['nodes']} nodes, {results['median_s']} s each in the median, "
        f"{results['longest_s']} s the longest:",
        "",
        "| one node has | it is named, and no other node |",
        "|---|---|",
        *(f"| {results['words'][name]} | {results['named'][name]} of {tried[name]} |" for name in names),
        f"| nothing | nobody is named in {results['healthy']} of {tries} |",
    ]
    if results["wrong"]:
        lines += ["", "What was not right:", "", *(f"- {each}" for each in results["wrong"])]
    return "\n".join(lines)
