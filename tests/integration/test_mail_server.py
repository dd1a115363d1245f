"""Mails to a real server, Exim: a CA of the site's own, a login, recipients that are put off or refused, a server that
hangs."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.config.receivers import Receiver
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.run_record import RunRecord
from slurm_watchdog.notify import SendFailed
from slurm_watchdog.notify.smtp import Mailer
from tests.builders.cli import run
from tests.builders.identity_files import controller_files, make_authority
from tests.builders.slack_server import CHANNEL, FakeSlack, shown, slack_beside
from tests.integration.packages import ensure

CONFIGURATION = """
primary_hostname = localhost
local_interfaces = 127.0.0.1
daemon_smtp_ports = {port} : {port_tls}
tls_on_connect_ports = {port_tls}
tls_advertise_hosts = *
tls_certificate = {place}/server.pem
tls_privatekey = {place}/server.key
auth_advertise_hosts = ${{if eq{{$tls_in_cipher}}{{}}{{}}{{*}}}}
spool_directory = {place}/spool
log_file_path = {place}/log-%s
acl_smtp_mail = sender
acl_smtp_rcpt = recipient
begin acl
sender:
  deny message = TLS comes first
       !encrypted = *
  deny message = 5.7.1 you may not send
       senders = spam@example.org
  accept
recipient:
  deny message = 5.7.1 log in first
       !authenticated = *
  defer message = 4.7.1 greylisted, come back later
        local_parts = later
  accept local_parts = ops : ann
  deny message = 5.1.1 nobody of that name
begin routers
all:
  driver = accept
  transport = keep
begin transports
keep:
  driver = appendfile
  directory = {place}/mails
  maildir_format
begin authenticators
plain:
  driver = plaintext
  public_name = PLAIN
  server_prompts = :
  server_condition = ${{if and{{{{eq{{$auth2}}{{watchdog}}}}{{eq{{$auth3}}{{secret}}}}}}}}
  server_set_id = $auth2
"""
HOUR_S = 3600.0
SETTLES_S = 3.0
"""For a mail that is not to come."""
AS_ITSELF = ("setpriv", "--reuid=Debian-exim", "--regid=Debian-exim", "--clear-groups")


class Server:
    """A server with a certificate of a CA of its own, and a login `watchdog` with the password `secret`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port, self.port_tls = (_free_port() for _ in range(2))
        _certificates(place)
        (place / "password").write_text("secret\n")
        configuration = CONFIGURATION.format(place=place, port=self.port, port_tls=self.port_tls)
        (place / "exim.conf").write_text(configuration)

    def mails(self) -> list[EmailMessage]:
        found = (self.place / "mails" / "new").glob("*")
        return [message_from_bytes(path.read_bytes(), policy=policy.default) for path in found]  # type: ignore[misc]

    def settings(self, **given: Any) -> Receiver:
        whole = {
            "name": "boss", "type": "email", "server": f"localhost:{self.port}", "sender": "watchdog@example.org",
            "to": ["ops@example.org"], "login": "watchdog", "password_file": str(self.place / "password"),
            "ca_file": str(self.place / "ca.pem"), "deadline": "5s",
        }  # fmt: skip
        return Receiver(**{**whole, **given})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ensure("Exim")
    if os.geteuid() != 0:
        pytest.skip("root alone can start Exim as its own user")
    with tempfile.TemporaryDirectory(prefix="watchdog-mail-") as name:
        found = Server(Path(name))
        for path in (found.place, *found.place.iterdir()):
            shutil.chown(path, "Debian-exim", "Debian-exim")
        with (found.place / "log").open("wb") as log:
            process = subprocess.Popen(
                [*AS_ITSELF, "exim4", "-C", str(found.place / "exim.conf"), "-bdf", "-q1m"],
                stdout=log,
                stderr=log,
                cwd="/",
            )
        try:
            _wait_for(lambda: _answers(found.port) and _answers(found.port_tls))
            yield found
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with slack_beside() as found:
        yield found


def send(settings: Receiver, *to: str, words: str = "hello", tries: int = 1) -> list[str]:
    """What was said of each try; nothing: it was sent."""
    mailer, message = Mailer(settings), EmailMessage()
    message["From"], message["To"], message["Subject"] = settings.sender, ", ".join(to), words
    message.set_content(words)

    async def go() -> list[str]:
        said = []
        for _ in range(tries):
            try:
                await mailer.send(7, message, list(to))
                said.append("")
            except SendFailed as error:
                said.append(f"{'permanent: ' if error.permanent else ''}{error.reason}")
        return said

    return asyncio.run(go())


@pytest.mark.parametrize("encryption", ["starttls", "tls"])
def test_a_server_with_a_ca_of_the_site_takes_a_mail_after_a_login(server: Server, encryption: str) -> None:
    port = server.port if encryption == "starttls" else server.port_tls
    settings = server.settings(encryption=encryption, server=f"localhost:{port}")
    assert send(settings, "ops@example.org", words=f"by {encryption}") == [""]
    _wait_for(lambda: [mail for mail in server.mails() if mail["Subject"] == f"by {encryption}"])


def test_a_certificate_that_is_not_trusted_a_wrong_password_and_a_sender_that_may_not_are_said(server: Server) -> None:
    wrong = server.place / "wrong"
    wrong.write_text("guess\n")
    for given, words in (
        ({"ca_file": ""}, "boss's certificate is not trusted: "),
        ({"password_file": str(wrong)}, "boss answered 535: "),
        ({"sender": "spam@example.org"}, "boss answered 550: 5.7.1 you may not send"),
        ({"encryption": "none", "login": "", "password_file": ""}, "boss answered 550: TLS comes first"),
    ):
        (said,) = send(server.settings(**given), "ops@example.org")
        assert words in said and "secret" not in said, said


def test_a_recipient_that_is_put_off_is_tried_again_alone_and_one_that_is_refused_holds_up_nobody(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    said = send(server.settings(), "ops@example.org", "later@example.org", words="both", tries=3)
    assert len(set(said)) == 1 and "puts recipients off: later@example.org: 451" in said[0], said
    assert send(server.settings(), "ops@example.org", "nobody@example.org", words="one") == [""]
    assert "refuses recipients for good" in caplog.text and "nobody@example.org: 550" in caplog.text
    (all_later,) = send(server.settings(), "later@example.org")
    assert "puts recipients off" in all_later and "permanent" not in all_later
    (none,) = send(server.settings(), "nobody@example.org")
    assert none.startswith("permanent: boss refuses every recipient: nobody@example.org: 550")
    _wait_for(lambda: [mail for mail in server.mails() if mail["Subject"] == "one"])
    assert len([mail for mail in server.mails() if mail["Subject"] == "both"]) == 1


def test_the_weekly_report_comes_by_mail_and_to_slack_at_its_time_and_says_what_the_report_of_that_week_says(
    server: Server, tmp_path: Path, slack: FakeSlack
) -> None:
    """A controller as a process of its own, whose Slurm does not answer, with a journal of two weeks."""
    now = datetime.now().astimezone().replace(second=0, microsecond=0)
    journal = Journal(f"sqlite:///{tmp_path}/journal.sqlite")
    for number, (user, account, weeks) in enumerate(
        (("ann", "vision", 0), ("ann", "vision", 0), ("bob", "speech", 0), ("ann", "vision", 1))
    ):
        began = now.timestamp() - weeks * 7 * 86400 - (40 + number) * HOUR_S
        journal.run_records.save(RunRecord(
            job_id=f"{number}", restarts=0, began_at=began, ended_at=began + 10 * HOUR_S, seen_at=began + 10 * HOUR_S,
            first_rise_at=began + 0.5 * HOUR_S, last_rise_at=began + 6 * HOUR_S, step_s=10.0, first_step=0,
            last_step=1800, uid=1000, user=user, account=account, partition="gpu", name="gpt", nodes=4, state="FAILED",
        ))  # fmt: skip
    journal.close()
    config = tmp_path / "config.yaml"
    mail = {
        name: getattr(server.settings(), name) for name in ("type", "server", "sender", "login", "password_file", "ca_file")
    } | {"weekly_report": f"{now:%a %H:%M}".lower()}  # fmt: skip
    config.write_text(json.dumps({
        "cluster_name": "alpha",
        "controller": {
            "listen": f"127.0.0.1:{_free_port()}", "page_listen": "", "socket": f"{tmp_path}/s",
            "state_directory": str(tmp_path), "journal_url": journal.url,
        },
        "security": {"tls_directory": controller_files(make_authority(tmp_path / "ca", time.time())).directory},
        "slurm": {"client": "command_line", "bin_directory": str(tmp_path)},
        "notify": {"slack": {
            "token_file": slack.token_file(tmp_path), "channel": CHANNEL, "api_url": f"{slack.url}/api/",
            "weekly_report": mail["weekly_report"],
        }, "receivers": [
            {"name": "all", "to": ["ops@example.org"], **mail},
            {"name": "vision", "to": ["ann@example.org"], "route": {"account": "vision"}, **mail},
        ]},
    }))  # fmt: skip

    def come() -> list[EmailMessage]:
        return [mail for mail in server.mails() if "Weekly report" in mail["Subject"]]

    argv = [sys.executable, "-m", "slurm_watchdog.cli.main", "controller", "--config", str(config)]
    for _ in range(2):  # the second time nothing is sent again
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            _wait_for(lambda: len(come()) >= 2 and slack.posts and Path(f"{tmp_path}/s").is_socket())
            time.sleep(SETTLES_S)
        finally:
            process.terminate()
            process.wait(30)
    mails = {mail["To"]: mail for mail in come()}
    assert len(come()) == 2 and mails.keys() == {"ops@example.org", "ann@example.org"}, (tmp_path / "log").read_text()
    for to, jobs, whose in (("ops@example.org", 3, ""), ("ann@example.org", 2, ", account vision")):
        sentence, losses, todo = mails[to].get_content().strip().split("\n\n")
        words = shlex.split(todo.removeprefix("More: slurm-watchdog "))
        result = run(*words, "--journal", f"{tmp_path}/journal.sqlite")
        assert result.exit_code == 0, result.output
        first, *_ = result.output.splitlines()
        assert f"{jobs} jobs had {40 * jobs}.0 node-hours" in first
        what = f"{now - timedelta(days=7):%Y-%m-%d %H:%M} to {now:%Y-%m-%d %H:%M}{whose}"
        assert sentence == f"[alpha] Weekly report, {what}: {first.partition(':00 ')[2].partition(':00 ')[2]}"
        assert mails[to]["Subject"] == sentence and mails[to]["Message-ID"].endswith("@example.org>")
        assert losses.startswith(f"Lost to (node-hours): ended FAILED {16 * jobs}.0, first start {2 * jobs}.0, ")
        rows = [line.split() for line in result.output.splitlines()]
        assert ["ended", "FAILED", f"{16 * jobs}.0", "40.0%", "-"] in rows, result.output

    (post,) = slack.in_channel()
    sentence, losses, todo = mails["ops@example.org"].get_content().strip().split("\n\n")
    assert (post["text"], post["channel"], slack.posts) == (sentence, CHANNEL, [post])
    lines = "\n".join(f"• {line}" for line in (*losses.splitlines(), todo))
    assert [(text["type"], text["text"]) for _, text in shown(post)] == [
        ("plain_text", sentence),
        ("plain_text", lines),
    ]


def test_a_server_that_hangs_holds_up_one_thread_however_often_it_is_tried(server: Server) -> None:
    with _silent() as port:
        begun = time.monotonic()
        said = send(server.settings(server=f"localhost:{port}", deadline="1s"), "ops@example.org", tries=2)
        assert all("did not answer in time" in each for each in said), said
        assert time.monotonic() - begun < 60


@contextmanager
def _silent() -> Iterator[int]:
    """A port at which a connection is taken, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def _certificates(place: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=place)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
            "-subj", "/CN=Site CA")  # fmt: skip
    openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "request", "-subj", "/CN=localhost"
    )
    (place / "names").write_text("subjectAltName=DNS:localhost\n")
    openssl("x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "names", "-out", "server.pem")  # fmt: skip
    (place / "server.key").chmod(0o600)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def _wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
