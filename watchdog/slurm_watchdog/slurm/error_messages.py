"""Pure: which of Slurm's messages are a no for good, and why. Everything else leaves the outcome open."""

from __future__ import annotations

from slurm_watchdog.slurm.client import Refusal

REFUSALS: tuple[tuple[str, Refusal], ...] = (
    ("Invalid job id specified", Refusal.NO_SUCH_JOB),
    ("Invalid node name specified", Refusal.NO_SUCH_NODE),
    ("Invalid user id", Refusal.NO_PERMISSION),
    ("Access/permission denied", Refusal.NO_PERMISSION),
    ("Only batch jobs are accepted or processed", Refusal.NOT_BATCH),
    ("Requested operation is presently disabled", Refusal.NOT_REQUEUEABLE),
    ("Requested operation not supported", Refusal.OTHER),
    ("Job/step already completing or completed", Refusal.FINISHED),
    ("Job has already finished", Refusal.FINISHED),
    ("Job is no longer pending execution", Refusal.NOT_PENDING),
    ("Job is pending execution", Refusal.NOT_RUNNING),
    ("Job is not pending nor running", Refusal.FINISHED),
    ("Job can not be altered now, try again later", Refusal.NOT_NOW),
    ("Job update not available right now", Refusal.NOT_NOW),
    ("Requested nodes are busy", Refusal.NOT_NOW),
    ("Requested node configuration is not available", Refusal.UNSATISFIABLE),
    ("Node count specification invalid", Refusal.UNSATISFIABLE),
    ("More processors requested than permitted", Refusal.UNSATISFIABLE),
    ("Invalid node state specified", Refusal.CHANGED),
    ("Invalid partition name specified", Refusal.UNSATISFIABLE),
    ("Invalid account or account/partition combination specified", Refusal.UNSATISFIABLE),
    ("Invalid qos specification", Refusal.UNSATISFIABLE),
    ("Invalid feature specification", Refusal.UNSATISFIABLE),
    ("Invalid generic resource (gres) specification", Refusal.UNSATISFIABLE),
    ("Job violates accounting/QOS policy", Refusal.UNSATISFIABLE),
    ("Job dependency problem", Refusal.UNSATISFIABLE),
    ("Requested time limit is invalid", Refusal.UNSATISFIABLE),
    ("Requested reservation is invalid", Refusal.UNSATISFIABLE),
    ("Required partition not available", Refusal.UNSATISFIABLE),
    ("Cannot modify/cancel", Refusal.OTHER),
    # sbatch's own, before it has sent anything.
    ("unrecognized option", Refusal.OTHER),
    ("is not a valid", Refusal.OTHER),
    ("Batch script is empty", Refusal.OTHER),
    ("This does not look like a batch script", Refusal.OTHER),
    ("Batch script contains DOS line breaks", Refusal.OTHER),
)
"""Part of the message, and what it means: the texts of slurm_strerror, in Slurm 22.05 to 26.05.

Not here, and so unknown: `Unable to contact slurm controller`, `Socket timed out on send/recv operation`, `Slurm
backup controller in standby mode`, `Unexpected message received`, and all that we never saw.
"""
OPERATOR = "; the controller's user has to be a Slurm operator, see docs/install.md, Rights"


def parse_refusal(text: str) -> tuple[str, Refusal] | None:
    """Slurm's line that says no for good, bounded, and why it says so; None if the outcome is open."""
    for line in text.splitlines():
        for phrase, kind in REFUSALS:
            if phrase in line:
                said = line.strip()[:300]
                return (said + OPERATOR if kind is Refusal.NO_PERMISSION else said), kind
    return None
