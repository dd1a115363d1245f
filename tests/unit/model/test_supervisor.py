"""The lines between a supervisor and its agent: what is said is read back, and nothing else is believed."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import (
    BATCH_STEP,
    PROTOCOL,
    FromAgent,
    FromSupervisor,
    RestartOrder,
    SupervisorState,
    SupervisorStatus,
    from_agent,
    from_supervisor,
    in_use,
    left_behind,
)

ORDER = RestartOrder(decision="d1", step_id="3", start=2, avoid=("n2", "gpu-17.rack-4"), grace_s=1, why="it hangs")


def line(**said: object) -> bytes:
    return msgspec.json.encode(FromAgent(**said))  # type: ignore[arg-type]


def test_order_is_read_back_from_its_line() -> None:
    for order in (ORDER, replace(ORDER, step_id=BATCH_STEP), replace(ORDER, resume_from="/d/run's/iter 5")):
        assert from_agent(line(order=order, given_at=7.0)) == FromAgent(order=order, given_at=7.0)


@pytest.mark.parametrize(
    "order",
    [
        RestartOrder(decision="d", step_id="extern", start=1),
        RestartOrder(decision="d", step_id="0", start=1, avoid=("n1;rm",)),
        RestartOrder(decision="d", step_id="0", start=1, resume_from="relative/iter_0000500"),
    ],
)
def test_what_no_supervisor_can_do_is_no_order(order: RestartOrder) -> None:
    with pytest.raises(ValueError, match=r"no step or node|absolute path"):
        from_agent(line(order=order))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"\0" * 4096, bytes(range(256)), b"[]", b'{"order": {"decision": 1}}']
)
def test_a_line_that_says_nothing_is_none_of_either(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an agent"):
        from_agent(data)
    with pytest.raises(ValueError, match="not a supervisor"):
        from_supervisor(data)


def test_status_is_read_back_and_another_protocol_or_an_invalid_node_is_refused() -> None:
    status = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id="0", nodes=("n1",))
    said = FromSupervisor(restarts=2, status=status)
    assert from_supervisor(msgspec.json.encode(said)) == said
    for wrong in (replace(status, protocol=9), replace(status, spares=("n1,n2",))):
        with pytest.raises(ValueError, match="supervisor"):
            from_supervisor(msgspec.json.encode(replace(said, status=wrong)))


def test_a_batch_host_that_is_a_spare_counts_for_its_logs_and_for_no_rank() -> None:
    job = SlurmJob(job_id="7", state="RUNNING", nodes=("n1", "n2", "n3"), batch_host="n1")
    status = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, nodes=("n2", "n3"))
    assert (in_use(job, status), left_behind(job, status)) == (("n1", "n2", "n3"), {"n1"})
    assert (in_use(job, None), left_behind(job, None)) == (job.nodes, frozenset())
