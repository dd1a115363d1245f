"""The agent's own /metrics: how it fares itself, and what is worth a graph without a controller.

A tick only leaves its report here and adds to a few counters; everything else happens when Prometheus asks. No label
holds a pid or a user's text, and no metric has more than MAX_ROWS series: what is above is left out, and counted.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import slurm_watchdog
from slurm_watchdog.agent.collectors.collector import Family, Series, largest
from slurm_watchdog.agent.collectors.registry import COLLECTORS
from slurm_watchdog.base import clock, loop
from slurm_watchdog.base.loop import Isolated, isolate
from slurm_watchdog.model.report import Report

# Prometheus' text format, and a listener that answers with it: so little is needed that its library, of 14 MiB, is
# not loaded.
# The format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REQUEST = 16 * 1024
CLIENT_S = 2.0  # One scrape, from its first byte to the last of the answer: a slow reader delays the next by no more.


def escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_value(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def format_family(family: Family) -> list[str]:
    """The lines of one metric; none if it has no series. Bytes of names that are no UTF-8 become question marks."""
    name, lines = PREFIX + family.name, []
    for values, value in family.series:
        pairs = ",".join(f'{key}="{escape_label(each)}"' for key, each in zip(family.labels, values, strict=True))
        lines.append(f"{name}{{{pairs}}} {format_value(value)}" if pairs else f"{name} {format_value(value)}")
    return [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}", *lines] if lines else []


def histogram(name: str, text: str, counts: list[int], total: float) -> list[str]:
    """The lines of a histogram without labels; `counts` has one more than TICK_BOUNDS, for what is above them all."""
    lines, below = [f"# HELP {name} {text}", f"# TYPE {name} histogram"], 0
    for bound, count in zip((*(repr(each) for each in TICK_BOUNDS), "+Inf"), counts, strict=True):
        below += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
    return [*lines, f"{name}_sum {total!r}", f"{name}_count {below}"]


def serve(host: str, port: int, render: Callable[[], bytes]) -> int | None:
    """Answers on this address from a thread of its own; returns the port, None (with a warning) where it is taken."""
    try:
        family_of_host = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family_of_host, backlog=16)
    except OSError as error:
        log.warning("no metrics: %s:%d cannot be listened on (%s); set agent.metrics_listen", host, port, error)
        return None
    threading.Thread(target=_serve_for_ever, args=(listener, render), name="metrics", daemon=True).start()
    found: int = listener.getsockname()[1]
    return found


def _serve_for_ever(listener: socket.socket, render: Callable[[], bytes]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # no descriptor left: they come back
            loop.sleep(1.0)
            continue
        with client:
            try:
                _answer(client, render)
            except OSError:
                pass  # it went away, or was too slow
            except Exception:
                log.exception("the metrics could not be rendered")


def _answer(client: socket.socket, render: Callable[[], bytes]) -> None:
    end = clock.monotonic() + CLIENT_S
    request = b""
    while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST:
        client.settimeout(max(0.001, end - clock.monotonic()))
        data = client.recv(4096)
        if not data:
            return
        request += data
    method, path, _ = (*request.split(b"\r\n", 1)[0].split(b" "), b"", b"")[:3]
    found = method in (b"GET", b"HEAD") and path.partition(b"?")[0] in (b"/metrics", b"/")
    body = render() if found else b"/metrics is here, nothing else\n"
    status = "200 OK" if found else "404 Not Found"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    client.settimeout(CLIENT_S)
    client.sendall(head.encode() + (b"" if method == b"HEAD" else body))


PREFIX = "slurm_watchdog_"
MAX_ROWS = 512  # Series of one metric: 16 GPUs with 32 kinds of fault each; a node has far fewer of anything.
TICK_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
PROBE_OWNER = re.compile(r":(-?\d+|self)$")
DROPPED = Family("agent_series_dropped", "Series above the limit of their metric.")


class AgentMetrics:
    """What the loop counts, and its last report. `update` and `count_*` are cheap; `render` may run in any thread."""

    def __init__(
        self,
        count_probes: Callable[[], Mapping[str, int]] = dict,
        read_driver_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`count_probes` gives children by state, `read_driver_s` the time that the last tick spent in NVML."""
        self.read_expiry: Callable[[], Mapping[str, float]] = dict  # When certificates end.
        self._count_probes, self._read_driver_s = count_probes, read_driver_s
        self._report: Report | None = None
        self._seen = Isolated()
        self._spool_bytes = 0
        self._outcomes: Counter[str] = Counter()
        self._counters = [(spec.name, spec.counters()) for spec in COLLECTORS if spec.counters is not None]
        self._tick_counts = [0] * (len(TICK_BOUNDS) + 1)
        self._tick_s = 0.0

    # -- what the loop says ------------------------------------------------------------------------------------

    def count_report(self, outcome: str) -> None:
        """Adds one report with this outcome. May be called from any thread."""
        self._outcomes[outcome] += 1

    def count_tick(self, seconds: float) -> None:
        """Adds one tick that took so long, whole or not."""
        self._tick_counts[bisect_left(TICK_BOUNDS, seconds)] += 1
        self._tick_s += seconds

    def update(self, report: Report, seen: Isolated, spool_bytes: int) -> None:
        """Takes over what one tick saw."""
        self._report, self._seen, self._spool_bytes = report, seen, spool_bytes
        for name, counters in self._counters:
            isolate(name, partial(counters.update, report), None, Isolated())

    # -- what Prometheus asks ----------------------------------------------------------------------------------

    def families(self) -> list[Family]:
        """Every metric but the histogram of ticks, those without series included."""
        found = [*self._own(self._seen)]
        report = self._report
        if report is not None:
            hung = largest(((probe_label(probe.probe),), probe.seconds) for probe in report.hung_probes)
            text = "Seconds that a child of the agent has not returned."
            found.append(Family("probe_hung", text, ("probe",), hung))
            for spec in COLLECTORS:
                found += isolate(spec.name, partial(_listed, spec.metrics, report), [], Isolated())
            for name, counters in self._counters:
                found += isolate(name, partial(_listed, counters.families, report), [], Isolated())
        return found

    def render(self) -> bytes:
        """All series, in Prometheus' text format."""
        lines, left_out = [], 0
        for each in self.families():
            series = list(each.series)
            left_out += max(0, len(series) - MAX_ROWS)
            lines += format_family(each._replace(series=series[:MAX_ROWS]))
        text, counts = "Time of one tick.", list(self._tick_counts)
        lines += histogram(f"{PREFIX}agent_tick_duration_seconds", text, counts, self._tick_s)
        lines += format_family(DROPPED._replace(series=[((), left_out)]))
        return ("\n".join(lines) + "\n").encode(errors="replace")

    def _own(self, seen: Isolated) -> Iterable[Family]:
        succeeded = [((name,), name not in seen.failed) for name in list(seen.seconds)]
        took = [((name,), seconds) for name, seconds in list(seen.seconds.items())]
        children = [((state,), count) for state, count in self._count_probes().items()]
        reports = [((outcome,), count) for outcome, count in sorted(self._outcomes.items())]
        ends = [((name,), moment) for name, moment in self.read_expiry().items()]
        driver_s, version = self._read_driver_s(), slurm_watchdog.__version__
        text = "Reports by what became of them: sent, failed (will be tried again), rejected, expired."
        rows: tuple[tuple[str, str, str, Iterable[Series]], ...] = (
            ("agent_build_info", "1, with the version.", "version", [((version,), 1)]),
            ("ticks_total", "Ticks of the loop.", "", [((), sum(self._tick_counts))]),
            ("collector_success", "1 if the collector worked in the last tick.", "collector", succeeded),
            ("collector_duration_seconds", "Time the collector took in the last tick.", "collector", took),
            ("probes", "Children of the agent.", "state", children),
            ("spool_bytes", "Reports that wait for the controller.", "", [((), self._spool_bytes)]),
            ("agent_reports_total", text, "outcome", reports),
            ("certificate_expiry_timestamp_seconds", "When a certificate of ours ends.", "certificate", ends),
            ("nvml_driver_seconds", "Time that the last tick spent in NVML.", "",
             [] if driver_s is None else [((), driver_s)]),
        )  # fmt: skip
        for name, text, label, series in rows:
            yield Family(name, text, (label,) if label else (), series)


def _listed(families: Callable[[Report], Iterable[Family]], report: Report) -> list[Family]:
    return list(families(report))


def probe_label(probe: str) -> str:
    """Kind and mount of a child: `files:/shared` of `files:/shared:1000`. No user, no pid."""
    kind, _, rest = probe.partition(":")
    return f"{kind}:{PROBE_OWNER.sub('', rest)}" if rest.startswith("/") else kind
