"""Lines of a log that only speak of an error, or say in passing what became of one: they end no run."""

from __future__ import annotations

import pytest

from tests.builders.failed_logs import steps, verdict_of

SPOKEN_OF = (
    "gpu 3: 0 uncorrectable ECC errors, 0 remapped rows",
    "uncorrectable ECC errors: 0",
    "memory.events: low 0 high 12 max 0 oom 0 oom_kill 0",
    "Segmentation faults: 0, bus errors: 0",
    "NCCL errors so far: 0",
    "health check: no GPU has fallen off the bus",
    "No OOM kill events were found in the kernel log",
    "checks for 'GPU is lost' ... passed",
    "fault tolerance: on NCCL error the group is rebuilt",
    "on CUDA out of memory: empty cache",
    "will abort on Watchdog caught collective operation timeout",
    "signal handlers: SIGTERM -> checkpoint, SIGSEGV -> faulthandler",
    "4711 gpu train u NF 0:00 4 (NODE_FAIL)",
    "note: if you see 'CUDA error: device-side assert triggered', set CUDA_LAUNCH_BLOCKING=1",
    "+ grep -q 'CUDA out of memory' err.log",
    "3: ++ dmesg | grep -i 'Out of memory: Killed process'",
    "if grep -q 'No space left on device' err.log; then",
    'export MESSAGE="RuntimeError: NCCL error"',
    "ulimit -c 0 # no core files on Segmentation fault",
    'If this job fails with "CUDA error: uncorrectable ECC error", write to the support',
    "trap 'echo Segmentation fault; exit 1' SEGV",
    '# echo "OSError: [Errno 28] No space left on device"',
)


@pytest.mark.parametrize("line", SPOKEN_OF)
@pytest.mark.parametrize("before", [steps(1, 40), "loading the model\n"], ids=["after steps", "before the first step"])
def test_an_error_that_is_only_spoken_of_is_none(before: str, line: str) -> None:
    assert verdict_of(f"{before}{line}\n") is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[rank0]: uncorrectable ECC error encountered", ("gpu_ecc", 0, None)),
        ("rank 0 uncorrectable ECC error encountered", ("gpu_ecc", 0, None)),
        ("stopped on CUDA out of memory", ("cuda_oom", None, None)),
        ("OSError: [Errno 28] No space left on device: '/x/0'", ("disk_full", None, None)),
        ("bash: echo: write error: No space left on device", ("disk_full", None, None)),
        ("Detected 1 oom_kill event in StepId=4.0", ("oom_kill", None, None)),
    ],
)
def test_the_same_words_in_earnest_are_found(line: str, expected: tuple[str, int | None, str | None]) -> None:
    assert verdict_of(f"{steps(1, 40)}{line}\n") == expected


RAISED = 'Traceback (most recent call last):\n  File "a.py", line 9, in poll\n    await get(url)\n'


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "Task exception was never retrieved\n"
            "future: <Task finished name='Task-9' coro=<poll()> exception=ConnectionError('x')>\n"
            f"{RAISED}ConnectionError: no answer from stats:80\n",
            id="a task of asyncio ends alone",
        ),
        pytest.param(
            f"ERROR could not upload metrics\n{RAISED}ConnectionError: no answer\nINFO upload is best effort, ignored\n",
            id="what is ignored",
        ),
        pytest.param("CUDA out of memory. Decreasing batch size to: 32.\n", id="a search for the batch size"),
        pytest.param("address already in use, port 29500; trying 29501\n", id="another port is tried"),
        pytest.param("download of s3://b/1: ConnectionResetError(104), attempt 1 of 3\n", id="not the last attempt"),
        pytest.param("sandbox: program 71 OOM killed (512 MiB), reward 0\n", id="a program that a model wrote"),
        pytest.param(f"Test 17: {RAISED}AssertionError\n", id="a test of an evaluation"),
        pytest.param("previous run ended with: RuntimeError: NCCL error: x\n", id="an earlier run"),
        pytest.param("rsync: read error: Connection reset by peer (104)\n", id="files are copied at the end"),
        pytest.param("client_loop: send disconnect: Broken pipe\n", id="a tunnel of ssh ends"),
        pytest.param("'ReadTimeout(1)' thrown while requesting HEAD https://h/x/config.json\n", id="a hub is asked again"),
        pytest.param("job.sh: line 31:  9911 Killed                  nvidia-smi dmon -o T\n", id="a monitor is ended"),
        pytest.param("n1:77:90 [3] NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n", id="a port flaps"),
        pytest.param("n1:77:90 [0] misc/ibvwrap.cc:103 NCCL WARN Call to ibv_open_device failed\n", id="a port is left out"),
        pytest.param(
            "n1:77:90 [3] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.1.4<4011> failed : Connection refused\n"
            "n1:77:90 [3] NCCL INFO Call to connect returned Connection refused, retrying\n",
            id="a peer does not listen yet",
        ),
    ],
)  # fmt: skip
def test_what_a_program_says_in_passing_ends_no_run(text: str) -> None:
    assert verdict_of(steps(1, 40) + text) is None


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/rm: cannot remove '/usr/local/cuda/compat/lib': Read-only file system",
        "mkdir: cannot create directory '/scratch/u': Permission denied",
        "cat: /proc/driver/nvidia/params: Permission denied",
        "find: '/proc/1/task': Permission denied",
    ],
)
def test_what_a_command_of_the_script_could_not_do_is_the_cause_only_where_nothing_else_is(line: str) -> None:
    raised = (
        "[rank3]: Traceback (most recent call last):\n[rank3]:   File \"t.py\", line 3, in f\n[rank3]: KeyError: 'a'\n"
    )
    assert verdict_of(f"{line}\nloading the model\n") is None
    assert verdict_of(f"{line}\nloading the model\n{raised}") == ("python_exception", 3, None)
    found = verdict_of(f"{line}\nsrun: error: n3: task 0: Exited with exit code 1\n")
    assert found is not None
    assert found[0] in ("read_only", "permission")


def test_a_port_that_flaps_is_the_cause_where_ranks_were_lost() -> None:
    text = (
        f"{steps(1, 40)}n1:77:90 [3] NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n"
        "[rank3]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"
    )
    found = verdict_of(text)
    assert found is not None
    assert found[0] == "infiniband"


def test_paddle_says_below_a_memory_error_that_it_was_a_gpus_memory() -> None:
    text = (
        'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    train()\nMemoryError: \n\n'
        "--------------------------------------\nError Message Summary:\n----------------------\n"
        "ResourceExhaustedError: \n\nOut of memory error on GPU 3. Cannot allocate 2.000000GB memory on GPU 3\n"
    )
    assert verdict_of(text) == ("cuda_oom", None, None)


def test_a_fortran_program_says_why_it_stopped() -> None:
    found = verdict_of(" ITER 1\nAt line 31 of file io.f90 (unit = 11)\nFortran runtime error: End of file\n")
    assert found == ("program_error", None, None)


DONE = "2024-05-01 10:00:20,000 - INFO - Training completed\n"
SUMMARY = "incidents during the run: 1 x CUDA out of memory (rank 3, step 12, restarted), 2 x uncorrectable ECC error\n"


def test_a_summary_below_the_end_of_training_has_not_happened_again() -> None:
    assert verdict_of(steps(1, 20) + DONE + SUMMARY) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (DONE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n", "cuda_oom"),
        (DONE + "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\n", "oom_kill"),
        (DONE + SUMMARY + "srun: error: n3: task 9: Exited with exit code 1\n", "cuda_oom"),
        (SUMMARY, "cuda_oom"),
    ],
)
def test_what_is_said_by_itself_below_the_end_of_training_has_happened(text: str, name: str) -> None:
    found = verdict_of(steps(1, 20) + text)
    assert found is not None
    assert found[0] == name
