"""An agent carries out what a proven answer holds, and nothing else: read from the source, for each step from
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
    "Proven": {"agent/delivery/channel.py", "agent/delivery/munge_connection.py"},
    "DirectChannel": {"agent/delivery/channel.py"},
    "tls_channel": {"agent/delivery/sender.py"},
    "unix_channel": {"agent/delivery/sender.py"},
    "parse_reply": {"agent/delivery/sender.py"},
    "OwnUser": {"standalone/run.py"},
}
"""What is called -> the only modules that may: a Proven is made by channels; commands are read from a Proven
(its type says so, mypy checks it); who takes one user's word for all is `slurm-watchdog run` alone."""


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


def test_a_reply_is_decoded_in_one_place_of_the_agent_and_commands_are_taken_in_one() -> None:
    found = set(calls(AGENT))
    assert {module for name, module in found if name == "decode_reply"} == {"agent/delivery/channel.py"}
    accepting = {
        str(file.relative_to(CHECKOUT / "watchdog/slurm_watchdog"))
        for file in AGENT
        if "commands.accept(" in file.read_text()
    }
    assert accepting == {"agent/agent.py"}
