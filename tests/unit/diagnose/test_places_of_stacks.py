"""What `group-stacks` says of stacks as people send them: text in, answer out. Cases: tests/captures/stacks/places.yaml."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from slurm_watchdog.cli.group_stacks import group_stacks
from tests.builders import stacks as at

CASES = yaml.safe_load((Path(__file__).parents[2] / "captures/stacks/places.yaml").read_text())
MAIN = "<module> (train.py:9)"
DATALOADER = "torch/utils/data/dataloader.py"
PLACES: dict[str, Sequence[str]] = {
    "reduce": at.REDUCE,
    "barrier": at.BARRIER,
    "broadcast": at.BROADCAST,
    "backward": at.BACKWARD,
    "loader": at.LOADER,
    "lock": at.LOCK,
    "gather": (f"all_gather ({at.C10D}:2806)", *at.TAIL),
    "clean_up_worker": (
        "poll (multiprocessing/popen_fork.py:27)",
        "wait (multiprocessing/popen_fork.py:43)",
        "join (multiprocessing/process.py:149)",
        f"_clean_up_worker ({DATALOADER}:1480)",
    ),
    "atexit_loader": (
        "join (threading.py:1119)",
        "get_batch (prefetch_loader.py:40)",
        "close (prefetch_loader.py:60)",
        "_run_exitfuncs (atexit)",
    ),
    "queue": ("wait (threading.py:320)", "get (queue.py:171)", "next_sample (train.py:40)", "main (train.py:60)", MAIN),
    "unresolved": ("0x7f11c2a4 (libfoo.so.1)", "?? (libfoo.so.1)"),
}


def text_of(rank: int, place: str) -> str:
    match place:
        case "gone":
            return f"=== rank {rank} ===\nError: No such process (os error 3)\n"
        case "refused":
            return f"=== rank {rank} ===\nError: Permission Denied: Try running again with elevated permissions\n"
        case "held" | "held_in_a_collective":
            other = '\nThread 7 (active+gil): "prefetch"\n    spin (loader.py:3)\n    run (threading.py:982)\n'
            return at.text_of(rank, at.LOCK if place == "held" else at.REDUCE) + other
    return at.text_of(rank, PLACES[place])


def run(case: dict[str, Any], directory: Path, *more: str) -> str:
    for number in range(case.get("times", 1)):
        text = "".join(text_of(rank, place) for rank, place in enumerate(case["ranks"]))
        (directory / f"dump-{number}.txt").write_text(text)
    since = ("--since-last-step", str(case["since"])) if "since" in case else ()
    return CliRunner().invoke(group_stacks, [str(directory), *since, *more]).output


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_stacks_of_ranks_are_read_as_what_they_are(case: dict[str, Any], tmp_path: Path) -> None:
    expect, found = case["expect"], json.loads(run(case, tmp_path, "--json"))
    assert (found["is_hang"], [each["rank"] for each in found["culprits"]]) == (expect["is_hang"], expect["named"]), (
        found["summary"]
    )
    if "class" in expect:
        assert found["class"] == expect["class"], found["summary"]
    assert all(words in found["summary"] for words in expect.get("words", ())), found["summary"]
    said = run(case, tmp_path)
    assert not any(words in said for words in case.get("never", ())), said


def test_a_file_that_is_broken_spoils_the_line_of_its_own_rank_only(tmp_path: Path) -> None:
    thread = {
        "pid": 7,
        "thread_id": 7,
        "os_thread_id": 7,
        "thread_name": "MainThread",
        "active": False,
        "owns_gil": False,
    }
    for rank in range(8):
        place = at.LOADER if rank == 3 else at.REDUCE
        frames = [
            {"name": frame.partition(" ")[0], "filename": frame.partition("(")[2].partition(":")[0], "line": 3}
            for frame in place
        ]
        whole = json.dumps([thread | {"pid": 40 + rank, "os_thread_id": 40 + rank, "frames": frames}])
        spoilt = {
            4: "[" * 100_000,
            5: whole[: len(whole) // 2],
            6: whole.replace('"line": 3', '"line": ?'),
            7: "\ufffd\0",
        }
        (tmp_path / f"rank-{rank}.json").write_text(spoilt.get(rank, whole))
    result = CliRunner().invoke(group_stacks, [str(tmp_path), "--since-last-step", "600", "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, [each["rank"] for each in found["culprits"]]) == (1, [3])
    assert {each["rank"]: each["reason"].partition(" in line")[0] for each in found["undumped"]} == {
        4: "its JSON nests too deep", 5: "its JSON ends early", 6: "its JSON is broken", 7: "its file holds no stack",
    }  # fmt: skip
    assert "rank-4.json: its JSON nests too deep" in result.stderr


def test_the_frames_shown_are_those_of_the_thread_that_the_verdict_is_about(tmp_path: Path) -> None:
    """A hook of the backward pass waits, in autograd's own thread."""
    hook = 'Thread 9 (idle): ""\n    all_reduce (torch/distributed/distributed_c10d.py:3)\n    sync_hook (model.py:8)\n'
    text = "".join(at.text_of(rank, at.BACKWARD) + "\n" + hook for rank in range(3)) + at.text_of(3, at.LOADER)
    (tmp_path / "all.txt").write_text(text)
    found = json.loads(CliRunner().invoke(group_stacks, [str(tmp_path), "--since-last-step", "600", "--json"]).stdout)
    (waits,) = [group for group in found["groups"] if group["ranks"] == [0, 1, 2]]
    assert waits["frames"][0].startswith("all_reduce"), waits


@pytest.mark.parametrize(("floor", "is_hang"), [("7200s", False), ("600s", True)])
def test_the_limits_of_a_configuration_are_those_of_group_stacks(tmp_path: Path, floor: str, is_hang: bool) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"detectors:\n  collective_hang:\n    checkpoint_floor: {floor}\n")
    stacks = tmp_path / "all.txt"
    stacks.write_text("".join(at.text_of(rank, at.SAVE if rank == 3 else at.BARRIER) for rank in range(4)))
    arguments = [str(stacks), "--since-last-step", "3600", "--config", str(config), "--json"]
    assert json.loads(CliRunner().invoke(group_stacks, arguments).stdout)["is_hang"] is is_hang
