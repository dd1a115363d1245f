"""CONTRIBUTING.md's steps for a new collector suffice: they are followed in a copy, and the collector is seen
everywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.builders.report_json import report_of

AGENT = """
import sys
from slurm_watchdog.cli.main import main
main(["agent", "--once", "--json", "--config", sys.argv[1]])
"""
SURFACES = """
import sys
from slurm_watchdog.agent.metrics import AgentMetrics
from slurm_watchdog.agent.service import show_report
from slurm_watchdog.base.loop import Isolated
from slurm_watchdog.wire.codec import decode_report, encode_report
from tests.builders.report_json import report_of
from tools.docs.__main__ import PAGES
report = report_of(sys.stdin.buffer.read())
assert decode_report(encode_report(report)) == report
metrics = AgentMetrics()
metrics.update(report, Isolated(seconds={"load": 0.001}), 0)
show_report(report)
print(metrics.render().decode())
print(PAGES["collectors"].write())
"""


def blocks(page: str) -> dict[str, str]:
    """The Python of the recipe, by what its first line says of where it goes."""
    recipe = page[page.index("## A new collector") : page.index("## A new detector")]
    found = (textwrap.dedent(each[0]) for each in re.finditer(r"^ *# [\s\S]*?(?=^ *```$)", recipe, re.MULTILINE))
    return dict(each.removeprefix("# ").split("\n", 1) for each in found)


def follow_recipe(steps: dict[str, str], tree: Path) -> None:
    """Does what the recipe says, and nothing else."""
    agent, model = (
        "watchdog/slurm_watchdog/agent/collectors",
        tree / "watchdog/slurm_watchdog/model/report.py",
    )
    (tree / f"{agent}/load.py").write_text(steps.pop(f"{agent}/load.py"))
    registry = tree / f"{agent}/registry.py"
    text = registry.read_text().replace("import (\n", "import (\n    load,\n", 1)
    line = textwrap.indent(steps.pop(f"{agent}/registry.py: COLLECTORS"), "    ")
    registry.write_text(re.sub(r"(COLLECTORS: [^)]*)\)", lambda found: found[1] + line + ")", text))
    before, report, rest = model.read_text().partition("class Report(")
    section = steps.pop("watchdog/slurm_watchdog/model/report.py: before Report")
    field = textwrap.indent(steps.pop("watchdog/slurm_watchdog/model/report.py: Report"), "    ")
    body, after, end = rest.partition("\n\n\n")
    model.write_text(f"{before}{section}\n\n{report}{body}\n{field}{after}{end}")
    (tree / "tests/unit/agent").mkdir(parents=True)
    (tree / "tests/unit/agent/test_load.py").write_text(steps.pop("tests/unit/agent/test_load.py"))
    assert steps == {}, "a step that this test does not follow"


@pytest.fixture
def tree(checkout: Path, tmp_path: Path) -> Path:
    """A copy of the sources after the recipe."""
    for folder in ("watchdog", "tools", "docs", "deploy"):
        shutil.copytree(checkout / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    follow_recipe(blocks((checkout / "CONTRIBUTING.md").read_text()), tmp_path)
    return tmp_path


def run(tree: Path, *words: str, stdin: bytes = b"") -> bytes:
    path = os.pathsep.join((str(tree / "watchdog"), str(tree)))
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env={**os.environ, "PYTHONPATH": path}, input=stdin, capture_output=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_recipe_of_a_collector_followed_gives_it_in_report_wire_tables_metrics_and_pages(tree: Path) -> None:
    config = tree / "c.yaml"
    config.write_text("agent: {node_name: n1, kernel_log: '', state_directory: ''}\n")
    said = run(tree, "-c", AGENT, str(config))
    threads = json.loads(said)["load"]["threads"]
    assert threads >= 0
    shown = run(tree, "-c", SURFACES, stdin=said).decode()
    assert f"\nload\n  threads={threads:.6g}\n" in shown, shown
    assert 'slurm_watchdog_collector_success{collector="load"} 1\n' in shown
    assert "| `load` | how many threads run or wait for a CPU | `/proc/loadavg` |" in shown
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/agent/test_load.py")
    assert report_of(said).node == "n1", "a controller of before takes the report, without the section"
