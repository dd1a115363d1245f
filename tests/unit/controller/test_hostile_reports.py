"""One hostile node, and one user with jobs everywhere: what the controller keeps of their reports levels off,
others keep theirs, and what was left out is said. The rows are derived from the types of the wire: a field
that is added is tried here by itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from slurm_watchdog.base.capped import CAPS, LeftOut, put_newest
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.door import BOUNDS, Admitted, Stranger, admit
from slurm_watchdog.model.observations import Checkpoint, Role
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.memory_held import held
from tests.builders.views import process, slurm_job

HOSTILE, HONEST = "n1", "n2"
ROWS_A_ROUND = 120
WARM, ROUNDS = 16, 21
FIXED: dict[str, Any] = {
    "version": 1,
    "age_s": 0.0,
    "changes": None,
    "node": HOSTILE,
    "left_out": (),
    "results": (),
    "same_as": 0,
}
"""Of a report, what makes it one that is taken; results answer questions and are kept nowhere."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "job_id": ("1", "2"), "uid": (1500, 1501), "role": tuple(each.value for each in Role), "state": ("S", "D"), "mount": (), "backlog": (False,),
}  # fmt: skip
"""Fields of rows that would otherwise lead nowhere, with what they take in turn; all others are never the
same twice."""


@cache
def schema(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def hostile(kind: inspect.Type, name: str, number: int) -> Any:
    """Plain data for a type in which everything is as new as it can be."""
    if CHOICES.get(name) and not isinstance(kind, inspect.EnumType):
        return CHOICES[name][number % len(CHOICES[name])]
    match kind:
        case inspect.StructType():
            fields = {each.encode_name: hostile(each.type, each.name, number) for each in kind.fields}
            if kind.array_like:
                return list(fields.values())
            return fields if kind.tag_field is None else {kind.tag_field: kind.tag, **fields}
        case inspect.UnionType():
            kinds = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            return hostile(kinds[number % len(kinds)], name, number)
        case inspect.CollectionType():
            return [hostile(kind.item_type, name, 3 * number + more) for more in range(3)]
        case inspect.TupleType():
            return [hostile(each, name, number) for each in kind.item_types]
        case inspect.DictType():
            return {str(number): hostile(kind.value_type, name, number)}
        case inspect.EnumType():
            words = list(kind.cls)
            return words[number % len(words)].value
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.BoolType():
            return number % 2 == 0
        case inspect.IntType():
            return number // 3 if name == "pids" else number  # those of processes of the same report
        case inspect.FloatType():
            return float(number)
        case inspect.BytesType():
            return b"bytes"
        case _:
            return f"{name}-{number}"


@cache
def report(sequence: int) -> Report:
    """A report of which each list has rows that were never seen before."""
    info = schema(Report)
    assert isinstance(info, inspect.StructType)
    fields: dict[str, Any] = {}
    for field in info.fields:
        if field.name in FIXED:
            fields[field.name] = FIXED[field.name]
        elif isinstance(field.type, inspect.CollectionType):
            numbers = range(sequence * ROWS_A_ROUND, (sequence + 1) * ROWS_A_ROUND)
            fields[field.name] = [hostile(field.type.item_type, field.name, number) for number in numbers]
        else:
            fields[field.name] = {inspect.StrType: "x", inspect.BytesType: b"x"}.get(type(field.type), 5)
    fields["sequence"] = sequence
    return msgspec.convert(fields, Report)


def state() -> ClusterState:
    found = ClusterState(silent_after_s=15, report_lifetime_s=60)
    jobs = (
        slurm_job(job_id="1", nodes=(HOSTILE,), uid=1500),
        slurm_job(job_id="2", nodes=(HOSTILE, HONEST), uid=1501),
    )
    nodes = tuple(SlurmNode(name=name, address="", state="ALLOCATED") for name in (HOSTILE, HONEST))
    found.apply_slurm(SlurmView(jobs=jobs, nodes=nodes), 0.0)
    return found


def feed(cluster: ClusterState, rounds: range) -> None:
    for sequence in rounds:
        assert cluster.apply_report(report(sequence), 1.0 + sequence) == "accepted"


def test_every_list_of_a_report_has_a_bound() -> None:
    info = schema(Report)
    assert isinstance(info, inspect.StructType)
    lists = {field.name for field in info.fields if isinstance(field.type, inspect.CollectionType)}
    assert lists == BOUNDS.keys() <= CAPS.keys()


def rows_of(kind: str, owners: list[tuple[str, int]]) -> tuple[Any, ...]:
    """Rows of this kind, each of the job and the user of its place."""
    info = schema(Report)
    assert isinstance(info, inspect.StructType)
    lists = (field.type for field in info.fields if field.name == kind)
    (item,) = (each.item_type for each in lists if isinstance(each, inspect.CollectionType))
    plain = [hostile(item, kind, number) for number in range(len(owners))]
    for row, (job_id, uid) in zip(plain, owners, strict=True):
        if isinstance(row, dict):
            row.update(
                {name: value for name, value in (("job_id", job_id), ("uid", uid), ("restarts", 0)) if name in row}
            )
    return tuple(
        getattr(
            msgspec.convert({"node": HOSTILE, "boot_id": "b", "agent_id": "a", "sequence": 1, kind: plain}, Report),
            kind,
        )
    )


def at_the_door(kind: str, owners: list[tuple[str, int]], stranger: Stranger | None = None) -> tuple[Admitted, LeftOut]:
    jobs = {
        "1": slurm_job(job_id="1", nodes=(HOSTILE,), uid=1500),
        "2": slurm_job(job_id="2", nodes=(HOSTILE,), uid=1501),
    }
    said, left_out = (
        Report(node=HOSTILE, boot_id="b", agent_id="a", sequence=1, **{kind: rows_of(kind, owners)}),
        LeftOut(),
    )
    return admit(said, jobs.get, stranger, lambda node: (), left_out), left_out


@pytest.mark.parametrize("kind", BOUNDS)
def test_of_too_many_rows_of_one_job_and_user_those_of_another_one_are_taken_and_the_rest_is_counted(kind: str) -> None:
    most = BOUNDS[kind].rows
    found, left_out = at_the_door(kind, [*[("1", 1500)] * (most + 50), ("2", 1501)])
    taken = getattr(found.report, kind)
    assert len(taken) <= most and left_out.totals[kind] == most + 51 - len(taken)
    (said,) = left_out.lately(0.0)
    assert (said.what, said.whose, said.uid) in ((kind, HOSTILE, 1500), (kind, HOSTILE, None))
    owners = [(getattr(row, "job_id", None), getattr(row, "uid", None)) for row in taken]
    if (None, None) not in owners:
        assert owners[-1][0] in ("2", None) and owners[-1][1] in (1501, None)


@pytest.mark.parametrize("kind", [name for name, bound in BOUNDS.items() if bound.claim is not None])
def test_a_row_of_each_kind_about_another_nodes_job_is_dropped(kind: str) -> None:
    found, left_out = at_the_door(kind, [("1", 1500), ("2", 1501)], lambda node, job_id: job_id == "2")
    assert [row.job_id for row in getattr(found.report, kind)] == ["1"]
    assert found.dropped == 1 and not any(left_out.totals.values())


def test_state_of_a_node_that_says_new_things_in_every_report_levels_off() -> None:
    cluster = state()
    feed(cluster, range(1, WARM))
    warm = held(cluster, set())
    feed(cluster, range(WARM, ROUNDS))
    assert held(cluster, set()) <= 1.02 * warm


def test_directories_that_a_hostile_node_names_push_out_none_of_an_honest_one() -> None:
    cluster, honest = state(), Checkpoint(job_id="2", directory="/ours", step=1, path="/ours/1")
    for sequence in range(1, 11):
        theirs = tuple(Checkpoint(job_id="2", directory=f"/{sequence}/{n}", step=2, path="/x") for n in range(512))
        for node, rows in ((HONEST, (honest,)), (HOSTILE, theirs)):
            said = Report(node=node, boot_id="b", agent_id="a", sequence=sequence, checkpoints=rows)
            assert cluster.apply_report(said, 5.0 * sequence) == "accepted"
        assert "/ours" in cluster.runs._runs["2"].disk_steps


def test_state_says_what_it_left_out_of_a_hostile_node_and_keeps_what_an_honest_one_says() -> None:
    cluster = state()
    ranks = tuple(process(pid=n, start_ticks=n, job_id="2", rank=n, uid=1501) for n in range(1, 9))
    honest = Report(node=HONEST, boot_id="b", agent_id="a", sequence=1, processes=ranks)
    for sequence in range(1, ROUNDS):
        feed(cluster, range(sequence, sequence + 1))
        cluster.apply_report(msgspec.structs.replace(honest, sequence=sequence), 1.0 + sequence)
    view = cluster.job_view("2", 1.0 + ROUNDS)
    assert view is not None
    assert [p.process.pid for p in view.processes if p.node == HONEST and p.alive] == list(range(1, 9))
    said = {each.what for each in cluster.left_out.lately(1.0 + ROUNDS)}
    expected = {"checkpoints", "filesystems", "gpus", "hung_probes", "links", "mounts", "pressures", "problems"}
    assert expected <= said, expected - said
    assert all(cluster.left_out.totals[what] > 0 for what in expected)


def test_of_more_entries_than_a_container_takes_the_oldest_goes_and_what_was_touched_stays() -> None:
    known = dict[str, int]()
    for number, key in enumerate(("a", "b", "a", "c")):
        put_newest(known, key, number, 2)
    assert known == {"a": 2, "c": 3}


def test_left_out_of_something_without_a_name_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        LeftOut().note("anything", "n1")
    assert all(text for text in CAPS.values())
