"""`scan-log`'s verdict on whole logs: the cause and not the cascade, and nobody named where nothing names him."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.diagnose.logs.digest import Collector
from slurm_watchdog.diagnose.logs.report import Judged, judge_job


@dataclass(frozen=True)
class Defaults:
    limits: CollectiveHang = field(default_factory=CollectiveHang)
    nan_steps: int = 3


def read(text: str | bytes, at: str | None = None, path: str = "train.log") -> Judged:
    data = text.encode() if isinstance(text, str) else text
    collector = Collector(markdown=True)
    collector.add(data, 1)
    return judge_job([path], [collector.digest()], Defaults(), at)


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
    """A bar of tqdm and, after every fifth step, the dictionary of the Hugging Face Trainer with the loss, if it is told."""
    return "".join(
        f"  1%|    | {n}/5000 [00:{n % 60:02d}<10:00,  1.01s/it]\n"
        + (
            f"{{'loss': {loss}, 'grad_norm': {norm}, 'epoch': {n / 1000:.3f}}}\n"
            if loss and n % 5 == 0
            else ""
        )
        for n in range(first, last)
    )


def traceback(prefix: str, *last: str) -> str:
    frames = (
        "Traceback (most recent call last):",
        '  File "/opt/t/train.py", line 7, in main',
        "    run(batch)",
    )
    return "".join(f"{prefix}{line}\n" for line in (*frames, *last))


def timeout(
    rank: int, seq: int = 90, op: str = "ALLREDUCE", numel: int = 4096, done: int | None = None
) -> str:
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


LOST = "RuntimeError: Connection closed by peer [10.0.0.4]:3301"
DISK = "OSError: [Errno 28] No space left on device"


CASES: list[tuple[str, str, tuple[str, int | None, str | None] | None]] = [
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
    ("mpirun's word", "mpirun noticed that process rank 12 with PID 3112 on node n4 exited on signal 9 (Killed).\n", ("killed", 12, "n4")),
    ("JAX: one task is gone", "E0501 10:00:00.1 7 coordination_service.cc:1170] /job:jax_worker/replica:0/task:3 has been set to ERROR in coordination service: UNAVAILABLE: Task /job:jax_worker/replica:0/task:3 heartbeat timeout.\n", ("heartbeat_lost", 3, None)),
    ("JAX: memory of the device", traceback("", "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."), ("cuda_oom", None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_log_gives_its_verdict(text: str, expected: tuple[str, int | None, str | None] | None) -> None:
    assert verdict_of(text) == expected


NOISE = (
    "n1:77:78 [0] NCCL INFO Channel 00/24 : 0 1 2 3",
    "loading shard 3 of 8",
    "Bonjour à tous, tout va bien",
    "学習を開始します。エラーはありません",
    "WARNING: the tokenizer is slow",
    "GPU 3: 41234MiB / 81559MiB, 98 %",
    "",
    "    ",
    "wandb: Run data is saved locally",
)
HAVE_NO_NOISE_BETWEEN = (
    "a chain",
    "a lookup",
    "what a DataLoader",
    "the table",
    "nobody knows",
    "a row that",
    "a restart",
    "a destructor",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [case[1:] for case in CASES if not case[0].startswith(HAVE_NO_NOISE_BETWEEN)],
    ids=[case[0] for case in CASES if not case[0].startswith(HAVE_NO_NOISE_BETWEEN)],
)
@settings(max_examples=15, deadline=None)
@given(noise=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(NOISE)), max_size=12))
def test_lines_of_no_matter_change_no_verdict(
    text: str, expected: tuple[str, int | None, str | None] | None, noise: list[tuple[int, str]]
) -> None:
    lines = text.splitlines()
    for place, line in noise:
        lines.insert(place % (len(lines) + 1), line)
    assert verdict_of("\n".join(lines) + "\n") == expected


PARTS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([line.encode() for case in CASES for line in case[1].splitlines()]),
    st.sampled_from([b"```", b"> ", b"[rank", b"1]: ", b"Traceback (most recent call last):", b"step 5/10", b"\r", b"\0", b"\x1b[0m", b"2024-13-77 99:99:99 "]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PARTS, max_size=60), st.sampled_from([b"\n", b"", b"\r\n"]))
def test_nothing_that_stands_in_a_file_breaks_it(parts: list[bytes], between: bytes) -> None:
    judged = read(between.join(parts), at="2024-05-01 12:00:00")
    for row in judged.rows():
        assert (row["verdict"] is None) == row["healthy"]


@pytest.mark.parametrize(
    "text", [case[1] for case in CASES if case[2] is not None and case[2][1] is not None], ids=[case[0] for case in CASES if case[2] is not None and case[2][1] is not None]
)  # fmt: skip
def test_a_rank_that_is_named_stands_in_the_log(text: str) -> None:
    verdict = read(text).verdict
    assert verdict is not None
    assert str(verdict.rank) in text or verdict.missing == (verdict.rank,)


def test_a_silent_log_is_a_hang_only_after_its_own_limit() -> None:
    text = steps(1, 300)
    assert verdict_of(text, at="2024-05-01 10:05:30") is None
    assert verdict_of(text, at="2024-05-01 10:30:00") == ("hang", None, None)


def test_pulses_are_no_progress_and_show_how_long_it_is_silent() -> None:
    pulses = "".join(
        f"[2024-05-01 {hour}:04:59] PULSE: tr is running for 1:00 since 2024-05-01T10:00:00\n"
        for hour in (10, 11, 12)
    )
    assert verdict_of(steps(1, 300) + pulses) == ("hang", None, None)


def test_an_evaluation_may_take_its_time() -> None:
    text = steps(1, 300) + "2024-05-01 10:05:01,000 - INFO - starting evaluation\n"
    assert verdict_of(text, at="2024-05-01 10:30:00") is None
    assert verdict_of(text, at="2024-05-01 12:30:00") == ("hang", None, None)


def test_a_log_that_is_finished_is_silent_for_ever() -> None:
    assert verdict_of(steps(1, 300) + "Training completed.\n", at="2024-05-03 10:00:00") is None


def test_without_any_clock_nothing_is_said_of_silence() -> None:
    text = "".join(f"step {n}/5000 | loss: 2.5 |\n" for n in range(100))
    assert verdict_of(text) is None


def test_a_change_of_speed_is_told_with_its_step() -> None:
    text = "".join(
        f" iteration {n:8d}/  115311 | elapsed time per iteration (s): {(105.2 if n < 60 else 111.3) + n % 5 / 10:.2f} | global batch size:  2048 | lm loss: 2.1E+00 |\n"
        for n in range(1, 121)
    )
    (change,) = read(text).rows()[0]["throughput_changes"]
    assert abs(change["step"] - 60) <= 2
    assert change["percent"] == pytest.approx(5.8, abs=0.3)


def test_a_ramp_of_the_batch_is_no_change_of_speed() -> None:
    text = "".join(
        f" iteration {n:8d}/  115311 | elapsed time per iteration (s): {10 + n // 40}.{n % 4} | global batch size:  {256 * (1 + n // 40)} | lm loss: 2.1E+00 |\n"
        for n in range(1, 161)
    )
    assert read(text).rows()[0]["throughput_changes"] == []


def test_what_people_tell_of_errors_is_no_error() -> None:
    told = "Last week we had CUDA errors, NCCL errors and nodes that ran out of memory, but our run went on after each of them.\n"
    assert verdict_of(told) is None


def test_a_try_that_failed_before_the_one_that_came_to_its_end_is_over() -> None:
    text = (
        "Killing subprocess 77\nKilling subprocess 78\n"
        + "loading\n" * 9
        + "{'train_runtime': 120.5, 'epoch': 1.0}\n"
    )
    assert verdict_of(text) is None


def test_a_letter_with_two_excerpts_tells_of_two_incidents() -> None:
    def pasted(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.splitlines())

    letter = (
        f"Hello,\non Monday this came:\n\n{pasted(traceback('[rank3]: ', 'RuntimeError: mat1 and mat2 shapes cannot be multiplied'))}\n"
        f"and on Friday, after we had mended that:\n\n{pasted(''.join(timeout(r) for r in range(8) if r != 6))}\nAny ideas?\n"
    )
    judged = read(letter)
    assert judged.verdict is not None
    assert (judged.verdict.name, judged.verdict.rank, judged.verdict.followed) == ("shape_mismatch", 3, 0)


def test_a_log_whose_lines_are_indented_is_one_log() -> None:
    assert verdict_of("start\n" + "".join(f"    {line}\n" for line in traceback("", DISK).splitlines())) == (
        "disk_full",
        None,
        None,
    )


def test_progress_between_indented_lines_is_no_letter() -> None:
    log = "".join(f"step {n}/900 loss 2.5\n    forward: 1.2 s\n    backward: 2.2 s\n" for n in range(1, 40))
    judged = read(log)
    assert judged.sources[0].progress.last_step == 39


def test_a_number_that_is_no_step_breaks_nothing() -> None:
    assert read(steps(1, 9) + f"step {'9' * 400}/5000 | loss: 2.5 |\n").sources[0].progress.last_step == 8


def test_of_a_transfer_that_got_no_answer_both_ends_are_told() -> None:
    text = "n2:57:59 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0\n"
    verdict = read(steps(1, 9) + text).verdict
    assert verdict is not None
    assert "host n2 did not reach 10.2.0.5; either end may be at fault" in verdict.summary


ENDS = (
    traceback("[rank5]: ", DISK) + "".join(timeout(r) for r in range(8) if r != 5),
    "".join(timeout(r) for r in range(8) if r != 5),
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\nsrun: error: n3: task 9: Out Of Memory\n",
    "world_size: 64\n" + traceback("n2: ", LOST),
    "",
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ENDS), st.lists(st.integers(1, 4000), min_size=1, max_size=12), st.integers(1, 900))
def test_in_whatever_pieces_a_log_is_read_the_verdict_is_the_same(
    end: str, sizes: list[int], many: int
) -> None:
    text = ("world_size: 8\n" + steps(1, many) + end).encode()
    whole = Collector()
    whole.add(text, 1)
    split, at, line, turn = Collector(), 0, 1, 0
    while at < len(text):
        stop = text.find(b"\n", min(len(text) - 1, at + sizes[turn % len(sizes)])) + 1 or len(text)
        split.add(text[at:stop], line)
        line, at, turn = line + text.count(b"\n", at, stop), stop, turn + 1
    one, other = (judge_job(["a.log"], [each.digest()], Defaults(), None) for each in (whole, split))
    assert one.verdict == other.verdict
    assert one.ranks.world == other.ranks.world
    assert one.rows()[0]["progress"]["last_step"] == other.rows()[0]["progress"]["last_step"]
