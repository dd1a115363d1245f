"""Commands with a deadline, and the look at this node within one: a child that hangs is left behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Final

from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.doctor.finding import Advice, Level

DEADLINE_S: Final = 10.0
PROGRAM = "from slurm_watchdog.cli.main import main; main()"


def run(argv: Sequence[str], deadline_s: float = DEADLINE_S) -> tuple[int | None, str]:
    """(exit code, output) of a command; (None, why) for one that could not be run to its end. One that can't
    be ended is left."""
    try:
        process = Popen(list(argv), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True)
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except TimeoutExpired:
        process.kill()
        return None, f"{argv[0]}: no answer within {deadline_s:g} s"
    return process.returncode, said.decode(errors="replace").strip()


def examine_in_time(deadline_s: float, node: str, config_file: str | None) -> tuple[Advice, ...]:
    """What `doctor --node` finds on this node, or after `deadline_s` that it found nothing in time, with what
    it waits for."""
    argv = [*run_code(PROGRAM), "doctor", "--node", "--json"]
    argv += [] if config_file is None else ["--config", config_file]
    try:
        child = Popen(argv, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True)
    except OSError as error:
        return (_unknown(node, f"{sys.executable}: {error.strerror}"),)
    try:
        said, _ = child.communicate(timeout=deadline_s)
    except TimeoutExpired:
        waits = read_wait(child.pid)
        child.kill()  # not waited for: one that sits in the kernel does not end
        return (_unknown(node, f"no answer within {deadline_s:g} s; it waits in {waits}"),)
    return parse_findings(said, node)


def parse_findings(text: bytes, node: str) -> tuple[Advice, ...]:
    """The findings of `doctor --json`."""
    try:
        return tuple(Advice(**{**row, "level": Level(row["level"])}) for row in json.loads(text)["findings"])
    except (ValueError, KeyError, TypeError):
        return (_unknown(node, f"the child that looks said no findings: {text[-100:]!r}"),)


def read_wait(pid: int) -> str:
    """The kernel function in which a process waits, with the command of the child that it waits for, if it has one."""
    places = []
    for each in (pid, *_children(pid)):
        try:
            place, name = Path(f"/proc/{each}/wchan").read_text(), Path(f"/proc/{each}/comm").read_text()
        except OSError:
            continue
        places.append(f"{name.strip()}: {place if place not in ('', '0') else 'user code'}")
    return ", ".join(places) or "nobody knows what"


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _unknown(node: str, evidence: str) -> Advice:
    return Advice(
        "deadline",
        Level.UNKNOWN,
        "The look at this node was not finished in time: something hangs.",
        evidence,
        "slurm-watchdog doctor --node  # without a deadline; which command does not come back?",
        node,
    )
