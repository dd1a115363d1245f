"""Logs of failed runs with what they come to: for `scan-log`, and for the same lines as agents report them."""

from __future__ import annotations

import json

from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.diagnose.logs.digest import Collector
from slurm_watchdog.diagnose.logs.report import RunReport, Settings, judge_job

Expected = tuple[str, int | None, str | None] | None
"""(row of the signatures, rank, host); None: nothing is wrong."""


DEFAULTS = Settings(CollectiveHang())


def read(text: str | bytes, at: str | None = None, path: str = "train.log") -> RunReport:
    data = text.encode() if isinstance(text, str) else text
    collector = Collector(markdown=True)
    collector.add(data, 1)
    return judge_job([path], [collector.digest()], DEFAULTS, at)


def verdict_of(text: str, at: str | None = None) -> tuple[str, int | None, str | None] | None:
    verdict = read(text, at).verdict
    return None if verdict is None else (verdict.name, verdict.rank, verdict.host)


def steps(first: int, last: int, minute: int = 0, seconds: int = 1) -> str:
    """Lines of progress, one every `seconds`."""
    return "".join(
        f"2024-05-01 {10 + (minute * 60 + n * seconds) // 3600:02d}:{(minute * 60 + n * seconds) // 60 % 60:02d}:"
        f"{(minute * 60 + n * seconds) % 60:02d},000 - INFO - step {first + n}/5000 | loss: 2.5 |\n"
        for n in range(last - first)
    )


def bars(first: int, last: int, loss: str | None = "2.5", norm: str = "0.4") -> str:
    """A bar of tqdm and, after every fifth step, the dictionary of the Hugging Face Trainer with the loss, if
    it is told."""
    return "".join(
        f"  1%|    | {n}/5000 [00:{n % 60:02d}<10:00,  1.01s/it]\n"
        + (f"{{'loss': {loss}, 'grad_norm': {norm}, 'epoch': {n / 1000:.3f}}}\n" if loss and n % 5 == 0 else "")
        for n in range(first, last)
    )


def traceback(prefix: str, *last: str) -> str:
    frames = (
        "Traceback (most recent call last):",
        '  File "/opt/t/train.py", line 7, in main',
        "    run(batch)",
    )
    return "".join(f"{prefix}{line}\n" for line in (*frames, *last))


def timeout(rank: int, seq: int = 90, op: str = "ALLREDUCE", numel: int = 4096, done: int | None = None) -> str:
    text = (
        f"[rank{rank}]:[E501 10:40:00.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600070 milliseconds "
        "before timing out.\n"
    )
    if done is not None:
        text += (
            f"[rank{rank}]:[E501 10:40:00.2 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception (either an "
            f"error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {done + 3}, last completed NCCL work: {done}.\n"
        )
    return text


def table(root: tuple[int, int, str, int, str], *others: tuple[int, int, str, int, str]) -> str:
    """torchrun's table of failures; a row is (rank, local rank, host, exit code, time)."""

    def row(number: int, each: tuple[int, int, str, int, str]) -> str:
        rank, local, host, code, at = each
        return (
            f"[{number}]:\n  time      : 2024-05-01_{at}\n  host      : {host}\n  rank      : {rank} (local_rank: {local})\n"
            f"  exitcode  : {code} (pid: {4000 + rank})\n  error_file: <N/A>\n  traceback : To enable traceback see: the manual\n"
        )

    rest = "".join(row(number, each) for number, each in enumerate(others, 1)) or "  <NO_OTHER_FAILURES>\n"
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n" + "=" * 60 + "\ntrain.py FAILED\n" + "-" * 60
        + f"\nFailures:\n{rest}" + "-" * 60 + f"\nRoot Cause (first observed failure):\n{row(0, root)}" + "=" * 60 + "\n"
    )  # fmt: skip


def recorded(host: str, root: tuple[int, str, str], ended: tuple[int, str, str]) -> str:
    """torchrun's words, and its table, of ranks whose errors are recorded: (rank, time, exception) of the one that failed
    and of the one that it ended for that."""
    (rank, at, error), (other, ended_at, its) = root, ended
    words = table((rank, rank % 2, host, 1, at), (other, other % 2, host, -15, ended_at))
    for said in (its, error):  # the root cause stands last
        told = f'Traceback (most recent call last):\n    File "/w/train.py", line 8, in step\n      run()\n  {said}\n  '
        words = words.replace("To enable traceback see: the manual", told, 1)
    return (
        f"W1124 10:00:00.960000 39 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process {4000 + other} closing signal SIGTERM\n"
        f"E1124 10:00:01.082000 39 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: {rank % 2} (pid: {4000 + rank}) of binary: python\n"
        + words
    )  # fmt: skip


LOST = "RuntimeError: Connection closed by peer [10.0.0.4]:3301"
DISK = "OSError: [Errno 28] No space left on device"
RAY_SANDBOX = "(RewardWorker pid=77) "


VERDICTS: list[tuple[str, str, Expected]] = [
    # prefixes
    ("a rank's own prefix", traceback("[rank17]: ", DISK), ("disk_full", 17, None)),
    ("host and rank", traceback("[n3:17]", DISK) + traceback("[n2:9]", LOST), ("disk_full", 17, "n3")),
    ("the same numbers on two hosts are local ranks", traceback("[n3:1]", DISK) + traceback("[n2:1]", LOST), ("disk_full", None, "n3")),
    ("a local rank is no rank", steps(1, 9) + traceback("[default3]:", DISK), ("disk_full", None, None)),
    ("srun --label", traceback("17: ", DISK) + traceback("3: ", LOST), ("disk_full", 17, None)),
    ("srun --label of one launcher a node", "0: torchrun --nproc_per_node 8\n" + traceback("1: ", DISK), ("disk_full", None, None)),
    ("pdsh", "".join(traceback(f"n{n}: ", DISK if n == 2 else LOST) for n in range(4)), ("disk_full", None, "n2")),
    ("mpirun", traceback("[1,17]<stderr>:", DISK), ("disk_full", 17, None)),
    ("Ray", traceback("(RayTrainWorker pid=77, ip=10.0.0.5) ", DISK), ("disk_full", None, "10.0.0.5")),
    ("a logger's rank with a capital", steps(1, 9) + traceback("[Rank 3] ", DISK), ("disk_full", 3, None)),
    ("the rank within a group, as ProcessGroupNCCL writes it", "[rank11]:[E501 10:40:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Some NCCL operations have failed or timed out.\n" + traceback("[rank11]: ", DISK), ("disk_full", 11, None)),
    ("Python's own way to log, and a rank", steps(1, 9) + traceback("ERROR:root:[rank 3] ", DISK), ("disk_full", 3, None)),
    ("a host and its rank", steps(1, 9) + traceback("[n7/rank3] ", DISK), ("disk_full", 3, "n7")),
    ("a rank among the copies of a model is no rank", steps(1, 9) + traceback("[dp2/rank3] ", DISK), ("disk_full", None, None)),
    ("a rank of tensor parallelism is no rank", steps(1, 9) + traceback("[TP rank 3] ", DISK), ("disk_full", None, None)),
    ("a group of exceptions, with a rank", "[rank2]:   + Exception Group Traceback (most recent call last):\n[rank2]:   |   File \"a.py\", line 1, in f\n[rank2]:   | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n[rank2]:   +-+---------------- 1 ----------------\n[rank2]:     | Traceback (most recent call last):\n[rank2]:     |   File \"b.py\", line 2, in g\n" + f"[rank2]:     | {DISK}\n[rank2]:     +------------------------------------\n", ("disk_full", 2, None)),
    ("Composer's launcher, with a logger in front", "ERROR:composer.cli.launcher:Rank 6 crashed with exit code -11.\n", ("segmentation_fault", 6, None)),
    ("a worker's number is no rank", "worker=3 | " + DISK + "\n", ("disk_full", None, None)),
    ("a key and a value", f"2024-05-01 10:00:00 | ERROR | rank=5 | {DISK}\n", ("disk_full", 5, None)),
    ("a pid in mpirun's brackets is no rank", "[n1:3112] *** Process received signal ***\n[n1:3112] Signal: Segmentation fault (11)\n", ("segmentation_fault", None, "n1")),
    ("JSON", '{"time": "2024-05-01T10:00:00Z", "level": "error", "rank": 5, "msg": "CUDA out of memory"}\n', ("cuda_oom", 5, None)),
    # cause before cascade
    ("a victim is printed first", traceback("[rank0]: ", LOST) + traceback("[rank6]: ", DISK), ("disk_full", 6, None)),
    ("what is flushed late was said earlier", "2024-05-01 10:20:00 [rank1]: ValueError: bad batch\n2024-05-01 10:05:00 [rank4]: OSError: [Errno 5] Input/output error\n", ("io_error", 4, None)),
    ("a chain begins with its cause", traceback("[rank2]: ", DISK) + "[rank2]: \n[rank2]: The above exception was the direct cause of the following exception:\n[rank2]: \n" + traceback("[rank2]: ", "RuntimeError: saving failed"), ("disk_full", 2, None)),
    ("a lookup that failed is no cause", traceback("", "KeyError: 'k'") + "\nDuring handling of the above exception, another exception occurred:\n\n" + traceback("", "RuntimeError: CUDA error: an illegal memory access was encountered"), ("cuda_error", None, None)),
    ("what a DataLoader's worker caught", traceback("[rank3]: ", "RuntimeError: Caught OSError in DataLoader worker process 0.", "Original Traceback (most recent call last):", '  File "d.py", line 2, in f', "OSError: [Errno 116] Stale file handle: '/d/a'"), ("stale_file_handle", 3, None)),
    ("two ranks over each other", "".join(f"[rank{r}]: {line}\n" for line in ("Traceback (most recent call last):", '  File "a.py", line 2, in f') for r in (4, 7)) + f"[rank7]: {LOST}\n[rank4]: {DISK}\n", ("disk_full", 4, None)),
    ("everybody fails alike", "".join(traceback(f"[rank{r}]: ", "ModuleNotFoundError: No module named 'apex'") for r in range(4)), ("import_error", None, None)),
    ("some fail alike: the first", "world_size: 64\n" + "".join(traceback(f"[rank{r}]: ", DISK) for r in (9, 4)), ("disk_full", 9, None)),
    ("what C++ throws", "[rank3]: terminate called after throwing an instance of 'c10::Error'\n[rank3]:   what():  CUDA error: unspecified launch failure\n", ("cuda_error", 3, None)),
    # torchrun's table
    ("the table tells the rank of a local rank", traceback("[default5]:", DISK) + table((13, 5, "n2", 1, "10:00:05"), (12, 4, "n2", -15, "10:00:09")), ("disk_full", 13, "n2")),
    ("the table alone: killed", table((5, 5, "n1", -9, "10:00:05"), (4, 4, "n1", -15, "10:00:09")), ("killed", 5, "n1")),
    ("the table alone: SIGSEGV", table((5, 5, "n1", -11, "10:00:05")), ("segmentation_fault", 5, "n1")),
    ("a row that aborted is a victim", traceback("[rank6]: ", DISK) + table((2, 2, "n1", -6, "10:00:05"), (6, 6, "n1", 1, "10:00:05")), ("disk_full", 6, "n1")),
    ("nobody knows which of the rows a nameless error is", traceback("", DISK) + table((2, 2, "n1", 1, "10:00:05"), (6, 6, "n1", 1, "10:00:05")), ("disk_full", None, None)),
    # Slurm
    ("Slurm's one task", steps(1, 20) + traceback("", DISK) + "srun: error: n3: task 17: Exited with exit code 1\nsrun: Terminating StepId=4.0\nsrun: error: n1: tasks 0-3: Terminated\n", ("disk_full", 17, "n3")),
    ("an oom-kill", "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some of the step tasks have been OOM Killed.\nsrun: error: n3: task 9: Out Of Memory\n", ("oom_kill", 9, "n3")),
    ("several tasks at once name no rank", "srun: error: n3: tasks 8-9: Exited with exit code 1\n", ("task_exit", None, "n3")),
    ("a node that failed, not the one of the batch script", "srun: error: Node failure on n7\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T12:00:00 DUE TO NODE FAILURE ***\n", ("node_failure", None, "n7")),
    # collectives
    ("who is missing", "world_size=8\n" + "".join(timeout(r) for r in range(8) if r != 3), ("nccl_watchdog", 3, None)),
    ("an excerpt names nobody", "".join(timeout(r) for r in (0, 1, 3)), ("nccl_watchdog", None, None)),
    ("everybody says so", "world_size=4\n" + "".join(timeout(r) for r in range(4)), ("nccl_watchdog", None, None)),
    ("who is behind", "world_size=4\n" + "".join(timeout(r, done=70 if r == 2 else 89) for r in range(4)), ("nccl_watchdog", 2, None)),
    ("who ran another collective", "world_size=4\n" + "".join(timeout(r, op="BROADCAST" if r == 1 else "ALLREDUCE") for r in range(4)), ("collective_mismatch", 1, None)),
    ("half and half is no minority", "world_size=4\n" + "".join(timeout(r, op="BROADCAST" if r < 2 else "ALLREDUCE") for r in range(4)), ("nccl_watchdog", None, None)),
    ("an error before the timeouts", "world_size=8\n" + traceback("[rank5]: ", DISK) + "".join(timeout(r) for r in range(8) if r != 5), ("disk_full", 5, None)),
    ("the last steps of others came after the error", steps(1, 30) + traceback("2024-05-01 10:00:28 [rank5]: ", DISK) + "".join(timeout(r) for r in range(5)), ("disk_full", 5, None)),
    ("a barrier that names who did not come", "[rank0]: RuntimeError: Rank 4 failed to pass monitoredBarrier in 30000 ms\n", ("barrier_timeout", 4, None)),
    ("a store's barrier", "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 15/16 clients joined.\n", ("rendezvous", None, None)),
    # healthy
    ("an error that was retried", steps(1, 20) + traceback("[rank1]: ", "ConnectionError: 503 Server Error: busy for url: https://x") + "[rank1]: Retrying in 5 s (attempt 1/5)\n" + steps(20, 40, 1), None),
    ("an exception after which steps are made", steps(1, 20) + traceback("[rank1]: ", "ValueError: odd sample") + steps(20, 40, 1), None),
    ("a restart that goes on", steps(1, 20) + traceback("[rank1]: ", DISK) + table((1, 1, "n1", 1, "10:00:05")) + steps(10, 40, 1), None),
    ("an error that its program calls retriable", steps(1, 9) + "n4:0\tolmo.util:402\tWARNING\t_s3_get_bytes_range failed attempt 1 with retriable error: Connection broken: IncompleteRead(4194304 bytes read, 1024 more expected)\n", None),
    ("an example of a traceback in a sentence", steps(1, 9) + "Prediction: 'Traceback (most recent call last): ... somewhere'\n", None),
    ("warnings", "train.py:3: UserWarning: CUDA initialization: CUDA error: unknown error\n" + steps(1, 20), None),
    ("a destructor", steps(1, 20) + "Training completed.\nException ignored in: <function W.__del__ at 0x7f>\n" + traceback("", "AttributeError: 'NoneType' object has no attribute 'close'"), None),
    ("the noise of the end", steps(1, 20) + "Training completed.\n[rank0]:[W501 10:00:30.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct\n[rank0]: RuntimeError: Connection reset by peer\n", None),
    ("the time limit", steps(1, 20) + "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:00:21 DUE TO TIME LIMIT ***\n" + traceback("[rank0]: ", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 9 got signal: 15"), None),
    ("somebody pressed Ctrl-C", steps(1, 20) + traceback("", "KeyboardInterrupt"), None),
    ("the word error in figures", steps(1, 20) + "eval: word error rate 12.5 %, 3 errors in 400 words, error: 0.125\nloss/error 0.5\n", None),
    ("an overflow that is skipped", steps(1, 9) + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n" + steps(9, 20, 1), None),
    ("one loss that is no number", steps(1, 9) + "2024-05-01 10:00:10,000 - INFO - step 9/5000 | loss: nan |\n" + steps(10, 20, 1), None),
    ("exceptions of a type that was survived before, in code that a model wrote", "".join(steps(n, n + 5, n // 5) + traceback(RAY_SANDBOX, "IndexError: list index out of range") for n in (1, 6, 11)), None),
    ("what an allocator calls no failure", steps(1, 20) + "2024-05-01 10:00:30.1: W external/xla/xla/tsl/framework/bfc_allocator.cc:310] Allocator (GPU_0_bfc) ran out of memory trying to allocate 16.00GiB with freed_by_count=0. The caller indicates that this is not a failure, but this may mean that there could be performance gains if more memory were available.\n", None),
    ("a warning alone", steps(1, 20) + "2024-05-01 10:00:30,000 - WARNING - CUDA out of memory: a smaller batch is used\n", None),
    ("what shells and drivers miss at the start, and one step", "mkdir: /x: Permission denied\nOSError: [Errno 2] No such file or directory: 'cache'\n" + steps(1, 2), None),
    ("what a shell and Slurm do without", "slurmstepd: error: Unable to create TMPDIR [/scratch/u]: Permission denied\nslurmstepd: error: Setting TMPDIR to /tmp\nbash: /users/u/.bashrc: Permission denied\n", None),
    ("nothing at all", "", None),
    # numbers
    ("a loss that stays no number", steps(1, 9) + steps(9, 15).replace("2.5", "nan"), ("loss_nan", None, None)),
    ("a loss that stays no number, beside a bar that says none", bars(1, 60) + bars(60, 120, "nan"), ("loss_nan", None, None)),
    ("a loss of zero without a gradient, beside a bar", bars(1, 60) + bars(60, 120, "0.0", "nan"), ("loss_nan", None, None)),
    *(
        (f"a loss in a line of its own: {line}", "".join(f"[{count}={n}/4800]{colon}\n{line}{value}\n" for n, value in enumerate(values, 5)), verdict)
        for count, colon, line in (("batch", ":", "\t Train loss/train/total: "), ("step", "", "    train/CrossEntropyLoss="), ("step", ",epoch=1", "    train/CE loss="))
        for values, verdict in ((("2.5",) * 20 + ("nan",) * 9, ("loss_nan", None, None)), (("2.5",) * 20 + ("nan",) * 9 + ("2.4",), None), (("2.5",) * 20 + ("nan",), None))
    ),
    ("a loss that was no number in an earlier stage", bars(1, 60, "nan") + bars(60, 400, None), None),
    # other launchers and frameworks
    ("a container that did not start", "slurmstepd: error: pyxis: couldn't start container\nsrun: error: n3: task 5: Exited with exit code 1\nsrun: Terminating StepId=4.0\nsrun: error: n1: tasks 0-3: Terminated\n", ("not_started", 5, "n3")),
    ("a collective of Ascend", traceback("", "RuntimeError: The Inner error is reported as above. The process exits for this inner error, and the current working operator name is HcclAllreduce.", "EI0002: [PID: 7] 2024-05-01-10:29:59.1 The wait execution of the Notify register times out."), ("collective_timeout", None, None)),
    ("what one rank said, raised on every rank", "".join(traceback(f"[rank{r}]: ", "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([5])", "Traceback (most recent call last): (RANK 5)", '  File "utils.py", line 192, in all_reduce', DISK) for r in range(8)), ("disk_full", 5, None)),
    ("Horovod's word for an exception elsewhere", traceback("[1,3]<stderr>:", "KeyError: 'img_7'") + "".join(traceback(f"[1,{r}]<stderr>:", "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.") for r in (0, 1, 2)), ("python_exception", 3, None)),
    ("ranks of a group that can only be all", "world size: 16\n" + "".join(f"[default{r % 8}]:[E ProcessGroupNCCL.cpp:474] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=90, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800070 milliseconds before timing out.\n" for r in range(16) if r != 11), ("nccl_watchdog", 11, None)),
    ("ranks of groups of half the ranks", "world size: 16\n" + "".join(f"[default{r}]:[E ProcessGroupNCCL.cpp:474] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=90, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800070 milliseconds before timing out.\n" for r in range(8) if r != 3), ("nccl_watchdog", None, None)),
    ("Ray's guesses are no cause", "(raylet, ip=10.4.0.19) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 10.4.0.19 Worker port: 1 Worker PID: 664 Worker exit type: SYSTEM_ERROR Worker exit detail: (1) The process is killed by SIGKILL by OOM killer due to high memory usage.\n" + traceback("", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tpid: 664", "\tip: 10.4.0.19"), ("ray_actor_died", None, "10.4.0.19")),
    ("the driver's words for memory", traceback("[rank14]: ", "RuntimeError: CUDA driver error: out of memory"), ("cuda_oom", 14, None)),
    ("NCCL's word for a call of CUDA in its own process", "".join(f"9: {line}\n" for line in (*traceback("", "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled cuda error").splitlines(), "ncclUnhandledCudaError: Call to CUDA function failed.", "Last error:", "Cuda failure 719 'unspecified launch failure'")), ("cuda_error", 9, None)),
    ("NCCL's word for a call of CUDA, and nothing more", traceback("[rank5]: ", "torch.distributed.DistBackendError: NCCL error in: a.cpp:2395, unhandled cuda error, RCCL version : 2.22.3", "ncclUnhandledCudaError: Call to CUDA function failed.", "Last error:", "Failed to CUDA malloc 512 bytes") + traceback("[rank4]: ", "torch.distributed.DistBackendError: NCCL error in: a.cpp:2395, remote process exited or there was a network error"), ("nccl_error", 5, None)),
    ("NCCL's word for a call of CUDA, of two ranks", "".join(traceback(f"[rank{r}]: ", "torch.distributed.DistBackendError: NCCL error in: a.cpp:2395, unhandled cuda error") for r in (4, 5)), ("nccl_error", None, None)),
    ("a rank in the words of a Gaudi", traceback("", "RuntimeError: [Rank:5] FATAL ERROR :: MODULE:PT_HPU_SYNHELPER workspace Allocation failed!"), ("python_exception", 5, None)),
    ("collectives of Neuron", "missing collectives status on Neuron Device 3 NC 1, model /tmp/x.neff, waiting for cc\n", ("collective_timeout", None, None)),
    ("tasks that failed, and then somebody cancelled the job", steps(1, 9) + "srun: error: n2: task 3: Exited with exit code 1\nsrun: error: n1: task 0: Exited with exit code 1\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:00:21 ***\n", ("task_exit", None, None)),
    ("tasks that were told to end, and then the job was", steps(1, 9) + "srun: error: n2: task 3: Exited with exit code 143\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:00:21 ***\n", None),
    ("tasks that end with a code of their own, and then it is preempted", steps(1, 9) + "srun: error: n2: task 3: Exited with exit code 1\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:00:21 DUE TO PREEMPTION ***\n", None),
    ("a log that ends within a victim's traceback", traceback("[rank1]: ", LOST) + traceback("[rank3]: "), ("peer_lost", None, None)),
    ("a log that ends within the only traceback", steps(1, 9) + traceback("[rank3]: "), ("traceback", 3, None)),
    ("a log that ends within two tracebacks", steps(1, 9) + traceback("[rank3]: ") + traceback("[rank8]: "), ("traceback", None, None)),
    ("tasks that srun ended are no culprits", "srun: error: n1: tasks 0-2: Terminated\n", ("task_exit", None, None)),
    ("who takes its process down has timed out, too", "world_size=4\n" + "".join(timeout(r) for r in (1, 2, 3)) + "[rank0]:[E501 10:40:00.3 ProcessGroupNCCL.cpp:753] [Rank 0] To avoid data inconsistency, we are taking the entire process down.\n", ("nccl_watchdog", None, None)),
    ("Paddle's container", traceback("", "OSError: (External) CUDA error(700), an illegal memory access was encountered.") + "LAUNCH INFO 2024-05-01 10:00:05,881 Pod failed\nContainer rank 4 status failed cmd ['python', '-u', 'run.py'] code 1 log out/workerlog.4\n", ("cuda_error", 4, None)),
    ("ColossalAI's launcher", "Error: failed to run torchrun on 10.9.0.7, is localhost: False, exception: Encountered a bad command exit code!\n", ("launcher", None, None)),
    ("the host of a launcher's task", "0: torchrun --nproc_per_node 8\n" + traceback("11: [default5]:[rank93]: ", DISK) + "srun: error: n12: task 11: Exited with exit code 1\n", ("disk_full", 93, "n12")),
    ("Ray's node that is dead", "(raylet) The node with node id: 81ab and address: 10.7.0.13 and node name: 10.7.0.13 has been marked dead because the detector has missed too many heartbeats from it.\n" + traceback("", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."), ("heartbeat_lost", None, "10.7.0.13")),
    ("the node on which Ray ended workers", "(raylet) node_manager.cc:3041: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: 81ab, IP: 10.7.0.4) over the last time period.\n", ("oom_kill", None, "10.7.0.4")),
    ("pdsh's word of a node that went away", "Connection to n3 closed by remote host.\npdsh@n0: n3: ssh exited with exit code 255\n", ("launcher", None, "n3")),
    ("MPICH's box", "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 21 PID 70112 RUNNING AT n5\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n", ("segmentation_fault", 21, "n5")),
    ("all ranks of one node", "".join(traceback(f"[rank{r}]: ", "FileNotFoundError: [Errno 2] No such file or directory: '/d/a'") for r in range(8, 16)) + "srun: error: n2: tasks 8-15: Exited with exit code 1\nsrun: Terminating StepId=1.0\nsrun: error: n1: tasks 0-7: Terminated\n", ("missing_file", None, "n2")),
    ("ranks of two nodes", "".join(traceback(f"[rank{r}]: ", "FileNotFoundError: [Errno 2] No such file or directory: '/d/a'") for r in range(8, 16)) + "srun: error: n2: tasks 8-11: Exited with exit code 1\nsrun: error: n3: tasks 12-15: Exited with exit code 1\nsrun: error: n1: tasks 0-7: Terminated\n", ("missing_file", None, None)),
    ("an eviction for want of local storage", steps(1, 9) + "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 8Gi.\n", ("disk_full", None, None)),
    ("who waits for a key of the store is no culprit", steps(1, 9) + traceback("[rank3]: ", "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//timeout_dump"), ("collective_timeout", None, None)),
    ("a large number after a host, in every line of a traceback", traceback("[n14:112] ", DISK), ("disk_full", 112, "n14")),
    ("a module and its line, beside others", "[trainer.py:388] step 4 loss 2.1\n[core2:77] RuntimeError: CUDA error: misaligned address\n", ("cuda_error", None, None)),
    ("JSON with the traceback beside the message", '{"level": "error", "rank": 12, "host": "n12", "msg": "uncaught exception", "exc": "Traceback (most recent call last):\\n  File \\"a.py\\", line 1, in f\\nRuntimeError: CUDA error: device-side assert triggered\\n"}\n', ("device_assert", 12, "n12")),
    ("DeepSpeed's launcher", "[2024-05-01 10:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 77\n[2024-05-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['python', '--local_rank=7'] exits with return code = -9\n", ("killed", None, None)),
    ("DeepSpeed's launchers, one that was killed and one that lost it", "[2024-05-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['python', '--local_rank=7'] exits with return code = -9\n[2024-05-01 10:00:03,000] [ERROR] [launch.py:325:sigkill_handler] ['python', '--local_rank=7'] exits with return code = 1\n", ("killed", None, None)),
    ("DeepSpeed's launchers, one that failed and one that was ended for it", "[2024-05-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['python', '--local_rank=7'] exits with return code = 1\n[2024-05-01 10:00:03,000] [ERROR] [launch.py:325:sigkill_handler] ['python', '--local_rank=7'] exits with return code = -9\n", ("launcher", None, None)),
    ("mpirun's word", "mpirun noticed that process rank 12 with PID 3112 on node n4 exited on signal 9 (Killed).\n", ("killed", 12, "n4")),
    ("JAX: one task is gone", "E0501 10:00:00.1 7 coordination_service.cc:1170] /job:jax_worker/replica:0/task:3 has been set to ERROR in coordination service: UNAVAILABLE: Task /job:jax_worker/replica:0/task:3 heartbeat timeout.\n", ("heartbeat_lost", 3, None)),
    ("JAX: memory of the device", traceback("", "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."), ("cuda_oom", None, None)),
]  # fmt: skip


# who says a line

XID = "[ 4410.5] NVRM: Xid (PCI:0000:1b:00): {}, pid=77, name=python3, Ch 00000008\n"
CUDA = "RuntimeError: CUDA error: unspecified launch failure"
RAY = "(RayTrainWorker pid={}, ip=10.0.0.{}) "
RAYLET = "(raylet, ip=10.0.0.4) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed at node (IP: 10.0.0.4).\n"


def record(rank: int, message: str) -> str:
    return json.dumps({"ts": "2024-05-01T10:00:00Z", "level": "ERROR", "rank": rank, "message": message}) + "\n"


SPEAKERS: list[tuple[str, str, Expected]] = [
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
    ("of recorded errors the one of the root cause", recorded("n2", (3, "10:00:00", "ValueError: no label"), (2, "10:00:01", LOST)) + recorded("n1", (0, "10:00:00", LOST), (1, "10:00:02", LOST)), ("python_exception", 3, "n2")),
    ("recorded, and another node's root cause is earlier", recorded("n2", (3, "10:00:05", "ValueError: no label"), (2, "10:00:06", LOST)) + recorded("n1", (0, "10:00:00", LOST), (1, "10:00:02", LOST)), ("peer_lost", None, None)),
    ("recorded, and the victim has an error of its own", recorded("n2", (2, "10:00:01", LOST), (3, "10:00:01", "ValueError: no label")), ("peer_lost", None, None)),
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
    ("what Slurm could not start", steps(1, 9) + "srun: error: Task launch for StepId=7.0 failed on node n17: Invalid job credential\nsrun: error: Application launch failed: Invalid job credential\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n", ("not_started", None, "n17")),
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
    # one rank repeats what another said
    ("what another rank said", steps(1, 9) + traceback("[rank0]: ", f"RuntimeError: worker on rank 5 failed: {DISK}"), ("disk_full", 5, None)),
    ("an exception from another rank", steps(1, 9) + traceback("[rank0]: ", f"RuntimeError: received exception from rank 4: {DISK}"), ("disk_full", 4, None)),
    ("what a rank that there is not said", "world_size: 4\n" + traceback("[rank0]: ", f"RuntimeError: Rank 7 reported an error: {DISK}"), ("disk_full", None, None)),
    ("the first at a barrier that others missed", "jaxlib.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all::0.\nThe first task at the barrier: /job:jax_worker/replica:0/task:0. Some timed out task names:\n/job:jax_worker/replica:0/task:12\n", ("collective_timeout", 12, None)),
    # what a program does without is no cause where there is another
    ("what a program got instead, it does not do without", steps(1, 9) + "ValueError: expected a tensor of 2 dimensions, but got one of 3 instead\n", ("python_exception", None, None)),
    ("an exception below a warning that is the only one, and ends the run", steps(1, 9) + "[rank2]: WARNING falling back to eager\n" + traceback("[rank2]: ", "ValueError: no label") + traceback("[rank0]: ", f"RuntimeError: {LOST}"), ("python_exception", 2, None)),
    ("an error whose line says what is done instead", steps(1, 9) + "[rank3]: PermissionError: [Errno 13] Permission denied: '/c/x' - using a temporary directory\n" + traceback("[rank6]: ", DISK), ("disk_full", 6, None)),
    ("a checkpoint that could not be saved at the time limit", steps(1, 20) + "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:20:21 DUE TO TIME LIMIT ***\n" + traceback("[rank0]: ", DISK), None),
    ("a connection that torch tries again", "[W501 10:00:02.1 socket.cpp:759] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 22 - Invalid argument).\nbuilding the model\n", None),
    ("a tag of a server of models", steps(1, 9) + "".join(f"[2024-05-01 10:00:09 DP0 TP3] {line}\n" for line in traceback("", DISK).splitlines()), ("disk_full", None, None)),
    # who says more
    ("a checkpoint that could not be written, and in the same traceback why", traceback("[rank0]: ", "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0") + "[rank0]: During handling of the above exception, another exception occurred:\n" + traceback("[rank0]: ", DISK), ("disk_full", 0, None)),
    ("a loader's worker, and Slurm says what killed it", traceback("[rank3]: ", "RuntimeError: DataLoader worker (pid 51234) is killed by signal: Killed. ") + "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some of the step tasks have been OOM Killed.\n", ("oom_kill", 3, None)),
    ("a compiler that a rank called is no launcher", traceback("[rank0]: ", "torch._inductor.exc.InductorError: CalledProcessError: Command '['gcc', 'main.c']' returned non-zero exit status 1."), ("python_exception", 0, None)),
    ("a type of a matrix is no shape", traceback("[rank0]: ", "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"), ("dtype_device", 0, None)),
    ("what is missing in a checkpoint", traceback("[rank5]: ", "RuntimeError: Missing key in checkpoint state_dict: optimizer.param_groups.norm.weight"), ("checkpoint_mismatch", 5, None)),
    ("a driver that is too old", traceback("[rank5]: ", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."), ("cuda_unavailable", 5, None)),
    ("a check of glog", steps(1, 9) + "F0501 10:00:09.1 4411 thread.cc:88] Check failed: ret == 0 (11 vs. 0)\n*** Check failure stack trace: ***\n", ("abort", None, None)),
    ("the other end of a transfer on Slingshot", steps(1, 9) + "MPIDI_OFI_handle_cq_error(1062): OFI poll failed (ofi_events.c:1064:MPIDI_OFI_handle_cq_error:Input/output error - PTLTE_NOT_FOUND)\n", ("peer_lost", None, None)),
    ("the task for which srun waited no longer", steps(1, 9) + "srun: First task exited 60s ago\nsrun: StepId=7.0 tasks 0-2,4-7: running\nsrun: StepId=7.0 task 3: exited abnormally\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2024-05-01T10:01:09 ***\n", ("task_exit", 3, None)),
    ("a program that is not there", "/var/spool/slurmd/job00012/slurm_script: line 33: torchrun: command not found\n", ("missing_file", None, None)),
    ("a tool that is not there", "/var/spool/slurmd/job00012/slurm_script: line 3: nvidia-smi: command not found\n" + steps(1, 2), None),
    ("one of many in a cascade", traceback("[rank5]: ", DISK) + "".join(timeout(r) for r in range(8) if r != 5), ("disk_full", 5, None)),
]  # fmt: skip


AROUND: list[tuple[str, str, Expected]] = [
    ("a process beside the program that tidies up", steps(1, 20) + "training finished\n" + traceback("", "KeyError: '/psm_4411'").replace("/opt/t/train.py", "/usr/lib/python3.11/multiprocessing/resource_tracker.py"), None),
    ("an exception that was caught, and torchrun saw another rank end", steps(1, 9) + "[rank1]: WARNING retrying read, attempt 2/5\n" + traceback("[rank1]: ", "ValueError: odd sample") + table((3, 3, "n1", 1, "10:00:05")), ("launcher", 3, "n1")),
    ("an exception that was caught, then another rank's", steps(1, 9) + "[rank2]: 2024-05-01 10:00:09 - root - WARNING - skipping sample 81\n" + traceback("[rank2]: ", "ValueError: odd sample") + traceback("[rank5]: ", DISK), ("disk_full", 5, None)),
    ("an exception that was caught, and the log ends there", steps(1, 9) + "[rank2]: 2024-05-01 10:00:09 - root - WARNING - evaluation failed, continuing\n" + traceback("[rank2]: ", "KeyError: 'bleu'"), None),
    ("how programs of a sandbox ended", "".join(steps(n, n + 5, n // 5) + RAY_SANDBOX + "/s/run.sh: line 3:  91 Segmentation fault      (core dumped) ./a.out\n" for n in (1, 6, 11)), None),
]  # fmt: skip
"""What the lines around an error say of it: agents do not report those, and only `scan-log` reads them."""
