"""Nodes that are slow and not broken: less CPU, a slow disk, a link with a delay or a low rate. Undone on leaving.

The delay is a program of ours between the node's cable and the bridge: kernels without netem have none of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from tests.rig.cluster import Cluster
from tests.rig.commands import run_command, wait_until
from tests.rig.process_facts import children

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
SHARES = "262144"
"""The most that cpu.shares takes: 256 times a process that is in no group."""
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24)
"""linux/ethtool.h: ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO: frames have to leave the node whole."""
ETH_P_ALL = 0x0003
FRAME = 65_600


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from _tree(child)


def _group_of(pid: int, controller: str) -> Path:
    """Where a process is in the hierarchy of a controller."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return CGROUPS / controller / path.lstrip("/")
    raise ValueError(f"process {pid} is in no group of {controller}")


@contextlib.contextmanager
def _cgroup(
    cluster: Cluster, node: str, controller: str, settings: dict[str, str], name: str = "throttled"
) -> Iterator[None]:
    """Every process of a node, and what they start, in a group of its own (cgroup v1); then back to where they were."""
    place = CGROUPS / controller / f"{cluster.directory.name}-{node}-{name}"
    before = _group_of(cluster.init_pid(node), controller)
    place.mkdir()
    try:
        for name, value in settings.items():
            (place / name).write_text(value)
        for pid in _tree(cluster.init_pid(node)):
            with contextlib.suppress(ProcessLookupError):
                (place / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for line in (place / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (before / "cgroup.procs").write_text(line)
        wait_until(lambda: not (place / "cgroup.procs").read_text(), 5, 0.05)
        place.rmdir()


@contextlib.contextmanager
def cpu_quota(cluster: Cluster, node: str, cores: float) -> Iterator[None]:
    """All processes of the node together have so many cores."""
    quota = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(int(cores * PERIOD_US))}
    with _cgroup(cluster, node, "cpu", quota | {"cpu.shares": SHARES}):
        yield


@contextlib.contextmanager
def before_others(cluster: Cluster) -> Iterator[None]:
    """All nodes get the machine's CPUs before whatever else runs on it, and a /proc/stat that does not count that: the
    machine's own would be taken for the node's."""
    stat = cluster.directory / "stat"
    stat.write_text(Path("/proc/stat").read_text())
    with contextlib.ExitStack() as stack:
        for node in cluster.nodes:
            cluster.node_run(node, ["mount", "--bind", stat, "/proc/stat"])
            stack.callback(cluster.node_run, node, ["umount", "/proc/stat"])
            stack.enter_context(_cgroup(cluster, node, "cpu", {"cpu.shares": SHARES}, "first"))
        yield


@contextlib.contextmanager
def slow_disk(cluster: Cluster, node: str, bytes_per_s: int) -> Iterator[None]:
    """What the node writes to its own filesystem, and reads from it, goes at this rate."""
    device = os.stat(cluster.node_local(node)).st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
    names = ("blkio.throttle.write_bps_device", "blkio.throttle.read_bps_device")
    with _cgroup(cluster, node, "blkio", dict.fromkeys(names, limit)):
        yield


@contextlib.contextmanager
def link_rate(cluster: Cluster, node: str, rate: str) -> Iterator[None]:
    """The node sends at `rate` (tc's words: 200mbit) at most."""
    inside = ["nsenter", f"--target={cluster.init_pid(node)}", "--net", "tc", "qdisc"]
    run_command([*inside, "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"])
    try:
        yield
    finally:
        run_command([*inside, "del", "dev", "eth0", "root"])


@contextlib.contextmanager
def link_delay(cluster: Cluster, node: str, seconds: float) -> Iterator[None]:
    """Every frame to and from the node is so late."""
    cable, bridge, tap = cluster.layout.link(node), cluster.layout.bridge, f"{cluster.layout.bridge}t{node}"
    inside = ["nsenter", f"--target={cluster.init_pid(node)}", "--net"]
    program = [sys.executable, "-m", "tests.rig.throttle"]
    checkout = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([*inside, *program, "offloads", "eth0", "0"], check=True, timeout=20, env=checkout)
    run_command(["ip", "link", "set", cable, "nomaster"])
    with subprocess.Popen([*program, "delay", cable, tap, str(seconds)], stdout=subprocess.PIPE, env=checkout) as late:
        try:
            assert late.stdout is not None
            late.stdout.readline()  # the tap is there
            run_command(["ip", "link", "set", tap, "master", bridge, "up"])
            yield
        finally:
            late.kill()
            run_command(["ip", "link", "set", cable, "master", bridge])
            subprocess.run([*inside, *program, "offloads", "eth0", "1"], check=True, timeout=20, env=checkout)


def set_offloads(interface: str, on: int) -> None:
    """Whether segmentation and checksums are left to the card: where a program carries the frames, there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        for command in OFFLOADS:
            value = bytearray(struct.pack("II", command, on))
            buffer = (ctypes.c_char * len(value)).from_buffer(value)
            fcntl.ioctl(endpoint, SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(buffer)))


def delay(cable: str, tap: str, seconds: float) -> None:
    """Carries frames between a cable and a tap that it makes, each after `seconds`."""
    queue = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(queue, TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP | IFF_NO_PI))
    os.set_blocking(queue, False)
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    wire.bind((cable, 0))
    wire.setblocking(False)
    print("there", flush=True)
    waiting: deque[tuple[float, bytes, bool]] = deque()
    ends: list[int] = [queue, wire.fileno()]
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], left)
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while wire.fileno() in ready:
                frame, address = wire.recvfrom(FRAME)
                if address[2] != socket.PACKET_OUTGOING:
                    waiting.append((now + seconds, frame, True))
        with contextlib.suppress(BlockingIOError):
            while queue in ready:
                waiting.append((now + seconds, os.read(queue, FRAME), False))
        while waiting and waiting[0][0] <= time.monotonic():
            _, frame, from_node = waiting.popleft()
            with contextlib.suppress(OSError):  # a frame is lost, as on a full link
                os.write(queue, frame) if from_node else wire.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "delay":
        delay(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        set_offloads(sys.argv[2], int(sys.argv[3]))
