"""A Debian of our own, booted with systemd as PID 1: for what only a real system shows (units, packages,
users, removal).

    with Machine(image, "wd1") as machine:
        machine.run("systemctl", "is-system-running")

`make_image` installs it with debootstrap, a Slurm of one node included; the machine has its own network namespace, in which
nobody else is. Nothing is left but the image's directory, which the caller owns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import packages

SUITES = {"3.11": "bookworm", "3.13": "trixie"}
"""Debian's release for each Python: compiled modules are valid for one minor version."""
INCLUDE = "systemd,systemd-sysv,dbus,python3,procps,munge,slurm-wlm"
ADDRESS = "10.78.0.1"
SLURM_CONF = f"""ClusterName=one
SlurmctldHost=wd1({ADDRESS})
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
NodeName=wd1 NodeAddr={ADDRESS} CPUs=2
PartitionName=main Nodes=ALL Default=YES
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def need_tools() -> None:
    """Skips the test where no system can be booted, with the reason; in CI what is missing is installed."""
    if os.geteuid() != 0:
        pytest.skip("booting a system needs root")
    packages.ensure("systemd-nspawn")
    if suite() is None:
        pytest.skip(f"no release of Debian has Python {sys.version_info.major}.{sys.version_info.minor}")


def suite() -> str | None:
    """Debian's release with the Python that runs this."""
    return SUITES.get(f"{sys.version_info.major}.{sys.version_info.minor}")


def mirror(name: str) -> list[str]:
    """Where this machine's apt gets that release from; nothing: debootstrap's own idea."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(CREATED_BY) $(REPO_URI)"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    for line in listed.stdout.splitlines():
        words = line.split()
        if words[:3] == [name, "main", "Packages"]:
            return [words[3]]
    return []


@contextlib.contextmanager
def in_memory(directory: Path) -> Iterator[None]:
    """A filesystem in memory there: installing a system flushes thousands of files, and removing it takes as long."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g,mode=755", "nspawn", str(directory)], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], timeout=30)


def make_image(directory: Path) -> None:
    """Installs Debian with systemd and a Slurm of one node, `wd1`, into a new directory; fails the test if
    that can't be done."""
    name = suite()
    assert name is not None
    if "NSPAWN_IMAGE" in os.environ:  # who writes such a test boots a copy of one that was made before
        subprocess.run(["cp", "-a", os.environ["NSPAWN_IMAGE"], str(directory)], check=True, timeout=200)
        return
    command = [
        "debootstrap",
        "--variant=minbase",
        f"--include={INCLUDE}",
        name,
        str(directory),
        *mirror(name),
    ]
    for attempt in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if done.returncode == 0:
            break
        if attempt == 2:
            pytest.fail(f"{' '.join(command)}: {(done.stdout + done.stderr)[-800:]}", pytrace=False)
        shutil.rmtree(directory, ignore_errors=True)
    (directory / "etc/hostname").unlink(missing_ok=True)
    (directory / "etc/resolv.conf").unlink(missing_ok=True)
    (directory / "etc/hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} wd1\n")
    (directory / "etc/slurm/slurm.conf").write_text(SLURM_CONF)
    # Unpacking packages into it flushes every file to the disk otherwise: minutes on a slow one.
    (directory / "etc/dpkg/dpkg.cfg.d/test").write_text("force-unsafe-io\n")
    inside = (
        "mkdir -p /var/lib/slurm/slurmctld /var/lib/slurm/slurmd && chown -R slurm /var/lib/slurm && useradd -m ann"
    )
    subprocess.run(["chroot", str(directory), "sh", "-c", inside], check=True, timeout=60)


def remove_control_groups() -> None:
    """Those that systemd-nspawn made beside ours for itself and for the machine; one that still holds
    somebody stays."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        tree = {"": "unified", "name=systemd": "systemd"}.get(controllers)
        for name in ("payload", "supervisor"):
            top = Path(f"/sys/fs/cgroup/{tree}{path}") / name
            if tree is None or not top.is_dir():
                continue
            for folder in sorted((each for each in top.rglob("*") if each.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                top.rmdir()


class Machine:
    """A booted image. `run` is what a person at its console would type, as root."""

    def __init__(self, image: Path, name: str = "wd1"):
        self.image, self.name = image, name
        self.log = image.with_suffix(".log")
        self.network = f"swdnspawn{os.getpid()}"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Machine:
        try:
            self._make_network()
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [
                        "setpriv",
                        "--pdeathsig",
                        "KILL",
                        "systemd-nspawn",
                        "--boot",
                        "--quiet",
                        "--register=no",
                        "--keep-unit",
                        f"--directory={self.image}",
                        f"--machine={self.name}",
                        f"--hostname={self.name}",
                        "--console=pipe",
                        f"--network-namespace-path=/run/netns/{self.network}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self.wait(self._booted, 120, "the machine to boot")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            leader = self.leader()
            if leader is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(leader, 9)  # its PID 1: all of it ends
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
        subprocess.run(["ip", "netns", "del", self.network], capture_output=True, timeout=30)
        remove_control_groups()

    def _make_network(self) -> None:
        """Slurm wants an address that is not the loopback one: both ends of a pair lie in the machine's network."""
        inside = ["ip", "-n", self.network]
        for command in (
            ["ip", "netns", "add", self.network],
            [*inside, "link", "set", "lo", "up"],
            [*inside, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1"],
            [*inside, "addr", "add", f"{ADDRESS}/24", "dev", "eth0"],
            [*inside, "link", "set", "eth0", "up"],
            [*inside, "link", "set", "eth1", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=30)

    def leader(self) -> int | None:
        """PID 1 of the machine, as the host counts."""
        assert self.process is not None
        waiting = [self.process.pid]
        while waiting:
            pid = waiting.pop()
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            except OSError:
                continue
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(numbers) > 1 and numbers[-1] == "1":
                return pid
        return None

    def _booted(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(f"systemd-nspawn ended: {self.log.read_text(errors='replace')[-800:]}", pytrace=False)
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip() if self.leader() else ""
        return state in ("running", "degraded")

    def run(
        self, *argv: str, check: bool = True, timeout_s: float = 120, user: str = "root"
    ) -> subprocess.CompletedProcess[str]:
        """A command in the machine. Fails the test with what it said if it does not end well."""
        leader = self.leader()
        assert leader is not None, "the machine does not run"
        home = "/srv" if user == "root" else f"/home/{user}"
        who = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        command = ["nsenter", "--target", str(leader), "--mount", "--uts", "--ipc", "--net", "--pid",
                   "env", "-i", "-C", home, f"PATH={PATH}", f"HOME={home}", "LC_ALL=C.UTF-8", *who, *argv]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
        if check and done.returncode != 0:
            pytest.fail(f"{' '.join(argv)}: code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
        return done

    def shell(self, text: str, check: bool = True, timeout_s: float = 120) -> str:
        """What `sh -c` printed."""
        done = self.run("sh", "-c", text, check=check, timeout_s=timeout_s)
        return done.stdout + done.stderr

    def show(self, unit: str, name: str) -> str:
        """A property of a unit, as systemd has it."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()

    def journal(self, unit: str) -> str:
        """What a unit has said since the machine booted."""
        return self.run("journalctl", "--no-pager", "--boot", "--output=cat", "--unit", unit, check=False).stdout

    def file(self, path: str) -> Path:
        """A file of the machine, seen from outside (not below /run, /tmp or /proc)."""
        return self.image / path.lstrip("/")

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Until `condition()` holds; fails the test, with what the services said, if it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                said = "" if self.process is None or self.leader() is None else self.shell(
                    "systemctl --no-pager --all status 'slurm-watchdog*'; journalctl --no-pager -b -n 60", check=False
                )  # fmt: skip
                pytest.fail(f"no sign of {what} within {timeout_s:g} s\n{said[-6000:]}", pytrace=False)
            time.sleep(0.3)
