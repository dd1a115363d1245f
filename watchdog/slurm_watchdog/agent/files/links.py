"""Links as sysfs shows them. An adapter that does not answer holds up who reads its counters: for children."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.agent.workers.answer_types import LinkCounters
from slurm_watchdog.agent.workers.request_types import ReadLinks
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.model.links import Link

SYSFS: Final = "/sys/class"
MAX_LINKS: Final = 32
"""A node with 8 adapters for its GPUs has about 12 ports, each of which may be an interface, too."""
_RATE: Final = re.compile(rb"(\d{1,6}(?:\.\d)?) Gb/sec")
WORD: Final = 4
"""Bytes: InfiniBand counts its data in words of so many (IBA 1.6, 16.1.3.5)."""
PORT_ERRORS: Final = (
    "counters/symbol_error", "counters/link_error_recovery", "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
)  # fmt: skip
"""Kernel, Documentation/ABI/stable/sysfs-class-infiniband. Discards are congestion, and no fault of the link."""
RESENT: Final = ("hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err")
"""Of InfiniBand only: on RoCE congestion loses packets."""
LOST: Final = (*RESENT, "hw_counters/out_of_sequence")
MARKED: Final = "hw_counters/np_ecn_marked_roce_packets"
SLOWED: Final = "hw_counters/rp_cnp_handled"
"""mlx5 (drivers/infiniband/hw/mlx5/counters.c): np is the side that is notified of marks, rp the one that reacts."""
IFF_UP: Final = 1
NET_ERRORS: Final = ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors")


def read_links(request: ReadLinks, worker: WorkerState) -> list[LinkCounters]:
    """Every port and every interface with a device, at most MAX_LINKS."""
    return links_in(SYSFS)


def links_in(root: str) -> list[LinkCounters]:
    """The same of a directory like /sys/class."""
    found = []
    for link in (*_ports(f"{root}/infiniband"), *_interfaces(f"{root}/net")):
        found.append(link)
        if len(found) == MAX_LINKS:
            break
    return found


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:  # no such adapter
        return []


def _read(path: str) -> bytes | None:
    try:
        return read_file(path).strip()
    except OSError:  # this driver has no such file, or the link is down
        return None


def _count(path: str) -> int | None:
    text = _read(path) or b""
    return int(text) if text.isdigit() and len(text) < 20 else None


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def parse_rate(text: bytes | None) -> int | None:
    """Bits a second in `400 Gb/sec (4X NDR)`; None where it says none."""
    match = _RATE.search(text or b"")
    return int(float(match[1]) * 1e9) or None if match else None


def parse_speed(text: bytes | None) -> int | None:
    """Bits a second in an interface's `speed`, in Mb/s there; -1 for unknown."""
    text = text or b""
    return int(text) * 10**6 or None if text.isdigit() and len(text) < 9 else None


def _ports(directory: str) -> Iterator[LinkCounters]:
    for adapter in _names(directory):
        for port in _names(f"{directory}/{adapter}/ports"):
            place = f"{directory}/{adapter}/ports/{port}"
            state = _read(f"{place}/state")
            kind = "infiniband" if _read(f"{place}/link_layer") == b"InfiniBand" else "roce"
            counts = {name: _count(f"{place}/{name}") for name in (*PORT_ERRORS, *LOST)}
            errors = PORT_ERRORS if kind == "roce" else PORT_ERRORS + RESENT
            words = [_count(f"{place}/counters/port_{way}_data") for way in ("xmit", "rcv")]
            sent, received = (None if each is None else each * WORD for each in words)
            link = Link(
                name=f"{adapter}/{port}"[:64],
                kind=kind,
                up=None if not state else b"ACTIVE" in state,
                rate_bits_s=parse_rate(_read(f"{place}/rate")),
                downs=_count(f"{place}/counters/link_downed"),
                errors=_sum([counts[name] for name in errors]),
            )
            waits = _count(f"{place}/counters/port_xmit_wait")
            marked, slowed = (_count(f"{place}/{each}") if kind == "roce" else None for each in (MARKED, SLOWED))
            lost = _sum([counts[name] for name in LOST])
            yield LinkCounters(link, clock.monotonic(), sent, received, waits, marked, slowed, lost)


def _is_off(place: str) -> bool:
    """Whether somebody has switched this interface off, or never on."""
    flags = _read(f"{place}/flags") or b""
    return bool(re.fullmatch(rb"0x[0-9a-f]{1,8}", flags)) and not int(flags, 16) & IFF_UP


def _interfaces(directory: str) -> Iterator[LinkCounters]:
    for name in _names(directory):
        place = f"{directory}/{name}"
        if not os.path.exists(f"{place}/device"):
            continue  # a bridge, a container's end, lo
        if _is_off(place) or os.path.basename(os.path.realpath(f"{place}/device/subsystem")) == "usb":
            continue
        state = _read(f"{place}/operstate")
        link = Link(
            name=name[:64],
            kind="ethernet",
            up={b"up": True, b"down": False, b"lowerlayerdown": False}.get(state or b""),
            rate_bits_s=parse_speed(_read(f"{place}/speed")),
            downs=_count(f"{place}/carrier_down_count"),
            errors=_sum([_count(f"{place}/statistics/{counter}") for counter in NET_ERRORS]),
        )
        sent, received = (_count(f"{place}/statistics/{way}_bytes") for way in ("tx", "rx"))
        yield LinkCounters(link, clock.monotonic(), sent, received)
