"""log_error: the first cause and who said it; what comes to nothing, and normal ends, are no incidents."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.log_error import detect
from slurm_watchdog.diagnose.logs.reported_run import attributed_errors
from slurm_watchdog.diagnose.logs.root_cause import find_cause, logged_error, work_lost
from slurm_watchdog.model.cluster_view import Checkpoint
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.node_view import NodeView, SeenEvent
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent
from slurm_watchdog.model.past_runs import EndedJob, RankLocation
from tests.builders.logged_runs import NOW, SEATS, errors, event, past
from tests.builders.views import cluster, job, progress, seen, slurm_job


def ended(*lines: tuple[float, str], state: str = "FAILED", **changes: Any) -> EndedJob:
    return EndedJob(job=slurm_job(state=state), ended_at=NOW - 20.0, run=past(*lines, state=state, **changes))


def judge_ended(*lines: tuple[float, str], state: str = "FAILED", **changes: Any) -> Finding:
    (finding,) = detect(cluster(ended=(ended(*lines, state=state, **changes),)), CollectiveHang())
    return finding


def judge(**changes: Any) -> Finding:
    (finding,) = detect(cluster(job(**changes)), CollectiveHang())
    return finding


KEY_ERROR = ((42.0, "[rank3]: Traceback (most recent call last):"), (42.0, "[rank3]: KeyError: 'text'"))
LOST = tuple(
    (age_s, line)
    for rank in (0, 1, 2)
    for age_s, line in (
        (41.0, f"[rank{rank}]: Traceback (most recent call last):"),
        (41.0, f"[rank{rank}]: RuntimeError: [1] Connection closed by peer [10.0.0.2]:4711"),
    )
)
SUMMED_UP = (
    (40.0, "srun: error: n2: task 3: Exited with exit code 1"),
    (40.0, "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."),
    (40.0, "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T10:00:00 ***"),
    (39.0, "srun: error: n1: task 0: Terminated"),
)
ONE_DEAD = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=41.0))
DIES = {"errors": errors(*KEY_ERROR, *LOST), "processes": ONE_DEAD, "progress": progress(50.0)}


def test_the_rank_that_failed_first_is_named_with_its_node_and_its_own_words() -> None:
    finding = judge(**DIES, checkpoint=Checkpoint(step=460, age_s=400.0))
    assert finding.truth is Truth.BAD
    assert finding.subject == "run:7.0"
    assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 3, 103)]
    assert "KeyError: 'text'" in finding.summary
    assert "rank 3 on n2 failed first" in finding.summary
    assert any("last complete checkpoint at step 460: 40 steps lost" in fact for fact in finding.facts)


def test_while_all_ranks_live_it_counts_when_the_next_step_is_overdue() -> None:
    alive = {**DIES, "processes": tuple(seen(r) for r in range(4))}
    assert judge(**alive).truth is Truth.UNKNOWN
    late = errors(*((age_s + 50, line) for age_s, line in KEY_ERROR))
    assert judge(**{**alive, "errors": late, "progress": progress(95.0)}).truth is Truth.BAD


def test_a_run_that_ended_is_told_of_for_ten_minutes_and_then_it_is_over() -> None:
    finding = judge_ended(*KEY_ERROR, *LOST, *SUMMED_UP)
    assert (finding.truth, finding.subject, finding.job_ids) == (Truth.BAD, "run:7.0", ("7",))
    assert [(c.node, c.rank) for c in finding.culprits] == [("n2", 3)]
    assert any("50 steps lost, about 88 min of work" in fact for fact in finding.facts)
    late = replace(ended(*KEY_ERROR), run=past(*KEY_ERROR, ended_at=NOW - 601), ended_at=NOW - 601)
    (finding,) = detect(cluster(ended=(late,)), CollectiveHang())
    assert finding.truth is Truth.OK


def test_the_last_words_of_a_run_that_names_nobody_are_waited_for() -> None:
    plain = (42.0, "KeyError: 'text'")
    for line, truth in ((plain, Truth.UNKNOWN), (KEY_ERROR[1], Truth.BAD)):
        late = replace(ended(line), ended_at=NOW - 5.0)
        assert [f.truth for f in detect(cluster(ended=(late,)), CollectiveHang())] == [truth]


def test_a_traceback_whose_last_line_has_not_come_names_its_rank_only_after_a_while() -> None:
    header = "[rank3]: Traceback (most recent call last):"
    fresh = EndedJob(job=slurm_job(state="FAILED"), ended_at=NOW - 2.0, run=past((4.0, header), state="FAILED"))
    (finding,) = detect(cluster(ended=(fresh,)), CollectiveHang())
    assert (finding.truth, finding.culprits) == (Truth.UNKNOWN, ())
    lives = {**DIES, "errors": errors((4.0, header)), "progress": progress(50.0)}
    assert judge(**lives).truth is Truth.UNKNOWN
    for late in (judge_ended((42.0, header)), judge(**{**lives, "errors": errors((42.0, header))})):
        assert (late.truth, [c.rank for c in late.culprits]) == (Truth.BAD, [3])


def test_a_header_that_comes_behind_what_its_rank_said_of_a_lost_peer_is_no_cause() -> None:
    lost = (43.0, "[rank2]: RuntimeError: [1] Connection closed by peer [10.0.0.2]:4711")
    finding = judge_ended(lost, (40.0, "[rank2]: Traceback (most recent call last):"))
    assert finding.culprits == () and "no line says why" in finding.summary


def test_log_error_adds_kernel_lines_of_that_time_as_facts_only() -> None:
    line = "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=103,uid=1000"
    kill = NodeEvent(source="kernel_log", name="oom_kill", severity=FaultSeverity.ERROR, age_s=0, line=line)
    seen_at = tuple(SeenEvent(at=at, event=kill) for at in (NOW - 3000, NOW - 45))
    nodes = tuple(NodeView(name=name, reported_at=NOW, events=seen_at) for name in ("n2", "n9"))
    view = cluster(ended=(ended(state="OUT_OF_MEMORY"),), nodes=nodes)
    (finding,) = detect(view, CollectiveHang())
    assert [fact for fact in finding.facts if "kernel" in fact] == [f"the kernel of n2: {line}"]
    assert finding.culprits == ()


def test_sigkill_is_what_the_kernel_does_for_memory_unless_its_log_has_no_such_kill() -> None:
    killed = (40.0, "srun: error: n2: task 3: Exited with exit code 137")
    assert (
        "rank 3 on n2 was killed (SIGKILL), as the kernel does for memory (see dmesg and sacct)"
        in judge_ended(killed).summary
    )
    line = "nvme nvme0: I/O 5 QID 7 timeout, aborting"
    other = NodeEvent(source="kernel_log", name="nvme_timeout", severity=FaultSeverity.ERROR, age_s=0, line=line)
    node = NodeView(name="n2", reported_at=NOW, events=(SeenEvent(at=NOW - 60, event=other),))
    (finding,) = detect(cluster(ended=(ended(killed),), nodes=(node,)), CollectiveHang())
    assert "rank 3 on n2 was killed (SIGKILL) (the kernel's log has no kill for memory)" in finding.summary


def test_a_task_that_slurm_saw_run_out_of_memory_is_named() -> None:
    finding = judge_ended(*LOST, (40.0, "srun: error: n2: task 3: Out Of Memory"), *SUMMED_UP[1:])
    assert [(c.node, c.rank) for c in finding.culprits] == [("n2", 3)]
    assert "the kernel killed it" in finding.summary


def test_of_a_requeued_run_the_cause_is_told_under_its_own_number() -> None:
    view = job(job=slurm_job(restarts=1), progress=None, run_age_s=10.0, past=(past(*KEY_ERROR),))
    present, before = detect(cluster(view), CollectiveHang())
    assert (present.truth, present.subject) == (Truth.UNKNOWN, "run:7.1")
    assert (before.truth, before.subject) == (Truth.BAD, "run:7.0")


@pytest.mark.parametrize(("ago_s", "rises", "truth"), [(90.0, 2, Truth.OK), (90.0, 1, Truth.BAD), (30.0, 2, Truth.BAD)])
def test_end_of_a_run_is_over_when_the_next_one_makes_steps_and_is_reported_for_a_minute_at_least(
    ago_s: float, rises: int, truth: Truth
) -> None:
    before = past(*KEY_ERROR, ended_at=NOW - ago_s)
    trains = progress(1.0, rises=rises)
    view = job(job=slurm_job(restarts=1), progress=trains, run_age_s=ago_s, past=(before,))
    assert detect(cluster(view), CollectiveHang())[1].truth is truth
    newest = past(restarts=1, state="COMPLETED", steps_seen=rises)
    over = EndedJob(job=slurm_job(state="COMPLETED", restarts=1), ended_at=NOW - 20.0, run=newest, past=(before,))
    (finding,) = detect(cluster(ended=(over,)), CollectiveHang())
    assert (finding.subject, finding.truth) == ("run:7.0", truth)


def test_the_run_that_completes_or_waits_freezes_what_was_said_of_it() -> None:
    completing = job(job=slurm_job(state="COMPLETING"), errors=errors(*KEY_ERROR))
    (finding,) = detect(cluster(waiting=(completing,)), CollectiveHang())
    assert (finding.truth, finding.subject) == (Truth.UNKNOWN, "run:7.0")


def test_a_line_without_prefix_gets_its_rank_from_the_task_that_slurm_saw_fail_first() -> None:
    plain = ((42.0, "Traceback (most recent call last):"), (42.0, "RuntimeError: CUDA error: unknown error"))
    finding = judge_ended(*plain, *SUMMED_UP)
    assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 3, 103)]
    assert "an error of CUDA" in finding.summary
    (nobody,) = (judge_ended(*plain).culprits,)
    assert nobody == ()


def out_of_memory(*ranks: int) -> list[tuple[float, str]]:
    return [
        (42.0 - r, f"[rank{r}]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
        for r in ranks
    ]


def test_of_a_few_that_failed_alike_the_first_is_named_and_the_others_are_counted() -> None:
    finding = judge_ended(*out_of_memory(0, 2), error_ranks=(("cuda_oom", (0, 2)),))
    assert "rank 0 on n1 failed first (and 1 more rank alike)" in finding.summary
    assert finding.culprits[0].rank == 0


def test_where_nearly_all_failed_alike_none_of_them_is_the_one() -> None:
    finding = judge_ended(*out_of_memory(2, 0, 1, 3), error_ranks=(("cuda_oom", (0, 1, 2, 3)),))
    assert "4 ranks failed alike: a GPU ran out of memory" in finding.summary
    assert finding.culprits == ()


def test_a_killed_rank_whose_peers_alone_complain_is_named_by_slurm_or_nobody_is() -> None:
    killed = ((40.0, "srun: error: n2: task 3: Killed"), *SUMMED_UP[1:])
    finding = judge_ended(*LOST, *killed)
    assert [(c.node, c.rank) for c in finding.culprits] == [("n2", 3)]
    assert judge_ended(*LOST).culprits == ()
    assert "no line says why" in judge_ended(*LOST).summary
    victims = judge_ended(*LOST, *SUMMED_UP[1:])
    assert victims.culprits == ()


FAILED_ALIKE = tuple((40.0, f"srun: error: {node}: {which}: Exited with exit code 1") for node, which in (
    ("n1", "tasks 0-1"), ("n2", "task 2"),
))  # fmt: skip


def seats(*gone_s: float | None) -> tuple[RankLocation, ...]:
    return tuple(
        replace(seat, gone_at=None if gone is None else NOW - gone) for seat, gone in zip(SEATS, gone_s, strict=True)
    )


def test_a_rank_that_left_with_exit_code_0_before_its_peers_is_named_though_nobody_logs_it() -> None:
    for gone_s in ((40.5, 40.5, 40.5, 42.0), (None, None, 40.0, 42.0), (42.5, 41.0, None, 42.0)):
        finding = judge_ended(*LOST, *FAILED_ALIKE, seats=seats(*gone_s))
        assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 3, 103)]
        assert (
            "; rank 3 on n2 left first: it exited with code 0 before its peers, which then lost their connection to "
            "it: [rank0]: RuntimeError: [1] Connection closed by peer" in finding.summary
        )
        assert finding.culprits[0].reason.startswith("exited with code 0 before its peers, which then logged: ")


@pytest.mark.parametrize(
    ("lines", "changes"),
    [
        (FAILED_ALIKE, {}),  # when it left was not seen
        (FAILED_ALIKE, {"seats": seats(44.0, 40.0, 40.0, 42.0)}),  # another one was gone before it
        (FAILED_ALIKE[:1], {"seats": seats(40.0, 40.0, 40.0, 42.0)}),  # nothing is reported of two of them
        ((*FAILED_ALIKE, (40.0, "srun: error: n2: task 3: Terminated")), {"seats": seats(40.0, 40.0, 40.0, 42.0)}),
        (FAILED_ALIKE, {"seats": seats(40.0, 40.0, 40.0, 42.0), "ranks": 8}),  # not all of them are known
        (FAILED_ALIKE, {"seats": seats(40.0, 40.0, 40.0, 42.0), "total_steps": 450}),  # it had made its last step
        ((), {"seats": seats(40.0, 40.0, 40.0, 42.0)}),
        (FAILED_ALIKE, {"seats": seats(40.0, 40.0, 40.0, 300.0)}),  # the others made steps without it
    ],
)
def test_nobody_is_said_to_have_left_first_if(lines: tuple[tuple[float, str], ...], changes: dict[str, Any]) -> None:
    finding = judge_ended(*LOST, *lines, **changes)
    assert (finding.truth, finding.culprits) == (Truth.BAD, ())


def test_a_single_launcher_that_failed_is_not_the_rank_with_its_number() -> None:
    """torchrun on one node: Slurm's task 0 is the launcher. Rank 0 may have left with any code, and rank 1 lost it."""
    two = tuple(RankLocation(rank, "n1", 100 + rank, NOW - 41.0) for rank in range(2))
    lost = (41.0, "[rank1]: RuntimeError: [1] Connection closed by peer [10.0.0.2]:4711")
    launcher = (40.0, "srun: error: n1: task 0: Exited with exit code 1")
    one_node = {"seats": two, "ranks": 2, "nodes": ("n1",)}
    assert judge_ended(lost, launcher, **one_node).culprits == ()
    assert judge_ended((41.0, lost[1].replace("rank1", "rank0")), launcher, **one_node).culprits == ()


def table_row(rank: int, code: int = 1, age_s: float = 40.0) -> tuple[tuple[float, str], ...]:
    """What agents report of a row of torchrun's table."""
    return (
        (age_s, f"  rank      : {rank} (local_rank: {rank % 2})"),
        (age_s, f"  exitcode  : {code} (pid: {100 + rank})"),
    )


CHILD_FAILED = (40.0, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
TABLES = (CHILD_FAILED, *table_row(1, -15), *table_row(0), CHILD_FAILED, *table_row(2))
"""Both launchers saw a rank of theirs fail; of rank 3 there is no word."""
GONE = seats(40.0, 40.0, 40.0, 40.5)


def test_below_torchrun_the_rank_that_no_table_has_and_that_was_gone_first_left_with_exit_code_0() -> None:
    launchers_end = ((39.0, "srun: error: n1: task 0: Exited with exit code 1"),)
    closed = (40.0, "W1124 10:00:00.9 39 torch/api.py:1028] Sending process 101 closing signal SIGTERM")
    without_terminated = (CHILD_FAILED, *table_row(0), closed, CHILD_FAILED, *table_row(2))
    for words in (TABLES, (*TABLES, *launchers_end), without_terminated):
        finding = judge_ended(*LOST, *words, seats=GONE)
        assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 3, 103)]
        assert "rank 3 on n2 left first: it exited with code 0 before its peers" in finding.summary


LOST_TOO = (41.0, "[rank3]: RuntimeError: [1] Connection closed by peer [10.0.0.2]:4711")


@pytest.mark.parametrize(
    ("lines", "changes"),
    [
        ((*TABLES, *table_row(3, -15)), {}),
        ((*TABLES, (40.0, "Sending process 103 closing signal SIGTERM")), {}),  # it handled that, and left with 0
        # n2's launcher has no table: it was ended itself, and its rank with it
        ((*TABLES[:-3], *table_row(2)), {"seats": tuple(replace(seat, node="n2" if seat.rank == 3 else "n1") for seat in GONE)}),
        (TABLES[3:], {}),  # rank 1 is in none either
        ((*TABLES, LOST_TOO), {}),  # it lost somebody itself
        (TABLES, {"seats": SEATS}),  # when it left was not seen
        (TABLES, {"seats": seats(42.0, 40.0, 40.0, 40.5)}),  # another one was gone before it
        (TABLES, {"seats": seats(40.0, 40.0, 40.0, 300.0)}),  # the others made steps without it (join() of uneven inputs)
        (TABLES, {"total_steps": 450}),  # the training was over
        (TABLES, {"ranks": 8}),  # not all of them are known
    ],
)  # fmt: skip
def test_below_torchrun_nobody_is_said_to_have_left_first_if(
    lines: tuple[tuple[float, str], ...], changes: dict[str, Any]
) -> None:
    finding = judge_ended(*LOST, *lines, **{"seats": GONE, **changes})
    assert (finding.truth, finding.culprits) == (Truth.BAD, ())


def test_below_torchrun_the_rank_that_exited_without_a_word_while_all_others_lost_it_is_named() -> None:
    finding = judge_ended(*LOST, *TABLES, *table_row(3), seats=GONE)
    assert [(c.node, c.rank) for c in finding.culprits] == [("n2", 3)]
    assert "rank 3 on n2 exited with code 1" in finding.summary


def test_who_left_first_is_not_looked_for_where_a_line_says_why() -> None:
    finding = judge_ended(*KEY_ERROR, *LOST, *FAILED_ALIKE, seats=seats(40.0, 40.0, 42.0, 40.0))
    assert "rank 3 on n2 failed first" in finding.summary


LAUNCHERS_LEAVE = (
    (40.0, "Traceback (most recent call last):"),
    (40.0, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"),
    (40.0, "srun: error: n2: task 1: Exited with exit code 1"),
)
"""torchrun, one task a node: task 1 is n2's launcher, rank 1 runs on n1."""


def worker_died(code: int, pid: int) -> tuple[float, str]:
    where = "E1121 10:00:00.322000 37 torch/distributed/elastic/multiprocessing/api.py:1002]"
    return (40.5, f"{where} failed (exitcode: {code}) local_rank: 1 (pid: {pid}) of binary: /usr/bin/python")


def test_a_launcher_that_leaves_because_its_ranks_lost_others_is_no_rank_and_accuses_no_node() -> None:
    finding = judge_ended(*LOST, *LAUNCHERS_LEAVE)
    assert finding.culprits == ()
    assert "no line says why" in finding.summary
    assert judge_ended(*LOST, worker_died(1, 102), *LAUNCHERS_LEAVE).culprits == ()
    ended_by_srun = (39.0, "srun: error: n1: task 0: Terminated")
    assert judge_ended(*LOST, *LAUNCHERS_LEAVE, ended_by_srun).culprits == ()


def test_the_rank_that_torchrun_saw_die_of_a_signal_is_named() -> None:
    finding = judge_ended(*LOST, worker_died(-9, 103), *LAUNCHERS_LEAVE)
    assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 3, 103)]
    assert "exitcode: -9" in finding.summary, "not the launcher's own traceback"
    assert "rank 3 on n2 was killed (SIGKILL)" in finding.summary
    early = tuple((age_s + 2, line) for age_s, line in (worker_died(-9, 103), *LAUNCHERS_LEAVE))
    assert "exitcode: -9" in judge_ended(*early, *LOST).summary, "its launcher speaks before those that lost it"
    for code, how in ((-6, "died of SIGABRT"), (-15, "was ended by SIGTERM"), (137, "was killed (SIGKILL)")):
        # of all ranks the only one that does not say that it lost another one
        finding = judge_ended(*LOST, worker_died(code, 103), *LAUNCHERS_LEAVE)
        assert [c.rank for c in finding.culprits] == [3] and f"rank 3 on n2 {how}" in finding.summary
    lost_too = (41.0, "[rank3]: RuntimeError: [1] Connection closed by peer [10.0.0.2]:4711")
    for code, pid, more in ((-6, 103, lost_too), (-15, 103, lost_too), (-9, 999, lost_too)):  # a victim; no rank
        assert judge_ended(*LOST, more, worker_died(code, pid), *LAUNCHERS_LEAVE).culprits == ()


def test_a_label_of_srun_before_a_launchers_line_is_no_rank() -> None:
    crash = (42.0, "0: Fatal Python error: Segmentation fault")
    died = (41.9, f"0: {worker_died(-11, 101)[1]}")
    finding = judge_ended(crash, died, *LAUNCHERS_LEAVE)
    assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n1", 1, 101)]
    assert "segmentation fault" in finding.summary
    aborted = (41.9, f"0: {worker_died(-6, 101)[1]}")
    assert judge_ended(crash, aborted, *LAUNCHERS_LEAVE).culprits == ()
    own_word = (42.0, "1: [rank3]: KeyError: 'text'")
    assert [c.rank for c in judge_ended(own_word, *LAUNCHERS_LEAVE).culprits] == [3]
    of_tasks = judge_ended((42.0, "3: KeyError: 'text'"), *SUMMED_UP)
    assert [(c.node, c.rank) for c in of_tasks.culprits] == [("n2", 3)], "no launcher between"


def test_below_launchers_the_words_of_a_rank_count_and_the_number_of_a_task_does_not() -> None:
    finding = judge_ended(*KEY_ERROR, *LOST, *LAUNCHERS_LEAVE)
    assert [(c.node, c.rank) for c in finding.culprits] == [("n2", 3)]
    plain = ((42.0, "Traceback (most recent call last):"), (42.0, "KeyError: 'text'"), *LAUNCHERS_LEAVE)
    assert judge_ended(*plain).culprits == ()


def test_a_rank_that_lost_another_one_and_left_with_an_error_is_not_who_failed() -> None:
    left = ((40.0, "srun: error: n2: task 2: Exited with exit code 1"), *SUMMED_UP[1:])
    assert judge_ended(*LOST, *left).culprits == ()


TIMEOUTS = tuple(
    (41.0, f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1182] [Rank {rank}] Watchdog caught collective operation timeout: W")
    for rank in (0, 1, 3)
)  # fmt: skip


def test_in_a_cascade_of_timeouts_the_one_that_says_nothing_is_named() -> None:
    finding = judge_ended(*TIMEOUTS, *SUMMED_UP, error_ranks=(("nccl_watchdog", (0, 1, 3)),))
    assert [c.rank for c in finding.culprits] == [2]
    unseen = judge_ended(*TIMEOUTS, ranks=8, error_ranks=(("nccl_watchdog", (0, 1, 3)),))
    assert unseen.truth is Truth.BAD and unseen.culprits == (), "of four ranks nothing is known"
    everybody = judge_ended(*TIMEOUTS, error_ranks=(("nccl_watchdog", (0, 1, 2, 3)),))
    assert everybody.truth is Truth.BAD and everybody.culprits == ()
    first = judge_ended(*TIMEOUTS, (50.0, "[rank1]: OSError: [Errno 5] Input/output error"))
    assert [c.rank for c in first.culprits] == [1]


def test_slurms_own_word_is_enough_for_memory_and_for_a_lost_node() -> None:
    finding = judge_ended(state="OUT_OF_MEMORY")
    assert (finding.truth, finding.culprits) == (Truth.BAD, ())
    assert detect(cluster(ended=(ended(state="FAILED"),)), CollectiveHang()) == []


def said(line: str, read_on: str = "n1", **changes: Any) -> tuple[int | None, str | None, int | None]:
    (found,) = attributed_errors(past(errors=(logged_error(event(line), read_on, NOW),), **changes))
    return found.rank, found.node, found.pid


def test_the_node_of_a_line_is_where_its_rank_runs_not_where_the_log_is_read() -> None:
    assert said("KeyError: 1") == (None, None, None)
    assert said("KeyError: 1", "n2") == (None, "n2", None)
    assert said("KeyError: 1", nodes=("n1",)) == (None, "n1", None)
    assert said("[n2:3]KeyError: 1", seats=(), ranks=0) == (3, "n2", None)
    assert said("[rank3]: KeyError: 1") == (3, "n2", 103)
    assert said("[rank9]: KeyError: 1")[1:] == (None, None)


def from_files(*files: tuple[str, str, str], **changes: Any) -> list[tuple[int | None, str | None]]:
    """(rank, node) of the line of each (node, path, line)."""
    told = tuple(
        replace(logged_error(event(line), node, NOW + place), source=path)
        for place, (node, path, line) in enumerate(files)
    )
    return [(each.rank, each.node) for each in attributed_errors(past(errors=told, **changes))]


def test_a_file_tells_its_rank_only_by_that_word_and_on_the_node_where_that_rank_runs() -> None:
    line = "KeyError: 1"
    assert from_files(("n1", "/l/rank_1.log", line), ("n2", "/l/rank_3.log", line)) == [(1, "n1"), (3, "n2")]
    other = from_files(("n1", "/l/rank_3.log", line), ("n2", "/l/rank_1.log", line))
    assert [rank for rank, _ in other] == [None, None]
    for paths in (
        ("/l/log_1.txt", "/l/log_2.txt"),
        ("/l/attempt_0/0/stderr.log", "/l/attempt_0/1/stderr.log"),
    ):
        told = from_files(("n1", paths[0], line), ("n1", paths[1], line))
        assert [rank for rank, _ in told] == [None, None]
    unseen = from_files(("n1", "/l/rank_1.log", line), ("n1", "/l/rank_2.log", line), seats=(), ranks=0)
    assert [rank for rank, _ in unseen] == [None, None]


def test_a_module_and_its_line_in_brackets_are_no_rank() -> None:
    assert said("[n2:3]KeyError: 1") == (3, "n2", 103)
    assert said("[n2.cluster:3]KeyError: 1") == (3, "n2", 103)
    for line in ("[gpt2:3] KeyError: 1", "[core.py:3] KeyError: 1", "[trainer:3] KeyError: 1"):
        assert said(line) == (None, None, None)


def test_log_error_reports_the_lost_work_as_far_as_it_is_known() -> None:
    assert (
        work_lost(past(checkpoint_step=None))
        == ("last step 450; no complete checkpoint of this run was seen, where this run began at step 401",)
        or "no complete checkpoint" in work_lost(past(checkpoint_step=None))[0]
    )
    assert work_lost(past(checkpoint_step=None)) == (
        "last step 450; no complete checkpoint of this run was seen, which began at step 401",
    )
    assert work_lost(past(last_step=None)) == ()


RETRY = errors((30.0, "[rank3]: Traceback (most recent call last):"), (30.0, "[rank3]: TimeoutError: s3"))
HEALTHY: dict[str, dict[str, Any]] = {
    "no error was logged": {"processes": ONE_DEAD, "progress": progress(50.0)},
    "a step was made after it": {"errors": RETRY, "progress": progress(5.0)},
    "all ranks live and no step is due yet": {"errors": RETRY, "progress": progress(31.0)},
    "the error came while the job starts": {
        "errors": RETRY, "progress": None, "run_age_s": 600.0, "processes": tuple(seen(r) for r in range(4)),
    },
    "it evaluates": {
        "errors": errors((300.0, "[rank3]: KeyError: 1")), "progress": progress(400.0, phase="evaluating"),
    },
    "another rank is gone": {
        "errors": errors((30.0, "[rank1]: KeyError: 1")), "processes": ONE_DEAD, "progress": progress(31.0),
    },
    "the dead rank has just ended": {**DIES, "processes": (*ONE_DEAD[:3], seen(3, gone_s=2.0))},
    "the last step was made": {**DIES, "progress": progress(50.0, total_steps=500)},
    "the job is suspended": {**DIES, "job": slurm_job(state="SUSPENDED")},
    "a node is silent": {**DIES, "silent_nodes": ("n2",)},
    "its script tries again": {**DIES, "processes": tuple(seen(r, gone_s=20.0) for r in range(4))},
    "only consequences are logged while it runs": {**DIES, "errors": errors(*LOST)},
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_no_incident_about_a_running_job_if(name: str) -> None:
    assert judge(**HEALTHY[name]).truth is not Truth.BAD


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE"])
def test_a_normal_end_is_no_incident_whatever_the_log_says(state: str) -> None:
    assert judge_ended(*KEY_ERROR, *SUMMED_UP, state=state).truth is Truth.OK


@pytest.mark.parametrize("why", ["DUE TO PREEMPTION", "DUE TO JOB REQUEUE", "DUE TO TIME LIMIT", ""])
def test_log_error_takes_lines_during_an_outside_end_for_no_cause(why: str) -> None:
    line = f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T10:00:00 {why} ***"
    late = tuple((age_s - 10, text) for age_s, text in KEY_ERROR)
    view = job(job=slurm_job(restarts=1), progress=None, past=(past((43.0, line), *late, *LOST),))
    assert all(f.truth is not Truth.BAD for f in detect(cluster(view), CollectiveHang()))


def test_an_error_before_the_last_step_of_a_run_that_ended_is_none() -> None:
    assert judge_ended((70.0, "[rank1]: KeyError: 1")).truth is Truth.OK
    assert judge_ended((70.0, "[rank1]: KeyError: 1"), (30.0, "[rank2]: ValueError: x")).culprits[0].rank == 2


def from_other_logs(before_s: float, *after: str, step_log: str = "/l/rank_0.log") -> tuple[str, int | None] | None:
    """(pattern, rank) of the cause, where rank 3's own log had its error read so long before the last step was read, and
    `after` came after it in the log that has the steps."""
    read = [(NOW - 60.0 - before_s, "/l/rank_3.log", "n2", "[rank3]: KeyError: 1")]
    read += [(NOW - 59.0, "/l/rank_0.log", "n1", line) for line in after]
    errors = tuple(replace(logged_error(event(line), node, at), source=path) for at, path, node, line in read)
    cause = find_cause(past(errors=errors, step_log=step_log))
    return None if cause is None else (cause.pattern, cause.rank)


def test_the_cause_of_what_followed_the_last_step_may_have_been_read_before_it_in_another_log() -> None:
    lost = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.4]:3301"
    assert from_other_logs(4.0, lost) == ("python_exception", 3)
    assert from_other_logs(8.0, lost) == ("peer_lost", None)  # the training has made steps since
    assert from_other_logs(4.0, lost, step_log="/l/rank_3.log") == ("peer_lost", None)  # one log has an order
    assert from_other_logs(4.0, "[rank2]: ValueError: x") == ("python_exception", 2)
    assert from_other_logs(4.0) is None


def test_no_line_no_cause() -> None:
    assert find_cause(past()) is None
