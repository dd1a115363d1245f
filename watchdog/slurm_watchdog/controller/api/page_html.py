"""The page as HTML: one template over the documents that the page's routes answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, Template
from markupsafe import Markup

from slurm_watchdog.base.text import duration, fold, one_line, plural
from slurm_watchdog.model.documents import Job, JobHealth
from slurm_watchdog.model.observations import Blocked
from slurm_watchdog.model.page_documents import MapNode, Rank

MAX_TEXT = 10_000  # Characters of one value.


def rendered(**values: Any) -> bytes:
    """The page; `view` says which, `all` is the overview, `found` the view's document."""
    return template().render(unjudged=JobHealth(), **values).encode()


@cache
def template() -> Template:
    environment = Environment(autoescape=True, finalize=shown, trim_blocks=True, lstrip_blocks=True)
    filters = (
        best_clock, cells, clock, figure, grouped, having, known, label, nearest_first, part, plural, points, seconds,
        spans, split_by, waits, where, who,
    )  # fmt: skip
    environment.filters |= {each.__name__: each for each in filters}
    environment.globals["ticks"] = ticks
    return environment.from_string((files(__package__) / "static/page.html.j2").read_text("utf-8"))


def shown(value: object) -> object:
    """A value on one line, without invisible characters and those that turn text around; escaping follows."""
    return value if isinstance(value, Markup) else "-" if value is None else one_line(str(value), MAX_TEXT)


def part(value: object) -> str:
    """A part of an address."""
    return quote(one_line(str(value), MAX_TEXT), safe="")


def known(value: object) -> object:
    return "-" if value is None else value


def clock(at: float | None, shape: str = "%Y-%m-%d %H:%M:%S") -> str:
    """As in a terminal and in Slurm's logs: where the controller is."""
    return datetime.fromtimestamp(at, tz=timezone.utc).astimezone().strftime(shape) if at else "-"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return duration(value) if value >= 10 else f"{value:.{2 if value < 1 else 1}f} s"


def figure(value: float | None, shape: str, factor: float = 1.0) -> str:
    return shape % (value * factor) if isinstance(value, float | int) else "-"


def spans(numbers: Iterable[int]) -> str:
    """`0-2, 5`."""
    return ", ".join(fold(map(str, numbers)))


def who(group: Mapping[str, Any]) -> str:
    return f"{plural(len(group['ranks']), 'rank')}: {spans(group['ranks'])}"


def where(group: Mapping[str, Any]) -> str:
    return str(group.get("place") or next(iter(group.get("frames") or ()), ""))


def split_by(groups: Sequence[Mapping[str, Any]], named: Collection[int]) -> tuple[list[Any], list[Any]]:
    """Groups with a rank that is named, and the others."""
    odd = [each for each in groups if not set(named).isdisjoint(each["ranks"])]
    return odd, [each for each in groups if each not in odd]


def waits(blocked: Blocked) -> str:
    return f"{blocked.syscall or 'waits'} on {blocked.path or blocked.mount or 'a file'}"


def points(rows: Iterable[Any], name: str) -> list[tuple[int, float]]:
    """(step, value) of each that has a finite one."""
    return [(each.step, value) for each in rows if math.isfinite(value := getattr(each, name))]


def grouped(rows: Iterable[Any], name: str) -> list[tuple[Any, list[Any]]]:
    """Rows that have the same, in the order in which each is seen first."""
    found: dict[Any, list[Any]] = {}
    for each in rows:
        found.setdefault(attrgetter(name)(each), []).append(each)
    return list(found.items())


def having(rows: Iterable[Any], query: str, *names: str) -> list[Any]:
    """Rows that have every word of the filter in one of these fields."""
    words = query.lower().split()
    if not words:
        return list(rows)
    texts = ((each, " ".join(str(getattr(each, name)) for name in names).lower()) for each in rows)
    return [each for each, text in texts if all(word in text for word in words)]


def nearest_first(jobs: Iterable[Job]) -> list[Job]:
    """Those that are nearest to their limit, or beyond it, come first, as in `status --watch`."""
    return sorted(jobs, key=lambda each: -((2 * (each.progress_age_s or 0.0)) // (each.limit_s or math.inf)))


def best_clock(ranks: Sequence[Rank]) -> float:
    """The highest clock of a rank's only GPU; 0 where there are no two to compare."""
    clocks = [each.gpus[0].sm_clock_hz for each in ranks if len(each.gpus) == 1 and each.gpus[0].sm_clock_hz]
    return max(clocks) if len(clocks) > 1 else 0.0


def label(node: MapNode, words: Mapping[str, str], gpu_words: Mapping[str, str]) -> str:
    """A node of the map in words."""
    state = ": ".join(filter(None, (words.get(node.state, ""), node.reason)))
    gpus = ", ".join(f"{node.gpus.count(each)} GPU {gpu_words[each]}" for each in dict.fromkeys(node.gpus))
    return "; ".join(filter(None, (node.node, state, gpus, f"job {', '.join(node.jobs)}" if node.jobs else "")))


@cache
def cells(gpus: str) -> Markup:
    """A box for each GPU: of thousands of nodes most have the same."""
    return Markup("").join(
        Markup('<i class="gpu {}">{}</i>').format(each, each if each in "xetu" else "") for each in gpus
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about six."""
    raw = max(high - low, abs(high) * 1e-3, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= raw * 0.999999)
    first = math.floor(low / step + 1e-9)
    return [
        float(f"{(first + number) * step:.12g}") for number in range(max(2, math.ceil(high / step - 1e-9) - first + 1))
    ]
