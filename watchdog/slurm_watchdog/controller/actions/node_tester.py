"""Runs `slurm-watchdog test-nodes` for the controller, and reads its document.

A process of its own, so that nothing of a test can hold up the controller, and one code path for people and for us. It
gets SIGTERM when the controller ends, however that comes about, cancels its jobs then, and drains its nodes again; one
that is killed itself has left what the journal knows (slurm_watchdog.controller.actions.node_tests).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.process_setup import die_with_parent
from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.base.redact import mask_line
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import one_line
from slurm_watchdog.controller.ports.node_tests import NotTested
from slurm_watchdog.knowledge.node_figures import KINDS, split_key
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_test import NodeResult, NodeTest, Purpose

PROGRAM: Final = "from slurm_watchdog.cli.main import main; main()"
WAIT: Final = "5min"
"""For the nodes of a job to be free: they were, when the test was decided."""
CLEANUP_S: Final = 120.0
"""Of the test's time: it has to end so long before `until`, and drains its nodes again meanwhile."""
END_S: Final = 10.0
"""For a test that is cancelled with the controller: it cleans up in less, or continues to by itself."""
MAX_WORDS: Final = 300
ENDS_WITH_A_DOCUMENT: Final = frozenset({0, 1, 3})
"""Exit codes of test-nodes (docs/test-nodes.md)."""


class _Problem(Struct, frozen=True, kw_only=True):
    phase: str = ""


class _Node(Struct, frozen=True, kw_only=True):
    node: str
    verdict: str
    reasons: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    peers: int = 0
    figures: Mapping[str, float] = {}
    problems: tuple[_Problem, ...] = ()


class _Pair(Struct, frozen=True, kw_only=True):
    nodes: tuple[str, ...]
    figures: Mapping[str, float] = {}


class _Document(Struct, frozen=True, kw_only=True):
    nodes: tuple[_Node, ...]
    not_tested: Mapping[str, str] = {}
    pairs: tuple[_Pair, ...] = ()


TRUTHS: Final = {"bad": Truth.BAD, "well": Truth.OK}


class CommandTester:
    """Tests by the program, as the controller's own user."""

    def __init__(self, config_file: str, state_directory: str, environ: Mapping[str, str], *, checks: bool) -> None:
        """`config_file`: empty = as shipped. `state_directory`: earlier figures are kept below it. `checks`: whether
        the configuration has a check of the site's."""
        self._config_file, self._checks = config_file, checks
        self._environ = {**environ, "XDG_STATE_HOME": state_directory}

    def argv(self, asked: NodeTest, now: float) -> list[str]:
        """The command line."""
        options = ["--json", "--named", asked.name, "--wait", WAIT, "--limit", f"{asked.until - CLEANUP_S - now:.0f}"]
        if asked.purpose is Purpose.QUARANTINE:
            options.append("--drained-by-us")
        if self._config_file:
            options += ["--config", os.path.abspath(self._config_file)]
        return [*run_code(PROGRAM), "test-nodes", *options, "--", *asked.nodes, *asked.peers]

    async def test(self, asked: NodeTest) -> Sequence[NodeResult]:
        now = clock.wall()
        starting = asyncio.ensure_future(self._start(asked, now))
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise NotTested(f"test-nodes cannot be started: {error.strerror}") from error
        except asyncio.CancelledError:  # it runs already, or will in a moment: nothing else would tell it to clean up
            await asyncio.wait([starting])
            if starting.exception() is None:
                await _end(starting.result())
            raise
        try:
            async with timeout(asked.until - now):
                output, errors = await process.communicate()
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            raise NotTested("test-nodes did not end in time, although it was to") from None
        finally:
            if process.returncode is None:
                await _end(process)
        if process.returncode not in ENDS_WITH_A_DOCUMENT or not output.strip():
            raise NotTested(_last_line(errors) or f"test-nodes ended with exit code {process.returncode}")
        try:
            return results_of(output, checks=self._checks)
        except msgspec.MsgspecError as error:
            raise NotTested(f"the document of test-nodes cannot be read: {error}") from error

    async def _start(self, asked: NodeTest, now: float) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.argv(asked, now), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=self._environ, cwd="/", start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and a while for it to clean up; what does not end by then does so by itself, later."""
    _signal(process, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with timeout(END_S):
            await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _last_line(errors: bytes) -> str:
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return one_line(mask_line(lines[-1]), MAX_WORDS) if lines else ""


# ------------------------------------------------------------------------------------------------- its document


def results_of(document: bytes, *, checks: bool) -> tuple[NodeResult, ...]:
    """The results in a document of `test-nodes --json`; `checks`: the site's own check was made. Raises
    MsgspecError."""
    found = msgspec.json.decode(document, type=_Document)
    in_pairs = {node for pair in found.pairs if pair.figures for node in pair.nodes}
    results = [_result(each, found.pairs, has_pair=each.node in in_pairs, checks=checks) for each in found.nodes]
    left = [NodeResult(node=node, truth=Truth.UNKNOWN, unsure=why) for node, why in found.not_tested.items()]
    return (*results, *left)


def _result(node: _Node, pairs: Sequence[_Pair], *, has_pair: bool, checks: bool) -> NodeResult:
    truth = TRUTHS.get(node.verdict, Truth.UNKNOWN)
    measured = {place for key in node.figures for place in _places(key)}
    if has_pair:
        measured.add("network")
    if checks and node.figures and not any(each.phase == "site_check" for each in node.problems):
        measured.add("site_check")
    reasons = [one_line(each, MAX_WORDS) for each in node.reasons]
    return NodeResult(
        node=node.node, truth=truth, peers=node.peers, measured=tuple(sorted(measured)),
        faults=tuple(zip(node.places, reasons, strict=False)) if truth is Truth.BAD else (),
        unsure="; ".join(reasons) if truth is Truth.UNKNOWN else "",
        figures=figure_words(node.figures, [each.figures for each in pairs if node.node in each.nodes]),
    )  # fmt: skip


def _places(key: str) -> tuple[str, ...]:
    """`mount_write /scratch` measures `mount:/scratch`, `gpu_matmul/3` measures `gpu`, `cpu_all` measures `cpu`."""
    name, subject = split_key(key)
    part = name.partition("_")[0]
    return (f"{part}:{subject}",) if part in ("disk", "mount") else (part,)


def figure_words(figures: Mapping[str, float], pairs: Sequence[Mapping[str, float]] = ()) -> str:
    """`CPU, all cores 3,588 MB/s, memory bandwidth … GB/s`: the worst of each kind that has a column in the table of
    test-nodes; of links the best, for the others may be slow at their other end."""
    worst: dict[str, float] = {}
    for key, value in figures.items():
        name = split_key(key)[0]
        if name in KINDS and KINDS[name].column:
            pick = min if KINDS[name].more_is_better else max
            worst[name] = pick(value, worst.get(name, value))
    for each in pairs:
        for name, value in each.items():
            if name in KINDS and KINDS[name].column:
                pick = max if KINDS[name].more_is_better else min
                worst[name] = pick(value, worst.get(name, value))
    return ", ".join(
        f"{KINDS[name].column} {_number(worst[name])} {KINDS[name].unit}" for name in KINDS if name in worst
    )


def _number(value: float) -> str:
    """Three digits, as in the table of test-nodes."""
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
