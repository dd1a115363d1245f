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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
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
PORTS, INFINIBAND, ROCE, ETHERNET = ("infiniband", "roce"), ("infiniband",), ("roce",), ("ethernet",)
PORT_ERRORS = (
    "counters/symbol_error", "counters/link_error_recovery", "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
)  # fmt: skip
"""Kernel, Documentation/ABI/stable/sysfs-class-infiniband. Discards are congestion, and no fault of the link."""
RESENT = ("hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err")
NET_ERRORS = tuple(f"statistics/{name}" for name in ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors"))
COUNTERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], int], ...] = (
    ("downs", PORTS, ("counters/link_downed",), 1),
    ("downs", ETHERNET, ("carrier_down_count",), 1),
    ("errors", INFINIBAND, PORT_ERRORS + RESENT, 1),
    ("errors", ROCE, PORT_ERRORS, 1),  # which loses packets in congestion
    ("errors", ETHERNET, NET_ERRORS, 1),
    ("sent_bytes", PORTS, ("counters/port_xmit_data",), WORD),
    ("sent_bytes", ETHERNET, ("statistics/tx_bytes",), 1),
    ("received_bytes", PORTS, ("counters/port_rcv_data",), WORD),
    ("received_bytes", ETHERNET, ("statistics/rx_bytes",), 1),
    ("waits", PORTS, ("counters/port_xmit_wait",), 1),
    ("marked", ROCE, ("hw_counters/np_ecn_marked_roce_packets",), 1),
    ("slowed", ROCE, ("hw_counters/rp_cnp_handled",), 1),
    ("resent", PORTS, (*RESENT, "hw_counters/out_of_sequence"), 1),
)
"""What is counted, of which kinds of link, the files whose sum it is, and their unit. np and rp are mlx5's
(drivers/infiniband/hw/mlx5/counters.c): the side that is notified of marks, and the one that reacts. Of all but the
first two a rate becomes known, a field of Link with `_s` behind."""
TOTALS = ("downs", "errors")
UP = {b"up": True, b"down": False, b"lowerlayerdown": False}  # Of an interface's operstate.
IFF_UP = 1
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


def read_links(request: ReadLinks, worker: WorkerState) -> list[LinkCounters]:
    """Every port and every interface with a device, at most MAX_LINKS."""
    return links_in(SYSFS)


def links_in(root: str) -> list[LinkCounters]:
    """The same of a directory like /sys/class."""
    names = partial(_names, root)
    ports = ((f"{device}/{port}", f"{root}/infiniband/{device}/ports/{port}")
             for device in names("infiniband") for port in names(f"infiniband/{device}/ports"))  # fmt: skip
    interfaces = ((name, f"{root}/net/{name}") for name in names("net"))
    return list(islice(chain(_read(ports, _port), _read(interfaces, _interface)), MAX_LINKS))


def _names(root: str, directory: str) -> list[str]:
    try:
        return sorted(os.listdir(f"{root}/{directory}"))
    except OSError:  # no such adapter
        return []


def _read(places: Iterable[tuple[str, str]], read: Callable[[str, int], Link | None]) -> Iterator[LinkCounters]:
    """Each from its open directory: the way to it leads through ten others, and is walked once, not for each file."""
    for name, path in places:
        with suppress(OSError), opened(path, _DIRECTORY) as fd:
            if (link := read(name[:64], fd)) is not None:
                counts = {
                    field: sum(known) * unit
                    for field, kinds, files, unit in COUNTERS
                    if link.kind in kinds and (known := [n for each in files if (n := _count(fd, each)) is not None])
                }
                totals = {field: counts.pop(field, None) for field in TOTALS}
                yield LinkCounters(replace(link, **totals), clock.monotonic(), counts)


def _text(fd: int, name: str) -> bytes:
    """A file in such a directory, empty where this driver has none, or the link is down."""
    try:
        return read_file(name, fd).strip()
    except OSError:
        return b""


def _count(fd: int, name: str) -> int | None:
    text = _text(fd, name)
    return int(text) if text.isdigit() and len(text) < 20 else None


def parse_rate(text: bytes) -> int | None:
    """Bits a second in `400 Gb/sec (4X NDR)`; None where it says none."""
    match = _RATE.search(text)
    return int(float(match[1]) * 1e9) or None if match else None


def parse_speed(text: bytes) -> int | None:
    """Bits a second in an interface's `speed`, in Mb/s there; -1 for unknown."""
    return int(text) * 10**6 or None if text.isdigit() and len(text) < 9 else None


def _port(name: str, fd: int) -> Link:
    state = _text(fd, "state")
    kind = "infiniband" if _text(fd, "link_layer") == b"InfiniBand" else "roce"
    up = b"ACTIVE" in state if state else None
    return Link(name=name, kind=kind, up=up, rate_bits_s=parse_rate(_text(fd, "rate")))


def _interface(name: str, fd: int) -> Link | None:
    """None for one without a device (a bridge, a container's end, lo), on USB, or switched off by someone."""
    os.stat("device", dir_fd=fd)
    flags = _text(fd, "flags")
    with suppress(OSError):
        if os.path.basename(os.readlink("device/subsystem", dir_fd=fd)) == "usb":
            return None
    if re.fullmatch(rb"0x[0-9a-f]{1,8}", flags) and not int(flags, 16) & IFF_UP:
        return None
    up = UP.get(_text(fd, "operstate"))
    return Link(name=name, kind="ethernet", up=up, rate_bits_s=parse_speed(_text(fd, "speed")))


KEY = "links"
EVERY_S = 60.0  # 20 links take 1.5 ms, and the child that is started for it 1.6 ms; to keep it costs 3 MiB.
ENDS = frozenset({2**16 - 1, 2**32 - 1, (2**32 - 1) * WORD, 2**64 - 1})
"""Of counters that stop there: those of older adapters have 16 or 32 bits (InfiniBand Architecture, PortCounters)."""
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

    rates = {
        f"{name}_s": (count - old) / passed_s
        for name, count in now.counts.items()
        if (old := before.counts.get(name)) is not None and old <= count and count not in ENDS
    }
    return replace(now.link, **rates)


SPEC = CollectorSpec("link", LinkSection, LinkCollector)
