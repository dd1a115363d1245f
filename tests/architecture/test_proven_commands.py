"""An agent carries out what a proven answer holds, and nothing else: read from the source, for each step from the socket to the command."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = sorted((CHECKOUT / "watchdog").rglob("*.py"))
AGENT = sorted((CHECKOUT / "watchdog" / "agent").rglob("*.py"))

ONLY_IN = {
    "Proven": {"agent/channel.py", "agent/munge_session.py"},
    "DirectChannel": {"agent/channel.py"},
    "tls_channel": {"agent/connect.py"},
    "unix_channel": {"agent/connect.py"},
    "parse_reply": {"agent/sender.py"},
    "OwnUser": {"local/service.py"},
}
"""What is called -> the only modules that may: a Proven is made by channels; commands are read from a Proven (its type says so, mypy
checks it); who takes one user's word for all is `slurm-watchdog run` alone."""


def calls(files: list[Path]) -> Iterator[tuple[str, str]]:
    """(name that is called, module) for each call."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                yield name, str(file.relative_to(CHECKOUT / "watchdog"))


@pytest.mark.parametrize("name", ONLY_IN)
def test_it_is_called_nowhere_else(name: str) -> None:
    assert {module for called, module in calls(SOURCES) if called == name} == ONLY_IN[name]


def test_a_reply_is_decoded_in_one_place_of_the_agent_and_commands_are_taken_in_one() -> None:
    found = set(calls(AGENT))
    assert {module for name, module in found if name == "decode_reply"} == {"agent/replies.py"}
    accepting = {
        str(file.relative_to(CHECKOUT / "watchdog"))
        for file in AGENT
        if "commands.accept(" in file.read_text()
    }
    assert accepting == {"agent/app.py"}
