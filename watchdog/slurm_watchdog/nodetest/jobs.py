"""Runs the node test by salloc and srun: its text goes through srun's standard input, its lines come through the pipe.

A job that does not start, does not end, or whose Slurm does not answer costs its time and nothing else. Cancelled, it
cancels what it has submitted; if this process dies, salloc gets SIGTERM, and gives the job up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.process_setup import die_with_parent
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.uncancelled import to_its_end
from slurm_watchdog.nodetest.lines import Line, parse_line
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.commands import Commands, first_line

JOB_NAME: Final = "slurm-watchdog-test"
NICE: Final = 10_000
"""Above what users give each other, so that a test waits behind every other job of its partition."""
CHOOSE: Final = (
    'for p in "$0" python3 /usr/libexec/platform-python; do '
    'if "$p" -I -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null </dev/null; then '
    'exec "$p" -I - "$@"; fi; done; echo "no Python from 3.8 on is installed on $(hostname)" >&2; exit 127'
)
"""For sh: our own interpreter where the node has it, else the system's."""
ALLOCATION: Final = re.compile(r"^salloc: .* job allocation (\d+)")
GRACE_S, SETTLE_S = 60.0, 5.0
"""Beyond a job's limit, for Slurm to end it (KillWait, 30 s as shipped); for a job to end after its last line."""
PLACES: Final = (
    Path(__file__).with_name("node_test.py"), Path(__file__).parents[3] / "deploy/node-test/node_test.py",
)  # fmt: skip
"""Of the program that is shipped: as installed, and in a checkout."""


class NodeJob(NamedTuple):
    """One job: its nodes, the words that the program gets on each, and its limit."""

    nodes: tuple[str, ...]
    words: tuple[str, ...]
    minutes: int
    partition: str = ""


class Placement(Struct, frozen=True, kw_only=True):
    """What all jobs of a test have in common. `program`: a site's own, or empty; `comment` says whose they are."""

    comment: str
    program: str = ""
    account: str = ""
    reservation: str = ""


class Ended(Struct, frozen=True, kw_only=True):
    """What came of a job. `why` it has no or not all results, a part of a sentence."""

    nodes: tuple[str, ...]
    job_id: str = ""
    lines: tuple[Line, ...] = ()
    why: str = ""


class Launcher(Protocol):
    """One way to run a job."""

    async def run(self, job: NodeJob, wait_s: float) -> Ended:
        """To its end; `wait_s`: how long it may wait for its nodes. Cancelled, it cancels the job."""
        ...


def job_options(job: NodeJob, placement: Placement) -> list[str]:
    """For salloc: exclusive with all memory of the nodes, low priority, bounded."""
    given = {
        "--partition": job.partition, "--account": placement.account, "--reservation": placement.reservation,
    }  # fmt: skip
    return [
        f"--job-name={JOB_NAME}", f"--comment={placement.comment}", "--exclusive", "--mem=0", f"--nice={NICE}",
        f"--nodes={len(job.nodes)}", f"--ntasks={len(job.nodes)}", "--ntasks-per-node=1",
        f"--nodelist={','.join(job.nodes)}", f"--time={job.minutes}",
        *(f"{name}={value}" for name, value in given.items() if value),
    ]  # fmt: skip


class Salloc:
    """Each job is a salloc with an srun in it. (An srun alone takes --exclusive for --exact, too, and gives a task one
    CPU.)"""

    def __init__(self, client: SlurmClient, commands: Commands, placement: Placement) -> None:
        self._client, self._commands, self._placement = client, commands, placement

    async def run(self, job: NodeJob, wait_s: float) -> Ended:
        """As Launcher has it."""
        argv = [self._commands.path("salloc"), "--no-bell", *job_options(job, self._placement)]
        argv += [self._commands.path("srun"), "--whole", "--kill-on-bad-exit=0"]
        argv += ["/bin/sh", "-c", CHOOSE, sys.executable, *job.words]
        try:
            given = self._placement.program
            program = Path(given) if given else next((each for each in PLACES if each.exists()), PLACES[0])
            with program.open("rb") as text:
                process = await asyncio.create_subprocess_exec(
                    *argv, stdin=text, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                    env=dict(self._commands.environ), cwd="/", start_new_session=True, preexec_fn=die_with_parent,
                )  # fmt: skip
        except OSError as error:
            return Ended(nodes=job.nodes, why=f"{error.filename or 'salloc'} cannot be started: {error.strerror}")
        heard = _Heard(job)
        why = "it ended without a result"
        try:
            why = await heard.read(process, wait_s) or why
        finally:
            if process.returncode is None:
                await to_its_end(_end(process))
            if not heard.complete and heard.job_id:
                with contextlib.suppress(SlurmUnavailable, SlurmRefused):  # then it ends by its limit
                    await to_its_end(self._client.cancel(heard.job_id))
        why = f"{why} ({heard.other})" if heard.other and not heard.lines else why
        return Ended(nodes=job.nodes, job_id=heard.job_id, lines=tuple(heard.lines), why="" if heard.complete else why)


class _Heard:
    """Lines of one job as they come."""

    def __init__(self, job: NodeJob) -> None:
        self._job, self._rest = job, b""
        self.lines: list[Line] = []
        self.job_id = self.other = ""

    @property
    def complete(self) -> bool:
        """Whether every node has said its last."""
        return {line.node for line in self.lines if line.part == "end"} == set(self._job.nodes)

    def _add(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for text in (raw.decode(errors="replace") for raw in whole):
            line = parse_line(text)
            if line is not None and line.node in self._job.nodes:
                self.lines.append(line)
            elif line is None and text.strip():
                granted = ALLOCATION.search(text)
                self.job_id = granted[1] if granted else self.job_id
                self.other = self.other if granted else first_line(text)

    async def read(self, process: asyncio.subprocess.Process, wait_s: float) -> str:
        """Until all is there or the job is late: then why."""
        assert process.stdout is not None
        until, started = clock.monotonic() + wait_s, False
        while not self.complete:
            try:
                async with timeout(max(0.0, until - clock.monotonic())):
                    data = await process.stdout.read(65_536)
            except TimeoutError:
                return "it did not end in time" if started else f"its nodes were not free within {wait_s:g} s"
            if not data:
                break
            self._add(data)
            if self.lines and not started:
                started, until = True, clock.monotonic() + 60.0 * self._job.minutes + GRACE_S
        with contextlib.suppress(TimeoutError):
            async with timeout(SETTLE_S):
                await process.wait()
        return ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, which makes salloc give its job up, and then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 1.0)):
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            os.killpg(process.pid, number)
            async with timeout(wait_s):
                await process.wait()
                return


async def run_jobs(
    jobs: Sequence[NodeJob], launcher: Launcher, at_once: int, wait_s: float, ended: Callable[[Ended], None]
) -> AsyncIterator[Ended]:
    """The ends of all jobs as they come, `at_once` of them running. No two that run share a node."""
    todo, busy = list(jobs), dict[asyncio.Task[Ended], NodeJob]()
    try:
        while todo or busy:
            taken = {node for job in busy.values() for node in job.nodes}
            while len(busy) < at_once and (job := next((j for j in todo if taken.isdisjoint(j.nodes)), None)):
                todo.remove(job)
                taken |= set(job.nodes)
                busy[asyncio.ensure_future(launcher.run(job, wait_s))] = job
            done, _ = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del busy[task]
                ended(task.result())
                yield task.result()
    finally:
        for task in busy:
            task.cancel()
        await to_its_end(asyncio.gather(*busy, return_exceptions=True))
