"""Evidence of a job's nodes on the controller: who is asked, who answers and how, what is kept, and that
nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.collective_order import order_of
from slurm_watchdog.base import clock
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.evidence import collection, collector, store
from slurm_watchdog.controller.evidence.collection import Collected, follows, processes_of
from slurm_watchdog.controller.evidence.collector import AT_ONCE, FINISHED_KEPT, CollectionLimits, Collector
from slurm_watchdog.controller.evidence.requests import EvidenceRequests
from slurm_watchdog.controller.incidents.judge import OpenIncidents
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.diagnose.job import Diagnosis
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, Decision, Fence, OperationOutcome, Verdict
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.collective_records import (
    Call,
    CollectiveRecord,
    Communicator,
    RasAnswer,
    RasCommunicator,
    RasRank,
)
from slurm_watchdog.model.evidence import FoundFile, NodeEvidence, RankEvidence, SocketState, StackDump, ThreadStack
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.observations import Event, EventKind, MountProbe, Process, Role
from slurm_watchdog.model.protocol import CollectEvidence, Command, CommandResult, ProbeMount
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.evidence_rows import evidence_of
from tests.builders.views import LOADER, RECV, blocked, frames, node_of, process, slurm_job, stack

CONFIG = """
agent: {interval: 250ms, probe_deadline: 1s}
detectors: {filesystem_stall: {blocked_for: 6s}}
"""
LIMITS = CollectionLimits(slack_s=0.2, silence_every_s=0.05, spread_s=0.02, limit_s=0.5)
"""`slack_s`: what a node may take here; three intervals come on top of it."""


class Judge:
    def __init__(self) -> None:
        self.view = ClusterView(now=0.0)
        self.limits_s: dict[str, float] = {}
        self.incidents = OpenIncidents()
        self.slurm_patience_s = 120.0

    def hang_limits(self, job: JobView) -> CollectiveHang:
        return CollectiveHang()


class Notifier:
    def __init__(self) -> None:
        self.said: list[str] = []

    def diagnosed(self, about: Incident, said: list[str]) -> None:
        self.said += said


class Controller:
    """The parts of the controller that a collection uses, with a journal on the disk and nobody who judges."""

    def __init__(self, directory: Path, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        self.config = parse_config(CONFIG)
        self.state = ClusterState(silent_after_s=600, report_lifetime_s=60)
        self.commands = CommandQueue()
        self.evidence = EvidenceRequests(self.state, self.commands, probe_deadline_s=1.0)
        self.journal = Journal(f"sqlite:///{directory}/journal.sqlite")
        self.judge, self.notifier = Judge(), Notifier()
        self.notes: list[str] = []
        self.collector = self.collecting(LIMITS)
        self.listed = tuple(SlurmNode(name=node, address=node, state="IDLE") for node in nodes)
        self.run(restarts=0)
        for node in nodes:
            self.report(node)

    def collecting(self, limits: CollectionLimits) -> Collector:
        told = self.notifier.diagnosed
        return Collector(self.config, self.journal, self, self.state, self.judge, self.evidence, told, limits)

    def forgets_everything(self) -> None:
        self.state.__init__(silent_after_s=600, report_lifetime_s=60)  # type: ignore[misc]

    def run(self, **changes: Any) -> None:
        nodes = tuple(each.name for each in self.listed)
        jobs = (slurm_job(nodes=nodes, **changes),)
        self.state.apply_slurm(SlurmView(jobs=jobs, nodes=self.listed), clock.monotonic())

    def report(self, node: str, *processes: Process) -> None:
        mine = processes or tuple(process(rank) for rank in range(4) if node_of(rank) == node)
        step = Event(kind=EventKind.PROGRESS, job_id="7", age_s=0.0, source="log", pattern="p", step=5)
        report = Report(
            node=node, boot_id=f"b{node}", agent_id="a", sequence=int(clock.monotonic() * 1e6), processes=mine,
            events=(step,),
        )  # fmt: skip
        assert self.state.apply_report(report, clock.monotonic()) == "accepted"

    def write(self, work: Callable[[], object]) -> bool:
        work()
        return True

    def add_note(self, incident: Incident, text: str) -> None:
        self.notes.append(text)

    def kept(self, incident_id: str = "i") -> list[tuple[str, dict[str, Any]]]:
        return [(kind, document) for _, kind, document in evidence_of(self.journal, incident_id)]

    @property
    def job(self) -> Any:
        return self.state.jobs["7"]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.journal.close()


def incident(incident_id: str = "i", **changes: Any) -> Incident:
    given: dict[str, Any] = {
        "id": incident_id, "kind": IncidentKind.COLLECTIVE_HANG, "subject": "job:7", "state": IncidentState.FIRING,
        "severity": Severity.CRITICAL, "job_ids": ("7",), "opened_at": 0.0, "pending_mono": 0.0,
    }  # fmt: skip
    return Incident(**{**given, **changes})


DECISION = Decision(
    id="d", incident_id="i", action=Action.REQUEUE, verdict=Verdict.ALLOWED, by="rule", reason="", decided_at=0.0,
    fence=Fence(job_id="7", restarts=0, start_at=900.0),
)  # fmt: skip


def rank_evidence(rank: int, dumps: int = 3, threads: int = 1) -> RankEvidence:
    lines = LOADER if rank == 3 else RECV
    first = tuple(
        ThreadStack(thread_id=100 + rank + n, name="MainThread" if n == 0 else "t", active=False, frames=frames(lines))
        for n in range(threads)
    )
    same = tuple(each.thread_id for each in first)
    return RankEvidence(
        pid=100 + rank, start_ticks=5, role=Role.RANK, rank=rank, comm="python",
        dumps=(
            StackDump(after_s=0.0, threads=first),
            *(StackDump(after_s=10.0 * n, unchanged=same) for n in range(1, dumps)),
        ),
    )  # fmt: skip


def evidence(node: str, job_id: str = "7") -> NodeEvidence:
    return NodeEvidence(node=node, job_id=job_id, ranks=tuple(rank_evidence(r) for r in range(4) if node_of(r) == node))


def answer(node: str, command: Command) -> CommandResult:
    return CommandResult(command_id=command.id, ok=True, evidence=evidence(node))


class Agents:
    """Fetch commands as agents do, and answer as `answers` says (node -> what it makes of a command; None: nothing)."""

    def __init__(self, controller: Controller, **answers: Callable[[str, Command], CommandResult | None]) -> None:
        self._c, self._answers = controller, answers
        self.asked: list[tuple[str, Command]] = []

    async def serve(self) -> None:
        while True:
            for node in [each.name for each in self._c.listed]:
                for command in self._c.commands.pop(node):
                    self.asked.append((node, command))
                    result = self._answers.get(node, answer)(node, command)
                    if result is not None:
                        self._c.commands.resolve(result)
            await asyncio.sleep(0.005)

    def commands(self, kind: type = CollectEvidence) -> list[str]:
        return sorted(node for node, command in self.asked if isinstance(command, kind))


def play(agents: Agents, story: Coroutine[Any, Any, Any]) -> Any:
    """Runs a story while the agents serve; it may not take for ever."""

    async def run() -> Any:
        serving = asyncio.create_task(agents.serve())
        try:
            return await asyncio.wait_for(story, 20)
        finally:
            serving.cancel()

    return asyncio.run(run())


async def over(found: Collected) -> Collected:
    await found.finished.wait()
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for knows of no event
        await asyncio.sleep(0.005)


def refused(node: str, command: Command) -> CommandResult:
    return CommandResult(command_id=command.id, ok=False, error="another restart of the job runs here")


def silent(node: str, command: Command) -> None:
    return None


# ---------------------------------------------------------------------------------------- answers


def dumped(rank: int, *, absent: bool = False, age_s: float = 0.0) -> FoundFile:
    """Its Flight Recorder dump: it waits in collective 8, or has finished 7."""
    place = Communicator(
        key="0", label="default_pg", entered=7 if absent else 8, members=() if absent else (0, 1, 2, 3),
        waits=() if absent else (Call(seq=8, name="all_reduce"),),
    )  # fmt: skip
    record = CollectiveRecord(rank=rank, communicators=(place,))
    return FoundFile(kind="flight_recorder", path="/d", size_bytes=1, age_s=age_s, rank=rank, record=record)


def with_dumps(*dumps: FoundFile) -> Callable[[str, Command], CommandResult]:
    def answers(node: str, command: Command) -> CommandResult:
        return CommandResult(command_id=command.id, ok=True, evidence=replace(evidence(node), files=dumps))

    return answers


def test_dumps_since_the_last_step_count_and_a_node_speaks_for_its_own_ranks(controller: Controller) -> None:
    first = with_dumps(dumped(0), dumped(1, age_s=900.0), dumped(3))  # n1 has no rank 3
    agents = Agents(controller, n1=first, n2=with_dumps(dumped(2), dumped(3, absent=True)))

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    play(agents, story())
    view = controller.state.job_view("7", clock.monotonic())
    assert view is not None
    assert [(each.rank, len(each.communicators[0].waits)) for each in view.collectives[0].records] == [
        (0, 1), (2, 1), (3, 0),
    ]  # fmt: skip


def wrote(rank: int, age_s: float) -> FoundFile:
    return FoundFile(kind="own_words", path="/e", size_bytes=1, age_s=age_s, rank=rank, said=f"ValueError: {rank}")


def test_what_ranks_wrote_of_their_ends_since_the_last_step_is_known_the_first_one_first(
    controller: Controller,
) -> None:
    first = with_dumps(wrote(0, 0.5), wrote(1, 900.0), wrote(3, 0.1))  # n1 has no rank 3
    agents = Agents(controller, n1=first, n2=with_dumps(wrote(3, 2.0)))

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    play(agents, story())
    view = controller.state.job_view("7", clock.monotonic())
    assert view is not None
    assert [(each.node, each.rank, each.text) for each in view.own_words] == [
        ("n2", 3, "ValueError: 3"), ("n1", 0, "ValueError: 0"),
    ]  # fmt: skip


def test_one_node_asks_nccls_ras_and_what_another_says_of_it_is_not_heard(controller: Controller) -> None:
    def ras(release: str, behind: int) -> Callable[[str, Command], CommandResult]:
        ranks = tuple(RasRank(rank=n, pid=100 + n, counts=(("", 9 - (n == behind)),)) for n in range(4))
        found = RasAnswer(release=release, communicators=(RasCommunicator(key="ab", size=4, ranks=ranks),))

        def answers(node: str, command: Command) -> CommandResult:
            return CommandResult(command_id=command.id, ok=True, evidence=replace(evidence(node), ras=found))

        return answers

    agents = Agents(controller, n1=ras("2.28.7", 3), n2=ras("forged", 0))

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    play(agents, story())
    asked = [node for node, command in agents.asked if isinstance(command, CollectEvidence) and command.ras]
    assert asked == ["n1"]
    view = controller.state.job_view("7", clock.monotonic())
    assert view is not None
    assert [(each.source, order_of(each.records).odd[0].rank) for each in view.collectives] == [("NCCL's RAS", 3)]


def ras_asked(agents: Agents) -> list[tuple[str, bool]]:
    """Which nodes were to ask NCCL's RAS, in order, and whether they were asked for that alone."""
    asked = [(node, command) for node, command in agents.asked if isinstance(command, CollectEvidence) and command.ras]
    return [(node, command.only_ras) for node, command in asked]


def with_problem(problem: str) -> Callable[[str, Command], CommandResult]:
    def answers(node: str, command: Command) -> CommandResult:
        return CommandResult(command_id=command.id, ok=True, evidence=replace(evidence(node), problems=(problem,)))

    return answers


def test_nccls_ras_is_not_asked_from_the_node_that_is_suspected(controller: Controller) -> None:
    agents, culprit = Agents(controller), Culprit(node="n1", rank=0, pid=100, reason="is absent")
    controller.judge.incidents.add(incident(culprits=(culprit,)))

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    play(agents, story())
    assert ras_asked(agents) == [("n2", False)]


def test_where_nccls_ras_does_not_answer_one_more_node_asks_and_where_it_is_not_there_none(
    controller: Controller,
) -> None:
    def ras(node: str, command: Command) -> CommandResult:
        found = replace(evidence(node), ras=RasAnswer(release="2.28.7"))
        return CommandResult(command_id=command.id, ok=True, evidence=found)

    async def story(agents: Agents) -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    for first, then in (
        (with_problem("RAS's answer: it did not answer in time"), [("n1", False), ("n2", True)]),
        (refused, [("n1", False), ("n2", True)]),
        (with_problem("stacks: no answer in time"), [("n1", False)]),
    ):
        agents = Agents(controller, n1=first, n2=ras)
        play(agents, story(agents))
        assert ras_asked(agents) == then


def test_a_spare_node_without_a_rank_does_not_ask_nccls_ras(tmp_path: Path) -> None:
    controller = Controller(tmp_path, ("n0", "n1", "n2"))
    controller.report("n0", replace(process(0), pid=7, rank=None, role=Role.HELPER))
    agents = Agents(controller)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    play(agents, story())
    assert ras_asked(agents) == [("n1", False)]
    controller.journal.close()


def test_an_address_of_ranks_on_one_node_tells_where_a_process_is_and_one_of_all_nodes_does_not(
    controller: Controller,
) -> None:
    def connected(node: str, *local: str) -> Callable[[str, Command], CommandResult]:
        sockets = tuple(SocketState(state="ESTABLISHED", local=each, peer="10.0.0.9:1") for each in local)
        ranks = tuple(replace(each, sockets=sockets) for each in evidence(node).ranks)
        return lambda _, command: CommandResult(
            command_id=command.id, ok=True, evidence=replace(evidence(node), ranks=ranks)
        )

    seen: list[dict[str, set[str]]] = []

    async def story() -> Collected:
        found = controller.collector.collect(controller.job, clock.monotonic(), "i")
        seen.append(found.addresses)
        return await over(found)

    play(
        Agents(
            controller,
            n1=connected("n1", "10.0.0.1:40000", "127.0.0.1:28028", "172.17.0.1:5", "0.0.0.0:3"),
            n2=connected("n2", "10.0.0.2:40000", "[fe80::2]:7", "[::1]:28028", "172.17.0.1:5", "[::]:3"),
        ),
        story(),
    )
    view = controller.state.job_view("7", clock.monotonic())
    assert view is not None
    found = processes_of(view, seen[0])
    assert found.node_of == {"10.0.0.1": "n1", "10.0.0.2": "n2", "fe80::2": "n2"}
    assert found.of_rank == {0: ("n1", 100), 1: ("n1", 101), 2: ("n2", 102), 3: ("n2", 103)}


def test_what_every_node_answers_is_kept_with_the_incident_and_judged(controller: Controller) -> None:
    agents = Agents(controller)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(agents, story())
    assert agents.commands() == ["n1", "n2"]
    assert found.sentence() == "evidence of 4 ranks from 2 of 2 nodes"
    assert [kind for kind, _ in controller.kept()] == ["node", "node", "diagnosis"]
    assert found.diagnosis is not None
    assert {group.ranks for group in found.diagnosis.groups} == {(0, 1, 2), (3,)}
    assert (found.rows, found.packed, found.shared) == ([], [], None), "nothing of it stays in memory"


def test_a_node_that_never_answers_is_a_row_with_the_reason_and_the_others_count(
    controller: Controller,
) -> None:
    agents = Agents(controller, n2=silent)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(agents, story())
    assert found.nodes["n2"].state == "failed"
    assert "did not answer within" in (found.nodes["n2"].error or "")
    assert found.sentence().startswith("evidence of 2 ranks from 1 of 2 nodes; n2: n2 did not answer")
    assert found.diagnosis is not None
    assert found.diagnosis.culprits == ()
    assert [each.rank for each in found.diagnosis.undumped] == [2, 3]


def test_a_node_that_falls_silent_is_not_waited_for(controller: Controller) -> None:
    controller.collector = controller.collecting(CollectionLimits(slack_s=300.0, silence_every_s=0.02, spread_s=0.02))
    agents = Agents(controller, n2=silent)

    async def story() -> Collected:
        found = controller.collector.collect(controller.job, clock.monotonic(), "i")
        await asyncio.sleep(0.1)
        controller.forgets_everything()  # nobody reports any more
        return await over(found)

    found = play(agents, story())
    assert found.nodes["n2"].error == "the agent on n2 does not report"
    assert found.diagnosis is None, "and its job is not known any more"


def test_a_refusal_is_the_reason(controller: Controller) -> None:
    agents = Agents(controller, n1=refused, n2=refused)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(agents, story())
    assert {node.error for node in found.nodes.values()} == {"another restart of the job runs here"}
    assert found.diagnosis is not None
    assert found.diagnosis.culprits == ()


def test_an_answer_that_comes_late_or_twice_changes_nothing(controller: Controller) -> None:
    late: list[CommandResult] = []

    def later(node: str, command: Command) -> None:
        late.append(answer(node, command))

    agents = Agents(controller, n2=later)

    async def story() -> Collected:
        found = await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))
        before = len(controller.kept())
        for _ in range(3):
            controller.commands.resolve(late[0])
        await asyncio.sleep(0.05)
        assert len(controller.kept()) == before
        return found

    found = play(agents, story())
    assert found.nodes["n2"].state == "failed"


def test_an_answer_about_another_job_is_none(controller: Controller) -> None:
    def stranger(node: str, command: Command) -> CommandResult:
        return CommandResult(command_id=command.id, ok=True, evidence=evidence(node, job_id="8"))

    agents = Agents(controller, n2=stranger)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(agents, story())
    assert found.nodes["n2"].error == "it answered about another job"
    assert found.diagnosis is not None
    assert 3 not in {rank for group in found.diagnosis.groups for rank in group.ranks}


def test_a_node_speaks_for_itself_only(controller: Controller) -> None:
    def liar(node: str, command: Command) -> CommandResult:
        return CommandResult(command_id=command.id, ok=True, evidence=replace(evidence(node), node="n1"))

    agents = Agents(controller, n2=liar)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    play(agents, story())
    assert sorted(document["node"] for kind, document in controller.kept() if kind == "node") == ["n1", "n2"]


def test_rubbish_in_an_answer_is_judged_as_what_it_is_and_ends_nothing(controller: Controller) -> None:
    bad = RankEvidence(
        pid=-1, start_ticks=-5, role=Role.RANK, rank=3,
        dumps=(
            StackDump(after_s=1e300, unchanged=(1, 2, 3), cpu_s=-7.0),
            StackDump(after_s=-1e300, threads=(ThreadStack(thread_id=0, name="", active=True, frames=()),)),
            *(StackDump(after_s=0.0) for _ in range(10_000)),
        ),
    )  # fmt: skip

    def rubbish(node: str, command: Command) -> CommandResult:
        ranks = (bad, replace(bad, rank=-7), replace(bad, rank=None), rank_evidence(3), rank_evidence(3))
        return CommandResult(
            command_id=command.id,
            ok=False,
            error="x",
            evidence=NodeEvidence(node=node, job_id="7", ranks=ranks),
        )

    agents = Agents(controller, n2=rubbish)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(agents, story())
    assert found.error is None
    assert found.nodes["n2"].state == "answered"
    assert found.diagnosis is not None


def test_a_long_reason_is_cut(controller: Controller) -> None:
    def talker(node: str, command: Command) -> CommandResult:
        return CommandResult(command_id=command.id, ok=False, error="no! " * 100_000)

    agents = Agents(controller, n1=talker)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    assert len(play(agents, story()).nodes["n1"].error or "") <= collector.MAX_ERROR


def test_what_is_too_much_for_the_journal_is_judged_and_not_kept(controller: Controller) -> None:
    noise = [("a" * 7 + str(n), str(hash(n * 7919))) for n in range(60_000)]

    def large(node: str, command: Command) -> CommandResult:
        whole = replace(evidence(node), settings=tuple(noise))
        return CommandResult(command_id=command.id, ok=True, evidence=whole)

    agents = Agents(controller, n1=large, n2=large)

    async def story() -> Collected:
        found = controller.collector.collect(controller.job, clock.monotonic(), "i")
        found.kept_bytes = store.MAX_COLLECTION_BYTES - 1000  # as if much had come before
        return await over(found)

    found = play(agents, story())
    assert [kind for kind, _ in controller.kept()] == ["diagnosis"]
    assert "of 2 of these nodes too much to be kept" in found.sentence()
    assert found.diagnosis is not None
    assert found.diagnosis.ranks == 4


# ---------------------------------------------------------------------------------------- nothing twice,
# nothing for ever


def test_who_asks_while_it_runs_or_soon_after_gets_the_same_collection(controller: Controller) -> None:
    agents = Agents(controller)

    async def story() -> None:
        now = clock.monotonic()
        first = controller.collector.collect(controller.job, now)
        assert controller.collector.collect(controller.job, now) is first
        controller.collector.on_fire(incident(), now, {})  # it is kept with the incident from now on
        assert first.incident_id == "i"
        await over(first)
        controller.collector.on_fire(incident("j"), clock.monotonic(), {})
        outcome, words = await controller.collector.operation(replace(DECISION, incident_id="j"))
        assert (outcome, "kept with incident i" in words) == (OperationOutcome.DONE, True)
        assert controller.collector.known(first.id) is first

    play(agents, story())
    assert agents.commands() == ["n1", "n2"], "each node was asked once"
    assert controller.notes == ["evidence of job 7 is kept with incident i"]


@pytest.mark.parametrize("by", ["fire", "operation"])
def test_evidence_older_than_the_incident_does_not_count_and_is_taken_again(controller: Controller, by: str) -> None:
    """The demo's case: evidence of one fault, four seconds before another fault of the same run begins: a
    minute later, or at once where an action waits for it."""
    apart_s = 0.4
    controller.collector = controller.collecting(replace(LIMITS, apart_s=apart_s))
    agents = Agents(controller)

    async def story() -> tuple[Collected, Collected]:
        first = await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))
        second = incident("j", opened_at=clock.wall())
        controller.judge.incidents = OpenIncidents([second])
        if by == "fire":
            controller.collector.on_fire(second, clock.monotonic(), {})
            controller.collector.on_fire(replace(second, id="k"), clock.monotonic(), {})
        else:
            outcome, words = await controller.collector.operation(replace(DECISION, incident_id="j"))
            assert (outcome, words) == (OperationOutcome.DONE, "evidence of 4 ranks from 2 of 2 nodes")
        return first, await over(controller.collector._of(controller.job)[0])

    first, second = play(agents, story())
    assert agents.commands() == ["n1", "n1", "n2", "n2"]
    assert (second.began - first.began >= apart_s) is (by == "fire")
    assert [kind for kind, _ in controller.kept("j")] == ["node", "node", "diagnosis"]
    if by == "fire":
        pieces = [(each.stored_with, each.kind) for each in controller.journal.evidence.pieces("k")]
        assert pieces == [("j", "node"), ("j", "node"), ("j", "diagnosis")], "shared while it had not begun"


def test_evidence_of_another_fault_that_is_still_being_collected_is_waited_for_and_not_taken_for_ours(
    controller: Controller,
) -> None:
    controller.collector = controller.collecting(replace(LIMITS, apart_s=0.0))

    async def story() -> tuple[Collected, Collected]:
        first = controller.collector.collect(controller.job, clock.monotonic(), "i")
        await until(lambda: first.begun)
        controller.collector.on_fire(incident("j", opened_at=clock.wall()), clock.monotonic(), {})
        second = await over(controller.collector._of(controller.job)[0])
        return first, second

    first, second = play(Agents(controller), story())
    assert second is not first
    assert second.began >= first.began + (first.took_s or 0.0)
    assert {each.stored_with for each in controller.journal.evidence.pieces("j")} == {"j"}


def test_a_restart_that_somebody_asked_for_takes_any_recent_evidence(controller: Controller) -> None:
    agents = Agents(controller)

    async def story() -> None:
        await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))
        asked = incident("j", kind=IncidentKind.OPERATOR_RESTART, opened_at=clock.wall())
        controller.judge.incidents = OpenIncidents([asked])
        await controller.collector.operation(replace(DECISION, incident_id="j"))

    play(agents, story())
    assert agents.commands() == ["n1", "n2"]
    assert {each.stored_with for each in controller.journal.evidence.pieces("j")} == {"i"}


def test_evidence_that_broke_down_counts_for_nobody(controller: Controller) -> None:
    found = Collected(id="c", job=controller.job, began=1.0, began_at=5.0, nodes={})
    assert found.counts_for(9.0), "it has not begun"
    found.begun = True
    assert (found.counts_for(5.0), found.counts_for(5.1)) == (True, False)
    found.error = "RuntimeError"
    assert not found.counts_for(5.0)


def test_evidence_that_came_before_the_incident_is_kept_with_it(controller: Controller) -> None:
    gate = asyncio.Event()

    async def story() -> None:
        found = controller.collector.collect(controller.job, clock.monotonic())
        await until(lambda: found.nodes["n1"].state == "answered")
        assert controller.kept() == []
        controller.collector.on_fire(incident(), clock.monotonic(), {})
        assert [document["node"] for _, document in controller.kept()] == ["n1"]
        gate.set()
        await over(found)

    def when_told(node: str, command: Command) -> CommandResult | None:
        async def answer_later() -> None:
            await gate.wait()
            controller.commands.resolve(answer(node, command))

        waiting.append(asyncio.ensure_future(answer_later()))
        return None

    waiting: list[asyncio.Future[None]] = []
    play(Agents(controller, n2=when_told), story())
    assert [kind for kind, _ in controller.kept()] == ["node", "node", "diagnosis"]


def test_an_explained_incident_and_one_about_no_rank_ask_nobody(controller: Controller) -> None:
    agents = Agents(controller)

    async def story() -> None:
        for each in (
            incident(inhibited_by="x"),
            incident(kind=IncidentKind.AGENT_SILENT),
            incident(job_ids=("99",)),
        ):
            controller.collector.on_fire(each, clock.monotonic(), {})
        await asyncio.sleep(0.05)

    play(agents, story())
    assert agents.asked == []


def test_jobs_wait_for_each_other_and_the_oldest_that_are_over_are_forgotten(controller: Controller) -> None:
    class Out:
        most = now = 0

    def count(node: str, command: Command) -> CommandResult:
        return answer(node, command)

    agents = Agents(controller, n1=count)
    jobs = [replace(controller.job, job_id=str(100 + n), nodes=("n1",)) for n in range(FINISHED_KEPT + 20)]

    async def story() -> list[Collected]:
        made = [controller.collector.collect(job, clock.monotonic()) for job in jobs]
        known = [each for each in made if controller.collector.known(each.id) is each]
        assert len(known) == len(made), "one that runs is never forgotten"
        while not all(each.finished.is_set() for each in made):
            Out.now = sum(1 for each in made if each.took_s is None and each.nodes["n1"].state != "asked")
            Out.most = max(Out.most, Out.now)
            await asyncio.sleep(0.002)
        controller.collector.collect(controller.job, clock.monotonic())
        return made

    made = play(agents, story())
    assert Out.most <= AT_ONCE
    assert sum(1 for each in made if controller.collector.known(each.id) is not None) <= FINISHED_KEPT


# ---------------------------------------------------------------------------------------- the operation of an action


def test_the_rung_waits_for_the_evidence_and_says_what_came(controller: Controller) -> None:
    outcome, words = play(Agents(controller), controller.collector.operation(DECISION))
    assert (outcome, words) == (OperationOutcome.DONE, "evidence of 4 ranks from 2 of 2 nodes")
    assert [kind for kind, _ in controller.kept()] == ["node", "node", "diagnosis"]


@pytest.mark.parametrize(
    ("before", "asked"),
    [
        ((), 3),
        (((30.0, LOADER),), 2),
        (((30.0, LOADER), (20.0, LOADER), (10.0, LOADER)), 1),
        (((30.0, RECV), (20.0, LOADER)), 3),  # somebody has moved since
    ],
)
def test_dumps_that_the_verdict_rests_on_are_not_taken_again(
    controller: Controller, before: tuple[tuple[float, Sequence[str]], ...], asked: int
) -> None:
    now = clock.monotonic()
    for age_s, last in before:
        stacks = tuple(stack(rank, RECV if rank < 3 else last) for rank in range(4))
        controller.state.runs.add_snapshot("7", 0, stacks, (), now - age_s)

    def once(node: str, command: Command) -> CommandResult:
        assert isinstance(command, CollectEvidence)
        ranks = tuple(rank_evidence(r, command.dumps) for r in range(4) if node_of(r) == node)
        found = NodeEvidence(node=node, job_id="7", ranks=ranks)
        return CommandResult(command_id=command.id, ok=True, evidence=found)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, now, "i"))

    agents = Agents(controller, n1=once, n2=once)
    found = play(agents, story())
    assert {each.dumps for _, each in agents.asked if isinstance(each, CollectEvidence)} == {asked}
    assert found.diagnosis is not None
    assert asked == 3 or "do not show whether" not in found.diagnosis.summary


def test_the_rung_ends_at_its_limit_and_the_collection_goes_on_without_it(controller: Controller) -> None:
    controller.collector = controller.collecting(CollectionLimits(slack_s=300.0, limit_s=0.5))

    async def story() -> None:
        began = clock.monotonic()
        outcome, words = await controller.collector.operation(DECISION)
        assert clock.monotonic() - began < 10
        assert (outcome, words.startswith("not complete within")) == (OperationOutcome.FAILED, True)
        await controller.collector.close()

    play(Agents(controller, n1=silent, n2=silent), story())


@pytest.mark.parametrize(
    "fence", [None, Fence(job_id="7", restarts=3, start_at=1.0), Fence(job_id="8", restarts=0, start_at=1.0)]
)
def test_the_rung_of_a_run_that_is_over_is_skipped(controller: Controller, fence: Fence | None) -> None:
    agents = Agents(controller)
    outcome, _ = play(agents, controller.collector.operation(replace(DECISION, fence=fence)))
    assert (outcome, agents.asked) == (OperationOutcome.SKIPPED, [])


def test_a_collection_that_breaks_down_fails_its_rung_and_holds_nobody_up(controller: Controller) -> None:
    def no_view(now: float) -> Any:
        raise RuntimeError("broken")

    controller.state.filesystem_views = no_view  # type: ignore[method-assign]
    outcome, words = play(Agents(controller), controller.collector.operation(DECISION))
    assert (outcome, words.startswith("given up (RuntimeError)")) == (OperationOutcome.FAILED, True)
    assert [each.error for each in controller.collector._of(controller.job)] == ["RuntimeError"]


def test_a_run_that_ends_meanwhile_leaves_its_evidence_and_no_verdict(controller: Controller) -> None:
    def restart(node: str, command: Command) -> CommandResult:
        controller.run(restarts=1)
        return answer(node, command)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(Agents(controller, n2=restart), story())
    assert found.diagnosis is None
    assert [kind for kind, _ in controller.kept()] == ["node", "node"]


def test_after_a_restart_of_the_controller_the_rung_asks_anew_and_adds_to_what_is_kept(
    controller: Controller, tmp_path: Path
) -> None:
    """The first controller dies when one node has answered: what it wrote is there, what it was owed is not
    waited for."""

    async def dies() -> None:
        operation = asyncio.ensure_future(controller.collector.operation(DECISION))
        await until(lambda: bool(controller.kept()))
        operation.cancel()
        await controller.collector.close()

    play(Agents(controller, n2=silent), dies())
    controller.journal.close()
    after = Controller(tmp_path)
    after.collector = after.collecting(replace(LIMITS, slack_s=15.0))  # both nodes answer
    assert [document["node"] for _, document in after.kept()] == ["n1"]
    outcome, words = play(Agents(after), after.collector.operation(DECISION))
    assert (outcome, words) == (OperationOutcome.DONE, "evidence of 4 ranks from 2 of 2 nodes")
    assert [kind for kind, _ in after.kept()] == ["node", "node", "node", "diagnosis"]
    after.journal.close()


# ---------------------------------------------------------------------------------------- filesystems


def test_the_verdict_waits_for_the_nodes_that_are_asked_about_a_blocked_filesystem(
    controller: Controller,
) -> None:
    controller.report("n2", process(2, blocked=blocked(60.0), state="D"), process(3))
    view = controller.state.view(clock.monotonic())
    controller.judge.view = view

    def probe(node: str, command: Command) -> CommandResult | None:
        if not isinstance(command, ProbeMount):
            return answer(node, command)

        async def answer_later() -> None:
            await asyncio.sleep(0.3)
            seen = MountProbe(mount=command.mount, responding=node == "n1", seconds=0.3, wrote=node == "n1")
            controller.commands.resolve(CommandResult(command_id=command.id, ok=True, probe=seen))

        waiting.append(asyncio.ensure_future(answer_later()))
        return None

    waiting: list[asyncio.Future[None]] = []
    agents = Agents(controller, n1=probe, n2=probe)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(agents, story())
    assert agents.commands(ProbeMount) == ["n1", "n2"], "nobody was asked twice"
    assert found.diagnosis is not None
    (verdict,) = found.diagnosis.filesystems
    assert (verdict.scope, verdict.answering) == ("one_node", ("n1",))


def test_a_node_that_has_failed_while_others_answered_is_not_waited_for_again(controller: Controller) -> None:
    controller.report("n2", process(2, blocked=blocked(60.0), state="D"), process(3))
    for node in ("n1", "n2"):
        probe = MountProbe(mount="/shared", responding=node == "n1", seconds=0.3, wrote=node == "n1")
        controller.state.apply_probe(node, replace(probe, uid=1000), clock.monotonic())
    controller.judge.view = controller.state.view(clock.monotonic())

    def no_probe(node: str, command: Command) -> CommandResult | None:
        return None if isinstance(command, ProbeMount) else answer(node, command)

    async def story() -> Collected:
        return await asyncio.wait_for(over(controller.collector.collect(controller.job, clock.monotonic(), "i")), 10)

    found = play(Agents(controller, n1=no_probe, n2=no_probe), story())
    assert [each.scope for each in found.diagnosis.filesystems] == ["one_node"]


def test_a_probe_that_never_comes_back_does_not_hold_the_verdict_up(
    controller: Controller,
) -> None:
    controller.collector = controller.collecting(replace(LIMITS, probes_s=0.1))
    controller.report("n2", process(2, blocked=blocked(60.0), state="D"), process(3))
    controller.judge.view = controller.state.view(clock.monotonic())

    def no_probe(node: str, command: Command) -> CommandResult | None:
        return None if isinstance(command, ProbeMount) else answer(node, command)

    async def story() -> Collected:
        return await over(controller.collector.collect(controller.job, clock.monotonic(), "i"))

    found = play(Agents(controller, n1=no_probe, n2=no_probe), story())
    assert found.diagnosis is not None
    assert [each.scope for each in found.diagnosis.filesystems] == ["unknown"]


# ---------------------------------------------------------------------------------------- memory


def test_a_thousand_ranks_that_stand_in_a_few_places_share_their_frames() -> None:
    shared = collection.SharedFrames()
    decoded = [msgspec.json.decode(msgspec.json.encode(rank_evidence(n % 4)), type=RankEvidence) for n in range(1000)]
    rows = [shared.of(each) for each in decoded]
    stacks = {id(thread.frames) for row in rows for dump in row.dumps for thread in dump.threads}
    assert len(stacks) == 2


NAMED = Culprit(node="n1", rank=3, pid=11, reason="waits for its data loader")


@pytest.mark.parametrize(
    ("kind", "diagnosis", "said"),
    [
        (
            IncidentKind.COLLECTIVE_HANG,
            {"is_hang": False, "kind": "progressing", "summary": "Job 7 makes progress: step 8."},
            "Job 7 makes progress: step 8. This was seen 11 s after this incident began: stacks that were taken by then "
            "may show nothing of it.",
        ),
        (
            IncidentKind.SLOW_JOB,
            {"is_hang": False, "kind": "progressing", "summary": "Job 7 makes progress: step 8."},
            "Job 7 makes progress: step 8.",
        ),
        (
            IncidentKind.COLLECTIVE_HANG,
            {"is_hang": True, "kind": "collective_hang", "summary": "Job 7 hangs.", "culprits": (NAMED,)},
            "Job 7 hangs.",
        ),
        (
            IncidentKind.COLLECTIVE_HANG,
            {
                "is_hang": None,
                "kind": "unknown",
                "summary": "Job 7: no rank is identified.",
                "lacks": "rank 2 is missing",
            },
            "What was collected after the verdict adds nothing to it: rank 2 is missing.",
        ),
        (
            IncidentKind.COLLECTIVE_HANG,
            {
                "is_hang": True,
                "kind": "collective_hang",
                "summary": "Job 7 hangs: rank 5.",
                "culprits": (replace(NAMED, rank=5),),
            },
            "Job 7 hangs: rank 5. The verdict, from what was seen before, named rank 3 on n1.",
        ),
    ],
)
def test_evidence_that_follows_a_verdict_never_contradicts_it_silently(
    kind: str, diagnosis: dict[str, Any], said: str
) -> None:
    found = Diagnosis(job_id="7", **diagnosis)
    assert follows(found, incident(kind=kind, culprits=(NAMED,)), 11.4).summary == said
