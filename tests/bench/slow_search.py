"""The search for the nodes that make a job slow, in simulated clusters: how many restarts it takes, and who is named."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import ceil, log2

from tests.bench.figures import Figures, say
from tests.builders.slow_clusters import LOOK_ALIKES, Searched, confirmed, search_cluster

SIZES = {48: 200, 384: 200, 4096: 60}
"""Nodes of the cluster, and searches in it."""
ALIKE = 1000
"""Searches with each look-alike."""
FEW_SPARES = 8
"""One node in so many is a spare where they are few."""


def run(figures: Figures) -> None:
    """Half of the nodes are spares: a slow node has to be named within ceil(log2 N) + 1 restarts; how long all of
    several take, and what few spares cost, is only told."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for nodes, tries in SIZES.items():
            bound = ceil(log2(nodes)) + 1
            for slow in (1, 2, 3):
                found = list(pool.map(partial(_half, nodes, slow), range(tries), chunksize=4))
                name = f"search.{nodes}_nodes.{slow}_slow"
                in_time = [
                    each for each in found if each.first_named_after is not None and each.first_named_after <= bound
                    and each.first_named <= each.slow
                ]  # fmt: skip
                figures.add(f"{name}.named_in_{bound}_restarts", 100 * len(in_time) / tries, "%", at_least=95)
                named = [{one.node for one in each.verdict.named} for each in found]
                wrong = sum(bool(names - each.slow) for names, each in zip(named, found, strict=True))
                figures.add(f"{name}.wrong_name", 100 * wrong / tries, "%", at_most=1)
                whole = sum(names == each.slow for names, each in zip(named, found, strict=True))
                figures.add(f"{name}.all_of_them_named", 100 * whole / tries, "%", at_least=95)
                figures.add(f"{name}.restarts_until_all.95_of_100", _share(found, 0.95), "restarts")
        for slow in (1, 2, 3):
            found = list(pool.map(partial(_by_place, slow), range(2 * SIZES[48]), chunksize=4))
            name = f"search.48_nodes.{slow}_slow.cost_differs_by_place"
            wrong = sum(bool({one.node for one in each.verdict.named} - each.slow) for each in found)
            figures.add(f"{name}.wrong_name", 100 * wrong / len(found), "%", at_most=1)
            in_time = [each for each in found if each.first_named and (each.first_named_after or 0) <= 7]
            figures.add(f"{name}.named_in_7_restarts", 100 * len(in_time) / len(found), "%", at_least=95)
        for like in filter(None, LOOK_ALIKES):
            for slow in (0, 1, 2):
                found = list(pool.map(partial(_alike, like, slow), range(ALIKE), chunksize=4))
                name = f"search.48_nodes.{slow}_slow.{like}"
                began = [each for each in found if each.restarts]
                wrong = [each for each in began if not confirmed(each) <= each.slow]
                figures.add(f"{name}.began", 100 * len(began) / ALIKE, "%")
                figures.add(f"{name}.wrong_name_confirmed", 100 * len(wrong) / max(1, len(began)), "%", at_most=1)
                figures.add(f"{name}.a_slow_node_confirmed", 100 * sum(map(bool, map(confirmed, found))) / ALIKE, "%")
        for nodes in (48, 384):
            found = list(pool.map(partial(_few, nodes), range(SIZES[nodes]), chunksize=4))
            name = f"search.{nodes}_nodes.1_slow.one_in_{FEW_SPARES}_is_a_spare"
            figures.add(f"{name}.restarts.median", _share(found, 0.5), "restarts")
            figures.add(f"{name}.restarts.95_of_100", _share(found, 0.95), "restarts")
            say(f"{nodes} nodes, few spares: {sum(each.verdict.over for each in found)} of {len(found)} over")


def _half(nodes: int, slow: int, seed: int) -> Searched:
    return search_cluster(nodes, nodes // 2, slow, seed)


def _by_place(slow: int, seed: int) -> Searched:
    """What a slow node costs differs by up to a quarter from run to run."""
    return search_cluster(48, 24, slow, seed, place=0.25)


def _alike(like: str, slow: int, seed: int) -> Searched:
    """Beside what else makes steps longer, and with no slow node because of that alone."""
    return search_cluster(48, 24, slow, seed, like=like)


def _few(nodes: int, seed: int) -> Searched:
    return search_cluster(nodes, nodes - nodes // FEW_SPARES, 1, seed)


def _share(found: list[Searched], share: float) -> float:
    return sorted(each.restarts for each in found)[round(share * len(found)) - 1]
