"""How a command ended, from the last lines of the job's log. Pure.

The exit code does not tell: srun ends with 137 after `scancel JOB.STEP`, and with 143 where a rank failed and
`--kill-on-bad-exit` ended the others (Slurm 22.05; src/slurmd/slurmstepd/req.c and src/srun/launch.c have the lines).
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "slurm-watchdog: start "
"""Begins our line at each start: what stands before it is of an earlier one."""
SLURMS: Final = re.compile(r"\s*(?:\d{1,7}: )?(?:slurmstepd(?:-[^\s:]{1,255})?: error: \*\*\* |srun: )")
"""Begins what slurmstepd and srun write, with a task's number before it under `--label`: the command's own lines may
hold the same words."""
BY_ITSELF: Final = ("Terminating StepId=", "First task exited", "DUE TO TASK FAILURE", "Node failure on",
    "DUE TO NODE FAILURE")  # fmt: skip
"""srun, or slurmstepd, ended the step, for a rank or a node had failed."""
ABORTS: Final = re.compile(
    r"\s*(?:\d{1,7}: )?(?:MPI_ABORT was invoked on rank"  # Open MPI
    r"|(?:\[\S{1,255}\] )?\*\*\* MPI_ERRORS_ARE_FATAL"  # Open MPI
    r"|Abort\(-?\d{1,10}\) on node \d|application called MPI_Abort\("  # MPICH
    r"|In: PMI_Abort\()"  # Slurm's own PMI
)
"""Begins what a rank prints that aborts the program. PMI and PMIx kill its step by slurm_kill_job_step() with SIGKILL
(Slurm: src/plugins/mpi/pmix/pmixp_client.c, src/plugins/mpi/pmi2/pmi2.c): the rest of the log is that of an scancel."""
CANCELLED: Final = "somebody cancelled its step"
STOPPED: Final = (
    ("DUE TO TIME LIMIT", "its time was over"),
    ("DUE TO PREEMPTION", "it was preempted"),
    ("DUE TO JOB REQUEUE", "the job is requeued"),
    (" CANCELLED AT ", CANCELLED),
    ("srun: Job step aborted", CANCELLED),
    ("srun: forcing job termination", "somebody ended its srun"),
)
"""In this order: a line about the time says CANCELLED, too."""


def stopped_by(tail: str) -> str:
    """Who ended the step of the last start in `tail`, a part of a sentence; empty: it ended by itself, or unknown."""
    lines = tail[tail.rfind(MARK) + 1 :].splitlines()
    slurms = "\n".join(line for line in lines if SLURMS.match(line))
    if any(words in slurms for words in BY_ITSELF):
        return ""
    who = next((who for words, who in STOPPED if words in slurms), "")
    aborted = who == CANCELLED and any(ABORTS.match(line) for line in lines)
    return "" if aborted else who
