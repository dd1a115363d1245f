"""When each thread of a tree of processes ran: the kernel's own record of context switches, from a trace
instance of its own.

From it come the longest stretch without yielding, and what a tick took: nothing in the agent has to help.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.process_tree import read_tree

TRACING = Path("/sys/kernel/tracing")
BUFFER_KB = 8192
_SWITCH = re.compile(
    r"\s(?P<at>\d+\.\d+): sched_switch: .*prev_pid=(?P<prev>\d+) prev_prio=\d+ prev_state=(?P<state>\S+) ==> .*next_pid=(?P<next>\d+)"
)
_FORK = re.compile(r": sched_process_fork: .*child_pid=(?P<child>\d+)")


@dataclass(frozen=True)
class Switch:
    """One line of the trace: at `at_s`, the processor left thread `prev` for thread `next`."""

    at_s: float
    prev: int
    next: int
    runnable: bool
    """`prev` would have gone on: it was put aside, it did not yield."""


@dataclass(frozen=True)
class Run:
    """One thread on a processor, without interruption."""

    begin_s: float
    end_s: float
    thread: int


@dataclass
class Schedule:
    """What a trace says about the threads in `threads`."""

    stretches_s: list[float] = field(default_factory=list)
    """For each time that a thread gave the processor away of its own will: how long it had computed since the
    last time."""
    runs: list[Run] = field(default_factory=list)
    """Each time on a processor."""
    sleeps: Counter[int] = field(default_factory=Counter)
    """By thread: how often it gave the processor away, and so had to be woken."""


def parse_switches(lines: Iterable[str]) -> Iterator[Switch]:
    """The switches in a trace, in its order."""
    for line in lines:
        match = _SWITCH.search(line)
        if match is not None:
            yield Switch(float(match["at"]), int(match["prev"]), int(match["next"]), match["state"].startswith("R"))


def parse_forks(lines: Iterable[str]) -> Iterator[int]:
    """The processes and threads that were started by those which the trace follows."""
    for line in lines:
        match = _FORK.search(line)
        if match is not None:
            yield int(match["child"])


def arrange(switches: Iterable[Switch], threads: frozenset[int]) -> Schedule:
    """Follows each of `threads` through the switches. A thread whose beginning was not seen counts from its
    first one."""
    schedule = Schedule()
    since: dict[int, float] = {}
    computed: dict[int, float] = {}
    for switch in sorted(switches, key=lambda each: each.at_s):
        if switch.prev in threads and switch.prev in since:
            begin = since.pop(switch.prev)
            schedule.runs.append(Run(begin, switch.at_s, switch.prev))
            computed[switch.prev] = computed.get(switch.prev, 0.0) + switch.at_s - begin
            if not switch.runnable:
                schedule.stretches_s.append(computed.pop(switch.prev))
                schedule.sleeps[switch.prev] += 1
        if switch.next in threads:
            since[switch.next] = switch.at_s
    return schedule


def bursts(runs: Iterable[Run], silence_s: float) -> list[tuple[float, float]]:
    """(begin, end) of what lies less than `silence_s` apart: for the agent's main thread, a tick and what
    comes with it."""
    found: list[tuple[float, float]] = []
    for run in sorted(runs, key=lambda run: run.begin_s):
        if found and run.begin_s - found[-1][1] < silence_s:
            found[-1] = (found[-1][0], max(found[-1][1], run.end_s))
        else:
            found.append((run.begin_s, run.end_s))
    return found


@dataclass
class Recording:
    """The lines of a trace, and the threads that it is about: those there were, and those they started."""

    lines: list[str] = field(default_factory=list)
    threads: frozenset[int] = frozenset()


@contextmanager
def recording(root: int, name: str) -> Iterator[Recording]:
    """Records the switches of the tree below `root`; the recording is complete when the block ends. Raises OSError."""
    instance = TRACING / "instances" / f"slurm-watchdog-bench.{os.getpid()}.{name}"
    instance.mkdir()
    result = Recording()
    try:
        threads = {int(task) for pid in read_tree(root) for task in os.listdir(f"/proc/{pid}/task")}
        (instance / "buffer_size_kb").write_text(str(BUFFER_KB))
        (instance / "options" / "event-fork").write_text("1")
        (instance / "set_event_pid").write_text(" ".join(map(str, sorted(threads))))
        for event in ("sched_switch", "sched_process_fork"):
            (instance / "events" / "sched" / event / "enable").write_text("1")
        yield result
        (instance / "tracing_on").write_text("0")
        result.lines = (instance / "trace").read_text(errors="replace").splitlines()
        result.threads = frozenset(threads | set(parse_forks(result.lines)))
    finally:
        instance.rmdir()


def sweep() -> None:
    """Removes instances of a benchmark that was killed."""
    for instance in (TRACING / "instances").glob("slurm-watchdog-bench.*"):
        if not Path(f"/proc/{instance.name.split('.')[1]}").exists():
            instance.rmdir()
