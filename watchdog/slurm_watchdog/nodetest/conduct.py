"""A test of nodes from its first job to the verdicts: each node, then pairs in a ring, then again what looked bad."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.uncancelled import to_its_end
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import is_drained
from slurm_watchdog.nodetest.jobs import NodeJob, Run, Terms, run_all
from slurm_watchdog.nodetest.judge import (
    LEAST_PEERS,
    Measured,
    NodeVerdict,
    Pair,
    confirmed,
    judge_nodes,
    peers_of,
    ring,
    slow_pairs,
    with_links,
)
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable

SHARED: Final = "mount:"
"""Begins the places that nodes share."""
FILE: Final = "node-tests.jsonl"
MOST_BYTES, MOST_TESTS = 16 << 20, 20
"""Of the end of the file, some 20,000 tests; of a node that make what is usual for it."""
LIMIT_S, CLEANUP_S = 3600.0, 120.0
"""Of a test of drained nodes, and its end in which they are drained again. Six nodes and their links take 2 min where
nothing hangs (docs/test-nodes.md); each job that hangs costs its own limit, minutes, and a second look the same
again."""
Say = Callable[[str], None]


class Report(Struct, frozen=True, kw_only=True):
    """All that came of it. Dates."""

    began_at: float
    ended_at: float
    verdicts: tuple[NodeVerdict, ...]
    nodes: tuple[Measured, ...] = ()
    pairs: tuple[Measured, ...] = ()
    again: tuple[Measured, ...] = ()
    """What looked bad, measured a second time beside nodes that did not, and such pairs."""


async def conduct(nodes: Sequence[SlurmNode], terms: Terms, run: Run, say: Say) -> Report:
    """Cancelled, it cancels its jobs. Raises OSError where figures cannot be kept."""
    began_at, known, floors = clock.wall(), {node.name: node for node in nodes}, terms.floors

    async def measure(what: str, jobs: Sequence[NodeJob]) -> dict[str, Measured]:
        def ended(number: int, found: Measured) -> None:
            say(f"{what} {number} of {len(jobs)}: {found.name} {found.missing or 'measured'}")

        return await run_all(jobs, run, terms.at_once, ended)

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
    links = await measure("pair", paired(ring(able if terms.pairs else [])))
    verdicts = {each.node: each for each in judge_nodes(list(singles.values()), floors, past)}
    doubtful = [name for name in able if singles[name].disturbed or verdicts[name].truth is Truth.BAD]
    # What nodes share may be slower for a while: a second look at it has peers of its own, which were well.
    well = [singles[name] for name, each in verdicts.items() if each.truth is Truth.OK]
    shared = [name for name in doubtful if any(part.startswith(SHARED) for part in verdicts[name].by_place)]
    near = list(dict.fromkeys(each.name for one in shared for each in peers_of(singles[one], well)[:LEAST_PEERS]))
    beside, half = alone(near, "--only", "mount"), len(near) // 2
    again = await measure("again: node", [*beside[:half], *alone(doubtful), *beside[half:]])
    has_peers = near and sum(not each.missing for each in again.values()) > LEAST_PEERS
    later = {name: unshared(each) if has_peers else each for name, each in singles.items()}
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


def unshared(found: Measured) -> Measured:
    """Without what nodes share."""
    return replace(
        found, figures={key: each for key, each in found.figures.items() if not each.place.startswith(SHARED)}
    )


class PastTest(Struct, frozen=True, kw_only=True):
    """One test of one node against which nothing was found: a line of the file."""

    node: str
    same: tuple[str, ...] = ()
    """Only tests with the same words here may be compared: of the hardware, the cluster and the test."""
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
