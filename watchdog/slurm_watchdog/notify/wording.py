"""The wording of notifications: one sentence first, the evidence under it, then what to do. Pure, and the
same for all channels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.model.actions import RESTARTING, Action, ActionRun, Decision, Verdict
from slurm_watchdog.model.incidents import Culprit, Incident, Severity
from slurm_watchdog.notify.notification import TEST_SUBJECT, TRANSIENT_GUARDS, Caller, Notice, Topic

SEVERITY_WORDS = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "warning", Severity.INFO: "info"}
SUBJECTS_IN_TEXT = ("leftovers:", "holders:")
"""Prefixes of subjects that every sentence about them already spells out."""
NOTHING = "Nothing to do"
WORDS = {
    "opened": (
        "{severity}: {what}",
        "All evidence: {explain}. Keep the watchdog from acting: slurm-watchdog pause",
    ),
    "diagnosed": ("evidence: {what}", "Stacks and all else: {explain}"),
    "noted": ("{what}", ""),
    "resolved": ("{over}: {what}", "Nothing to do. What happened: {explain}"),
    "acts": (
        "{subject} is being {done}: {reason}",
        "Nothing to do. To stop this and every other action: slurm-watchdog pause",
    ),
    "restarting": ("{subject} is restarting: {reason}", NOTHING),
    "allowed": ("{subject}: alert only: {reason}", "Look at it: {explain}"),
    "observed": (
        "{subject} would have been {done}, but was not touched: {reason}",
        "Manually: {manually}. To have it done: {how}",
    ),
    "suppressed": (
        "{subject} was not {done}{yet} (guard: {by}): {reason}",
        "Look at it: {explain}. Manually: {manually}",
    ),
    "continues": ("{subject}: {action} continues", NOTHING),
    "ok": ("{subject} was {redone}: {detail}{cost}", "Nothing to do for the job{blamed}"),
    "ok hold": (
        "{subject} was held: {detail}{cost}",
        "Find the first error of each run, mend the cause, then: scontrol release {job}{blamed}",
    ),
    "ok process": ("{subject} was {redone}: {detail}{cost}", "Nothing to do{blamed}"),
    "needless": ("{subject}: its {action} was not needed: {detail}", NOTHING),
    "failed": (
        "{subject} NEEDS YOU, its {action} failed: {detail}",
        "See where it stands: {look}; what was done: {explain}",
    ),
}
"""What has happened, a verdict or an outcome -> the sentence, what to do."""
DONE = {
    Action.REQUEUE: "requeued",
    Action.GRACEFUL_RESTART: "restarted gracefully",
    Action.RESTART_STEP: "restarted in its allocation",
    Action.RESUBMIT: "ended and submitted again",
    Action.LEAVE_TO_CHAIN: "ended for the next of its chain",
    Action.CANCEL: "cancelled",
    Action.ASK_TO_SAVE: "asked to save",
    Action.HOLD: "held",
    Action.END_PROCESS: "ended",
}
"""Past participle of each action, as in "job 7 was requeued"."""
HOW_TO_ACT = {
    Caller.SERVICE: "mode: act in the configuration",
    Caller.RUN: "leave out --observe",
    Caller.ATTACH: "attach with --act",
}
"""How the reader enables actions."""


class Message(NamedTuple):
    """A message in three parts. Each may contain users' text: the channel escapes it."""

    sentence: str
    evidence: tuple[str, ...] = ()
    todo: str = ""


def message_of(notice: Notice) -> Message:
    """The words for one notice."""
    incident, said = notice.incident, notice.said
    if notice.decision is not None:
        return _of_action(notice, notice.decision, _decided(incident, notice.decision))
    if notice.run is not None:
        return _of_action(notice, notice.run.decision, _done(notice.run, notice.caller))
    what, evidence = incident.summary, (*map(culprit_line, incident.culprits), *incident.facts)
    if notice.topic is Topic.NOTED:
        what, evidence = "; ".join(said), (f"Is: {incident.summary}",)
    elif notice.topic is Topic.DIAGNOSED:  # what the stacks of all ranks, and all else that was collected, tell
        what, evidence = said[0] if said else "nothing more was found", said[1:]
    elif notice.topic is Topic.RESOLVED:
        what, evidence = incident.resolution or incident.summary, (f"Was: {incident.summary}",)
    what = with_subject(incident, what)
    if notice.topic is Topic.OPENED and incident.detected_after_s:
        stop = "" if what.endswith((".", "!", "?", "…")) else "."
        what += f"{stop} Noticed after {duration(incident.detected_after_s)}."
    sentence, todo = WORDS.get(notice.topic, WORDS["opened"])
    if incident.subject == TEST_SUBJECT:
        todo = "Nothing to do: this is a test"
    words = {"severity": SEVERITY_WORDS[incident.severity], "over": over(incident), "explain": _explain(incident)}
    return Message(sentence.format(what=what, **words), evidence, todo.format(**words))


def messages_of(story: Sequence[Notice]) -> list[Message]:
    """The messages for the notices of one incident. Its end is stated once: by the outcome of the action that ended it,
    if one did; what is equal for several processes is one message."""
    alike: dict[object, list[Notice]] = {}
    for number, notice in enumerate(story):
        decision = notice.run.decision if notice.run is not None else notice.decision
        key: object = number
        if decision is not None and decision.process is not None:
            key = notice.topic, notice.end and notice.end.ok, decision.verdict, decision.by, decision.reason
        alike.setdefault(key, []).append(notice)
    ends = {notice.end.detail for notice in story if notice.end is not None}
    found = []
    for notices in alike.values():
        (sentence, evidence, todo), *others = map(message_of, notices)
        incident = notices[0].incident
        if notices[0].topic is Topic.RESOLVED and incident.resolution in ends:
            sentence = over(incident)
        if others:
            sentence += f"; the same of {len(others):,} more process{'es' if len(others) > 1 else ''}"
        found.append(Message(sentence, (*evidence, *(each.sentence for each in others)), todo))
    return found


def _explain(incident: Incident) -> str:
    return f"slurm-watchdog explain {incident.id}"


def _of_action(notice: Notice, decision: Decision, told: tuple[str, Iterator[str]]) -> Message:
    """What was decided or done, by its row of WORDS."""
    incident, caller, process, end = notice.incident, notice.caller, decision.process, notice.end
    job = decision.fence.job_id if decision.fence is not None else ",".join(incident.job_ids)
    subject, look = f"job {job}" if job else incident.subject, f"scontrol show job {job}"
    if process is not None:
        subject = f"process {process.pid} ({process.comm}) of {process.user} on {process.node}"
        look = f"on {process.node}: ps -o pid,user,stat,wchan:30,cmd -p {process.pid}"
    done = DONE.get(decision.action, DONE[Action.REQUEUE])
    again = decision.action in (Action.RESTART_STEP, Action.REQUEUE, Action.GRACEFUL_RESTART)
    redone = "restarted" if again or decision.action is Action.NONE else done
    if caller is Caller.RUN:  # where there is no queue
        look = "slurm-watchdog status"
        if decision.action in (Action.REQUEUE, Action.GRACEFUL_RESTART):
            done = done.replace("requeued", "restarted")
            done += "" if decision.fence is None else f" (restart {decision.fence.restarts + 1})"
    cost = []
    if end is not None and end.downtime_s is not None:
        cost.append(f"it was down for {duration(end.downtime_s)}")
    if (
        end is not None and end.steps_lost is not None and "lost" not in end.detail
    ):  # which the ladder says itself, mostly
        cost.append(f"{plural(end.steps_lost, 'step')} done again")
    row, evidence = told
    action = decision.action.replace("_", " ")
    words = {
        "subject": subject, "job": job, "done": done, "redone": redone, "look": look, "by": decision.by,
        "action": "restart" if action == "graceful restart" else action, "reason": decision.reason,
        "yet": " yet" if decision.by in TRANSIENT_GUARDS else "", "how": HOW_TO_ACT[caller],
        "manually": _manual_command(decision, job, caller), "explain": _explain(incident),
        "detail": "" if end is None else end.detail, "cost": f"; {', '.join(cost)}" if cost else "",
        "blamed": f". Nodes to look at: {', '.join(decision.blamed)}" if decision.blamed else "",
    }  # fmt: skip
    sentence, todo = WORDS[row]
    return Message(sentence.format(**words), tuple(evidence), todo.format(**words))


def _decided(incident: Incident, decision: Decision) -> tuple[str, Iterator[str]]:
    """What was decided about an incident; by which rule or guard."""

    def evidence() -> Iterator[str]:
        yield f"By {decision.by}"
        if decision.blamed:
            how = "Continues without" if decision.verdict is Verdict.ALLOWED else "To be avoided"
            yield f"{how}: {', '.join(decision.blamed)}"
        if decision.asked_by:
            yield f"Asked for by {decision.asked_by}"
        yield f"Incident {incident.id}: {incident.summary}"

    row = "acts" if decision.acts else "restarting" if decision.by == RESTARTING else str(decision.verdict)
    return row, evidence()


def _done(run: ActionRun, caller: Caller) -> tuple[str, Iterator[str]]:
    """How an action ended; each operation of it."""
    end, decision = run.end, run.decision

    def evidence() -> Iterator[str]:
        if end is not None and end.ok and end.resumed_at_step is not None:
            before = "" if decision.step_at_decision is None else f", it had come to {decision.step_at_decision}"
            yield f"Continues from step {end.resumed_at_step}{before}"
        for each in run.records if caller is not Caller.RUN else ():  # Slurm's words, and none was said to it
            attempt = f" (attempt {each.attempt})" if each.attempt > 1 else ""
            detail = f", {each.detail}" if each.detail else ""
            yield f"{each.operation}{attempt}: {each.outcome or 'no outcome'}{detail}"

    row = "continues" if end is None else end.outcome
    if row == "ok":
        row += " hold" if decision.action is Action.HOLD else " process" if decision.process is not None else ""
    return row, evidence()


def _manual_command(decision: Decision, job: str, caller: Caller) -> str:
    """The command that does the same manually. A hung loop saves nothing, so a kill switch would never be seen."""
    action, process = decision.action, decision.process
    if process is not None:
        return f"on {process.node}: kill {process.pid}"
    if action in (Action.HOLD, Action.CANCEL, Action.LEAVE_TO_CHAIN):
        if caller is Caller.RUN:
            return "end it with Ctrl-C"
        hold = "scontrol requeuehold" if decision.held_why else "scontrol hold"
        return f"{hold if action is Action.HOLD else 'scancel'} {job}"
    if action is Action.RESUBMIT and caller is not Caller.RUN:
        return f"scontrol write batch_script {job}; scancel {job}; sbatch slurm-{job}.sh"
    at_once = "" if action in (Action.GRACEFUL_RESTART, Action.ASK_TO_SAVE) else " --now"
    without = f" --exclude {','.join(decision.exclude)}" if decision.exclude and caller is not Caller.RUN else ""
    return f"slurm-watchdog restart{at_once}{without} {job}"


def over(incident: Incident) -> str:
    """`over after 12 min`."""
    if incident.resolved_at is None:
        return "over"
    return f"over after {duration(max(0.0, incident.resolved_at - incident.opened_at))}"


def with_subject(incident: Incident, text: str) -> str:
    """`text`, with the jobs, or what it is about, before it unless it names that itself."""
    jobs = incident.job_ids
    if incident.subject.startswith(SUBJECTS_IN_TEXT):
        return text
    if len(jobs) == 1 and re.search(rf"\bjob {re.escape(jobs[0])}\b", text, re.IGNORECASE):
        return text
    if not jobs:
        return f"{incident.subject}: {text}"
    more = " and more" if len(jobs) > 5 else ""
    return f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs[:5])}{more}: {text}"


def named(culprit: Culprit) -> str:
    """Who is named: `rank 3 on n1 pid 42`."""
    parts = (("rank", culprit.rank), ("on", culprit.node), ("pid", culprit.pid), ("", culprit.gpu_uuid))
    places = (*parts, ("at", culprit.path or culprit.mount))
    return " ".join(f"{what} {value}".strip() for what, value in places if value not in (None, ""))


def culprit_line(culprit: Culprit) -> str:
    """Who is named, and why."""
    return f"{named(culprit)}: {culprit.reason}" if culprit.reason else named(culprit)
