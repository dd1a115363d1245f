"""A real Prometheus and a real Alertmanager beside a watchdog, from Debian's packages, each with a directory
of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.integration import packages
from tests.rig.cluster import Cluster


def ensure_prometheus() -> None:
    """Installs it in CI; elsewhere a test without it is skipped, with what to type."""
    packages.ensure("Prometheus")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


class Service:
    """A program that answers on a port; ended with `close`."""

    def __init__(self, argv: list[str], directory: Path, ready: str) -> None:
        self.output = directory / f"{Path(argv[0]).name}.log"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(argv, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while not self._answers(ready):
            assert self.process.poll() is None, self.output.read_text()[-2000:]
            assert time.monotonic() < deadline, self.output.read_text()[-2000:]
            time.sleep(0.1)

    def _answers(self, url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Textfiles:
    """In place of node_exporter's textfile collector: serves what the agent of each node writes, on a port each."""

    DIRECTORY = Path("/run/slurm-watchdog-agent/metrics")

    def __init__(self, cluster: Cluster) -> None:
        self._servers = []
        self.targets: dict[str, str] = {}  # Node -> host and port.
        for node in cluster.nodes:
            directory = cluster.node_path(node, self.DIRECTORY)
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o777)
            server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Textfile, directory))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers.append(server)
            self.targets[node] = f"127.0.0.1:{server.server_port}"

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Textfile(BaseHTTPRequestHandler):
    def __init__(self, metrics: Path, *request: Any) -> None:
        self.metrics = metrics
        super().__init__(*request)

    def do_GET(self) -> None:
        files = sorted(self.metrics.glob("*.prom"))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        for file in files:
            self.wfile.write(file.read_bytes())

    def log_message(self, format: str, *words: object) -> None:
        pass


class Prometheus(Service):
    """Scrapes `targets` ({job name: addresses}) every second and judges `rules`."""

    def __init__(
        self,
        directory: Path,
        targets: dict[str, Iterable[str]],
        rules: Path | None = None,
        alertmanager: str = "",
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                for job, addresses in targets.items()
            ],
        }
        if rules is not None:
            config["rule_files"] = [str(rules)]
        if alertmanager:
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
        (directory / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
        super().__init__(
            [
                "prometheus",
                f"--config.file={directory}/prometheus.json",
                f"--storage.tsdb.path={directory}/tsdb",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            directory,
            f"{self.url}/-/ready",
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression. Fails with Prometheus's own words if it is none."""
        asked = urllib.parse.urlencode({"query": expression})
        try:
            answer = get(f"{self.url}/api/v1/query?{asked}")
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expression}: {error.read().decode()}", pytrace=False)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def wait_for(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
            time.sleep(0.3)
        return found


class Alertmanager(Service):
    def __init__(self, directory: Path, config: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        (directory / "alertmanager.yaml").write_text(config)
        super().__init__(
            [
                "prometheus-alertmanager",
                f"--config.file={directory}/alertmanager.yaml",
                f"--storage.path={directory}/alertmanager",
                f"--web.listen-address={self.address}",
                "--cluster.listen-address=",
            ],
            directory,
            f"http://{self.address}/-/ready",
        )


class Receivers:
    """Where Alertmanager's webhooks arrive: (last part of the path, the document)."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                got.append((self.path.strip("/"), json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def alerts(self, receiver: str) -> list[dict[str, Any]]:
        return [alert for where, document in list(self.got) if where == receiver for alert in document["alerts"]]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
