"""`make demo` as its users start it: the whole story, to its end. Nothing else would notice that it is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.debian_packages import why_impossible

ROOT = Path(__file__).parents[2]
LIMIT_S = 400
"""Four acts of waiting with limits of their own; some 70 s on a machine that does nothing else."""


@pytest.mark.thorough
@pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))
def test_the_demo_tells_its_whole_story() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.demo"], cwd=ROOT, env=os.environ | {"KEEP": "", "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    acts = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert {act: told["incident"] for act, told in acts.items()} == {
        "a": "filesystem_outage", "b": "collective_hang", "c": "operator_restart", "d": "collective_hang",
    }  # fmt: skip
    said = [line for line in done.stdout.splitlines() if "slack  " in line]
    assert sum(line.endswith("(over)") for line in said) == 4, "\n".join(said)
