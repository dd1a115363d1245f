"""The ledger of nodes: what is written down, what is taken back, and what outlives the controller."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import convert

from slurm_watchdog.controller.node_history.suspicion import DAY_S, FORGOTTEN_S
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import Culprit, IncidentKind
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.observations import NodeEvent as LinkLine
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode
from tests.builders.node_past import GPU, NOW, a_ledger, event
from tests.builders.notices import INCIDENT, replace
from tests.builders.views import process, slurm_job

FAULT = replace(
    INCIDENT, id="f1", kind=IncidentKind.GPU_FAULT, subject=f"gpu:{GPU}", opened_at=NOW - 60.0,
    culprits=(Culprit(node="n1", gpu_uuid=GPU),), summary="Xid 79",
)  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    found = Journal(f"sqlite:///{tmp_path / 'journal.sqlite'}")
    yield found
    found.close()


def kinds(journal: Journal, node: str = "n1") -> list[tuple[str, str]]:
    return [(each.kind, each.withdrawn_why) for each in journal.node_events.of(node=[node])]


def test_an_incident_counts_once_however_often_it_is_reported_and_after_a_restart(journal: Journal) -> None:
    for _ in range(2):
        ledger = a_ledger(journal)
        for number in range(5):
            ledger.note_incident(replace(FAULT, summary=f"Xid 79, {number} times"))
    assert kinds(journal) == [("gpu_fault", "")]
    (suspicion,) = a_ledger(journal).suspicions()
    assert (suspicion.node, suspicion.place, suspicion.recent) == ("n1", GPU, 1)


def test_an_incident_that_another_one_explains_is_withdrawn_for_good(journal: Journal) -> None:
    ledger = a_ledger(journal)
    ledger.note_incident(FAULT)
    ledger.note_incident(replace(FAULT, inhibited_by="outage"))
    ledger.note_incident(FAULT)
    assert kinds(journal) == [("gpu_fault", "incident outage explains it")]
    assert ledger.suspicions() == []


def test_an_incident_that_names_another_node_now_is_held_against_that_one(journal: Journal) -> None:
    ledger = a_ledger(journal)
    ledger.note_incident(FAULT)
    ledger.note_incident(replace(FAULT, culprits=(Culprit(node="n2"),)))
    assert [each.node for each in ledger.suspicions()] == ["n2"]
    ledger.note_incident(FAULT)
    assert [each.node for each in ledger.suspicions()] == ["n1"]


def test_a_restart_that_left_the_node_out_and_went_well_is_proof(journal: Journal) -> None:
    hang = replace(INCIDENT, opened_at=NOW - 600.0)
    ledger = a_ledger(journal, {"7": slurm_job(nodes=("n2", "n3"))})
    ledger.note_incident(hang)
    before = ledger.suspicions()[0].score
    ledger.note_restart(hang, ("n1",))
    ledger.note_restart(hang, ("n1",))
    (after,) = ledger.suspicions()
    assert before < after.score <= 1.0 and after.recent == 1


def test_a_restart_after_which_the_job_is_on_the_node_again_proves_nothing(journal: Journal) -> None:
    ledger = a_ledger(journal)
    ledger.note_restart(INCIDENT, ("n1",))
    assert ledger.suspicions() == []


def drained(reason: str, node: str = "n1", at: float | None = NOW - 50.0) -> SlurmNode:
    return SlurmNode(name=node, address="", state="IDLE+DRAIN", reason=reason, reason_at=at, reason_user="root")


@pytest.mark.parametrize(
    ("node", "number"),
    [
        (drained("NHC: nvlink down"), 1),
        (drained("slurm-watchdog: hang"), 0),
        (drained("Maintenance on Monday"), 0),
        (drained(""), 0),
        (drained("Kill task failed", at=None), 0),
        (SlurmNode(name="n1", address="", state="IDLE", reason="NHC: old", reason_at=NOW), 0),
    ],
)
def test_a_drain_by_others_for_a_fault_is_an_event_once(journal: Journal, node: SlurmNode, number: int) -> None:
    ledger = a_ledger(journal)
    ledger.note_drains([node])
    ledger.note_drains([node])
    assert len(kinds(journal)) == number


def with_gpus(node: str, *uuids: str) -> Report:
    return Report(
        node=node,
        boot_id="b",
        agent_id="a",
        sequence=1,
        gpus=tuple(Gpu(index=n, uuid=uuid) for n, uuid in enumerate(uuids)),
    )


def test_a_gpu_that_moves_takes_its_past_along(journal: Journal) -> None:
    ledger = a_ledger(journal)
    ledger.note_incident(FAULT)
    ledger.note_report(with_gpus("n1", GPU, "GPU-other"))
    assert [kind for kind, _ in kinds(journal, "n1")] == ["gpu_fault"]
    for each in (ledger, a_ledger(journal)):
        each.note_report(with_gpus("n9", GPU))
        assert [found.node for found in each.suspicions()] == ["n9"]
    assert [each.event.kind for each in ledger.history("n9")] == ["gpu_fault"]


@pytest.mark.parametrize(
    ("seen", "processes", "number"),
    [
        ({"device": "mlx5_0"}, True, 1),
        ({"device": "mlx5_0"}, False, 0),
        ({"device": "mlx5_0", "backlog": True}, True, 0),
        ({"name": "oom_kill"}, True, 0),
    ],
    ids=["under a job", "no job there", "from before the agent", "no link"],
)
def test_a_link_that_falls_is_one_event_however_often_it_flaps(
    journal: Journal, seen: dict[str, object], processes: bool, number: int
) -> None:
    ledger = a_ledger(journal)
    line = {"source": "kernel_log", "name": "nic_dead", "severity": "critical", "age_s": 3.0, **seen}
    fallen = convert(line, LinkLine)
    report = Report(
        node="n1",
        boot_id="b",
        agent_id="a",
        sequence=1,
        processes=(process(0),) if processes else (),
        node_events=(fallen, fallen),
    )
    ledger.note_report(report)
    ledger.note_report(report)
    found = journal.node_events.of(node=["n1"])
    assert [(each.kind, each.place) for each in found] == [("link_down", "link:mlx5_0")] * number


def test_a_renamed_node_keeps_its_past(journal: Journal) -> None:
    a_ledger(journal).note_incident(FAULT)
    ledger = a_ledger(journal, renamed={"n1": "rack1-n1"})
    assert [each.node for each in ledger.suspicions()] == ["rack1-n1"]
    assert len(ledger.history("rack1-n1")) == 1


def test_what_is_old_is_forgotten_in_memory_and_later_in_the_journal(journal: Journal) -> None:
    dates = [NOW]
    ledger = a_ledger(journal, wall=lambda: dates[0])
    ledger.record(event(0.0))
    dates[0] += FORGOTTEN_S + DAY_S
    ledger.record(event(0.0, "n2", at=dates[0]))
    assert [each.node for each in ledger.events()] == ["n2"]
    assert len(ledger.history("n1")) == 1, "the journal has it for two years"
    dates[0] += 2 * 365 * DAY_S
    ledger.record(event(0.0, "n3", at=dates[0]))
    assert ledger.history("n1") == []


def test_an_upgraded_journal_of_schema_4_has_its_ledger_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    first = Journal(f"sqlite:///{path}")
    first.save_incident(INCIDENT)
    first.close()
    with sqlite3.connect(path) as old:
        old.execute("DROP TABLE node_events")
        old.execute("UPDATE journal_schema SET version = 4")
    old.close()
    for _ in range(2):
        upgraded = Journal(f"sqlite:///{path}")
        a_ledger(upgraded).note_incident(FAULT)
        assert kinds(upgraded) == [("gpu_fault", "")]
        assert upgraded.incident(INCIDENT.id) == INCIDENT
        upgraded.close()
