"""The controller's page, for real, over a cluster that is made up: `FixedController` knows one view and
nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.config.controller import Controller as Settings
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.api.web_page import make_page
from slurm_watchdog.controller.health.cluster import Health, health
from slurm_watchdog.controller.health.job import HealthInputs
from slurm_watchdog.controller.incidents.judge import OpenIncidents
from slurm_watchdog.controller.node_history.suspicion import by_node, suspicions
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.journal.evidence import Piece
from slurm_watchdog.model.actions import ActionRun, Decision, Verdict
from slurm_watchdog.model.cluster_view import ClusterView, RankGpu, StepTime
from slurm_watchdog.model.documents import Waiting
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.node_view import GpuView, NodeView, SlurmNodeView
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.past_runs import WHOLE, RankKey, WaitBlock
from slurm_watchdog.model.run_record import RunRecord
from tests.builders import views
from tests.builders.node_past import GPU, NOW, event
from tests.builders.notices import DECISION, RUN, replace
from tests.builders.silences import Given

T = round(clock.wall()) - 60_000.0
PAST = [event(days, "node0001", place=GPU, incident_id=f"i{days}") for days in (1, 4, 9)]
"""Of node0001, which is suspect."""


RUNS = [
    RunRecord(
        job_id="7", restarts=number, began_at=T + 36_000.0 * number, ended_at=None if number else T + 30_000.0,
        seen_at=T + 60_000.0, state="RUNNING", first_step=100 * number, last_step=100 * number + 200,
        first_rise_at=T + 36_000.0 * number + 900.0, last_rise_at=T + 36_000.0 * number + 20_000.0,
    )
    for number in (0, 1)
]  # fmt: skip
RUNS.append(replace(RUNS[0], job_id="5", uid=1000))
"""Of job 7: a run that stood for hours, and the one after it; one of job 5, which has ended."""


class FixedController:
    """What the page asks of a controller."""

    def __init__(
        self, view: ClusterView, incidents: Sequence[Incident], listen: str = "127.0.0.1:9767", said: str = ""
    ):
        """`said`: what a user has a say in: places in stacks, reasons of decisions, ends of actions."""
        self.config = Config(cluster_name="made-up", controller=Settings(page_listen=listen))
        past = suspicions(by_node(PAST), NOW)
        self.judge = SimpleNamespace(view=view, limits_s={}, incidents=OpenIncidents(incidents))
        self.last_tick = clock.monotonic()
        self.ledger = SimpleNamespace(
            suspicions=lambda: past,
            history=lambda node: by_node(PAST).get(node, []),
        )
        self.state = SimpleNamespace(jobs={}, node_addresses={each.name: "" for each in view.slurm_nodes}, people=())
        self.journal = Remembered(incidents, said)
        self.silences = Given(incidents).silences()
        self.actions = SimpleNamespace(waiting=lambda _: Waiting(what="its ranks to end", until=NOW + 60.0))

    def health(self) -> Health:
        return health(
            HealthInputs(
                view=self.judge.view, limits_s={}, incidents=self.judge.incidents, mode=self.config.mode,
                tick_age_s=clock.monotonic() - self.last_tick,
            )
        )  # fmt: skip


DIAGNOSIS: dict[str, Any] = {
    "summary": "rank 3 waits for its loader, all others for it",
    "culprits": [{"rank": 3}],
    "groups": [
        {"ranks": [rank for rank in range(1024) if rank != 3], "place": "all_reduce", "hosts": ["n1"], "frames": ["all_reduce"]},
        {"ranks": [3], "place": "dataloader", "hosts": ["n1"], "frames": ["_next_data"]},
    ],
}  # fmt: skip


class FixedEvidence:
    """One node's document with each incident, and what its stacks say."""

    def __init__(self, said: str):
        groups = [each | {"place": said, "frames": [said], "hosts": [said]} for each in DIAGNOSIS["groups"]]
        self._diagnosis = DIAGNOSIS | {"groups": groups, "summary": said} if said else DIAGNOSIS

    def pieces(self, incident_id: str) -> list[Piece]:
        return [
            Piece(number=number, at=T + 56_060.0, kind=kind, stored_with=incident_id)
            for number, kind in enumerate(("node", "diagnosis"), 1)
        ]

    def document(self, incident_id: str, number: int) -> bytes | None:
        return {1: b'{"secret": "of a user"}', 2: json.dumps(self._diagnosis).encode()}.get(number)


class Remembered:
    """As much of a journal as the page reads."""

    def __init__(self, incidents: Sequence[Incident], said: str = ""):
        self._said = said
        self._incidents = {incident.id: incident for incident in incidents}

    def incidents(self, job_id: str | None = None, limit: int = 200, **_: object) -> list[Incident]:
        return list(self._incidents.values())

    def incident(self, incident_id: str) -> Incident | None:
        return self._incidents.get(incident_id)

    def nothing(self, *_: object) -> list[Any]:
        return []

    decisions = timeline = open_actions = nothing

    def actions(self, _: str) -> list[ActionRun]:
        end = replace(RUN.end, detail=self._said)
        return [replace(RUN, end=end, decision=replace(self._decision, verdict=Verdict.ALLOWED))] if self._said else []

    def decisions_about(self, ids: Iterable[str]) -> dict[str, list[Decision]]:
        return {each: [self._decision] for each in ids} if self._said else {}

    @property
    def _decision(self) -> Decision:
        return replace(DECISION, verdict=Verdict.SUPPRESSED, reason=self._said)

    @property
    def run_records(self) -> SimpleNamespace:
        known = [replace(each, state=self._said or each.state) for each in RUNS]
        return SimpleNamespace(of=lambda job_id: [each for each in known if self._said or each.job_id in job_id])

    @property
    def evidence(self) -> FixedEvidence:
        return FixedEvidence(self._said)

    def paused(self) -> None:
        return None


def _rank_5_late(keys: Sequence[RankKey]) -> tuple[WaitBlock, ...]:
    """Ten minutes in which all GPUs are busy, that of rank 5 half of the time."""
    idle = bytes(WHOLE // 2 if key.rank == 5 else 0 for key in keys)
    none, looks = bytes(len(keys)), bytes([12] * len(keys))
    return tuple(
        WaitBlock(begin_at=60.0 * number, end_at=60.0 * number + 60.0, ranks=tuple(keys), seconds=none, asleep=none,
                  gpu_looks=looks, gpu_idle=idle)
        for number in range(10)
    ) if keys else ()  # fmt: skip


def large_cluster(
    nodes: int, gpus: int = 8, *, ranks_each: int = 0, name: str = "m4"
) -> tuple[ClusterView, list[Incident]]:
    """A job on half of the nodes, with so many ranks on each (rank 8 is gone, where there is one), one GPU slowed down,
    one node silent, one away; an incident that names GPU 0 of node0001."""
    names = [f"node{index:04d}" for index in range(nodes)]
    made = [
        NodeView(
            name=node,
            reported_at=9_999.0,
            gpus=tuple(
                GpuView(
                    node=node,
                    gpu=Gpu(
                        uuid=f"GPU-{node}-{index}",
                        index=index,
                        utilization_ratio=1.0 if number < nodes // 2 else 0.0,
                        throttle=("hw_slowdown",) if (number, index) == (2, 1) else (),
                        pids=(10,) if number < nodes // 2 else (),
                    ),
                )
                for index in range(gpus)
            ),
        )
        for number, node in enumerate(names)
    ]
    half = names[: nodes // 2]
    job = views.job(
        processes=tuple(
            views.seen(8 * at + rank, node=node, gone_s=5.0 if (at, rank) == (1, 0) else None)
            for at, node in enumerate(half)
            for rank in range(ranks_each)
        ),
        gpus=tuple(
            RankGpu(rank=8 * at + rank, pid=100, view=made[at].gpus[rank])
            for at in range(len(half))
            for rank in range(min(ranks_each, gpus))
        ),
        waits=_rank_5_late(
            [
                RankKey(8 * at + rank, node, 100 + 8 * at + rank, 5)
                for at, node in enumerate(half)
                for rank in range(ranks_each)
            ]
        ),
        job=views.slurm_job(nodes=tuple(half), name=name, user="u"),
        step_times=tuple(
            StepTime(step=step, seconds=10.0 + step % 7, at=9_000.0 + step, logged=True) for step in range(200)
        ),
    )
    view = views.cluster(
        job,
        nodes=tuple(made),
        reporting_nodes=tuple(names[:-1]),
        silent_nodes=(names[-1],),
        slurm_nodes=tuple(
            SlurmNodeView(
                name=node,
                state="DOWN*" if node == names[-2] else "ALLOCATED",
                reason="kernel panic" if node == names[-2] else "",
            )
            for node in names
        ),
    )
    incident = Incident(
        id="abc123",
        kind=IncidentKind.GPU_FAULT,
        subject="gpu",
        state=IncidentState.FIRING,
        severity=Severity.CRITICAL,
        summary=f"GPU 0 of node0001 fell off the bus; job 7 ({name}) has lost rank 8.",
        job_ids=("7",),
        culprits=(Culprit(node="node0001", gpu_uuid="GPU-node0001-0", reason=name),),
        opened_at=T + 56_000.0,
        fired_at=T + 56_060.0,
        pending_mono=9_000.0,
        facts=(f"NVRM: Xid 79, said by {name}",),
    )
    return view, [incident]


SEES_ALL = Person(knows_password=True)


@contextlib.asynccontextmanager
async def serving(controller: FixedController, token: str = "", person: Person | None = None) -> AsyncIterator[str]:
    """The page's address while the block runs; `person` looks, without a password."""
    runner = web.AppRunner(make_page(controller, token, person), access_log=None)  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
