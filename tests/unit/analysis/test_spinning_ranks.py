"""A rank that goes round in Python for ever: told after minutes if all of it is seen, and never where
anything is missing or looks like work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.detect.collective_hang import CollectiveHang, detect
from slurm_watchdog.detect.stalled_progress import StalledProgress
from slurm_watchdog.detect.stalled_progress import detect as detect_stalled
from slurm_watchdog.diagnose.stacks.spinning import follow, where
from slurm_watchdog.knowledge.stack_frames import WAITING, WORK, has_word
from slurm_watchdog.model.cluster_view import JobView, RankGpu
from slurm_watchdog.model.evidence import Frame, ProcessStack, ThreadStack
from slurm_watchdog.model.incidents import Finding, StackRequest, Truth
from slurm_watchdog.model.node_view import GpuView
from slurm_watchdog.model.observations import Checkpoint, Gpu, Role
from slurm_watchdog.model.past_runs import Steady
from tests.builders.views import RECV, cluster, job, progress, seen, snapshot, stack

NOW = 10_000.0
SPIN = ("train_epoch (t.py:88)", "main (t.py:12)", "<module> (t.py:140)")
Look = dict[str, Any]


def look(
    frames: Sequence[str] = SPIN, rank: int = 3, *, at_s: float = 0.0, gil: bool = True, cpu: float = 1.0, io_bytes: int | None = 5000,
    resident_bytes: int | None = 1 << 30,
) -> ProcessStack:  # fmt: skip
    """One dump of one rank, `at_s` after the first."""
    own = tuple(
        Frame(function=function, file=file, line=int(line.rstrip(")")))
        for function, place in (each.split(" (") for each in frames)
        for file, line in (place.rsplit(":", 1),)
    )
    thread = ThreadStack(thread_id=100 + rank, name="MainThread", active=True, frames=own, owns_gil=gil)
    odd = stack(rank, (), threads=(thread,), main_cpu_s=None, io_bytes=io_bytes, resident_bytes=resident_bytes)
    return replace(odd, cpu_s=50.0 + cpu * at_s)


def view(
    look_at: Callable[[float], ProcessStack] = lambda at_s: look(at_s=at_s), *, age_s: float = 330.0, rank: int = 3, **changes: Any
) -> JobView:  # fmt: skip
    """A job whose last step was `age_s` ago, with dumps every 9 s from 30 s on, and after three of them every
    minute."""
    times = [30.0, 39.0, 48.0]
    while times[-1] + 60.0 < age_s:
        times.append(times[-1] + 60.0)
    steady: dict[Any, Steady] = {}
    dumps = []
    for at_s in times:
        odd = look_at(at_s)
        steady = follow(steady, [odd], NOW - age_s + at_s)
        dumps.append(snapshot(age_s - at_s, [*(stack(r, RECV) for r in range(4) if r != odd.rank), odd]))
    processes = tuple(seen(r, cpu_ratio=1.0 if r == rank else 0.0, io_bytes_s=0.0) for r in range(4))
    given = {
        "progress": progress(age_s), "snapshots": tuple(dumps[-3:]), "steady": tuple(steady.values()), "processes": processes,
    }  # fmt: skip
    return job(**{**given, **changes})


def judge(of: JobView) -> Finding:
    (found,) = detect(cluster(of, now=NOW), CollectiveHang())
    return found


@pytest.mark.parametrize("frame", ["match (t.py:9)", "step (model/__init__.py:3)"])
def test_a_package_s_init_file_and_a_function_called_match_are_no_proof_of_work(frame: str) -> None:
    assert judge(view(lambda s: look([frame, *SPIN], at_s=s), age_s=1700.0)).truth is Truth.BAD


def test_spinning_rank_is_reported_after_five_minutes_with_its_line_and_not_acted_on() -> None:
    found = judge(view())
    assert (found.truth, found.actionable, [c.rank for c in found.culprits]) == (Truth.BAD, False, [3])
    assert "goes round in train_epoch (t.py:88): seen there 7 times within 4 min" in found.summary
    assert "3 ranks wait for it" in found.summary
    (other,) = detect_stalled(cluster(view(), now=NOW), StalledProgress(), CollectiveHang())
    assert other.truth is not Truth.BAD


def test_spinning_rank_is_acted_on_no_earlier_than_a_rank_that_works() -> None:
    assert [judge(view(age_s=age_s)).actionable for age_s in (1790.0, 1850.0)] == [False, True]


def test_spinning_rank_is_not_reported_before_the_limit() -> None:
    assert judge(view(age_s=290.0)).truth is Truth.UNKNOWN


def test_dumps_come_every_minute_while_a_rank_computes_and_the_others_wait() -> None:
    (wanted,) = judge(view(age_s=100.0)).wanted
    assert isinstance(wanted, StackRequest)
    assert wanted.later_s == pytest.approx(60.0)


@pytest.mark.parametrize(
    "lines",
    [
        ("poll (t.py:88)", "poll (t.py:89)", "poll (t.py:90)"),
        ("get_nowait (queue.py:199)|run_loop (t.py:60)", "run_loop (t.py:61)", "run_loop (t.py:60)"),
        ("It.__next__ (t.py:7)|drain (t.py:50)", "drain (t.py:50)", "drain (t.py:51)"),
        ("<genexpr> (t.py:20)|drain (t.py:20)", "drain (t.py:20)"),
        ("<module> (t.py:140)", "<module> (t.py:141)"),
    ],
)
def test_a_small_loop_may_go_over_several_lines_and_call_small_functions(lines: Sequence[str]) -> None:
    def at(at_s: float) -> ProcessStack:
        inner = lines[round(at_s) % len(lines)].split("|")
        return look([*inner, *(() if "<module>" in inner[-1] else SPIN[1:])], at_s=at_s)

    assert judge(view(at)).truth is Truth.BAD


@pytest.mark.parametrize(("state", "told"), [("R", True), ("S", False)])
def test_on_a_machine_with_too_few_cores_it_is_found_running_all_the_same(state: str, told: bool) -> None:
    """Forty processes on two cores: it gets a twentieth of one."""
    steady: dict[Any, Steady] = {}
    for number in range(7):
        starved = replace(look(at_s=60.0 * number, cpu=0.05), state=state)
        steady = follow(steady, [starved], 60.0 * number)
    assert [each.dumps for each in steady.values()] == [7 if told else 1]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_rank_of_a_node_may_well_have_something_to_do_alone(rank: int) -> None:
    def at(at_s: float) -> ProcessStack:
        return look(rank=rank, at_s=at_s)

    assert judge(view(at, rank=rank, age_s=880.0)).truth is Truth.UNKNOWN
    found = judge(view(at, rank=rank, age_s=940.0))
    assert (found.truth, [c.rank for c in found.culprits]) == (Truth.BAD, [rank])


def test_spinning_rank_in_a_function_named_for_waiting_is_reported_for_any_rank() -> None:
    def at(at_s: float) -> ProcessStack:
        return look(["wait_for_flag (t.py:9)", *SPIN[1:]], rank=0, at_s=at_s)

    assert judge(view(at, rank=0)).truth is Truth.BAD


WORKS: dict[str, Callable[[float], ProcessStack]] = {
    "builds an index: its memory grows": lambda s: look(at_s=s, resident_bytes=(1 << 30) + int(5e4 * s)),
    "gives memory back": lambda s: look(at_s=s, resident_bytes=(1 << 30) - int(5e4 * s)),
    "reads": lambda s: look(at_s=s, io_bytes=int(1e5 * s)),
    "prints a line every half minute": lambda s: look(at_s=s, io_bytes=80 * int(s / 20)),
    "a call of compiled code that lets the lock go": lambda s: look(at_s=s, gil=False),
    "a pool of threads computes": lambda s: look(at_s=s, cpu=6.0),
    "a large loop": lambda s: look([f"part{round(s) % 11} (t.py:{round(s)})", *SPIN], at_s=s),
    "far apart in one function": lambda s: look([f"train_epoch (t.py:{88 + round(s) % 7 * 9})", *SPIN[1:]], at_s=s),
    "a deep recursion": lambda s: look(["down (t.py:5)"] * (round(s) % 13) + list(SPIN), at_s=s),
    "one step after the other, without a line": lambda s: look([SPIN[0], f"main (t.py:{12 + round(s) % 3})", f"<module> (t.py:{140 + round(s) % 40})"], at_s=s),
    "an index by its name": lambda s: look(["build_sample_idx (helpers.py:40)", *SPIN], at_s=s),
    "a metric by its name": lambda s: look(["levenshtein (text.py:40)", *SPIN], at_s=s),
    "an evaluation further out": lambda s: look([*SPIN[:1], "evaluate (t.py:60)", *SPIN[1:]], at_s=s),
    "tokenizes": lambda s: look(["step (t.py:3)", "tokenize_all (t.py:9)", *SPIN[1:]], at_s=s),
    "sorts": lambda s: look(["sort_by_length (t.py:3)", *SPIN], at_s=s),
    "a regular expression": lambda s: look(["match (re.py:166)", *SPIN], at_s=s),
    "a regular expression of Python 3.11": lambda s: look(["match (re/__init__.py:166)", *SPIN], at_s=s),
    "compiles": lambda s: look(["compile_fx (torch/_inductor/compile_fx.py:166)", *SPIN], at_s=s),
    "json": lambda s: look(["JSONDecoder.raw_decode (json/decoder.py:353)", *SPIN], at_s=s),
    "saves": lambda s: look(["save_checkpoint (t.py:3)", *SPIN], at_s=s),
    "a file with a telling name": lambda s: look(["step (metrics.py:3)", *SPIN], at_s=s),
}  # fmt: skip


@pytest.mark.parametrize("doing", WORKS)
def test_a_rank_that_works_or_may_work_is_not_told(doing: str) -> None:
    assert judge(view(WORKS[doing], age_s=1700.0)).truth is not Truth.BAD


def busy_gpu(**changes: Any) -> RankGpu:
    given = {"node": "n2", "gpu": Gpu(uuid="GPU-3", index=1, utilization_ratio=0.0)}
    return RankGpu(rank=3, pid=103, view=GpuView(**{**given, **changes}))


OTHERWISE: dict[str, dict[str, Any]] = {
    "the log says that it saves": {"progress": progress(400.0, phase="checkpointing")},
    "files of a checkpoint grow": {"growing_age_s": 20.0},
    "a checkpoint is being written": {"checkpoints_on_disk": (Checkpoint(job_id="7", directory="/c", writing=True),)},
    "a stack showed that it saves": {"saving_age_s": 20.0},
    "a worker computes": {
        "processes": (*view().processes, seen(3, role=Role.WORKER, pid=900, cpu_ratio=0.9)),
    },
    "of a worker nothing is known": {"processes": (*view().processes, seen(3, role=Role.WORKER, pid=900))},
    "of its own process nothing is known": {"processes": tuple(seen(rank) for rank in range(4))},
    "its GPU computes": {"gpus": (busy_gpu(busy_since=NOW - 300.0),)},
    "its GPU idles since a moment only": {"gpus": (busy_gpu(idle_since=NOW - 60.0),)},
    "its GPU is not known, those of others are": {"gpus": (replace(busy_gpu(idle_since=NOW - 600.0), rank=1, pid=101),)},
    "its steps are long": {"progress": progress(330.0, intervals_s=(120.0,) * 9)},
    "a node is silent": {"silent_nodes": ("n2",)},
    "the last dump is old": {"steady": tuple(replace(each, last_at=NOW - 400.0) for each in view(age_s=800.0).steady)},
    "there are no dumps to speak of": {"steady": ()},
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERWISE)
def test_spinning_rank_is_cleared_by_any_contrary_or_missing_fact(what: str) -> None:
    assert judge(view(**OTHERWISE[what])).truth is not Truth.BAD


def test_an_idle_gpu_and_workers_that_rest_do_not() -> None:
    resting = seen(3, role=Role.WORKER, pid=900, cpu_ratio=0.0, io_bytes_s=0.0)
    found = judge(view(gpus=(busy_gpu(idle_since=NOW - 600.0),), processes=(*view().processes, resting)))
    assert found.truth is Truth.BAD


@given(
    st.lists(
        st.sampled_from(["io_bytes", "resident_bytes", "gil", "threads", "error", "gone"]), min_size=1, max_size=6
    ),
    st.sampled_from([330.0, 700.0, 1700.0]),
)  # fmt: skip
def test_a_dump_in_which_anything_is_missing_begins_it_anew(missing: list[str], age_s: float) -> None:
    """From the newest dump backwards: no matter which of what it needs is not there, what was seen before
    does not count."""

    def at(at_s: float) -> ProcessStack:
        one = look(at_s=at_s)
        back = int((age_s - at_s) // 60.0)
        lacks = missing[back] if back < len(missing) else ""
        if lacks in ("io_bytes", "resident_bytes"):
            return replace(one, **{lacks: None})
        if lacks == "gil":
            return replace(one, threads=(replace(one.threads[0], owns_gil=False),))
        if lacks == "threads":
            return replace(one, threads=())
        if lacks in ("error", "gone"):
            return replace(one, threads=(), error="the process has ended")
        return one

    assert set(missing[:4]) <= {"", "gil"} or "goes round" not in judge(view(at, age_s=age_s)).summary


@given(st.lists(st.integers(1, 400), min_size=6, max_size=40), st.integers(0, 3))
def test_a_program_that_wanders_over_many_lines_is_nobody_s_small_loop(lines: list[int], depth: int) -> None:
    """Whatever lines of whatever functions: more than twelve lines apart, or more than eight different
    stacks, and it begins anew."""
    steady: dict[Any, Steady] = {}
    for number, line in enumerate(lines):
        one = look(
            [*("f (t.py:1)",) * (line % (depth + 1)), f"train_epoch (t.py:{line})", *SPIN[1:]],
            at_s=60.0 * number,
        )
        steady = follow(steady, [one], 60.0 * number)
        (seen_now,) = steady.values()
        own = {stack[-3].line for stack in seen_now.stacks}
        assert max(own) - min(own) <= 12
        assert len(seen_now.stacks) <= 8


def test_spinning_rank_is_reported_with_the_programs_own_function() -> None:
    inner = ("Condition.__exit__ (threading.py:275)", "Queue.get (queue.py:165)", "drain (t.py:19)")
    (seen_now,) = follow({}, [look([*inner, *SPIN[1:]])], 0.0).values()
    assert where(seen_now) == "drain (t.py:19)"


@pytest.mark.parametrize("word", WORK)
def test_every_word_for_work_is_found_in_a_name(word: str) -> None:
    stem = word.rstrip("*")
    assert has_word(f"Trainer._do_{stem}_now", WORK)
    assert has_word(f"do{stem.capitalize()}2", WORK)
    assert has_word(f"{stem}xyz", WORK) is word.endswith("*") or has_word(f"{stem}xyz", tuple(set(WORK) - {word}))


@pytest.mark.parametrize("word", WAITING)
def test_every_word_for_waiting_is_found_and_is_none_for_work(word: str) -> None:
    name = f"_{word.rstrip('*')}_for_it"
    assert has_word(name, WAITING)
    assert not has_word(name, WORK)


@pytest.mark.parametrize(
    "name", ["<module>", "main", "train", "train_step", "training_loop", "run", "pretrain", "_step", "wait_ready", "poll_flag", "on_batch"]
)  # fmt: skip
def test_the_names_of_any_training_are_none_for_work(name: str) -> None:
    assert not has_word(name, WORK)
