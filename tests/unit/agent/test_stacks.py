"""What py-spy prints, and whom it is asked about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.children.requests import DumpProcessStacks, WorkerState
from slurm_watchdog.agent.evidence.stacks import (
    TOO_MANY,
    _ended,
    _thread_cpu_s,
    _undumped,
    _with_facts,
    choose,
    dump_stacks,
    parse_dump,
)
from slurm_watchdog.agent.evidence.tool import Ran
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.diagnose.stacks.places import locate
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.evidence import Frame, ProcessStack, ThreadStack
from slurm_watchdog.model.observations import Process, Role

# As py-spy 0.4.3 prints it for a rank in a barrier, shortened to two frames a thread.
DUMP = json.dumps(
    [
        {
            "pid": 280064, "thread_id": 139721760357248, "thread_name": "MainThread", "os_thread_id": 280064, "active": True,
            "owns_gil": False, "process_info": None,
            "frames": [
                {"name": "barrier", "filename": "/env/torch/distributed/distributed_c10d.py", "module": None,
                 "short_filename": "torch/distributed/distributed_c10d.py", "line": 2784, "locals": None, "is_entry": False},
                {"name": "<module>", "filename": "/home/u/train.py", "module": None, "short_filename": None, "line": 9,
                 "locals": None, "is_entry": True},
            ],
        },
        {"pid": 280064, "thread_id": 7, "thread_name": None, "os_thread_id": None, "active": False, "frames": []},
        {"pid": 280064, "thread_id": 8, "thread_name": None, "os_thread_id": 280064, "active": False, "frames": []},
    ]
).encode()  # fmt: skip


def process(pid: int, role: Role, rank: int | None) -> Process:
    return Process(pid=pid, start_ticks=pid, job_id="4", role=role, comm="python", state="S", uid=1000, rank=rank)


def this_process() -> Process:
    return replace(process(os.getpid(), Role.RANK, 0), start_ticks=read_stat(os.getpid()).start_ticks)


def test_a_dump_of_py_spy() -> None:
    threads = parse_dump(DUMP)
    assert threads[0] == ThreadStack(
        thread_id=280064,
        name="MainThread",
        active=True,
        frames=(
            Frame(function="barrier", file="torch/distributed/distributed_c10d.py", line=2784),
            Frame(function="<module>", file="/home/u/train.py", line=9),
        ),
    )
    assert (threads[1].thread_id, threads[1].name) == (7, "")
    assert threads[2].name == "MainThread"


def test_group_stacks_name_the_holder_of_the_interpreters_lock() -> None:
    rows = json.loads(DUMP)
    rows[1]["owns_gil"] = True
    assert [thread.owns_gil for thread in parse_dump(json.dumps(rows).encode())] == [False, True, False]


@pytest.mark.parametrize(
    ("roots", "at_exit"),
    [
        (("wait_for_uploads",), True),
        (("wait_for_uploads", "<module>"), False),
        (("wait_for_uploads", "_run_module_as_main"), False),
        (("_shutdown",), True),
    ],
)
def test_a_main_thread_that_the_interpreter_itself_called_is_in_an_exit_handler(
    roots: tuple[str, ...], at_exit: bool
) -> None:
    """As py-spy shows a handler of atexit: the program's own frames are gone, and the interpreter has none."""
    frames = [{"name": name, "filename": "t.py", "line": 1, "is_entry": name == roots[-1]} for name in roots]
    thread = {"pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "frames": frames}
    (main,) = parse_dump(json.dumps([thread]).encode())
    assert (place_of_rank(main) is Place.TEARDOWN) is at_exit
    (other,) = parse_dump(json.dumps([thread | {"os_thread_id": 8}]).encode())
    assert len(other.frames) == len(roots), "only the main thread runs them"
    (deep,) = parse_dump(json.dumps([thread | {"frames": frames[-1:] * 200}]).encode())
    assert len(deep.frames) == 100, "of a stack that was cut the root is not known"


def place_of_rank(thread: ThreadStack) -> Place:
    stack = ProcessStack(node="n1", pid=7, start_ticks=5, job_id="4", role=Role.RANK, rank=0, threads=(thread,))
    return locate(stack).place


@pytest.mark.parametrize("text", [b"", b"Error: Failed to suspend process", b'{"a": 1}'])
def test_what_is_no_dump_says_so(text: bytes) -> None:
    with pytest.raises(ValueError, match="py-spy printed something else"):
        parse_dump(text)


def test_every_rank_comes_before_a_few_workers_of_each_and_helpers_never() -> None:
    processes = [process(10 + n, Role.WORKER, 0) for n in range(9)] + [process(30, Role.WORKER, 1)]
    processes += [process(2, Role.RANK, 1), process(3, Role.RANK, 0), process(1, Role.HELPER, None)]
    assert [each.pid for each in choose(processes)] == [3, 2, 10, 11, 12, 13, 30]


def test_the_main_thread_of_a_process_has_its_own_cpu_time_in_each_dump() -> None:
    """What other threads use (a data loader, a logger) is no work of the training loop: stillness is told by
    the main thread."""
    end = time.process_time() + 0.3
    helper = threading.Thread(target=lambda: [None for _ in iter(lambda: time.process_time() > end, True)])
    begun = _undumped(this_process(), "n1")
    before = _with_facts(begun)
    helper.start()
    helper.join()
    after = _with_facts(begun)
    assert after.cpu_s - before.cpu_s >= 0.2
    assert (after.main_cpu_s or 0.0) - (before.main_cpu_s or 0.0) <= 0.1


def test_the_thread_in_which_ray_trains_has_its_own_cpu_time_in_each_dump() -> None:
    """A worker of Ray Train trains in a thread of that name, and its main thread waits: its time says nothing."""
    done = threading.Event()

    def burn() -> None:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        done.wait(20)

    train = threading.Thread(target=burn, name="TrainingThread(worker)")
    before = _with_facts(_undumped(this_process(), "n1"))
    train.start()
    try:
        thread = {
            "pid": os.getpid(),
            "thread_id": 1,
            "os_thread_id": train.native_id,
            "thread_name": train.name,
        }
        while _thread_cpu_s(os.getpid(), train.native_id or 0) < 0.2:  # type: ignore[operator]
            time.sleep(0.02)
        out = json.dumps([thread | {"active": True, "owns_gil": False, "frames": []}]).encode()
        dumped = _ended(before, Ran(code=0, out=out, errors=b""), WorkerState(os.getuid()))
    finally:
        done.set()
        train.join()
    trained_s = dumped.main_cpu_s
    assert trained_s is not None and 0.2 <= trained_s <= 0.5


LOCKED = "import threading, time\nwhile time.process_time() < 0.05: pass\ndef waits():\n    lock = threading.Lock(); lock.acquire(); print(1, flush=True); lock.acquire()\nwaits()"


def test_dump_of_a_process_that_waits_for_a_lock_has_its_stack_and_what_the_kernel_says_of_it() -> None:
    """The processor time decides whether a rank moves, the system call what it waits for."""
    child = subprocess.Popen([sys.executable, "-c", LOCKED], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        while (stat := read_stat(child.pid)).state != "S":
            time.sleep(0.01)
        ticks = stat.start_ticks
        wanted = replace(this_process(), pid=child.pid, start_ticks=ticks, uid=os.getuid())
        own = WorkerState(os.getuid())
        (stack,) = dump_stacks(DumpProcessStacks(node="n1", budget_s=20.0, processes=[wanted]), own)
    finally:
        child.kill()
        child.communicate()
    assert stack.error is None and stack.threads[0].frames[0].function == "waits"
    assert stack.state == "S" and stack.cpu_s > 0 and stack.resident_bytes and stack.io_bytes
    assert stack.syscall in {None, "futex"}  # None: this user may not read it
    assert stack.syscall == "futex" or os.getuid() != 0
    assert locate(stack).doing is Place.LOCK or os.getuid() != 0


def test_of_a_user_of_whom_enough_dumps_hang_no_other_process_is_dumped() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        row = Process(
            pid=child.pid, start_ticks=read_stat(child.pid).start_ticks, job_id="7", role=Role.RANK, comm="python",
            state="S", uid=os.getuid(),
        )  # fmt: skip
        request = DumpProcessStacks("n1", 20.0, [row], may_hang=0)
        (stack,) = dump_stacks(request, WorkerState(os.getuid()))
        assert (stack.error, stack.threads) == (TOO_MANY, ()) and stack.state is not None
        child.kill()
