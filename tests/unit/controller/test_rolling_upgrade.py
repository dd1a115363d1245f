"""A rolling upgrade of running services: this release, and one that comes after it, with other tables and more on the
wire, on one PostgreSQL, while agents of both report."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

import slurm_watchdog
from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.journal.tables import SCHEMA_VERSION
from slurm_watchdog.model.documents import Paused, PauseRequest, Status
from tests.builders.controller_services import Service, environment_of, seconds_until
from tests.builders.identity_files import controller_files, make_authority, node_files
from tests.builders.postgresql import postgresql_server

CHANGES = {
    "__init__.py": [("__version__ = ", '__version__ = "99.0.0"  # ')],
    "journal/tables.py": [
        (f"SCHEMA_VERSION = {SCHEMA_VERSION}", f"SCHEMA_VERSION = {SCHEMA_VERSION + 1}"),
        ("MIGRATIONS = (", 'NEXT = _table("next", "id int key")\nMIGRATIONS = ('),
    ],
    "model/report.py": [
        ("    interval_s: float = 5.0", "    of_next: tuple[str, ...] = ('new',)\n    interval_s: float = 5.0")
    ],
    "model/protocol.py": [('    controller_id: str = ""', '    of_next: str = "new"\n    controller_id: str = ""')],
}  # fmt: skip
"""What the next release has: file -> (text, what is there instead)."""

AGENT = """
import json, sys, time
sys.path.append(sys.argv.pop())
from collections import Counter
from slurm_watchdog.agent.courier.process import controllers
from slurm_watchdog.agent.delivery.spool import Spool
from slurm_watchdog.model.report import Report
from tests.builders.sending import DrivenSender, link_to

node, directory, urls = sys.argv[1], sys.argv[2], sys.argv[3:]
counts = Counter()
ours = controllers(node, "tls", directory, urls)
sender = DrivenSender(Spool(10**7, 600), link_to(ours, 3.0), lambda outcome: counts.update([outcome]))
sender.start()
more = {"of_next": ("x",)} if "of_next" in Report.__struct_fields__ else {}
made = 0
while True:
    made += 1
    sender.put(Report(node=node, boot_id="b", agent_id="a", sequence=made, **more))
    print(json.dumps({"made": made, **counts}), flush=True)
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory with a package that is this one and some more."""
    place = tmp_path_factory.mktemp("next")
    package = place / "slurm_watchdog"
    shutil.copytree(Path(slurm_watchdog.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in CHANGES.items():
        text = (package / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (package / name).write_text(text)
    return str(place)


class Reporter:
    """An agent of one release that reports five times a second."""

    def __init__(self, node: str, directory: str, urls: Sequence[str], release: str, log: Path):
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*run_code(AGENT), node, directory, *urls, str(Path(__file__).parents[3])],
                stdout=out,
                env=environment_of(release),
            )

    def counts(self) -> dict[str, int]:
        lines = self.log.read_text().splitlines()
        return json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}

    def is_heard(self) -> bool:
        """Whether everything that was made a second ago has been taken."""
        found = self.counts()
        return found.get("sent", 0) >= found.get("made", 1) - 5


@contextmanager
def told(services: Sequence[Service]) -> Iterator[None]:
    """What the controllers logged, beside what failed; and nothing of them is left."""
    try:
        yield
    except AssertionError as error:
        for each in services:
            error.add_note(each.log.read_text()[-2000:])
        raise
    finally:
        for each in services:
            each.process.kill()
            each.process.wait(10)


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_standby_first_then_the_other_and_whichever_release_the_agents_have_no_report_is_lost(
    tmp_path: Path, next_release: str
) -> None:
    ca = make_authority(tmp_path / "ca", time.time())
    tls = controller_files(ca).directory
    with postgresql_server() as fresh:
        url = fresh()
        engine = sa.create_engine(url)

        def value(query: str) -> int:
            with engine.connect() as sql:
                return int(sql.exec_driver_sql(query).scalar_one())

        one = Service(tmp_path / "one", tls, url)
        seconds_until(one.is_active, "the first becomes the active one")
        other = Service(tmp_path / "other", tls, url)
        agents: list[Reporter] = []
        with told((one, other)):
            urls = [f"https://127.0.0.1:{each.port}" for each in (one, other)]
            for node, release in (("n1", ""), ("n2", next_release)):
                directory = node_files(ca, node, time.time()).directory
                agents.append(Reporter(node, directory, urls, release, tmp_path / node))
            try:
                seconds_until(other.refusal, "the second is the standby")
                one.client.post(Paused, "/v1/pause", body=PauseRequest(reason="upgrade"))
                seconds_until(lambda: all(each.is_heard() for each in agents), "the old one takes reports of both")

                other.end()  # the standby first
                other.release = next_release
                other.start()
                seconds_until(other.refusal, "the standby is the new release")
                assert value("SELECT version FROM journal_schema") == SCHEMA_VERSION
                assert one.end() == 0
                seconds_until(other.is_active, "the new release takes over")
                assert value("SELECT version FROM journal_schema") == SCHEMA_VERSION + 1
                paused = other.client.get(Status, "/v1/status").paused
                assert paused is not None and paused.reason == "upgrade"
                seconds_until(lambda: all(each.is_heard() for each in agents), "the new one takes reports of both")

                one.start()  # still the old release: systemd starts it again, or somebody has forgotten it
                epoch = value("SELECT epoch FROM controller_lease")
                seconds_until(lambda: "could not take its place" in one.refusal(), "the old one says that it waits")
                assert f"schema version {SCHEMA_VERSION + 1}" in one.refusal()
                other.process.kill()
                other.process.wait(10)
                time.sleep(9)  # the lease has expired
                assert not one.is_active() and value("SELECT epoch FROM controller_lease") == epoch
                other.start()
                seconds_until(other.is_active, "the new one again")

                one.end()
                one.release = next_release
                one.start()
                seconds_until(one.refusal, "the first is the new release, too")
                other.end()
                seconds_until(one.is_active, "and can take over")
                assert (
                    paused := one.client.get(Status, "/v1/status").paused
                ) is not None and paused.reason == "upgrade"
                seconds_until(lambda: all(each.is_heard() for each in agents), "every report arrives")
                for each in agents:
                    assert not set(each.counts()) - {"made", "sent", "failed"}, each.counts()
            finally:
                for each in agents:
                    each.process.kill()
                    each.process.wait(10)
                engine.dispose()
