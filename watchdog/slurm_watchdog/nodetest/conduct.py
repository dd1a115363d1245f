"""A test of nodes from its first job to the verdicts: each node, then pairs in a ring, then again what looked bad."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_test import NodeVerdict
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.nodetest.jobs import Ended, Launcher, NodeJob, run_jobs
from slurm_watchdog.nodetest.judge import (
    LEAST_PEERS,
    Floors,
    Pair,
    SlowPair,
    judge_nodes,
    judge_pairs,
    peers_of,
    ring,
    with_links,
)
from slurm_watchdog.nodetest.lines import Measured, better, measured

NODE_MINUTES, PAIR_MINUTES = 15, 5
"""Limits of a job on one node and on two: more than the program takes (`--within` of node_test.py)."""
SHARED_PLACE: Final = "mount:"
"""What nodes share, and what may be slower for all of them while one is measured."""
Say = Callable[[str], None]


class Terms(Struct, frozen=True, kw_only=True):
    """How it is done."""

    words: tuple[str, ...] = ()
    """That the program gets."""
    pairs: bool = True
    at_once: int = 8
    wait_s: float = 600.0
    """For the nodes of a job to be free."""
    partition: str = ""
    floors: Floors = MappingProxyType({})
    cluster: str = ""
    place: Path | None = None
    """Where figures are kept, to compare later ones with."""


class Report(Struct, frozen=True, kw_only=True):
    """All that came of it. Dates."""

    began_at: float
    ended_at: float
    verdicts: tuple[NodeVerdict, ...]
    nodes: tuple[Measured, ...] = ()
    pairs: tuple[Measured, ...] = ()
    slow_pairs: tuple[SlowPair, ...] = ()


async def conduct(nodes: Sequence[SlurmNode], terms: Terms, launcher: Launcher, say: Say) -> Report:
    """Cancelled, it cancels its jobs. Raises OSError where figures cannot be kept."""
    began_at, known = clock.wall(), {node.name: node for node in nodes}

    async def run(what: str, jobs: Sequence[NodeJob]) -> dict[str, Measured]:
        found: dict[str, Measured] = {}

        def ended(job: Ended) -> None:
            name = " ".join(job.nodes)
            found[name] = measured(name, job.lines, job.why)
            say(f"{what} {len(found)} of {len(jobs)}: {name} {job.why or 'measured'}")

        async for _ in run_jobs(jobs, launcher, terms.at_once, terms.wait_s, ended):
            pass
        return found

    def alone(names: Sequence[str], *more: str) -> list[NodeJob]:
        return [
            NodeJob((name,), (*terms.words, *more), NODE_MINUTES, partition_of([known[name]], terms.partition))
            for name in names
        ]

    def paired(pairs: Sequence[Pair]) -> list[NodeJob]:
        found = []
        for pair in pairs:
            both = [known[name] for name in pair]
            words = ("--pair", pair[0], both[0].address or pair[0], secrets.token_hex(16))
            found.append(NodeJob(pair, (*terms.words, *words), PAIR_MINUTES, partition_of(both, terms.partition)))
        return found

    singles = await run("node", alone(list(known)))
    past = usual(terms, {name: each.like for name, each in singles.items()})
    # A node that hangs in a part is named for that, and Slurm may not get its job off it for minutes.
    able = [name for name in known if not singles[name].missing and not singles[name].hangs]
    around = ring(able if terms.pairs else [])
    links = await run("pair", paired(around))
    verdicts = judge_nodes(list(singles.values()), terms.floors, past)
    slow = judge_pairs(list(links.values()), terms.floors)
    doubtful = [
        each.node for each in verdicts
        if (each.truth is Truth.BAD or singles[each.node].disturbed)
        and not singles[each.node].hangs and not singles[each.node].missing
    ]  # fmt: skip
    beside = alone(peers_beside(doubtful, verdicts, singles), "--only", "mount")
    jobs = [*beside[: len(beside) // 2], *alone(doubtful), *beside[len(beside) // 2 :]]
    again = {name: replace(each, like=singles[name].like) for name, each in (await run("again: node", jobs)).items()}
    singles |= {name: better(singles[name], again[name]) for name in doubtful}
    doubted = [each.nodes for each in slow if not links[" ".join(each.nodes)].hangs]
    for name, value in (await run("again: pair", paired(doubted))).items():
        links[name] = better(links[name], value)
    verdicts = judge_nodes(list(singles.values()), terms.floors, past, list(again.values()))
    slow = judge_pairs(list(links.values()), terms.floors)
    report = Report(
        began_at=began_at, ended_at=clock.wall(), nodes=tuple(singles.values()), pairs=tuple(links.values()),
        verdicts=tuple(with_links(verdicts, slow, list(links.values()), around)), slow_pairs=tuple(slow),
    )  # fmt: skip
    keep(terms, report)
    return report


def peers_beside(
    doubtful: Sequence[str], verdicts: Sequence[NodeVerdict], singles: Mapping[str, Measured]
) -> list[str]:
    """Nodes whose shared directories are measured again at the time of the second look, where those of a doubtful node
    were slow: as many as a comparison needs, of those against which nothing was found."""
    faults = {each.node: each.faults for each in verdicts}
    well = [singles[each.node] for each in verdicts if each.truth is Truth.OK]
    found: list[str] = []
    for name in doubtful:
        if any(place.startswith(SHARED_PLACE) for place, _ in faults[name]):
            found += [each.name for each in peers_of(singles[name], well)[:LEAST_PEERS] if each.name not in found]
    return found


def partition_of(nodes: Sequence[SlurmNode], wanted: str) -> str:
    """The one in which a job on all of them is submitted: `wanted`, else one that they share, else none."""
    shared = set(nodes[0].partitions).intersection(*(node.partitions for node in nodes))
    return wanted or min(shared, default="")


# ---------------------------------------------------------------------------------------------- earlier tests

FILE: Final = "node-tests.jsonl"
MOST_BYTES, MOST_TESTS = 16 << 20, 20
"""Of the end of the file, some 20,000 tests; of a node that make what is usual for it."""


class PastTest(Struct, frozen=True, kw_only=True):
    """One test of one node: a line of the file."""

    node: str
    like: str = ""
    cluster: str = ""
    words: tuple[str, ...] = ()
    figures: Mapping[str, float] = {}
    truth: str = "unknown"


def keep(terms: Terms, report: Report) -> None:
    """Adds what was measured to the file. Raises OSError."""
    truths, data = {each.node: each.truth.value for each in report.verdicts}, b""
    for each in report.nodes:
        figures = {key: figure.value for key, figure in each.figures.items()}
        test = PastTest(node=each.name, like=each.like, cluster=terms.cluster, words=terms.words, figures=figures,
                        truth=truths[each.name])  # fmt: skip
        data += msgspec.json.encode(test) + b"\n" if figures else b""
    if terms.place is not None and data:
        terms.place.mkdir(parents=True, exist_ok=True)
        with open(os.open(terms.place / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(data)


def usual(terms: Terms, likes: Mapping[str, str]) -> dict[str, list[Mapping[str, float]]]:
    """Node to the figures of its newest tests that may be compared: the same test of the same hardware, not bad."""
    found: dict[str, list[Mapping[str, float]]] = {}
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        if terms.place is not None:
            with (terms.place / FILE).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
                lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            test = msgspec.json.decode(line, type=PastTest)
            same = (test.like, test.words, test.cluster) == (likes.get(test.node), terms.words, terms.cluster)
            if same and test.truth != "bad" and len(found.get(test.node, ())) < MOST_TESTS:
                found.setdefault(test.node, []).append(test.figures)
    return found
