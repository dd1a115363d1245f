"""Commands with a deadline, and the look at this node within one: a child that hangs is left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Final

from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.doctor.finding import Advice, Level, examine

DEADLINE_S: Final = 10.0
PROGRAM = "from slurm_watchdog.cli.main import main; main()"
LAST_CHARS: Final = 200


def run(argv: Sequence[str], deadline_s: float = DEADLINE_S, stderr: int = STDOUT) -> tuple[int | None, str]:
    """(exit code, output) of a command; (None, why) for one that could not be run to its end. One that can't
    be ended is left."""
    try:
        process = Popen(list(argv), stdin=DEVNULL, stdout=PIPE, stderr=stderr, start_new_session=True)
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except TimeoutExpired:
        waits = read_wait(process.pid)
        process.kill()  # not waited for: one that sits in the kernel does not end
        return None, f"{argv[0]}: no answer within {deadline_s:g} s; it waits in {waits}"
    return process.returncode, said.decode(errors="replace").strip()


def last_words(said: str) -> str:
    """The last line of what a command said, cut at a word: its first lines are mostly what led to it."""
    line = (said.strip().splitlines() or [""])[-1].strip()
    return line if len(line) <= LAST_CHARS else f"… {line[-LAST_CHARS:].partition(' ')[2]}"


def examine_in_time(deadline_s: float, node: str, config_file: str | None) -> tuple[Advice, ...]:
    """What `doctor --node` finds on this node, or after `deadline_s` that it found nothing in time, with what
    it waits for."""
    config = [] if config_file is None else ["--config", config_file]
    code, said = run([*run_code(PROGRAM), "doctor", "--node", "--json", *config], deadline_s, DEVNULL)
    return unfinished(node, said) if code is None else parse_findings(said, node)


def parse_findings(text: str, node: str) -> tuple[Advice, ...]:
    """The findings of `doctor --json`."""
    try:
        return tuple(Advice(**{**row, "level": Level(row["level"])}) for row in json.loads(text)["findings"])
    except (ValueError, KeyError, TypeError):
        return unfinished(node, f"the child that looks printed no findings: {text[-100:]!r}")


def unfinished(node: str, waits: str) -> tuple[Advice, ...]:
    """The one finding about a look that was not finished."""
    return examine("look", {"where": node, "waits": waits, "misspelt": None})


def read_wait(pid: int) -> str:
    """The kernel function in which a process waits, with the command of the child that it waits for, if it has one."""
    places, children = [], ""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    for each in (str(pid), *children.split()):
        with suppress(OSError):
            place, name = Path(f"/proc/{each}/wchan").read_text(), Path(f"/proc/{each}/comm").read_text()
            places.append(f"{name.strip()}: {place if place not in ('', '0') else 'user code'}")
    return ", ".join(places) or "an unknown place"
