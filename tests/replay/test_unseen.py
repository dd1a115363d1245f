"""Stories of kinds that no detector was written for: half of them look ill and are not, and nobody may be
accused in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.builders.sparse_trace import JOB, NODES, Trace

EIGHT = range(8)
Change = Callable[[dict[str, Any]], None]


def change(trace: Trace, kind: str, how: Change, since: float = 0.0, until: float = float("inf")) -> None:
    """Applies `how` to every line of this kind between the two."""
    for line in trace.lines:
        if line["kind"] == kind and since < line["t"] <= until:
            how(line)


def on_gpus_of(node: str, **fields: Any) -> Change:
    return lambda line: line.update(fields) if line["node"] == node else None


# ------------------------------------------------------------------------------------------------ well


def other_clocks_by_design() -> Trace:
    """Half of the job on cards of another model, and nobody says which."""
    trace = Trace()
    trace.go_on(400, steps=True)
    change(trace, "gpu", on_gpus_of("gpu002", sm_clock_mhz=1980, power_w=620))
    return trace


def a_rank_that_only_hands_out_data() -> Trace:
    """It trains nothing: no GPU, no time, from its first to its last minute."""
    trace = Trace()
    trace.doing[7] = "sleeps"
    trace.go_on(1500, steps=True)
    return trace


def an_upload_of_which_nothing_shows() -> Trace:
    trace = Trace()
    trace.go_on(300, steps=True)
    trace.log("Uploading checkpoint to s3://runs/llama/global_step130")
    trace.doing = {**dict.fromkeys(EIGHT, "spins"), 0: "sleeps"}
    trace.go_on(900)
    trace.doing = dict.fromkeys(EIGHT, "trains")
    trace.go_on(100, steps=True)
    return trace


def ranks_that_take_turns() -> Trace:
    """Gang scheduling: Slurm suspends the job for a minute, again and again, and says so ten seconds late."""
    trace = Trace()
    for _ in range(5):
        trace.go_on(60, steps=True)
        trace.doing, trace.states = dict.fromkeys(EIGHT, "sleeps"), dict.fromkeys(EIGHT, "T")
        trace.go_on(10)
        trace.job("SUSPENDED")
        trace.go_on(60)
        trace.job("RUNNING")
        trace.doing, trace.states = dict.fromkeys(EIGHT, "trains"), {}
    return trace


def experts_that_are_not_balanced() -> Trace:
    trace = Trace()
    trace.go_on(900, steps=True)
    change(
        trace,
        "gpu",
        lambda line: line.update(util=trace.random.randint(20, 100), power_w=trace.random.randint(150, 380)),
    )
    return trace


def an_evaluation_that_ends_rank_by_rank() -> Trace:
    """Shards of unequal size: one after the other has done its own, and spins for the others."""
    trace = Trace()
    trace.go_on(300, steps=True)
    for rank in range(7):
        trace.doing[rank] = "spins"
        trace.go_on(35)
    trace.doing = dict.fromkeys(EIGHT, "trains")
    trace.go_on(100, steps=True)
    return trace


def data_that_comes_in_waves() -> Trace:
    trace = Trace()
    for _ in range(8):
        trace.go_on(90, steps=True)
        trace.doing = dict.fromkeys(EIGHT, "sleeps")
        trace.go_on(40)
        trace.doing = dict.fromkeys(EIGHT, "trains")
    return trace


def a_mount_that_hangs_and_that_nobody_uses() -> Trace:
    trace = Trace()
    for _ in range(12):
        trace.go_on(50, steps=True)
        trace.say("mount", node=NODES[0], mount="/scratch", responding=False, probe_s=None)
    return trace


def a_launcher_that_starts_all_ranks_anew() -> Trace:
    """torchrun: one worker fails, all are ended, all are started again, within the same run of the job."""
    trace = Trace()
    trace.go_on(300, steps=True)
    trace.gone = trace.freed = set(EIGHT)
    trace.go_on(15)
    trace.gone, trace.freed = set(), set()
    began, trace.step = trace.t, trace.step - 8
    trace.doing = dict.fromkeys(EIGHT, "sleeps")
    trace.go_on(200)
    trace.doing = dict.fromkeys(EIGHT, "trains")
    trace.go_on(100, steps=True)
    change(trace, "proc", lambda line: line.update(pid=line["pid"] + 500), began)
    change(trace, "gpu", lambda line: line.update(pids=[pid + 500 for pid in line["pids"]]), began)
    return trace


def no_gpus_and_a_rank_that_never_computes() -> Trace:
    trace = Trace(gpus=False)
    trace.doing[3] = "sleeps"
    trace.go_on(300, steps=True)
    trace.go_on(600)
    return trace


def a_first_step_that_takes_long_to_compute() -> Trace:
    trace = Trace()
    trace.every = 60.0
    trace.doing = {**dict.fromkeys(EIGHT, "sleeps"), 0: "computes"}
    trace.log("Starting training...")
    trace.go_on(6000)
    return trace


def a_notebook() -> Trace:
    trace = Trace()
    trace.doing = dict.fromkeys(EIGHT, "sleeps")
    trace.every = 30.0
    trace.go_on(7200)
    return trace


WELL = (
    other_clocks_by_design, a_rank_that_only_hands_out_data, an_upload_of_which_nothing_shows, ranks_that_take_turns,
    experts_that_are_not_balanced, an_evaluation_that_ends_rank_by_rank, data_that_comes_in_waves,
    a_mount_that_hangs_and_that_nobody_uses, a_notebook,
    a_launcher_that_starts_all_ranks_anew, no_gpus_and_a_rank_that_never_computes, a_first_step_that_takes_long_to_compute,
)  # fmt: skip


@pytest.mark.parametrize("story", WELL, ids=lambda story: story.__name__)
def test_replay_of_a_healthy_story_reports_nothing(story: Callable[[], Trace]) -> None:
    assert [(each.kind, each.summary) for each in story().told()] == []


# ------------------------------------------------------------------------------------------------ ill


def test_a_card_that_falls_off_the_bus_and_a_rank_that_hangs_elsewhere_are_two_incidents() -> None:
    trace = Trace()
    trace.go_on(300, steps=True)
    line = "NVRM: Xid (PCI:0000:c1:00): 48, pid=1, name=python, DBE (double bit error) ECC Error"
    trace.say("kmsg", node="gpu001", line=line)
    trace.doing = {**dict.fromkeys(EIGHT, "spins"), 6: "sleeps"}
    trace.go_on(130)
    found = {each.kind: [c.rank for c in each.culprits] for each in trace.told()}
    assert found["collective_hang"] == [6]
    assert set(found) == {"collective_hang", "gpu_fault"}


def test_a_hang_in_an_evaluation_that_the_log_announced_is_told_after_its_time() -> None:
    trace = Trace()
    trace.go_on(300, steps=True)
    trace.log("***** Running Evaluation *****")
    trace.go_on(120)
    trace.doing = {**dict.fromkeys(EIGHT, "spins"), 5: "sleeps"}
    trace.every = 10.0
    trace.go_on(1900)
    (found,) = trace.told()
    assert (found.kind, [c.rank for c in found.culprits]) == ("collective_hang", [5])


def test_a_hang_before_the_first_step_is_told_where_the_log_says_that_the_ranks_join() -> None:
    trace = Trace()
    trace.every = 60.0
    trace.doing = dict.fromkeys(EIGHT, "sleeps")
    trace.log("> initializing torch distributed ...")
    trace.go_on(5800)
    assert [each.kind for each in trace.told()] == ["stalled_progress"]


def test_a_stuck_rank_whose_gpu_shows_100_percent_at_the_power_of_rest_is_named() -> None:
    trace = Trace()
    trace.go_on(300, steps=True)
    began = trace.t
    trace.doing = {**dict.fromkeys(EIGHT, "spins"), 3: "sleeps"}
    trace.go_on(200)
    change(
        trace,
        "gpu",
        lambda line: line.update(util=100, sm_clock_mhz=1410) if line["uuid"] == "GPU-3" else None,
        began,
    )
    (found,) = trace.told()
    assert (found.kind, found.job_ids, [c.rank for c in found.culprits]) == ("collective_hang", (JOB,), [3])


@pytest.mark.parametrize(
    "log", ["step={step} loss={loss}", "step {step} loss {loss} time {s:.2f}s", '{{"step": {step}, "loss": {loss}}}']
)
def test_a_loss_that_becomes_nan_is_that_and_no_stall(log: str) -> None:
    trace = Trace(log)
    trace.go_on(200, steps=True)
    trace.loss = "NaN" if log.startswith("{") else "nan"
    trace.go_on(200, steps=True)
    assert [each.kind for each in trace.told()] == ["loss_nan"]


def test_a_hang_is_found_without_a_line_about_any_gpu() -> None:
    trace = Trace(gpus=False)
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(EIGHT, "spins"), 3: "sleeps"}
    trace.go_on(400)
    (found,) = trace.told()
    assert (found.kind, found.actionable) == ("collective_hang", False)
    assert [(c.node, c.rank) for c in found.culprits] == [("gpu001", 3)]


def test_a_run_that_never_makes_its_first_step_is_told_if_nobody_works() -> None:
    trace = Trace()
    trace.every = 60.0
    trace.doing = dict.fromkeys(EIGHT, "sleeps")
    trace.log("Starting training...")
    trace.go_on(6000)
    (found,) = trace.told()
    assert (found.kind, found.actionable) == ("stalled_progress", False)
    assert 5400 <= (found.fired_at or 0) <= 5600


@pytest.mark.parametrize("every_s", [60, 4000])
def test_a_rank_that_hangs_in_a_checkpoint_is_found_when_nobody_says_any_more_that_it_is_written(
    every_s: int,
) -> None:
    trace = Trace()
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(EIGHT, "spins"), 0: "saves"}
    for second in range(0, 300, 60):
        if second % every_s == 0:
            trace.say("checkpoint", node="gpu001", job_id=JOB, step=trace.step, complete=False)
        trace.go_on(60)
    trace.doing[0] = "sleeps"
    trace.go_on(600 if every_s == 60 else 1700)
    (found,) = trace.told()
    assert (found.kind, [c.rank for c in found.culprits]) == ("collective_hang", [0])
    assert found.fired_at is not None
    assert found.fired_at <= (900 if every_s == 60 else 2200)
