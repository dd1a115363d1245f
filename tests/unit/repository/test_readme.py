"""The tables for readers are complete: every kind of incident, collector, metric and command, and none that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slurm_watchdog.agent.agent
import slurm_watchdog.agent.metrics
from slurm_watchdog.agent.metrics import GPU, GPU_VALUES
from slurm_watchdog.cli.main import main
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.detect.registry import KINDS

Row = tuple[str, ...]
Metric = tuple[str, tuple[str, ...]]
"""Type, and names of labels in their order."""


def tables(text: str, first_column: str) -> list[Row]:
    """The rows of all tables whose first column is headed so, a string a cell."""
    found: list[Row] = []
    inside = False
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) if line[:1] == "|" else ()
        if not cells:
            inside = False
        elif inside and not set(cells[0]) <= set("-:"):
            found.append(cells)
        elif not inside:
            inside = cells[0] == first_column
    return found


def names(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def sole_names(rows: list[Row]) -> list[str]:
    """The first cell of each row, which has to be one name in backticks."""
    found = []
    for row in rows:
        (name,) = names(row[0])
        found.append(name)
    assert len(found) == len(set(found)), "a row stands there twice"
    return found


def metrics_table(checkout: Path, of_whom: str) -> dict[str, Metric]:
    """Series without their common beginning, as deploy/README.md has them."""
    rows = tables((checkout / "deploy/README.md").read_text(), f"series of {of_whom}")
    assert all(len(row) == 4 and row[3] for row in rows), "each has a type, its labels, and words"
    return dict(zip(sole_names(rows), ((row[1], tuple(names(row[2]))) for row in rows), strict=True))


def calls(module: object) -> Iterator[ast.Call]:
    source = Path(str(getattr(module, "__file__", ""))).read_text()
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def labels_of(argument: ast.expr) -> tuple[str, ...]:
    """`GPU`, `("job_id", "rank")` or `(*GPU, "reason")`."""
    if isinstance(argument, ast.Name):
        return {"GPU": GPU}[argument.id]
    assert isinstance(argument, ast.Tuple)
    found: list[str] = []
    for each in argument.elts:
        found += labels_of(each.value) if isinstance(each, ast.Starred) else [ast.literal_eval(each)]
    return tuple(found)


def agent_metrics() -> dict[str, Metric]:
    """What AgentMetrics can render, from its source: a report that has everything would have to be written anew each time."""
    found: dict[str, Metric] = {f"gpu_{name}": (kind, GPU) for name, kind, _, _ in GPU_VALUES}
    for call in calls(slurm_watchdog.agent.metrics):
        if called(call) == "histogram" and isinstance(call.args[0], ast.JoinedStr):
            found[last_part(call.args[0])] = ("histogram", ())
        elif called(call) == "_family" and isinstance(call.args[0], ast.Constant):
            name, kind = str(call.args[0].value), ast.literal_eval(call.args[1])
            found[name] = (kind, labels_of(call.args[3]))
    return found


def last_part(text: ast.expr) -> str:
    """`job_step` of f"{prefix}job_step"."""
    assert isinstance(text, ast.JoinedStr)
    end = text.values[-1]
    assert isinstance(end, ast.Constant)
    return str(end.value)


def controller_metrics() -> dict[str, Metric]:
    """What the controller serves, as Prometheus reads it; labels from the source, for most have no value before something happens."""
    text = ControllerMetrics().text().decode()
    kinds = dict(re.findall(r"^# TYPE slurm_watchdog_(\w+) (\w+)$", text, re.MULTILINE))
    labels = {}
    for call in calls(slurm_watchdog.controller.health.metrics):
        if called(call) in ("Gauge", "Counter", "Histogram"):
            labels[last_part(call.args[0])] = (
                tuple(ast.literal_eval(call.args[2])) if len(call.args) > 2 else ()
            )
    assert set(labels) == {name for name in kinds if not name.endswith("_created")}
    return {name: (kinds[name], labels[name]) for name in labels}


def test_every_kind_of_incident_has_its_row_in_the_readme(checkout: Path) -> None:
    listed = set(sole_names(tables((checkout / "README.md").read_text(), "kind")))
    assert listed == set(KINDS)


def test_every_collector_has_its_row_in_the_readme(checkout: Path) -> None:
    listed = set(sole_names(tables((checkout / "README.md").read_text(), "collector")))
    isolated = [call.args[0] for call in calls(slurm_watchdog.agent.agent) if called(call) == "isolate"]
    assert listed == set(map(ast.literal_eval, isolated))


@pytest.mark.parametrize(
    ("of_whom", "read"), [("an agent", agent_metrics), ("the controller", controller_metrics)]
)
def test_every_series_has_its_row_with_its_type_and_labels_and_every_row_is_served(
    checkout: Path, of_whom: str, read: Callable[[], dict[str, Metric]]
) -> None:
    served = read()
    assert len(served) > 10
    assert metrics_table(checkout, of_whom) == served


def test_series_that_texts_speak_of_are_served(checkout: Path) -> None:
    served = set(agent_metrics()) | set(controller_metrics())
    for file in ("README.md", "deploy/README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (checkout / file).read_text()
        spoken_of = set(re.findall(r"slurm_watchdog_(\w+)", text))
        assert spoken_of <= served, f"{file}: {sorted(spoken_of - served)}"


def test_every_command_is_in_the_readme_and_every_one_there_exists(checkout: Path) -> None:
    rows = tables((checkout / "README.md").read_text(), "command")
    listed = {
        word
        for row in rows
        for place, each in enumerate(names(row[0]))
        for word in [each.removeprefix("slurm-watchdog ").split()[0]]
        if each.startswith("slurm-watchdog ") or (place and not word.startswith("-"))
    }
    assert listed == set(main.commands)


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_every_link_between_the_documents_leads_to_a_file_and_a_heading(checkout: Path) -> None:
    broken = []
    for file in (
        checkout / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "deploy/README.md",
            "deploy/OPTIONS.md",
            "docs/security.md",
        )
    ):
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", file.read_text()):
            path, _, part = target.partition("#")
            other = (file.parent / path).resolve() if path else file
            headings = (
                re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE) if part and other.is_file() else []
            )
            if not other.exists() or (part and part not in map(anchor, headings)):
                broken.append(f"{file.name}: {target}")
    assert broken == []
