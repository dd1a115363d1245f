"""Orders that are read, and the status that is written."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.supervisor import (
    ORDER_PREFIX,
    PROTOCOL,
    STATUS_FILE,
    RestartOrder,
    SupervisorState,
    SupervisorStatus,
    order_fields,
    parse_status,
)
from slurm_watchdog.supervisor.service import (
    is_our_switch,
    other_writer,
    read_orders,
    write_status,
)

STATUS = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id="0", nodes=("n1",))


def put(place: Path, order: RestartOrder, age_s: float = 0.0) -> None:
    path = place / f"{ORDER_PREFIX}{order.decision}"
    path.write_text(compose_line({"by": "slurm-watchdog", "decision": order.decision, **order_fields(order)}))
    os.utime(path, (1e9 - age_s, 1e9 - age_s))


def test_orders_are_read_oldest_first_and_nothing_else_is_one(tmp_path: Path) -> None:
    newer, older = RestartOrder(decision="a", step_id="3", start=2), RestartOrder(decision="b", step_id="2", start=1)
    put(tmp_path, newer)
    put(tmp_path, older, age_s=60)
    (tmp_path / "kill").write_text(compose_line({"by": "slurm-watchdog", "decision": "c"}))
    (tmp_path / f"{ORDER_PREFIX}half").write_text('{"by": "slurm')
    (tmp_path / f"{ORDER_PREFIX}switch").write_text(compose_line({"by": "slurm-watchdog", "decision": "c"}))
    (tmp_path / f"{ORDER_PREFIX}link").symlink_to(tmp_path / f"{ORDER_PREFIX}a")
    os.mkfifo(tmp_path / f"{ORDER_PREFIX}fifo")
    assert read_orders(str(tmp_path)) == [(older, 1e9 - 60), (newer, 1e9)]
    assert read_orders(str(tmp_path / "not there")) == []


def test_status_is_replaced_whole_and_before_there_is_a_directory_it_is_not_written(tmp_path: Path) -> None:
    write_status(str(tmp_path / "not there"), STATUS)
    write_status(str(tmp_path), STATUS)
    assert parse_status((tmp_path / STATUS_FILE).read_bytes()) == STATUS
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE]


def test_status_of_a_job_that_is_too_large_names_no_nodes(tmp_path: Path) -> None:
    many = tuple(f"a-node-with-a-long-name-{number}" for number in range(4000))
    write_status(str(tmp_path), replace(STATUS, nodes=many))
    assert parse_status((tmp_path / STATUS_FILE).read_bytes()) == replace(STATUS, nodes=())


def test_what_is_no_order_is_left_out_whatever_it_is(tmp_path: Path) -> None:
    good = RestartOrder(decision="a", step_id="3", start=2)
    put(tmp_path, good)
    fields = {"by": "slurm-watchdog", "decision": "b", **order_fields(good)}
    hostile = {
        "deep": b"[" * 4096, "large": compose_line(fields).encode() + b" " * 10_000_000, "bytes": bytes(range(256)) * 8,
        "null": b"\0" * 4096, "list": b"[]", "empty": b"", "fields": b'{"by": 1, "decision": {}, "step": [], "start": -1}',
        "start": compose_line({**fields, "start": "9" * 200}).encode(),
        "avoid": compose_line({**fields, "avoid": "n1,$(reboot)"}).encode(),
        "step": compose_line({**fields, "step": "4294967290.0"}).encode(),
    }  # fmt: skip
    for name, data in hostile.items():
        (tmp_path / f"{ORDER_PREFIX}{name}").write_bytes(data)
    (tmp_path / f"{ORDER_PREFIX}directory").mkdir()
    (tmp_path / f"{ORDER_PREFIX}loop").symlink_to(f"{ORDER_PREFIX}loop")
    (tmp_path / f"{ORDER_PREFIX}\udcff").write_bytes(b"x")
    found = {order.decision for order, _ in read_orders(str(tmp_path))}
    assert found <= {"a", "b"} and "a" in found, "`b` has spaces behind it that are not read, and is one"


def test_only_a_kill_switch_of_ours_is_seen(tmp_path: Path) -> None:
    switch = tmp_path / "kill"
    assert not is_our_switch(str(switch))
    switch.write_text("stop\n")
    assert not is_our_switch(str(switch))
    switch.write_text(compose_line({"by": "slurm-watchdog", "decision": "c"}))
    assert is_our_switch(str(switch))


def test_another_supervisor_is_the_one_that_has_written_last_and_lives(tmp_path: Path) -> None:
    def other(status: SupervisorStatus, *living: int) -> int:
        write_status(str(tmp_path), status)
        return other_writer(str(tmp_path), 10, lambda pid: pid in living)

    assert other_writer(str(tmp_path), 10, lambda pid: True) == 0
    assert other(replace(STATUS, pid=10), 10) == 0
    assert other(replace(STATUS, pid=11), 11) == 11
    assert other(replace(STATUS, pid=11), 12) == 0
    assert other(replace(STATUS, pid=11, state=SupervisorState.OVER), 11) == 0
    (tmp_path / STATUS_FILE).write_bytes(b"[" * 100_000)
    assert other_writer(str(tmp_path), 10, lambda pid: True) == 0
