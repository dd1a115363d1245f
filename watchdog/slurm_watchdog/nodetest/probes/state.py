"""What a node says of itself: CPU model, clock, network interfaces and their counters. Standard library only."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import glob
import os
import platform
import socket
import struct
from typing import Any

SIOCETHTOOL, ETHTOOL_GSET = 0x8946, 0x00000001
"""linux/sockios.h, linux/ethtool.h: speed of a link in Mb/s, without sysfs, which a container may not have."""
SIOCGIFADDR = 0x8915
SPEED_UNKNOWN = 0xFFFF
STA_UNSYNC = 0x0040
"""linux/timex.h: nothing disciplines this clock."""
TIMEX_BYTES, STATUS_AT = 208, 40
"""Size of struct timex on 64-bit Linux, and where `status` is in it (adjtimex(2)): behind five padded longs."""
NET_COLUMNS = {"rx_errors": 2, "rx_drops": 3, "tx_errors": 10, "tx_drops": 11}
"""Of /proc/net/dev (proc(5)), after the name."""
IB_COUNTERS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_xmit_discards")
"""Files in /sys/class/infiniband/*/ports/*/counters."""


def model() -> str:
    """The CPU's model, as /proc/cpuinfo names it; empty if it does not."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return ""


def is_virtual(text: str) -> bool:
    """Given /proc/cpuinfo: whether a hypervisor has given this machine its processors (x86: the flag `hypervisor`)."""
    return any(line.startswith("flags") and "hypervisor" in line.split() for line in text.splitlines())


def _virtual() -> bool:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return is_virtual(file.read()) or os.path.exists("/sys/hypervisor/type")
    return False


def clock_unsynchronised() -> bool | None:
    """Whether the kernel says that nothing disciplines its clock; None: it did not answer."""
    try:
        buffer = ctypes.create_string_buffer(TIMEX_BYTES)
        if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
            return None
        return bool(struct.unpack_from("i", buffer, STATUS_AT)[0] & STA_UNSYNC)
    except (OSError, AttributeError):
        return None


def parse_counters(text: str) -> dict[str, dict[str, int]]:
    """Given /proc/net/dev: interface -> counter -> value, without the loopback."""
    found: dict[str, dict[str, int]] = {}
    for line in text.splitlines()[2:]:
        name, _, values = line.partition(":")
        fields = values.split()
        if name.strip() != "lo" and len(fields) >= 12:
            found[name.strip()] = {key: int(fields[at]) for key, at in NET_COLUMNS.items()}
    return found


def counters() -> dict[str, int]:
    """`eth0 rx_errors` -> value, of every interface, and `mlx5_0/1 symbol_error` of every InfiniBand port."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), open("/proc/net/dev") as file:
        for name, values in parse_counters(file.read()).items():
            found.update({f"{name} {key}": value for key, value in values.items()})
    for port in glob.glob("/sys/class/infiniband/*/ports/*"):
        where = f"{port.split('/')[4]}/{port.split('/')[6]}"
        for key in IB_COUNTERS:
            with contextlib.suppress(OSError, ValueError), open(f"{port}/counters/{key}") as file:
                found[f"{where} {key}"] = int(file.read())
    return found


def risen(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """The counters that are higher than they were, by how much."""
    return {name: value - before[name] for name, value in after.items() if value > before.get(name, value)}


def speed_mbps(interface: str) -> int | None:
    """Of the link, in Mb/s; None: it does not say."""
    answer = array.array("B", struct.pack("I40x", ETHTOOL_GSET))
    request = struct.pack("16sP", interface.encode()[:15], answer.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
            fcntl.ioctl(endpoint, SIOCETHTOOL, request)
    except OSError:
        return None
    low, high = struct.unpack_from("H", answer, 12)[0], struct.unpack_from("H", answer, 28)[0]
    speed = low | (high << 16)
    return None if low == SPEED_UNKNOWN or not speed else int(speed)


def address_of(interface: str) -> str:
    """The IPv4 address of an interface. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        answer = fcntl.ioctl(endpoint, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str:
    """Which interface has this address; empty if none has."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if address_of(name) == address:
                return name
    return ""


def measure_state(asked: dict[str, Any]) -> dict[str, Any]:
    """Facts only, and `nic_speed` in Gb/s of the interface that the site names."""
    facts: dict[str, Any] = {
        "model": f"{model()} x{os.cpu_count()}", "kernel": os.uname().release, "python": platform.python_version(),
        "clock_unsynchronised": clock_unsynchronised(), "virtual": _virtual(),
    }  # fmt: skip
    figures = {}
    speed = speed_mbps(asked["interface"]) if asked.get("interface") else None
    if speed:
        figures["nic_speed"] = [speed / 1000, 0.0, 1, False]
    return {"figures": figures, "facts": facts}
