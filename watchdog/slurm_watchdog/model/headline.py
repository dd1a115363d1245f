"""The headline of an incident, the same everywhere: rank, node, what is wrong, what is done about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm_watchdog.base.text import fold, listed, one_line
from slurm_watchdog.model.actions import RESTARTING, Action, ActionEnd, Decision
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentState, Severity

HEADLINE_LIMIT = 120  # Characters: two lines of a phone.
READ_LIMIT = 600  # Of a sentence; what is wrong is at its beginning.
PLACE_LIMIT = 48  # Of several ranks and nodes; longer lists name the first, and how many more there are.
NODE_LIMIT = 64  # Linux takes no longer host name.
JOBS_LIMIT = 24
BUSY = frozenset({"busy", RESTARTING})  # What a decision is by that leaves the job to an action under way already.
DOING = {
    Action.LEAVE_TO_CHAIN: "ending it for the next of its chain",
    Action.CANCEL: "cancelling it",
    Action.ASK_TO_SAVE: "asking it to save",
    Action.HOLD: "holding it",
    Action.END_PROCESS: "ending it",
}  # What an action does; all others restart.
_PID = re.compile(r"\(pid \d+ on (\S+?)\)")
_BRACKETS = re.compile(r"\s*\([^()]*\)")


def needs_person(incident: Incident, decision: Decision | None = None, end: ActionEnd | None = None) -> bool:
    """Whether a person has to act: the action failed, or the incident is critical and nothing is done about it.
    `decision` is the newest one, `end` how its action ended."""
    if incident.state is IncidentState.RESOLVED:
        return False
    if end is not None:
        return end.outcome == "failed"
    if incident.severity is not Severity.CRITICAL:
        return False
    return not incident.job_ids if decision is None else not decision.acts and decision.by not in BUSY


def response(incident: Incident, decision: Decision | None = None, end: ActionEnd | None = None) -> str:
    """What is done about it, in a few words; empty: nothing, and no person is needed."""
    if incident.state is IncidentState.RESOLVED:
        return "over"
    if needs_person(incident, decision, end):
        return "needs a person"
    if decision is None or not (decision.acts or decision.by in BUSY):
        return ""
    if end is not None:
        return "" if end.needless or decision.action in DOING else "restarted"
    return DOING.get(decision.action, "restarting")


def headline(incident: Incident, done: str = "") -> str:
    """`Rank 2 on n3 of job 7 is stopped by a signal for 90 s (restarting)`; `done` is its `response`."""
    clauses = _clauses(incident.summary) or [(incident.kind.replace("_", " ").capitalize(), "")]
    (first, _), who = clauses[0], incident.culprits[:1]
    text, more = next((each for each in clauses if _names(each[0], who)), clauses[0])
    end, jobs = f" ({done})" if done else "", _jobs(incident.job_ids)
    room = HEADLINE_LIMIT - len(jobs) - len(end)
    if text is not first and not more:
        text, more = text.split(", ")[0], _inside(first)
    longer = (f"{text}: {each}" for each in (more, more.split(": ")[0]) if each)
    text = _cut(next((each for each in longer if len(each) <= room), text), room)
    if not _names(text, who):
        rank, where = f"rank {who[0].rank} ", place(incident.culprits)
        known = len(incident.culprits) == 1 and first.lower().startswith(rank)
        text = _cut(f"{where} {first[len(rank) :]}" if known else f"{where}: {_inside(first)}", room)
    text = text[0].upper() + text[1:] if text.startswith(("rank", "a ")) else text
    is_said = len(incident.job_ids) == 1 and re.search(
        rf"\bjob {re.escape(incident.job_ids[0])}\b", text, re.IGNORECASE
    )
    return f"{text}{'' if is_said else jobs}{end}"


def place(culprits: Sequence[Culprit]) -> str:
    """`rank 3 on n1`, `ranks 0-7 on n[1-2]`, `n1`, `rank 0 on n1 and 15 more`; empty where none is known."""
    ranks = {each.rank for each in culprits if each.rank is not None}
    nodes = fold(one_line(each.node, NODE_LIMIT) for each in culprits if each.node)
    where = " on ".join(filter(None, (listed(ranks, "rank") if ranks else "", ",".join(nodes))))
    if len(where) <= PLACE_LIMIT or len(culprits) == 1:
        return where
    return f"{place(culprits[:1])} and {len(culprits) - 1} more"


def _clauses(summary: str) -> list[tuple[str, str]]:
    """What a sentence says, one thing after the other, without its brackets, each with what follows its colon."""
    text = _PID.sub(r"on \1", one_line(summary, READ_LIMIT))
    while (shorter := _BRACKETS.sub("", text)) != text:
        text = shorter
    found = []
    for part in re.split(r"; |\.(?: |$)", text):
        pieces = [each.strip() for each in part.split(": ") if each.strip()]
        found += [(piece, ": ".join(pieces[number:])) for number, piece in enumerate(pieces, 1)]
    return found


def _names(text: str, who: Sequence[Culprit]) -> bool:
    """Whether `text` names rank and node of the first culprit, as far as they are known."""
    words = [rf"rank {each.rank}" for each in who if each.rank is not None]
    words += [re.escape(one_line(each.node, NODE_LIMIT)) for each in who if each.node]
    return all(re.search(rf"(?<![\w.-]){each}(?![\w-])", text, re.IGNORECASE) for each in words)


def _jobs(job_ids: Sequence[str]) -> str:
    ids = ", ".join(fold(job_ids))
    several = f", jobs {ids}" if len(ids) <= JOBS_LIMIT else f", {len(job_ids)} jobs"
    return several if len(job_ids) > 1 else f", job {ids}" if ids else ""


def _inside(clause: str) -> str:
    """A clause behind a colon."""
    return clause[0].lower() + clause[1:] if clause.startswith(("Job ", "A ", "The ", "No ", "Rank ")) else clause


def _cut(text: str, room: int) -> str:
    """Between two words where there are any, with `…`."""
    if len(text) <= room:
        return text
    return (text[: room - 1].rsplit(" ", 1)[0] if " " in text[room - 30 : room - 1] else text[: room - 1]) + "…"
