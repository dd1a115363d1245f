"""Traces as somebody writes them who knows nothing but the format: some fields are missing, whole kinds of
lines may be."""

from __future__ import annotations

import pytest

from tests.builders.sparse_trace import JOB, Trace

AUTHORS = {
    "every field": (),
    "no lists of processes": ("gpu.pids",),
    "no reports": ("report",),
    "no power": ("gpu.power_w",),
    "no nodes' clocks": ("gpu.sm_clock_mhz", "gpu.mem_used_mib"),
}


@pytest.mark.parametrize("author", AUTHORS)
def test_the_rank_that_sleeps_while_all_others_spin_is_found_and_its_gpu_named(author: str) -> None:
    trace = Trace(AUTHORS[author])
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 6: "sleeps"}
    trace.go_on(130)
    (found,) = trace.told()
    assert found.kind == "collective_hang"
    assert [(c.node, c.rank, c.gpu_uuid) for c in found.culprits] == [("gpu002", 6, "GPU-6")]


@pytest.mark.parametrize("also", [(), ("gpu.pids",)])
def test_gpus_that_have_a_number_and_no_uuid_are_told_from_each_other(also: tuple[str, ...]) -> None:
    trace = Trace(("gpu.uuid", *also))
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 6: "sleeps"}
    trace.go_on(130)
    (found,) = trace.told()
    assert found.kind == "collective_hang"
    assert [(c.node, c.rank) for c in found.culprits] == [("gpu002", 6)]


@pytest.mark.parametrize("listed", [True, False])
def test_a_process_that_keeps_its_card_after_the_end_of_its_job_is_an_orphan(listed: bool) -> None:
    trace = Trace()
    trace.go_on(100, steps=True)
    trace.job("COMPLETED")
    trace.doing = dict.fromkeys(range(8), "sleeps")
    trace.freed = set(range(8)) - {5}
    trace.gone = trace.freed | (set() if listed else {5})
    trace.go_on(150)
    (found,) = trace.told()
    assert found.kind == "orphan_gpu_process"
    assert [(c.node, c.pid, c.gpu_uuid) for c in found.culprits] == [("gpu002", 41005, "GPU-5")]


@pytest.mark.parametrize("log", ["step={step} loss={loss}", "step {step} loss {loss} time {s:.2f}s"])
def test_a_loss_that_becomes_nan_is_that_and_no_stall(log: str) -> None:
    trace = Trace(log=log)
    trace.go_on(200, steps=True)
    trace.loss = "nan"
    trace.go_on(200, steps=True)
    assert [each.kind for each in trace.told()] == ["loss_nan"]


@pytest.mark.parametrize("author", AUTHORS)
@pytest.mark.parametrize("doing", ["saves", "computes"])
def test_sparse_trace_with_rank_0_working_names_no_culprit(author: str, doing: str) -> None:
    trace = Trace(AUTHORS[author])
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 0: doing}
    trace.go_on(600)
    trace.doing = dict.fromkeys(range(8), "trains")
    trace.go_on(60, steps=True)
    assert [(each.kind, each.summary) for each in trace.told()] == []


def test_a_job_that_ends_well_leaves_nobody_behind() -> None:
    trace = Trace()
    trace.go_on(200, steps=True)
    trace.job("COMPLETED")
    trace.gone = trace.freed = set(range(8))
    trace.go_on(150)
    assert trace.told() == []


def test_a_run_that_is_over_leaves_nobody_behind_who_was_listed_in_the_same_second() -> None:
    trace = Trace(("gpu.pids",))
    trace.go_on(200, steps=True)
    trace.job("CANCELLED")
    trace.gone = set(range(8))
    trace.go_on(300)
    assert trace.told() == []


def test_node_fail_names_the_node_that_fell_silent() -> None:
    trace = Trace()
    trace.go_on(200, steps=True)
    trace.job("NODE_FAIL")
    trace.gone = trace.freed = set(range(8))
    trace.go_on(100)
    found = {each.kind: each for each in trace.told()}
    assert [(c.node, c.rank) for c in found["node_down"].culprits] == [("gpu002", None)]
    assert found["node_down"].fired_at is not None
    assert found["node_down"].fired_at <= 245
    assert set(found) == {"node_down"}


@pytest.mark.parametrize("how", ["its GPU does not list it any more", "the kernel killed it", "it is missing"])
def test_a_rank_that_is_gone_is_told_within_ten_seconds(how: str) -> None:
    trace = Trace(("gpu.pids",) if how != "its GPU does not list it any more" else ())
    trace.go_on(200, steps=True)
    if how == "the kernel killed it":
        trace.say(
            "kmsg", node="gpu002",
            line="Memory cgroup out of memory: Killed process 41006 (python3) total-vm:9kB, "
                "anon-rss:9kB, file-rss:0kB, shmem-rss:0kB",
        )  # fmt: skip
    trace.gone = trace.freed = {6}
    trace.doing = {**dict.fromkeys(range(8), "spins"), 6: "sleeps"}
    trace.go_on(40)
    (found,) = trace.told()
    assert (found.kind, [(c.node, c.rank, c.pid) for c in found.culprits]) == (
        "memory_kill" if how == "the kernel killed it" else "dead_rank",
        [("gpu002", 6, 41006)],
    )
    assert found.fired_at is not None
    assert found.fired_at <= 210


def test_a_line_that_is_missing_now_and_then_makes_nobody_dead() -> None:
    trace = Trace(("gpu.pids",))
    for gap in range(12):
        trace.go_on(100, steps=True)
        trace.gone = {gap % 8}
        trace.go_on(5 * (1 + gap % 2), steps=True)
        trace.gone = set()
    assert trace.told() == []


def test_a_hang_is_found_without_a_line_about_any_gpu() -> None:
    trace = Trace(("gpu",))
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 3: "sleeps"}
    trace.go_on(400)
    (found,) = trace.told()
    assert (found.kind, found.actionable) == ("collective_hang", False)
    assert [(c.node, c.rank) for c in found.culprits] == [("gpu001", 3)]


def test_without_gpus_a_rank_that_never_computes_is_no_odd_one() -> None:
    trace = Trace(("gpu",))
    trace.doing = {**dict.fromkeys(range(8), "trains"), 3: "sleeps"}
    trace.go_on(300, steps=True)
    trace.go_on(600)
    assert trace.told() == []


@pytest.mark.parametrize("log", ["step={step} loss={loss}", "step {step} loss {loss}"])
def test_a_job_that_becomes_slow_is_found_by_the_dates_of_its_lines(log: str) -> None:
    trace = Trace(log=log)
    trace.go_on(600, steps=True)
    trace.slower = 1.08
    trace.go_on(600, steps=True)
    assert [each.kind for each in trace.told()] == ["slow_job"]


def test_lines_that_are_dated_when_they_were_read_say_nothing_about_the_time_of_a_step() -> None:
    trace = Trace(log="step={step} loss={loss}")
    for slower in (1.0, 1.3, 1.0, 1.3):
        trace.slower = slower
        trace.go_on(400, steps=True)
    for line in trace.lines:
        line["t"] = -(-line["t"] // 5) * 5
    assert trace.told() == []


@pytest.mark.parametrize(("doing", "told"), [("sleeps", ["stalled_progress"]), ("computes", [])])
def test_a_run_that_never_makes_its_first_step_is_told_if_nobody_works(doing: str, told: list[str]) -> None:
    trace = Trace(("report", "gpu.pids"))
    trace.every = 60.0
    trace.doing = {**dict.fromkeys(range(8), "sleeps"), 0: doing}
    trace.log("Starting training...")
    trace.go_on(6000)
    found = trace.told()
    assert [each.kind for each in found] == told
    assert all(5400 <= (each.fired_at or 0) <= 5600 and not each.actionable for each in found)


def test_lines_of_a_log_between_two_looks_at_gpus_are_no_looks_at_them() -> None:
    """One node has the log. Its cards are known no better than those of the other one, and no rank differs for that."""
    trace = Trace()
    trace.every = 60.0
    trace.go_on(900, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 6: "sleeps"}
    trace.go_on(400)
    (found,) = trace.told()
    assert (found.kind, [c.rank for c in found.culprits]) == ("collective_hang", [6])


def test_a_loss_that_is_no_number_any_more_is_told_also_where_json_has_no_word_for_it() -> None:
    trace = Trace(log='{{"step": {step}, "loss": {loss}}}')
    trace.go_on(200, steps=True)
    trace.loss = "NaN"
    trace.go_on(200, steps=True)
    assert [each.kind for each in trace.told()] == ["loss_nan"]


def test_where_nobody_tells_the_time_of_processes_those_that_ran_and_sleep_now_use_none() -> None:
    trace = Trace(("proc.cpu_s",))
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 6: "sleeps"}
    trace.go_on(200)
    (found,) = trace.told()
    assert (found.kind, [c.rank for c in found.culprits]) == ("collective_hang", [6])


@pytest.mark.parametrize("left_out", [("proc.cpu_s", "proc.state"), ("proc.cpu_s",)])
def test_a_process_that_is_said_to_sleep_all_the_time_says_nothing_by_it(left_out: tuple[str, ...]) -> None:
    """While rank 0 saves, and its author writes S for everybody."""
    trace = Trace(left_out)
    trace.states = dict.fromkeys(range(8), "S")
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 0: "saves"}
    trace.go_on(900)
    assert trace.told() == []


def test_a_node_of_which_only_the_log_is_told_does_not_fall_silent_with_it() -> None:
    trace = Trace(("proc", "gpu", "report"))
    trace.go_on(300, steps=True)
    trace.log("[rank5]: RuntimeError: CUDA error: an illegal memory access was encountered")
    trace.t += 300
    trace.job("FAILED")
    assert [(each.kind, [c.rank for c in each.culprits]) for each in trace.told()] == [("log_error", [5])]


def test_the_idle_gpu_is_the_rank_s_that_has_its_place_where_no_line_has_a_pid() -> None:
    trace = Trace(("gpu.pids", "proc.pid"))
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 6: "sleeps"}
    trace.go_on(100)
    (found,) = trace.told()
    assert (found.kind, [(c.node, c.rank, c.pid, c.gpu_uuid) for c in found.culprits]) == (
        "collective_hang",
        [("gpu002", 6, None, "GPU-6")],
    )


def test_a_rank_that_is_listed_as_stopped_again_and_again_is_stopped_since_the_first_time() -> None:
    trace = Trace()
    trace.go_on(200, steps=True)
    trace.doing, trace.states = {**dict.fromkeys(range(8), "spins"), 3: "sleeps"}, {3: "T"}
    trace.go_on(100)
    (found,) = trace.told()
    assert (found.kind, [c.rank for c in found.culprits]) == ("rank_stopped", [3])


@pytest.mark.parametrize("every_s", [60, 4000])
def test_a_rank_that_hangs_in_a_checkpoint_is_found_when_nobody_says_any_more_that_it_is_written(
    every_s: int,
) -> None:
    trace = Trace()
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 0: "saves"}
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


def test_a_file_without_its_mount_is_on_the_topmost_directory() -> None:
    trace = Trace()
    trace.go_on(200, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 3: "sleeps"}
    began = trace.t
    while trace.t < began + 150:
        trace.go_on(5)
        for line in trace.lines[-20:]:
            if line["kind"] == "proc" and line["rank"] == 3 and line["t"] > began:
                line.update(state="D", state_age_s=line["t"] - began, syscall="write", path="/gpfs/run/log.txt")
    (found,) = trace.told()
    assert (found.kind, found.mounts, [c.rank for c in found.culprits]) == (
        "filesystem_stall",
        ("/gpfs",),
        [3],
    )


@pytest.mark.parametrize("path", ["/dev/nvidia3", "pipe:[4711]", "/proc/41003/status", "socket:[99]"])
def test_sparse_trace_path_outside_a_disk_has_no_mount(path: str) -> None:
    trace = Trace()
    trace.go_on(300, steps=True)
    for line in trace.lines:
        if line["kind"] == "proc" and line["rank"] == 3:
            line.update(state="S", state_age_s=line["t"], syscall="read", path=path)
    assert trace.told() == []


def test_a_launcher_that_starts_all_ranks_anew_gives_them_the_time_of_a_start() -> None:
    """torchrun: one worker fails, all are ended, all are started again, within the same run of the job."""
    trace = Trace()
    trace.go_on(300, steps=True)
    trace.gone = trace.freed = set(range(8))
    trace.go_on(15)
    trace.gone, trace.freed = set(), set()
    began, trace.step = trace.t, trace.step - 8
    trace.doing = dict.fromkeys(range(8), "sleeps")
    trace.go_on(200)
    trace.doing = dict.fromkeys(range(8), "trains")
    trace.go_on(100, steps=True)
    for line in trace.lines:
        if line["t"] > began and line["kind"] == "proc":
            line["pid"] += 500
        elif line["t"] > began and line["kind"] == "gpu":
            line["pids"] = [pid + 500 for pid in line["pids"]]
    assert [(each.kind, each.summary) for each in trace.told()] == []
