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
from slurm_watchdog.supervisor.mailbox import misses_agent, read_orders, write_status
from slurm_watchdog.supervisor.state import Ordered

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
    assert read_orders(str(tmp_path)) == [Ordered(older, 1e9 - 60), Ordered(newer, 1e9)]
    assert read_orders(str(tmp_path / "not there")) == []


def test_an_agent_that_has_made_no_directory_within_a_minute_is_missing(tmp_path: Path) -> None:
    assert misses_agent(str(tmp_path / "7.0"), 59) is None
    assert misses_agent(str(tmp_path / "7.0"), 60) is True
    assert misses_agent(str(tmp_path), 0) is False


def test_status_is_replaced_whole_and_before_there_is_a_directory_it_is_not_written(tmp_path: Path) -> None:
    write_status(str(tmp_path / "not there"), STATUS)
    write_status(str(tmp_path), STATUS)
    assert parse_status((tmp_path / STATUS_FILE).read_bytes()) == STATUS
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE]


def test_status_of_a_job_that_is_too_large_names_no_nodes(tmp_path: Path) -> None:
    many = tuple(f"a-node-with-a-long-name-{number}" for number in range(4000))
    write_status(str(tmp_path), replace(STATUS, nodes=many))
    assert parse_status((tmp_path / STATUS_FILE).read_bytes()) == replace(STATUS, nodes=())
