"""Runs whose steps cannot be read: what their ranks, dump after dump, and their checkpoints tell, and who is
never accused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis import rank_motion
from slurm_watchdog.analysis.progress_limit import loop_clock
from slurm_watchdog.analysis.rank_activity import loop_state
from slurm_watchdog.controller.state.run import Run, new_run
from slurm_watchdog.controller.state.run_updates import note_snapshot
from slurm_watchdog.controller.state.run_view import snapshot_views
from slurm_watchdog.detect import collective_hang, rank_rules, stalled_progress
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.stalled_progress import StalledProgress
from slurm_watchdog.model.cluster_view import ErrorLine, JobView, LogView
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Finding, StackRequest, Truth
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.past_runs import Motion
from tests.builders.rank_activity import card
from tests.builders.views import (
    BACKWARD,
    BARRIER,
    COMPUTE,
    LOADER,
    cluster,
    job,
    progress,
    seen,
    slurm_job,
    snapshot,
    stack,
    talking,
)

NOW = 10_000.0
HANG, STALLED = CollectiveHang(), StalledProgress()
LOCK = ("Lock.acquire (threading.py)", "take_turn (t.py)", "train (t.py)")
SOCKET = ("SSLSocket.read (ssl.py)", "recv_into (socket.py)", "fetch (t.py)", "train (t.py)")
BROADCAST = ("broadcast (torch/distributed/distributed_c10d.py)", "wait_for_work (w.py)", "main (w.py)")
UVICORN = ("Runner.run (asyncio/runners.py)", "Server.run (uvicorn/server.py)", "main (s.py)")
OWN_SERVER = ("Condition.wait (threading.py)", "Queue.get (queue.py)", "main (s.py)")
NOTEBOOK = ("select (selectors.py)", "_run_once (asyncio/base_events.py)", "start (ipykernel/kernelapp.py)")
COMPILING = ("compile_fx (torch/_inductor/compile_fx.py)", "train (t.py)")
VALIDATES = (
    "decode (x.py)",
    "__getitem__ (d.py)",
    "fetch (torch/utils/data/_utils/fetch.py)",
    "validate (t.py)",
    "train (t.py)",
)
RAISED = ("Thread.join (threading.py)", "_shutdown (threading.py)")
STARTED = ("Popen.wait (subprocess.py)", "run (subprocess.py)", "train (t.py)")
KERAS = (
    "decode (x.py)",
    "__getitem__ (d.py)",
    "get (keras/src/trainers/data_adapters/py_dataset_adapter.py)",
    "fit (keras/src/backend/jax/trainer.py)",
)
TOKENIZING = ("map (datasets/arrow_dataset.py)", "prepare (train.py)")


def moved(still_s: float, *, trained: int = 5, looks: int = 4, pauses: tuple[float, ...] = ()) -> Motion:
    return Motion(last_at=NOW - 10, trained=trained, still_from_at=NOW - still_s, still_looks=looks, pauses_s=pauses)


def stepless(*places: tuple[str, ...], cpu_s: float = 0.0, **changes: Any) -> JobView:
    """A run of as many ranks as `places`, no step of which was ever read; each stands where it stood, and
    uses `cpu_s` from one dump to the next, 100 s later. As if it had trained and then stopped 700 s ago."""
    ranks = [seen(r, cpu_ratio=0.0, io_bytes_s=0.0) for r in range(len(places))]
    dumps = tuple(
        snapshot(210 - 100 * n, [stack(r, p, cpu_s=cpu_s * n) for r, p in enumerate(places)]) for n in range(3)
    )
    given: dict[str, Any] = {
        "processes": tuple(ranks), "progress": None, "run_age_s": 50_000.0, "snapshots": dumps, "motion": moved(700.0),
    }  # fmt: skip
    return job(**{**given, **changes})


def hang(view: JobView) -> Finding:
    (found,) = collective_hang.detect(cluster(view), HANG)
    return found


def stalled(view: JobView) -> Finding:
    (found,) = stalled_progress.detect(cluster(view), STALLED, HANG)
    return found


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("gpus", ["", "spins", "idles"])
@pytest.mark.parametrize(("where", "still_s"), [(LOADER, 700.0), (LOCK, 700.0), (SOCKET, 1900.0)])
def test_a_training_without_steps_that_has_stopped_is_a_hang_that_names_who_the_others_wait_for(
    ranks: int, gpus: str, where: tuple[str, ...], still_s: float
) -> None:
    waits = BARRIER if ranks > 2 or where is SOCKET else BACKWARD
    cards = tuple(card(r, gpus) for r in range(ranks)) if gpus else ()
    view = stepless(*(where if r == 1 else waits for r in range(ranks)), gpus=cards, motion=moved(still_s))
    found = hang(view)
    assert (found.truth, [c.rank for c in found.culprits], found.actionable) == (Truth.BAD, [1], True)
    assert f"after it had trained: no rank has moved for {still_s:.0f} s" in found.summary
    assert stalled(view).truth is Truth.UNKNOWN


def test_a_stopped_rank_of_a_training_without_steps_is_acted_on_once_the_others_have_stopped_too() -> None:
    view = stepless(BARRIER, COMPUTE, BARRIER, BARRIER)
    frozen = seen(1, state="T", state_age_s=650.0, cpu_ratio=0.0)
    view = replace(view, processes=(view.processes[0], frozen, *view.processes[2:]))
    assert [c.rank for c in hang(view).culprits] == [1]
    (found,) = rank_rules.STOPPED.detect(cluster(view), HANG)
    assert (found.truth, found.actionable) == (Truth.BAD, True)
    (found,) = rank_rules.STOPPED.detect(cluster(replace(view, motion=None)), HANG)
    assert (found.truth, found.actionable) == (Truth.BAD, False)


def test_a_training_without_steps_in_which_all_sleep_and_nobody_waits_is_reported_without_a_name_and_may_be_restarted() -> (
    None
):
    view = stepless(*[("nap (t.py)", "train (t.py)")] * 4)
    assert hang(view).truth is Truth.UNKNOWN
    found = stalled(view)
    assert (found.truth, found.culprits, found.actionable) == (Truth.BAD, (), True)
    assert "its steps cannot be read" in found.summary


def test_all_in_one_collective_with_nobody_outside_are_never_restarted_for_want_of_steps() -> None:
    found = hang(stepless(*[(*BARRIER[:2], "train (t.py)")] * 4, motion=moved(9000.0)))
    assert (found.truth, found.culprits, found.actionable) == (Truth.BAD, (), False)


def raised(age_s: float, *, rank: int | None = None) -> ErrorLine:
    line = "RuntimeError: bad sample in shard 17"
    said = Event(
        kind=EventKind.ERROR, job_id="7", age_s=0.0, source="/log", line=line, pattern="python_exception", rank=rank
    )  # fmt: skip
    return ErrorLine(node="n1", age_s=age_s, event=said)


def alone(place: tuple[str, ...], **changes: Any) -> JobView:
    """`stepless` of a job that is one process."""
    only = seen(0, world_size=1, cpu_ratio=0.0, io_bytes_s=0.0)
    return stepless(place, **{"job": slurm_job(nodes=("n1",)), "processes": (only,), **changes})


@pytest.mark.parametrize("where", [LOADER, LOCK])
def test_the_only_process_of_a_training_without_steps_that_has_stopped_is_named_with_what_it_waits_for(
    where: tuple[str, ...],
) -> None:
    found = hang(alone(where))
    assert (found.truth, [c.rank for c in found.culprits], found.actionable) == (Truth.BAD, [0], True)
    assert "after it had trained: no rank has moved for 700 s" in found.summary
    assert ("waits for a lock" if where is LOCK else "waits for its data loader") in found.summary


@pytest.mark.parametrize("where", [("turn (t.py)", "train (t.py)"), ("turn (t.py)", *VALIDATES[1:3], "train (t.py)")])
def test_the_only_process_that_stands_still_in_code_nobody_knows_is_reported_with_its_place_and_may_be_restarted(
    where: tuple[str, ...],
) -> None:
    view = alone(where)
    assert hang(view).truth is Truth.UNKNOWN
    found = stalled(view)
    assert (found.truth, [c.rank for c in found.culprits], found.actionable) == (Truth.BAD, [0], True)
    assert "its only process does nothing; rank 0" in found.summary
    assert "hangs in turn (t.py)" in found.summary


def test_the_only_process_that_raised_and_cannot_exit_is_named_with_its_exception() -> None:
    found = hang(alone(RAISED, errors=(raised(800.0),)))
    assert (found.truth, [c.rank for c in found.culprits], found.actionable) == (Truth.BAD, [0], True)
    assert "Its log says why: RuntimeError: bad sample in shard 17" in found.summary
    with_steps = alone(RAISED, errors=(raised(70.0),), progress=progress(80.0, last_increase_age_s=80.0), motion=None)
    assert [c.rank for c in hang(with_steps).culprits] == [0]
    before = replace(with_steps, errors=(raised(90.0),))
    assert hang(before).truth is Truth.UNKNOWN, "a step was made after the error"


def test_a_process_alone_in_its_job_is_looked_at_rarely_until_something_shows_that_it_trains() -> None:
    other = alone(SOCKET[:2], motion=None)
    (rare,) = hang(other).wanted
    (training,) = hang(alone(SOCKET, motion=None)).wanted
    assert isinstance(rare, StackRequest) and isinstance(training, StackRequest)
    assert (rare.later_s, training.later_s) == (1200.0, 300.0)


HEALTHY = {
    "has moved a minute ago": stepless(BARRIER, LOADER, BARRIER, BARRIER, motion=moved(60.0, looks=2)),
    "moves": stepless(BARRIER, LOADER, BARRIER, BARRIER, motion=Motion(last_at=NOW, trained=9)),
    "pauses as long as ever": stepless(
        BARRIER, LOADER, BARRIER, BARRIER, motion=moved(1500.0, pauses=(900.0, 800.0))
    ),
    "the rank outside uses a little time": stepless(BARRIER, LOADER, BARRIER, BARRIER, cpu_s=2.0),
    "a step was read meanwhile": stepless(
        BARRIER, LOADER, BARRIER, BARRIER, progress=progress(30.0, steps_seen=2)
    ),
    "its log says that it evaluates": stepless(BARRIER, LOADER, BARRIER, BARRIER, phase="evaluating", run_age_s=3500.0),
    "its log grows": stepless(
        BARRIER, LOADER, BARRIER, BARRIER, log=LogView(grew_age_s=20.0, whole=True)
    ),
    "a worker moves data": stepless(
        BARRIER, LOADER, BARRIER, BARRIER,
        processes=(*(seen(r, cpu_ratio=0.0) for r in range(4)), seen(1, pid=300, io_bytes_s=5e7, cpu_ratio=0.1)),
    ),
    "a rank downloads": stepless(
        BARRIER, LOADER, BARRIER, BARRIER, snapshots=talking(stepless(BARRIER, LOADER, BARRIER, BARRIER).snapshots, 1, ("a 0", "a 9e5", "a 2e6"))
    ),
    "a node is silent": stepless(BARRIER, LOADER, BARRIER, BARRIER, silent_nodes=("n2",)),
    "its GPUs compute": stepless(*[BACKWARD] * 4, gpus=tuple(card(r, "trains") for r in range(4))),
    "the power of its GPUs is not known": stepless(*[BACKWARD] * 4, gpus=tuple(card(r, "busy") for r in range(4))),
    "it compiles": stepless(*[COMPILING] * 4, cpu_s=90.0, motion=Motion(last_at=NOW)),
    "rank 0 tokenizes, the others wait": stepless(TOKENIZING, *[BARRIER] * 3, cpu_s=60.0, motion=Motion(last_at=NOW)),
    "a server of uvicorn, idle for days": stepless(UVICORN, *[BROADCAST] * 3, motion=moved(5e5, trained=0), run_age_s=6e5),
    "a server of one's own, idle for days": stepless(OWN_SERVER, *[BROADCAST] * 3, motion=moved(5e5, trained=0), run_age_s=6e5),
    "a server that writes into its log": stepless(UVICORN, *[BROADCAST] * 3, motion=moved(5e5, trained=0), run_age_s=6e5, phase="starting"),
    "a server that was tuned at its start": stepless(UVICORN, *[BROADCAST] * 3, motion=moved(5e5)),
    "a notebook in which somebody has trained": stepless(NOTEBOOK, motion=moved(5e4), job=slurm_job(nodes=("n1",))),
    "a process that waits for the program it started": alone(STARTED),
    "a process that ends, and has said nothing": alone(RAISED),
    "a process that ends, whose error is an hour old": alone(
        RAISED, errors=(raised(3600.0),),
    ),
    "a process of which nothing shows that it trains": alone(LOCK[:1], motion=moved(700.0, trained=1)),
    "a process that waits for a server": alone(SOCKET),
    "a process that evaluates and makes its samples itself": alone(VALIDATES),
    "ranks that all make their samples themselves": stepless(*[("turn (t.py)", *VALIDATES[1:3], "train (t.py)")] * 4),
    "a process that uses a little time": alone(KERAS, cpu_s=2.0),
    "a job that trained and has something else to do": stepless(*[("nap (w.py)", "main (w.py)")] * 4),
}  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY)
def test_stepless_run_is_not_reported_if_it(case: str) -> None:
    assert hang(HEALTHY[case]).truth is not Truth.BAD
    assert stalled(HEALTHY[case]).truth is not Truth.BAD


def test_a_run_without_steps_is_looked_at_rarely_and_often_only_while_nobody_moves() -> None:
    (rare,) = hang(HEALTHY["moves"]).wanted
    (often,) = hang(HEALTHY["has moved a minute ago"]).wanted
    assert isinstance(rare, StackRequest) and isinstance(often, StackRequest)
    assert (rare.apart_s, rare.later_s) == (300.0, 300.0)
    assert often.later_s == 60.0
    assert hang(stepless(BARRIER, LOADER, motion=None, run_age_s=60.0)).wanted == ()
    assert hang(job(progress=progress(2.0))).wanted == ()


def test_checkpoints_with_a_rhythm_are_a_clock_where_no_stack_can_be_had() -> None:
    saves: dict[str, Any] = {"save_intervals_s": (600.0, 620.0, 610.0), "motion": None, "snapshots": ()}
    late = stepless(LOADER, BARRIER, saved_age_s=1900.0, **saves)
    assert hang(late).truth is Truth.UNKNOWN
    clock = loop_clock(late, NOW, HANG)
    assert (clock.words, clock.limit.seconds) == ("no new checkpoint for 1900 s", 1860.0)


# ------------------------------------------------------------------------------------------- from dumps


def dumps(*at_and_stacks: tuple[float, list[ProcessStack]]) -> Run:
    run = new_run(slurm_job(), 0.0, None, None)
    for at, stacks in at_and_stacks:
        note_snapshot(run, tuple(stacks), (), at)
    return run


def two(at: float, first: tuple[str, ...], second: tuple[str, ...], cpu_s: float) -> tuple[float, list[ProcessStack]]:
    return at, [stack(0, first, cpu_s=cpu_s), stack(1, second, cpu_s=cpu_s)]


TRAINING = [two(300.0 * n, BACKWARD, LOADER if n % 2 else COMPUTE, 200.0 * n) for n in range(5)]


def test_a_run_that_moves_between_dumps_in_the_code_of_a_training_is_proven_and_what_follows_is_timed() -> None:
    run = dumps(*TRAINING)
    assert (
        run.motion is not None and rank_motion.is_proven(run.motion) and rank_motion.still_s(run.motion, 1200.0) == 0.0
    )
    hung = [two(at, BACKWARD, LOADER, 900.0) for at in (1500.0, 1560.0, 1620.0, 1680.0)]
    run = dumps(*TRAINING, *hung)
    assert run.motion is not None and rank_motion.still_s(run.motion, 1700.0) == 200.0
    go_on = dumps(*TRAINING, *hung, two(1740.0, BACKWARD, COMPUTE, 900.0))
    assert go_on.motion is not None and go_on.motion.pauses_s == (240.0,)


def test_a_run_seen_in_the_same_place_that_uses_time_in_between_moves() -> None:
    run = dumps(*(two(300.0 * n, BACKWARD, LOADER, 30.0 * n) for n in range(6)))
    assert run.motion is not None and rank_motion.is_proven(run.motion) and run.motion.still_from_at is None


def test_a_dump_that_lacks_a_rank_ends_the_row_and_proves_nothing() -> None:
    alike = [two(60.0 * n, BACKWARD, LOADER, 5.0) for n in range(4)]
    lacks = (240.0, [stack(0, BACKWARD, cpu_s=5.0)])
    run = dumps(*alike, lacks)
    assert run.motion is not None and rank_motion.still_s(run.motion, 300.0) == 0.0 and run.motion.trained == 0
    assert len(snapshot_views(run, 300.0)) == 3


def test_stepless_run_learns_no_pace_from_before_it_trained() -> None:
    build = ("wait (ninja.py)", "main (t.py)")
    start = [two(60.0 * n, build, build, 5.0) for n in range(6)]
    later = [(600.0 + at, stacks) for at, stacks in TRAINING]
    run = dumps(*start, *later)
    assert run.motion is not None and rank_motion.is_proven(run.motion) and run.motion.pauses_s == ()


def test_a_run_that_serves_is_no_training_however_much_it_moves() -> None:
    run = dumps(*(two(300.0 * n, UVICORN, BROADCAST if n % 2 else COMPUTE[:1], 50.0 * n) for n in range(9)))
    assert run.motion is not None and not rank_motion.is_proven(run.motion)


def test_a_rank_of_two_that_raised_and_cannot_exit_is_named_with_its_exception_though_no_step_was_read() -> None:
    leaving = ("Thread.join (threading.py)", "_shutdown (threading.py)")
    error = raised(800.0, rank=1)
    found = hang(stepless((*BACKWARD[:2], "train (t.py)"), leaving, errors=(error,)))
    assert (found.truth, [c.rank for c in found.culprits]) == (Truth.BAD, [1])
    assert "Its log says why: RuntimeError: bad sample in shard 17" in found.summary


def test_a_starved_rank_that_every_dump_found_running_is_never_said_to_do_nothing() -> None:
    spin = ("spin (t.py)", "train (t.py)")
    running = [snapshot(210 - 100 * n, [stack(0, BARRIER), stack(1, spin, cpu_s=0.4 * n, state="R")]) for n in range(3)]
    ranks = tuple(seen(r, world_size=2, cpu_ratio=0.0, io_bytes_s=0.0) for r in range(2))
    here = slurm_job(nodes=("n1",))
    view = stepless(BARRIER, spin, snapshots=tuple(running), processes=ranks, job=here)
    shown = loop_state(view, NOW, 600.0)
    assert (shown.stands, shown.why) == (False, "rank 1 computes")
    assert stalled(view).truth is hang(view).truth is Truth.UNKNOWN


@pytest.mark.parametrize(
    ("phase", "still_for_s", "told"),
    [
        (
            "starting",
            700.0,
            True,
        ),  # Lightning announces its start; with Rich's bar nothing in the log ever ends it
        ("starting", 590.0, False),
        ("evaluating", 700.0, False),
        ("evaluating", 1900.0, True),
        ("checkpointing", 1700.0, False),
        ("checkpointing", 1900.0, True),
    ],
)
def test_a_phase_that_no_step_can_end_widens_the_limit_and_does_not_blind(
    phase: str, still_for_s: float, told: bool
) -> None:
    view = stepless(BARRIER, LOADER, BARRIER, BARRIER, phase=phase, motion=moved(still_for_s))
    found = hang(view)
    assert ([c.rank for c in found.culprits] == [1] and found.truth is Truth.BAD) is told
    assert hang(replace(view, motion=Motion(last_at=NOW, trained=9))).wanted, "it is looked at"


def test_a_start_that_is_announced_again_has_to_be_seen_training_again() -> None:
    assert not rank_motion.is_proven(rank_motion.started(moved(700.0)))
    assert rank_motion.started(moved(700.0)).still_from_at is None
