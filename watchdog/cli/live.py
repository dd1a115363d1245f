"""`status --watch`: one screen that is drawn anew every few seconds. What is drawn is a function of what the controller answered."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from watchdog.cli.answers import Job, OpenIncident, Status
from watchdog.cli.text import clean, count, duration, fold_nodes

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS: Final = "▁▂▃▄▅▆▇█"
KEPT: Final = 24
"""Step times in a sparkline."""
FULL: Final = "█"
EMPTY: Final = "░"
BAR_WIDTH: Final = 10
LATE: Final = 0.8
"""Share of its limit from which on a job's progress is yellow."""
INCIDENTS: Final = 8
AROUND: Final = 8
"""Lines that are no rows of jobs."""
HEADINGS: Final = (
    "JOB",
    "USER",
    "PHASE",
    "NODES",
    "RANKS",
    "STEP",
    "STEP TIME",
    "",
    "NO STEP FOR",
    "",
    "SAVED",
)


class History:
    """Step times that were seen while watching, for a controller that does not tell them."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._steps: dict[str, int | None] = {}

    def note(self, jobs: Sequence[Job]) -> None:
        """Takes over what is new; jobs that are gone are forgotten."""
        there = {job.job_id for job in jobs}
        for job_id in [each for each in self._seen if each not in there]:
            del self._seen[job_id]
            self._steps.pop(job_id, None)
        for job in jobs:
            if job.step_s is not None and self._steps.get(job.job_id) != job.step:
                self._seen[job.job_id].append(job.step_s)
                self._steps[job.job_id] = job.step

    def of(self, job: Job) -> tuple[float, ...]:
        """The newest step times, oldest first."""
        return job.step_times_s[-KEPT:] or tuple(self._seen.get(job.job_id, ()))


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
    return FULL * filled + EMPTY * (BAR_WIDTH - filled)


def style_of(job: Job) -> str:
    """Red: past its limit, or a rank is lost. Yellow: near its limit."""
    used = job.progress_age_s / job.limit_s if job.progress_age_s is not None and job.limit_s else 0.0
    lost = job.ranks is not None and job.ranks_alive is not None and job.ranks_alive < job.ranks
    return "red" if used > 1 or lost else "yellow" if used > LATE else ""


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
            job.phase or "-",
            fold_nodes(job.nodes),
            f"{_number(job.ranks_alive)}/{_number(job.ranks)}",
            _number(job.step) + total,
            duration(job.step_s),
            sparkline(times_s),
            f"{duration(job.progress_age_s)} of {duration(job.limit_s)}",
            gauge(job.progress_age_s, job.limit_s),
            _number(job.checkpoint_step),
        )
    )


def frame(
    status: Status, headline: str, style: str, history: History, wall: float, height: int, note: str = ""
) -> RenderableType:
    """One screen of at most `height` lines; `wall` is the date of now, `note` stands at its end."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = status.open[: min(INCIDENTS, max(1, (height - AROUND) // 2))]
    parts: list[RenderableType] = [Text(clean(headline), style=style, no_wrap=True, overflow="ellipsis")]
    for each in shown:
        parts.append(Text(clean(incident_line(each, wall)), no_wrap=True, overflow="ellipsis",
                          style="bold red" if each.state == "firing" else "yellow"))  # fmt: skip
    more = status.incidents.firing + status.incidents.pending - len(shown)
    if more > 0 and shown:
        parts.append(Text(f"and {more} more: slurm-watchdog incidents"))
    rows = max(1, height - AROUND - len(parts))
    ranked = urgent_first(status.jobs)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for heading in HEADINGS:
        drawn.add_column(heading, no_wrap=True, overflow="ellipsis")
    for job in ranked[:rows]:
        cells = (Text(cell, no_wrap=True, overflow="ellipsis") for cell in job_row(job, history.of(job)))
        drawn.add_row(*cells, style=style_of(job))
    parts.append(drawn)
    if len(ranked) > rows:
        parts.append(Text(f"and {count(len(ranked) - rows, 'job')} more, with more of their time left"))
    silent = (
        f", {len(status.nodes.silent)} silent: {fold_nodes(status.nodes.silent)}"
        if status.nodes.silent
        else ""
    )
    nodes = f"{count(len(status.nodes.reporting), 'node')} reporting{silent}"
    parts.append(Text(clean(nodes), no_wrap=True, overflow="ellipsis"))
    parts.append(Text(clean(note), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def incident_line(incident: OpenIncident, wall: float) -> str:
    """`FIRING collective_hang 3 min 7f3a: sentence`."""
    age = duration(max(0.0, wall - incident.opened_at)) if incident.opened_at is not None else "-"
    return f"{incident.state.upper():8} {incident.kind} {age} {incident.id[:8]}: {incident.summary}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def watch(look: Callable[[], RenderableType], every_s: float) -> None:
    """Draws what `look` gives until Ctrl-C. The terminal is as it was before, afterwards."""
    from rich.live import Live

    from watchdog.cli.text import screen
    from watchdog.runner import sleep

    with Live(look(), console=screen(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                sleep(every_s)
                live.update(look(), refresh=True)
        except KeyboardInterrupt:
            pass
