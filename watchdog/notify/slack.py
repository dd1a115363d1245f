"""Slack: what the messages say (pure), and the incoming webhook that takes them.

One sentence first, the evidence under it, then what to do. Names of jobs, paths and log lines come from users: they
are escaped, bounded, stripped of control characters and put into plain text, where nothing is a link or mentions anybody.
"""

from __future__ import annotations

import asyncio
import logging
import re
import unicodedata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from slack_sdk.errors import SlackClientError
from slack_sdk.webhook.async_client import AsyncWebhookClient

from watchdog.model import Action, ActionRun, Decision, Incident, Severity, Verdict
from watchdog.notify import SendFailed

SENTENCE_LIMIT = 600
LINE_LIMIT = 300
BLOCK_LIMIT = 2900
"""Slack takes 3000 characters in one block of text."""
FACT_LIMIT = 12
ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
SIGNS = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "warning", Severity.INFO: "info"}

# The client of slack-sdk writes the webhook's address to its log at debug level, and NOTSET counts as that.
SILENT = logging.getLogger("watchdog.notify.slack.client")
SILENT.setLevel(logging.CRITICAL + 1)

Payload = dict[str, Any]


# ------------------------------------------------------------------------------------------------- messages


def format_opened(incident: Incident, cluster: str) -> Payload:
    """An incident fires: what is wrong, since when, who, and the evidence."""
    since = f" Noticed after {duration(incident.detected_after_s)}." if incident.detected_after_s else ""
    evidence = [*(culprit_line(incident, index) for index in range(min(len(incident.culprits), FACT_LIMIT)))]
    evidence += incident.facts[: FACT_LIMIT * 2]
    return payload(
        f"[{cluster}] {SIGNS[incident.severity]}: {about(incident, incident.summary)}{since}",
        evidence,
        f"All evidence: slurm-watchdog explain {incident.id}. Keep the watchdog from acting: slurm-watchdog pause",
    )


def format_decision(incident: Incident, decision: Decision, cluster: str) -> Payload:
    """What was decided about an incident, by which rule or guard, and why."""
    done = "restarted gracefully" if decision.action is Action.GRACEFUL_RESTART else "requeued"
    job = decision.fence.job_id if decision.fence is not None else ",".join(incident.job_ids)
    if decision.verdict is Verdict.ALLOWED and decision.action is not Action.NONE:
        sentence = f"job {job} is being {done}"
        todo = "Nothing to do. To stop this and every other action: slurm-watchdog pause"
    elif decision.verdict is Verdict.ALLOWED:
        sentence, todo = f"job {job}: alert only", f"Look at it: slurm-watchdog explain {incident.id}"
    elif decision.verdict is Verdict.OBSERVED:
        sentence = f"job {job} would have been {done}, but was not touched"
        todo = f"By hand: {by_hand(decision, job)}. To have it done: mode: act in the configuration"
    else:
        sentence = f"job {job} was not {done} (guard: {decision.by})"
        todo = f"Look at it: slurm-watchdog explain {incident.id}. By hand: {by_hand(decision, job)}"
    evidence = [f"By {decision.by}"]
    if decision.exclude:
        allowed = decision.verdict is Verdict.ALLOWED
        evidence.append(
            f"{'Next run without' if allowed else 'To be avoided'}: {', '.join(decision.exclude)}"
        )
    if decision.asked_by:
        evidence.append(f"Asked for by {decision.asked_by}")
    evidence.append(f"Incident {incident.id}: {incident.summary}")
    return payload(f"[{cluster}] {sentence}: {decision.reason}", evidence, todo)


def by_hand(decision: Decision, job: str) -> str:
    """The command that does the same. A loop that does not turn saves nothing, so a kill switch would wait in vain."""
    if decision.action is Action.GRACEFUL_RESTART:
        return f"slurm-watchdog restart {job}"
    if not decision.exclude:
        return f"scontrol requeue {job}"
    nodes = ",".join(decision.exclude)
    return (
        f"scontrol requeuehold {job}; scontrol update JobId={job} ExcNodeList={nodes}; scontrol release {job}"
    )


def format_outcome(incident: Incident, run: ActionRun, cluster: str) -> Payload:
    """How an action ended, with each rung of it."""
    decision, end = run.decision, run.end
    job = decision.fence.job_id if decision.fence is not None else ",".join(incident.job_ids)
    if end is None:
        sentence, todo = f"job {job}: {decision.action} goes on", "Nothing to do"
    elif end.ok:
        down = f"; it was down for {duration(end.downtime_s)}" if end.downtime_s is not None else ""
        sentence = f"job {job} was restarted: {end.detail}{down}"
        todo = "Nothing to do for the job"
        if decision.exclude:
            todo += f". Nodes to look at: {', '.join(decision.exclude)}"
    else:
        sentence = f"job {job} NEEDS YOU, its {'restart' if decision.action is Action.GRACEFUL_RESTART else 'requeue'} failed: {end.detail}"
        todo = f"See where it stands: scontrol show job {job}; what was done: slurm-watchdog explain {incident.id}"
    evidence = [
        f"{record.rung}{f' (attempt {record.attempt})' if record.attempt > 1 else ''}: "
        f"{record.outcome or 'no outcome'}{f', {record.detail}' if record.detail else ''}"
        for record in run.records[-FACT_LIMIT:]
    ]
    return payload(f"[{cluster}] {sentence}", evidence, todo)


def format_resolved(incident: Incident, cluster: str) -> Payload:
    """An incident is over."""
    lasted = ""
    if incident.resolved_at is not None:
        lasted = f" after {duration(max(0.0, incident.resolved_at - incident.opened_at))}"
    return payload(
        f"[{cluster}] over{lasted}: {about(incident, incident.resolution or incident.summary)}",
        [f"Was: {incident.summary}"],
        f"Nothing to do. What happened: slurm-watchdog explain {incident.id}",
    )


def payload(sentence: str, evidence: list[str], todo: str) -> Payload:
    """A message of three parts; every text is made harmless here."""
    sentence = safe(sentence, SENTENCE_LIMIT)
    blocks = [section(sentence)]
    lines = [f"• {safe(line, LINE_LIMIT)}" for line in evidence[:FACT_LIMIT] if line.strip()]
    if len(evidence) > FACT_LIMIT:
        lines.append(f"• and {len(evidence) - FACT_LIMIT} more")
    while sum(len(line) + 1 for line in lines) > BLOCK_LIMIT:
        lines.pop()
    if lines:
        blocks.append(section("\n".join(lines)))
    blocks.append(section(safe(todo, SENTENCE_LIMIT)))
    return {
        "text": sentence,
        "blocks": blocks,
        "link_names": False,
        "unfurl_links": False,
        "unfurl_media": False,
    }


def section(text: str) -> Payload:
    """A block of plain text."""
    return {"type": "section", "text": {"type": "plain_text", "text": text or "-", "emoji": False}}


def safe(text: str, limit: int) -> str:
    """`text` on one line, without control, format and private characters, escaped, at most `limit` long."""
    out: list[str] = []
    size = 0
    for char in text:
        char = (
            " "
            if char.isspace()
            else "\N{REPLACEMENT CHARACTER}"
            if unicodedata.category(char)[0] == "C"
            else char
        )
        char = ESCAPES.get(char, char)
        if size + len(char) > limit - 1:
            return "".join(out) + "…"
        out.append(char)
        size += len(char)
    return "".join(out)


def jobs_of(incident: Incident) -> str:
    """The jobs of an incident in a few words, its subject if there is none."""
    jobs = incident.job_ids
    if not jobs:
        return incident.subject
    return (
        ("job " if len(jobs) == 1 else "jobs ") + ", ".join(jobs[:5]) + (" and more" if len(jobs) > 5 else "")
    )


def about(incident: Incident, text: str) -> str:
    """`text`, with the jobs before it unless it names the only one itself."""
    jobs = incident.job_ids
    if len(jobs) == 1 and re.search(rf"\bjob {re.escape(jobs[0])}\b", text, re.IGNORECASE):
        return text
    return f"{jobs_of(incident)}: {text}"


def culprit_line(incident: Incident, index: int) -> str:
    """Who is named, in one line."""
    culprit = incident.culprits[index]
    parts = [
        f"rank {culprit.rank}" if culprit.rank is not None else "",
        f"on {culprit.node}" if culprit.node else "",
        f"pid {culprit.pid}" if culprit.pid is not None else "",
        culprit.gpu_uuid or "",
        f"at {culprit.path or culprit.mount}" if culprit.path or culprit.mount else "",
    ]
    named = " ".join(part for part in parts if part)
    return f"{named}: {culprit.reason}" if culprit.reason else named


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 05 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


# ------------------------------------------------------------------------------------------------- sending


class SlackWebhook:
    """Sends to the incoming webhook whose address is in `url_file`; the file is read for each message.

    The address is a secret: it appears in no log and no exception. `deadline_s` is for one message.
    """

    def __init__(self, url_file: str, deadline_s: float) -> None:
        self._url_file = url_file
        self._deadline_s = deadline_s

    async def send(self, message: Payload) -> None:
        """Deliver one message. Raises SendFailed."""
        url = read_url(self._url_file)
        client = AsyncWebhookClient(
            url, timeout=max(1, round(self._deadline_s)), logger=SILENT, retry_handlers=[]
        )
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await client.send_dict(message)
        except TimeoutError:
            raise SendFailed(f"Slack did not answer within {self._deadline_s:g} s") from None
        # `from None`: the exception below may hold the address.
        except (aiohttp.ClientError, SlackClientError, OSError, ValueError) as error:
            raise SendFailed(f"Slack can't be reached ({type(error).__name__})") from None
        if answer.status_code == 200:
            return
        said = str(answer.body)
        for secret in (url, urlsplit(url).path, url.rstrip("/").rpartition("/")[2]):
            said = said.replace(secret, "(address)")
        raise SendFailed(
            f"Slack answered {answer.status_code}: {safe(said, 100)}",
            retry_after_s=retry_after(answer.headers) if answer.status_code == 429 else None,
            # The same message will not be taken later either.
            permanent=answer.status_code == 400,
        )


def read_url(url_file: str) -> str:
    """The webhook's address from its file. Raises SendFailed, without naming the address."""
    try:
        url = Path(url_file).read_text().strip()
        parts = urlsplit(url)
    except (OSError, ValueError) as error:
        raise SendFailed(
            f"notify.slack.webhook_url_file {url_file} can't be read ({type(error).__name__})"
        ) from None
    local = parts.scheme == "http" and parts.hostname in {"127.0.0.1", "localhost", "::1"}
    if not (parts.scheme == "https" and parts.hostname) and not local:
        raise SendFailed(f"notify.slack.webhook_url_file {url_file} holds no https:// address")
    return url


def retry_after(headers: Any) -> float | None:
    """Seconds of the Retry-After header; None if there is none that is a number."""
    value = next((str(value) for name, value in dict(headers).items() if name.lower() == "retry-after"), "")
    return float(value) if value.strip().isdecimal() else None
