"""The weekly report in Slack: what was kept, what was lost to what, what restarts saved, the worst nodes. Pure."""

from __future__ import annotations

from slurm_watchdog.analysis.lost_time import JobTime, Report
from slurm_watchdog.analysis.report_sentences import head, saved
from slurm_watchdog.base.text import safe
from slurm_watchdog.notify.slack_messages import LINE_LIMIT, SENTENCE_LIMIT, Payload, message, section

SHOWN = 5
LEAST_H = 0.05
"""What is less reads as 0.0."""


def weekly_message(found: Report, cluster: str) -> Payload:
    """One message."""
    opening = head("In the last seven days", len(found.jobs), found.allocated_h, found.measured_h, found.effective_h)
    text = safe(f"[{cluster}] {opening}", SENTENCE_LIMIT)
    lost = [f"{cause} {hours:,.1f}" for cause, hours in found.lost_h[:SHOWN] if hours >= LEAST_H]
    jobs = [_job(each) for each in found.jobs[:SHOWN] if each.measured_h - each.effective_h >= LEAST_H]
    nodes = [f"{node} ({number})" for node, number in found.nodes[:SHOWN]]
    lines = [
        f"Lost to (node-hours): {', '.join(lost)}" if lost else "",
        *jobs,
        f"Nodes named most by incidents: {', '.join(nodes)}" if nodes else "",
        saved(found.savings),
        "More: slurm-watchdog report --week",
    ]
    said = "\n".join(f"• {safe(line, LINE_LIMIT)}" for line in lines if line)
    return message(text, [section(text), section(said)])


def _job(job: JobTime) -> str:
    lost_h = job.measured_h - job.effective_h
    return f"job {job.job_id} ({job.name} of {job.user}) lost {lost_h:,.1f} of {job.measured_h:,.1f} node-hours"
