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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.process_setup import die_with_parent
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.uncancelled import to_its_end
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.nodetest.judge import MAX_LINE, Line, Measured, measured, parse_line
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
MINUTES: Final = {1: 15, 2: 5}
"""Limits of a job on one node and on two: more than the program takes (`--within` of node_test.py)."""
GRACE_S, SETTLE_S = 60.0, 5.0
"""Beyond a job's limit, for Slurm to end it (KillWait, 30 s as shipped); for a job to end after its last line."""
PLACES: Final = Path(__file__).with_name("node_test.py"), Path(__file__).parents[3] / "deploy/node-test/node_test.py"
"""Of the program that is shipped: as installed, and in a checkout."""


class Terms(Struct, frozen=True, kw_only=True):
    """How a test is done, and what all of its jobs have in common."""

    comment: str = ""
    """Whose the jobs are."""
    program: str = ""
    """A site's own; empty: ours."""
    words: tuple[str, ...] = ()
    """That the program gets."""
    pairs: bool = True
    at_once: int = 8
    wait_s: float = 600.0
    """For the nodes of a job to be free."""
    partition: str = ""
    account: str = ""
    reservation: str = ""
    floors: Mapping[str, float] = MappingProxyType({})
    cluster: str = ""
    place: Path | None = None
    """Where figures are kept, to compare later ones with."""


class NodeJob(NamedTuple):
    """One job: its nodes, and the words that the program gets on each."""

    nodes: tuple[SlurmNode, ...]
    words: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of its nodes."""
        return tuple(node.name for node in self.nodes)


Run = Callable[[NodeJob], Awaitable[Measured]]
"""Runs a job to its end. Cancelled, it cancels the job."""


def job_options(job: NodeJob, terms: Terms) -> list[str]:
    """For salloc: exclusive with all memory of the nodes, low priority, bounded, in a partition that they share."""
    shared = set(job.nodes[0].partitions).intersection(*(node.partitions for node in job.nodes))
    partition, number = terms.partition or min(shared, default=""), len(job.nodes)
    given = {"--partition": partition, "--account": terms.account, "--reservation": terms.reservation}
    return [
        *(f"--job-name={JOB_NAME}", f"--comment={terms.comment}", "--exclusive", "--mem=0", f"--nice={NICE}"),
        *(f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(job.names)}", f"--time={MINUTES[number]}"),
        *(f"{name}={value}" for name, value in given.items() if value),
    ]


async def run_by_salloc(client: SlurmClient, commands: Commands, terms: Terms, job: NodeJob) -> Measured:
    """A salloc with an srun in it. (An srun alone takes --exclusive for --exact, too, and gives a task one CPU.)"""
    argv = [commands.path("salloc"), "--no-bell", *job_options(job, terms)]
    argv += [commands.path("srun"), "--whole", "--kill-on-bad-exit=0", "/bin/sh", "-c", CHOOSE, sys.executable]
    program = Path(terms.program or next((each for each in PLACES if each.exists()), PLACES[0]))
    try:
        with program.open("rb") as text:  # noqa: ASYNC230 - a small file of this machine
            process = await asyncio.create_subprocess_exec(
                *argv,
                *job.words,
                stdin=text,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=MAX_LINE,
                env=dict(commands.environ),
                cwd="/",
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
    except OSError as error:
        return measured(" ".join(job.names), (), f"{error.filename or 'salloc'} cannot be started: {error.strerror}")
    heard = _Heard(job.names)
    why, limit_s = "it ended without a result", 60.0 * MINUTES[len(job.nodes)] + GRACE_S
    try:
        async with timeout(terms.wait_s):
            await heard.read(process, lambda: bool(heard.lines))
        async with timeout(limit_s):
            await heard.read(process, heard.is_complete)
    except TimeoutError:
        why = "it did not end in time" if heard.lines else f"its nodes were not free within {terms.wait_s:g} s"
    finally:
        await to_its_end(_end(process, SETTLE_S if heard.is_complete() else 0.0))
        if heard.job_id and not heard.is_complete():
            with contextlib.suppress(SlurmUnavailable, SlurmRefused):  # then it ends by its limit
                await to_its_end(client.cancel(heard.job_id))
    why = f"{why} ({heard.other})" if heard.other and not heard.lines else why
    return measured(" ".join(job.names), heard.lines, "" if heard.is_complete() else why)


class _Heard:
    """What a job has printed so far."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self.lines: list[Line] = []
        self.job_id = self.other = ""

    def is_complete(self) -> bool:
        """Whether every node has printed its last line."""
        return {line.node for line in self.lines if line.part == "end"} == set(self._nodes)

    async def read(self, process: asyncio.subprocess.Process, until: Callable[[], bool]) -> None:
        """Until that is so, or nothing more comes."""
        assert process.stdout is not None
        raw = b" "
        while raw and not until():
            raw = b" "
            with contextlib.suppress(ValueError):  # a line that is too long is none of ours
                raw = await process.stdout.readline()
            text = raw.decode(errors="replace")
            line, granted = parse_line(text), ALLOCATION.search(text)
            self.job_id = granted[1] if granted else self.job_id
            if line is None and text.strip() and not granted:
                self.other = first_line(text)
            self.lines += [line] if line is not None and line.node in self._nodes else []


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """SIGTERM, which makes salloc give its job up, and then SIGKILL."""
    for number, wait_s in ((0, patience_s), (signal.SIGTERM, 3.0), (signal.SIGKILL, 1.0)):
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            os.killpg(process.pid, number)
            async with timeout(wait_s):
                await process.wait()
                return


async def run_all(
    jobs: Sequence[NodeJob], run: Run, at_once: int, ended: Callable[[int, Measured], None]
) -> dict[str, Measured]:
    """What came of each by its name, `at_once` of them running. No two that run share a node."""
    todo, busy, found = list(jobs), dict[asyncio.Future[Measured], NodeJob](), dict[str, Measured]()
    try:
        while todo or busy:
            taken = {node for job in busy.values() for node in job.names}
            while len(busy) < at_once and (job := next((j for j in todo if taken.isdisjoint(j.names)), None)):
                todo.remove(job)
                taken |= set(job.names)
                busy[asyncio.ensure_future(run(job))] = job
            done, _ = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                found[task.result().name] = task.result()
                busy.pop(task)
                ended(len(found), task.result())
    finally:
        for task in busy:
            task.cancel()
        await to_its_end(asyncio.gather(*busy, return_exceptions=True))
    return found
