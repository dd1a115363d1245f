"""A test of nodes from its first job to the verdicts: each node, then pairs in a ring, then again what looked bad."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.node_figures import LEAST_PEERS
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.nodetest.jobs import Ended, Heard, Launcher, run_jobs
from slurm_watchdog.nodetest.judge import Floors, Past, Verdict, judge_nodes, peers_of
from slurm_watchdog.nodetest.link_counters import judge_counters
from slurm_watchdog.nodetest.pairs import Pair, SlowPair, culprits, judge_pairs, pair_of, ring
from slurm_watchdog.nodetest.plan import NodeJob, Wanted, node_job, pair_job
from slurm_watchdog.nodetest.results import Measured, better, measured
from slurm_watchdog.nodetest.select import partition_of

SHARED_PLACE: Final = "mount:"
"""As results.place_of has it: what nodes share, and what may be slower for all of them while one is measured."""
SHARED_PHASES: Final = frozenset({"mount"})
BESIDE_WAIT_S: Final = 60.0
"""For a peer to be free in the second look: without it the comparison with the first look stands (a judgement)."""


class Report(Struct, frozen=True, kw_only=True):
    """All that came of it."""

    began_at: float
    ended_at: float
    """Dates."""
    verdicts: tuple[Verdict, ...]
    nodes: tuple[Measured, ...] = ()
    pairs: tuple[Measured, ...] = ()
    slow_pairs: tuple[SlowPair, ...] = ()
    jobs: tuple[Mapping[str, object], ...] = ()
    """Each job: its id, nodes, and why it has no results, if so."""


class Progress(Protocol):
    """Who shows how far it is."""

    def part(self, what: str, jobs: int) -> None:
        """So many jobs begin."""

    def ended(self, job: Ended) -> None:
        """One has ended."""


class Terms(Struct, frozen=True, kw_only=True):
    """How it is done, beside what is measured."""

    at_once: int = 8
    wait_s: float = 600.0
    """For the nodes of a job to be free."""
    waits_for_job: bool = False
    """The first jobs wait for another job's end, as long as it takes."""
    partition: str = ""
    again: bool = True
    """What looks bad is measured a second time, and only what holds is reported."""


async def conduct(
    nodes: Sequence[SlurmNode], wanted: Wanted, terms: Terms, launcher: Launcher, progress: Progress, heard: Heard,
    floors: Floors, past: Callable[[Mapping[str, str]], Past],
) -> Report:  # fmt: skip
    """`past(models)` gives earlier figures of nodes of these models. Cancelled, it cancels its jobs."""
    began_at, done = clock.wall(), list[Ended]()
    known = {node.name: node for node in nodes}

    async def run(what: str, jobs: Sequence[NodeJob], wait_s: float | None) -> dict[tuple[str, ...], Measured]:
        if jobs:
            progress.part(what, len(jobs))
        found = {}
        async for ended in run_jobs(jobs, launcher, terms.at_once, heard, wait_s):
            done.append(ended)
            progress.ended(ended)
            found[ended.nodes] = measured(" ".join(ended.nodes), ended.lines, ended.why)
        return found

    def alone(names: Sequence[str], wanted: Wanted = wanted) -> list[NodeJob]:
        return [node_job(name, wanted, partition_of([known[name]], terms.partition)) for name in names]

    def paired(pairs: Sequence[Pair]) -> list[NodeJob]:
        jobs = []
        for pair in pairs:
            both = [known[name] for name in pair]
            jobs.append(pair_job(pair, both[0].address or pair[0], secrets.token_hex(16), wanted,
                                 partition_of(both, terms.partition)))  # fmt: skip
        return jobs

    first_wait = None if terms.waits_for_job else terms.wait_s
    singles = {key[0]: value for key, value in (await run("node", alone(list(known)), first_wait)).items()}
    of_past = past({name: each.model for name, each in singles.items()})
    # A node that hangs in a phase is named for that, and Slurm may not get its job off it for minutes.
    around = (
        ring([name for name in known if not singles[name].missing and not _hangs(singles[name])])
        if "network" in wanted.phases
        else []
    )
    links = await run("pair", paired(around), terms.wait_s)
    verdicts = judge_nodes(list(singles.values()), floors, of_past)
    slow = judge_pairs(list(links.values()), floors)
    if terms.again:
        again = dict[str, Measured]()
        doubtful = [each.node for each in verdicts if _is_worth_another(each, singles[each.node])]
        beside = alone(peers_beside(doubtful, verdicts, singles), replace(wanted, phases=SHARED_PHASES))
        beside = [each._replace(wait_s=min(BESIDE_WAIT_S, terms.wait_s)) for each in beside]
        middle = len(beside) // 2
        jobs = [*beside[:middle], *alone(doubtful), *beside[middle:]]
        for key, value in (await run("second look: node", jobs, terms.wait_s)).items():
            again[key[0]] = replace(value, model=singles[key[0]].model)
            if key[0] in doubtful:
                singles[key[0]] = better(singles[key[0]], value)
        for pair, value in (
            await run("second look: pair", paired([s.nodes for s in slow if not _hangs(links[s.nodes])]), terms.wait_s)
        ).items():
            links[pair] = better(links[pair], value)
        verdicts = judge_nodes(list(singles.values()), floors, of_past, list(again.values()))
        slow = judge_pairs(list(links.values()), floors)
    return Report(
        began_at=began_at, ended_at=clock.wall(), nodes=tuple(singles.values()), pairs=tuple(links.values()),
        verdicts=tuple(with_links(verdicts, slow, links.values(), around)), slow_pairs=tuple(slow),
        jobs=tuple({"job_id": each.job_id, "nodes": each.nodes, "why": each.why} for each in done),
    )  # fmt: skip


def peers_beside(doubtful: Sequence[str], verdicts: Sequence[Verdict], singles: Mapping[str, Measured]) -> list[str]:
    """Names of the nodes whose shared directories are measured again at the time of the second look, where those of a
    doubtful node were slow: for each model as many as a comparison needs, of those against which nothing was found."""
    faults = {each.node: each.faults for each in verdicts}
    well = [singles[each.node] for each in verdicts if each.truth is Truth.OK]
    found: list[str] = []
    for name in doubtful:
        if any(each.place.startswith(SHARED_PLACE) for each in faults[name]):
            peers = [each.name for each in peers_of(singles[name], well)][:LEAST_PEERS]
            found += [each for each in peers if each not in found]
    return found


def _is_worth_another(verdict: Verdict, node: Measured) -> bool:
    """A second test costs minutes where a phase hangs, and a hang is no figure that noise could have made."""
    return (verdict.truth is Truth.BAD or bool(node.disturbed)) and not _hangs(node) and not node.missing


def _hangs(measured: Measured) -> bool:
    return any(each.state == "late" for each in measured.problems)


def with_links(
    verdicts: Sequence[Verdict], slow: Sequence[SlowPair], links: Collection[Measured], asked: Sequence[Pair]
) -> list[Verdict]:
    """The verdicts, with what is wrong between nodes."""
    guilty = culprits(slow)
    errors = judge_counters(list(links))
    for node, risen in errors.items():
        guilty[node] = guilty.get(node, []) + [each.fault for each in risen if each.is_certain]
    unclear = {node: pair for pair in slow if not pair.culprit for node in pair.nodes}
    tested = {node for link in links if not link.missing for node in pair_of(link)}
    wanted = {node for pair in asked for node in pair}
    found = []
    for each in verdicts:
        if guilty.get(each.node):
            each = replace(each, truth=Truth.BAD, faults=(*each.faults, *guilty[each.node]))
        elif each.truth is not Truth.BAD and each.node in unclear:
            pair = unclear[each.node]
            other = pair.nodes[1] if pair.nodes[0] == each.node else pair.nodes[0]
            doubt = f"to {other}: {'; '.join(pair.reasons)}; which of the two it is, no other pair tells"
            each = replace(each, truth=Truth.UNKNOWN, unsure=(*each.unsure, doubt))
        elif each.truth is not Truth.BAD and each.node in errors:
            why = tuple(risen.fault.what for risen in errors[each.node])
            each = replace(each, truth=Truth.UNKNOWN, unsure=(*each.unsure, *why))
        elif each.truth is Truth.OK and each.node in wanted - tested:
            each = replace(each, truth=Truth.UNKNOWN, unsure=("its network was not measured",))
        found.append(each)
    return found
