"""A test of nodes from its first job to the verdicts: each node, then pairs in a ring, then again what looked bad.

The node test runs by salloc and srun: its text goes through srun's standard input, its lines come through the pipe. A
job that does not start, does not end, or whose Slurm does not answer costs its time and nothing else. Cancelled, it
cancels what it has submitted; if this process dies, salloc gets SIGTERM, and gives the job up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.process_setup import die_with_parent
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.schema import Config, NodeTests
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import OUR_DRAIN, NodeEventRequest
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import USED, is_drained, node_words, starts_jobs
from slurm_watchdog.nodetest.judge import (
    LEAST_PEERS,
    MAX_LINE,
    Line,
    Measured,
    NodeVerdict,
    Pair,
    confirmed,
    judge_nodes,
    measured,
    parse_line,
    peers_of,
    ring,
    slow_pairs,
    with_links,
)
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.commands import Commands, first_line
from slurm_watchdog.slurm.node_names import expand_nodes

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """What `work` returns or raises, once it has ended, however often this is cancelled meanwhile; then it raises
    CancelledError. (A second cancellation lets go of what `asyncio.shield` shields.)"""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


JOB_NAME = "slurm-watchdog-test"
NICE = 10_000  # above what users give each other: a test waits behind every other job of its partition
CHOOSE = (
    'for p in "$0" python3 /usr/libexec/platform-python; do '
    'if "$p" -I -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null </dev/null; then '
    'exec "$p" -I - "$@"; fi; done; echo "no Python from 3.8 on is installed on $(hostname)" >&2; exit 127'
)  # For sh: our own interpreter where the node has it, else the system's.
ALLOCATION = re.compile(r"^salloc: .* job allocation (\d+)")
MINUTES = {1: 15, 2: 5}  # limits of a job on one node and on two: more than its program takes (`--within`)
GRACE_S, SETTLE_S = 60.0, 5.0  # beyond that, for Slurm to end it (KillWait: 30 s); for its end after its last line
PLACES = Path(__file__).with_name("node_test.py"), Path(__file__).parents[3] / "deploy/node-test/node_test.py"
"""Of the program that is shipped: as installed, and in a checkout."""
SHARED = "mount:"  # begins the places that nodes share
FILE = "node-tests.jsonl"
MOST_BYTES, MOST_TESTS = 16 << 20, 20  # of the file's end, 20,000 tests; of a node that make what is usual for it
LIMIT_S, CLEANUP_S = 3600.0, 120.0
"""Of a test of drained nodes, and its end in which they are drained again. Six nodes and their links take 2 min where
nothing hangs (docs/test-nodes.md); a job that hangs costs its own limit, minutes, and a second look the same again."""
MOST_PASSED = 200  # healthy nodes that are reported to the controller: it takes 2,000 events a day
Say = Callable[[str], None]


class Terms(Struct):
    """How a test is done, and what all of its jobs have in common."""

    comment: str = ""  # whose the jobs are
    tests: NodeTests = NodeTests()
    words: tuple[str, ...] = ()  # that the program gets
    at_once: int = 8
    wait_s: float = 600.0  # for the nodes of a job to be free
    partition: str = ""
    account: str = ""
    reservation: str = ""
    cluster: str = ""
    place: Path | None = None  # where figures are kept, to compare later ones with


def choose(listed: Sequence[SlurmNode], asked: Mapping[str, Any]) -> tuple[list[SlurmNode], dict[str, str]]:
    """The nodes that are tested, and why some of those that were named are not; idle ones of these are peers of those
    that we have drained. Raises ValueError."""

    def why_not(node: SlurmNode) -> str:
        words, starts = node_words(node.state), starts_jobs(node.state)
        is_idle = starts and "IDLE" in words
        if asked["drained_by_us"]:
            ours = is_drained(node.state) and node.reason.startswith(OUR_DRAIN) and not words & USED
            return "" if ours or (names and is_idle) else "it is not drained by slurm-watchdog, or is in use"
        if not starts:
            return f"Slurm starts no job there: {node.state.lower()}{f' ({node.reason})' if node.reason else ''}"
        return "it is not idle" if asked["idle"] and not is_idle else ""

    names = [name for each in asked["nodes"] for name in expand_nodes(each)]
    known = {node.name: node for node in listed}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"Slurm knows no node {', '.join(unknown)}")
    wanted = [known[name] for name in dict.fromkeys(names or known)]
    found = {node.name: why_not(node) for node in wanted if asked["partition"] in (None, "", *node.partitions)}
    left = {name: why for name, why in found.items() if why and names}
    chosen = [known[name] for name, why in found.items() if not why]
    if not chosen and not left:
        raise ValueError("No node fits: see sinfo")
    return chosen, left


class NodeJob(NamedTuple):
    """One job: its nodes, and the words that the program gets on each."""

    nodes: tuple[SlurmNode, ...]
    words: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of its nodes."""
        return tuple(node.name for node in self.nodes)


Run = Callable[[NodeJob], Awaitable[Measured]]  # Runs a job to its end. Cancelled, it cancels the job.


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
    program = Path(terms.tests.program or next((each for each in PLACES if each.exists()), PLACES[0]))
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
    lines, job_id, other, why = list[Line](), "", "", "it ended without a result"

    def is_complete() -> bool:
        return {line.node for line in lines if line.part == "end"} == set(job.names)

    async def read(until: Callable[[], object]) -> None:
        nonlocal job_id, other
        assert process.stdout is not None
        while not until():
            with contextlib.suppress(ValueError):  # a line that is too long is none of ours
                text = (await process.stdout.readline()).decode(errors="replace")
                line, granted = parse_line(text), ALLOCATION.search(text)
                if not text:
                    return
                if granted:
                    job_id = granted[1]
                elif line is not None:
                    lines.extend([line] if line.node in job.names else [])
                elif text.strip():
                    other = first_line(text)

    try:
        async with timeout(terms.wait_s):
            await read(lambda: lines)
        async with timeout(60.0 * MINUTES[len(job.nodes)] + GRACE_S):
            await read(is_complete)
    except TimeoutError:
        why = "it did not end in time" if lines else f"its nodes were not free within {terms.wait_s:g} s"
    finally:
        await to_its_end(_end(process, SETTLE_S if is_complete() else 0.0))
        if job_id and not is_complete():
            with contextlib.suppress(SlurmUnavailable, SlurmRefused):  # then it ends by its limit
                await to_its_end(client.cancel(job_id))
    why = f"{why} ({other})" if other and not lines else why
    return measured(" ".join(job.names), lines, "" if is_complete() else why)


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """SIGTERM, which makes salloc give its job up, and then SIGKILL."""
    for number, wait_s in ((0, patience_s), (signal.SIGTERM, 3.0), (signal.SIGKILL, 1.0)):
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            os.killpg(process.pid, number)
            async with timeout(wait_s):
                await process.wait()
                return


async def run_all(what: str, jobs: Sequence[NodeJob], run: Run, at_once: int, say: Say) -> dict[str, Measured]:
    """What came of each by its name, `at_once` of them running. No two that run share a node."""
    locks, slots = defaultdict[str, asyncio.Lock](asyncio.Lock), asyncio.Semaphore(at_once)
    found = dict[str, Measured]()

    async def one(job: NodeJob) -> None:
        async with contextlib.AsyncExitStack() as held:
            for each in (*(locks[name] for name in sorted(job.names)), slots):
                await held.enter_async_context(each)
            result = await run(job)
            found[result.name] = result
            say(f"{what} {len(found)} of {len(jobs)}: {result.name} {result.missing or 'measured'}")

    tasks = [asyncio.ensure_future(one(job)) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await to_its_end(asyncio.gather(*tasks, return_exceptions=True))
    return found


class Report(Struct):
    """All that came of it. Dates."""

    began_at: float
    ended_at: float
    verdicts: tuple[NodeVerdict, ...]
    nodes: tuple[Measured, ...] = ()
    pairs: tuple[Measured, ...] = ()
    again: tuple[Measured, ...] = ()  # what looked bad, measured once more beside nodes that did not, and such pairs


async def conduct(nodes: Sequence[SlurmNode], terms: Terms, run: Run, say: Say) -> Report:
    """Cancelled, it cancels its jobs. Raises OSError where figures cannot be kept."""
    began_at, known, floors = clock.wall(), {node.name: node for node in nodes}, terms.tests.floors
    only = [word[7:].split(",") for word in terms.words if word.startswith("--only=")]

    async def measure(what: str, jobs: Sequence[NodeJob]) -> dict[str, Measured]:
        return await run_all(what, jobs, run, terms.at_once, say)

    def alone(names: Iterable[str], *more: str) -> list[NodeJob]:
        return [NodeJob((known[name],), (*terms.words, *more)) for name in names]

    def paired(pairs: Iterable[Pair]) -> list[NodeJob]:
        both = [(known[first], known[second]) for first, second in pairs]
        how = [("--pair", first.name, first.address or first.name, secrets.token_hex(16)) for first, _ in both]
        return [NodeJob(pair, (*terms.words, *words)) for pair, words in zip(both, how, strict=True)]

    singles = await measure("node", alone(known))
    past = usual(terms, singles)
    # A node that hangs in a part is named for that, and Slurm may not get its job off it for minutes.
    able = [name for name in known if not singles[name].missing and not singles[name].hangs]
    links = await measure("pair", paired(ring(able if not only or "network" in only[-1] else [])))
    verdicts = {each.node: each for each in judge_nodes(list(singles.values()), floors, past)}
    doubtful = [name for name in able if singles[name].disturbed or verdicts[name].truth is Truth.BAD]
    # What nodes share may be slower for a while: a second look at it has peers of its own, which were well.
    well = [singles[name] for name, each in verdicts.items() if each.truth is Truth.OK]
    shared = [name for name in doubtful if any(part.startswith(SHARED) for part in verdicts[name].by_place)]
    near = list(dict.fromkeys(each.name for one in shared for each in peers_of(singles[one], well)[:LEAST_PEERS]))
    beside, half = alone(near, "--only", "mount"), len(near) // 2
    again = await measure("again: node", [*beside[:half], *alone(doubtful), *beside[half:]])
    has_peers = near and sum(not each.missing for each in again.values()) > LEAST_PEERS
    later = dict(singles)
    for name, each in singles.items() if has_peers else ():  # without what nodes share
        own = {key: figure for key, figure in each.figures.items() if not figure.place.startswith(SHARED)}
        later[name] = replace(each, figures=own)
    for name, each in again.items():
        later[name] = replace(each, like=singles[name].like, figures={**later[name].figures, **each.figures})
    for second in judge_nodes(list(later.values()), floors, past):
        name = second.node
        if name in doubtful and not again[name].missing:
            verdicts[name] = confirmed(verdicts[name], second, singles[name])
    slow = slow_pairs(list(links.values()), floors)
    doubted = [each.pair for each in links.values() if each.pair in slow and not each.hangs]
    links_again = await measure("again: pair", paired(doubted))
    newest = links | {name: each for name, each in links_again.items() if not each.missing}
    still = slow_pairs(list(newest.values()), floors)
    slow = {pair: why for pair, why in slow.items() if pair in still}
    report = Report(
        began_at=began_at,
        ended_at=clock.wall(),
        verdicts=tuple(with_links(list(verdicts.values()), list(links.values()), slow)),
        nodes=tuple(singles.values()),
        pairs=tuple(links.values()),
        again=(*again.values(), *links_again.values()),
    )
    keep(terms, report)
    return report


async def conduct_jobs(
    config: Config, client: SlurmClient, nodes: Sequence[SlurmNode], terms: Terms, say: Say, *, lifts: bool
) -> Report:
    """By jobs of Slurm, as the site has set it. `lifts`: in the reservation of `terms`, drained nodes, too."""
    words = (*config.node_tests.options, *terms.words)
    terms = replace(terms, tests=config.node_tests, words=words, cluster=config.cluster_name)
    run = partial(run_by_salloc, client, Commands(config.slurm.bin_directory, os.environ), terms)
    async with contextlib.AsyncExitStack() as stack:
        if lifts:
            await stack.enter_async_context(lifted(client, nodes, terms.reservation, say))
        return await conduct(nodes, terms, run, say)
    raise AssertionError("an exit lets each exception pass")


class PastTest(Struct):
    """One test of one node against which nothing was found: a line of the file."""

    node: str
    same: tuple[str, ...] = ()  # only tests with the same words here may be compared: hardware, cluster, program
    figures: Mapping[str, float] = {}


def keep(terms: Terms, report: Report) -> None:
    """Adds what was measured to the file. Raises OSError."""
    bad, data = {each.node for each in report.verdicts if each.truth is Truth.BAD}, b""
    for each in report.nodes:
        figures = {key: figure.value for key, figure in each.figures.items()}
        test = PastTest(node=each.name, same=(each.like, terms.cluster, *terms.words), figures=figures)
        data += msgspec.json.encode(test) + b"\n" if figures and each.name not in bad else b""
    if terms.place is not None and data:
        terms.place.mkdir(parents=True, exist_ok=True)
        with open(os.open(terms.place / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(data)


def usual(terms: Terms, singles: Mapping[str, Measured]) -> dict[str, list[Mapping[str, float]]]:
    """Node to the figures of its newest tests that may be compared."""
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in singles}
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        if terms.place is not None:
            with (terms.place / FILE).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
                lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            test = msgspec.json.decode(line, type=PastTest)
            own, now = found.get(test.node, []), singles.get(test.node, Measured(name=""))
            if test.same == (now.like, terms.cluster, *terms.words) and len(own) < MOST_TESTS:
                own.append(test.figures)
    return found


# ---------------------------------------------------------------------------------------------- drained nodes


@contextlib.asynccontextmanager
async def lifted(client: SlurmClient, nodes: Sequence[SlurmNode], name: str, say: Say) -> AsyncIterator[None]:
    """Slurm starts no job on a drained node, whatever reserves it: so the nodes are reserved, and their drain is lifted
    inside of the reservation, and put back with its reason before that is deleted. What is done meanwhile has LIMIT_S:
    if this process dies, the reservation keeps other jobs away, and after that time the controller puts the drains
    back. Raises SlurmRefused, SlurmUnavailable, TimeoutError; then nothing is changed, or it is put back."""
    reasons = {node.name: node.reason for node in nodes if is_drained(node.state)}
    making = asyncio.ensure_future(client.reserve_nodes(name, [node.name for node in nodes]))
    try:
        await to_its_end(making)
        async with timeout(LIMIT_S - CLEANUP_S):
            for node in nodes:
                if node.name in reasons:
                    await client.undrain_node(node.name, node.reason, node.reason_at)
            yield
    finally:
        if making.exception() is None:
            await to_its_end(put_back(client, name, reasons, say))


async def put_back(client: SlurmClient, name: str, reasons: Mapping[str, str], say: Say) -> None:
    """Drains the nodes again and deletes the reservation. What fails stays reserved, and is reported. A node that a
    person has drained keeps its reason."""
    try:
        for node, reason in reasons.items():
            now = await client.read_node(node)
            if now is not None and not is_drained(now.state):
                await client.drain_node(node, reason)
        await client.delete_reservation(name)
    except (SlurmUnavailable, SlurmRefused) as error:
        say(f"{', '.join(reasons)}: reservation {name} keeps jobs away, for the drain could not be put back: {error}")


def events(report: Report) -> Iterator[tuple[str, NodeEventRequest]]:
    """What the controller remembers of it, with the node."""
    event = NodeEventRequest(kind="test_failed", what="", id=f"test-nodes-{secrets.token_hex(8)}")
    for each in report.verdicts:
        yield from ((each.node, replace(event, place=place, what=what)) for place, what in each.by_place.items())
    for each in [each for each in report.verdicts if each.truth is Truth.OK][:MOST_PASSED]:
        yield each.node, replace(event, kind="test_passed", what=f"test-nodes: well, beside {each.peers} peers")
