"""Whether `test-nodes` names the node that is slow, and none where all are well: on a real Slurm whose nodes are
throttled (root, half an hour; a machine that does nothing else).

One machine carries all nodes, so they are tested one after the other.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from lab.bench.figures import Figures, say
from tests.rig import throttle
from tests.rig.cluster import Cluster
from tests.rig.commands import commit
from tests.rig.node_tests import TestedNodes, bad_nodes

RESULTS = Path(__file__).parents[1] / "results/bad_nodes.json"
NODES = 5
"""The fewest with four peers each."""
PARTS = "cpu,disk,mount,network"
"""Memory is shared by all nodes of one machine, and no figure of it is compared in a virtual one."""
TRIES = 20
MOST_S = 120.0

Throttle = Callable[[Cluster, str], contextlib.AbstractContextManager[None]]
THROTTLES: dict[str, tuple[str, Throttle]] = {
    "cpu": ("half of its two cores (CPU quota)", lambda cluster, node: throttle.cpu_quota(cluster, node, 1.0)),
    "disk": ("a local disk of 5 MB/s (blkio)", lambda cluster, node: throttle.slow_disk(cluster, node, 5_000_000)),
    "rate": ("a link that sends at 200 Mb/s (tbf)", lambda cluster, node: throttle.link_rate(cluster, node, "200mbit")),
    "delay": ("a link with 2 ms more each way", lambda cluster, node: throttle.link_delay(cluster, node, 0.002)),
}


def run(figures: Figures, tries: int, names: list[str], *, write: bool) -> None:
    """`tries` of each: a throttled node, in turn of each kind and each node, and none."""
    throttles = {name: each for name, each in THROTTLES.items() if not names or name in names}
    right: Counter[str] = Counter()
    wrong: list[str] = []
    healthy = 0
    times: list[float] = []
    with Cluster(nodes=NODES) as cluster, throttle.before_others(cluster):
        tested = TestedNodes(cluster)
        for number in range(tries):
            kind = list(throttles)[number % len(throttles)]
            node = cluster.nodes[(number // len(throttles)) % NODES]
            with throttles[kind][1](cluster, node):
                named, took_s, why = _once(tested)
            say(f"{number + 1} of {tries}: {kind} on {node}: named {named} in {took_s:.0f} s: {why}")
            right[kind] += named == [node]
            wrong += [] if named == [node] else [f"{kind} on {node}: {named}: {why}"]
            times.append(took_s)
            named, took_s, why = _once(tested)
            say(f"{number + 1} of {tries}: healthy: named {named} in {took_s:.0f} s: {why}")
            healthy += not named
            wrong += [f"healthy: {named}: {why}"] if named else []
            times.append(took_s)
    figures.add("test_nodes_throttled_named", sum(right.values()), f"of {tries}", at_least=tries)
    figures.add("test_nodes_healthy_nobody", healthy, f"of {tries}", at_least=tries)
    figures.add("test_nodes_longest", max(times), "s", at_most=MOST_S)
    for each in wrong:
        say(each)
    if write:
        document = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": commit(),
            "nodes": NODES,
            "tries": tries,
            "healthy": healthy,
            "named": {name: right[name] for name in throttles},
            "words": {name: words for name, (words, _) in throttles.items()},
            "median_s": round(sorted(times)[len(times) // 2]),
            "longest_s": round(max(times)),
            "wrong": wrong,
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def _once(tested: TestedNodes) -> tuple[list[str], float, str]:
    """(nodes that are named, seconds, why)."""
    began = time.monotonic()
    code, document = tested.run(*tested.quick("--only", PARTS))
    took_s = time.monotonic() - began
    said = {
        each["node"]: [what for _, what in each.get("faults", ())] or each.get("unsure")
        for each in document["verdicts"]
    }
    reasons = [f"{node}: {what}" for node, what in said.items() if what]
    return bad_nodes(document), took_s, f"code {code} {'; '.join(reasons)[:1500]}"
