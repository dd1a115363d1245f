"""Asks which nodes of the command are lost: Slurm, the nodes themselves, and the command's own log."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from slurm_watchdog.base import clock
from slurm_watchdog.supervisor import lost_nodes
from slurm_watchdog.supervisor.endings import TAIL_BYTES
from slurm_watchdog.supervisor.job_questions import JobQuestions
from slurm_watchdog.supervisor.lost_nodes import AGAIN_S, LOOK_S, Watch
from slurm_watchdog.supervisor.reach import DEADLINE_S, MOST
from slurm_watchdog.supervisor.shim import own_program

FILE_S = 2.0  # For a file on someone's filesystem.
WITNESSES = 2  # Nodes that are still of the job: where none of these answers either, it is our own network.
SLURMD_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d{1,5})", re.MULTILINE)
ADDRESS = re.compile(r"\bNodeName=(\S+) .*?\bNodeAddr=(\S+)")
USUAL_PORT = "6818"  # Of slurmd (slurm.conf(5)).


class JobNodes:
    """The nodes of one command; all of it belongs to one event loop."""

    def __init__(self, ask: JobQuestions, logs: Sequence[str], *, elastic: bool):
        """`logs`: files in which the command says how far it is. `elastic`: it can continue with fewer nodes."""
        self._ask, self._logs = ask, tuple(logs)
        self._elastic, self._watch = elastic, Watch()
        self._look_at, self._port = clock.monotonic() + LOOK_S, ""
        self._first: dict[str, tuple[float, float]] = {}
        """Kind of line -> how far the command was when one was read first, and when."""

    def begun(self) -> None:
        """Another start of the command runs."""
        self._first.clear()
        self._watch, self._look_at = Watch(line_s=self._watch.line_s), clock.monotonic() + LOOK_S

    def is_due(self) -> bool:
        """Whether it is time for the next look."""
        return clock.monotonic() >= self._look_at

    async def look(self, needed: Sequence[str]) -> tuple[str, ...]:
        """Looks once; the nodes of `needed` without which the command has to be started again."""
        self._look_at = float("inf")
        try:
            return await self._look(needed)
        finally:
            self._look_at = clock.monotonic() + (AGAIN_S if self._watch.missing else LOOK_S)

    async def _look(self, needed: Sequence[str]) -> tuple[str, ...]:
        present = await self._ask.nodes()
        if not present:
            return ()
        missing = [node for node in needed if node not in present]
        answering: Collection[str] = ()
        said = _Said()
        if missing:
            answering = await self._answering(missing, [node for node in needed if node in present])
        if missing or self._watch.line_s is None:
            said = _read(await self._said())
        now = clock.monotonic()
        line_s = said.line_s or self._measured(said, now)
        self._watch = lost_nodes.seen(self._watch, missing, answering, said.counts, now, line_s=line_s)
        return lost_nodes.lost(self._watch, clock.monotonic(), elastic=self._elastic)

    async def _answering(self, missing: Sequence[str], others: Sequence[str]) -> set[str]:
        """Those that are not known to be gone."""
        witnesses = others[:WITNESSES]
        asked = [*witnesses, *missing[: MOST - WITNESSES]]
        listed = await self._ask.run("scontrol", "--oneliner", "show", "node", ",".join(asked))
        addresses = {node: address for node, address in ADDRESS.findall(listed.output) if node in asked}
        if not self._port:
            found = SLURMD_PORT.search((await self._ask.run("scontrol", "show", "config")).output)
            self._port = found[1] if found is not None else ""
        pairs = [f"{node}={address}" for node, address in addresses.items()]
        argv = (*own_program("reach"), self._port or USUAL_PORT, *pairs)
        answer = await self._ask.run(*argv, deadline_s=2 * DEADLINE_S)
        gone = set(answer.output.split()) if answer.code == 0 else set()
        return set(missing) if witnesses and gone.issuperset(witnesses) else set(missing) - gone

    def _measured(self, said: _Said, now: float) -> float | None:
        """The time between two lines, from the first look at them and this one."""
        if self._watch.line_s is not None:
            return None
        found = []
        for name, count in said.counts.items():
            before, at = self._first.setdefault(name, (count, now))
            if count > before and name in said.strides:
                found.append((now - at) / (count - before) * said.strides[name])
        return max(found, default=None)

    async def _said(self) -> str:
        """The ends of the logs."""
        argv = ("tail", "-q", "-c", str(TAIL_BYTES), "--", *self._logs)
        return (await self._ask.run(*argv, deadline_s=FILE_S)).output if self._logs else ""


class _Said(NamedTuple):
    """What the ends of the logs say of the steps."""

    counts: Mapping[str, float] = {}  # How far the command has come, by the last line of each kind that says so.
    strides: Mapping[str, float] = {}  # From the last but one of these lines to the last.
    line_s: float | None = None  # Between two of these lines, where they say how long a step takes.


def _read(text: str) -> _Said:
    # Loaded until the time between two lines is known, and where a node is missing: it is much.
    from slurm_watchdog.parse.training_log.block_scan import scan

    counts: dict[str, float] = {}
    strides: dict[str, float] = {}
    line_s: float | None = None
    for _, fact in scan(text.encode()).facts:
        count = fact.count if fact.step is None else float(fact.step)
        if count is None or fact.initial:
            continue
        stride = count - counts.get(fact.pattern, count)
        counts[fact.pattern] = count
        if stride > 0:
            strides[fact.pattern] = stride
        if fact.step_s and fact.step is not None and fact.pattern in strides:
            line_s = fact.step_s * strides[fact.pattern]
    return _Said(counts, strides, line_s)


def log_files(fds: Collection[int] = (1, 2)) -> list[str]:
    """The files that these descriptors of ours are; a terminal and a pipe are none."""
    found: list[str] = []
    for fd in fds:
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith("/") and not path.startswith("/dev/") and path not in found:
            found.append(path)
    return found
