"""Of every detector in the registry, on a cluster in which it has something to tell: what is lost of that
makes no detector tell more, and in what order things are listed changes no verdict. A detector without such a
cluster here fails."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.registry import SPECS, findings_of
from slurm_watchdog.detect.spec import DetectorSpec
from slurm_watchdog.model.cluster_view import (
    ClusterView,
    FilesystemView,
    LossPoint,
    MountAnswer,
    StepTime,
)
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity, Truth
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import FaultSeverity, GpuHolder
from tests.builders import crash_loops as loops
from tests.builders import full_disks as disks
from tests.builders import gpu_faults as gpus
from tests.builders import logged_runs as logs
from tests.builders import slow_nodes as slow
from tests.builders.eight_ranks import eight
from tests.builders.ended_jobs import ended as link
from tests.builders.endings import done
from tests.builders.missing_data import DEFAULTS, bad, holes, shuffled
from tests.builders.rank_activity import IDLE_RANK, NOW, four
from tests.builders.rule_cases import cases, kinds
from tests.builders.views import (
    BARRIER,
    LOADER,
    RECV,
    blocked,
    cluster,
    job,
    progress,
    seen,
    snapshot,
    stack,
    still,
)

YES = MountAnswer(responding=True, age_s=5.0, seconds=0.1)
NO = MountAnswer(responding=False, age_s=5.0, seconds=12.0)


def stuck(*ranks: int, answers: tuple[tuple[str, MountAnswer], ...]) -> ClusterView:
    held = tuple(seen(number, blocked=blocked(70.0)) for number in ranks)
    known = tuple(sorted({each.node for each in held}))
    filesystem = FilesystemView(key="k", mount="/shared", blocked=held, known_nodes=known, answers=answers)
    others = tuple(seen(number) for number in range(4) if number not in ranks)
    stands = job(progress=progress(200.0), processes=(*held, *others))
    return cluster(stands, filesystems=(filesystem,))


def steps(slower: float) -> tuple[StepTime, ...]:
    return tuple(
        StepTime(
            step=n,
            seconds=(10.0 + n % 3 / 50) * (slower if n > 60 else 1.0),
            at=NOW - 1800 + 10 * n,
            logged=True,
        )
        for n in range(180)
    )


def losses(end: float) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(step=n, loss=2.0 + n % 3 / 100 if n < 60 else end, at=NOW - 900 + 9 * n) for n in range(70))


def holder() -> GpuHolder:
    return GpuHolder(
        pid=900, start_ticks=9, uid=1000, user="u", comm="python", state="S", gpu_uuids=("GPU-0",), memory_bytes=520 << 20,
        listed_by_nvml=True, age_s=9000.0, orphan_for_s=500.0,
    )  # fmt: skip


WAITS = tuple(snapshot(age, [stack(r, RECV) for r in (0, 1, 2)]) for age in (20, 10))
SLOW_CARD = {"recent_sm_clock_hz": 1.2e9, "throttle": ("hw_thermal_slowdown",)}

WRONG: dict[str, ClusterView] = {
    IncidentKind.FILESYSTEM_OUTAGE: stuck(0, 2, answers=(("n1", NO), ("n2", NO))),
    IncidentKind.FILESYSTEM_STALL: stuck(0, answers=(("n1", NO), ("n2", YES))),
    IncidentKind.GPU_FAULT: gpus.nodes(events=(gpus.xid(79, FaultSeverity.CRITICAL),)),
    IncidentKind.HOST_FAULT: gpus.nodes(events=(
        gpus.xid(0, FaultSeverity.CRITICAL, name="memory_uncorrected", xid=None, pci_bus_id=None, part="memory", may_exclude_node=True),
    )),
    IncidentKind.ORPHAN_GPU_PROCESS: cluster(nodes=(NodeView(name="n1", reported_at=NOW - 2, holders=(holder(),)),)),
    IncidentKind.DISK_FULL: cluster(job(**disks.STANDS), nodes=(disks.node("n1", disks.mount(error="ENOSPC: No space left on device")),)),
    IncidentKind.CRASH_LOOP: cluster(job(**{**loops.STARTING, "past": loops.DEAD})),
    IncidentKind.CHAIN_BROKEN: cluster(ended=(link(),)),
    IncidentKind.LOG_ERROR: cluster(
        job(
            progress=progress(40.0), errors=logs.errors((30.0, "[rank3]: RuntimeError: CUDA error: an "
                "illegal memory access was encountered")),
            processes=(*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=25.0)),
        )
    ),
    IncidentKind.DEAD_RANK: cluster(eight((5, 9.0))),
    IncidentKind.GPU_IDLE_RANK: cluster(four("busy", 1.0, age_s=75.0, **IDLE_RANK)),
    IncidentKind.SLOW_NODE: slow.view({"n2": SLOW_CARD}),
    IncidentKind.SLOW_JOB: cluster(job(step_times=steps(1.2))),
    IncidentKind.LOSS_SPIKE: cluster(job(losses=losses(9.0))),
    IncidentKind.LINGERING_JOB: cluster(
        job(processes=(*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=40.0)), progress=progress(45.0), snapshots=WAITS)
    ),
    IncidentKind.COLLECTIVE_HANG: cluster(job(progress=progress(75.0), snapshots=still(BARRIER, BARRIER, LOADER, BARRIER))),
    IncidentKind.WEDGED_TEARDOWN: cluster(done()),
    IncidentKind.STALLED_PROGRESS: cluster(four("idles", 0.0)),
}  # fmt: skip
"""A cluster in which this, and perhaps more, is the matter."""

KINDS = [spec.kind for spec in SPECS]
WRONG |= {kind: cases(kind)[0].cluster for kind in kinds()}
WRONG |= {kind: import_module(f"tests.unit.detect.test_{kind}").WRONG for kind in KINDS if kind not in WRONG}
"""The first case of a detector that has some, and the view `WRONG` of the test of one that is not above, let it fire."""


def lists_without_one(view: ClusterView) -> Iterator[ClusterView]:
    """Without the report of a node, without an answer, a dump, a file, a GPU of a rank."""
    for name in ("nodes", "filesystems"):
        inside = getattr(view, name)
        for place in range(len(inside)):
            yield replace(view, **{name: (*inside[:place], *inside[place + 1 :])})
    for place, each in enumerate(view.jobs):

        def with_job(place: int = place, **changes: Any) -> ClusterView:
            changed = replace(view.jobs[place], **changes)
            return replace(view, jobs=(*view.jobs[:place], changed, *view.jobs[place + 1 :]))

        for name in each.job.nodes:
            yield with_job(silent_nodes=(name,))
        for table in ("gpus", "snapshots", "errors", "past", "checkpoints_on_disk"):
            inside = getattr(each, table)
            for at in range(len(inside)):
                yield with_job(**{table: (*inside[:at], *inside[at + 1 :])})
        for at, dump in enumerate(each.snapshots):
            for one in range(len(dump.stacks)):
                less = replace(dump, stacks=(*dump.stacks[:one], *dump.stacks[one + 1 :]))
                yield with_job(snapshots=(*each.snapshots[:at], less, *each.snapshots[at + 1 :]))


def accused(found: dict[tuple[str, str], Finding]) -> set[tuple[str, str, object]]:
    """What is told, and every node and rank that is named with it. By which name a GPU or a mount goes is
    another matter."""
    return {
        (each.kind, *who)
        for each in found.values()
        for who in (
            ("", None),
            *((name, getattr(c, name)) for c in each.culprits for name in ("node", "rank") if getattr(c, name) is not None),
        )
    }  # fmt: skip


def test_every_detector_of_the_registry_has_something_to_tell_here() -> None:
    assert set(WRONG) == set(KINDS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_each_tells_it_and_is_no_more_severe_than_it_declares(spec: DetectorSpec) -> None:
    told = [each for each in findings_of(spec, WRONG[spec.kind], DEFAULTS) if each.truth is Truth.BAD]
    rank = list(Severity).index
    assert told
    assert all(rank(each.severity) <= rank(spec.severity) for each in told)


@pytest.mark.parametrize("kind", KINDS)
def test_every_detector_reports_no_more_when_data_is_lost(kind: IncidentKind) -> None:
    view = WRONG[kind]
    before = accused(bad(view))
    for less in (*holes(view), *lists_without_one(view)):
        after = bad(less)
        assert accused(after) <= before, [each.summary for each in after.values()]


NO_LOSS = {
    "gone_s": "a process that is listed again is there",
    "rank": "a process that is not a rank any more is another one",
    "blocked": "a process that waits in no call on a file has returned from it",
    "idle_since": "a GPU whose utilisation is known and that does not idle works",
    "pci_bus_id": "a line about a GPU is a moment; the GPU itself answers",
    "events": "likewise",
    "limit": "what has no limit is not near one",
    "errors": "a step was seen within its limit, and errors before a step count for nothing",
}
"""What no sensor loses: its absence is a new observation, and may close an incident."""


def restarted(view: ClusterView) -> Iterator[ClusterView]:
    """The same trouble, of which less is seen: the controller stalled or was started again, Slurm or an agent
    is silent, a log is unread."""

    def jobs(**changes: Any) -> ClusterView:
        return replace(view, jobs=tuple(replace(each, **changes) for each in view.jobs))

    stalled = tuple(
        replace(
            each,
            run_age_s=0.0,
            snapshots=(),
            progress=None if each.progress is None else replace(each.progress, age_s=0.0),
        )
        for each in view.jobs
    )
    everybody = tuple(each.name for each in view.nodes)
    yield replace(
        view, jobs=stalled, slurm_age_s=0.0, slurm_excused=True, silent_nodes=(), excused_nodes=everybody,
    )  # fmt: skip
    forgotten: dict[str, Any] = {
        "progress": None, "snapshots": (), "errors": (), "error_ranks": (), "gpus": (), "step_times": (), "losses": (),
        "checkpoint": None, "past": (), "checkpoints_on_disk": (), "checkpoint_intervals_s": (), "run_age_s": 0.0,
    }  # fmt: skip
    yield jobs(**forgotten)
    yield replace(jobs(**forgotten, processes=()), watched_s=0.0, slurm_age_s=None)
    yield jobs(processes=())
    yield jobs(progress=None, log=None)
    yield replace(view, jobs=tuple(replace(each, silent_nodes=each.job.nodes) for each in view.jobs))
    for name in ("nodes", "reporting_nodes", "filesystems", "slurm_nodes", "ended"):
        yield replace(view, **{name: ()})


def lost(before: Any, after: Any) -> str:
    """The name of the first field in which two values of one type differ."""
    for each in msgspec.structs.fields(before):
        one, other = getattr(before, each.name), getattr(after, each.name)
        if one == other:
            continue
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            one, other = next((a, b) for a, b in zip(one, other, strict=True) if a != b)
        return lost(one, other) if isinstance(one, msgspec.Struct) and type(one) is type(other) else each.name
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_detector_that_sees_less_than_before_clears_nothing(kind: IncidentKind) -> None:
    """The mirror of the test above: an open incident is closed by what was seen, never by what is not seen any more."""
    view = WRONG[kind]
    open_ones = {key for key in bad(view) if key[0] == kind}
    assert open_ones
    seen_less = [less for less in (*holes(view), *lists_without_one(view)) if lost(view, less) not in NO_LOSS]
    for less in (*seen_less, *restarted(view)):
        found = {(f.kind, f.subject): f for spec in SPECS for f in findings_of(spec, less, DEFAULTS)}
        cleared = [f.summary for key in open_ones if (f := found.get(key)) is not None and f.truth is Truth.OK]
        assert not cleared, (cleared, lost(view, less))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_in_which_things_are_listed_changes_no_verdict(kind: IncidentKind) -> None:
    view = WRONG[kind]

    def told(of: ClusterView) -> dict[Any, Any]:
        return {key: (f.actionable, f.severity, set(f.culprits), set(f.job_ids)) for key, f in bad(of).items()}

    before = told(view)
    for seed in range(10):
        assert told(shuffled(view, Random(seed))) == before


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_at_all_is_known_and_nothing_is_told(kind: IncidentKind) -> None:
    """The same cluster, of which nobody has reported anything: Slurm's words alone are left."""
    view = WRONG[kind]
    empty = replace(
        view,
        nodes=(),
        suspects=None,
            filesystems=(),
        reporting_nodes=(),
        jobs=tuple(
            replace(
                each, processes=(), progress=None, checkpoint=None, snapshots=(), errors=(), error_ranks=(), gpus=(), step_times=(),
                losses=(), checkpoints_on_disk=(), checkpoint_intervals_s=(), past=(), silent_nodes=each.job.nodes, phase=None, log=None,
            )
            for each in view.jobs
        ),
    )  # fmt: skip
    assert {found for found, _ in bad(empty)} <= {
        IncidentKind.SLURM_UNREACHABLE,
        IncidentKind.CHAIN_BROKEN,
        IncidentKind.ENDS_SOON,
    }
    assert msgspec.structs.asdict(view)  # the cluster itself is as it was
