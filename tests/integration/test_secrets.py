"""Secrets, planted in every place that holds one, looked for in everything that controller and agent write,
show and send on.

Everybody they talk to fails and repeats to them what they said, which is how secrets get into error messages.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slurm_watchdog.agent.metrics import FILE
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.notify.dispatcher import make_notifier
from tests.builders.identity_files import issue, make_authority
from tests.builders.notices import INCIDENT

pytestmark = pytest.mark.integration
DEADLINE_S = 240.0


class Echo:
    """Slack and everybody's webhook: refuses everything, and says what it was told, in the body and in the reason."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        echo = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                said = f"{self.path} {self.headers.get('Authorization')} {self.rfile.read(int(self.headers.get('Content-Length', 0))).decode()}"
                echo.asked.append(self.path)
                slack = self.path.startswith("/api/")
                self.send_response(200 if slack else 500, f"not {self.path} {self.headers.get('Authorization')}")
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                self.wfile.write((f'{{"ok":false,"error":"invalid_auth {token}"}}' if slack else said).encode())

            def log_message(self, format: str, *args: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@dataclass
class Planted:
    """A place with secrets, and two services that use them."""

    place: Path
    secrets: dict[str, bytes] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)
    """Where each may be found."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    seen: dict[str, bytes] = field(default_factory=dict)
    """Everything that was shown, by where."""

    def plant(self, name: str, text: str, file: str) -> Path:
        path = self.place / file
        path.write_text(text)
        path.chmod(0o600)
        self.secrets[name] = text.strip().encode()
        self.files.add(path)
        return path

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.place / f"{name}.log").open("wb")
        command = [str(Path(sys.executable).with_name("slurm-watchdog")), *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        log.close()
        self.processes.append(process)
        return process

    def look_at_processes(self, when: str) -> None:
        """The arguments and the environment of every process that was started from here, or by one that was."""
        sessions = {process.pid for process in self.processes}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) in sessions or int(entry.name) in sessions:
                    self.seen[f"{when}: arguments of {entry.name}"] = (entry / "cmdline").read_bytes()
                    self.seen[f"{when}: environment of {entry.name}"] = (entry / "environ").read_bytes()
            except OSError:
                continue

    def run(self, *arguments: str) -> bytes:
        command = [str(Path(sys.executable).with_name("slurm-watchdog")), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
        self.seen[" ".join(arguments[:2])] = done.stdout + done.stderr
        return done.stdout + done.stderr

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    def found(self) -> list[str]:
        """Where a secret was seen, in whatever form."""
        everything = dict(self.seen)
        for path in self.place.rglob("*"):
            if path.is_file() and path not in self.files:
                everything[str(path)] = path.read_bytes()
        bad = []
        for name, secret in self.secrets.items():
            forms = {
                secret,
                base64.b64encode(secret),
                secret.hex().encode(),
                urllib.parse.quote(secret, safe="").encode(),
                repr(secret).encode()[2:-1],
            }
            bad += [f"{name} in {where}" for where, text in everything.items() if any(form in text for form in forms)]
        return bad


def until(seen: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    place = Planted(tmp_path)
    yield place
    place.stop()


def test_a_secret_is_in_no_argument_environment_log_metric_journal_trace_bundle_or_message(
    planted: Planted,
) -> None:
    place, echo, now = planted.place, Echo(), time.time()
    page = planted.plant("page token", secrets.token_hex(32) + "\n", "page_token")
    slack = planted.plant("Slack token", f"xoxb-{secrets.token_hex(24)}\n", "slack_token")
    hook_secret = secrets.token_hex(20)
    hook = planted.plant("webhook", f"{echo.url}/hook/{hook_secret}\n", "webhook")
    planted.secrets["webhook"] = hook_secret.encode()
    hook_token = planted.plant("webhook's token", secrets.token_hex(24) + "\n", "webhook_token")
    ca = make_authority(place / "ca", now)
    issue(ca, "node", "n1", now, 100)
    tls = place / "tls"
    tls.mkdir()
    for source in (*(ca / "nodes" / "n1").iterdir(), *(ca / "controllers" / "localhost").iterdir()):
        shutil.copy(source, tls / source.name)
    for key in (*ca.rglob("*.key"), *tls.glob("*.key")):
        planted.files.add(key)
        planted.secrets[f"{key.relative_to(place)}"] = key.read_text().splitlines()[1].encode()
    ports = [free_port() for _ in range(3)]
    config = place / "config.yaml"
    config.write_text(f"""
agent: {{controller_url: 'https://localhost:{ports[0]}', node_name: n1, interval: 1s, metrics_directory: {place}/metrics, state_directory: {place}/agent, give_up_after: 1h}}
controller: {{listen: '127.0.0.1:{ports[0]}', page_listen: '127.0.0.1:{ports[2]}', socket: {place}/socket, state_directory: {place}/state}}
security: {{tls_directory: {tls}, page_token_file: {page}}}
notify:
  slack: {{token_file: {slack}, channel: C1, api_url: '{echo.url}/api/'}}
  webhook: {{url_file: {hook}, token_file: {hook_token}}}
""")
    # Messages that wait since before the start, so that there is something to fail with.
    (place / "state").mkdir()
    journal = Journal(f"sqlite:///{place}/state/journal.sqlite")
    journal.save_incident(INCIDENT)
    make_notifier(parse_config(config.read_text()), journal.outbox).opened(INCIDENT)
    journal.close()

    planted.start("controller", "controller", "--config", str(config), "--record", str(place / "trace.jsonl"))
    agent = planted.start("agent", "agent", "--config", str(config))
    planted.look_at_processes("at the start")
    until(
        lambda: (written := place / "metrics" / FILE).exists() and b'outcome="sent"} ' in written.read_bytes(),
        "no report was taken: " + logs(place),
    )
    until(lambda: {path.split("/")[1] for path in echo.asked} >= {"api", "hook"}, "no message was tried")
    until((place / "socket").exists, "no socket")

    # What goes wrong: no secret, a wrong one, files that others may read, a certificate that is damaged.
    fetch(f"http://127.0.0.1:{ports[0]}/metrics")
    for wrong in (page.read_text().strip()[:-1], page.read_text().strip() + "x", ""):
        fetch(
            f"http://127.0.0.1:{ports[2]}/",
            {"Authorization": "Basic " + base64.b64encode(f"x:{wrong}".encode()).decode()},
        )
    planted.seen["the page"] = fetch(
        f"http://127.0.0.1:{ports[2]}/",
        {"Authorization": "Basic " + base64.b64encode(b"x:" + page.read_bytes().strip()).decode()},
    )
    good = (tls / "agent.crt").read_bytes()
    (tls / "agent.crt").write_bytes((tls / "agent.key").read_bytes())
    planted.files.add(tls / "agent.crt")
    planted.run("doctor", "--node", "--config", str(config), "--json")
    (tls / "agent.crt").write_bytes(good)
    hook.write_text(f"not an address {hook_secret}\n")
    slack.chmod(0o644)
    os.kill(agent.pid, signal.SIGHUP)
    time.sleep(3)
    planted.look_at_processes("later")
    planted.seen["metrics of the agent"] = (place / "metrics" / FILE).read_bytes()
    planted.run("status", "--config", str(config), "--json")
    planted.run("incidents", "--config", str(config), "--json")
    planted.run("explain", "i1", "--config", str(config), "--json")
    planted.run("explain", "i1", "--config", str(config), "--bundle", str(place / "bundle.tar.gz"))
    planted.run("doctor", "--config", str(config), "--json")
    planted.stop()
    assert b"waits" in (place / "controller.log").read_bytes(), "a message that failed is in the log"
    assert len(planted.seen) > 15
    assert planted.found() == []


@pytest.mark.thorough
def test_the_journal_s_password_is_in_no_message(planted: Planted) -> None:
    place, password = planted.place, secrets.token_hex(16)
    planted.secrets["database password"] = password.encode()
    config = place / "config.yaml"
    planted.files.add(config)
    config.write_text(f"""
controller: {{listen: '127.0.0.1:{free_port()}', page_listen: '', socket: {place}/socket, journal_url: 'postgresql+psycopg://w:{password}@127.0.0.1:1/watchdog'}}
""")
    assert b"cannot start" in planted.run("controller", "--config", str(config))
    planted.run("doctor", "--config", str(config), "--json")
    config.write_text(config.read_text().replace("postgresql+psycopg://", "no such thing: "))
    planted.run("controller", "--config", str(config))
    assert planted.found() == []


@pytest.mark.thorough
def test_a_secret_that_is_there_is_found(planted: Planted) -> None:
    planted.plant("one", "s3cret-" + "x" * 20, "one")
    assert planted.found() == []
    for number, form in enumerate((b"s3cret-" + b"x" * 20, base64.b64encode(b"s3cret-" + b"x" * 20))):
        (planted.place / f"log{number}").write_bytes(b"before " + form + b" after")
    assert len(planted.found()) == 2


def fetch(url: str, headers: dict[str, str] | None = None) -> bytes:
    """What is answered, an error's body too; empty where nothing is."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.read()
    except OSError:
        return b""


def logs(place: Path) -> str:
    return "".join(path.read_text(errors="replace")[-2000:] for path in place.glob("*.log"))
