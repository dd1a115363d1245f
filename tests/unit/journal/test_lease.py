"""One controller at a time: the lease on a real PostgreSQL, and the journal behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, address_of
from slurm_watchdog.journal.error import NewerRelease
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.journal.lease import EXIT_CODE, MARGIN_S, Lease
from slurm_watchdog.journal.tables import SCHEMA, SCHEMA_VERSION
from slurm_watchdog.model.actions import Operation
from tests.builders.notices import DECISION, INCIDENT

SHORT_S, LONG_S = MARGIN_S + 0.5, 600.0


def two(url: str, first_s: float = LONG_S, second_s: float = LONG_S) -> tuple[Lease, Lease]:
    """Two controllers' leases, of which nobody has one: for how long the first believes in its own, and after what
    time the second takes it."""
    leases = Lease(url, "mgmt1:9765", first_s), Lease(url, "mgmt2:9765", second_s)
    for lease in leases:
        lease.prepare()
    return leases


def test_one_of_two_has_it_until_it_is_given_back(postgresql: Callable[[], str]) -> None:
    one, other = two(postgresql())
    assert one.take() and one.is_held()
    assert not other.take() and not other.is_held()
    assert (other.read().epoch, other.read().holder) == (one.epoch, "mgmt1:9765")
    assert one.renew() and one.age_s() < 1.0
    one.close()
    assert not one.is_held()
    assert other.take() and other.epoch == one.epoch + 1
    other.close()


def test_a_journal_whose_lease_was_taken_takes_nothing_more(postgresql: Callable[[], str]) -> None:
    url = postgresql()
    one, other = two(url)
    assert one.take()
    journal = Journal(url, partial(Database, check=one.check))
    journal.add_decision(DECISION)
    one.close()
    assert other.take()
    one.until = time.monotonic() + 600  # it was stopped after it had looked at its clock
    with pytest.raises(JournalError, match="does nothing more"):
        journal.operation_intent("d1", Operation.REQUEUE_HOLD, 1, 1.0)
    with pytest.raises(JournalError, match="does nothing more"), journal.together():
        journal.save_incident(INCIDENT)
    journal.close()
    after = Journal(url, partial(Database, check=other.check))
    (run,) = after.open_actions()
    assert not run.records and not after.incidents()
    after.close()
    other.close()


def test_nobody_takes_it_in_the_middle_of_a_transaction_and_renewing_waits_for_none(
    postgresql: Callable[[], str],
) -> None:
    url = postgresql()
    one, other = two(url, second_s=SHORT_S)
    assert one.take()
    database = Database(url, check=one.check)
    taken: list[float] = []

    def take() -> None:
        while not other.take():
            time.sleep(0.05)
        taken.append(time.monotonic())

    thread = threading.Thread(target=take)
    with database.transaction():
        assert one.renew()
        thread.start()
        time.sleep(SHORT_S + 0.5)  # it has expired, and its transaction has not ended
        assert not taken
        ended_at = time.monotonic()
    thread.join(10)
    assert taken[0] >= ended_at
    database.close()
    one.close()
    other.close()


def test_who_can_not_renew_ends_before_another_may_begin(postgresql: Callable[[], str]) -> None:
    one, other = two(postgresql(), SHORT_S, 2 * SHORT_S)
    ended: list[tuple[int, float]] = []
    assert one.take()
    one.epoch = -1  # no renewal works from now on
    one.keep(lambda code: ended.append((code, time.monotonic())))
    while not other.take():
        time.sleep(0.02)
    assert [code for code, _ in ended] == [EXIT_CODE]
    assert ended[0][1] < time.monotonic()
    other.close()


def test_before_anything_is_changed_in_slurm_the_database_is_asked_for_a_clock_may_have_stopped(
    postgresql: Callable[[], str],
) -> None:
    one, other = two(postgresql())
    assert one.take() and one.confirm()
    one.close()
    assert other.take()
    one.until = time.monotonic() + 600  # its virtual machine was paused, and so was its clock
    assert one.is_held() and not one.confirm() and not one.is_held()
    other.close()


def test_the_journal_of_a_later_release_is_not_taken_over(postgresql: Callable[[], str]) -> None:
    url = postgresql()
    one, other = two(url)
    assert one.take()
    Journal(url, partial(Database, check=one.check)).close()
    database = Database(url, check=one.check)
    database.change(sa.update(SCHEMA).values(version=SCHEMA_VERSION + 1))
    database.close()
    one.close()
    with pytest.raises(NewerRelease, match=f"schema version {SCHEMA_VERSION + 1}, this program knows {SCHEMA_VERSION}"):
        other.take()
    assert not other.is_held() and other.read().holder == ""
    other.close()


def test_only_a_postgresql_is_shared() -> None:
    assert address_of("postgresql+psycopg://mgmt/journal").get_backend_name() == "postgresql"
    with pytest.raises(JournalError, match=r"controller\.journal_url"):
        address_of("nonsense")


def test_a_database_that_is_not_there_is_said_without_its_password() -> None:
    with pytest.raises(JournalError, match="failed") as caught:
        Lease("postgresql+psycopg://w:secret@127.0.0.1:1/journal", "mgmt1:9765").prepare()
    assert "secret" not in str(caught.value)
