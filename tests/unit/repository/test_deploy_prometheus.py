"""The shipped alerts speak of series, labels and kinds that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from slurm_watchdog.detect.registry import KINDS, SPECS
from tests.builders.prometheus_series import PUT_ON_BY_PROMETHEUS, SERIES
from tools.docs.metrics import series

LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")


def expressions(checkout: Path) -> dict[str, str]:
    document = yaml.safe_load((checkout / "deploy/prometheus/alerts.yaml").read_text())
    return {rule["alert"]: rule["expr"] for group in document["groups"] for rule in group["rules"]}


def test_no_alert_asks_for_a_series_a_label_or_a_kind_that_does_not_exist(checkout: Path) -> None:
    known = {name: (metric.kind, metric.labels) for name, metric in series().items()}
    for alert, expression in expressions(checkout).items():
        used = SERIES.findall(expression)
        assert used or "node_textfile_mtime_seconds{" in expression, alert  # node_exporter's own, of the agent's file
        for name, labels in used:
            assert name in known, f"{alert}: no series slurm_watchdog_{name}"
            for label, value in LABEL.findall(labels):
                assert label in {*known[name][1], *PUT_ON_BY_PROMETHEUS}, f"{alert}: {name} has no label {label}"
                if label == "kind":
                    assert set(value.split("|")) <= set(KINDS), f"{alert}: {value}"


def test_an_alert_that_a_detector_names_exists(checkout: Path) -> None:
    assert {name for spec in SPECS for name in spec.alerts} <= expressions(checkout).keys()


@pytest.mark.parametrize("severity", ["page", "ticket"])
def test_every_alert_says_what_is_wrong_and_what_to_do(checkout: Path, severity: str) -> None:
    document = yaml.safe_load((checkout / "deploy/prometheus/alerts.yaml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    chosen = [rule for rule in rules if rule["labels"]["severity"] == severity]
    assert chosen
    for rule in chosen:
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        assert rule["annotations"]["action"], rule["alert"]
    assert {rule["labels"]["severity"] for rule in rules} == {"page", "ticket", "none"}
