"""How a command ended, by the last lines of its log, whether and when it starts again, and the words for it. Pure.

The exit code does not tell who ended it: srun ends with 137 after `scancel JOB.STEP`, and with 143 where a rank failed
and `--kill-on-bad-exit` ended the others (Slurm 22.05; src/slurmd/slurmstepd/req.c and src/srun/launch.c have the
lines).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

KILL_WAIT_S = 30.0  # Between SIGTERM to a command and SIGKILL, as Slurm's KillWait has it by default.
RESTART_DELAY_S = 15.0
"""Before a command that has failed starts again: its last words have been read and judged by then."""
LAST_S = 60.0  # Before the end of the job's time nothing is started again.
TOLD_S = 600.0
"""A command that ends so long after SIGUSR1 or SIGUSR2 was passed to it has saved because of that, a checkpoint of many
GPUs included. A judgement."""
INTERRUPTED = 130
TERMINATED = 143  # 128 + SIGINT, 128 + SIGTERM: as a shell has them.
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


def restarting_words(number: int, most: int) -> str:
    """Which restart is under way; a part of a sentence."""
    return f"restarting ({number} of {most})"


def elsewhere_words(start: int, nodes: Sequence[str]) -> str:
    """That a start runs on nodes that it was to leave out."""
    return (
        f"start {start} runs on {','.join(nodes)}, too, which it was to leave out: an srun of it was not called by its "
        "name alone (a path, another PATH), or has options that cannot be adapted"
    )


def beside_words(pid: int) -> str:
    """That there is another supervisor of the job."""
    return f"another `slurm-watchdog run` of this job is under way (process {pid})"


def told_words(age_s: float) -> str:
    """Why a command is not started again that was told something `age_s` before it ended; a part of a sentence."""
    return f"SIGUSR1 or SIGUSR2 was passed to it {age_s:.0f} s before, as a notice that its time is nearly over is"


def late_words(left_s: float) -> str:
    """How near the end is, a part of a sentence. `left_s`: seconds until then."""
    return f"{max(0.0, left_s):.0f} s before the end of the job's time"


def again_words(code: str, delay_s: float, number: int, most: int) -> str:
    """That a command which has ended is started again."""
    return f"the command ended with {code}; restarting in {delay_s:.0f} s (restart {number} of at most {most})"


def not_again_words(code: str, why: str) -> str:
    """That it is not."""
    return f"the command ended with {code}, and is not started again: {why}"


def used_up_words(most: int) -> str:
    """That no restart is left; a part of a sentence."""
    return f"all of its {most} restarts are used up"
