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

from lab.bench.space import Space, opened
from slurm_watchdog.model.protocol import JobWatch
from tests.rig.rights import USER, USER_UID, ensure_user
from tests.rig.standin_nvml import standin

HERE = Path(__file__).resolve().parent
JOB_ID = "424242"
RANKS, THREADS, GPUS = 8, 64, 8
DESCRIPTORS = 160
"""Of each rank. NCCL over 8 nodes and a loader with 8 workers have about so many sockets, event descriptors
and devices open."""
IDLE_PROCESSES = 60
"""The rest of a small machine: daemons and threads of the kernel. Few for a node of a cluster, but as many as
where the peers' figures in our notes come from."""
LOG_PERIOD_S = 3.0
CHECKPOINT_EVERY_S = 60.0
CHECKPOINT_FILES = 16
KEPT_CHECKPOINTS = 4


@dataclass(frozen=True)
class Load:
    """A job that runs."""

    directory: Path
    watch: JobWatch
    space: Space
    """Where its processes are, and where the agent and its peers have to be to see them."""
    pids: tuple[int, ...]
    """Of the ranks, in order, as those in `space` know them."""
    scenario: standin.Scenario
    """What its GPUs say; may be changed while it runs."""
    environment: dict[str, str]
    """What the agent needs to find the stand-in for NVIDIA's library."""


def build(source: Path, to: Path, *flags: str) -> Path:
    """Compiles a C program of this directory."""
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-o", str(to), str(source), "-lpthread"]
    subprocess.run(command, check=True, timeout=120)
    return to


def job_owner() -> int:
    """Jobs belong to an ordinary user: for root and for system accounts nothing is read, so that there would
    be nothing to measure."""
    if os.geteuid() != 0:
        return os.geteuid()
    ensure_user(USER, USER_UID)
    return USER_UID


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
        name: value for name, value in rank_environment(0, directory).items() if name.startswith(("SLURM", "PATH"))
    }
    return {name: value for name, value in environment.items() if name not in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")}


@contextmanager
def running(period_s: float = LOG_PERIOD_S) -> Iterator[Load]:
    """The load while the block runs; nothing of it is left afterwards."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="slurm-watchdog-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        for name in ("bin", "logs", "scratch"):
            (directory / name).mkdir()
        build(HERE / "load.c", directory / "bin" / "python3")
        for name in ("bash", "idle"):
            shutil.copy(directory / "bin" / "python3", directory / "bin" / name)
        space = stack.enter_context(opened([str(directory / "bin" / "idle"), "idle", str(IDLE_PROCESSES)]))
        # A second filesystem, as /scratch is beside /home: the agent looks at each that the job uses.
        space.mount_memory(directory / "scratch")
        checkpoints = directory / "scratch" / "checkpoints"
        for path in (directory / "scratch" / "logs", checkpoints):
            space.seen_from_here(path).mkdir()
        pids = tuple(_start_ranks(stack, space, directory, period_s))
        environment, scenario = _start_gpus(directory, pids)
        saver = Saver(space.seen_from_here(checkpoints))
        stack.callback(saver.stop)
        saver.start()
        watch = JobWatch(
            job_id=JOB_ID,
            restarts=0,
            uid=job_owner(),
            log_paths=(str(directory / "logs" / "job.out"), str(directory / "logs" / "job.err")),
            checkpoint_trackers=(str(checkpoints / "latest_checkpointed_iteration.txt"),),
            checkpoint_directories=(str(checkpoints),),
        )
        yield Load(directory, watch, space, pids, scenario, environment)


def _start_ranks(stack: ExitStack, space: Space, directory: Path, period_s: float) -> Iterator[int]:
    """Eight ranks with a log each (half of them on either filesystem), and the batch script with the job's two."""
    programs, period = directory / "bin", str(period_s)
    batch = [str(programs / "bash"), "batch", "0", "1", "0", period]
    _start(stack, space, batch, batch_environment(directory), directory / "logs" / "job", ".err")
    for rank in range(RANKS):
        words = [str(programs / "python3"), "rank", str(rank), str(THREADS), str(DESCRIPTORS), period]
        log = (directory if rank % 2 else directory / "scratch") / "logs" / f"rank{rank}"
        yield space.inner(_start(stack, space, words, rank_environment(rank, directory), log, ".out"))


def _start(
    stack: ExitStack, space: Space, words: list[str], environment: dict[str, str], log: Path, errors: str
) -> int:
    log = space.seen_from_here(log)
    with open(f"{log}.out", "ab") as out, open(f"{log}{errors}", "ab") as err:
        for file in (out, err):
            os.fchown(file.fileno(), job_owner(), -1)
        process = subprocess.Popen(
            space.words(words, job_owner()), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
        )
    stack.callback(process.wait, 30)
    stack.callback(process.kill)
    return space.find(process.pid)


def _start_gpus(directory: Path, pids: tuple[int, ...]) -> tuple[dict[str, str], standin.Scenario]:
    library = directory / "nvml"
    library.mkdir()
    standin.build(library)
    gpus = tuple(
        replace(gpu, processes=((pid, 60 * 1024**3),)) for gpu, pid in zip(standin.eight_cards(), pids, strict=True)
    )
    scenario = standin.Scenario(directory / "gpus.txt", gpus=gpus, rules=standin.field_latencies())
    return standin.environment_of(library / "libnvidia-ml.so.1", scenario.path), scenario


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
