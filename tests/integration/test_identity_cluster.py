"""Certificates, and the scripts for Slurm, on a real cluster; the scripts are installed by the lines of
docs/slurm.md.

One cluster of its own for this file, for the last test changes its slurm.conf. /etc/slurm-watchdog is a place
that is each node's own here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.identity_files import issue, make_authority
from tests.integration.training_job import SAVE_INTERVAL, ended_action, inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.rights import AGENT_UID
from tests.rig.stack import COMMAND, PORT, ROOT, Watchdog

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1500)]
DEADLINE_S = 300.0
PAGE = (ROOT / "docs" / "slurm.md").read_text()
SLURM = ROOT / "deploy" / "slurm"
NAME = "controller"
"""What the nodes call the controller's host."""


def lines_after(words: str) -> str:
    """The first block of commands on the page after these words."""
    return PAGE[PAGE.index(words) :].split("```")[1].strip()


class Site:
    """Where things are on a cluster, and a shell in which the page's lines mean them."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.home = cluster.scratch
        """Stands for /etc/slurm-watchdog: on the host a directory, on each node that node's own filesystem."""
        self.ca, self.tls = self.home / "ca", self.home / "tls"
        self.bin = Path(cluster.directory) / "bin"
        self.bin.mkdir()

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def shell(self, lines: str) -> None:
        """Commands of the page, for the places of this cluster."""
        env = dict(self.cluster.env) | {"PATH": f"{self.bin}:{self.cluster.env['PATH']}"}
        done = subprocess.run(
            ["bash", "-euc", lines], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, f"{lines}\n{done.stdout}{done.stderr}"

    def make_all(self, days: int) -> None:
        """Certificates of all machines, each copied to its own."""
        issue(self.ca, "controller", NAME, time.time(), days)
        for node in self.cluster.nodes:
            issue(self.ca, "node", node, time.time(), days)
            self.put(node, node)
        shutil.copytree(self.ca / "controllers" / NAME, self.tls, dirs_exist_ok=True)

    def put(self, node: str, whose: str) -> None:
        """The files of one node as those of another."""
        there = self.cluster.node_path(node, self.tls)
        shutil.copytree(self.ca / "nodes" / whose, there, dirs_exist_ok=True)
        for file in there.iterdir():
            os.chown(file, AGENT_UID, -1)


class TlsWatchdog(Watchdog):
    """Its metrics are read with a certificate for Prometheus."""

    site: Site

    def metrics(self) -> str:
        context = ssl.create_default_context(cafile=str(self.site.tls / "ca.crt"))
        files = self.site.ca / "clients" / "prometheus"
        context.load_cert_chain(files / "client.crt", files / "client.key")
        text = b""
        with (
            socket.create_connection((self.cluster.controller_address, PORT), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=NAME) as secure,
        ):
            secure.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while more := secure.recv(1 << 16):
                text += more
        return text.decode()

    def value(self, series: str) -> float:
        """Of `name{labels}`; 0 if it is not there yet."""
        found = re.search(rf"^slurm_watchdog_{re.escape(series)} (\S+)$", self.metrics(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def refusals(self) -> dict[str, float]:
        """`reason=…` of connections and `outcome=…` of requests -> how many were refused for it."""
        series = r'^slurm_watchdog_(?:refused_connections|reports)_total\{(\w+)="(\w+)"\} (\S+)$'
        return {
            f"{label}={name}": float(count) for label, name, count in re.findall(series, self.metrics(), re.MULTILINE)
        }


@pytest.fixture(scope="module")
def site(cluster_possible: None) -> Iterator[Site]:
    with Cluster(nodes=3) as cluster:
        yield Site(cluster)


@pytest.fixture(scope="module")
def watchdog(site: Site) -> Iterator[TlsWatchdog]:
    make_authority(site.ca, time.time())
    issue(site.ca, "client", "prometheus", time.time())
    site.make_all(100)
    security = {"mode": "tls", "tls_directory": str(site.tls)}
    settings = {"agent": {"controller_url": f"https://{NAME}:{PORT}"}, "security": security}
    watchdog = TlsWatchdog(site.cluster, mode="act", settings=settings)
    watchdog.site = site
    with watchdog:
        yield watchdog


def all_report(watchdog: Watchdog) -> bool:
    return set(watchdog.status()["nodes"]["reporting"]) >= set(watchdog.nodes)


STRANGER = """
import socket, ssl, sys
kind, host, port, trusted, files = sys.argv[1:]
sock = socket.create_connection((host, int(port)), timeout=280)
heard = b""
try:
    if kind == "half_a_handshake":
        sock.sendall(b"\\x16\\x03\\x01\\x02")
    elif kind != "plain":
        context = ssl.create_default_context(cafile=trusted)
        if files:
            context.load_cert_chain(files + "/agent.crt", files + "/agent.key")
        sock = context.wrap_socket(sock, server_hostname=host)
    if kind != "half_a_handshake":
        size = {"oversized": 10**7, "half_a_frame": 100}.get(kind, 2)
        sock.sendall(size.to_bytes(4, "big") + b"rx"[: 1 if kind == "half_a_frame" else 2])
    while more := sock.recv(4096):
        heard += more
except OSError as error:
    heard += str(error).encode()
print(heard.decode(errors="replace")[:200])
"""

STRANGERS = {
    "plain": ("reason=no_tls", False),
    "without_certificate": ("reason=no_certificate", False),
    "of_another_authority": ("reason=bad_certificate", True),
    "half_a_handshake": ("reason=slow_handshake", False),
    "half_a_frame": ("outcome=too_slow", True),
    "oversized": ("outcome=too_large", True),
    "no_report": ("outcome=garbage", True),
}
"""What somebody on a node does -> the counter that rises, and whether he brings a certificate."""


def come_as_strangers(watchdog: TlsWatchdog, node: str, place: Path) -> dict[str, Any]:
    """Each in a process on `node`, all at once; the slow ones take half a minute until they are sent away."""
    theirs = str(issue(make_authority(place, time.time()), "node", node, time.time()))
    mine = str(watchdog.site.tls)
    processes = {}
    for kind, (_, brings) in STRANGERS.items():
        files = "" if not brings else theirs if kind == "of_another_authority" else mine
        argv = [
            sys.executable,
            "-c",
            STRANGER,
            kind,
            NAME,
            str(PORT),
            str(watchdog.site.tls / "ca.crt"),
            files,
        ]
        processes[kind] = watchdog.cluster.node_popen(node, argv, cwd="/", stdout=subprocess.PIPE)
    return processes


def test_over_mutual_tls_a_hang_is_named_and_answered_while_everybody_else_who_comes_is_sent_away_and_counted(
    watchdog: TlsWatchdog, tmp_path: Path
) -> None:
    before = watchdog.refusals()
    strangers = come_as_strangers(watchdog, "n3", tmp_path / "another")
    job = submit(watchdog.cluster, nodes=2)
    try:
        training(watchdog, job, at_least=SAVE_INTERVAL + 2)
        inject(watchdog.cluster, "dataloader_hang.rank3")
        incident = watchdog.wait_for(
            lambda: watchdog.firing(job, "collective_hang"), DEADLINE_S, "the hang to be found"
        )
        (culprit,) = incident["culprits"]
        assert culprit["rank"] == 3, incident
        action = ended_action(watchdog, incident["id"], timeout_s=DEADLINE_S)
        assert action["end"]["ok"], action
        assert watchdog.cluster.job(job)["Restarts"] == "1"
    finally:
        watchdog.cluster.slurm("scancel", job, check=False)
    heard = {kind: process.communicate(timeout=DEADLINE_S)[0] for kind, process in strangers.items()}
    after = watchdog.refusals()
    risen = {reason for reason, count in after.items() if count > before.get(reason, 0.0)}
    assert risen >= {reason for reason, _ in STRANGERS.values()}, heard
    assert (
        b"too_large" in heard["oversized"] and b"too_slow" in heard["half_a_frame"] and b"garbage" in heard["no_report"]
    )
    watchdog.wait_for(lambda: all_report(watchdog), DEADLINE_S, "all to report, the node from which they came, too")


def test_a_node_with_another_s_certificate_or_one_that_has_expired_is_refused_and_told_and_renewing_brings_both_back(
    watchdog: TlsWatchdog,
) -> None:
    site, before = watchdog.site, watchdog.refusals()
    issue(site.ca, "node", "n2", time.time() - 3 * 86400, 1)
    for node, whose in (("n3", "n1"), ("n2", "n2")):
        watchdog.stop_agent(node)
        site.put(node, whose)
        watchdog.start_agent(node)

    def both_refused() -> bool:
        now = watchdog.refusals()
        return all(now.get(each, 0.0) > before.get(each, 0.0) for each in ("outcome=wrong_node", "reason=expired"))

    watchdog.wait_for(both_refused, DEADLINE_S, "both to be refused")

    def told() -> set[str]:
        open_ones = [i for i in watchdog.incidents() if i["kind"] == "agent_silent" and i["state"] == "firing"]
        return {culprit["node"] for incident in open_ones for culprit in incident["culprits"]}

    watchdog.wait_for(lambda: told() == {"n2", "n3"}, DEADLINE_S, "it to be told that both are silent, and n1 is not")
    assert "who has proven to be n1 may not report for 'n3'" in watchdog.log_tail("agent-n3", 200)
    assert "our certificate has expired" in watchdog.log_tail("agent-n2", 200)

    ends = watchdog.value('certificate_expiry_timestamp_seconds{certificate="own"}')
    site.make_all(300)  # the controller's, too
    assert watchdog.controller is not None
    watchdog.controller.send_signal(signal.SIGHUP)
    watchdog.stop_agent("n3")  # it would look at its files within a minute, too
    watchdog.start_agent("n3")
    watchdog.wait_for(lambda: all_report(watchdog), DEADLINE_S, "both to be back, n2's agent without a restart")
    watchdog.wait_for(
        lambda: watchdog.value('certificate_expiry_timestamp_seconds{certificate="own"}') != ends,
        DEADLINE_S,
        "the controller to show its new certificate",
    )
    watchdog.wait_for(lambda: not told() and all_report(watchdog), DEADLINE_S, "it to be over")


# -- what Slurm starts ---------------------------------------------------------------------------------------------


def install_scripts(site: Site, place: Path) -> None:
    """As the page says, in `place` for /etc/slurm. The commands that they find write down who called them with what."""
    calls, log = place / "calls", place / "log"
    for name in ("scontrol", "sinfo", "squeue"):
        real = shutil.which(name, path=site.cluster.env["PATH"])
        site.program(
            name,
            f'echo "${{SLURMD_NODENAME:-$(hostname)}} {name} $*" >>{calls}\nSLURM_CONF={site.cluster.env["SLURM_CONF"]} exec {real} "$@"',
        )
    site.program("slurm-watchdog", f'exec {COMMAND} "$@"')
    site.program("logger", f'echo "$SLURMD_NODENAME $*" >>{log}')
    here = (
        lines_after("The lines are in")
        .replace("/opt/slurm-watchdog/share", str(ROOT))
        .replace("/etc/slurm/", f"{place}/")
    )
    site.shell(here)


def in_slurm_conf(site: Site, place: Path, interval_s: int) -> None:
    """The example's lines about scripts, at the end of slurm.conf, and `scontrol reconfigure`."""
    wanted = re.findall(
        r"^(?:TaskProlog|Prolog|Epilog|HealthCheck\w+)=.*$",
        (SLURM / "slurm.conf.example").read_text(),
        re.MULTILINE,
    )
    assert len(wanted) == 6, wanted
    text = "\n".join(wanted).replace("/etc/slurm/", f"{place}/")
    text = re.sub(r"HealthCheckInterval=\d+", f"HealthCheckInterval={interval_s}", text)
    with open(site.cluster.env["SLURM_CONF"], "a") as file:
        file.write(f"{text}\n")
    site.cluster.slurm("scontrol", "reconfigure")


def edit(script: Path, old: str, new: str) -> None:
    """As an administrator does who has an editor that replaces the file."""
    text = script.read_text()
    assert text.count(old) == 1, (script, old)
    beside = script.with_suffix(".new")
    beside.write_text(text.replace(old, new))
    beside.chmod(0o755)
    os.replace(beside, script)


def said(file: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return file.read_text()
    return ""


def test_slurmd_runs_the_scripts_and_a_node_is_drained_for_what_the_administrator_has_named_and_for_nothing_else(
    watchdog: TlsWatchdog,
) -> None:
    site, cluster = watchdog.site, watchdog.cluster
    place = Path(tempfile.mkdtemp(prefix="etc-slurm-", dir=cluster.directory))
    place.chmod(0o755)  # the prolog of a task runs as the job's user
    install_scripts(site, place)
    check, calls, log = place / "slurm-watchdog-health-check.sh", place / "calls", place / "log"
    edit(check, 'PATH="', f'PATH="{site.bin}:')
    edit(
        check,
        "slurm-watchdog doctor --node --deadline 20s",
        f"slurm-watchdog doctor --node --config {watchdog.config_file} --deadline 120s",
    )
    edit(check, "doctor --node --deadline 9s", f"doctor --node --config {watchdog.config_file} --deadline 120s")
    key = cluster.node_path("n2", site.tls / "agent.key")
    key.chmod(0o600)
    if "DRAIN" in cluster.node("n2")["State"]:  # a try before this one
        cluster.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    in_slurm_conf(site, place, interval_s=4)

    job = cluster.sbatch('#!/bin/sh\nsrun sh -c "env; sleep 600"\n', "-N1", "-wn1",
                         f"--output={cluster.directory}/log/scripts-%j.out")  # fmt: skip
    switch = Path(f"/run/slurm-watchdog/jobs/{job}.0/kill")
    output = Path(cluster.directory) / "log" / f"scripts-{job}.out"
    watchdog.wait_for(
        lambda: f"SLURM_WATCHDOG_KILL_SWITCH={switch}\n" in said(output),
        DEADLINE_S,
        f"TaskProlog to name {switch}",
    )
    left = cluster.node_path("n1", switch)
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("{}")
    cluster.slurm("scancel", job)
    watchdog.wait_for(lambda: not left.parent.exists(), DEADLINE_S, "Epilog to remove what is left of the kill switch")

    def looked(node: str) -> bool:
        return f"{node} scontrol show node {node}\n" in said(calls)

    watchdog.wait_for(lambda: all(map(looked, cluster.nodes)), DEADLINE_S, "slurmd of each node to have looked")
    key.chmod(0o644)
    watchdog.wait_for(
        lambda: re.search(r"^n2 .*CRITICAL: The agent cannot prove its identity", said(log), re.MULTILINE),
        DEADLINE_S,
        "n2's fault to be in its log",
    )
    assert "cannot prove its identity" not in "".join(
        line for line in said(log).splitlines() if not line.startswith("n2 ")
    )
    assert "scontrol update" not in said(calls), "nobody has asked for a drain"
    assert "DRAIN" not in "".join(cluster.node(node)["State"] for node in cluster.nodes)

    edit(check, 'DRAIN_ON="${SLURM_WATCHDOG_DRAIN_ON:-}"', 'DRAIN_ON="certificate"')
    fields = cluster.wait_for_node_state("n2", ("*DRAIN*",), DEADLINE_S)
    assert fields["Reason"].startswith("health check: The agent cannot prove its identity"), fields
    key.chmod(0o600)
    cluster.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    cluster.wait_for_node_state("n2", "IDLE", DEADLINE_S)
    updates = [line for line in said(calls).splitlines() if "update" in line]
    assert len(updates) == 1 and updates[0].startswith("n2 scontrol update NodeName=n2 State=DRAIN"), updates
    assert all("DRAIN" not in cluster.node(node)["State"] for node in cluster.nodes)
    assert {line.split(" ", 1)[1].partition(" ")[0] for line in said(calls).splitlines()} <= {
        "scontrol",
        "sinfo",
    }
