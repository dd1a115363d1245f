"""A report as one page that needs nothing else: its plots are drawn in SVG, no script, nothing from outside.

Names of jobs and users are text that people chose: everything passes `_text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10
from typing import Final

from slurm_watchdog.analysis.report_sentences import head
from slurm_watchdog.cli.report_types import JobTime, Report
from slurm_watchdog.cli.terminal import clean, moment

KEPT, LOST, UNNOTICED, UNREAD = "#009e73", "#d55e00", "#e69f00", "#b9bcc2"
"""Colours of Okabe and Ito (2008), which stay apart for colour-blind eyes."""
SHOWN_CAUSES, SHOWN_JOBS, SHOWN_NODES = 12, 20, 20
LABEL, PLOT, ROW = 220, 520, 24
"""Widths of a label and of a plot, height of a row, in the units of a drawing."""
TICKS = 5
STYLE: Final = """
:root { color-scheme: light dark; } body { max-width: 60rem; margin: 1rem auto; padding: 0 1rem; font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.6rem; } svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; } svg line { stroke: currentColor; stroke-opacity: .25; } table { border-collapse: collapse; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884; } td.number, th.number { text-align: right; }
"""  # noqa: E501
Part = tuple[float, str, str]
"""How much, its colour, and what it is."""


def page(found: Report, said: Sequence[str]) -> str:
    """The whole page; `said` are sentences for its end."""
    when = f"{moment(found.since)} to {moment(found.until)}" if found.since > 0 else f"up to {moment(found.until)}"
    opening = head(
        f"From {moment(found.since)} to {moment(found.until)}",
        found.known_jobs, found.allocated_h, found.measured_h, found.effective_h,
    )  # fmt: skip
    before_h = dict(found.to_be_noticed_h)
    causes = [
        (cause, _cause_bar(cause, hours, before_h.get(cause, 0.0))) for cause, hours in found.lost_h[:SHOWN_CAUSES]
    ]
    kept: list[tuple[str, list[Part]]] = [("steps that were kept", [(found.effective_h, KEPT, "kept")])]
    nodes = [(node, [(float(number), LOST, "incidents")]) for node, number in found.nodes[:SHOWN_NODES]]
    sections = [
        ("Where the node-hours went", _bars(kept + causes, "node-hours") if found.jobs else ""),
        ("Day by day" if _is_daily(found) else "Week by week", _columns(found) if len(found.trend) > 1 else ""),
        ("The jobs that lost most", _bars(list(map(_job_bar, found.jobs[:SHOWN_JOBS])), "node-hours") + _jobs(found)),
        ("Nodes that incidents name", _bars(nodes, "incidents")),
        ("What follows", "".join(f"<p>{_text(each)}</p>" for each in said)),
    ]
    body = "".join(f"<h2>{_text(title)}</h2>{drawn}" for title, drawn in sections if drawn)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>slurm-watchdog report, {_text(when)}</title><style>{STYLE}</style></head><body>"
        f"<h1>Where the time went</h1><p>{_text(opening)}</p>{body}"
        "<p>How each hour is counted: docs/report.md of slurm-watchdog.</p></body></html>\n"
    )


def _text(text: object) -> str:
    return escape(clean(text))


def _colour(cause: str) -> str:
    return UNREAD if cause == "not measured" else LOST


def _cause_bar(cause: str, hours: float, before_h: float) -> list[Part]:
    """What of an incident's hours came before it was reported is a part of its own."""
    unnoticed = [(before_h, UNNOTICED, "waiting to be noticed")] if before_h > 0 else []
    return [*unnoticed, (max(0.0, hours - before_h), _colour(cause), cause)]


def _job_bar(job: JobTime) -> tuple[str, list[Part]]:
    lost_h = max(0.0, job.measured_h - job.effective_h)
    parts = [(job.effective_h, KEPT, "kept"), (lost_h, LOST, "lost"),
             (max(0.0, job.allocated_h - job.measured_h), UNREAD, "not measured")]  # fmt: skip
    return f"{job.job_id} {job.name}", parts


def _jobs(found: Report) -> str:
    headings = ("Job", "Name", "User", "Nodes", "Runs", "Node-hours", "Effective", "Lost to")
    rows = [
        (each.job_id, each.name, each.user, f"{each.nodes:,}", f"{each.runs:,}", f"{each.allocated_h:,.1f}",
         "-" if each.share is None else f"{each.share:.1%}",
         ", ".join(f"{cause} {hours:,.1f}" for cause, hours in each.lost_h[:4] if hours >= 0.05) or "-")
        for each in found.jobs[:SHOWN_JOBS]
    ]  # fmt: skip
    numbers = range(3, 7)
    top = "".join(f'<th scope="col"{_number(n in numbers)}>{_text(heading)}</th>' for n, heading in enumerate(headings))
    lines = ("".join(f"<td{_number(n in numbers)}>{_text(cell)}</td>" for n, cell in enumerate(row)) for row in rows)
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{table}</tbody></table>" if rows else ""


def _number(is_one: bool) -> str:
    return ' class="number"' if is_one else ""


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most` or just above it, at most TICKS + 1 of them."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / TICKS
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999999)
    return [number * step for number in range(TICKS + 1) if (number - 1) * step < most]


def _bars(rows: Sequence[tuple[str, Sequence[Part]]], unit: str) -> str:
    """Bars from left to right, a row each, over one axis; the parts of a row one after the other."""
    if not rows:
        return ""
    marks = ticks(max(sum(amount for amount, _, _ in parts) for _, parts in rows))
    scale, height = PLOT / marks[-1], ROW * len(rows)
    drawn = [
        f'<line x1="{LABEL + mark * scale:.1f}" y1="0" x2="{LABEL + mark * scale:.1f}" y2="{height}"/>'
        f'<text x="{LABEL + mark * scale:.1f}" y="{height + 14}" text-anchor="middle">{mark:,.6g}</text>'
        for mark in marks
    ]
    for number, (label, parts) in enumerate(rows):
        y, x = number * ROW, float(LABEL)
        name = clean(label)
        short = name if len(name) <= 30 else name[:29] + "…"
        drawn.append(f'<text x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{escape(short)}</text>')
        for amount, colour, what in parts:
            title = f"<title>{_text(f'{name}: {amount:,.1f} {unit} {what}')}</title>"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{amount * scale:.1f}" height="{ROW - 8}" fill="{colour}">'
                f"{title}</rect>"
            )
            x += amount * scale
        whole = sum(amount for amount, _, _ in parts)
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{whole:,.1f}</text>')
    drawn.append(f'<text x="{LABEL + PLOT / 2}" y="{height + 30}" text-anchor="middle">{_text(unit)}</text>')
    return _drawing(drawn, LABEL + PLOT + 90, height + 36, f"{len(rows)} bars in {unit}")


def _is_daily(found: Report) -> bool:
    return len(found.trend) < 2 or found.trend[1][0] - found.trend[0][0] <= 86400.0


def _columns(found: Report) -> str:
    """A column a day or week: kept at the bottom, lost above it, not measured on top; dates below."""
    marks = ticks(max(allocated_h for _, allocated_h, _, _ in found.trend))
    height, width = 200, PLOT + LABEL - 60
    scale, step = height / marks[-1], width / len(found.trend)
    drawn = [
        f'<line x1="60" y1="{height + 24 - mark * scale:.1f}" x2="{60 + width}" y2="{height + 24 - mark * scale:.1f}"/>'
        f'<text x="54" y="{height + 28 - mark * scale:.1f}" text-anchor="end">{mark:,.6g}</text>'
        for mark in marks
    ]
    every = -(-len(found.trend) // 8)
    for number, (at, allocated_h, measured_h, effective_h) in enumerate(found.trend):
        x, bounds = 60 + number * step, (0.0, effective_h, measured_h, allocated_h)
        label = f"{moment(at)[:10]}: {effective_h:,.1f} of {allocated_h:,.1f} node-hours kept"
        for (low, high), colour in zip(pairwise(bounds), (KEPT, LOST, UNREAD), strict=True):
            drawn.append(
                f'<rect x="{x + 1:.1f}" y="{height + 24 - high * scale:.1f}" width="{max(1.0, step - 2):.1f}" '
                f'height="{max(0.0, high - low) * scale:.1f}" fill="{colour}"><title>{_text(label)}</title></rect>'
            )
        if number % every == 0:
            drawn.append(f'<text x="{x:.1f}" y="{height + 40}">{_text(moment(at)[5:10])}</text>')
    drawn.append('<text x="0" y="10">node-hours</text>')
    for number, (colour, what) in enumerate(((KEPT, "kept"), (LOST, "lost"), (UNREAD, "not measured"))):
        drawn.append(f'<rect x="{60 + number * 120}" y="{height + 50}" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{78 + number * 120}" y="{height + 60}">{what}</text>')
    return _drawing(drawn, width + 100, height + 66, "node-hours kept, lost and not measured over time")


def _drawing(pieces: Iterable[str], width: float, height: float, label: str) -> str:
    inside = "".join(pieces)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{_text(label)}">{inside}</svg>'
