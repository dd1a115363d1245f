"""Two controllers, as processes, on one PostgreSQL: one is killed, one stopped and continued, while an agent reports."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from slurm_watchdog.agent.courier.process import controllers
from slurm_watchdog.agent.delivery.spool import Spool
from slurm_watchdog.journal.lease import EXIT_CODE
from slurm_watchdog.model.documents import Paused, PauseRequest, Status
from slurm_watchdog.model.report import Report
from tests.builders.controller_services import Service, seconds_until
from tests.builders.identity_files import controller_files, make_authority, node_files
from tests.builders.postgresql import postgresql_server
from tests.builders.sending import DrivenSender, link_to

BUSY_S = 30.0
"""For a failover on a machine that is busy with other tests: alone it takes 7 s."""
ANSWER_S = 3.0


@pytest.mark.timeout(240)
def test_of_two_controllers_one_acts_whatever_becomes_of_the_other_and_no_report_is_lost(tmp_path: Path) -> None:
    ca = make_authority(tmp_path / "ca", time.time())
    tls = controller_files(ca).directory
    counts: Counter[str] = Counter()
    with postgresql_server() as fresh:
        url = fresh()
        one = Service(tmp_path / "one", tls, url)
        seconds_until(one.is_active, "the first becomes the active one")
        other = Service(tmp_path / "other", tls, url)
        services = [one, other]
        urls = [f"https://127.0.0.1:{each.port}" for each in services]
        places = controllers("n1", "tls", node_files(ca, "n1", time.time()).directory, urls)
        sender = DrivenSender(Spool(10**7, 600), link_to(places, ANSWER_S), lambda each: counts.update([each]))
        sender.start()
        reports = 0

        def under_load(holds: Callable[[], object]) -> Callable[[], bool]:
            def look() -> bool:
                nonlocal reports
                reports += 1
                sender.put(Report(node="n1", boot_id="b", agent_id="a", sequence=reports))
                return bool(holds())

            return look

        try:
            # Between two renewals that a busy machine has delayed nobody holds the lease.
            seconds_until(lambda: f":{one.port}" in other.refusal(), "the second says who is active")
            assert "standby" in other.refusal()
            one.client.post(Paused, "/v1/pause", body=PauseRequest(reason="storage"))

            one.process.kill()
            took_s = seconds_until(under_load(other.is_active), "the standby takes over from one that was killed")
            assert took_s <= BUSY_S
            paused = other.client.get(Status, "/v1/status").paused
            assert paused is not None and paused.reason == "storage"

            one.process.wait(10)
            one.start()
            seconds_until(one.refusal, "the one that was killed is the standby now")
            other.process.send_signal(signal.SIGSTOP)
            took_s = seconds_until(under_load(one.is_active), "the standby takes over from one that does not move")
            assert took_s <= BUSY_S
            one.client.post(Paused, "/v1/resume")
            other.process.send_signal(signal.SIGCONT)
            assert other.process.wait(10) == EXIT_CODE
            assert one.is_active() and one.client.get(Status, "/v1/status").paused is None

            other.start()
            seconds_until(other.refusal, "the one that was stopped is the standby now")
            one.process.terminate()
            took_s = seconds_until(under_load(other.is_active), "a clean end hands it over")
            assert one.process.wait(30) == 0
            seconds_until(lambda: counts["sent"] == reports, "every report arrives")
            assert not counts["expired"] and not counts["rejected"]
            engine = sa.create_engine(url)
            with engine.connect() as sql:
                assert sql.exec_driver_sql("SELECT epoch FROM controller_lease").scalar() == 5
            engine.dispose()
        except AssertionError as error:
            for each in services:
                error.add_note(each.log.read_text()[-3000:])
            raise
        finally:
            sender.stop()
            for each in services:
                each.process.kill()
                each.process.wait(10)
