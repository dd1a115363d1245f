"""What became of incidents, runs and requests, in words: why, what was done, what to do, which runs are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.model.documents import ActionRun, Answered, DecisionSummary, Explanation, Incident, SelectedJob
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.run_record import Report, RunRecord
from slurm_watchdog.model.slurm_states import ALIVE
from slurm_watchdog.report.words import as_text, who

if TYPE_CHECKING:
    from slurm_watchdog.knowledge.remediation_hints import Hint

MAX_FACTS = 2
SAME_S = 120.0  # A run of accounting that began so near to one of the controller's is the same.
RESTARTS = {"requeue": " --now", "restart_step": " --now", "graceful_restart": ""}
"""Actions that a person can ask for, with the option of `restart`."""
SAVED = ("wait_checkpoint", "done")
UNSEEN_ANSWERS = 3
"""Answers in a row without an action, after which it is not waited for: an older controller hides it."""
ENDS = {"ok": "done", "needless": "not needed", "failed": "failed"}
HOUR_S = 3600.0
SHOWN_SIZES = 4  # The largest numbers of nodes, for which an interval between checkpoints is advised.


def wanted(
    incidents: Sequence[Incident],
    now: float,
    owner_uid: int | None = None,
    kind: Sequence[str] = (),
    state: Sequence[str] = (),
    since: float | None = None,
    limit: int | None = None,
) -> list[Incident]:
    """Those that are asked for, in their order; empty and None: all."""
    found = [
        each
        for each in incidents
        if (not kind or each.kind in kind)
        and (not state or shown_state(each) in state)
        and (owner_uid is None or owner_uid in each.owner_uids)
        and (since is None or (each.opened_at is not None and each.opened_at >= now - since))
    ]
    newest = sorted(range(len(found)), key=lambda at: found[at].opened_at or 0.0)[-(limit or len(found)) :]
    return [found[at] for at in sorted(newest)]


def is_wrong(each: Incident) -> bool:
    """Whether it fires, no other incident explains it, and it is no person's own restart: what `status` and
    the page count."""
    return each.state == "firing" and each.inhibited_by is None and each.kind != "operator_restart"


def shown_state(each: Incident) -> str:
    """Its state; `explained` if another incident that is open explains it, so that it is neither announced
    nor acted on."""
    return "explained" if each.inhibited_by is not None and each.state != "resolved" else each.state


def named(culprits: Sequence[Culprit]) -> str:
    """The first of them, and how many more there are."""
    more = f" +{len(culprits) - 1}" if len(culprits) > 1 else ""
    return who(culprits[0]) + more if culprits else "-"


def facts_of(incident: Incident) -> list[str]:
    """What it rests on, as words; what its summary says is not said again."""
    summary = incident.summary.rstrip(".")
    return [text for text in map(as_text, incident.evidence) if text.rstrip(".") != summary]


def evidence_words(found: Explanation) -> str:
    """On what the incident rests, in a sentence: the newest diagnosis that says more than its summary, else its
    facts."""
    summary = found.incident.summary
    diagnoses = [each for each in found.evidence if each.kind == "diagnosis" and isinstance(each.document, dict)]
    for each in sorted(diagnoses, key=lambda each: -each.at):
        text = each.document.get("summary")
        if isinstance(text, str) and text and text.rstrip(".") != summary.rstrip("."):
            return text
    facts = facts_of(found.incident)
    more = f"; and {len(facts) - MAX_FACTS} more" if len(facts) > MAX_FACTS else ""
    return "; ".join(facts[:MAX_FACTS]) + more


def _last(found: Explanation) -> DecisionSummary | None:
    """What was decided last, with what came of it where an action was begun."""
    return next(reversed((*found.incident.decisions, *found.actions)), None)


def done_words(found: Explanation) -> str:
    """What was done about it, or why nothing was."""
    last = _last(found)
    if last is None:
        return "nothing yet"
    name = last.action.replace("_", " ")
    if last.verdict == "suppressed":
        return f"nothing: {last.by} holds the {name} back: {last.reason}"
    if last.verdict == "observed" or not isinstance(last, ActionRun):
        return f"nothing{'' if last.action == 'none' else f' ({name} would be next)'}: {last.reason}"
    if last.end is not None:
        return f"{name} {last.end.words}: {last.end.detail or last.end.outcome}"
    at = f", at {last.operations[-1].operation.replace('_', ' ')}" if last.operations else ""
    return f"{name} is under way{at}" + (f", and waits: {last.waiting.what}" if last.waiting else "")


def todo_words(found: Explanation) -> str:
    """What a person does next."""
    incident, last = found.incident, _last(found)
    if incident.state == "resolved":
        return "nothing: it is resolved"
    if found.actions and found.actions[-1].end is None and found.actions[-1].verdict == "allowed":
        return "nothing while the action is under way; slurm-watchdog pause stops it and all others"
    words = [hint.try_next for hint in hints_of(incident)[:1]]
    if last is not None and last.verdict != "allowed" and last.action in RESTARTS and incident.job_id:
        words.insert(0, f"To restart it yourself: slurm-watchdog restart{RESTARTS[last.action]} {incident.job_id}.")
    return " ".join(words) or "look at the evidence"


def hints_of(incident: Incident) -> tuple[Hint, ...]:
    """What it usually is and what to try: advice, read from its kind and from the lines that it quotes."""
    from slurm_watchdog.detect.registry import spec_of
    from slurm_watchdog.diagnose.incident_hints import incident_hints

    facts = [as_text(fact) for fact in incident.evidence]
    return incident_hints(incident.kind, incident.summary, facts, spec_of(incident.kind).hint)


def paired(known: Sequence[RunRecord], recorded: Sequence[RunRecord]) -> tuple[list[RunRecord], dict[int, RunRecord]]:
    """The runs that only accounting has; and accounting's record of those that the controller knows, by their place in
    `known`: the nearest beginnings first, for a job that is requeued at once begins twice within SAME_S."""
    near = sorted(
        (distance_s, place, number)
        for place, run in enumerate(known)
        for number, record in enumerate(recorded)
        if (distance_s := abs(run.began_at - record.began_at)) <= SAME_S
    )
    number_of: dict[int, int] = {}
    for _, place, number in near:
        if place not in number_of and number not in number_of.values():
            number_of[place] = number
    alone = [record for number, record in enumerate(recorded) if number not in number_of.values()]
    return alone, {place: recorded[number] for place, number in number_of.items()}


def run_row(run: RunRecord, record: RunRecord) -> tuple[RunRecord, RunRecord, str, list[str]]:
    """The run, the record with its end, its state at the end, and what accounting has of that. The end in `record`,
    accounting's, counts where it has one: the controller may not have seen it."""
    last = run if record.ended_at is None else record
    of_job, of_steps = _exit_words(last.exit_code), _exit_words(last.steps_exit_code)
    words = (
        of_job,
        f"of a step: {of_steps}" if of_steps and of_steps != of_job else "",
        f"node {last.failed_node} failed" if last.failed_node else "",
        f"longest wait: {last.waited_for}" if last.waited_for else "",
    )
    state = "restarted" if last.ended_at is not None and last.state in ALIVE else last.state
    return run, last, state, [each for each in words if each]


def _exit_words(exit_code: str) -> str:
    """`exit code 1` or `signal 9`; empty where it is 0 or not known."""
    code, _, signal = exit_code.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return f"exit code {code}" if code not in ("", "0") else ""


def intervals(found: Report, save_s: float) -> str:
    """How often to save: on each size of job, with the formula's name."""
    from slurm_watchdog.analysis.lost_time import checkpoint_interval

    between_h = found.node_hours_between_failures or 0.0
    sizes = sorted({job.nodes for job in found.jobs})[-SHOWN_SIZES:]
    advised = [(checkpoint_interval(between_h * HOUR_S / size, save_s), size) for size in sizes]
    parts = []
    for formula, same in groupby(advised, key=lambda each: each[0].formula):
        of_sizes = (f"{duration(interval.seconds)} on {plural(size, 'node')}" for interval, size in same)
        parts.append(f"{', '.join(of_sizes)} ({formula})")
    return ", ".join(parts)


@dataclass
class Row:
    """One job, and what became of it."""

    job: SelectedJob
    state: str = "under way"
    why: str = ""
    incident_id: str = ""
    action: ActionRun | None = None  # As it was seen last.
    unseen: int = 0  # Answers in a row that did not show it.

    def __post_init__(self) -> None:
        if self.job.why_not:
            self.state, self.why = "cannot be asked", self.job.why_not

    def as_json(self) -> dict[str, object]:
        """For programs."""
        job = {name: getattr(self.job, name) for name in ("job_id", "user", "nodes", "step")}
        return job | {"state": self.state, "why": self.why, "incident_id": self.incident_id}

    @property
    def has_saved(self) -> bool:
        """A complete checkpoint has come since it was asked: it may end by itself still."""
        return self.action is not None and any(
            (each.operation, each.outcome) == SAVED for each in self.action.operations
        )

    @property
    def is_followed(self) -> bool:
        """Whether its action may still be seen to end."""
        return self.state == "under way" and bool(self.incident_id) and self.unseen < UNSEEN_ANSWERS

    def take(self, answered: Answered) -> None:
        """What the controller says to the request."""
        self.incident_id = answered.incident_id or ""
        if answered.verdict != "allowed":
            self.state, self.why = "cannot be asked", answered.reason

    def follow(self, action: ActionRun | None) -> None:
        """How far the action is; None: the controller does not show it."""
        if action is None:
            self.unseen += 1
            self.why = self.why if self.is_followed else "its progress is for its owner and operators to see"
            return
        self.action, self.unseen = action, 0
        if action.end is not None:
            self.state, self.why = ENDS.get(action.end.outcome, "failed"), action.end.detail or ""
        elif action.waiting is not None:
            self.why = action.waiting.what
        elif action.operations:
            self.why = action.operations[-1].operation.replace("_", " ")
