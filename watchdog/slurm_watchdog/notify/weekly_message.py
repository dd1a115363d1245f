"""The weekly report as a message: what was kept, what was lost to what, what restarts saved, the worst nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from shlex import quote
from typing import Any

import msgspec

from slurm_watchdog.analysis.lost_time import JobTime, Report
from slurm_watchdog.analysis.report_sentences import LEAST_H, head, saved, to_be_noticed, would_have_saved
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import safe
from slurm_watchdog.notify.slack_messages import LINE_LIMIT, SENTENCE_LIMIT, Payload, message, section
from slurm_watchdog.notify.wording import Message

SHOWN = 5


class Subscription(Struct, frozen=True, kw_only=True):
    """When one channel gets the report, and about whose jobs: `partition`, `account`, `user`, names or globs with
    commas."""

    when: str
    about: Mapping[str, str] = {}


def weekly_words(found: Report, about: Mapping[str, str] = {}) -> Message:
    """The report of the jobs of `about`. It says which days it is about, and how to have the same again: it may be
    late, and is read later."""
    since, until = _local(found.since), _local(found.until)
    whose = "".join(f", {name} {globs}" for name, globs in about.items())
    when = f"Weekly report, {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M}{whose}:"
    same = [f"--from {since:%Y-%m-%dT%H:%M} --to {until:%Y-%m-%dT%H:%M}"]
    same += [f"--{name} {quote(globs)}" for name, globs in about.items()]
    lost = [f"{cause} {hours:,.1f}" for cause, hours in found.lost_h[:SHOWN] if hours >= LEAST_H]
    jobs = [_job(each) for each in found.jobs[:SHOWN] if each.measured_h - each.effective_h >= LEAST_H]
    nodes = [f"{node} ({number})" for node, number in found.nodes[:SHOWN]]
    lines = [
        f"Lost to (node-hours): {', '.join(lost)}" if lost else "",
        to_be_noticed(found.to_be_noticed_h, SHOWN),
        *jobs,
        f"Nodes named most by incidents: {', '.join(nodes)}" if nodes else "",
        saved(found.savings),
        would_have_saved(found.savings),
    ]
    return Message(
        sentence=head(when, len(found.jobs), found.allocated_h, found.measured_h, found.effective_h),
        evidence=tuple(line for line in lines if line),
        todo=f"More: slurm-watchdog report {' '.join(same)}",
    )


def weekly_row(said: Message, cluster: str) -> dict[str, Any]:
    """The outbox row: ready for Slack, and the words for other receivers."""
    text = safe(f"[{cluster}] {said.sentence}", SENTENCE_LIMIT)
    lines = "\n".join(f"• {safe(line, LINE_LIMIT)}" for line in (*said.evidence, said.todo))
    slack: Payload = message(text, [section(text), section(lines)])
    return {"message": slack, "weekly": msgspec.to_builtins(said)}


def words_of_row(row: Mapping[str, Any]) -> Message | None:
    """The words of such a row; None of any other."""
    try:
        return msgspec.convert(row.get("weekly"), Message)
    except msgspec.ValidationError:
        return None


def _local(date: float) -> datetime:
    return datetime.fromtimestamp(date, tz=timezone.utc).astimezone()


def _job(job: JobTime) -> str:
    lost_h = job.measured_h - job.effective_h
    return f"job {job.job_id} ({job.name} of {job.user}) lost {lost_h:,.1f} of {job.measured_h:,.1f} node-hours"
