"""Which nodes look bad before a start: what one says of itself, and what silence means."""

from __future__ import annotations

import json

import pytest

from slurm_watchdog.supervisor.preflight import LOOK_MARK, NodeLook, look_s, parse_look, suspects

NODES = ("n1", "n2", "n3", "n4")


def look(node: str, **facts: object) -> NodeLook:
    return NodeLook(**{"node": node, "gpus": 8, **facts})  # type: ignore[arg-type]


def judged(*odd: NodeLook, silent: tuple[str, ...] = ()) -> dict[str, str]:
    """The others are well."""
    by_node = {each.node: each for each in odd}
    return suspects(NODES, [by_node.get(node, look(node)) for node in NODES if node not in silent])


def test_nodes_that_are_well_are_no_suspects() -> None:
    assert judged() == {}
    assert judged(look("n1", gpus=None)) == {}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"gpus": 7}, "NVML sees 7 GPUs, and most of the nodes have 8"),
        ({"gpus": 7, "expected": 8}, "NVML sees 7 GPUs, and Slurm gave the job 8"),
        ({"gpus": None, "gpu_problem": "NVML says: Driver Not Loaded"}, "NVML says: Driver Not Loaded"),
        ({"problems": {"/scratch": "Stale file handle"}}, "/scratch: Stale file handle"),
        ({"problems": {"the site's check": "ended with 3: no cable"}}, "the site's check ended with 3: no cable"),
        ({"problems": {"the site's check": "does not answer"}}, "the site's check does not answer"),
    ],
)  # fmt: skip
def test_a_node_that_says_so_is_a_suspect(facts: dict[str, object], why: str) -> None:
    assert judged(look("n2", **facts)) == {"n2": why}


def silent_of(count: int, silent: int, spares: int) -> int:
    """How many are accused."""
    nodes = [f"n{number}" for number in range(count)]
    found = suspects(nodes, [look(node) for node in nodes[silent:]], spares=spares)
    assert set(found.values()) <= {"it did not answer, and the others did"}
    return len(found)


@pytest.mark.parametrize(
    ("count", "silent", "spares", "accused"),
    [(100, 10, 0, 10), (100, 11, 0, 0), (100, 49, 4, 0), (4, 1, 1, 1), (4, 1, 0, 0), (2, 1, 1, 1), (4, 4, 4, 0)],
)
def test_silence_is_a_nodes_fault_where_nearly_all_answer_or_spares_replace_it(
    count: int, silent: int, spares: int, accused: int
) -> None:
    assert silent_of(count, silent, spares) == accused


def test_answers_of_many_nodes_are_waited_for_longer() -> None:
    assert [look_s(count) for count in (1, 64, 128, 1024)] == [5, 5, 6, 9]


def test_a_filesystem_that_fails_everywhere_is_no_nodes_fault() -> None:
    for said in ("Stale file handle", "does not answer"):
        assert suspects(NODES, [look(node, problems={"/scratch": said}) for node in NODES]) == {}


def test_a_node_without_gpus_among_others_without_has_lost_none() -> None:
    assert suspects(NODES, [look(node, gpus=None, gpu_problem="NVML says: x") for node in NODES]) == {}
    assert suspects(NODES, [look(node, gpus=4, expected=2) for node in NODES]) == {}


def test_a_line_of_the_look_is_read_and_others_are_not() -> None:
    line = LOOK_MARK + json.dumps({"node": "n1", "problems": {"/x": "y"}})
    assert parse_look(line) == NodeLook(node="n1", problems={"/x": "y"})
    assert parse_look(f" 0: {line}") == NodeLook(node="n1", problems={"/x": "y"})
    for other in ("hello", LOOK_MARK, LOOK_MARK + "{", LOOK_MARK + "[]", LOOK_MARK + json.dumps({"gpus": 1})):
        assert parse_look(other) is None
