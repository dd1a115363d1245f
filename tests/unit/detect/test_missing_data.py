"""Of every detector, on every view: what is not known convicts nobody, and in what order things are listed
does not matter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.model.cluster_view import (
    Checkpoint,
    ClusterView,
    ErrorLine,
    JobView,
    LossPoint,
    StepTime,
)
from slurm_watchdog.model.incidents import Finding
from slurm_watchdog.model.node_view import NodeView, SeenMount, SlurmNodeView
from slurm_watchdog.model.observations import Checkpoint as OnDisk
from slurm_watchdog.model.observations import Event, EventKind, FaultSeverity, GpuHolder, MountProbe
from slurm_watchdog.model.past_runs import EndedJob
from tests.builders.gpu_faults import xid
from tests.builders.missing_data import bad, cuts, holes, shuffled
from tests.builders.rank_activity import HEALTHY, NOW, UNSEEN, card, four, rank
from tests.builders.views import blocked, cluster, progress, slurm_job

DOING = st.sampled_from(["trains", "spins", "idles"])
CPU = st.sampled_from([0.0, 0.05, 0.4, 1.0])
STATES = st.sampled_from(["S", "S", "S", "R", "D", "T"])


@st.composite
def jobs(draw: st.DrawFn) -> JobView:
    common, cpu, ends_in = draw(DOING), draw(CPU), draw(st.sampled_from([2.0, float("nan")]))
    powered, changes = draw(st.booleans()), dict[str, Any]()
    odd = draw(st.sampled_from([(), (), (), (2,), (2,), (0, 1, 2, 3)]))
    for number in range(4):
        doing, its_cpu = common, cpu
        state, held, io_bytes_s, gone_s = "S", None, 0.0, None
        if number in odd:
            doing, its_cpu = draw(st.sampled_from(["idles", "idles", "trains", "spins"])), draw(CPU)
            state, io_bytes_s = draw(STATES), draw(st.sampled_from([0.0, 0.0, 0.0, 5e8]))
            held = draw(st.sampled_from([5.0, 70.0])) if state == "D" else None
            gone_s = draw(st.sampled_from([None, None, None, None, 40.0, 400.0]))
        changes[f"g{number}"] = card(number, doing if powered or doing == "idles" else "busy")
        changes[f"r{number}"] = rank(
            number,
            its_cpu,
            io_bytes_s,
            state=state,
            state_age_s=draw(st.sampled_from([2.0, 90.0])),
            blocked=None if held is None else blocked(held),
            gone_s=gone_s,
        )
    total = draw(st.sampled_from([None, 500, 1000]))
    age_s = draw(st.sampled_from([2.0, 75.0, 700.0, 1900.0]))
    error = Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", pattern="traceback", line="Traceback", rank=1)
    return four(
        common,
        progress=progress(age_s, total_steps=total, phase=draw(st.sampled_from([None, None, "evaluating", "finishing"]))),
        errors=tuple(ErrorLine(node="n1", age_s=a, event=error) for a in draw(st.sampled_from([(), (70.0,), (1.0,)]))),
        checkpoint=Checkpoint(step=400, age_s=draw(st.sampled_from([60.0, 9000.0]))),
        checkpoint_intervals_s=draw(st.sampled_from([(), (600.0, 600.0)])),
        checkpoints_on_disk=(OnDisk(job_id="7", directory="/c", writing=draw(st.sampled_from([False, False, False, True]))),),
        step_times=tuple(
            StepTime(step=n, seconds=draw(st.sampled_from([10.0, 10.1])) * (1.3 if n > 60 else 1), at=NOW - 1800 + 10 * n, logged=True)
            for n in range(160)
        )
        if draw(st.booleans())
        else (),
        losses=tuple(
            LossPoint(step=n, loss=2.0 + n % 3 / 100 if n < 35 else ends_in, at=NOW - 900 + 9 * n) for n in range(40)
        )
        if draw(st.booleans())
        else (),
        **changes,
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    view = draw(jobs())
    by_node = {name: tuple(each.view for each in view.gpus if each.view.node == name) for name in ("n1", "n2")}
    faults = draw(st.sampled_from([(), (xid(79, FaultSeverity.CRITICAL),), (xid(13, FaultSeverity.WARNING),)]))
    holders = (
        GpuHolder(
            pid=900, start_ticks=9, uid=1000, user="u", comm="python", state="S", gpu_uuids=("GPU-0",), memory_bytes=520 << 20,
            orphan_for_s=draw(st.sampled_from([None, 5.0, 500.0])),
        ),
    )  # fmt: skip
    probe = MountProbe(mount="/shared", responding=draw(st.booleans()), seconds=draw(st.sampled_from([0.1, 90.0])))
    return cluster(
        view,
        silent_nodes=draw(st.sampled_from([(), ("n3",)])),
        nodes=tuple(
            NodeView(
                name=name,
                reported_at=NOW - 2,
                gpus=gpus,
                events=faults if name == "n1" else (),
                holders=holders if name == "n2" else (),
                mounts=(SeenMount(at=NOW - 2, probe=probe),),
            )
            for name, gpus in (*by_node.items(), ("n3", ()))
        ),
        slurm_nodes=tuple(
            SlurmNodeView(name=name, state=draw(st.sampled_from(["ALLOCATED", "ALLOCATED", "DOWN*", "IDLE+DRAIN"])))
            for name in ("n1", "n2", "n3")
        ),
        ended=(
            EndedJob(
                job=slurm_job(job_id="6", state=draw(st.sampled_from(["FAILED", "COMPLETED"]))),
                ended_at=NOW - 60,
                last_step=90,
            ),
        ),
    )


@given(clusters(), st.data())
@settings(max_examples=80, deadline=None)
def test_detectors_report_nothing_new_when_facts_are_missing(view: ClusterView, data: st.DataObject) -> None:
    before = bad(view)
    every = list(cuts(view))
    for place in data.draw(st.lists(st.integers(0, len(every) - 1), min_size=6, max_size=6)):
        after = bad(every[place]())
        # A dead rank whose peers' GPUs rest is an ending; how they are is then what speaks for the job.
        after = {key: each for key, each in after.items() if key[0] != "dead_rank"}
        # That every GPU of an evaluation computes gives it more patience: not to know one leaves the usual half hour.
        evaluates = [each.progress is not None and each.progress.phase == "evaluating" for each in view.jobs]
        after = {key: each for key, each in after.items() if key[0] != "stalled_progress" or not any(evaluates)}
        # Of a hang of which less is known it is still said that the job makes no progress: that is less, not more.
        after = {
            key: each
            for key, each in after.items()
            if key[0] != "stalled_progress" or ("collective_hang", key[1]) not in before
        }
        assert set(after) <= set(before), [after[key].summary for key in set(after) - set(before)]


@pytest.mark.parametrize("name", [*HEALTHY, *UNSEEN])
def test_detectors_name_no_culprit_of_a_healthy_job_with_missing_facts(name: str) -> None:
    """Every hole, in every healthy thing that looks ill and everything that is not known well enough."""
    view = cluster({**HEALTHY, **UNSEEN}[name])
    before = bad(view)
    for less in holes(view):
        after = bad(less)
        assert set(after) <= set(before), [after[key].summary for key in set(after) - set(before)]


@given(clusters(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_processes_gpus_and_nodes_does_not_matter(view: ClusterView, random: Any) -> None:
    """Of several cards that are slow alike, `slow_node` may name any."""

    def told(found: dict[tuple[str, str], Finding]) -> dict[Any, Any]:
        return {
            key: (f.actionable, f.severity, set(f.culprits if f.kind != "slow_node" else ()), set(f.job_ids))
            for key, f in found.items()
        }

    assert told(bad(shuffled(view, random))) == told(bad(view))


def test_the_views_of_this_file_have_something_bad_to_lose() -> None:
    """A property of views in which nothing is ever wrong would show nothing."""
    found: set[str] = set()

    @given(clusters())
    @settings(max_examples=500, deadline=None, database=None, derandomize=True)
    def collect(view: ClusterView) -> None:
        found.update(kind for kind, _ in bad(view))

    collect()
    assert {
        "stalled_progress", "wedged_teardown", "rank_stopped", "gpu_fault", "checkpoint_overdue", "loss_nan", "slow_job",
        "orphan_gpu_process", "node_down",
    } <= found  # fmt: skip


@given(clusters())
@settings(max_examples=60, deadline=None)
def test_a_loop_of_which_no_step_was_ever_seen_does_not_stand(view: ClusterView) -> None:
    unknown = replace(view, jobs=tuple(replace(each, progress=None) for each in view.jobs))
    loops = {
        "collective_hang",
        "stalled_progress",
        "wedged_teardown",
        "gpu_idle_rank",
        "dead_rank",
        "checkpoint_overdue",
    }
    assert not loops & {kind for kind, _ in bad(unknown)}
