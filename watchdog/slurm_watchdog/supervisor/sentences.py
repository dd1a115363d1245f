"""Sentences of the supervisor, for the job's log and its status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SIGRTMAX: Final = 64  # signal(7): 255 is no signal, but sys.exit(-1)


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
        "name alone (a path, a PATH of its own), or has options that cannot be adapted"
    )


def beside_words(pid: int) -> str:
    """That there is another supervisor of the job."""
    return f"another `slurm-watchdog run` of this job is under way (process {pid})"


def told_words(age_s: float) -> str:
    """Why a command is not started again that was told something `age_s` before it ended; a part of a sentence."""
    return f"SIGUSR1 or SIGUSR2 was passed to it {age_s:.0f} s before, as a notice that its time is nearly over is"
