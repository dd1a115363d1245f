"""Ending a process that outlived its job: who may be, which guards hold, and the ladder through every crash
of the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.actuate.by_agent import end_process
from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.config.policy import Policy
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.next_move import next_move
from slurm_watchdog.controller.actions.ladder.process import MAX_TRIES
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    LadderLimits,
    Observed,
    Reconcile,
    Wait,
)
from slurm_watchdog.controller.policy.by_user import AT_ONCE_S, objection
from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.policy.guards import PolicyInput, with_process
from slurm_watchdog.controller.policy.rules import Rule, rule_for
from slurm_watchdog.detect import orphan_gpu_process
from slurm_watchdog.model.actions import (
    Action,
    ActionEnd,
    ActionRun,
    Decision,
    Operation,
    OperationOutcome,
    OperationRecord,
    Rung,
    Verdict,
)
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import GpuHolder
from slurm_watchdog.model.protocol import CommandResult, ProcessEnd
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.notify.notification import Notice, Topic, messages_of
from tests.builders.notices import told
from tests.builders.views import slurm_job

HOLDER = GpuHolder(
    pid=4711, start_ticks=9, uid=1000, user="eve", comm="python", state="S", job_id="6", gpu_uuids=("GPU-a",), minors=(1,),
    orphan_for_s=300.0, was_in_job=True,
)  # fmt: skip
PROCESS = GpuProcess(
    node="n1", boot_id="boot", pid=4711, start_ticks=9, uid=1000, user="eve", comm="python", job_id="6", minors=(1,),
    gpu_uuids=("GPU-a",),
)  # fmt: skip
NODE = NodeView(name="n1", reported_at=0.0, boot_id="boot", holders=(HOLDER,))
INCIDENT = Incident(
    id="i", kind=IncidentKind.ORPHAN_GPU_PROCESS, subject="leftovers:6/1000", state=IncidentState.FIRING, severity=Severity.WARNING,
    job_ids=(), opened_at=1e6 - 300, pending_mono=0, actionable=True, processes=(PROCESS,),
)  # fmt: skip
LIMITS = Config(policy=Policy(max_excluded_nodes=3, drained_percent=50))
RULE = Rule(acts=True, ladder=(Rung.END_PROCESS,), source="except (kind: orphan_gpu_process)")
SITUATION = PolicyInput(
    incident=INCIDENT, config=LIMITS, now_wall=1e6, rule=RULE, job=None, paused=None, blind=None, recent=(), busy=False, running_jobs=0, jobs_in_trouble=0,
    nodes_known=40, nodes_silent=0, process=PROCESS, process_since=1e6 - 300, mounts_stalled=(), nodes=tuple(SlurmNode(name=f"n{n}", address="", state="IDLE") for n in range(4)),
)  # fmt: skip


def judge(incident: Incident = INCIDENT, **changes: Any) -> Decision:
    return decide(replace(SITUATION, **changes, incident=incident, config=LIMITS), "d")


def done(ago_s: float, process: GpuProcess | None = PROCESS) -> Decision:
    return Decision(
        id="x", incident_id="x", action=Action.END_PROCESS, verdict=Verdict.ALLOWED, by="", reason="", decided_at=1e6 - ago_s,
        process=process,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ who may be ended


def finding_of(**changes: Any) -> Any:
    (found,) = orphan_gpu_process.detect(
        ClusterView(now=1.0, nodes=(replace(NODE, holders=(replace(HOLDER, **changes),)),))
    )
    return found


def test_a_process_that_was_seen_in_a_job_of_an_ordinary_user_may_be_ended() -> None:
    assert (finding_of().processes, finding_of().actionable) == ((PROCESS,), True)


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": None}, {"was_in_job": False}, {"minors": ()}, {"uid": 0}, {"uid": 999}, {"orphan_for_s": None},
    ],
)  # fmt: skip
def test_where_anything_about_it_is_a_guess_it_is_only_told(change: dict[str, Any]) -> None:
    assert (finding_of(**change).processes, finding_of(**change).actionable) == ((), False)


@pytest.mark.parametrize(
    ("node", "reports", "jobs", "why"),
    [
        (None, True, (), "does not report"),
        (NODE, False, (), "does not report"),
        (replace(NODE, boot_id="other"), True, (), "restarted"),
        (replace(NODE, holders=()), True, (), "does not report it any more"),
        (replace(NODE, holders=(replace(HOLDER, start_ticks=10),)), True, (), "does not report it any more"),
        (replace(NODE, holders=(replace(HOLDER, orphan_for_s=None),)), True, (), "is not known"),
        (NODE, True, (slurm_job(job_id="6", uid=7, nodes=("n9",)),), "job 6 is RUNNING"),
        (NODE, True, (slurm_job(job_id="5_2", raw_id="6", state="COMPLETING"),), "job 5_2 is COMPLETING"),
        (NODE, True, (slurm_job(job_id="8", uid=1000, nodes=("n1",)),), "its user has job 8 on n1 now"),
        (NODE, True, (slurm_job(job_id="8", uid=1000, nodes=("n1",), state="CONFIGURING"),), "its user has job 8"),
    ],
)  # fmt: skip
def test_what_speaks_against_touching_it_is_said(
    node: NodeView | None, reports: bool, jobs: tuple[SlurmJob, ...], why: str
) -> None:
    assert why in (objection(PROCESS, node, reports, jobs) or "")


def test_jobs_of_others_and_of_other_nodes_do_not_protect_it_nor_a_new_one_where_its_control_group_says_whose_it_is() -> (
    None
):
    others = (
        slurm_job(job_id="8", uid=1001, nodes=("n1",)),
        slurm_job(job_id="9", uid=1000, nodes=("n2",)),
        slurm_job(job_id="6", uid=1000, nodes=("n1",), state="COMPLETED"),
        slurm_job(job_id="10", uid=1000, nodes=("n1",), state="PENDING"),
    )
    assert objection(PROCESS, NODE, True, others) is None
    new = slurm_job(job_id="8", uid=1000, nodes=("n1",))
    assert objection(replace(PROCESS, in_job_group=True), NODE, True, (new,)) is None
    assert objection(replace(PROCESS, in_job_group=True), NODE, True, (replace(new, job_id="6"),)) is not None


# ------------------------------------------------------------------------------------------------ guards


def test_it_is_decided_about_the_process_and_no_job() -> None:
    decision = judge()
    assert (decision.verdict, decision.action, decision.fence) == (Verdict.ALLOWED, Action.END_PROCESS, None)
    assert (decision.process, decision.process_since) == (PROCESS, 1e6 - 300)
    assert (decision.drain, decision.exclude, decision.nodes) == ((), (), ())


@pytest.mark.parametrize(
    ("by", "change"),
    [
        ("paused", {"paused": "x"}),
        ("blind", {"blind": "just started"}),
        ("process_changed", {"process_objection": "job 6 is RUNNING"}),
        ("opted_out", {"process_job": slurm_job(job_id="6", state="COMPLETED", comment="watchdog=off")}),
        ("cooldown", {"recent": (done(899),)}),
        ("attempts", {"recent": (done(9000), done(8000), done(7000))}),
        ("storm", {"jobs_with_orphans": 3}),
        ("storm", {"nodes_silent": 9}),
        ("budget", {"recent": tuple(done(10, replace(PROCESS, node=f"n{n}")) for n in range(2, 6))}),
        ("budget", {"recent": (done(10, replace(PROCESS, job_id="5", pid=1)),), "nodes_known": 4}),
    ],
)
def test_each_guard_holds_for_a_process_as_well(by: str, change: dict[str, Any]) -> None:
    assert (judge(**change).verdict, judge(**change).by) == (Verdict.SUPPRESSED, by)


def test_weak_evidence_is_only_told_and_observing_stays_observing() -> None:
    assert judge(replace(INCIDENT, actionable=False)).by == "evidence"
    observed = judge(rule=replace(RULE, acts=False))
    assert (observed.verdict, observed.action) == (Verdict.OBSERVED, Action.END_PROCESS)
    assert judge(rule=replace(RULE, ladder=())).action is Action.NONE


def test_a_hundred_workers_of_one_job_on_one_node_are_one_action_and_another_process_has_no_cooldown() -> None:
    workers = tuple(done(10, replace(PROCESS, pid=pid)) for pid in range(100))
    assert judge(recent=workers).verdict is Verdict.ALLOWED


def test_jobs_and_processes_do_not_use_up_each_others_budget() -> None:
    restarts = tuple(replace(done(10, None), action=Action.REQUEUE) for _ in range(9))
    assert judge(recent=restarts, running_jobs=0).verdict is Verdict.ALLOWED
    hang = replace(INCIDENT, kind=IncidentKind.COLLECTIVE_HANG, processes=(), job_ids=("7",), runs=(("7", 0),))
    orphans = tuple(done(10, replace(PROCESS, node=f"n{n}")) for n in range(9))
    rule = replace(RULE, ladder=(Rung.REQUEUE,))
    decision = judge(hang, process=None, recent=orphans, job=slurm_job(), rule=rule, running_jobs=40)
    assert decision.verdict is Verdict.ALLOWED


def test_orphans_of_several_jobs_in_one_moment_are_no_coincidence_and_those_of_other_days_are() -> None:
    def of(number: int, opened_at: float) -> Incident:
        return replace(
            INCIDENT, id=f"i{number}", opened_at=opened_at, processes=(replace(PROCESS, job_id=f"{number}"),)
        )

    def at_once(*others: Incident) -> int:
        jobs: tuple[SlurmJob, ...] = ()
        return with_process(SITUATION, PROCESS, NODE, True, jobs, (INCIDENT, *others)).jobs_with_orphans

    assert at_once(of(7, INCIDENT.opened_at + AT_ONCE_S), of(8, INCIDENT.opened_at)) == 3
    assert at_once(of(7, INCIDENT.opened_at - 86400), of(8, INCIDENT.opened_at + 86400), of(6, INCIDENT.opened_at)) == 1


def test_a_node_is_drained_only_if_the_rule_says_so_and_there_is_room() -> None:
    assert judge(rule=replace(RULE, drain=True)).drain == ("n1",)
    decided = judge(rule=replace(RULE, drain=True), drained_by_us=2)
    assert decided.drain == () and "not drained" in decided.reason


# ------------------------------------------------------------------------------------------------ the configuration


def rule(text: str) -> Rule:
    return rule_for(parse_config(text), IncidentKind.ORPHAN_GPU_PROCESS, None)


def test_as_it_ships_nobody_is_ended_in_whatever_mode() -> None:
    assert rule("restart: all").ladder == ()
    assert rule("restart: never").ladder == ()


def test_a_site_turns_it_on_for_this_kind() -> None:
    found = rule("except: [{match: {kind: orphan_gpu_process}, restart: all, ladder: [end_process], drain: true}]")
    assert (found.acts, found.ladder, found.drain) == (True, (Rung.END_PROCESS,), True)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("{match: {kind: orphan_gpu_process}, ladder: [requeue]}", "ladder", "[end_process]"),
        ("{match: {kind: collective_hang}, ladder: [end_process]}", "ladder", "answers orphan_gpu_process alone"),
        ("{match: {kind: orphan_gpu_process}, ladder: [end_process, cancel]}", "ladder", "no other rung"),
        ("{match: {user: a, kind: orphan_gpu_process}, ladder: [end_process]}", "match.kind", "match it by kind alone"),
    ],
)  # fmt: skip
def test_where_it_makes_no_sense_it_is_refused_with_the_reason(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"except: [{text}]\n")
    found = caught.value.problems
    assert any(each.path == f"except[0].{path}" and words in each.message for each in found), found


# ------------------------------------------------------------------------------------------------ the ladder


def observed(run: ActionRun, **world: Any) -> Observed:
    return Observed(decision=run.decision, records=run.records, end=run.end, limits=OPERATIONS, **world)


OPERATIONS = LadderLimits(
    kill_switch_s=60, checkpoint_s=60, exit_s=60, step_s=120, mount_s=60, confirm_s=60, term_s=30, kill_s=60
)
ENDS_BY = {"term": ("term", "kill"), "kill": ("kill",), "never": ()}


class Crash(Exception):
    """The controller dies here."""


@dataclass
class Place:
    """A node with one orphan, and the journal of one action. `crash`: (number of the signal, before or after
    it was sent)."""

    hears: str
    drain: bool = True
    crash: tuple[int, str] | None = None
    now: float = 1e6
    run: ActionRun = field(init=False)
    sent: list[str] = field(default_factory=list)
    drained: int = 0
    gone: bool = False
    steps: int = 0

    def __post_init__(self) -> None:
        self.run = ActionRun(decision=judge(rule=replace(RULE, drain=self.drain)))

    def world(self) -> Observed:
        seen = (
            ProcessEnd(gone=self.gone, state="" if self.gone else "D", wchan="rpc_wait") if self.run.records else None
        )
        return observed(self.run, now=self.now, job_known=True, process=seen)

    def put(self, record: OperationRecord) -> None:
        others = tuple(r for r in self.run.records if (r.operation, r.attempt) != (record.operation, record.attempt))
        self.run = replace(self.run, records=(*others, record))

    def lever(self, do: Execute) -> tuple[OperationOutcome, str]:
        if do.operation is Operation.DRAIN:
            self.drained += 1
            return OperationOutcome.DONE, "drained: n1"
        how = {Operation.TERM_PROCESS: "term", Operation.KILL_PROCESS: "kill"}[do.operation]
        number = self.steps = self.steps + 1
        if self.crash == (number, "before"):
            raise Crash
        if not self.gone:
            self.sent.append(how)
            self.gone = how in ENDS_BY[self.hears]
        if self.crash == (number, "after"):
            raise Crash
        return OperationOutcome.DONE, "sent"

    def play(self) -> ActionEnd:
        for _ in range(500):
            move = next_move(self.world())
            if isinstance(move, Finish):
                return move.end
            if isinstance(move, Reconcile):
                record = next(r for r in self.run.records if (r.operation, r.attempt) == (move.operation, move.attempt))
                self.put(replace(record, outcome=move.outcome, outcome_at=self.now, detail=move.detail))
            elif isinstance(move, Execute):
                record = OperationRecord(operation=move.operation, attempt=move.attempt, intent_at=self.now)
                self.put(record)
                try:
                    outcome, detail = self.lever(move)
                except Crash:
                    self.now += 10.0
                    continue
                self.put(replace(record, outcome=outcome, outcome_at=self.now, detail=detail))
            self.now += 2.0
        raise AssertionError("it does not come to an end")


def crashes() -> Iterator[tuple[int, str] | None]:
    yield None
    yield from product((1, 2, 3, 4), ("before", "after"))


@pytest.mark.parametrize("crash", list(crashes()))
@pytest.mark.parametrize("hears", ENDS_BY)
def test_through_every_crash_sigterm_comes_once_at_most_before_sigkill_and_the_end_is_told_right(
    hears: str, crash: tuple[int, str] | None
) -> None:
    place = Place(hears, crash=crash)
    end = place.play()
    assert place.sent.count("term") <= 1
    assert place.sent[:1] in ([], ["term"], ["kill"] if crash == (1, "before") else ["term"])
    assert end.ok == (hears != "never") == place.gone
    assert place.drained == (hears == "never")
    if hears == "term" and crash is None:
        assert place.sent == ["term"]
    if hears == "never":
        assert end.detail.startswith(
            "unkillable: process 4711 (python) of eve on n1, of job 6, which is over, holds GPU-a since "
        )
        assert "in state D (rpc_wait) after SIGKILL" in end.detail and end.detail.endswith("drained: n1")


def test_each_signal_gets_its_time() -> None:
    place = Place("never", drain=False)
    end = place.play()
    term, kill = place.run.records
    assert kill.intent_at - term.intent_at == pytest.approx(OPERATIONS.term_s, abs=3)
    assert end.ended_at - kill.intent_at == pytest.approx(OPERATIONS.kill_s, abs=3)
    assert "drained" not in end.detail


def records(*outcomes: tuple[Operation, OperationOutcome | None]) -> ActionRun:
    rows = tuple(
        OperationRecord(operation=operation, attempt=1, intent_at=1e6, outcome=outcome, outcome_at=1e6, detail="why")
        for operation, outcome in outcomes
    )
    return ActionRun(decision=judge(), records=rows)


def move(run: ActionRun, after_s: float = 1.0, **world: Any) -> Any:
    fields: dict[str, Any] = {
        "job_known": True,
        "process": ProcessEnd(state="S") if run.records else None,
    } | world
    return next_move(observed(run, now=1e6 + after_s, **fields))


def test_nothing_is_sent_while_actions_are_paused_or_slurm_does_not_answer_or_something_speaks_against_it() -> None:
    fresh = ActionRun(decision=judge())
    assert isinstance(move(fresh), Execute)
    assert isinstance(move(fresh, paused=True), Wait)
    assert isinstance(move(fresh, job_known=False), Wait)
    assert "left alone: job 6 is RUNNING" in move(fresh, process_objection="job 6 is RUNNING").end.detail
    told = records((Operation.TERM_PROCESS, OperationOutcome.DONE))
    assert isinstance(move(told), Wait)
    assert move(told, 31.0).operation is Operation.KILL_PROCESS
    assert isinstance(move(told, 31.0, paused=True), Wait)
    assert "its user has job 8" in move(told, 31.0, process_objection="its user has job 8").end.detail


@pytest.mark.parametrize("operation", [Operation.TERM_PROCESS, Operation.KILL_PROCESS])
def test_what_the_node_objects_to_is_asked_again_a_few_times_and_never_counts_as_unkillable(
    operation: Operation,
) -> None:
    told = (
        records((Operation.TERM_PROCESS, OperationOutcome.DONE))
        if operation is Operation.KILL_PROCESS
        else ActionRun(decision=judge())
    )
    row = OperationRecord(
        operation=operation,
        attempt=1,
        intent_at=1e6,
        outcome=OperationOutcome.SKIPPED,
        outcome_at=1e6,
        detail="its user has job 8 here now",
    )
    for number in range(1, MAX_TRIES + 1):
        told = replace(told, records=(*told.records, replace(row, attempt=number)))
        after = move(told, 500.0)
        assert isinstance(after, Finish) == (number == MAX_TRIES)
        assert number == MAX_TRIES or (after.operation, after.attempt) == (operation, number + 1)
    assert after.end.detail == f"{NAME} was left alone: its user has job 8 here now"


NAME = "process 4711 (python) of eve on n1"


@pytest.mark.parametrize(
    ("said", "outcome", "words"),
    [
        (None, OperationOutcome.UNKNOWN, "may have been sent: n1 did not answer"),
        (ProcessEnd(gone=True, sent=True), OperationOutcome.DONE, "SIGTERM sent: it has ended"),
        (ProcessEnd(gone=True), OperationOutcome.DONE, "had ended before"),
        (
            ProcessEnd(sent=True, state="D", wchan="rpc_wait"),
            OperationOutcome.DONE,
            "still there, state D in rpc_wait",
        ),
        (
            ProcessEnd(refusal="job 6 has a slurmstepd here"),
            OperationOutcome.SKIPPED,
            "job 6 has a slurmstepd here",
        ),
        (ProcessEnd(released=True), OperationOutcome.SKIPPED, "holds no GPU any more"),
        (ProcessEnd(), OperationOutcome.SKIPPED, "could not be looked at"),
    ],
)
def test_what_the_node_says_is_the_outcome_and_the_command_names_the_whole_process(
    said: ProcessEnd | None, outcome: OperationOutcome, words: str
) -> None:
    asked: list[tuple[str, Any]] = []

    async def ask(node: str, command: Any, deadline_s: float) -> CommandResult:
        asked.append((node, command))
        return CommandResult(command_id=command.id, ok=False, error="n1 did not answer", process=said)

    found, detail = asyncio.run(end_process(ask, PROCESS, "term", 5.0))
    assert found is outcome and words in detail
    ((node, command),) = asked
    assert (node, command.how, command.boot_id, command.pid, command.start_ticks) == (
        "n1",
        "term",
        "boot",
        4711,
        9,
    )
    assert (command.uid, command.comm, command.job_id, command.minors, command.expires_s) == (
        1000,
        "python",
        "6",
        (1,),
        5.0,
    )


def test_one_that_lets_go_of_its_gpu_after_sigterm_is_left_alive_and_after_sigkill_that_proves_nothing() -> None:
    seen = ProcessEnd(state="S", released=True)
    assert move(records((Operation.TERM_PROCESS, OperationOutcome.DONE)), process=seen).end.ok
    killed = records((Operation.TERM_PROCESS, OperationOutcome.DONE), (Operation.KILL_PROCESS, OperationOutcome.DONE))
    assert isinstance(move(killed, process=seen), Wait)


def test_a_node_that_falls_silent_is_waited_for_and_then_nothing_is_claimed() -> None:
    for run in (
        records((Operation.TERM_PROCESS, OperationOutcome.DONE)),
        records((Operation.TERM_PROCESS, OperationOutcome.DONE), (Operation.KILL_PROCESS, OperationOutcome.DONE)),
        records((Operation.TERM_PROCESS, OperationOutcome.UNKNOWN)),
    ):
        assert isinstance(move(run, 100.0, process=None), Wait)
        end = move(run, 1000.0, process=None).end
        assert (end.ok, "n1 does not answer" in end.detail, "unkillable" in end.detail) == (
            False,
            True,
            False,
        )
    lost = records((Operation.TERM_PROCESS, None))
    assert isinstance(move(lost, 100.0, process=None), Wait)
    assert isinstance(move(lost, 1000.0, process=None), Reconcile)


# ------------------------------------------------------------------------------------------------ what people are told


def test_people_are_told_of_the_process_and_never_of_a_job_that_is_over() -> None:
    decision = judge()
    assert told(INCIDENT, decision).sentence.startswith("process 4711 (python) of eve on n1 is being ended: ")
    observed = told(INCIDENT, judge(rule=replace(RULE, acts=False)))
    assert "would have been ended, but was not touched" in observed.sentence
    assert "on n1: kill 4711" in observed.todo
    held = told(INCIDENT, judge(paused="x"))
    assert "was not ended (guard: paused)" in held.sentence
    end = Place("never").play()
    said = told(INCIDENT, ActionRun(decision=decision, end=end))
    assert said.sentence.startswith("process 4711 (python) of eve on n1 NEEDS YOU")
    assert "unkillable" in said.sentence and "scontrol show job" not in said.todo
    ok = told(INCIDENT, ActionRun(decision=decision, end=Place("term").play()))
    assert ok.sentence.startswith("process 4711 (python) of eve on n1 was ended: ")


def test_what_is_alike_of_many_processes_is_one_sentence_and_one_that_cannot_be_ended_is_not_among_them() -> None:
    def notice(pid: int, topic: Topic, end: ActionEnd | None = None) -> Notice:
        decision = replace(judge(), id=f"d{pid}", process=replace(PROCESS, pid=pid))
        run = None if end is None else ActionRun(decision=decision, end=end)
        return Notice(topic=topic, at=1e6, incident=INCIDENT, decision=None if run else decision, run=run)

    ok, failed = Place("term").play(), Place("never").play()
    story = [notice(pid, Topic.DECIDED) for pid in range(11, 16)]
    story += [notice(pid, Topic.ENDED, failed if pid == 13 else ok) for pid in range(11, 16)]
    decided, ended, stuck = messages_of(story)
    assert told(replace(INCIDENT, summary="1 process of eve's job 6")).sentence == "warning: 1 process of eve's job 6"
    assert decided.sentence.startswith("process 11 (python) of eve on n1 is being ended: ")
    assert decided.sentence.endswith("; the same of 4 more processes")
    assert ended.sentence.endswith("; the same of 3 more processes")
    assert [line for line in ended.evidence if "process 15 (python) of eve on n1 was ended" in line]
    assert stuck.sentence.startswith("process 13 (python) of eve on n1 NEEDS YOU") and "more" not in stuck.sentence
