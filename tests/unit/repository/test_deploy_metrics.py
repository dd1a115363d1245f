"""docs/metrics.md: its queries are run by Prometheus's own tool, and every series has its meaning."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_watchdog.controller.health.metrics import ControllerMetrics
from tools.docs.metrics import EXAMPLES, Example, agent_metrics, controller_metrics


def test_every_series_has_a_meaning_and_counters_are_named_so() -> None:
    metrics = [*agent_metrics(), *controller_metrics()]
    assert all(metric.meaning for metric in metrics)
    for metric in metrics:
        counts = metric.name.endswith("_total")
        assert counts is (metric.kind == "counter"), f"{metric.name} is a {metric.kind}"


def test_a_name_that_agent_and_controller_share_means_the_same() -> None:
    shared = {metric.name for metric in agent_metrics()} & {metric.name for metric in controller_metrics()}
    assert shared == {"certificate_expiry_timestamp_seconds"}


def test_names_types_and_help_pass_the_lint_of_prometheus() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: apt-get install prometheus (the live scrape is linted in integration/)")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=ControllerMetrics().text(), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_every_query_of_the_reference_gives_what_it_says(example: Example, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    series = []
    for name, value in example.given.items():
        name, _, rise = name.partition(" +")
        series.append({"series": name, "values": f"{value}+{rise or 0}x10"})
    wanted = [{"labels": labels, "value": value} for labels, value in example.found.items()]
    test = {"expr": example.query, "eval_time": "10m", "exp_samples": wanted}
    file = tmp_path / "queries.yaml"
    file.write_text(
        json.dumps({"rule_files": [], "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [test]}]})
    )  # JSON is YAML  # fmt: skip
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
