"""The two files between a supervisor and the controller: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.model.kill_switch import compose_line, parse_line
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import (
    BATCH_STEP,
    PROTOCOL,
    RestartOrder,
    SupervisorState,
    SupervisorStatus,
    in_use,
    left_behind,
    order_fields,
    order_in,
    parse_status,
)

ORDER = RestartOrder(decision="d1", step_id="3", start=2, avoid=("n2", "gpu-17.rack-4"), grace_s=1, why="it hangs")


def line_of(order: RestartOrder) -> str:
    return compose_line({"by": "slurm-watchdog", "why": order.why, "decision": order.decision, **order_fields(order)})


def test_order_is_read_back_from_its_line() -> None:
    fields = parse_line(line_of(ORDER))
    assert fields is not None
    assert order_in(fields) == ORDER


def test_order_about_the_batch_step_is_read_back_and_one_without_a_start_is_none() -> None:
    fields = parse_line(line_of(replace(ORDER, step_id=BATCH_STEP)))
    assert fields is not None
    assert (order_in(fields).step_id, order_in(fields).start) == ("batch", 2)
    with pytest.raises(ValueError, match="no start"):
        order_in(fields | {"start": ""})


def test_a_kill_switch_is_no_order_and_keeps_its_four_fields() -> None:
    line = compose_line({"by": "slurm-watchdog", "why": "w", "incident": "i", "decision": "d"})
    fields = parse_line(line)
    assert fields is not None
    assert set(fields) == {"by", "why", "incident", "decision"}
    with pytest.raises(ValueError, match="no step"):
        order_in(fields)


@pytest.mark.parametrize(
    "order",
    [
        RestartOrder(decision="d", step_id="extern", start=1),
        RestartOrder(decision="d", step_id="0", start=1, avoid=("n1;rm",)),
        RestartOrder(decision="d", step_id="0", start=1, avoid=tuple(f"node{n:04}" for n in range(60))),
    ],
)
def test_what_no_line_can_say_is_no_order(order: RestartOrder) -> None:
    with pytest.raises(ValueError, match=r"no step or node|too many"):
        order_fields(order)


def test_status_is_read_back_and_garbage_or_another_protocol_is_refused() -> None:
    status = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id="0", nodes=("n1",))
    assert parse_status(msgspec.json.encode(status)) == status
    for data in (b"", b"{", b"[" * 100_000, msgspec.json.encode(replace(status, protocol=9))):
        with pytest.raises(ValueError, match="supervisor"):
            parse_status(data)


def test_a_batch_host_that_is_a_spare_counts_for_its_logs_and_for_no_rank() -> None:
    job = SlurmJob(job_id="7", state="RUNNING", nodes=("n1", "n2", "n3"), batch_host="n1")
    status = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, nodes=("n2", "n3"))
    assert (in_use(job, status), left_behind(job, status)) == (("n1", "n2", "n3"), {"n1"})
    assert (in_use(job, None), left_behind(job, None)) == (job.nodes, frozenset())
