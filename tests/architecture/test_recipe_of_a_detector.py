"""CONTRIBUTING.md, "A new detector": the row and the case file of the recipe and nothing else, in a copy of the package.

Then the detector is in configuration, correlation, replay, metrics, page, alert rules and documentation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.recording.entries import pack
from tests.builders.told import Line, Told

CHECKOUT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(yaml|diff)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.thorough
WHEN_COPIED = ("watchdog", "tools", "tests/builders", "tests/cases", "tests/unit/analysis", "tests/unit/detect")
SEEN = """
import json, logging, sys
from msgspec import structs
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.health.views import open_incident
from slurm_watchdog.controller.health.cluster import Health
from slurm_watchdog.model.documents import Level
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.detect.registry import causes_of
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.replay.player import replay
from tools.docs import alerts, detectors, options

logging.disable(logging.ERROR)
WELL = Health(level=Level.OK, headline="", reasons=(), jobs=())
with open(sys.argv[1], "rb") as recording:
    incidents = replay(recording.readline, Config()).incidents
metrics = ControllerMetrics()
metrics.show_health(WELL, incidents)
page = [structs.asdict(open_incident(each, lambda _: False, "", "")) for each in incidents]
print(json.dumps({
    "example": options.example(), "options": options.write(), "alerts": alerts.write(), "page": page,
    "detectors": detectors.write(),
    "causes": {kind: sorted(causes_of(kind)) for kind in ("loss_zero", "loss_spike")},
    "metrics": metrics.text().decode(),
}))
"""


@dataclass(frozen=True)
class Copy:
    """The package with the new detector in it."""

    root: Path
    recording: Path

    def run(self, *argv: str, code: int = 0) -> str:
        """Standard output of a command that imports the copy; it has to end with `code`."""
        env = {**os.environ, "PYTHONPATH": f"{self.root / 'watchdog'}:{self.root}"}
        done = subprocess.run(argv, cwd=self.root, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, f"{argv}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def command(self, *arguments: str, code: int = 0) -> str:
        """The same of a command of slurm-watchdog."""
        return self.run(sys.executable, "-c", "from slurm_watchdog.cli.main import main; main()", *arguments, code=code)


def apply(lines: str, text: str) -> str:
    """`text` with the lines that begin with + behind the line before them, which `text` has exactly once."""
    context = ""
    for added, block in groupby(lines.splitlines(keepends=True), key=lambda line: line.startswith("+")):
        changed = [line[1:] for line in block]
        if added:
            assert text.count("\n" + context) == 1, context
            text = text.replace("\n" + context, "\n" + context + "".join(changed))
        context = changed[-1]
    return text


def a_recording(directory: Path) -> Path:
    """Two minutes of a job whose loss falls to 0."""
    job = {"job_id": "7", "state": "RUNNING", "nodes": ["n0"], "restarts": 0, "batch_host": "n0"}
    rank = {"node": "n0", "job_id": "7", "rank": 0, "pid": 4711, "start": 1.0, "state": "R"}
    lines: list[Line] = [{"t": 0, "kind": "job", **job}]
    for step in range(1, 13):
        took, loss = "elapsed time per iteration (ms): 10000.0", 0.0 if step > 4 else 2.5
        text = f" iteration {step:8d}/    1000 | {took} | lm loss: {loss:.6E} |"
        log = {"kind": "log", "node": "n0", "job_id": "7", "stream": "stdout", "line": text}
        lines += [{"t": 10.0 * step, **line} for line in ({"kind": "proc", **rank, "cpu_s": 9.0 * step}, log)]
    path = directory / "recording"
    path.write_bytes(b"".join(map(pack, Told().entries(lines))))
    return path


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """The files that CONTRIBUTING.md names, written as it says."""
    root = tmp_path_factory.mktemp("recipe")
    for folder in WHEN_COPIED:
        shutil.copytree(CHECKOUT / folder, root / folder)
    shutil.copytree(CHECKOUT / "deploy/prometheus", root / "deploy/prometheus")
    section = (CHECKOUT / "CONTRIBUTING.md").read_text().partition("\n## A new detector\n")[2]
    blocks = BLOCK.findall(section.partition("\n## ")[0])
    assert [kind for kind, _, _ in blocks] == ["diff", "yaml"]
    for kind, name, text in blocks:
        path = root / name
        path.write_text(apply(text, path.read_text()) if kind == "diff" else text)
    return Copy(root, a_recording(root))


@pytest.fixture(scope="module")
def seen(copy: Copy) -> dict[str, Any]:
    """What is derived from the detectors, in the copy."""
    found = json.loads(copy.run(sys.executable, "-c", SEEN, str(copy.recording)))
    assert isinstance(found, dict)
    return found


def test_its_own_test_and_those_of_every_detector_pass(copy: Copy) -> None:
    files = [f"tests/unit/detect/test_{name}.py" for name in ("rule_cases", "every_detector", "registry")]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    said = copy.run(*pytest_, "--rootdir", str(copy.root), "-c", os.devnull, "-k", "loss_zero or registry", *files)
    assert re.search(r"(\d\d) passed", said), said


def test_its_options_and_its_ladder_are_checked_and_documented(copy: Copy, seen: dict[str, Any]) -> None:
    config = copy.root / "config.yaml"
    config.write_text("detectors: {loss_zero: {steps: 3, enabled: false}}\n")
    assert "is fine" in copy.command("check-config", str(config))
    config.write_text("detectors: {loss_zero: {steps: 1}}\npolicy: {kinds: {loss_zero: {ladder: [requeue]}}}\n")
    refused = copy.command("check-config", str(config), code=2)
    assert "detectors.loss_zero.steps" in refused
    assert "loss_zero is reported only: its evidence is never good enough to act on" in refused
    assert "  loss_zero:  # " in seen["example"]
    assert "| `detectors.loss_zero.steps` | `5` | So many times in a row |" in seen["options"]


def test_a_replay_finds_it_and_a_site_can_switch_it_off(copy: Copy) -> None:
    (found,) = json.loads(copy.command("replay", "--json", str(copy.recording), code=1))["incidents"]
    assert (found["kind"], found["severity"], found["job_id"]) == ("loss_zero", "warning", "7")
    assert found["summary"] == "The loss of job 7 has been 0 since step 8."
    config = copy.root / "off.yaml"
    config.write_text("detectors: {loss_zero: {enabled: false}}\n")
    found = json.loads(copy.command("replay", "--json", "--config", str(config), str(copy.recording)))
    assert found["incidents"] == []


def test_what_explains_it_and_what_it_explains_is_known_to_correlation(seen: dict[str, Any]) -> None:
    assert seen["causes"] == {"loss_zero": ["log_error"], "loss_spike": ["loss_zero"]}


def test_metrics_page_and_alert_rules_know_it(seen: dict[str, Any]) -> None:
    assert 'slurm_watchdog_detector_failures_total{kind="loss_zero"} 0.0' in seen["metrics"]
    assert 'slurm_watchdog_job_incident{job_id="7",kind="loss_zero",severity="warning"} 1.0' in seen["metrics"]
    ((kind, summary),) = ((each["kind"], each["summary"]) for each in seen["page"])
    assert (kind, summary) == ("loss_zero", "The loss is 0 (job 7).")
    assert re.search(r'kind=~"[^"]*\bloss_zero\|loss_nan\b', seen["alerts"])


def test_the_page_of_detectors_has_its_section(seen: dict[str, Any]) -> None:
    section = seen["detectors"].partition("\n## loss_zero\n")[2].partition("\n## ")[0].strip()
    assert section == ("- Fires: five losses in a row are 0.\n- Names: no rank or node: since which step.\n- Acts: no.")
