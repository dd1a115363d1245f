"""How a command ended, by the last lines of its log: its exit code does not tell. srun ends with 137 after `scancel
JOB.STEP`, and with 143 where a rank failed and `--kill-on-bad-exit` ended the others (Slurm 22.05;
src/slurmd/slurmstepd/req.c and src/srun/launch.c have the lines). Pure."""

from __future__ import annotations

import re

SIGRTMAX = 64  # signal(7): 255 is no signal, but sys.exit(-1)
TAIL_BYTES = 65_536  # Of a log, in which srun and slurmstepd say who ended a step.
MARK = "slurm-watchdog: start "  # Begins our line at each start: what stands before it is of an earlier one.
SLURMS = re.compile(r"\s*(?:\d{1,7}: )?(?:slurmstepd(?:-[^\s:]{1,255})?: error: \*\*\* |srun: )")
"""Begins what slurmstepd and srun write, with a task's number before it under `--label`: the command's own lines may
hold the same words."""
BY_ITSELF = ("Terminating StepId=", "First task exited", "DUE TO TASK FAILURE", "Node failure on",
    "DUE TO NODE FAILURE")  # fmt: skip
"""srun, or slurmstepd, ended the step, for a rank or a node had failed."""
ABORTS = re.compile(
    r"\s*(?:\d{1,7}: )?(?:MPI_ABORT was invoked on rank"  # Open MPI
    r"|(?:\[\S{1,255}\] )?\*\*\* MPI_ERRORS_ARE_FATAL"  # Open MPI
    r"|Abort\(-?\d{1,10}\) on node \d|application called MPI_Abort\("  # MPICH
    r"|In: PMI_Abort\()"  # Slurm's own PMI
)
"""Begins what a rank prints that aborts the program. PMI and PMIx kill its step by slurm_kill_job_step() with SIGKILL
(Slurm: src/plugins/mpi/pmix/pmixp_client.c, src/plugins/mpi/pmi2/pmi2.c): the rest of the log is that of an scancel."""
CANCELLED = "its step was cancelled"
STOPPED = (
    ("DUE TO TIME LIMIT", "its time was over"),
    ("DUE TO PREEMPTION", "it was preempted"),
    ("DUE TO JOB REQUEUE", "the job is requeued"),
    (" CANCELLED AT ", CANCELLED),
    ("srun: Job step aborted", CANCELLED),
    ("srun: forcing job termination", "its srun was ended"),
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


def exit_code(code: int) -> int:
    """A process's return code as a shell has it: 128 + N after signal N."""
    return code if code >= 0 else 128 - code


def code_words(code: int) -> str:
    """An exit code, and the signal that it stands for."""
    return f"exit code {code} (signal {code - 128})" if 128 < code <= 128 + SIGRTMAX else f"exit code {code}"
