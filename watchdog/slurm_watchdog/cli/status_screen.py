"""`status --watch`: a screen redrawn every few seconds, as a function of the controller's answer."""

from __future__ import annotations

import textwrap
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from slurm_watchdog.cli.terminal import clean, count, duration, fitting, fold_nodes, newest_checkpoint, shown
from slurm_watchdog.model.documents import Job, OpenIncident, Status

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS: Final = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS: Final = 24
"""Step times in a sparkline."""
FULL_CELL: Final = "█"
EMPTY_CELL: Final = "░"
BAR_WIDTH: Final = 10
LATE_RATIO: Final = 0.8
"""Share of its limit from which on a job's progress is yellow."""
MAX_INCIDENTS: Final = 8
LINES_AROUND_TABLE: Final = 8
"""Lines that are no rows of jobs."""
HEADINGS: Final = (
    "JOB",
    "USER",
    "STATE",
    "NODES",
    "RANKS",
    "STEP",
    "STEP TIME",
    "",
    "NO STEP FOR",
    "",
    "SAVED",
)
COLUMN_PRIORITY: Final = (0, 8, 9, 2, 5, 6, 4, 7, 1, 3, 10)
"""Columns, those first that are shown however narrow the screen is."""
MAX_COLUMN_WIDTH: Final = 28
"""Of a column, when it is counted what fits: the names of nodes may be long."""
MAX_WRAPPED_LINES: Final = 3  # of one sentence


class History:
    """Step times that were seen while watching, for a controller that does not tell them."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SPARKLINE_STEPS))
        self._steps: dict[str, int | None] = {}

    def record(self, jobs: Sequence[Job]) -> None:
        """Takes over what is new; jobs that are gone are forgotten."""
        there = {job.job_id for job in jobs}
        for job_id in [each for each in self._seen if each not in there]:
            del self._seen[job_id]
            self._steps.pop(job_id, None)
        for job in jobs:
            if job.step_s is not None and self._steps.get(job.job_id) != job.step:
                self._seen[job.job_id].append(job.step_s)
                self._steps[job.job_id] = job.step

    def step_times_s(self, job: Job) -> tuple[float, ...]:
        """The newest step times, oldest first."""
        return job.step_times_s[-SPARKLINE_STEPS:] or tuple(self._seen.get(job.job_id, ()))


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value between the smallest and the largest; one that is flat within 5 % is drawn flat."""
    known = [value for value in values if value == value and abs(value) != float("inf")]
    if not known:
        return ""
    low, high = min(known), max(known)
    if high - low <= 0.05 * abs(high):
        return BARS[0] * len(known)
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / (high - low) * len(BARS)))] for value in known)


def gauge(age_s: float | None, limit_s: float | None) -> str:
    """How much of its limit a job's progress age has used up."""
    if age_s is None or not limit_s:
        return ""
    filled = min(BAR_WIDTH, max(0, round(BAR_WIDTH * age_s / limit_s)))
    return FULL_CELL * filled + EMPTY_CELL * (BAR_WIDTH - filled)


def style_of(job: Job) -> str:
    """Red: past its limit, or a rank is lost. Yellow: near its limit."""
    used = job.progress_age_s / job.limit_s if job.progress_age_s is not None and job.limit_s else 0.0
    level = "" if job.health is None else job.health.level
    if used > 1 or job.has_lost_rank or level == "critical":
        return "red"
    return "yellow" if used > LATE_RATIO or level in ("warning", "unknown") else ""


def urgent_first(jobs: Sequence[Job]) -> list[Job]:
    """Those in trouble, then those nearest to their limit."""
    rank = {"red": 0, "yellow": 1}
    return sorted(
        jobs,
        key=lambda job: (
            rank.get(style_of(job), 2),
            -(job.progress_age_s or 0.0) / (job.limit_s or 1.0),
            job.job_id,
        ),
    )


def job_row(job: Job, times_s: Sequence[float]) -> tuple[str, ...]:
    """The cells of one job, for HEADINGS."""
    total = f"/{job.total_steps}" if job.total_steps is not None else ""
    return tuple(
        clean(cell)
        for cell in (
            job.job_id,
            job.user,
            job.health.state if job.health is not None else "not judged",
            fold_nodes(job.nodes),
            f"{shown(job.ranks_alive)}/{shown(job.ranks)}",
            shown(job.step) + total,
            duration(job.step_s),
            sparkline(times_s),
            f"{duration(job.progress_age_s)} of {duration(job.limit_s)}",
            gauge(job.progress_age_s, job.limit_s),
            newest_checkpoint(job.checkpoint_step, job.saved_age_s),
        )
    )


def _lines(text: str, width: int) -> list[str]:
    """The sentence on as few lines as it takes; what the last one has no room for is cut when it is drawn."""
    lines = textwrap.wrap(text, width) or [""]
    return [*lines[: MAX_WRAPPED_LINES - 1], " ".join(lines[MAX_WRAPPED_LINES - 1 :])][: len(lines)]


def frame(
    status: Status,
    headline: str,
    style: str,
    history: History,
    wall: float,
    height: int,
    note: str = "",
    *,
    width: int = 200,
) -> RenderableType:
    """One screen of at most `height` lines and `width` columns; `wall` is the date of now, `note` is the last line."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = status.open[: min(MAX_INCIDENTS, max(1, (height - LINES_AROUND_TABLE) // 2))]
    said = [(clean(headline), style)]
    said += [(clean(incident_line(each, wall)), "bold red" if each.state == "firing" else "yellow") for each in shown]
    head = [
        Text(line, style=colour, no_wrap=True, overflow="ellipsis")
        for sentence, colour in said
        for line in _lines(sentence, width)
    ]
    parts: list[RenderableType] = list(head[: max(1, height - LINES_AROUND_TABLE)])
    more = status.incidents.firing + status.incidents.pending - len(shown)
    if more > 0 and shown:
        parts.append(Text(f"and {more} more: slurm-watchdog incidents", no_wrap=True, overflow="ellipsis"))
    rows = max(1, height - LINES_AROUND_TABLE - len(parts))
    ranked = urgent_first(status.jobs)
    table = [job_row(job, history.step_times_s(job)) for job in ranked[:rows]]
    columns = fitting(HEADINGS, table, COLUMN_PRIORITY, width, dict.fromkeys(COLUMN_PRIORITY, MAX_COLUMN_WIDTH + 3))
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for column in columns:
        drawn.add_column(HEADINGS[column], no_wrap=True, overflow="ellipsis")
    for job, row in zip(ranked, table, strict=False):
        cells = (Text(row[column], no_wrap=True, overflow="ellipsis") for column in columns)
        drawn.add_row(*cells, style=style_of(job))
    parts.append(drawn)
    if len(ranked) > rows:
        left_out = f"and {count(len(ranked) - rows, 'job')} more, with more of their time left"
        parts.append(Text(left_out, no_wrap=True, overflow="ellipsis"))
    silent = f", {len(status.nodes.silent)} silent: {fold_nodes(status.nodes.silent)}" if status.nodes.silent else ""
    nodes = f"{count(len(status.nodes.reporting), 'node')} reporting{silent}"
    parts.append(Text(clean(nodes), no_wrap=True, overflow="ellipsis"))
    parts.append(Text(clean(note), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def incident_line(incident: OpenIncident, wall: float) -> str:
    """`FIRING collective_hang 3 min 7f3a: sentence`."""
    age = duration(max(0.0, wall - incident.opened_at)) if incident.opened_at is not None else "-"
    quiet = f" [{incident.quiet}]" if incident.quiet else ""
    return f"{incident.state.upper():8} {incident.kind} {age} {incident.id[:8]}{quiet}: {incident.summary}"


def watch(look: Callable[[], RenderableType], every_s: float) -> None:
    """Draws what `look` gives until Ctrl-C. The terminal is as it was before, afterwards."""
    from rich.live import Live

    from slurm_watchdog.base.loop import sleep
    from slurm_watchdog.cli.terminal import screen

    with Live(look(), console=screen(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                sleep(every_s)
                live.update(look(), refresh=True)
        except KeyboardInterrupt:
            pass
