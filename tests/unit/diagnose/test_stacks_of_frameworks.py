"""Stacks as frameworks and tools write them: which process is a rank, whom the others wait for, and who only waits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slurm_watchdog.cli.main import main
from slurm_watchdog.diagnose.stacks.case import Options
from slurm_watchdog.diagnose.stacks.verdict import StackVerdict, diagnose_dumps
from slurm_watchdog.parse.stacks.text import parse_stacks
from tests.builders.stacks import BARRIER, C10D, EVALUATE, LOADER, REDUCE, TAIL, dumps_of, text_of

HOUR = 3600.0
GATHERS = ("all_gather_into_tensor (deepspeed/comm/comm.py:305)", "all_gather_coalesced (deepspeed/runtime/zero/partition_parameters.py:1250)", "fetch_sub_module (deepspeed/runtime/zero/partitioned_param_coordinator.py:386)", *TAIL)  # fmt: skip


def judged(*places: Sequence[str], since: float = HOUR) -> StackVerdict:
    return diagnose_dumps(dumps_of(places), Options(since_last_step_s=since, typical_step_s=3))


def said(found: StackVerdict) -> tuple[str, list[int | None]]:
    return found.cls, [each.rank for each in found.culprits]


@pytest.mark.parametrize(
    ("odd", "since", "cls", "named"),
    [
        (("exists (<frozen genericpath>:19)", "wait_for_file (data.py:3)", *TAIL), 300, "filesystem", [1]),
        (("synchronize (torch/cuda/__init__.py:1)", "do_bench (triton/testing.py:150)", *TAIL), 300, "compilation", []),
        (("synchronize (torch/cuda/streams.py:1)", "_async_wait (torchtitan/components/checkpoint.py:5)", *TAIL), 300, "checkpoint", []),
        (("wait (threading.py:3)", "get (multiprocessing/pool.py:768)", "encode (prepare.py:6)", *TAIL), 300, "subprocess", [1]),
        (("synchronize_reads (deepspeed/runtime/swap_tensor/partitioned_param_swapper.py:200)", *GATHERS[1:]), 300, "filesystem", [1]),
        (EVALUATE, 2 * HOUR, "evaluation", [1]),
    ],
)  # fmt: skip
def test_what_a_rank_is_about_decides_over_the_call_in_which_it_waits(
    odd: Sequence[str], since: float, cls: str, named: list[int]
) -> None:
    assert said(judged(GATHERS, odd, GATHERS, GATHERS, since=since)) == (cls, named)


def test_a_collective_that_a_library_makes_out_of_others_is_no_mismatch() -> None:
    assert said(judged(GATHERS, GATHERS[1:], GATHERS, GATHERS)) == ("collective", [])
    assert said(judged(GATHERS, BARRIER, GATHERS, GATHERS)) == ("collective_mismatch", [1])


def test_those_that_wait_in_a_call_without_a_name_are_described() -> None:
    solver = ("step (solver.py:80)", "<module> (solver.py:120)")
    assert judged(solver, LOADER, solver, solver).summary.endswith("and 3 ranks stand in step (solver.py:80).")
    backward = ("_engine_run_backward (torch/autograd/graph.py:744)", *TAIL)
    assert "than the 3 others (the backward pass)" in judged(backward, BARRIER, backward, backward).summary


def test_the_only_dump_of_a_rank_is_that_rank_whatever_it_runs() -> None:
    other = ("read (shard.py:5)", "main (convert.py:30)", "<module> (convert.py:52)")
    assert said(judged(REDUCE, other, REDUCE, REDUCE)) == ("filesystem", [1])


RAY_GET = ("get_objects (ray/_private/worker.py:898)", "get (ray/_private/worker.py:2846)")
RAY_WORKER = ("main_loop (ray/_private/worker.py:935)", "<module> (ray/_private/workers/default_worker.py:297)")


def ray(*places: Sequence[str]) -> StackVerdict:
    """Processes of Ray without ranks."""
    text = "".join(text_of(0, frames, pid=900 + i).partition("\n")[2] for i, frames in enumerate(places))
    return diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR))


def test_a_driver_that_waits_for_its_workers_is_no_rank_and_a_worker_that_waits_for_its_data_is() -> None:
    driver = (*RAY_GET, "fit (verl/trainer/ppo/ray_trainer.py:1100)", *RAY_WORKER)
    reduces = (f"all_reduce ({C10D}:2806)", "update_actor (verl/workers/fsdp_workers.py:610)", *RAY_WORKER)
    starved = (*RAY_GET, "next_batch (data.py:3)", *reduces[1:])
    assert ray(driver, reduces, reduces, reduces).culprits == ()
    assert dict(ray(driver, reduces, reduces, reduces).others) == {"a driver of Ray": 1}
    assert [each.pid for each in ray(reduces, starved, reduces, reduces).culprits] == [901]


FAULT = 'Thread 0x00007f5c3bfff640 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 331 in wait\n  File "/x/tqdm/_monitor.py", line 60 in run\n  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\nThread 0x00007f5c3c000740 (most recent call first):\n'  # fmt: skip


def fault(frames: Sequence[str], ends: str) -> str:
    lines = [frame[:-1].replace(" (", ":").rsplit(":", 2) for frame in frames[:-1]]
    return FAULT + "".join(f'  File "{file}", line {line} in {name}\n' for name, file, line in lines) + ends


def pystack(frames: Sequence[str]) -> str:
    lines = [frame[:-1].replace(" (", ":").rsplit(":", 2) for frame in reversed(frames)]
    begin = 'Traceback for thread 9 (python) [] (most recent call last):\n    (C) File "???", line 0, in _start (/usr/bin/python3.11)\n'  # fmt: skip
    return begin + "".join(f'    (Python) File "{file}", line {line}, in {name}\n' for name, file, line in lines)


@pytest.mark.parametrize("kind", ["python -m, of faulthandler", "pystack, with native frames"])
def test_the_main_thread_is_known_by_how_its_program_began(kind: str) -> None:
    ends = '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main\n'
    texts = [pystack(each) if "pystack" in kind else fault(each, ends) for each in (REDUCE, LOADER, REDUCE, REDUCE)]
    text = "".join(f"=== rank {rank} ===\n{each}" for rank, each in enumerate(texts))
    assert said(diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR))) == ("dataloader", [1])


def py_spy(pid: int, frames: Sequence[str], *, indent: int | None = None) -> str:
    names = [frame[:-1].replace(" (", ":").rsplit(":", 2) for frame in frames]
    listed = [{"name": name, "filename": file, "line": int(line)} for name, file, line in names]
    thread = {"pid": pid, "os_thread_id": pid, "thread_name": "MainThread", "active": False, "frames": listed}
    return json.dumps([thread], indent=indent) + "\n"


def mixed(texts: Sequence[str], prefixes: Sequence[str]) -> str:
    """The lines of all in turn, each behind its prefix, as `srun --label` and `pdsh` print them."""
    lines = [
        [f"{prefix}: {line}\n" for line in text.splitlines()] for text, prefix in zip(texts, prefixes, strict=True)
    ]
    longest = max(map(len, lines))
    return "".join(each[i] for i in range(longest) for each in lines if i < len(each))


PLACES = (BARRIER, BARRIER, LOADER, BARRIER)
NODES = ("gpu01", "gpu02", "gpu03", "gpu04")
PLAIN = tuple(text_of(0, frames, pid=40 + i).partition("\n")[2] for i, frames in enumerate(PLACES))


@pytest.mark.parametrize(
    ("files", "culprit"),
    [
        ({"out.txt": mixed([py_spy(40 + i, f, indent=2) for i, f in enumerate(PLACES)], "0123")}, {"rank": 2, "host": None, "pid": 42}),
        ({"out.txt": mixed([py_spy(40 + i, f) for i, f in enumerate(PLACES)], NODES)}, {"rank": None, "host": "gpu03", "pid": 42}),
        ({"out.txt": "".join(f"-----\n{n}\n-----\n{t}" for n, t in zip(NODES, PLAIN, strict=True))}, {"rank": None, "host": "gpu03", "pid": 42}),
        ({"out.txt": f"----\ngpu[01-02,04] (3)\n----\n{PLAIN[0]}----\ngpu03\n----\n{PLAIN[2].replace('42', '40')}"}, {"rank": None, "host": "gpu03", "pid": 40}),
        ({f"attempt_0/{i}/stderr.log": t.replace("Process", "# ", 1) for i, t in enumerate(PLAIN)}, {"rank": 2, "host": None, "pid": 42}),
        ({f"trace-gpu{i}.out": PLAIN[0] + t.replace("4", "5") for i, t in enumerate(PLAIN)}, {"rank": None, "host": "gpu2", "pid": 52}),
    ],
    ids=["JSON, srun --label", "JSON, pdsh", "clush -b", "clush -b, merged", "torchrun --redirects", "a file a node"],
)  # fmt: skip
def test_who_is_named_by_what_stands_around_a_dump(tmp_path: Path, files: dict[str, str], culprit: Any) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(main, ["group-stacks", str(tmp_path), "--json"])
    found = [{key: each[key] for key in culprit} for each in json.loads(result.stdout)["culprits"]]
    assert (result.exit_code, found) == (1, [culprit])


def test_files_in_which_nothing_could_be_read_are_not_called_fine(tmp_path: Path) -> None:
    (tmp_path / "rank_0.txt").write_bytes(bytes(range(128, 256)) * 9)
    (tmp_path / "rank_1.txt").write_text("")
    result = CliRunner().invoke(main, ["group-stacks", str(tmp_path)])
    assert result.exit_code == 2
    assert "None of 2 processes could be dumped (its file holds no stack; its file is empty)" in result.output
