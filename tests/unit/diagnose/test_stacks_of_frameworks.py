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
from slurm_watchdog.diagnose.stacks.ranks import no_rank
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
        ({"out.txt": mixed(PLAIN, [f"[1,{i}]<stdout>" for i in range(4)])}, {"rank": 2, "host": None, "pid": 42}),
        ({f"rank_{i}.log": "".join(f"2026-11-26T10:00:01.5Z {line}\n" for line in t.splitlines()) for i, t in enumerate(PLAIN)}, {"rank": 2, "host": None, "pid": 42}),
        ({"mail.txt": "".join(f"> rank {i}:\n" + "".join(f"> {line}\n" for line in t.splitlines()) for i, t in enumerate(PLAIN))}, {"rank": 2, "host": None, "pid": 42}),
        ({f"trace-gpu{i}.out": PLAIN[0] + t.replace("4", "5") for i, t in enumerate(PLAIN)}, {"rank": None, "host": "gpu2", "pid": 52}),
    ],
    ids=["JSON, srun --label", "JSON, pdsh", "clush -b", "clush -b, merged", "torchrun --redirects", "mpirun --tag-output", "times", "a letter", "a file a node"],
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


BROADCASTS = (f"broadcast ({C10D}:1191)", "sync_buffers (model.py:4)", *TAIL)


@pytest.mark.parametrize(("since", "named"), [(None, []), (HOUR, [0])])
def test_the_root_of_a_broadcast_may_be_ahead_for_a_moment(since: float | None, named: list[int]) -> None:
    dumps = dumps_of((REDUCE, BROADCASTS, BROADCASTS, BROADCASTS))
    assert said(diagnose_dumps(dumps, Options(since_last_step_s=since)))[1] == named


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        ("Failed to find python version from target process", "undumpable"),
        ("No such process (os error 3)", "missing_rank"),
    ],
)
def test_a_shell_that_has_the_scripts_name_in_its_command_is_no_rank(error: str, cls: str) -> None:
    """`pgrep -f train.py` lists it, too; a rank that has ended is one that its number names."""
    text = "".join(f"=== n{i} ===\n{PLAIN[0]}" for i in range(3))
    assert diagnose_dumps(parse_stacks(f"{text}Error: {error}\n"), Options(since_last_step_s=HOUR)).culprits == ()
    numbered = "".join(text_of(rank, BARRIER) for rank in range(3)) + f"=== rank 3 ===\nError: {error}\n"
    assert said(diagnose_dumps(parse_stacks(numbered), Options(since_last_step_s=HOUR))) == (cls, [3])


def test_one_process_too_many_that_could_not_be_dumped_is_no_suspect() -> None:
    text = "".join(text_of(rank, BARRIER) for rank in range(3)) + "=== n9 ===\nProcess 7: tool\nError: timed out\n"
    assert diagnose_dumps(parse_stacks(text), Options(ranks=3, since_last_step_s=HOUR)).culprits == ()


def test_a_step_that_runs_an_event_loop_waits_there_and_no_helper_thread_is_shown() -> None:
    loop = ("select (selectors.py:468)", "_run_once (asyncio/base_events.py:1960)", "run (asyncio/runners.py:118)", "score (reward.py:20)", *TAIL)  # fmt: skip
    monitor = 'Thread 77 (idle): "Thread-1"\n    wait (threading.py:331)\n    run (tqdm/_monitor.py:60)\n    _bootstrap (threading.py:1002)\n'  # fmt: skip
    text = "".join(text_of(r, REDUCE) for r in range(3)) + text_of(3, loop) + monitor
    assert "in score (reward.py:20)" in diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR)).summary
    opens_a_pipe = 'Thread 78 (idle): "dumps"\n    write_dumps (trainer.py:31)\n    run (threading.py:1012)\n    _bootstrap (threading.py:1002)\n'  # fmt: skip
    text = text.replace(monitor, opens_a_pipe)
    assert "in score (reward.py:20)" in diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR)).summary


def test_dumps_of_the_flight_recorder_are_no_stacks_and_it_is_said_who_reads_them(tmp_path: Path) -> None:
    for rank, kind in enumerate(("missing/trace_0", "missing_json/trace_1.json")):
        data = (Path(__file__).parents[2] / "captures/flight_recorder" / kind).read_bytes()
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    result = CliRunner().invoke(main, ["group-stacks", str(tmp_path)])
    assert result.exit_code == 2
    assert "2 files are dumps of PyTorch's Flight Recorder: slurm-watchdog diagnose DIRECTORY" in result.output


def test_a_process_that_faulthandler_saw_end_is_crashing() -> None:
    fatal = f"=== rank 1 ===\nFatal Python error: Segmentation fault\n\n{FAULT.replace('Thread 0x00007f5c3b', 'Current thread 0x00007f5c3b')}"
    text = "".join(text_of(rank, BARRIER) for rank in (0, 2, 3)) + fatal + '  File "train.py", line 9 in <module>\n'
    assert said(diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR))) == ("crash", [1])


RUNS = ("forward (model.py:20)", "_call_impl (torch/nn/modules/module.py:1762)")


@pytest.mark.parametrize(
    "library",
    [
        ("forward_one_chunk (torch/distributed/pipelining/stage.py:700)", "_step_microbatches (torch/distributed/pipelining/schedules.py:700)"),
        ("forward (deepspeed/runtime/activation_checkpointing/checkpointing.py:600)", "checkpoint (deepspeed/runtime/activation_checkpointing/checkpointing.py:700)"),
        ("forward (transformer_engine/pytorch/distributed.py:300)", "checkpoint (transformer_engine/pytorch/distributed.py:700)"),
        ("wrapper (horovod/common/elastic.py:150)",),
        ("run_command_line (mpi4py/run.py:47)", "main (mpi4py/run.py:190)"),
        ("call_original (mlflow/utils/autologging_utils/safety.py:500)",),
        ("run (torch/_inductor/compile_fx.py:1024)", "__call__ (torch/_inductor/codecache.py:906)"),
    ],
)  # fmt: skip
def test_a_rank_that_a_library_called_back_runs_and_waits_for_nobody(library: Sequence[str]) -> None:
    assert said(judged(REDUCE, (*RUNS, *library, *TAIL), REDUCE, REDUCE, since=600)) == ("working", [1])


def test_a_compiler_is_known_however_deep_in_its_expressions() -> None:
    deep = (*["subs (sympy/core/basic.py:1)"] * 30, "codegen (torch/_inductor/scheduler.py:2000)", *TAIL)
    assert said(judged(REDUCE, deep, REDUCE, REDUCE, since=600)) == ("compilation", [])


def test_one_snapshot_of_a_sample_that_is_read_in_the_process_itself_proves_nothing() -> None:
    decodes = (
        "load (PIL/ImageFile.py:293)",
        "__getitem__ (data.py:5)",
        "fetch (torch/utils/data/_utils/fetch.py:52)",
        *TAIL,
    )
    for since, named in ((None, []), (HOUR, [1])):
        dumps = dumps_of((REDUCE, decodes, REDUCE, REDUCE))
        assert said(diagnose_dumps(dumps, Options(since_last_step_s=since))) == ("filesystem", named)


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("python -u run_clm.py --report_to tensorboard --output_dir out", ""),
        ("python3.12 -X dev train.py --strategy deepspeed --launcher srun --env jupyter", ""),
        ("/opt/env/bin/python /data/jupyter/train.py --log ray/dashboard", ""),
        ("/usr/bin/python3 -u -m torch.distributed.run --nproc-per-node 8 train.py", "a launcher"),
        ("/usr/bin/python /opt/env/bin/torchrun train.py", "a launcher"),
        ("/usr/bin/python /opt/env/bin/jupyter-lab", "a service"),
        ("py-spy dump --pid 7", "a service"),
        ("python -c from multiprocessing.resource_tracker import main;main(7)", "a resource tracker"),
    ],
)
def test_what_a_process_is_its_program_tells_and_not_its_arguments(command: str, what: str) -> None:
    (dump,) = parse_stacks(text_of(0, REDUCE).replace("python -u pretrain.py", command))
    assert no_rank(dump) == what


@pytest.mark.parametrize("frame", ["write (memory.py:20)", "flush (metrics.py:3)", "take_block (cache.py:3)", "all_gather (ring_attention.py:1)"])  # fmt: skip
def test_one_snapshot_of_a_function_that_only_has_such_a_name_proves_nothing(frame: str) -> None:
    dumps = dumps_of((REDUCE, (frame, "forward (model.py:3)", *TAIL), REDUCE, REDUCE))
    assert diagnose_dumps(dumps).culprits == ()
    assert [each.rank for each in diagnose_dumps(dumps, Options(since_last_step_s=HOUR)).culprits] == [1]


DESTROY = ("destroy_process_group (torch/distributed/distributed_c10d.py:2150)", "<module> (pretrain.py:9)")


def test_one_rank_in_a_collective_keeps_those_waiting_that_shut_down() -> None:
    found = judged(DESTROY, DESTROY, REDUCE, DESTROY, DESTROY)
    assert said(found) == ("teardown", [2])
    assert "waits in a collective" in found.summary
    assert said(judged(REDUCE, REDUCE, DESTROY, REDUCE)) == ("teardown", [2])


def test_who_waits_for_the_engine_that_generates_for_it_may_take_its_time() -> None:
    rollout = ("wait (threading.py:331)", "get_output (vllm/v1/engine/core_client.py:680)", "generate (vllm/entrypoints/llm.py:400)", *TAIL)  # fmt: skip
    assert said(judged(REDUCE, rollout, REDUCE, REDUCE, since=900))[1] == []
    assert said(judged(REDUCE, rollout, REDUCE, REDUCE, since=HOUR))[1] == [1]


def test_a_worker_that_ray_keeps_for_the_next_task_is_no_rank_beside_ranks() -> None:
    idle = ("main_loop (ray/_private/worker.py:968)", "<module> (ray/_private/workers/default_worker.py:320)")
    text = "".join(text_of(rank, REDUCE) for rank in range(4))
    text += text_of(9, idle).replace("=== rank 9 ===", "=== pid 40009 ===")
    found = diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR))
    assert found.others == (("an idle worker of Ray", 1),)
    assert not found.culprits


@pytest.mark.parametrize(
    ("call", "cls"),
    [
        ("c10d::ProcessGroupNCCL::~ProcessGroupNCCL()", "teardown"),
        ("ncclCommAbort", "teardown"),
        ("MPI_Finalize", "teardown"),
        ("nvshmem_finalize", "teardown"),
    ],
)
def test_a_library_that_ends_its_communicators_is_in_no_collective(call: str, cls: str) -> None:
    wait = "pthread_cond_wait (libc.so.6)"
    waits = (wait, "ncclAllReduce (libnccl.so.2)", "step (train.py:2)", "<module> (train.py:3)")
    ends = (wait, f"{call} (libnccl.so.2)", "close (train.py:2)", "<module> (train.py:3)")
    assert said(judged(waits, waits, ends, waits, waits)) == (cls, [2])


IN_FUTEX = "[<0>] futex_wait_queue+0x66/0x90\n[<0>] do_syscall_64+0x55/0x80\n"
IN_LUSTRE = "[<0>] cl_sync_io_wait+0x1c2/0x2f0 [obdclass]\n[<0>] ll_fsync+0x1d0/0x3a0 [lustre]\n[<ffffffffffffffff>] 0xffffffffffffffff\n"
IN_NVIDIA = "[<0>] os_acquire_rwlock_write+0x35/0x50 [nvidia]\n[<0>] rm_ioctl+0x54/0xb0 [nvidia]\n"
IN_USER_MODE = "[<ffffffffffffffff>] 0xffffffffffffffff\n"


@pytest.mark.parametrize(
    ("stacks", "since", "expected"),
    [
        ((IN_FUTEX, IN_FUTEX, IN_LUSTRE, IN_USER_MODE), HOUR, (True, "filesystem", [40002])),
        ((IN_FUTEX, IN_FUTEX, IN_LUSTRE, IN_USER_MODE), 900, (False, "lock", [])),
        ((IN_FUTEX, IN_NVIDIA, IN_USER_MODE, IN_USER_MODE), 900, (True, "device_wait", [40001])),
        ((IN_FUTEX, IN_FUTEX, IN_LUSTRE, IN_LUSTRE), HOUR, (False, "filesystem", [])),
        ((IN_FUTEX, IN_FUTEX, IN_FUTEX, IN_LUSTRE), None, (False, "lock", [])),
    ],
)
def test_the_few_that_a_filesystem_or_a_driver_holds_in_the_kernel_are_named(
    stacks: Sequence[str], since: float | None, expected: tuple[bool, str, list[int]]
) -> None:
    text = "".join(f"==> /proc/{40000 + i}/stack <==\n{stack}\n" for i, stack in enumerate(stacks))
    found = diagnose_dumps(parse_stacks(text), Options(since_last_step_s=since))
    assert found.dumped == len(stacks)
    assert (found.is_hang, found.cls, [each.pid for each in found.culprits]) == expected
