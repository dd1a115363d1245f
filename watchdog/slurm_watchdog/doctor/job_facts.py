"""What the rules for a batch script judge: the script, Slurm's settings, and what the controller sees of the job.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.doctor.script import Script


class SlurmSettings(Struct, frozen=True, kw_only=True):
    """What `scontrol show config` says; None where it was not asked."""

    requeue: bool | None = None
    """JobRequeue."""
    append: bool | None = None
    """JobFileAppend."""
    kill_on_bad_exit: bool | None = None
    """KillOnBadExit."""
    expedites: bool | None = None
    """Whether a job may ask to be requeued ahead of all others (`--requeue=expedite`)."""


class WatchedJob(Struct, frozen=True, kw_only=True):
    """A job that runs, as the controller sees it."""

    known: bool = True
    running_s: float | None = None
    step: int | None = None
    ranks: int | None = None


class JobFacts(Struct, frozen=True, kw_only=True):
    """A job, or its script."""

    script: Script
    slurm: SlurmSettings = SlurmSettings()
    torch: tuple[int, int] | None = None
    """Version, if it was given."""
    read: Mapping[str, str] = {}
    """Programs that the script starts and that could be read: path to text."""
    checkpoint_directories: Sequence[str] = ()
    """What the configuration names, or the agent has found."""
    comment: str = ""
    opt_out: str = "watchdog=off"
    requeueable: bool | None = None
    """Slurm's word about the job itself; None: it is a script."""
    options_known: bool = True
    """False for a job that may have been submitted with options which Slurm does not store."""
    watched: WatchedJob | None = None
    """What the controller knows of the job."""
