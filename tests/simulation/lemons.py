"""A synthetic year of 1,000 nodes, three of them lemons: which does the ledger suspect at a node's third event?

`python -m tests.simulation.lemons --years 40` prints one line of JSON. Every node fails now and then: 6.5 times in
1,000 node-days, the rate of Meta's RSC-1 (A. Kokolis et al., arXiv:2410.21680), three times what RSC-2 has. A lemon
has one bad part, which fails every three days on average once it has gone bad. Around that everything happens that
must not be held against anybody: storage that is down for everybody, a rack that loses power, jobs that hang by
their own fault wherever they run, maintenance. Pure: no clock, one seed is one year.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_watchdog.controller.node_history.suspicion import (
    DAY_S,
    SUSPECT_FROM,
    WINDOW_S,
    by_node,
    strength_of,
    suspicion_of,
)
from slurm_watchdog.model.node_events import NodeEvent

NODES, LEMONS, YEAR_DAYS, GPUS, LINKS = 1000, 3, 365, 8, 8
RATE_PER_DAY = 6.5 / 1000
"""Of a node that is no lemon."""
LEMON_DAYS = 3.0
"""Between two failures of a lemon's bad part, on average: exponential."""
PART_KNOWN = 0.95
"""Share of failures whose part is named: of the others only the node is known (a hang, a dead rank, a drain)."""
RESTARTED = 0.5
"""Share of failures of a job after which the restart without the node is seen to help."""
SAY_FROM = 3
"""At which event within 14 days of a node the ledger is asked."""
OF_LEMON = ":lemon"
"""End of the key of an event of a lemon's bad part."""
PARTS = (("gpu", 0.45), ("link", 0.2), ("memory", 0.1), ("mount", 0.1), ("down", 0.1), ("slow", 0.05))
"""What fails, by its share: about half of the hardware faults of large clusters are GPUs (Llama Team, The Llama 3
Herd of Models, arXiv:2407.21783, table 5: 58.7 % with their memory), then network and hosts."""
KINDS = {"gpu": "gpu_fault", "link": "link_down", "memory": "drained", "mount": "filesystem_stall", "down": "node_down",
         "slow": "slow_node"}  # fmt: skip


@dataclass(frozen=True)
class World:
    """What differs between scenes."""

    rate_per_day: float = RATE_PER_DAY
    part_known: float = PART_KNOWN
    lemon_days: float = LEMON_DAYS


@dataclass(frozen=True)
class Score:
    """Of one or more years: nodes by what they are and what was said of them at their third event."""

    lemons: int
    """Those whose bad part failed three times within 14 days."""
    found: int
    """Lemons that were suspect when their bad part had failed for the third time within 14 days."""
    late: int
    """Lemons that were so two events later at the latest."""
    wrong: int
    """Nodes that are no lemons, and were suspect at any time of the year."""
    repeated: int
    """Nodes that are no lemons and had three events within 14 days, by chance."""
    events: int

    @property
    def recall(self) -> float:
        return self.found / self.lemons

    @property
    def precision(self) -> float:
        return self.found / max(1, self.found + self.wrong)


WORLD = World()


def year(seed: int, world: World = WORLD) -> tuple[list[NodeEvent], frozenset[str]]:
    """The events of one year, and the names of the lemons."""
    chance = random.Random(seed)
    nodes = [f"n{number:04d}" for number in range(NODES)]
    lemons = frozenset(chance.sample(nodes, LEMONS))
    events = [event for node in nodes for event in _failures(chance, node, world)]
    for node in sorted(lemons):
        events += _of_lemon(chance, node, world)
    events += _innocent(chance, nodes)
    return sorted(events, key=lambda each: each.at), lemons


def _part(chance: random.Random, node: str) -> tuple[str, str]:
    """A kind of event, and which part of the node has it."""
    (part,) = chance.choices([name for name, _ in PARTS], [share for _, share in PARTS])
    place = {
        "gpu": f"GPU-{node}-{chance.randrange(GPUS)}", "link": f"link:mlx5_{chance.randrange(LINKS)}",
        "memory": "memory", "mount": f"mount:/{chance.choice(('home', 'scratch', 'data'))}",
        "down": "host", "slow": "host",
    }.get(part, "")  # fmt: skip
    return KINDS[part], place


def _dates(chance: random.Random, per_day: float, begin_day: float = 0.0) -> Iterator[float]:
    day = begin_day
    while (day := day + chance.expovariate(per_day)) < YEAR_DAYS:
        yield day * DAY_S


def _event(
    chance: random.Random, node: str, at: float, kind: str, place: str, known: float, mark: str = ""
) -> NodeEvent:
    if chance.random() > known:  # only a job that suffered is seen
        kind, place = chance.choice(("collective_hang", "dead_rank")), ""
    key = f"{kind}:{node}:{at:.0f}{mark}"
    chain = f"{chance.randrange(1000, 1040)}/train{chance.randrange(5)}"
    incident = "" if strength_of(kind) >= 1.0 else f"i{key}"
    return NodeEvent(
        key=key, node=node, kind=kind, at=at, what=f"{kind} of {node}", place=place, chain=chain, incident_id=incident
    )


def _failures(chance: random.Random, node: str, world: World) -> list[NodeEvent]:
    found = []
    for at in _dates(chance, world.rate_per_day):
        kind, place = _part(chance, node)
        found += _with_restart(chance, _event(chance, node, at, kind, place, world.part_known))
    return found


def _of_lemon(chance: random.Random, node: str, world: World) -> list[NodeEvent]:
    kind, place = _part(chance, node)
    begin_day = chance.uniform(0.0, YEAR_DAYS - 60.0)
    dates = _dates(chance, 1 / world.lemon_days, begin_day)
    events = [_event(chance, node, at, kind, place, world.part_known, OF_LEMON) for at in dates]
    return [each for event in events for each in _with_restart(chance, event)]


def _with_restart(chance: random.Random, event: NodeEvent) -> list[NodeEvent]:
    if not event.incident_id or chance.random() > RESTARTED:
        return [event]
    helped = NodeEvent(
        key=f"helped:{event.key}", node=event.node, kind="restart_helped", at=event.at + 900.0, what="it ran without",
        place=event.place, chain=event.chain, incident_id=event.incident_id,
    )  # fmt: skip
    return [event, helped]


def _innocent(chance: random.Random, nodes: list[str]) -> list[NodeEvent]:
    """What must not be held against anybody."""
    found: list[NodeEvent] = []
    for at in _dates(chance, 12 / YEAR_DAYS):  # storage, once a month: on many nodes within minutes
        for node in chance.sample(nodes, 60):
            found.append(_plain(chance, node, at + chance.uniform(0, 400), "filesystem_stall", "mount:/scratch"))
    for at in _dates(chance, 6 / YEAR_DAYS):  # a rack without power
        first = chance.randrange(NODES - 16)
        found += [_plain(chance, node, at + chance.uniform(0, 120), "node_down") for node in nodes[first : first + 16]]
    for at in _dates(chance, 12 / YEAR_DAYS):  # maintenance of a part of the cluster
        found += [_plain(chance, node, at + n * 2.0, "drained") for n, node in enumerate(chance.sample(nodes, 50))]
    for number, at in enumerate(_dates(chance, 50 / YEAR_DAYS)):  # a program that hangs, wherever it runs
        mine = chance.sample(nodes, 64)
        for again in range(chance.randrange(3, 9)):
            event = _plain(
                chance, chance.choice(mine), at + again * 7200.0, "collective_hang", chain=f"2000/bug{number}"
            )
            found.append(event)
    return found


def _plain(chance: random.Random, node: str, at: float, kind: str, place: str = "", chain: str = "") -> NodeEvent:
    key = f"{kind}:{node}:{at:.0f}:{chance.random()}"
    return NodeEvent(key=key, node=node, kind=kind, at=at, what=f"{kind} of {node}", place=place, chain=chain)


def judge(seed: int, threshold: float = SUSPECT_FROM, world: World = WORLD) -> Score:
    """What the ledger says of each node whenever its third event within 14 days, or a further one, is in."""
    events, lemons = year(seed, world)
    verdicts: Counter[str] = Counter()
    for node, own in by_node(events).items():
        standing = [each for each in own if not each.why_not]
        dates = [each.event.at for each in standing]
        thirds = [n for n in range(SAY_FROM - 1, len(dates)) if dates[n] - dates[n - SAY_FROM + 1] <= WINDOW_S]
        if node not in lemons:
            said = [suspicion_of(node, standing[: n + 1], dates[n]).score >= threshold for n in thirds]
            verdicts["repeated"] += bool(thirds)
            verdicts["wrong"] += any(said)
            continue
        mine = [n for n, each in enumerate(standing) if each.event.key.endswith(OF_LEMON)]
        triples = zip(mine, mine[SAY_FROM - 1 :], strict=False)
        third = next((b for a, b in triples if dates[b] - dates[a] <= WINDOW_S), None)
        if third is None:
            continue
        verdicts["lemons"] += 1
        later = [suspicion_of(node, standing[: n + 1], dates[n]).score >= threshold for n in range(third, third + 3)]
        verdicts["found"] += later[0]
        verdicts["late"] += any(later) and not later[0]
    return Score(
        verdicts["lemons"], verdicts["found"], verdicts["late"], verdicts["wrong"], verdicts["repeated"], len(events)
    )


def years(number: int, first: int = 0, threshold: float = SUSPECT_FROM, world: World = WORLD) -> Score:
    """The same of several years, added up."""
    found = [judge(seed, threshold, world) for seed in range(first, first + number)]
    return Score(*(sum(getattr(each, name) for each in found) for name in Score.__dataclass_fields__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--years", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first year")
    parser.add_argument("--threshold", type=float, default=SUSPECT_FROM)
    parser.add_argument("--rate", type=float, default=RATE_PER_DAY, help="failures of a node a day")
    parser.add_argument("--part-known", type=float, default=PART_KNOWN)
    parser.add_argument("--lemon-days", type=float, default=LEMON_DAYS)
    given = parser.parse_args()
    world = World(given.rate, given.part_known, given.lemon_days)
    score = years(given.years, given.first, given.threshold, world)
    figures = {name: getattr(score, name) for name in Score.__dataclass_fields__}
    print(json.dumps(figures | {"precision": round(score.precision, 3), "recall": round(score.recall, 3)}))


if __name__ == "__main__":
    main()
