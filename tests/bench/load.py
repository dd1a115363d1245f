"""What the agent is measured beside: a job of 8 ranks x 64 threads, 8 stand-in GPUs, 10 logs, checkpoints.

The machine is kept quiet: all threads sleep where those of a trainer sleep, and each rank wakes up once a second and
writes a line of its log every few seconds. What is measured is thus the agent, and not a fight over the cores.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.standin_nvml import standin
from watchdog.model import JobWatch

HERE = Path(__file__).resolve().parent
JOB_ID = "424242"
RANKS, THREADS, GPUS = 8, 64, 8
DESCRIPTORS = 160
"""Of each rank. NCCL over 8 nodes and a loader with 8 workers have about so many sockets, event descriptors and devices open."""
LOG_PERIOD_S = 3.0
CHECKPOINT_EVERY_S = 60.0
CHECKPOINT_FILES = 16
KEPT_CHECKPOINTS = 4


@dataclass(frozen=True)
class Load:
    """A job that runs."""

    directory: Path
    watch: JobWatch
    pids: tuple[int, ...]
    """Of the ranks, in order."""
    environment: dict[str, str]
    """What the agent needs to find the stand-in for NVIDIA's library."""


def build(source: Path, to: Path, *flags: str) -> Path:
    """Compiles a C program of this directory."""
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-o", str(to), str(source), "-lpthread"]
    subprocess.run(command, check=True, timeout=120)
    return to


def job_owner() -> int:
    """Jobs are not root's: as root, the user `nobody` owns it, so that the agent's children have to become somebody else."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()


def rank_environment(rank: int, directory: Path) -> dict[str, str]:
    """What srun and torchrun put into a rank's environment, as far as anybody looks at it."""
    return {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOBID": JOB_ID,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(RANKS),
        "SLURM_STEP_NUM_TASKS": str(RANKS),
        "SLURM_JOB_USER": pwd.getpwuid(job_owner()).pw_name,
        "SLURM_SUBMIT_DIR": str(directory),
        "SLURM_RESTART_COUNT": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS))),
    }


def batch_environment(directory: Path) -> dict[str, str]:
    """What slurmd gives the batch script: one task of the step `batch`."""
    environment = {
        name: value
        for name, value in rank_environment(0, directory).items()
        if name.startswith(("SLURM", "PATH"))
    }
    return {
        name: value
        for name, value in environment.items()
        if name not in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
    }


@contextmanager
def running(period_s: float = LOG_PERIOD_S) -> Iterator[Load]:
    """The load while the block runs; nothing of it is left afterwards."""
    with ExitStack() as stack:
        directory = _directory(stack, None)
        # A second filesystem, as /scratch is beside /home: the agent probes each that the job uses.
        memory = Path("/dev/shm")
        scratch = _directory(stack, memory if os.access(memory, os.W_OK) else None)
        programs = directory / "bin"
        programs.mkdir()
        build(HERE / "load.c", programs / "python3")
        shutil.copy(programs / "python3", programs / "bash")
        for path in (directory, scratch):
            (path / "logs").mkdir()
            (path / "checkpoints").mkdir()
        pids = tuple(_start_ranks(stack, programs, directory, scratch, period_s))
        environment = _start_gpus(directory, pids)
        saver = Saver(scratch / "checkpoints")
        stack.callback(saver.stop)
        saver.start()
        watch = JobWatch(
            job_id=JOB_ID,
            restarts=0,
            uid=job_owner(),
            log_paths=(str(directory / "logs" / "job.out"), str(directory / "logs" / "job.err")),
            checkpoint_trackers=(str(scratch / "checkpoints" / "latest_checkpointed_iteration.txt"),),
            checkpoint_directories=(str(scratch / "checkpoints"),),
        )
        yield Load(directory, watch, pids, environment)


def _directory(stack: ExitStack, parent: Path | None) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="slurm-watchdog-bench-", dir=parent))
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    directory.chmod(0o755)
    return directory


def _start_ranks(
    stack: ExitStack, programs: Path, directory: Path, scratch: Path, period_s: float
) -> Iterator[int]:
    """Eight ranks with a log each (half of them on either filesystem), and the batch script with the job's two."""
    batch = ["batch", "0", "1", "0"]
    _start(
        stack, programs / "bash", batch, batch_environment(directory), directory / "logs" / "job", period_s
    )
    for rank in range(RANKS):
        where = directory if rank % 2 else scratch
        words = ["rank", str(rank), str(THREADS), str(DESCRIPTORS)]
        log = where / "logs" / f"rank{rank}"
        yield _start(stack, programs / "python3", words, rank_environment(rank, directory), log, period_s)


def _start(
    stack: ExitStack, program: Path, words: list[str], environment: dict[str, str], log: Path, period_s: float
) -> int:
    with (
        open(f"{log}.out", "ab") as out,
        open(f"{log}.err" if words[0] == "batch" else f"{log}.out", "ab") as err,
    ):
        for file in (out, err):
            os.fchown(file.fileno(), job_owner(), -1)
        process = subprocess.Popen(
            [str(program), *words, str(period_s)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            env=environment, user=job_owner() if os.geteuid() == 0 else None, cwd="/",
        )  # fmt: skip
    stack.callback(process.wait, 30)
    stack.callback(process.kill)
    return process.pid


def _start_gpus(directory: Path, pids: tuple[int, ...]) -> dict[str, str]:
    library = directory / "nvml"
    library.mkdir()
    standin.build(library)
    gpus = tuple(
        replace(gpu, processes=((pid, 60 * 1024**3),))
        for gpu, pid in zip(standin.eight_cards(), pids, strict=True)
    )
    scenario = standin.Scenario(directory / "gpus.txt", gpus=gpus, rules=standin.field_latencies())
    return standin.environment_of(library / "libnvidia-ml.so.1", scenario.path)


class Saver:
    """Writes a checkpoint of Megatron's layout every minute and removes old ones, as a trainer does."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)

    def _run(self) -> None:
        step = 100
        while True:
            self.save(step)
            step += 100
            if self._stopping.wait(CHECKPOINT_EVERY_S):
                return

    def save(self, step: int) -> None:
        """One complete checkpoint, its tracker last."""
        for number in range(CHECKPOINT_FILES):
            part = self.directory / f"iter_{step:07d}" / f"mp_rank_{number:02d}"
            part.mkdir(parents=True)
            with open(part / "model_optim_rng.pt", "wb") as file:
                file.truncate(256 * 1024**2)  # sparse: it takes no memory
        (self.directory / "latest_checkpointed_iteration.txt").write_text(str(step))
        for old in sorted(self.directory.glob("iter_*"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)
