"""How a command ended, from the last lines of the job's log. Pure.

The exit code does not tell: srun ends with 137 after `scancel JOB.STEP`, and with 143 where a rank failed and
`--kill-on-bad-exit` ended the others (Slurm 22.05; src/slurmd/slurmstepd/req.c and src/srun/launch.c have the lines).
"""

from __future__ import annotations

from typing import Final

MARK: Final = "slurm-watchdog: start "
"""Begins our line at each start: what stands before it is of an earlier one."""
BY_ITSELF: Final = ("Terminating StepId=", "First task exited", "DUE TO TASK FAILURE", "Node failure on",
    "DUE TO NODE FAILURE")  # fmt: skip
"""srun, or slurmstepd, ended the step, for a rank or a node had failed."""
STOPPED: Final = (
    ("DUE TO TIME LIMIT", "its time was over"),
    ("DUE TO PREEMPTION", "it was preempted"),
    ("DUE TO JOB REQUEUE", "the job is requeued"),
    (" CANCELLED AT ", "somebody cancelled its step"),
    ("srun: Job step aborted", "somebody cancelled its step"),
    ("srun: forcing job termination", "somebody ended its srun"),
)
"""In this order: a line about the time says CANCELLED, too."""


def stopped_by(tail: str) -> str:
    """Who ended the step of the last start in `tail`, a part of a sentence; empty: it ended by itself, or unknown."""
    last = tail[tail.rfind(MARK) + 1 :]
    if any(words in last for words in BY_ITSELF):
        return ""
    return next((who for words, who in STOPPED if words in last), "")
