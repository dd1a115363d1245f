"""The wording of notifications: one sentence first, the evidence under it, then what to do. Pure, and the
same for all channels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.model.actions import RESTARTING, Action, ActionRun, Decision, Verdict
from slurm_watchdog.model.incidents import Incident, Severity
from slurm_watchdog.notify.notification import TEST_SUBJECT, TRANSIENT_GUARDS, Caller, Notice, Topic

SEVERITY_WORDS = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "warning", Severity.INFO: "info"}


SUBJECTS_IN_TEXT = ("leftovers:", "holders:")
"""Prefixes of subjects that every sentence about them already spells out."""


class Message(Struct, frozen=True, kw_only=True):
    """A message in three parts. Each may contain users' text: the channel escapes it."""

    sentence: str
    evidence: tuple[str, ...] = ()
    todo: str = ""


def message_of(notice: Notice) -> Message:
    """The words for one notice."""
    incident = notice.incident
    if notice.topic is Topic.DECIDED and notice.decision is not None:
        return decision_message(incident, notice.decision, notice.caller)
    if notice.topic is Topic.ENDED and notice.run is not None:
        return outcome_message(incident, notice.run, notice.caller)
    if notice.topic is Topic.NOTED:
        return Message(sentence=with_subject(incident, "; ".join(notice.said)), evidence=(f"Is: {incident.summary}",))
    if notice.topic is Topic.DIAGNOSED:
        return diagnosis_message(incident, notice.said)
    return resolved_message(incident) if notice.topic is Topic.RESOLVED else opened_message(incident)


def group_alike(story: Iterable[Notice]) -> list[list[Notice]]:
    """The notices in their order; those that say the same of several processes of one incident together."""
    found: dict[object, list[Notice]] = {}
    for number, notice in enumerate(story):
        decision = notice.decision or (notice.run.decision if notice.run is not None else None)
        key: object = number
        if decision is not None and decision.process is not None:
            ok = notice.run is not None and notice.run.end is not None and notice.run.end.ok
            key = notice.topic, ok, decision.verdict, decision.by, decision.reason
        found.setdefault(key, []).append(notice)
    return list(found.values())


def joint_message(notices: Sequence[Notice]) -> Message:
    """The words for notices that are `group_alike`: the first one's sentence, and how many more it is true of;
    theirs are evidence."""
    first, *others = map(message_of, notices)
    if not others:
        return first
    sentence = f"{first.sentence}; the same of {len(others):,} more process{'es' if len(others) > 1 else ''}"
    return replace(first, sentence=sentence, evidence=(*first.evidence, *(each.sentence for each in others)))


def opened_message(incident: Incident) -> Message:
    """An incident fires: what is wrong, since when, who, and the evidence."""
    since = f" Noticed after {duration(incident.detected_after_s)}." if incident.detected_after_s else ""
    who = tuple(culprit_line(incident, index) for index in range(len(incident.culprits)))
    what = with_subject(incident, incident.summary)
    stop = "" if not since or what.endswith((".", "!", "?", "…")) else "."
    return Message(
        sentence=f"{SEVERITY_WORDS[incident.severity]}: {what}{stop}{since}",
        evidence=who + incident.facts,
        todo=next_step(incident, "All evidence: {}. Keep the watchdog from acting: slurm-watchdog pause"),
    )


def next_step(incident: Incident, words: str) -> str:
    """`words` with the command that shows an incident in the place of {}; a test has nothing to show."""
    return (
        "Nothing to do: this is a test"
        if incident.subject == TEST_SUBJECT
        else words.format(f"slurm-watchdog explain {incident.id}")
    )


def diagnosis_message(incident: Incident, said: tuple[str, ...]) -> Message:
    """What the stacks of all ranks, and all else that was collected, tell."""
    first = said[0] if said else "nothing more was found"
    return Message(
        sentence=f"evidence: {with_subject(incident, first)}",
        evidence=said[1:],
        todo=f"Stacks and all else: slurm-watchdog explain {incident.id}",
    )


ACTION_PARTICIPLES: dict[Action, str] = {
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


def participle(decision: Decision, caller: Caller) -> str:
    """That of the decision's action; there is no queue under `run`."""
    if caller is Caller.RUN and decision.action in (Action.REQUEUE, Action.GRACEFUL_RESTART):
        number = "" if decision.fence is None else f" (restart {decision.fence.restarts + 1})"
        return f"{'restarted' if decision.action is Action.REQUEUE else 'restarted gracefully'}{number}"
    return ACTION_PARTICIPLES.get(decision.action, "requeued")


HOW_TO_ACT: dict[Caller, str] = {
    Caller.SERVICE: "mode: act in the configuration",
    Caller.RUN: "leave out --observe",
    Caller.ATTACH: "attach with --act",
}
"""How the reader enables actions."""


def decision_message(incident: Incident, decision: Decision, caller: Caller = Caller.SERVICE) -> Message:
    """What was decided about an incident, by which rule or guard, and why."""
    done = participle(decision, caller)
    job = _job(incident, decision)
    subject = decision_subject(incident, decision)
    if decision.acts:
        sentence = f"{subject} is being {done}"
        todo = "Nothing to do. To stop this and every other action: slurm-watchdog pause"
    elif decision.by == RESTARTING:
        sentence, todo = f"{subject} is restarting", "Nothing to do"
    elif decision.verdict is Verdict.ALLOWED:
        sentence = f"{subject}: alert only" if job or decision.process is not None else "alert only"
        todo = f"Look at it: slurm-watchdog explain {incident.id}"
    elif decision.verdict is Verdict.OBSERVED:
        sentence = f"{subject} would have been {done}, but was not touched"
        todo = f"Manually: {manual_command(decision, job, caller)}. To have it done: {HOW_TO_ACT[caller]}"
    else:
        yet = " yet" if decision.by in TRANSIENT_GUARDS else ""
        sentence = f"{subject} was not {done}{yet} (guard: {decision.by})"
        todo = f"Look at it: slurm-watchdog explain {incident.id}. Manually: {manual_command(decision, job, caller)}"
    evidence = [f"By {decision.by}"]
    left_out = decision.avoid or decision.exclude
    if left_out:
        allowed = decision.verdict is Verdict.ALLOWED
        evidence.append(f"{'Continues without' if allowed else 'To be avoided'}: {', '.join(left_out)}")
    if decision.asked_by:
        evidence.append(f"Asked for by {decision.asked_by}")
    evidence.append(f"Incident {incident.id}: {incident.summary}")
    return Message(sentence=f"{sentence}: {decision.reason}", evidence=tuple(evidence), todo=todo)


def _job(incident: Incident, decision: Decision) -> str:
    return decision.fence.job_id if decision.fence is not None else ",".join(incident.job_ids)


def decision_subject(incident: Incident, decision: Decision) -> str:
    """What a decision is about, as the subject of a sentence: `job 7`, or `process 4711 (python) of eve on n1`."""
    process = decision.process
    if process is None:
        return f"job {_job(incident, decision)}"
    return f"process {process.pid} ({process.comm}) of {process.user} on {process.node}"


def manual_command(decision: Decision, job: str, caller: Caller = Caller.SERVICE) -> str:
    """The command that does the same manually. A hung loop saves nothing, so a kill switch would never be seen."""
    if decision.process is not None:
        return f"on {decision.process.node}: kill {decision.process.pid}"
    if caller is Caller.RUN:
        if decision.action in (Action.HOLD, Action.CANCEL, Action.LEAVE_TO_CHAIN):
            return "end it with Ctrl-C"
        at_once = "" if decision.action in (Action.GRACEFUL_RESTART, Action.ASK_TO_SAVE) else " --now"
        return f"slurm-watchdog restart{at_once} {job}"
    if decision.action in (Action.GRACEFUL_RESTART, Action.ASK_TO_SAVE):
        return f"slurm-watchdog restart {job}"
    if decision.action in (Action.CANCEL, Action.LEAVE_TO_CHAIN):
        return f"scancel {job}"
    if decision.action is Action.RESUBMIT:
        return f"scontrol write batch_script {job}; scancel {job}; sbatch slurm-{job}.sh"
    if decision.action is Action.HOLD:
        return f"scontrol {'requeuehold' if decision.held_why else 'hold'} {job}"
    if decision.action is Action.RESTART_STEP:
        return f"slurm-watchdog restart --now {job}"
    if not decision.exclude:
        return f"scontrol requeue {job}"
    nodes = ",".join(decision.exclude)
    return f"scontrol requeuehold {job}; scontrol update JobId={job} ExcNodeList={nodes}; scontrol release {job}"


def outcome_message(incident: Incident, run: ActionRun, caller: Caller = Caller.SERVICE) -> Message:
    """How an action ended, what it cost, and each operation of it."""
    decision, end = run.decision, run.end
    job, subject = _job(incident, decision), decision_subject(incident, decision)
    evidence = []
    if end is None:
        sentence, todo = f"{subject}: {decision.action} continues", "Nothing to do"
    elif end.ok:
        cost = [f"it was down for {duration(end.downtime_s)}"] if end.downtime_s is not None else []
        if end.steps_lost is not None and "lost" not in end.detail:  # which the ladder says itself, mostly
            cost.append(f"{plural(end.steps_lost, 'step')} done again")
        again = decision.action in (Action.RESTART_STEP, Action.REQUEUE, Action.GRACEFUL_RESTART)
        sentence = (
            f"{subject} was "
            f"{'restarted' if again else ACTION_PARTICIPLES.get(decision.action, 'restarted')}: "
            f"{end.detail}{'; ' if cost else ''}{', '.join(cost)}"
        )
        todo = "Nothing to do" if decision.process is not None else "Nothing to do for the job"
        if decision.action is Action.HOLD:
            todo = f"Find the first error of each run, mend the cause, then: scontrol release {job}"
        if decision.blamed:
            todo += f". Nodes to look at: {', '.join(decision.blamed)}"
        if end.resumed_at_step is not None:
            before = "" if decision.step_at_decision is None else f", it had come to {decision.step_at_decision}"
            evidence.append(f"Continues from step {end.resumed_at_step}{before}")
    elif end.needless:
        sentence = f"{subject}: its {_what(decision)} was not needed: {end.detail}"
        todo = "Nothing to do"
    else:
        sentence = f"{subject} NEEDS YOU, its {_what(decision)} failed: {end.detail}"
        todo = (
            f"See where it stands: {_inspect_command(decision, job, caller)}; what was done: "
            f"slurm-watchdog explain {incident.id}"
        )
    evidence += (
        []
        if caller is Caller.RUN
        else [  # Slurm's words, and none of these was said to it
            f"{record.operation}{f' (attempt {record.attempt})' if record.attempt > 1 else ''}: "
            f"{record.outcome or 'no outcome'}{f', {record.detail}' if record.detail else ''}"
            for record in run.records
        ]
    )
    return Message(sentence=sentence, evidence=tuple(evidence), todo=todo)


def _what(decision: Decision) -> str:
    return "restart" if decision.action is Action.GRACEFUL_RESTART else decision.action.replace("_", " ")


def _inspect_command(decision: Decision, job: str, caller: Caller) -> str:
    if caller is Caller.RUN:
        return "slurm-watchdog status"
    if decision.process is None:
        return f"scontrol show job {job}"
    return f"on {decision.process.node}: ps -o pid,user,stat,wchan:30,cmd -p {decision.process.pid}"


def resolved_message(incident: Incident) -> Message:
    """An incident is over: after how long, and why."""
    return Message(
        sentence=f"over{duration_suffix(incident)}: {with_subject(incident, incident.resolution or incident.summary)}",
        evidence=(f"Was: {incident.summary}",),
        todo=next_step(incident, "Nothing to do. What happened: {}"),
    )


def duration_suffix(incident: Incident) -> str:
    """` after 12 min` for one that is over."""
    if incident.resolved_at is None:
        return ""
    return f" after {duration(max(0.0, incident.resolved_at - incident.opened_at))}"


def jobs_of(incident: Incident) -> str:
    """The jobs of an incident in a few words, its subject if there is none."""
    jobs = incident.job_ids
    if not jobs:
        return incident.subject
    return ("job " if len(jobs) == 1 else "jobs ") + ", ".join(jobs[:5]) + (" and more" if len(jobs) > 5 else "")


def with_subject(incident: Incident, text: str) -> str:
    """`text`, with the jobs, or what it is about, before it unless it names that itself."""
    jobs = incident.job_ids
    if incident.subject.startswith(SUBJECTS_IN_TEXT):
        return text
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
