"""The dashboards that are checked in are those that the generator writes, and ask for nothing that does not exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders.prometheus_series import PUT_ON_BY_PROMETHEUS, SERIES
from tools.docs.metrics import series

pytest.importorskip("grafana_foundation_sdk", reason="its releases need Python 3.11")
from tools.docs import grafana

NAMES = ("cluster", "itself", "job", "node")


def panels(checkout: Path, name: str) -> list[dict[str, Any]]:
    document = json.loads((checkout / f"deploy/grafana/dashboards/{name}.json").read_text())
    found: list[dict[str, Any]] = document["panels"]
    return found


def annotations(checkout: Path, name: str) -> list[dict[str, Any]]:
    document = json.loads((checkout / f"deploy/grafana/dashboards/{name}.json").read_text())
    found: list[dict[str, Any]] = document["annotations"]["list"]
    return found


def queries(checkout: Path) -> Iterator[tuple[str, str]]:
    for name in NAMES:
        for panel in panels(checkout, name):
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
        for mark in annotations(checkout, name):
            yield f"{name}: mark {mark['name']}", mark["expr"]


def test_the_dashboards_are_what_the_generator_writes(checkout: Path, tmp_path: Path) -> None:
    grafana.main(tmp_path)
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text() for file in (checkout / "deploy/grafana/dashboards").iterdir()}
    assert written == kept, "run `make grafana`"
    assert set(written) == {f"{name}.json" for name in NAMES}


def test_no_panel_asks_for_a_series_or_a_label_that_does_not_exist(checkout: Path) -> None:
    known = {name: (metric.kind, metric.labels) for name, metric in series().items()}
    # A histogram is asked for by its buckets.
    known |= {
        f"{name}_bucket": (kind, (*labels, "le")) for name, (kind, labels) in known.items() if kind == "histogram"
    }
    for where, expression in queries(checkout):
        for name, labels in SERIES.findall(expression):
            assert name in known, f"{where}: no series slurm_watchdog_{name}"
            for label in re.findall(r"(\w+)\s*=", labels):
                assert label in {*known[name][1], *PUT_ON_BY_PROMETHEUS}, f"{where}: {name} has no label {label}"


def test_every_target_of_a_panel_has_a_letter_of_its_own_and_every_panel_a_title(checkout: Path) -> None:
    for name in NAMES:
        titles = [panel["title"] for panel in panels(checkout, name)]
        assert all(titles)
        assert len(titles) == len(set(titles))
        for panel in panels(checkout, name):
            letters = [target["refId"] for target in panel["targets"]]
            assert letters == list("ABCDEF"[: len(letters)])


def test_every_mark_says_what_it_is(checkout: Path) -> None:
    for name in NAMES:
        assert all("{{" in mark["titleFormat"] for mark in annotations(checkout, name))
    said = {mark["name"] for mark in annotations(checkout, "job")}
    assert said == {
        "incidents that fired",
        "errors in the log",
        "kernel and driver",
        "operations of the ladder",
    }


def test_the_provisioning_files_are_yaml_that_grafana_knows(checkout: Path) -> None:
    place = checkout / "deploy/grafana/provisioning"
    assert yaml.safe_load((place / "dashboards.yaml").read_text())["providers"][0]["type"] == "file"
    assert yaml.safe_load((place / "datasource.yaml").read_text())["datasources"][0]["type"] == "prometheus"
