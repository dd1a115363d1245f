"""`slurm-watchdog scan-log`: what people and programs get to see, what is read, and the exit codes."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurm_watchdog.cli.main import main

STEPS = "".join(
    f"[2024-05-01 10:{n // 60:02d}:{n % 60:02d}] step {n}/1000 | loss: {2 + 1 / (n + 1):.3f} |\n"
    for n in range(0, 600, 5)
)
OOM = """[rank5]: Traceback (most recent call last):
[rank5]:   File "/opt/t/train.py", line 7, in step
[rank5]:     loss.backward()
[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error
"""
KEYS = {"path", "framework", "progress", "phases", "throughput_changes", "errors", "verdict", "healthy"}


def run(*words: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["scan-log", *map(str, words)], input=stdin)


def answer(*words: str | Path, stdin: bytes | None = None) -> list[dict[str, Any]]:
    result = run("--json", *words, stdin=stdin)
    assert result.exit_code in (0, 1), result.output
    files: list[dict[str, Any]] = json.loads(result.stdout)["files"]
    return files


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(STEPS + OOM)
    return path


def test_a_healthy_log_gives_no_verdict_and_code_0(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(STEPS)
    result = run(path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "nothing wrong found" in result.stdout
    (file,) = answer(path)
    assert (file["verdict"], file["healthy"]) == (None, True)
    assert file["progress"]["advancing"] is True


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (Path(sys.executable).resolve().read_bytes()[:200_000], 2),
        (bytes(3000) + b"step 1 loss 2.0\nstep 2 loss 1.9\n", 0),  # a hole, where a log was cut while it was written to
        ("Schritt 1 für Gewichte, größer\n".encode("latin-1") * 40, 2),
        (b"\x1b[32mepoch 1\x1b[0m: 10%\x08\x08\x0820%\r30%\r" * 50 + b"\n", 2),
    ],
    ids=["a program", "a hole of zeros", "another encoding", "colours and bars"],
)
def test_a_file_that_is_not_text_is_not_said_to_be_well(tmp_path: Path, data: bytes, code: int) -> None:
    log = tmp_path / "job.out"
    log.write_bytes(data)
    done = run(log)
    assert done.exit_code == code, done.output
    assert ("is not text" in done.stderr) == (data[:4] == b"\x7fELF")
    assert "nothing wrong" not in done.output or code == 0


def test_a_log_that_its_time_limit_ended_says_so(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(
        STEPS + "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME LIMIT ***\n"
    )
    result = run(path)
    line = len(STEPS.splitlines()) + 1
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"nothing wrong found; ended from outside (line {line}): the time limit; its last step is" in result.stdout


@pytest.mark.parametrize(
    "line",
    ["[ {n}.000123] usb 1-1: new device", "[Mon May  6 10:00:{n} 2024] EXT4-fs (sda1): mounted", "May  6 10:00:{n} n3 kernel: [ 12.1] eth0: link up"],
)  # fmt: skip
def test_scan_log_of_a_kernel_log_points_to_the_option_kernel(tmp_path: Path, line: str) -> None:
    path = tmp_path / "dmesg.txt"
    path.write_text("".join(line.format(n=10 + n) + "\n" for n in range(20)))
    result = run("--json", path)
    assert result.stderr.splitlines() == [
        f"{path} looks like a kernel log; for what the kernel says: slurm-watchdog scan-log --kernel {path}"
    ]
    assert set(json.loads(result.stdout)) == {"schema_version", "files"}


def test_a_job_s_log_with_a_few_lines_of_the_kernel_is_none(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(STEPS + "[ 4410.500] NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python3\n" * 5)
    assert "kernel log" not in run(path).stderr


def test_the_sentence_names_rank_class_and_line_before_anything_else(crashed: Path) -> None:
    result = run(crashed)
    assert result.exit_code == 1
    first = result.stdout.splitlines()[0]
    assert "A GPU ran out of memory: rank 5 failed first" in first
    assert "line 124" in first


def test_json_has_the_shape_that_scripts_depend_on(crashed: Path) -> None:
    (file,) = answer(crashed)
    assert set(file) >= KEYS
    assert file["progress"] == {
        "first_step": 0, "last_step": 595, "total_steps": 1000, "lines": 120, "last_line": 120, "advancing": False,
        "step_seconds_median": 1.0,
    }  # fmt: skip
    verdict = file["verdict"]
    assert (verdict["class"], verdict["rank"], verdict["host"], verdict["line"]) == ("cuda_oom", 5, None, 124)
    assert [(error["line"], error["class"], error["role"], error["rank"]) for error in file["errors"]] == [
        (124, "cuda_oom", "cause", 5),
        (125, "peer_lost", "cascade", 1),
    ]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_packed_files_are_read(tmp_path: Path, crashed: Path, pack: Any) -> None:
    path = tmp_path / "train.log.packed"
    path.write_bytes(pack(crashed.read_bytes()))
    assert answer(path)[0]["verdict"]["line"] == 124


@pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd here")
@pytest.mark.parametrize("cut", [1, 2])
def test_bundle_packed_with_zstd_is_unpacked_by_the_program_zstd(tmp_path: Path, crashed: Path, cut: int) -> None:
    path = tmp_path / "train.log.zst"
    packed = subprocess.run(["zstd", "-q", "-c", str(crashed)], capture_output=True, check=True).stdout
    path.write_bytes(packed[: len(packed) // cut])
    result = run("--json", path)
    if cut == 1:
        assert json.loads(result.stdout)["files"][0]["verdict"]["line"] == 124
    assert ("cut short or damaged" in result.stderr) == (cut == 2)


def test_a_packed_log_is_read_from_standard_input(crashed: Path) -> None:
    assert answer("-", stdin=gzip.compress(crashed.read_bytes()))[0]["verdict"]["rank"] == 5


def test_a_packed_file_that_is_cut_short_gives_what_it_has(tmp_path: Path, crashed: Path) -> None:
    path = tmp_path / "train.log.gz"
    packed = gzip.compress(crashed.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    result = CliRunner().invoke(main, ["scan-log", "--json", str(path)])
    assert json.loads(result.stdout)["files"][0]["progress"]["lines"] > 10
    assert result.exit_code == 2, "that nothing was found in a half of a log does not mean that all is well"
    assert "cut short or damaged" in result.stderr


def test_standard_input_is_read(crashed: Path) -> None:
    assert answer("-", stdin=crashed.read_bytes())[0]["verdict"]["rank"] == 5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text.decode().encode("utf-16"),
        lambda text: text.decode().encode("utf-16-le"),
        lambda text: text.replace(b"loss", b"\0\0loss"),
        lambda text: b"\x1b[32m" + text.replace(b"step", b"\x1b[1mstep\x1b[0m"),
        lambda text: text.replace(b"[rank5]: Trace", "caf\xe9 \xe0\n[rank5]: Trace".encode("latin-1")).replace(
            b"\n", b"", 1
        ),
        lambda text: b"> " + text.replace(b"\n", b"\n> "),
    ],
    ids=["crlf", "utf-16", "utf-16 without its mark", "zeros", "colours", "latin-1", "quoted"],
)
def test_encodings_and_ends_of_lines_change_nothing(tmp_path: Path, crashed: Path, spoil: Any) -> None:
    path = tmp_path / "spoilt.log"
    path.write_bytes(spoil(crashed.read_bytes()))
    verdict = answer(path)[0]["verdict"]
    assert (verdict["class"], verdict["rank"], verdict["line"]) == ("cuda_oom", 5, 124)


def test_a_bar_that_is_redrawn_is_one_line_of_the_file(tmp_path: Path) -> None:
    bar = "\r".join(f" {n}%|###       | {n}/100 [00:{n:02d}<01:00,  1.00s/it]" for n in range(50))
    path = tmp_path / "bar.log"
    path.write_text("start\n" + bar + "\n" + OOM)
    (file,) = answer(path)
    assert (file["progress"]["last_step"], file["progress"]["last_line"]) == (49, 2)
    assert file["verdict"]["line"] == 6


def test_prose_around_fences_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text(
        "We saw `CUDA error: unknown error` last week.\n\nOSError: [Errno 28] No space left on device was another day.\n\n"
        f"```\n{OOM}```\n\nIt was the batch size.\n"
    )
    verdict = answer(path)[0]["verdict"]
    assert (verdict["class"], verdict["rank"], verdict["line"]) == ("cuda_oom", 5, 9)


def test_files_of_one_job_are_judged_together(tmp_path: Path) -> None:
    for rank in range(4):
        text = "ValueError: boom\n" if rank == 2 else "RuntimeError: Connection closed by peer [10.0.0.4]:1\n"
        (tmp_path / f"rank_{rank}.log").write_text(
            'Traceback (most recent call last):\n  File "x.py", line 1, in f\n' + text
        )
    files = answer(*(tmp_path / f"rank_{rank}.log" for rank in range(4)))
    assert {(f["verdict"]["class"], f["verdict"]["rank"]) for f in files} == {("python_exception", 2)}
    assert all(f["verdict"]["path"].endswith("rank_2.log") for f in files)


def test_files_of_different_jobs_are_judged_each_by_itself(tmp_path: Path, crashed: Path) -> None:
    good = tmp_path / "other.log"
    good.write_text(STEPS)
    assert [file["healthy"] for file in answer(crashed, good)] == [False, True]


def test_elements_of_an_array_are_different_jobs(tmp_path: Path) -> None:
    (tmp_path / "slurm-4711_1.out").write_text(STEPS)
    (tmp_path / "slurm-4711_2.out").write_text(STEPS + OOM)
    assert [f["healthy"] for f in answer(tmp_path / "slurm-4711_1.out", tmp_path / "slurm-4711_2.out")] == [
        True,
        False,
    ]


def test_silence_is_a_hang_only_if_enough_time_passed(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(STEPS)
    assert answer(path)[0]["verdict"] is None
    assert answer("--at", "2024-05-01 10:10:30", path)[0]["verdict"] is None
    verdict = answer("--at", "2024-05-01 11:10:00", path)[0]["verdict"]
    assert (verdict["class"], verdict["rank"], verdict["host"], verdict["line"]) == ("hang", None, None, 120)


def test_scan_log_of_an_unreadable_file_says_why_and_exits_with_2(tmp_path: Path, crashed: Path) -> None:
    result = run("--json", tmp_path / "absent.log", crashed)
    assert result.exit_code == 2
    assert "absent.log cannot be read: No such file or directory" in result.stderr
    assert len(json.loads(result.stdout)["files"]) == 1
    assert run("--at", "soon", crashed).exit_code == 2


def test_a_directory_stands_for_the_logs_in_it(tmp_path: Path, crashed: Path) -> None:
    (tmp_path / "model.pt").write_bytes(bytes(range(256)) * 100)
    assert [file["path"] for file in answer(tmp_path)] == [str(crashed)]
    (tmp_path / "empty").mkdir()
    done = run(tmp_path / "empty")
    assert (done.exit_code, "no file in it is named like a log" in done.stderr) == (2, True)


def test_a_named_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.log"
    os.mkfifo(pipe)
    for path, word in ((pipe, "is a pipe"), (Path("/dev/zero"), "is a device")):
        done = run(path)
        assert (done.exit_code, word in done.stderr, done.stdout) == (2, True, "")


UNREAD = {
    "it is empty": "",
    "a report of nvidia-smi": "Sat Mar  4 04:38:36 2023\n+-----+\n| NVIDIA-SMI 525.60.13    Driver Version: 525.60.13 |\n|   0  NVIDIA A100  On |\n",
    "a table of Slurm": "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n   4711      gpu    train       u1  R 1-02:03:04      2 n[1-2]\n",
    "a log of a daemon of Slurm": "[2026-05-01T10:00:00.123] sched: Allocate JobId=7 NodeList=n1 #CPUs=8 Partition=gpu\n[2026-05-01T10:00:09.001] _job_complete: JobId=7 WEXITSTATUS 0\n"
    * 3,
    "stacks of Python processes": 'Thread 688510 (active): "MainThread"\n    broadcast (torch/distributed/distributed_c10d.py:1191)\n    main (train.py:7)\n',
    "a batch script": "#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n",
    "JSON whose records are of no known form": '{"rows": [{"a": 1}, {"a": 2}]}\n',
    "no step and no error": "PID 756282:  After clip in _do_batch\nPID 756284:  Before sync_gradients in _do_batch\n",
    "only how the run ended": "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME LIMIT ***\n",
    "a list of interfaces": "ib0     Link encap:UNSPEC\n        inet addr:172.0.0.50  Bcast: 172.0.0.255\nCA 'mlx5_0'\n\tPort 1:\n",
    "a kernel log": "[   12.345678] nvidia 0000:07:00.0: enabling device\n[   12.445678] usb 1-1: new device\n",
}


@pytest.mark.parametrize("looks", UNREAD)
def test_a_text_in_which_nothing_was_recognised_is_no_good_news(tmp_path: Path, looks: str) -> None:
    path = tmp_path / "given.txt"
    path.write_text(UNREAD[looks])
    done = run(path)
    first = done.stdout.splitlines()[0]
    assert (done.exit_code, looks in first, "nothing wrong" in done.stdout) == (2, True, False), done.stdout
    rows = json.loads(run("--json", path).stdout)["files"]
    assert (rows[0]["healthy"], looks in rows[0]["unread"]) == (None, True)


def test_of_a_long_file_the_first_error_is_told_before_its_end(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(STEPS + "RuntimeError: CUDA error: unspecified launch failure\n" + "nothing to see here\n" * 300_000)
    result = run("--json", log)
    assert f"train.log, line {STEPS.count(chr(10)) + 1}, the first error so far: RuntimeError: CUDA" in result.stderr
    assert json.loads(result.stdout)["files"][0]["verdict"]["class"] == "cuda_error"


def test_a_rank_whose_file_is_not_here_is_not_said_to_be_silent(tmp_path: Path) -> None:
    paths = [tmp_path / "rank0_missing" / f"rank_{rank}.log" for rank in range(1, 8)]
    paths[0].parent.mkdir()
    for path in paths:
        rank = path.stem.partition("_")[2]
        path.write_text(
            f"world_size: 8\n[rank{rank}]:[E501 10:40:00.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600070 milliseconds.\n"
        )
    verdict = answer(*paths)[0]["verdict"]
    assert (verdict["rank"], verdict["missing_ranks"]) == (None, [])
    assert "7 ranks logged this" in verdict["summary"]


def test_a_file_named_for_an_address_is_of_that_host(tmp_path: Path) -> None:
    for number in range(3):
        what = (
            "OSError: [Errno 28] No space left on device" if number == 2 else "RuntimeError: Connection closed by peer"
        )
        (tmp_path / f"10.0.0.{number}.log").write_text(f"[rank{number}]: {what}\n")
    verdict = answer(*sorted(tmp_path.iterdir()))[0]["verdict"]
    assert (verdict["class"], verdict["rank"], verdict["host"]) == ("disk_full", 2, "10.0.0.2")


def test_json_has_the_advice_beside_the_verdict(crashed: Path) -> None:
    hints = answer(crashed)[0]["verdict"]["hints"]
    assert hints and set(hints[0]) == {"usually", "try_next", "documented"}


def test_a_configurations_own_patterns_are_tried_on_a_log(tmp_path: Path) -> None:
    log, config = tmp_path / "own.log", tmp_path / "c.yaml"
    log.write_text("".join(f"umdrehung {step} fertig\n" for step in range(5, 9)))
    config.write_text("jobs: {progress_patterns: ['umdrehung (?P<step>[0-9]+)']}\n")
    result = CliRunner().invoke(main, ["scan-log", str(log), "--config", str(config)])
    assert (result.exit_code, "its last step is 8" in result.stdout) == (0, True)
    assert "cannot be judged" in CliRunner().invoke(main, ["scan-log", str(log)]).stdout


def test_a_hardware_error_of_an_earlier_run_in_the_same_log_is_shown_under_the_good_news(tmp_path: Path) -> None:
    ecc = "[rank6]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    requeued = "slurmstepd: error: *** JOB 31 ON n3 CANCELLED AT 2024-05-01T10:10:00 DUE TO JOB REQUEUE ***\n"
    (tmp_path / "slurm-31.out").write_text(STEPS + ecc + requeued + STEPS)
    result = run(tmp_path / "slurm-31.out")
    assert result.exit_code == 0
    assert "nothing wrong found" in result.stdout
    (earlier,) = [line for line in result.stdout.splitlines() if line.startswith("  earlier")]
    assert "rank 6" in earlier and "uncorrectable ECC" in earlier
