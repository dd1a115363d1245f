"""Stacks as people send them: every tool, every prefix, prose around, cut short, and garbage."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.diagnose.stacks.ranks import assign_ranks
from slurm_watchdog.diagnose.stacks.verdict import diagnose_dumps
from slurm_watchdog.parse.stacks.frame_lines import parse_frame
from slurm_watchdog.parse.stacks.headers import (
    Dump,
    DumpHeader,
    header_of_command,
    header_of_file,
    parse_header,
    parse_prefix,
)
from slurm_watchdog.parse.stacks.text import parse_stacks

SPY = """Process 4711: /opt/env/bin/python -u train.py --local_rank 3
Python v3.10.12 (/opt/env/bin/python3.10)

Thread 4711 (active): "MainThread"
    barrier (torch/distributed/distributed_c10d.py:2784)
    <lambda> (train.py:40)
    <module> (train.py:90)
Thread 4790 (idle): "Thread-1 (run)"
    wait (threading.py:306)
Thread 4791 (active+gil)
"""


def the_one(text: str) -> Dump:
    (dump,) = parse_stacks(text)
    return dump


def calls(dump: Dump, thread: int = 0) -> list[str]:
    return [frame.function for frame in dump.threads[thread].frames]


def test_py_spy_text() -> None:
    dump = the_one(SPY)
    assert (dump.pid, dump.command) == (4711, "/opt/env/bin/python -u train.py --local_rank 3")
    assert calls(dump) == ["barrier", "<lambda>", "<module>"]
    assert [(t.thread_id, t.name, t.active, t.owns_gil) for t in dump.threads] == [
        (4711, "MainThread", True, False),
        (4790, "Thread-1 (run)", False, False),
        (4791, "", True, True),
    ]


def test_arguments_and_locals_are_no_frames() -> None:
    text = SPY.replace(
        "    <lambda> (train.py:40)\n",
        "        Arguments:\n            group: <Group (a.py:1)>\n        Locals:\n            x: 1\n    "
        "<lambda> (train.py:40)\n",
    )
    assert calls(the_one(text)) == ["barrier", "<lambda>", "<module>"]


def test_native_frames() -> None:
    text = (
        'Thread 7 (active): "MainThread"\n    pthread_cond_wait@@GLIBC_2.3.2 (libpthread-2.31.so)\n   '
        " c10d::Work::wait(std::chrono::duration<long>) (libtorch.so)\n    0x7f00 (libcuda.so.525)\n    "
        "train (train.py:3)\n"
    )
    assert calls(the_one(text))[1:] == [
        "c10d::Work::wait(std::chrono::duration<long>)",
        "0x7f00",
        "train",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: f"We see this:\n\n```\n{text}```\n\nand it hangs (see train.py:3).\n",
        lambda text: "".join(f"n1: {line}\n" for line in text.splitlines()),
        lambda text: "".join(f"12: {line}\n" for line in text.splitlines()),
        lambda text: "".join(f"[rank3]: {line}\n" for line in text.splitlines()),
        lambda text: "".join(
            f"\x1b[1mThread\x1b[0m{line[6:]}\n" if line.startswith("Thread") else line + "\n" for line in text.splitlines()
        ),
    ],
)  # fmt: skip
def test_parse_stacks_ignores_text_around_the_lines(change) -> None:
    dump = the_one(change(SPY))
    assert (dump.pid, calls(dump)) == (4711, ["barrier", "<lambda>", "<module>"])


def test_lines_of_two_nodes_that_interleave_are_put_together() -> None:
    other = SPY.replace("4711", "5822").replace("barrier", "broadcast")
    mixed = "".join(f"n1: {a}\nn2: {b}\n" for a, b in zip(SPY.splitlines(), other.splitlines(), strict=True))
    found = {dump.header.host: (dump.pid, calls(dump)[0]) for dump in parse_stacks(mixed)}
    assert found == {"n1": (4711, "barrier"), "n2": (5822, "broadcast")}


def test_a_main_thread_begins_a_new_process_where_no_header_does() -> None:
    text = (
        'Thread 7 (idle): "MainThread"\n    f (a.py:1)\nThread 9 (idle): "Thread-1"\n    g (a.py:2)\n'
        'Thread 8 (idle): "MainThread"\n    h (a.py:3)\n'
    )
    assert [(dump.pid, len(dump.threads)) for dump in parse_stacks(text)] == [(7, 2), (8, 1)]


def test_main_threads_written_one_below_the_other_share_the_frames_that_follow() -> None:
    text = (
        'Thread 7 (active): "MainThread"\nThread 8 (active): "MainThread"\n    barrier '
        "(torch/distributed/distributed_c10d.py:1)\n"
    )
    assert [(dump.pid, calls(dump)) for dump in parse_stacks(text)] == [(7, ["barrier"]), (8, ["barrier"])]


def test_threads_without_a_name_and_without_frames_share_nothing() -> None:
    text = (
        'Thread 7 (active): "MainThread"\n    f (a.py:1)\nThread 71 (idle)\nThread 72 (active)\n    '
        "all_gather (b.py:2)\n"
    )
    assert [len(thread.frames) for thread in the_one(text).threads] == [1, 0, 1]


def test_faulthandler() -> None:
    text = (
        "Timeout (0:01:00)!\n"
        'Thread 0x00007f1c (most recent call first):\n  File "/usr/lib/python3.10/threading.py", line 320 in wait\n\n'
        'Thread 0x00007f2c [MainThread] (most recent call first):\n  File "/x/t.py", line 4 in step\n  '
        'File "/x/t.py", line 9 in <module>\n'
    )
    dump = the_one(text)
    assert (calls(dump, 0), calls(dump, 1)) == (["wait"], ["step", "<module>"])


def test_gdb_s_word_of_a_function_in_c_ends_no_stack() -> None:
    text = (
        "(gdb) py-bt\nTraceback (most recent call first):\n  <built-in method acquire of _thread.lock "
        "object at remote 0x7f>\n"
        '  File "/usr/lib/python3.12/threading.py", line 355, in wait\n    waiter.acquire()\n  File '
        '"/x/t.py", line 9, in <module>\n    main()\n'
    )
    assert calls(the_one(text)) == ["wait", "<module>"]


def test_two_processes_of_faulthandler_one_after_the_other() -> None:
    one = (
        'Thread 0x01 (most recent call first):\n  File "/x/w.py", line 3 in run\n\nCurrent thread 0x02 '
        '(most recent call first):\n  File "/x/t.py", line 9 in <module>\n\n'
    )
    assert [len(dump.threads) for dump in parse_stacks(one + one)] == [2, 2]


def test_gdb_with_python_frames_and_where_the_source_stands_on_the_next_line() -> None:
    text = """(gdb) thread apply all bt
Thread 2 (Thread 0x7f1 (LWP 4712) "python"):
#0  0x00007f in poll () from /lib64/libc.so.6
#1  0x00007e in c10d::Watchdog::run() ()
   from /opt/torch/lib/libtorch.so
Thread 1 (Thread 0x7f0 (LWP 4711) "python"):
#0  __libc_write (fd=3, buf=0x1, nbytes=9) at write.c:26
#1  Frame 0x7f01, for file /x/train.py, line 12, in log_line (text='(')
"""
    dump = the_one(text)
    assert (dump.pid, calls(dump, 0)) == (4711, ["poll", "c10d::Watchdog::run()"])
    assert [(f.function, f.file, f.line) for f in dump.threads[1].frames] == [
        ("__libc_write", "write.c", 26),
        ("log_line", "/x/train.py", 12),
    ]


def test_pystack_prints_the_outermost_frame_first() -> None:
    text = (
        "Traceback for thread 4711 (python) [Has the GIL] (most recent call last):\n    (Python) File "
        '"/x/t.py", line 9, in <module>\n        main()\n    (Python) File "/x/t.py", line 4, in step\n  '
        "      x()\n"
    )
    dump = the_one(text)
    assert (dump.pid, calls(dump), dump.threads[0].owns_gil) == (4711, ["step", "<module>"], True)


def test_py_spy_json_alone_after_headers_and_cut_short() -> None:
    threads = [
        {"pid": 7, "thread_id": 140, "thread_name": "MainThread", "os_thread_id": 7, "active": True, "owns_gil": True,
         "frames": [{"name": "f", "filename": "/x/a.py", "short_filename": "a.py", "line": 3, "locals": None}]},
        {"pid": 7, "thread_id": 141, "thread_name": None, "os_thread_id": 9, "active": False, "owns_gil": False,
         "frames": [{"name": "g", "filename": "/x/a.py", "short_filename": None, "line": 4}]},
    ]  # fmt: skip
    text = json.dumps(threads, indent=2)
    assert [(d.pid, len(d.threads)) for d in parse_stacks(text)] == [(7, 2)]
    assert [(d.pid, d.header.rank) for d in parse_stacks(f"=== rank 3 ===\n{text}\n=== rank 4 ===\n{text}")] == [
        (7, 3),
        (7, 4),
    ]
    assert [(d.pid, len(d.threads)) for d in parse_stacks(text[:-150])] == [(7, 1)]
    named = {"n1": {"rank": 5, "pid": 7, "threads": threads}}
    assert [(d.header.host, d.header.rank) for d in parse_stacks(json.dumps(named))] == [("n1", 5)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Process 77: ...\nError: Failed to suspend process\nReason: EPERM: Operation not permitted\n", "Failed to suspend process; EPERM: "
            "Operation not permitted"),
        ("=== rank 3 ===\nPermission denied (os error 1)\n", "Permission denied (os error 1)"),
        ("$ py-spy dump --pid 77\nError: Failed to get process executable name. Check that the process "
            "is running.\n", "Failed to get process executable name. Check that the process is running."),
    ],
)  # fmt: skip
def test_an_error_in_place_of_a_dump_is_a_row_with_the_reason(text: str, error: str) -> None:
    dump = the_one(text)
    assert (dump.error, dump.threads) == (error, ())
    assert dump.pid == 77 or dump.header.rank == 3


def test_a_process_that_was_asked_twice_in_vain_is_one() -> None:
    failed = "Error: Failed to suspend process\nReason: EPERM\n"
    text = f"ssh n6\npy-spy dump --pid 7 > out\n{failed}\nProcess 7: ...\n{failed}"
    assert [dump.pid for dump in parse_stacks(text)] == [7, 7]
    assert len(assign_ranks(parse_stacks(text)).ranks) == 1


@pytest.mark.parametrize(
    ("line", "header"),
    [
        ("=== rank 3 ===", DumpHeader(rank=3)),
        ("[rank 0]", DumpHeader(rank=0)),
        ("# rank=3 host=n1", DumpHeader(rank=3, host="n1")),
        ("--- node01 rank 3 pid 123 ---", DumpHeader(rank=3, host="node01", pid=123)),
        ("Rank 3 (node1)", DumpHeader(rank=3, host="node1")),
        ("rank 3 on gpu-07 (pid 4711):", DumpHeader(rank=3, host="gpu-07", pid=4711)),
        ("Rank: 7 | Host: n3 | PID: 99", DumpHeader(rank=7, host="n3", pid=99)),
        ("Rank 0/64", DumpHeader(rank=0, world=64)),
        ("Node 48:", DumpHeader(host="Node 48")),
        ("==> trace-n1.out <==", DumpHeader(host="n1")),
        ("## n1", DumpHeader(host="n1")),
        ("ssh n1", DumpHeader(host="n1")),
        ("local_rank 3", DumpHeader(local_rank=3)),
        ("ランク rank 3:", DumpHeader(rank=3)),
        ("【ранг rank 3】", DumpHeader(rank=3)),
        ("rank 3 だけが待っていて、他のランクはすべて all_reduce の中にいるようですが:", None),
        ("4 in:", None),
        ("Here is rank 3 that hangs", None),
        ("### 2022-05-18 hanging at eval", None),
        ("Example 1:", None),
        ("Step 2", None),
    ],
)
def test_a_line_between_dumps_says_whose_they_are_only_if_it_says_nothing_else(
    line: str, header: DumpHeader | None
) -> None:
    assert parse_header(line) == header


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("rank_12.txt", DumpHeader(rank=12)),
        ("trace-jean-07.out", DumpHeader(host="jean-07")),
        ("trace-node00.out", DumpHeader(host="node00")),
        ("stack-gpu07-48213.json", DumpHeader(host="gpu07", pid=48213)),
        ("n07/rank3.txt", DumpHeader(host="n07", rank=3)),
        ("node01_gpu3.txt", DumpHeader(host="node01", local_rank=3)),
        ("local_rank3.txt", DumpHeader(local_rank=3)),
        ("10.0.0.5.txt", DumpHeader(host="10.0.0.5")),
        ("pyspy_rank3_20240501_120301.txt.gz", DumpHeader(rank=3)),
        ("3.txt", DumpHeader(label=3)),
        ("r3.json", DumpHeader(label=3)),
        ("hang_report.txt", DumpHeader()),
        ("what-happened-176b.md", DumpHeader()),
    ],
)
def test_the_name_of_a_file_says_whose_it_is(name: str, header: DumpHeader) -> None:
    assert header_of_file(name) == header


def test_a_local_rank_and_the_rank_of_an_adapter_are_no_ranks() -> None:
    assert header_of_command("python train.py --local_rank=3 --lora_rank 8").rank is None
    assert header_of_command("RANK=5 LOCAL_RANK=1 python train.py").rank == 5
    lora = "".join(SPY.replace("4711", str(pid)).replace("--local_rank 3", "--rank 16") for pid in (7001, 7002))
    assert [each.rank for each in assign_ranks(parse_stacks(lora)).ranks] == [None, None]


def test_a_prefix_counts_only_before_a_line_of_a_dump() -> None:
    assert parse_prefix("n1:     f (a.py:3)", ())[0] == "n1:"
    assert parse_prefix("Error: Failed to suspend process", ())[0] == ""
    assert parse_prefix("note: we saw this", ())[0] == ""


@pytest.mark.parametrize(
    ("line", "frame"),
    [
        ("    f (a.py:3)", ("f", "a.py", 3)),
        ("barrier (torch/distributed/distributed_c10d.py:2784)", ("barrier", "torch/distributed/distributed_c10d.py", 2784)),
        ("    Queue.get (queue.py:171)", ("Queue.get", "queue.py", 171)),
        ("    wait (libc.so.6)", ("wait", "libc.so.6", 0)),
        ("    as we saw (in the morning)", None),
        ("it hangs (see train.py:3)", None),
        ("            x: Foo (a.py:3)", None),
    ],
)  # fmt: skip
def test_a_line_is_a_frame_or_prose(line: str, frame: tuple[str, str, int] | None) -> None:
    found = parse_frame(line)
    assert (None if found is None else (found.function, found.file, found.line)) == frame


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ("    poll (a.py:1)\n    _worker_loop (torch/utils/data/_utils/worker.py:275)\n    train "
            "(t.py:2)\n", "a data loader's worker"),
        ("    _monitor_workers (torch/distributed/elastic/agent/server/api.py:1)\n    <module> "
            "(torchrun:8)\n", "a launcher"),
        ("    wait (subprocess.py:1)\n    main (deepspeed/launcher/launch.py:2)\n", "a launcher"),
        ("    join (torch/multiprocessing/spawn.py:2)\n    main (t.py:4)\n", "a launcher"),
        ("    main (multiprocessing/resource_tracker.py:2)\n    <module> (<string>:1)\n", "a resource tracker"),
    ],
)  # fmt: skip
def test_workers_launchers_and_trackers_hold_no_rank(frames: str, what: str) -> None:
    found = assign_ranks(parse_stacks(f'Process 7: python t.py\nThread 7 (idle): "MainThread"\n{frames}'))
    assert (found.ranks, [each for each, _ in found.others]) == ((), [what])


def test_a_child_of_spawn_is_a_rank() -> None:
    text = (
        'Thread 7 (idle): "MainThread"\n    barrier (torch/distributed/distributed_c10d.py:1)\n    '
        "_wrap (torch/multiprocessing/spawn.py:75)\n    run (multiprocessing/process.py:108)\n"
    )
    assert len(assign_ranks(parse_stacks(text)).ranks) == 1


PIECES = st.sampled_from([*SPY.splitlines(), "", "```", "[", '[{"pid": 1, "frames": [', "Error: Failed to suspend process", "Reason: x",
    "=== rank 3 ===", "n1: Thread 7 (idle): \"MainThread\"", "#0  0x1 in f () from x.so", "Thread 1 (Thread 0x7 (LWP 3)):", "Process 99999999999999999999: x",
    'Thread 0x1 (most recent call first):', '  File "a.py", line 99999999999 in f', "Traceback (most recent call last):", "\x00\x1b[", "rank 99999999999"])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=30))
def test_lines_in_any_order_crash_nothing(lines: list[str]) -> None:
    diagnose_dumps(parse_stacks("\n".join(lines)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400), st.text(max_size=20))
def test_a_dump_that_is_cut_and_overwritten_crashes_nothing(begin: int, end: int, junk: str) -> None:
    diagnose_dumps(parse_stacks(SPY[:begin] + junk + SPY[end:]))


def test_a_frame_whose_line_is_not_known_ends_no_stack() -> None:
    text = 'Thread 7 (active): "MainThread"\n    readline (<stdin>:0)\n    interaction (pdb.py:432)\n'
    (dump,) = parse_stacks(text)
    assert [(frame.function, frame.file, frame.line) for frame in dump.threads[0].frames] == [
        ("readline", "<stdin>", 0), ("interaction", "pdb.py", 432),
    ]  # fmt: skip


def test_the_prefix_of_kubectl_names_a_pod() -> None:
    text = 'Process 1: python t.py\nThread 1 (active): "MainThread"\n    barrier (torch/distributed/distributed_c10d.py:1)\n'
    prefixed = "".join(f"[pod/llm-worker-3/pytorch] {line}\n" for line in text.splitlines())
    (dump,) = parse_stacks(prefixed)
    assert (dump.header.host, dump.header.rank, dump.pid) == ("llm-worker-3", None, 1)
