"""What befalls a training, and what has to be said about it. A row is a case."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from lab.live.stage import Job

HANG_S = 70.0
"""Issue: a hang is reported within max(60 s, 3 x the slowest of the recent steps) + 10 s; steps here take 0.3 s."""
DEAD_S = 10.0
ANSWER_S, LOOP_S = 370.0, 310.0
"""`collective_hang.answer_limit` and a minute until the next look; a sixth of `busy_limit`, in which a rank is seen to go
round; and 10 s."""
DIAGNOSIS_S = 60.0
SAVE_INTERVAL = 20
"""Steps, as `ddp.py` saves: no restart may lose more."""
SRUN, TORCHRUN = "srun", "torchrun"


@dataclass(frozen=True)
class Fault:
    """Something breaks: `kinds` are what may be failed first, `ranks` who is to blame."""

    name: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    break_it: Callable[[Job], float]
    """Does it, and returns when it had happened."""
    within_s: float = HANG_S
    options: tuple[str, ...] = ()
    launchers: tuple[str, ...] = (SRUN, TORCHRUN)
    steps: int = 100000
    also: tuple[str, ...] = ()
    """Other kinds that are true as well."""
    acts: bool = False
    """Whether it is to be restarted where the watchdog may act."""
    mend: Callable[[Job], None] = lambda job: None
    asks_ranks: bool = True
    """Whether ranks are left to be asked."""
    or_nobody: bool = False
    """Whether it is right as well to name nobody."""
    may_work: bool = False
    """Whether the rank may be at work, for all that its stack shows: a diagnosis says where it is, and accuses nobody."""


@dataclass(frozen=True)
class Healthy:
    """Nothing breaks: nothing is to be said within `watch_s` after the training has begun."""

    name: str
    watch_s: float
    options: tuple[str, ...] = ()
    launchers: tuple[str, ...] = (SRUN,)
    disturb: Callable[[Job], None] = lambda job: None
    ends: bool = False
    """Whether the training ends by itself meanwhile."""


def _freeze(job: Job) -> float:
    job.stage.cluster.freeze(node="n2")
    return time.time()


def _thaw(job: Job) -> None:
    job.stage.cluster.thaw(node="n2")


def _freeze_for_a_while(job: Job) -> None:
    _freeze(job)
    job.stage.pause(40)
    _thaw(job)


SAVES_S = 20 * 140.0 + 60.0
"""Twenty saves of 120 s, with the steps between them."""


def _load_meanwhile(job: Job) -> None:
    """Fifty processes that compute, as on a machine that many share."""
    del job
    for _ in range(50):
        subprocess.Popen(["timeout", f"{SAVES_S:.0f}", "sh", "-c", "while :; do :; done"], start_new_session=True)


def _in_a_later_evaluation(job: Job) -> float:
    """When the run's own evaluations, as reports every 5 s show them, have told how long they take."""
    job.stage.training(job, 50)
    return job.do("evaluation", 2)


FAULTS: tuple[Fault, ...] = (
    Fault("data_loader", ("collective_hang",), (3,), lambda job: job.do("loader", 3), acts=True),
    Fault(
        "data_loader_alone", ("collective_hang",), (1,), lambda job: job.do("loader", 1),
        options=("--workers=0",), launchers=(SRUN,),
    ),
    Fault(
        "frozen_filesystem", ("filesystem_stall",), (2,), _freeze, options=("--side-log={scratch}/side.txt",), mend=_thaw,
        also=("collective_hang",),
    ),
    Fault("killed", ("dead_rank",), (1,), lambda job: job.signal("KILL", 1), within_s=DEAD_S, options=("--on-error=stay",),
          launchers=(SRUN,), also=("lingering_job", "log_error"), acts=True),
    # With gloo the others notice, and end with an error of their own: the job is over within seconds, and Slurm tells.
    Fault("killed_and_all_follow", ("log_error",), (1,), lambda job: job.signal("KILL", 1), also=("dead_rank", "lingering_job"),
          or_nobody=True, asks_ranks=False),
    Fault("lock", ("collective_hang",), (0,), lambda job: job.do("lock", 0), acts=True),
    Fault("evaluation", ("collective_hang",), (2,), _in_a_later_evaluation, launchers=(SRUN,),
          options=("--evaluate-every=5",)),
    Fault("other_collective", ("collective_hang",), (2,), lambda job: job.do("mismatch", 2), acts=True),
    # A rank is gone without an error, and who lost it ends: a launcher that leaves is no rank, and nobody
    # else is to be named.
    Fault("left_quietly", ("log_error",), (3,), lambda job: job.do("leave", 3), also=("dead_rank", "lingering_job"),
          or_nobody=True, asks_ranks=False),
    Fault("killed_elsewhere", ("log_error",), (2,), lambda job: job.signal("KILL", 2), also=("dead_rank", "lingering_job"),
          or_nobody=True, asks_ranks=False),
    Fault("raised", ("log_error",), (3,), lambda job: job.do("raise", 3), also=("dead_rank", "lingering_job"), asks_ranks=False),
    Fault("file_lock", ("collective_hang",), (2,), lambda job: job.do("file_lock", 2), launchers=(TORCHRUN,)),
    Fault("retry_for_ever", ("collective_hang",), (1,), lambda job: job.do("sleep", 1), launchers=(SRUN,)),
    Fault("named_pipe", ("collective_hang",), (1,), lambda job: job.do("file", 1), launchers=(SRUN,)),
    Fault("request", ("collective_hang",), (1,), lambda job: job.do("request", 1), launchers=(SRUN,), within_s=ANSWER_S, may_work=True),
    Fault("interpreter", ("collective_hang",), (2,), lambda job: job.do("interpreter", 2), launchers=(SRUN,), acts=True),
    Fault("loop", ("collective_hang",), (3,), lambda job: job.do("loop", 3), launchers=(SRUN,), within_s=LOOP_S, may_work=True),
    Fault("stopped", ("rank_stopped",), (3,), lambda job: job.signal("STOP", 3), also=("collective_hang",),
          within_s=30.0, mend=lambda job: (job.signal("CONT", 3), None)[1]),
    Fault("teardown_thread", ("wedged_teardown",), (1,), lambda job: job.done("teardown", 1), within_s=150.0, steps=60,
          options=("--teardown=thread",)),
    Fault("teardown_atexit", ("wedged_teardown",), (1,), lambda job: job.done("teardown", 1), within_s=150.0, steps=60,
          options=("--teardown=atexit", "--no-total"), launchers=(SRUN,)),
)  # fmt: skip

HEALTHY: tuple[Healthy, ...] = (
    Healthy("steps", 60),
    Healthy("evaluation_of_all", 150, ("--evaluate-seconds=110",)),
    Healthy("evaluation_by_rank_0", 150, ("--evaluate-seconds=110", "--evaluate-by=rank0"), (SRUN, TORCHRUN)),
    Healthy("checkpoint_by_rank_0", 150, ("--save-seconds=110",), (SRUN, TORCHRUN)),
    Healthy("compilation", 150, ("--compile-seconds=100", "--compile-first")),
    Healthy(
        "workers_in_d",
        110,
        ("--worker-log={scratch}/samples.txt", "--workers=2"),
        disturb=_freeze_for_a_while,
    ),
    Healthy(
        "twenty_announced_saves_under_load",
        SAVES_S,
        ("--announced-saves=20", "--announced-seconds=120"),
        disturb=_load_meanwhile,
    ),
    Healthy("end", 120, ("--no-total",), (SRUN, TORCHRUN), ends=True),
)
