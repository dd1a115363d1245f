"""Whom `scan-log` names where the first line of a failure does not say whose it is, and what only looks like a cause."""

from __future__ import annotations

import json

import pytest

from tests.unit.diagnose.test_scan_log_verdicts import (
    DISK,
    LOST,
    steps,
    table,
    timeout,
    traceback,
    verdict_of,
)

XID = "[ 4410.5] NVRM: Xid (PCI:0000:1b:00): {}, pid=77, name=python3, Ch 00000008\n"
CUDA = "RuntimeError: CUDA error: unspecified launch failure"
RAY = "(RayTrainWorker pid={}, ip=10.0.0.{}) "
RAYLET = "(raylet, ip=10.0.0.4) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed at node (IP: 10.0.0.4).\n"


def record(rank: int, message: str) -> str:
    return (
        json.dumps({"ts": "2024-05-01T10:00:00Z", "level": "ERROR", "rank": rank, "message": message}) + "\n"
    )


Verdict = tuple[str, int | None, str | None] | None

CASES: list[tuple[str, str, Verdict]] = [
    # in front of a rank's own prefix stands something that has no end
    ("behind a bar", f"  2%|▏         | 30/1752 [01:08<1:22:56,  2.88s/it][rank5]: {DISK}\n", ("disk_full", 5, None)),
    ("behind the name of a pod", traceback("2024-05-01T10:00:00.1Z trainer-2 [rank17]: ", DISK), ("disk_full", 17, None)),
    ("a rank that is spoken of is not the one that speaks", f"got a request from [rank3]: nothing to do\n{DISK}\n", ("disk_full", None, None)),
    ("docker compose", traceback("trainer-2  | ", DISK), ("disk_full", None, "trainer-2")),
    ("a record of several lines", record(0, "RuntimeError: " + LOST) + record(3, f"Traceback (most recent call last):\n  File \"a.py\", line 2, in f\n{DISK}"), ("disk_full", 3, None)),
    # the kernel speaks first, the program next
    ("a GPU that fell off the bus is the rank's that felt it", XID.format(79) + traceback("[rank13]: ", CUDA), ("gpu_lost", 13, None)),
    ("two ranks felt it: nobody knows whose it is", XID.format(79) + traceback("[rank3]: ", CUDA) + traceback("[rank5]: ", CUDA) + "world_size: 64\n", ("gpu_lost", None, None)),
    ("a system processor that does not answer", XID.format(119) + traceback("[rank3]: ", CUDA), ("gpu_lost", 3, None)),
    ("memory of the GPU", XID.format(95) + traceback("[rank3]: ", CUDA), ("gpu_ecc", 3, None)),
    *((f"Xid {n} is the program's own", XID.format(n) + traceback("[rank3]: ", CUDA), ("cuda_error", 3, None)) for n in (13, 31, 43, 45)),
    ("an Xid alone that says nothing of the hardware", steps(1, 20) + XID.format(31) + steps(20, 40, 1), None),
    ("shared memory, in the words of the worker and of its parent", "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n" + traceback("[rank7]: ", "RuntimeError: DataLoader worker (pid 31) is killed by signal: Bus error."), ("shared_memory", 7, None)),
    # Ray knows processes
    ("Ray: which rank the killed process was", RAY.format(52, 4) + "Setting up process group for: env:// [rank=2, world_size=8]\n" + RAYLET + "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n\tpid: 52\n\tip: 10.0.0.4\n", ("oom_kill", 2, "10.0.0.4")),
    ("Ray: two hosts have the same pid", RAY.format(52, 4) + "[rank=2] step\n" + RAY.format(52, 5) + "[rank=6] step\n" + traceback(RAY.format(52, 5), DISK), ("disk_full", 6, "10.0.0.5")),
    ("Ray: a process that was two ranks is neither", RAY.format(52, 4) + "[rank=2] step\n" + RAY.format(52, 4) + "[rank=3] step\n" + traceback(RAY.format(52, 4), DISK), ("disk_full", None, "10.0.0.4")),
    # Megatron-LM tells whose result it was
    ("a result that is no number", "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 3 at iteration #911 invocation #2 (message='found NaN in local grad norm')\nERROR:megatron.core.rerun_state_machine:Rank 3, node n44, device 3, iteration #911: First rerun: unexpected result is reproducible\n", ("loss_nan", 3, "n44")),
    # causes that look like consequences, and the other way round
    ("the watchdog's thread tells of its own GPU", "".join(f"[rank{r}]:[E501 10:00:0{r}.1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Process group watchdog thread terminated with exception: {what}\n" for r, what in ((2, "CUDA error: an illegal memory access was encountered"), (3, "NCCL error: remote process exited or there was a network error"), (4, "NCCL error: remote process exited or there was a network error"))), ("cuda_error", 2, None)),
    ("what gloo's transport says is a consequence", traceback("[rank3]: ", "RuntimeError: [/b/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error") + "[rank12]: Fatal Python error: Bus error\n" + table((12, 4, "n4", -7, "10:00:00")), ("bus_error", 12, "n4")),
    ("a port that is in use in the words of the store", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n", ("port_in_use", None, None)),
    ("the heap", "3: python3: malloc.c:2617: sysmalloc: Assertion `(old_top == initial_top (av) && old_size == 0)' failed.\nsrun: error: n3: task 3: Aborted (core dumped)\n", ("glibc_abort", 3, "n3")),
    ("a checkpoint that could not be written, and why", traceback("[rank0]: ", "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0") + f"[rank0]: {DISK}\n", ("disk_full", 0, None)),
    ("a checkpoint that could not be written", traceback("[rank0]: ", "RuntimeError: PytorchStreamWriter failed writing file data/12: file write failed"), ("checkpoint_write", 0, None)),
    ("a container that was killed", steps(1, 20) + "    Reason:       OOMKilled\n    Exit Code:    137\n", ("oom_kill", None, None)),
    ("a file and not a peer timed out", traceback("[rank5]: ", "TimeoutError: [Errno 110] Connection timed out: '/mnt/d/7.tar'"), ("io_error", 5, None)),
    ("a server that lost its client", traceback("[rank5]: ", "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/l/x.pt'"), ("stale_file_handle", 5, None)),
    ("what the thread said that pins memory", "[rank4]: Exception in thread Thread-5 (_pin_memory_loop):\n" + traceback("[rank4]: ", "RuntimeError: unable to mmap 1024 bytes from file </torch_4411_99_1>: Cannot allocate memory (12)") + traceback("[rank4]: ", "RuntimeError: Pin memory thread exited unexpectedly"), ("shared_memory", 4, None)),
    ("an AMD GPU's page fault names an agent and no node", steps(1, 9) + "Memory access fault by GPU node-4 (Agent handle: 0x55d) on address 0x7f1c000. Reason: Unknown.\nsrun: error: n112: task 35: Aborted (core dumped)\n", ("cuda_error", 35, "n112")),
    ("a group of exceptions", "  + Exception Group Traceback (most recent call last):\n  |   File \"/opt/t.py\", line 3, in main\n  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File \"/opt/t.py\", line 9, in read\n    | OSError: [Errno 28] No space left on device\n    +------------------------------------\n", ("disk_full", None, None)),
    ("a pasted block is indented", "Hello, this is what we got last night:\n\n" + "".join(f"    {line}\n" for line in traceback("[rank3]: ", DISK).splitlines()), ("disk_full", 3, None)),
    ("a loss of zero without a gradient", "".join(f"{{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.{n:02d}}}\n" for n in range(20)), ("loss_nan", None, None)),
    ("a task that ended and the ones that srun ended for it", steps(1, 9) + "srun: error: n3: task 9: Exited with exit code 1\nsrun: Terminating StepId=81.0\nsrun: error: n2: tasks 0-7: Terminated\n", ("task_exit", 9, "n3")),
    ("tasks that ended alike", steps(1, 9) + "srun: error: n3: task 9: Exited with exit code 1\nsrun: error: n2: tasks 0-7: Exited with exit code 1\n", ("task_exit", None, None)),
    # the clock of Slurm may be that of another zone
    ("Slurm's clock is behind", steps(1, 20) + traceback("[rank4]: ", DISK) + "slurmstepd: error: *** STEP 4.0 ON n1 CANCELLED AT 2024-05-01T02:10:00 ***\n", ("disk_full", 4, None)),
    ("Slurm's clock is ahead", steps(1, 20) + "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T19:00:21 DUE TO PREEMPTION ***\n2024-05-01 10:00:22 ERROR [rank3]: RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated.\n", None),
    # several processes have the same prefix
    ("a victim of the same host", traceback("n2: ", LOST) + traceback("n2: ", "AssertionError: expected 3, got 4"), ("assertion", None, "n2")),
    ("a victim of the same local rank on another node", traceback("[default6]:", LOST) + traceback("[default6]:", "ModuleNotFoundError: No module named 'a'") + table((14, 6, "n2", 1, "10:00:05")), ("import_error", 14, "n2")),
    ("torchrun's own prefix: a task is its launcher", traceback("[default6]:", DISK) + "srun: error: n2: task 1: Exited with exit code 1\n", ("disk_full", None, "n2")),
    ("the table of another node lists its victim", table((2, 2, "n1", -6, "10:00:09")) + traceback("n2: ", "RuntimeError: CUDA error: unspecified launch failure") + table((12, 4, "n2", 1, "10:00:02"), (13, 5, "n2", -15, "10:00:20")), ("cuda_error", 12, "n2")),
    ("a source line behind a level is no exception", "".join(f"2024-05-01 10:00:00,1 [rank 3] ERROR {line}\n" for line in traceback("", DISK).splitlines()), ("disk_full", 3, None)),
    ("a task that may be a launcher is no rank", traceback("", DISK) + "srun: error: n5: task 4: Exited with exit code 1\n", ("disk_full", None, "n5")),
    ("a task that died of a signal is one", steps(1, 9) + "srun: error: n5: task 4: Segmentation fault (core dumped)\n", ("segmentation_fault", 4, "n5")),
    ("tasks of one host", traceback("", DISK) + "srun: error: n5: task 44: Exited with exit code 1\nsrun: error: n5: tasks 40-43: Terminated\n", ("disk_full", 44, "n5")),
    # what stands in brackets before a number may be a module and its line
    *((f"{name} is no host", f"ERROR 07-01 10:00:31 [{name}:588] Traceback (most recent call last):\nERROR 07-01 10:00:31 [{name}:588] {DISK}\n", ("disk_full", None, None)) for name in ("core.py", "trainer", "data_loader2", "ops.cu", "step1")),
    ("a host in brackets is one", traceback("[r7i6n1:12]: ", DISK), ("disk_full", 12, "r7i6n1")),
    ("behind the name of a logger", f"2024-05-01 10:00:31 | ERROR | train.loop | rank 3: {DISK}\n", ("disk_full", 3, None)),
    # parts of a text under a heading
    ("the output of a rank, as Composer's launcher prints it", "ERROR:composer.cli.launcher:Rank 0 crashed with exit code -6.\n----------Begin global rank 0 STDERR----------\n" + timeout(0) + "----------End global rank 0 STDERR----------\n----------Begin global rank 6 STDERR----------\n" + traceback("", DISK) + "----------End global rank 6 STDERR----------\n", ("disk_full", 6, None)),
    ("several files in one", "==> logs/rank_0.err <==\n" + traceback("", "RuntimeError: " + LOST) + "\n==> logs/rank_12.err <==\n" + traceback("", DISK), ("disk_full", 12, None)),
    ("a part that has ended", "------ rank 6 ------\nloading\n----- End rank 6 STDERR -----\n" + traceback("", DISK), ("disk_full", None, None)),
    # ranks that others name
    ("a rank that several say they lost", "".join(f"[rank{r}]: lost connection to rank 7, giving up\n" for r in (0, 1, 4)), ("peer_lost", 7, None)),
    ("a rank that the first rank says it lost", "[rank0]: no heartbeat from rank 7 for 300 s\n", ("peer_lost", 7, None)),
    ("of two ranks each may be the one", "[rank3]: lost connection to rank 7, giving up\n", ("peer_lost", None, None)),
    ("they name different ranks", "".join(f"[rank{r}]: lost connection to rank {p}\n" for r, p in ((0, 7), (1, 7), (4, 5))), ("peer_lost", None, None)),
    ("the one that is named lost another", "".join(f"[rank{r}]: lost connection to rank {p}\n" for r, p in ((0, 7), (1, 7), (7, 5))), ("peer_lost", None, None)),
    ("the one that is named says why", "".join(f"[rank{r}]: lost connection to rank 7\n" for r in (0, 1)) + traceback("[rank7]: ", DISK), ("disk_full", 7, None)),
    ("another has an error of its own", "".join(f"[rank{r}]: rank 7 is not responding\n" for r in (0, 1)) + traceback("[rank3]: ", DISK), ("disk_full", 3, None)),
    ("a rank that there is not", "world_size: 4\n" + "".join(f"[rank{r}]: lost connection to rank 7\n" for r in (0, 1)), ("peer_lost", None, None)),
    ("a rank that came back", steps(1, 20) + "[rank0]: lost connection to rank 7\n[rank1]: lost connection to rank 7\n" + steps(20, 40, 1), None),
    ("what Horovod waits for", steps(1, 9) + "[1,0]<stderr>:[2024-05-01 10:09:00.1: W horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds.\n[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:2: [grad_1, grad_2]\n", ("collective_timeout", 2, None)),
    ("what was read from flight recorders", "Not all ranks joining collective, sequence number: 2\ncollective: nccl:all_reduce\nmissing ranks: {1}\nexpected ranks: {0, 1, 2, 3}\n", ("collective_timeout", 1, None)),
    ("a server that could not be reached is no rank", "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"a.py\", line 2, in f\n[rank0]: ConnectionRefusedError: [Errno 111] Connection refused\n[rank0]: During handling of the above exception, another exception occurred:\n" + traceback("[rank0]: ", "requests.exceptions.ConnectionError: HTTPConnectionPool(host='10.0.0.5', port=8000): Max retries exceeded with url: /generate/"), ("network", 0, None)),
    ("messages that cannot be passed between processes", traceback("[rank1]: ", "RuntimeError: received 0 items of ancdata"), ("too_many_files", 1, None)),
    # what is summed up at the end of a run is summed up of one that died, too
    *((f"a cascade before {what!r}", steps(1, 40) + "".join(timeout(r) for r in range(8) if r != 5) + what, ("nccl_watchdog", 5, None)) for what in ("wandb: Run summary:\nwandb: loss 2.3\n", "destroying process group\n")),
    ("a log that ends with a summary, and nobody knows when", steps(1, 40) + "wandb: Synced 5 W&B file(s)\n", None),
    # numbers in front that only count
    ("the numbers of grep", f"118: {CUDA}\n134: RuntimeError: {LOST}\n", ("cuda_error", None, None)),
    ("a pager's numbers", "".join(f"{n}: {line}\n" for n, line in enumerate((steps(1, 20) + traceback("", CUDA)).splitlines(), 7)), ("cuda_error", None, None)),
    ("the numbers of tasks", "".join(f"{r}: RuntimeError: {LOST}\n" for r in (0, 1, 2)) + traceback("118: ", CUDA), ("cuda_error", 118, None)),
    ("a rank in the words of an exception", traceback("[rank0]: ", "RuntimeError: Rank 3 reported another number of parameters"), ("python_exception", 0, None)),
    ("a rank in the words of an exception with a dotted name", traceback("2: ", "a.b.StoreError: rank 3 is not there"), ("python_exception", 2, None)),
    ("what Slurm could not start", steps(1, 9) + "srun: error: Task launch for StepId=7.0 failed on node n17: Invalid job credential\nsrun: error: Application launch failed: Invalid job credential\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n", ("launcher", None, "n17")),
    ("a store that answers with an error", "[rank8]: google.api_core.exceptions.ServiceUnavailable: 503 GET https://s/b\n[rank1]: RuntimeError: " + LOST, ("network", 8, None)),
    # launchers and frameworks of others
    ("SageMaker's launcher", traceback("[1,mpirank:3,algo-1]<stderr>:", DISK), ("disk_full", 3, "algo-1")),
    ("a daemon that mpirun lost", steps(1, 9) + "ORTE has lost communication with a remote daemon.\n\n  HNP daemon   : [[7,0],0] on node n1\n  Remote daemon: [[7,0],3] on node n4\n", ("peer_lost", None, "n4")),
    ("UCX", steps(1, 9) + "[1717171.12] [n3:12345:0]   ib_mlx5_log.c:171  UCX  ERROR Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81)\n", ("infiniband", None, None)),
    ("an error of CUDA in Paddle's words", traceback("", "OSError: (External) CUDA error(719), unspecified launch failure."), ("cuda_error", None, None)),
    ("a GPU's memory in TensorFlow's words", traceback("", "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:"), ("cuda_oom", None, None)),
    ("one below the other is not one after the other", "".join(f"===== rank {r} =====\n" + steps(1, 9) + traceback("", DISK if r == 2 else f"RuntimeError: {LOST}") for r in range(4)), ("disk_full", 2, None)),
    ("a module whose name has a digit", steps(1, 9) + f"[gpt2:120] {CUDA}\n", ("cuda_error", None, None)),
    ("a host of a large job", steps(1, 9) + f"[n14:3]: ready\n[n31:120] {CUDA}\n", ("cuda_error", 120, "n31")),
    # srun --label makes its numbers equally wide
    ("labels of equal width", "".join(f"{r:3d}: ok\n" for r in range(8)) + traceback("  9: ", DISK) + traceback(" 12: ", f"RuntimeError: {LOST}"), ("disk_full", 9, None)),
    ("a line of a program's list is no task's", steps(1, 30) + f"   3: {CUDA}\n", ("cuda_error", None, None)),
    ("somebody's list", f"1: I ran it\n2: it trained\n3: {CUDA}\n4: I waited\n", ("cuda_error", None, None)),
    ("one of many in a cascade", traceback("[rank5]: ", DISK) + "".join(timeout(r) for r in range(8) if r != 5), ("disk_full", 5, None)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_log_gives_its_verdict(text: str, expected: Verdict) -> None:
    assert verdict_of(text) == expected
