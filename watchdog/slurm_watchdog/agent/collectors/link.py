"""Network links of this node: what their adapters say of themselves, and how much goes through them.

Sees: ports of InfiniBand and RoCE, and Ethernet: up or down and how often down, rate, errors and retransmissions,
    bytes a second, congestion (waits for credits, marks, notifications), packets lost or out of order
From: `/sys/class/infiniband`, `/sys/class/net`, in one child
How often: every minute while jobs are here
Never: a bridge, a virtual interface, a setting
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import LinkCounters
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ReadLinks, WorkerState
from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec, Problem
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.model.observations import Link
from slurm_watchdog.model.report import LinkSection, ProcessSection

SYSFS = "/sys/class"
MAX_LINKS = 32  # A node with 8 adapters for its GPUs has about 12 ports, each of which may be an interface, too.
_RATE = re.compile(rb"(\d{1,6}(?:\.\d)?) Gb/sec")
WORD = 4  # Bytes: InfiniBand counts its data in words of so many (IBA 1.6, 16.1.3.5).
PORT_ERRORS = (
    "counters/symbol_error", "counters/link_error_recovery", "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
)  # fmt: skip
"""Kernel, Documentation/ABI/stable/sysfs-class-infiniband. Discards are congestion, and no fault of the link."""
RESENT = (
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
)  # InfiniBand only: RoCE loses in congestion.
LOST = (*RESENT, "hw_counters/out_of_sequence")
MARKED = "hw_counters/np_ecn_marked_roce_packets"
SLOWED = "hw_counters/rp_cnp_handled"
"""mlx5 (drivers/infiniband/hw/mlx5/counters.c): np is the side that is notified of marks, rp the one that reacts."""
IFF_UP = 1
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
NET_ERRORS = ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors")


def read_links(request: ReadLinks, worker: WorkerState) -> list[LinkCounters]:
    """Every port and every interface with a device, at most MAX_LINKS."""
    return links_in(SYSFS)


def links_in(root: str) -> list[LinkCounters]:
    """The same of a directory like /sys/class."""
    return list(islice(chain(_ports(f"{root}/infiniband"), _interfaces(f"{root}/net")), MAX_LINKS))


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:  # no such adapter
        return []


@dataclass(frozen=True)
class _Place:
    """An open directory of sysfs: the way to it leads through ten others, and is walked once, not for each file."""

    fd: int

    def read(self, name: str) -> bytes | None:
        """A file in it, None where this driver has none, or the link is down."""
        try:
            return read_file(name, self.fd).strip()
        except OSError:
            return None

    def count(self, name: str) -> int | None:
        """The number in a file."""
        text = self.read(name) or b""
        return int(text) if text.isdigit() and len(text) < 20 else None

    def counts(self, names: Iterable[str]) -> dict[str, int | None]:
        """The numbers in several."""
        return {name: self.count(name) for name in names}


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
            with suppress(OSError), opened(f"{directory}/{adapter}/ports/{port}", _DIRECTORY) as fd:
                yield _port(f"{adapter}/{port}"[:64], _Place(fd))


def _port(name: str, place: _Place) -> LinkCounters:
    state = place.read("state")
    kind = "infiniband" if place.read("link_layer") == b"InfiniBand" else "roce"
    counts = place.counts((*PORT_ERRORS, *LOST))
    words = [place.count(f"counters/port_{way}_data") for way in ("xmit", "rcv")]
    sent, received = (None if each is None else each * WORD for each in words)
    link = Link(
        name=name,
        kind=kind,
        up=None if not state else b"ACTIVE" in state,
        rate_bits_s=parse_rate(place.read("rate")),
        downs=place.count("counters/link_downed"),
        errors=_sum([counts[each] for each in (PORT_ERRORS if kind == "roce" else PORT_ERRORS + RESENT)]),
    )
    waits = place.count("counters/port_xmit_wait")
    marked, slowed = (place.count(each) if kind == "roce" else None for each in (MARKED, SLOWED))
    lost = _sum([counts[each] for each in LOST])
    return LinkCounters(link, clock.monotonic(), sent, received, waits, marked, slowed, lost)


def _is_off(place: _Place) -> bool:
    """Whether someone has switched this interface off, or never on."""
    flags = place.read("flags") or b""
    return bool(re.fullmatch(rb"0x[0-9a-f]{1,8}", flags)) and not int(flags, 16) & IFF_UP


def _is_left_out(place: _Place) -> bool:
    """Whether it has no device (a bridge, a container's end, lo), or one on USB."""
    try:
        os.stat("device", dir_fd=place.fd)
    except OSError:
        return True
    try:
        return os.path.basename(os.readlink("device/subsystem", dir_fd=place.fd)) == "usb"
    except OSError:
        return False


def _interfaces(directory: str) -> Iterator[LinkCounters]:
    for name in _names(directory):
        with suppress(OSError), opened(f"{directory}/{name}", _DIRECTORY) as fd:
            place = _Place(fd)
            if not _is_left_out(place) and not _is_off(place):
                yield _interface(name[:64], place)


def _interface(name: str, place: _Place) -> LinkCounters:
    link = Link(
        name=name,
        kind="ethernet",
        up={b"up": True, b"down": False, b"lowerlayerdown": False}.get(place.read("operstate") or b""),
        rate_bits_s=parse_speed(place.read("speed")),
        downs=place.count("carrier_down_count"),
        errors=_sum(list(place.counts(f"statistics/{each}" for each in NET_ERRORS).values())),
    )
    sent, received = (place.count(f"statistics/{way}_bytes") for way in ("tx", "rx"))
    return LinkCounters(link, clock.monotonic(), sent, received)


KEY = "links"
EVERY_S = 60.0  # 20 links take 1.5 ms, and the child that is started for it 1.6 ms; to keep it costs 3 MiB.
ENDS = frozenset({2**16 - 1, 2**32 - 1, (2**32 - 1) * WORD, 2**64 - 1})
"""Of counters that stop there: those of older adapters have 16 or 32 bits (InfiniBand Architecture, PortCounters)."""
COUNTERS = ("sent_bytes", "received_bytes", "waits", "marked", "slowed", "resent")
"""Those of LinkCounters that become a rate of the link, with `_s` behind."""
OLD_S = 3 * EVERY_S  # What an adapter said so long ago is said no more.


class LinkCollector(Collector):
    """The newest look at each link, with what went through it since the look before."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self._due, self._read_at = float("-inf"), float("-inf")
        self._before: dict[str, LinkCounters] = {}
        self._links: tuple[Link, ...] = ()
        self._error: str | None = None

    def collect(self, now: float) -> LinkSection:
        """Nothing while no job is here, and where the adapters have not answered for long."""
        if not self.sections.of(ProcessSection).processes:
            self._due, self._links, self._before = float("-inf"), (), {}
        elif now >= self._due:
            asked = self.context.children.ask(KEY, ReadLinks(), self.deadline_s, now, self._apply, idle_s=0.0)
            self._due = now + EVERY_S if asked is not None else self._due
        if self._links and now - self._read_at > OLD_S:
            self._links = ()
        return LinkSection(links=self._links)

    def problems(self, now: float) -> Iterator[Problem]:
        """Why nothing is known of the links."""
        if self._error is not None:
            yield Problem(f"links: {self._error}", failed=False)

    def _apply(self, answer: Answer[list[LinkCounters]]) -> None:
        self._error = None if answer.error is None else str(answer.error)
        if answer.value is None:
            return
        self._links = tuple(with_rates(each, self._before.get(each.link.name)) for each in answer.value)
        self._before = {each.link.name: each for each in answer.value}
        self._read_at = max((each.at for each in answer.value), default=float("-inf"))


def with_rates(now: LinkCounters, before: LinkCounters | None) -> Link:
    """The link with what went through it between two looks; nothing where a counter was reset or stands at its end."""
    passed_s = 0.0 if before is None else now.at - before.at
    if before is None or passed_s <= 0:
        return now.link

    def rate(new: int | None, old: int | None) -> float | None:
        if new is None or old is None or new < old or new in ENDS:
            return None
        return (new - old) / passed_s

    return replace(now.link, **{f"{name}_s": rate(getattr(now, name), getattr(before, name)) for name in COUNTERS})


SPEC = CollectorSpec("link", LinkSection, LinkCollector)
