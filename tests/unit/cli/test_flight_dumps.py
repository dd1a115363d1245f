"""`diagnose` of a directory with dumps of the Flight Recorder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders.megatron_dumps import job, recorders

DUMPS = Path(__file__).parents[2] / "captures" / "flight_recorder"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it limits its memory."""
    command = [sys.executable, "-c", "from slurm_watchdog.cli.main import main; main()", "diagnose", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def collectives(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(str(directory), "--json").stdout)["collectives"]
    return found


def test_dumps_of_all_ranks_name_the_one_that_did_not_come() -> None:
    result = run(str(DUMPS / "missing"))
    first = "Rank 2 has not entered all_reduce 7 of default_pg; 3 of 4 ranks wait."
    assert (result.returncode, result.stdout.splitlines()[0]) == (1, first)
    assert collectives(DUMPS / "missing_json")["odd"][0]["rank"] == 2


def test_the_dumps_in_an_unpacked_bundle_are_found_by_their_ranks(tmp_path: Path) -> None:
    for rank in range(4):
        place = tmp_path / f"incident-i/n{rank // 2}/rank-{rank}"
        place.mkdir(parents=True)
        (place / "flight_recorder.pickle").write_bytes((DUMPS / "missing" / f"trace_{rank}").read_bytes())
    assert collectives(tmp_path)["odd"][0]["rank"] == 2


def test_a_directory_in_which_nothing_is_recognised_says_what_was_looked_at(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    result = run(str(tmp_path))
    assert (result.returncode, "trace_0" in result.stderr) == (3, True)
    (tmp_path / "trace_0").write_bytes((DUMPS / "missing/trace_0").read_bytes()[:-20])
    result = run(str(tmp_path))
    assert (result.returncode, "trace_0: no dump" in result.stdout) == (3, True)


@pytest.mark.parametrize(
    "name", ["nccl_trace_rank_{}", "_dump_{}", "rank{}_trace.json", "trace-rank-{}.pickle", "fr.{}.bin"]
)
def test_the_rank_is_found_in_every_usual_name_and_old_dates_of_copies_say_nothing(tmp_path: Path, name: str) -> None:
    for each in recorders(job(stopped=(9, 11))):
        path = tmp_path / name.format(each.rank)
        path.write_bytes(each.dump(only_active=True, as_json=name.endswith("json")))
        os.utime(path, (0, 0))
    result = run(str(tmp_path))
    first = result.stdout.splitlines()[0]
    assert result.returncode == 1
    assert first.startswith("Ranks 9 and 11 keep the others waiting: rank 9 has not entered"), first
    assert first.endswith("; 14 of 16 ranks wait.")
