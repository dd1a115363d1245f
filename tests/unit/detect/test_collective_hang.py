"""collective_hang: a loop that does not turn, and all the loops that merely look so."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.collective_hang import CollectiveHang, detect
from slurm_watchdog.model.cluster_view import ErrorLine, JobView
from slurm_watchdog.model.incidents import Finding, StackRequest, Truth
from slurm_watchdog.model.node_view import NodeView, SeenEvent
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, FaultSeverity, NodeEvent, Role
from tests.builders.rank_activity import card
from tests.builders.views import (
    BACKWARD,
    BARRIER,
    COMPUTE,
    LOADER,
    RECV,
    SAVE,
    blocked,
    cluster,
    job,
    progress,
    seen,
    slurm_job,
    snapshot,
    stack,
    still,
    talking,
)

HUNG = {"progress": progress(70.0), "snapshots": still(RECV, RECV, LOADER, RECV)}


def judge(**changes) -> Finding:
    (finding,) = detect(cluster(job(**changes)), CollectiveHang())
    return finding


def test_the_rank_in_its_data_loader_is_named_and_the_job_may_be_requeued() -> None:
    finding = judge(**HUNG)
    assert (finding.truth, finding.actionable) == (Truth.BAD, True)
    assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 2, 102)]
    assert finding.exclude_nodes == ()
    assert "hangs after step 500" in finding.summary
    assert "3 ranks wait for it" in finding.summary


def test_a_rank_at_a_debugger_s_prompt_is_named_and_nothing_is_restarted_under_it() -> None:
    prompt = ("readline (codecs.py:322)", "cmdloop (cmd.py:126)", "interaction (pdb.py:445)", "main (train.py)")
    finding = judge(progress=progress(70.0), snapshots=still(RECV, RECV, prompt, RECV))
    assert (finding.truth, finding.actionable, [c.rank for c in finding.culprits]) == (Truth.BAD, False, [2])
    assert "sits at a debugger prompt" in finding.summary
    assert any("nothing is restarted" in fact for fact in finding.facts)


def test_while_a_worker_is_blocked_on_a_filesystem_nothing_is_done_about_its_rank() -> None:
    worker = seen(2, pid=202, role=Role.WORKER, comm="pt_data_worker", state="D", blocked=blocked(59.0))
    ranks = tuple(seen(rank) for rank in range(4))
    finding = judge(**HUNG, processes=(*ranks, worker))
    assert (finding.truth, finding.actionable, [c.rank for c in finding.culprits]) == (Truth.BAD, False, [2])
    assert any("filesystem_stall" in fact for fact in finding.facts)
    assert "; its worker (pid 202) has been in write on /shared/log.txt for 59 s" in finding.culprits[0].reason
    pipe = replace(worker, process=replace(worker.process, blocked=blocked(59.0, mount=None)))
    short = replace(worker, process=replace(worker.process, blocked=blocked(5.0)))
    gone = replace(worker, gone_s=20.0)
    for other in (pipe, short, gone):
        assert judge(**HUNG, processes=(*ranks, other)).actionable


@pytest.mark.parametrize(("age_s", "grew_s", "acts"), [(70.0, 5.0, False), (70.0, 40.0, True), (1900.0, 5.0, True)])
def test_a_checkpoint_that_is_saved_in_the_background_is_whole_before_anything_is_done(
    age_s: float, grew_s: float, acts: bool
) -> None:
    finding = judge(progress=progress(age_s), snapshots=HUNG["snapshots"], growing_age_s=grew_s)
    assert (finding.truth, [c.rank for c in finding.culprits], finding.actionable) == (Truth.BAD, [2], acts)
    assert any("grows no more" in fact for fact in finding.facts) is not acts


USER_CODE = ("consume (train.py)", "main (train.py)")


@pytest.mark.parametrize(
    ("age_s", "grew_s", "truth"),
    [
        (70.0, 40.0, Truth.UNKNOWN),
        (1700.0, 1600.0, Truth.UNKNOWN),
        (1900.0, 1600.0, Truth.BAD),
        (70.0, 90.0, Truth.BAD),
    ],
)
def test_a_rank_in_unknown_code_has_half_an_hour_where_files_of_a_checkpoint_have_grown_since_the_last_step(
    age_s: float, grew_s: float, truth: Truth
) -> None:
    snapshots = still(USER_CODE, *3 * [RECV])
    assert judge(progress=progress(age_s), snapshots=snapshots, growing_age_s=grew_s).truth is truth


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"state": "D", "blocked": blocked(59.0)},
            "has been in write on /shared/log.txt for 59 s, in consume (train.py:1)",
        ),
        (
            {
                "state": "S",
                "blocked": blocked(59.0, syscall="page fault", path=None, mount=None, candidates=("/a", "/b")),
            },
            "has been in a page fault on a mapped file of /a or /b for 59 s, in consume (train.py:1)",
        ),
        ({"state": "D", "state_age_s": 65.0}, "has been in state D for 65 s, in consume (train.py:1)"),
        ({}, "runs elsewhere, in consume (train.py:1)"),
    ],
)
def test_a_rank_that_is_held_in_a_call_is_said_to_be_there_and_not_to_run_elsewhere(
    changes: dict[str, Any], said: str
) -> None:
    dumps = still(RECV, RECV, USER_CODE, RECV)
    ranks = tuple(seen(rank, **(changes if rank == 2 else {})) for rank in range(4))
    finding = judge(progress=HUNG["progress"], snapshots=dumps, processes=ranks)
    assert [each.reason for each in finding.culprits] == [said]
    assert f"rank 2 (pid 102 on n2) {said}, 3 ranks wait for it" in finding.summary


@pytest.mark.parametrize(
    ("rank_does", "worker_does"),
    [
        ({}, {"cpu_ratio": 0.97, "io_bytes_s": 0.0}),  # fills a shuffle buffer, decodes a large shard
        ({}, {"cpu_ratio": 0.05, "io_bytes_s": 2e8}),
        ({"cpu_ratio": 0.1, "io_bytes_s": 2e8}, {}),
    ],
)
def test_a_rank_whose_data_loader_works_is_not_accused(
    rank_does: dict[str, float], worker_does: dict[str, float]
) -> None:
    rests = {"cpu_ratio": 0.01, "io_bytes_s": 0.0}
    ranks = tuple(seen(r, **{**rests, **(rank_does if r == 2 else {})}) for r in range(4))
    worker = seen(2, pid=202, role=Role.WORKER, comm="pt_data_worker", **{**rests, **worker_does})
    finding = judge(**HUNG, processes=(*ranks, worker))
    assert (finding.truth, finding.culprits) == (Truth.UNKNOWN, ())
    starved = replace(worker, process=replace(worker.process, state="R", **rests))
    assert judge(**HUNG, processes=(*ranks, starved)).truth is Truth.UNKNOWN, (
        "ready to run, on a node without a free core"
    )
    of_another = replace(worker, process=replace(worker.process, rank=1), node="n1")
    resting = replace(worker, process=replace(worker.process, **rests))
    rest = tuple(seen(r, **rests) for r in range(4))
    assert judge(**HUNG, processes=(*rest, of_another)).truth is Truth.BAD, "only what the named one's own do"
    assert judge(**HUNG, processes=(*rest, resting)).truth is Truth.BAD


@pytest.mark.parametrize(
    ("seen_of_it", "truth"),
    [
        (("a 0", "a 9e5", "a 2e6"), Truth.UNKNOWN),
        (("-", "a 9e5", "a 2e6"), Truth.UNKNOWN),
        (("a 9e5", "a 2e6", "-"), Truth.UNKNOWN),  # the newest dump found it between two calls
        (("a 0", "a 2e6", "a 2e6"), Truth.BAD),  # it moved, and moves no more
        (("a 0", "a 3e4", "a 6e4"), Truth.BAD),  # what keeps it alive
        (("a 0", "a 9e5", "b 2e6"), Truth.BAD),  # it has connected again: a retry
        (("-", "-", "a 2e6"), Truth.BAD),
    ],
)
def test_a_rank_is_not_accused_while_bytes_move_on_the_connection_it_waits_for(
    seen_of_it: tuple[str, ...], truth: Truth
) -> None:
    dumps = talking(still(RECV, RECV, USER_CODE, RECV), 2, seen_of_it)
    finding = judge(progress=HUNG["progress"], snapshots=dumps)
    assert finding.truth is truth


@pytest.mark.parametrize(
    ("bytes_s", "truth"), [(800_000, Truth.UNKNOWN), (20_000, Truth.BAD), (0, Truth.BAD), (None, Truth.BAD)]
)
def test_a_rank_that_writes_a_file_of_its_own_is_not_accused(bytes_s: int | None, truth: Truth) -> None:
    def wrote(age_s: float) -> int | None:
        return None if bytes_s is None else int(bytes_s * (100 - age_s))

    dumps = tuple(
        replace(dump, stacks=tuple(replace(s, io_bytes=wrote(dump.age_s)) if s.rank == 2 else s for s in dump.stacks))
        for dump in still(RECV, RECV, USER_CODE, RECV)
    )
    assert judge(progress=HUNG["progress"], snapshots=dumps).truth is truth


@pytest.mark.parametrize(
    ("age_s", "seen_of_it", "call", "said", "acts"),
    [
        (320.0, ("a 9e3", "a 9e3", "a 9e3"), "recvfrom", Truth.BAD, False),
        (1900.0, ("a 9e3", "a 9e3", "a 9e3"), "poll", Truth.BAD, True),
        (300.0, ("a 9e3", "a 9e3", "a 9e3"), "recvfrom", Truth.UNKNOWN, False),
        (320.0, ("a 9e3", "a 9e3", "a 9e6"), "recvfrom", Truth.UNKNOWN, False),
        (320.0, ("a 9e3", "b 9e3", "c 9e3"), "recvfrom", Truth.UNKNOWN, False),  # it asks again and again
        (320.0, ("a 9e3", "a 9e3", "a 9e3"), "futex", Truth.UNKNOWN, False),  # a thread may be at work
        (320.0, ("-", "-", "-"), "recvfrom", Truth.UNKNOWN, False),
    ],
)
def test_a_request_that_nobody_answers_is_reported_after_five_minutes_and_acted_on_as_late_as_any_transfer(
    age_s: float, seen_of_it: tuple[str, ...], call: str, said: Truth, acts: bool
) -> None:
    asks = ("_read_status (/usr/lib/python3.11/http/client.py)", "main (t.py)")
    dumps = talking(still(RECV, RECV, asks, RECV), 2, seen_of_it)
    dumps = tuple(replace(dump, stacks=tuple(replace(s, syscall=call) for s in dump.stacks)) for dump in dumps)
    finding = judge(progress=progress(age_s), snapshots=dumps)
    assert (finding.truth, finding.actionable) == (said, acts)
    assert said is not Truth.BAD or [c.rank for c in finding.culprits] == [2]
    assert acts or said is not Truth.BAD or "in which nothing is at work" in finding.summary


def test_a_job_that_hangs_after_its_last_step_is_wedged_in_its_teardown() -> None:
    assert judge(**{**HUNG, "progress": progress(70.0, total_steps=500)}).truth is Truth.UNKNOWN


def test_a_job_that_hangs_at_the_end_of_an_epoch_is_told_and_not_run_again() -> None:
    finding = judge(**{**HUNG, "progress": progress(70.0, total_steps=500, begun_anew=2)})
    assert (finding.truth, finding.actionable) == (Truth.BAD, False)
    assert "hangs after its last step, 500" in finding.summary


def test_a_rank_that_cannot_be_dumped_is_named_with_the_reason() -> None:
    dumps = [snapshot(age, [stack(0, (), error="EPERM"), *(stack(r, BARRIER) for r in (1, 2, 3))]) for age in (30, 10)]
    finding = judge(progress=progress(70.0), snapshots=tuple(dumps))
    assert (finding.truth, finding.actionable, [c.rank for c in finding.culprits]) == (Truth.BAD, True, [0])


def test_stacks_are_asked_for_from_half_the_limit_on() -> None:
    finding = judge(progress=progress(31.0))
    assert finding.truth is Truth.UNKNOWN
    assert finding.wanted == (StackRequest(job_id="7", apart_s=9.0),)
    assert judge(progress=progress(29.0)).wanted == ()


def test_a_job_that_makes_steps_is_ok() -> None:
    assert judge(progress=progress(10.0), snapshots=still(RECV, RECV, LOADER, RECV)).truth is Truth.OK


def test_ranks_that_a_launcher_started_anew_since_the_last_step_have_a_start_before_them() -> None:
    """Within one run of the job: torchrun ends all of its workers when one fails, and starts them again."""
    ended = tuple(seen(rank, gone_s=60.0, pid=50 + rank, start_ticks=1) for rank in range(4))
    living = tuple(seen(rank) for rank in range(4))
    assert judge(**HUNG, processes=(*ended, *living)).truth is not Truth.BAD
    late = {**HUNG, "progress": progress(3700.0)}
    assert judge(**late, processes=(*ended, *living)).truth is Truth.BAD
    assert judge(**HUNG, processes=(*ended[:3], *living)).truth is Truth.BAD  # not all of them
    before = tuple(replace(each, gone_s=90.0) for each in ended)
    assert judge(**HUNG, processes=(*before, *living)).truth is Truth.BAD  # they have made steps since


def test_two_of_four_ranks_in_the_backward_pass_convict_nobody() -> None:
    assert judge(progress=progress(70.0), snapshots=still(BACKWARD, BACKWARD, LOADER, LOADER)).truth is Truth.UNKNOWN


ALL_WAIT = still(RECV, RECV, RECV, RECV)


def everybody(age_s: float = 135.0, *, doing: str = "spins", **changes: Any) -> Finding:
    """All four ranks in one collective, their GPUs as `doing` has it."""
    cards = tuple(changes.pop(f"g{rank}", card(rank, doing)) for rank in range(4))
    given = {"progress": progress(age_s), "snapshots": ALL_WAIT, "gpus": cards}
    ranks = tuple(seen(rank, cpu_ratio=1.0, io_bytes_s=0.0) for rank in range(4))
    return judge(**{**given, "processes": ranks, **changes})


def test_all_ranks_in_the_same_collective_is_told_and_acted_on_after_two_minutes_if_they_are_known_to_wait() -> None:
    early, late = everybody(115.0), everybody()
    assert (early.truth, early.culprits, early.actionable) == (Truth.BAD, (), False)
    assert (late.truth, late.culprits, late.actionable) == (Truth.BAD, (), True)
    assert early.wanted == (StackRequest(job_id="7", apart_s=9.0, later_s=20.0),), "all dumps are to be alike"
    idle = tuple(seen(rank, cpu_ratio=0.0, io_bytes_s=0.0) for rank in range(4))
    assert everybody(processes=idle, gpus=()).actionable


@pytest.mark.parametrize(
    "changes",
    [
        {"doing": "busy"},  # nobody knows whether they compute
        {"gpus": (), "processes": tuple(seen(rank) for rank in range(4))},
        {"snapshots": tuple(replace(each, age_s=each.age_s + 60.0) for each in ALL_WAIT)},
        {"snapshots": still(*[(*BARRIER[:2], "evaluate (train.py)", "main (train.py)")] * 4)},
        {"progress": progress(135.0, intervals_s=(110.0,) * 20)},
        {"progress": progress(135.0, total_steps=500, begun_anew=1)},
        {"checkpoints_on_disk": (Checkpoint(job_id="7", directory="/c", layout="x", writing=True),)},
    ],
)
def test_all_ranks_in_the_same_collective_wait_half_an_hour_for_a_network_if_they_may_do_something_else(
    changes: dict[str, Any],
) -> None:
    assert not everybody(**changes).actionable


def test_the_rank_whose_gpu_does_nothing_in_the_collective_of_all_is_named() -> None:
    ranks = tuple(seen(rank, cpu_ratio=0.0 if rank == 2 else 1.0, io_bytes_s=0.0) for rank in range(4))
    named = everybody(g2=card(2, "idles"), processes=ranks)
    assert [(each.rank, each.reason) for each in named.culprits] == [
        (2, "is in the collective, too, and its GPU does nothing")
    ]
    assert named.actionable
    assert not everybody(70.0, g2=card(2, "idles"), processes=ranks).actionable


def test_links_that_are_down_are_said_and_waited_for() -> None:
    def linked(*names: str, age_s: float = 135.0) -> Finding:
        events = tuple(
            SeenEvent(
                at=9900.0 + n,
                event=NodeEvent(
                    source="kernel_log", name=name, severity=FaultSeverity.WARNING, age_s=0.0, device="mlx5_0"
                ),
            )
            for n, name in enumerate(names)
        )
        ranks = tuple(seen(rank, cpu_ratio=0.0, io_bytes_s=0.0) for rank in range(4))
        view = job(progress=progress(age_s), snapshots=ALL_WAIT, processes=ranks)
        nodes = (
            NodeView(name="n2", reported_at=9999.0, events=events),
            NodeView(name="n8", reported_at=9999.0, events=events),
        )
        (found,) = detect(cluster(view, nodes=nodes), CollectiveHang())
        return found

    down = linked("nic_dead")
    assert (down.truth, down.actionable) == (Truth.BAD, False)
    assert down.summary.endswith("so no rank is identified; mlx5_0 of n2 is down, as last seen.")
    assert linked("nic_dead", age_s=1900.0).actionable
    back = linked("nic_dead", "nic_recovered")
    assert back.actionable
    assert "mlx5_0" not in back.summary


HEALTHY = {
    "start-up of half an hour": {"progress": None, "run_age_s": 1799.0},
    "compilation of the first steps": {"progress": progress(1700.0, steps_seen=2)},
    "evaluation that the log announces": {
        "progress": progress(720.0, phase="evaluating"),
        "snapshots": still(RECV, RECV, COMPUTE, RECV),
    },
    "evaluation that the log does not announce": {
        "progress": progress(720.0),
        "snapshots": (
            snapshot(30, [stack(r, RECV) for r in range(4)]),
            snapshot(10, [stack(0, COMPUTE), *(stack(r, RECV) for r in (1, 2, 3))]),
        ),
    },
    "checkpoint by rank 0, the others in barrier": {
        "progress": progress(900.0),
        "snapshots": still(SAVE, BARRIER, BARRIER, BARRIER),
    },
    "checkpoint by code that nobody knows, the others in the checkpoint's barrier": {
        "progress": progress(900.0),
        "snapshots": still(("upload (mine.py)",), *[(*BARRIER[:2], "save_checkpoint (t.py)")] * 3),
    },
    "a rank outside the collective that computes": {
        "progress": progress(70.0),
        "snapshots": tuple(
            snapshot(age, [stack(0, COMPUTE, cpu_s=90 - age), *(stack(r, RECV) for r in (1, 2, 3))]) for age in (30, 10)
        ),
    },
    "slow steps": {
        "progress": progress(300.0, intervals_s=(105.0,) * 9),
        "snapshots": still(RECV, RECV, LOADER, RECV),
    },
    "all ranks compute": {"progress": progress(70.0), "snapshots": still(COMPUTE, COMPUTE, COMPUTE, COMPUTE)},
    "a job that an administrator suspended": {**HUNG, "job": slurm_job(state="SUSPENDED")},
    "a log without a step that could be read": {
        "progress": None,
        "run_age_s": 9e4,
        "snapshots": still(RECV, RECV, RECV, RECV),
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_incident_for(name: str) -> None:
    assert judge(**HEALTHY[name]).truth is not Truth.BAD


UNSEEN = {
    "no ranks are known": {**HUNG, "processes": ()},
    "a node is silent": {**HUNG, "silent_nodes": ("n2",)},
    "no dump came": {**HUNG, "snapshots": ()},
    "one dump came": {**HUNG, "snapshots": HUNG["snapshots"][:1]},
    "the dump of one rank is missing": {
        "progress": progress(70.0),
        "snapshots": tuple(snapshot(age, [stack(r, RECV) for r in (0, 1, 2)]) for age in (30, 10)),
    },
    "no rank could be dumped": {
        "progress": progress(70.0),
        "snapshots": tuple(snapshot(age, [stack(r, (), error="EPERM") for r in range(4)]) for age in (30, 10)),
    },
    "a rank has exited": {**HUNG, "processes": (*(seen(r) for r in range(3)), seen(3, gone_s=20.0))},
}


@pytest.mark.parametrize("name", UNSEEN)
def test_unknown_if(name: str) -> None:
    assert judge(**UNSEEN[name]).truth is Truth.UNKNOWN


def test_a_hang_before_the_first_step_is_told_and_never_acted_on() -> None:
    finding = judge(progress=None, run_age_s=3700.0, snapshots=still(RECV, RECV, LOADER, RECV))
    assert (finding.truth, finding.actionable) == (Truth.BAD, False)
    assert "before its first step" in finding.summary


def test_a_hang_after_an_elastic_restart_of_a_rank_is_seen() -> None:
    dead = seen(2, gone_s=400.0, pid=77)
    assert judge(**HUNG, processes=(dead, *(seen(r) for r in range(4)))).truth is Truth.BAD


def test_a_checkpoint_that_takes_longer_than_a_checkpoint_may_is_a_hang() -> None:
    finding = judge(progress=progress(1811.0), snapshots=still(SAVE, BARRIER, BARRIER, BARRIER))
    assert (finding.truth, [c.rank for c in finding.culprits]) == (Truth.BAD, [0])


def test_stacks_that_move_are_no_hang_however_long() -> None:
    moving = (
        snapshot(30, [stack(r, RECV) for r in range(4)]),
        snapshot(10, [stack(r, COMPUTE) for r in range(4)]),
    )
    assert judge(progress=progress(1811.0), snapshots=moving).truth is Truth.UNKNOWN


def alone(lines: tuple[str, ...]) -> JobView:
    """A job of one rank that stands in `lines`, dump after dump, and does nothing, nor does anybody else of it."""
    rank = seen(0, world_size=1, cpu_ratio=0.0, io_bytes_s=0.0)
    return job(job=slurm_job(nodes=("n1",)), processes=(rank,), progress=progress(400.0), snapshots=still(lines))


def judge_one(view: JobView) -> Finding:
    (finding,) = detect(cluster(view), CollectiveHang())
    return finding


@pytest.mark.parametrize("lines", [LOADER, ("Lock.acquire (threading.py)", "train (t.py)")])
def test_a_rank_that_has_no_peers_is_named_where_only_a_fault_keeps_it(lines) -> None:
    finding = judge_one(alone(lines))
    assert (finding.truth, [c.rank for c in finding.culprits], finding.actionable) == (Truth.BAD, [0], True)
    assert "does nothing" in finding.summary


@pytest.mark.parametrize(
    "lines",
    [
        COMPUTE,
        SAVE,
        ("sleep (time.py)", "train (t.py)"),
        ("SSLSocket.read (ssl.py)", "urlopen (urllib/request.py)"),
    ],
)
def test_a_rank_that_has_no_peers_and_may_be_waiting_for_something_is_not_accused(lines) -> None:
    assert judge_one(alone(lines)).truth is not Truth.BAD


@pytest.mark.parametrize("ratio", [0.9, None])
def test_a_rank_that_has_no_peers_is_not_accused_while_its_loaders_work_or_are_not_known(ratio) -> None:
    view = alone(LOADER)
    worker = seen(0, pid=500, role=Role.WORKER, world_size=1, cpu_ratio=ratio, io_bytes_s=0.0)
    assert judge_one(replace(view, processes=(*view.processes, worker))).truth is not Truth.BAD


@pytest.mark.parametrize(
    ("rank", "age_s", "told"), [(2, 65.0, True), (1, 65.0, False), (None, 65.0, False), (2, 900.0, False)]
)
def test_collective_hang_reports_the_culprits_errors_since_the_last_step(rank, age_s, told) -> None:
    given = {"kind": EventKind.ERROR, "job_id": "7", "age_s": 0.0, "source": "l", "rank": rank}
    head = Event(**given, pattern="traceback", line="Traceback (most recent call last):")
    error = Event(**given, pattern="python_exception", line="ValueError: shapes do not fit")
    finding = judge(**HUNG, errors=tuple(ErrorLine(node="n2", age_s=age_s, event=each) for each in (error, head)))
    assert finding.truth is Truth.BAD and [c.rank for c in finding.culprits] == [2]
    assert ("Its log says why: ValueError: shapes do not fit." in finding.summary) is told


JOINS = (
    "_store_based_barrier (torch/distributed/distributed_c10d.py)",
    "init_process_group (torch/distributed/distributed_c10d.py)",
    "main (train.py)",
)


def starting(age_s: float = 700.0, joined: int = 3, **changes: Any) -> Finding:
    """A job of four ranks without a step, of which so many were seen."""
    places = changes.pop("places", [JOINS] * joined)
    given = {
        "progress": None,
        "run_age_s": age_s,
        "snapshots": still(*places),
        "processes": tuple(map(seen, range(joined))),
    }
    return judge(**{**given, **changes})


def test_ranks_that_wait_for_others_to_join_name_those_of_whom_no_process_was_seen() -> None:
    finding = starting()
    assert (finding.truth, finding.actionable) == (Truth.BAD, False)
    assert [(each.rank, each.node, each.pid) for each in finding.culprits] == [(3, None, None)]
    assert (
        "3 ranks wait for the others to join, and of rank 3 (of 4 in all) no process has been seen." in finding.summary
    )
    alone = starting(joined=2)
    assert [each.rank for each in alone.culprits] == [2, 3]
    assert "; n2 has no rank at all." in alone.summary


@pytest.mark.parametrize(
    "changes",
    [
        {"age_s": 500.0},  # a node may boot for as long
        {"joined": 4},  # all are there: who is late is not absent
        {"places": [JOINS, JOINS, LOADER]},
        {"silent_nodes": ("n2",)},
        {"progress": progress(700.0)},
        {"snapshots": ()},
    ],
)
def test_collective_hang_reports_no_absent_rank_early_or_with_all_present_or_missing_facts(
    changes: dict[str, Any],
) -> None:
    assert "has been seen" not in " ".join(each.reason or "" for each in starting(**changes).culprits)
