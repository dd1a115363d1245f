"""Network links of this node: what their adapters say of themselves, and how much goes through them.

Sees: ports of InfiniBand and RoCE, and Ethernet: up or down and how often down, rate, errors and retransmissions,
    bytes a second, congestion (waits for credits, marks, notifications), packets lost or out of order
From: `/sys/class/infiniband`, `/sys/class/net`, in one child
How often: every minute while jobs are here
Never: a bridge, a virtual interface, a setting
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec, Problem
from slurm_watchdog.agent.collectors.presentation import Family
from slurm_watchdog.agent.files.links import WORD
from slurm_watchdog.agent.workers.answer_types import LinkCounters
from slurm_watchdog.agent.workers.request_types import ReadLinks
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.model.links import Link
from slurm_watchdog.model.report import LinkSection, ProcessSection, Report

KEY = "links"
EVERY_S = 60.0
"""20 links take 1.5 ms, and the child that is started for it 1.6 ms: 0.005 % of a core. To keep it costs 3 MiB."""
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
            asked = self.context.workers.ask(KEY, ReadLinks(), self.deadline_s, now, self._apply, idle_s=0.0)
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


FAMILIES = (
    ("up", "up", "1 while the link is up."),
    ("rate_bits_s", "rate_bits_per_second", "Bits a second at which the link runs."),
    ("downs", "downs_total", "Times that the link went down."),
    ("errors", "errors_total", "Symbols and packets of the link that arrived broken or were sent again."),
    ("sent_bytes_s", "sent_bytes_per_second", "Bytes a second that the link sent between the last two looks."),
    (
        "received_bytes_s",
        "received_bytes_per_second",
        "Bytes a second that the link received between the last two looks.",
    ),
    ("waits_s", "waits_per_second", "Ticks of each second in which the link waited for a credit to send."),
    ("marked_s", "marked_per_second", "Packets a second that arrived with a mark of congestion (RoCE)."),
    ("slowed_s", "slowed_per_second", "Notifications of congestion a second for which the link slowed down (RoCE)."),
    ("resent_s", "resent_per_second", "Packets a second that were missing, out of order or not acknowledged."),
)
"""Field of the link, name of the metric, and its help."""


def metrics(report: Report) -> Iterable[Family]:
    """Every value of every link."""
    for field, name, text in FAMILIES:
        values = [((each.name,), value) for each in report.links if (value := getattr(each, field)) is not None]
        yield Family(f"link_{name}", text, ("link",), values)


SPEC = CollectorSpec("link", LinkSection, LinkCollector, metrics)
