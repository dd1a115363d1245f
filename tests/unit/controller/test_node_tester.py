"""What the controller reads in a document of `slurm-watchdog test-nodes`, and how it asks for one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.cli.main import main
from slurm_watchdog.controller.actions.node_tester import CLEANUP_S, CommandTester, figure_words, results_of
from slurm_watchdog.controller.ports.node_tests import NotTested
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_test import NodeResult, NodeTest, Purpose

FIGURES = {"cpu_all": 3588.2, "memory_all": 13.31, "mount_write /scratch": 512.0, "gpu_matmul/0": 61.0}
ASKED = NodeTest(
    name="slurm-watchdog-test-1", purpose=Purpose.QUARANTINE, about="1", nodes=("n1",), peers=("n2", "n3"), at=0.0,
    until=1000.0,
)  # fmt: skip


def document(**node: Any) -> bytes:
    """As `test-nodes --json` has it, of one node."""
    whole = {"node": "n1", "verdict": "well", "reasons": [], "peers": 4, "places": [], "figures": FIGURES} | node
    pairs = [{"nodes": ["n1", "n2"], "figures": {"pair_out": 20.1, "pair_latency": 9.3}}]
    return json.dumps(
        {"schema_version": 1, "sentence": "", "nodes": [whole], "not_tested": {}, "pairs": pairs}
    ).encode()


def test_results_of_a_node_that_is_well_have_its_figures_and_what_was_measured() -> None:
    (found,) = results_of(document(), checks=True)
    assert (found.truth, found.peers, found.faults, found.unsure) == (Truth.OK, 4, (), "")
    assert found.figures == (
        "cpu, all 3,588 MB/s, memory 13.3 GB/s, mount write 512 MB/s, latency 9.30 µs, bandwidth 20.1 Gb/s, "
        "matmul 61.0 TFLOP/s"
    )
    assert found.measured == ("cpu", "gpu", "memory", "mount:/scratch", "network", "site_check")


def test_results_of_a_node_that_is_bad_have_what_is_wrong_with_which_part() -> None:
    (found,) = results_of(document(verdict="bad", places=["cpu"], reasons=["CPU is slow"]), checks=False)
    assert found.faults == (("cpu", "CPU is slow"),) and "site_check" not in found.measured


def test_results_of_nodes_that_were_not_judged_have_the_reason() -> None:
    (found,) = results_of(document(verdict="unknown", reasons=["no peers"], figures={}), checks=True)
    assert (found.truth, found.unsure, found.measured) == (Truth.UNKNOWN, "no peers", ("network",))
    left = json.dumps({"nodes": [], "not_tested": {"n1": "it is in use"}}).encode()
    assert results_of(left, checks=False) == (NodeResult(node="n1", truth=Truth.UNKNOWN, unsure="it is in use"),)


def test_figure_words_of_several_gpus_and_links_are_the_worst_gpu_and_the_best_link() -> None:
    pairs = [{"pair_out": 0.2}, {"pair_out": 20.0}]
    assert (
        figure_words({"gpu_matmul/0": 61.0, "gpu_matmul/1": 48.0}, pairs) == "bandwidth 20.0 Gb/s, matmul 48.0 TFLOP/s"
    )


def test_the_command_line_is_one_that_test_nodes_knows() -> None:
    argv = CommandTester("/etc/w.yaml", "/var/lib/w", {}, checks=False).argv(ASKED, 0.0)
    words = argv[argv.index("test-nodes") + 1 :]
    assert words[-3:] == ["n1", "n2", "n3"] and "--drained-by-us" in words
    assert words[words.index("--limit") + 1] == f"{1000 - CLEANUP_S:g}"
    context = main.commands["test-nodes"].make_context(
        "test-nodes", [w if w != "/etc/w.yaml" else os.devnull for w in words]
    )
    assert context.params["named"] == ASKED.name and context.params["nodes"] == ("n1", "n2", "n3")
    assert "--drained-by-us" not in CommandTester("", "", {}, checks=False).argv(
        replace(ASKED, purpose=Purpose.SLOW_SEARCH), 0.0
    )


def program(directory: Path, text: str) -> CommandTester:
    """A tester whose program is this text."""

    class Fake(CommandTester):
        def argv(self, asked: NodeTest, now: float) -> list[str]:
            return [sys.executable, "-c", text]

    return Fake("", str(directory), os.environ, checks=False)


def asked_now(seconds: float) -> NodeTest:
    return replace(ASKED, at=clock.wall(), until=clock.wall() + seconds)


def test_a_program_that_says_why_nothing_was_tested_is_quoted(tmp_path: Path) -> None:
    tester = program(tmp_path, "import sys; sys.exit('Nothing was tested: no permission')")
    with pytest.raises(NotTested, match="no permission"):
        asyncio.run(tester.test(asked_now(30.0)))


def test_a_program_that_does_not_end_is_killed_and_a_controller_that_ends_has_told_it_to_clean_up(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cleaned"
    text = f"""
import pathlib, signal, sys, time
def clean(*_): pathlib.Path({str(file)!r}).touch(); sys.exit(1)
signal.signal(signal.SIGTERM, clean)
pathlib.Path({str(tmp_path / "up")!r}).touch()
time.sleep(60)"""

    async def cancelled() -> None:
        task = asyncio.create_task(program(tmp_path, text).test(asked_now(60.0)))
        while not (tmp_path / "up").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(cancelled())
    assert file.exists()
    with pytest.raises(NotTested, match="did not end in time"):
        asyncio.run(program(tmp_path, "import time; time.sleep(60)").test(asked_now(0.5)))
    assert time.monotonic() - began < 30
