"""An agent carries out what comes over a proven stream, and nothing else: read from the source, for each step from
the socket to the command."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = sorted((CHECKOUT / "watchdog/slurm_watchdog").rglob("*.py"))
AGENT = sorted((CHECKOUT / "watchdog/slurm_watchdog" / "agent").rglob("*.py"))

ONLY_IN = {
    "ProvenStream": {"agent/courier/streams.py"},
    "OwnSocket": {"agent/courier/process.py"},
    "TlsController": {"agent/courier/process.py"},
    "MungeController": {"agent/courier/process.py"},
    "Courier": {"agent/courier/process.py"},
    "CourierLink": {"agent/context.py"},
    "parse_reply": {"agent/delivery/sender.py"},
    "OwnUser": {"standalone/run.py"},
}
"""What is called -> the only modules that may: a ProvenStream is handed out by Controller.open alone, once its
other end has proven to be the controller, and a plain TCP one by no one; replies are read by what holds one; who takes
one user's word for all is `slurm-watchdog run` alone."""


@cache
def calls_of(file: Path) -> frozenset[str]:
    """The names that a module calls."""
    called = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return frozenset(
        func.id if isinstance(func, ast.Name) else func.attr
        for func in called
        if isinstance(func, ast.Name | ast.Attribute)
    )


def calls(files: list[Path]) -> Iterator[tuple[str, str]]:
    """(name that is called, module) for each call."""
    for file in files:
        for name in calls_of(file):
            yield name, str(file.relative_to(CHECKOUT / "watchdog/slurm_watchdog"))


@pytest.mark.parametrize("name", ONLY_IN)
def test_it_is_called_nowhere_else(name: str) -> None:
    assert {module for called, module in calls(SOURCES) if called == name} == ONLY_IN[name]


def test_a_controller_without_a_proof_of_its_own_is_made_nowhere() -> None:
    assert not {
        module
        for called, module in calls(SOURCES)
        if called in ("Controller", "TcpController") and module.startswith("agent/")
    }


def test_a_reply_is_decoded_in_one_place_of_the_agent_and_commands_are_taken_in_one() -> None:
    found = set(calls(AGENT))
    assert {module for name, module in found if name == "decode_reply"} == {"agent/delivery/replies.py"}
    accepting = {
        str(file.relative_to(CHECKOUT / "watchdog/slurm_watchdog"))
        for file in AGENT
        if "commands.accept(" in file.read_text()
    }
    assert accepting == {"agent/agent.py"}
