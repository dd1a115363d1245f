"""The wording of notifications: one sentence first, the evidence under it, then what to do. Pure, and the
same for all channels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.model.actions import RESTARTING, Action, ActionRun, Decision, Verdict
from slurm_watchdog.model.incidents import Culprit, Incident, Severity
from slurm_watchdog.notify.notification import TEST_SUBJECT, TRANSIENT_GUARDS, Caller, Notice, Topic

SEVERITY_WORDS = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "warning", Severity.INFO: "info"}
SUBJECTS_IN_TEXT = ("leftovers:", "holders:")
"""Prefixes of subjects that every sentence about them already spells out."""
RESTARTS = (Action.RESTART_STEP, Action.REQUEUE, Action.GRACEFUL_RESTART)
BY_HAND: dict[Action, tuple[str, str]] = {
    Action.REQUEUE: ("requeued", "scontrol requeue {job}"),
    Action.GRACEFUL_RESTART: ("restarted gracefully", "slurm-watchdog restart {job}"),
    Action.RESTART_STEP: ("restarted in its allocation", "slurm-watchdog restart --now {job}"),
    Action.RESUBMIT: (
        "ended and submitted again",
        "scontrol write batch_script {job}; scancel {job}; sbatch slurm-{job}.sh",
    ),
    Action.LEAVE_TO_CHAIN: ("ended for the next of its chain", "scancel {job}"),
    Action.CANCEL: ("cancelled", "scancel {job}"),
    Action.ASK_TO_SAVE: ("asked to save", "slurm-watchdog restart {job}"),
    Action.HOLD: ("held", "scontrol hold {job}"),
    Action.END_PROCESS: ("ended", ""),
}
"""Past participle of each action, as in "job 7 was requeued", and the command that does the same manually. A hung loop
saves nothing, so a kill switch would never be seen."""
HOW_TO_ACT: dict[Caller, str] = {
    Caller.SERVICE: "mode: act in the configuration",
    Caller.RUN: "leave out --observe",
    Caller.ATTACH: "attach with --act",
}
"""How the reader enables actions."""


class Message(Struct, frozen=True, kw_only=True):
    """A message in three parts. Each may contain users' text: the channel escapes it."""

    sentence: str
    evidence: tuple[str, ...] = ()
    todo: str = ""


def message_of(notice: Notice) -> Message:
    """The words for one notice."""
    incident, said = notice.incident, notice.said
    if notice.topic is Topic.DECIDED and notice.decision is not None:
        return _decided(incident, notice.decision, notice.caller)
    if notice.topic is Topic.ENDED and notice.run is not None:
        return _ended(incident, notice.run, notice.caller)
    if notice.topic is Topic.NOTED:
        return Message(sentence=with_subject(incident, "; ".join(said)), evidence=(f"Is: {incident.summary}",))
    if notice.topic is Topic.DIAGNOSED:  # what the stacks of all ranks, and all else that was collected, tell
        return Message(
            sentence=f"evidence: {with_subject(incident, said[0] if said else 'nothing more was found')}",
            evidence=said[1:],
            todo=f"Stacks and all else: slurm-watchdog explain {incident.id}",
        )
    if notice.topic is Topic.RESOLVED:
        text = with_subject(incident, incident.resolution or incident.summary)
        todo = _explain(incident, "Nothing to do. What happened: {}")
        return Message(sentence=f"{over(incident)}: {text}", evidence=(f"Was: {incident.summary}",), todo=todo)
    return _opened(incident)


def messages_of(story: Sequence[Notice]) -> list[Message]:
    """The messages for the notices of one incident. Its end is stated once: by the outcome of the action that ended it,
    if one did; what is equal for several processes is one message."""
    alike: dict[object, list[Notice]] = {}
    for number, notice in enumerate(story):
        decision = notice.decision or (notice.run.decision if notice.run is not None else None)
        key: object = number
        if decision is not None and decision.process is not None:
            ok = notice.run is not None and notice.run.end is not None and notice.run.end.ok
            key = notice.topic, ok, decision.verdict, decision.by, decision.reason
        alike.setdefault(key, []).append(notice)
    ends = {notice.run.end.detail for notice in story if notice.run is not None and notice.run.end is not None}
    found = []
    for notices in alike.values():
        first, *others = map(message_of, notices)
        if notices[0].topic is Topic.RESOLVED and notices[0].incident.resolution in ends:
            first = replace(first, sentence=over(notices[0].incident))
        if others:
            more = f"the same of {len(others):,} more process{'es' if len(others) > 1 else ''}"
            evidence = (*first.evidence, *(each.sentence for each in others))
            first = replace(first, sentence=f"{first.sentence}; {more}", evidence=evidence)
        found.append(first)
    return found


def _opened(incident: Incident) -> Message:
    """What is wrong, since when, who, and the evidence."""
    what = with_subject(incident, incident.summary)
    if incident.detected_after_s:
        stop = "" if what.endswith((".", "!", "?", "…")) else "."
        what += f"{stop} Noticed after {duration(incident.detected_after_s)}."
    return Message(
        sentence=f"{SEVERITY_WORDS[incident.severity]}: {what}",
        evidence=(*map(culprit_line, incident.culprits), *incident.facts),
        todo=_explain(incident, "All evidence: {}. Keep the watchdog from acting: slurm-watchdog pause"),
    )


def _explain(incident: Incident, words: str) -> str:
    """`words` with the command that shows an incident in the place of {}; a test has nothing to show."""
    test = incident.subject == TEST_SUBJECT
    return "Nothing to do: this is a test" if test else words.format(f"slurm-watchdog explain {incident.id}")


def _decided(incident: Incident, decision: Decision, caller: Caller) -> Message:
    """What was decided about an incident, by which rule or guard, and why."""
    done = participle(decision, caller)
    job, subject = _job(incident, decision), _subject(incident, decision)
    look, manually = f"Look at it: slurm-watchdog explain {incident.id}", _manual_command(decision, job, caller)
    if decision.acts:
        sentence = f"{subject} is being {done}"
        todo = "Nothing to do. To stop this and every other action: slurm-watchdog pause"
    elif decision.by == RESTARTING:
        sentence, todo = f"{subject} is restarting", "Nothing to do"
    elif decision.verdict is Verdict.ALLOWED:
        about = job or decision.process is not None
        sentence, todo = f"{subject}: alert only" if about else "alert only", look
    elif decision.verdict is Verdict.OBSERVED:
        sentence = f"{subject} would have been {done}, but was not touched"
        todo = f"Manually: {manually}. To have it done: {HOW_TO_ACT[caller]}"
    else:
        yet = " yet" if decision.by in TRANSIENT_GUARDS else ""
        sentence, todo = f"{subject} was not {done}{yet} (guard: {decision.by})", f"{look}. Manually: {manually}"
    avoided = "Continues without" if decision.verdict is Verdict.ALLOWED else "To be avoided"
    evidence = (
        f"By {decision.by}",
        f"{avoided}: {', '.join(decision.blamed)}" if decision.blamed else "",
        f"Asked for by {decision.asked_by}" if decision.asked_by else "",
        f"Incident {incident.id}: {incident.summary}",
    )
    return Message(sentence=f"{sentence}: {decision.reason}", evidence=tuple(filter(None, evidence)), todo=todo)


def participle(decision: Decision, caller: Caller) -> str:
    """That of the decision's action; there is no queue under `run`."""
    if caller is Caller.RUN and decision.action in (Action.REQUEUE, Action.GRACEFUL_RESTART):
        number = "" if decision.fence is None else f" (restart {decision.fence.restarts + 1})"
        return f"{'restarted' if decision.action is Action.REQUEUE else 'restarted gracefully'}{number}"
    return BY_HAND.get(decision.action, BY_HAND[Action.REQUEUE])[0]


def _job(incident: Incident, decision: Decision) -> str:
    return decision.fence.job_id if decision.fence is not None else ",".join(incident.job_ids)


def _subject(incident: Incident, decision: Decision) -> str:
    """What a decision is about, as the subject of a sentence: `job 7`, or `process 4711 (python) of eve on n1`."""
    process = decision.process
    if process is None:
        return f"job {_job(incident, decision)}"
    return f"process {process.pid} ({process.comm}) of {process.user} on {process.node}"


def _manual_command(decision: Decision, job: str, caller: Caller) -> str:
    """The command that does the same manually."""
    action = decision.action
    if decision.process is not None:
        return f"on {decision.process.node}: kill {decision.process.pid}"
    if caller is Caller.RUN:
        if action in (Action.HOLD, Action.CANCEL, Action.LEAVE_TO_CHAIN):
            return "end it with Ctrl-C"
        at_once = "" if action in (Action.GRACEFUL_RESTART, Action.ASK_TO_SAVE) else " --now"
        return f"slurm-watchdog restart{at_once} {job}"
    if action is Action.HOLD and decision.held_why:
        return f"scontrol requeuehold {job}"
    if decision.exclude and action in (Action.REQUEUE, Action.NONE):
        nodes = ",".join(decision.exclude)
        return f"scontrol requeuehold {job}; scontrol update JobId={job} ExcNodeList={nodes}; scontrol release {job}"
    return BY_HAND.get(action, BY_HAND[Action.REQUEUE])[1].format(job=job)


def _ended(incident: Incident, run: ActionRun, caller: Caller) -> Message:
    """How an action ended, what it cost, and each operation of it."""
    decision, end, process = run.decision, run.end, run.decision.process
    job, subject = _job(incident, decision), _subject(incident, decision)
    what = "restart" if decision.action is Action.GRACEFUL_RESTART else decision.action.replace("_", " ")
    evidence = []
    todo = "Nothing to do"
    if end is None:
        sentence = f"{subject}: {decision.action} continues"
    elif end.ok:
        cost = [f"it was down for {duration(end.downtime_s)}"] if end.downtime_s is not None else []
        if end.steps_lost is not None and "lost" not in end.detail:  # which the ladder says itself, mostly
            cost.append(f"{plural(end.steps_lost, 'step')} done again")
        done = "restarted" if decision.action in RESTARTS else BY_HAND.get(decision.action, ("restarted",))[0]
        sentence = f"{subject} was {done}: {end.detail}{'; ' if cost else ''}{', '.join(cost)}"
        if decision.action is Action.HOLD:
            todo = f"Find the first error of each run, mend the cause, then: scontrol release {job}"
        elif process is None:
            todo = "Nothing to do for the job"
        if decision.blamed:
            todo += f". Nodes to look at: {', '.join(decision.blamed)}"
        if end.resumed_at_step is not None:
            before = "" if decision.step_at_decision is None else f", it had come to {decision.step_at_decision}"
            evidence.append(f"Continues from step {end.resumed_at_step}{before}")
    elif end.needless:
        sentence = f"{subject}: its {what} was not needed: {end.detail}"
    else:
        sentence = f"{subject} NEEDS YOU, its {what} failed: {end.detail}"
        look = f"scontrol show job {job}"
        if caller is Caller.RUN:
            look = "slurm-watchdog status"
        elif process is not None:
            look = f"on {process.node}: ps -o pid,user,stat,wchan:30,cmd -p {process.pid}"
        todo = f"See where it stands: {look}; what was done: slurm-watchdog explain {incident.id}"
    for each in run.records if caller is not Caller.RUN else ():  # Slurm's words, and none of these was said to it
        attempt = f" (attempt {each.attempt})" if each.attempt > 1 else ""
        detail = f", {each.detail}" if each.detail else ""
        evidence.append(f"{each.operation}{attempt}: {each.outcome or 'no outcome'}{detail}")
    return Message(sentence=sentence, evidence=tuple(evidence), todo=todo)


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
    place = culprit.path or culprit.mount
    parts = (
        f"rank {culprit.rank}" if culprit.rank is not None else "",
        f"on {culprit.node}" if culprit.node else "",
        f"pid {culprit.pid}" if culprit.pid is not None else "",
        culprit.gpu_uuid or "",
        f"at {place}" if place else "",
    )
    return " ".join(filter(None, parts))


def culprit_line(culprit: Culprit) -> str:
    """Who is named, and why."""
    return f"{named(culprit)}: {culprit.reason}" if culprit.reason else named(culprit)
