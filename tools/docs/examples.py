"""Writes what commands print into the pages that show it: `python -m tools.docs examples`.

The commands run on files of tests/captures/pages; `show` prints what a controller answered that mended a real job
(tests/captures/explain/record.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from click.testing import CliRunner

from slurm_watchdog.cli.main import main as group
from slurm_watchdog.cli.show import print_incident
from slurm_watchdog.model.documents import Explanation
from tools.docs import evaluation
from tools.docs.marks import between

CHECKOUT = Path(__file__).resolve().parents[2]
WIDTH = 130
"""Columns of a block on a page."""
SAMPLES = CHECKOUT / "tests/captures/pages"
INCIDENT = CHECKOUT / "tests/captures/explain/data_loader.json"
README = CHECKOUT / "README.md"
"""It shows one screen of `show`."""
EVIDENCE = CHECKOUT / "docs/evidence.md"
"""It shows what else is found, and what was done."""


class Example(NamedTuple):
    """A command that runs in SAMPLES."""

    page: Path
    name: str
    command: str


EXAMPLES = (
    Example(CHECKOUT / "docs/slurm.md", "doctor", "doctor train.sbatch"),
    Example(CHECKOUT / "docs/logs-and-stacks.md", "scan-log", "scan-log slurm-4711.out"),
    Example(
        CHECKOUT / "docs/logs-and-stacks.md",
        "group-stacks",
        "group-stacks stacks/ --since-last-step 1800 --typical-step 12",
    ),
)
PAGES = (README, EVIDENCE, *dict.fromkeys(example.page for example in EXAMPLES))


def write(page: Path) -> str:
    """A page with its examples as the program prints them today."""
    text = page.read_text(encoding="utf-8")
    for example in EXAMPLES:
        if example.page == page:
            printed = run(example.command).partition("\nWhat it usually is")[0]
            text = between(text, example.name, console(example.command, printed))
    if page in (README, EVIDENCE):
        incident, printed = explained(everything=page == EVIDENCE)
        rest = printed.partition("\nFacts\n")[2]
        facts, _, more = rest.partition("\nUsually ")
        end = more.partition("\nAction: ")[2]
        shown = printed.partition("\nWHO ")[0] if page == README else f"…\nFacts\n{facts}\n…\nAction: {end}"
        text = between(text, "explain", console(f"show {incident[:4]}{' --all' if page == EVIDENCE else ''}", shown))
    return between(text, "figures", figures()) if page == README else text


def figures() -> str:
    """How well it judges, in three sentences, from the results that docs/evaluation.md shows."""
    tried = evaluation.read("frameworks")
    return (
        "- **Simulated clusters** ([Evaluation](docs/evaluation.md), with real jobs on a real Slurm): "
        f"{evaluation.sentence(evaluation.read('accuracy'))}\n- **Real frameworks**: "
        f"{evaluation.frameworks_sentence(tried)} ({tried['date']}, {tried['commit']})\n{_shipped()}"
    )


def _shipped() -> str:
    """What came of the runs with the limits as shipped."""
    kept = evaluation.read("frameworks-shipped")
    frameworks, touched = {name for name, _, _ in kept["cases"]}, sum(not ok for _, _, ok in kept["cases"])
    return (
        f"- **The same with the limits as shipped**: {', '.join(sorted(frameworks))}, each with a save and with an "
        f"evaluation of {kept['seconds']:.0f} s: {touched} of {len(kept['cases'])} touched "
        f"({kept['date']}, {kept['commit']})."
    )


def console(command: str, printed: str) -> str:
    """A block of a page: the command and its output, long lines continued below what they say."""
    said = printed.strip().splitlines()
    cascade = [line for line in said if line.startswith("  cascade ")][2:]  # the rest of it says the same
    lines = [part for line in said if line not in cascade[:-1] for part in folded("  …" if line in cascade else line)]
    return "\n".join(["```console", f"$ slurm-watchdog {command}", *lines, "```"])


def folded(line: str) -> list[str]:
    """A line as lines of at most WIDTH; a row of a timeline continues below its text."""
    column = re.match(r"[\d-]{10} [\d:]{8}  |- | *", line)
    indent = " " * max(2, len(column[0]) + 2 * line.startswith(" ") if column else 0)
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [""]


def run(command: str) -> str:
    """What a command prints."""
    before = os.getcwd()
    os.chdir(SAMPLES)
    try:
        return CliRunner().invoke(group, command.split(), env={"COLUMNS": "160"}, catch_exceptions=False).output
    finally:
        os.chdir(before)


def explained(everything: bool) -> tuple[str, str]:
    """The id of the recorded incident, and what `show` prints of it, in UTC, at the moment when it was resolved."""
    found = msgspec.json.decode(INCIDENT.read_bytes(), type=Explanation)
    last = max(each.at for each in found.timeline)
    printed = io.StringIO()
    with utc(), contextlib.redirect_stdout(printed):
        print_incident(found, last, everything)
    return found.incident.id, printed.getvalue()


@contextlib.contextmanager
def utc() -> Iterator[None]:
    """Times are printed as UTC, whatever the machine's zone is."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()
