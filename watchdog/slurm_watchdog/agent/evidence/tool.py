"""Other people's programs (py-spy) that read hostile data for us: started with few rights, few means and a deadline.

Each is the leader of a session of its own, so that the deadline ends all that it has started. What it prints is read
with a bound while it prints: a program that prints too much is ended, and its output is no answer.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import IO

from slurm_watchdog.agent.children.become_user import keep_capabilities
from slurm_watchdog.base import clock, loop

AT_ONCE = 2  # Programs that run at the same time: one that hangs does not hold up all others.
READ = 1 << 16
MAX_ERRORS = 16 * 1024
KILLED_S = 0.5  # What SIGKILL ends ends at once.
LOOK_S = 0.05  # Between two looks whether a program has ended that says nothing more.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Means:
    """What one run of a program may use."""

    seconds: float
    output_bytes: int
    address_space: int  # Bytes.
    cpu_s: int
    processes: int  # Processes and threads of its user with it; the kernel counts all (setrlimit(2)).
    capabilities: frozenset[int] = frozenset()  # Of those that we have ourselves.


@dataclass(frozen=True)
class Ran:
    """What came of it. `problem` is None if, and only if, it ended by itself within its bounds."""

    out: bytes
    errors: bytes
    code: int
    problem: str | None = None


@dataclass
class _Running:
    child: subprocess.Popen[bytes]
    means: Means
    end: float
    out: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    problem: str | None = None

    def pipes(self) -> list[tuple[IO[bytes], bytearray, int]]:
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        both = ((self.child.stdout, self.out, self.means.output_bytes), (self.child.stderr, self.errors, MAX_ERRORS))
        return [each for each in both if not each[0].closed]


def run_tools(jobs: Iterable[Callable[[], tuple[Sequence[str], Means]]], left: list[int]) -> Iterator[tuple[int, Ran]]:
    """Runs the programs, AT_ONCE at a time, and gives what came of each as soon as it has ended, with its place in
    `jobs`; each of these is called just before its program is started. The pids of those that do not end although they
    were killed are added to `left`. To be called from a process with one thread. Raises OSError if one cannot be
    started."""
    waiting, running = enumerate(jobs), dict[int, _Running]()
    while True:
        for number, job in islice(waiting, AT_ONCE - len(running)):
            running[number] = _start(*job())
        if not running:
            return
        _listen(list(running.values()))
        for number, each in list(running.items()):
            if (ran := _end_of(each, left)) is not None:
                del running[number]
                yield number, ran


def _start(command: Sequence[str], means: Means) -> _Running:
    child = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
        start_new_session=True,
        preexec_fn=partial(_confine, means),  # noqa: PLW1509 -- there is one thread
    )  # fmt: skip
    for pipe in (child.stdout, child.stderr):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    return _Running(child, means, clock.monotonic() + means.seconds)


def _confine(means: Means) -> None:
    """In the child, before exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    keep_capabilities(means.capabilities)
    for which, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_AS, means.address_space, means.address_space),
        (resource.RLIMIT_CPU, means.cpu_s, means.cpu_s + 1),  # SIGXCPU first, which says what it was
        (resource.RLIMIT_NPROC, means.processes, means.processes),
    ):
        _, most = resource.getrlimit(which)
        most = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(which, (min(soft, most), most))


def _listen(running: list[_Running]) -> None:
    """Takes what the programs have printed, waiting a moment for it."""
    fds = [pipe.fileno() for each in running for pipe, _, _ in each.pipes()]
    loop.wait_readable(fds, LOOK_S if fds else LOOK_S / 10)
    for each in running:
        _take(each)


def _take(running: _Running) -> None:
    """Reads all that a program has printed so far, within its bound."""
    for pipe, into, limit in running.pipes():
        with suppress(BlockingIOError):
            while running.problem is None and (data := os.read(pipe.fileno(), READ)):
                into += data
                if len(into) > limit:
                    running.problem = f"its output is longer than {limit} bytes"
            if running.problem is None:
                pipe.close()


def _end_of(running: _Running, left: list[int]) -> Ran | None:
    """What came of it, if it has come to its end or has to; whatever else it started ends with it."""
    child = running.child
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    if not ended and running.problem is None and clock.monotonic() >= running.end:
        running.problem = f"it did not return within {running.means.seconds:.0f} s"
    if not ended and running.problem is None:
        return None
    if ended:
        _take(running)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # before it is waited for: until then the number is its own
    for pipe, _, _ in running.pipes():
        pipe.close()
    with suppress(subprocess.TimeoutExpired):
        code = child.wait(KILLED_S)
        if code < 0 and running.problem is None:
            why = "it used more CPU time than it may" if code == -signal.SIGXCPU else f"it was ended by signal {-code}"
            running.problem = why
        return Ran(bytes(running.out), bytes(running.errors), code, running.problem)
    left.append(child.pid)  # it is in D itself, and is left alone
    return Ran(bytes(running.out), bytes(running.errors), -signal.SIGKILL, running.problem)
