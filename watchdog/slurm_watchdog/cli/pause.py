"""`slurm-watchdog pause` and `resume`: no action anywhere, and its end."""

from __future__ import annotations

import click

from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.terminal import sentence
from slurm_watchdog.model.documents import Paused, PauseRequest


@click.command()
@click.argument("reason", default="", metavar="[REASON]")
@asks_controller()
def pause(asked: Asked, reason: str) -> None:
    """Pause all automatic actions. Watching and alerts continue; the pause outlasts restarts of the controller.

    \b
    Example:
      slurm-watchdog pause "storage maintenance until Monday"
    """
    answer = asked.client().post(Paused, "/v1/pause", body=PauseRequest(reason=reason))
    why = f" ({answer.paused.reason})" if answer.paused and answer.paused.reason else ""
    said = f"Paused{why}: nothing is acted on until `slurm-watchdog resume`. Watching and alerts continue."
    asked.answer(answer, lambda: sentence(said))


@click.command()
@asks_controller()
def resume(asked: Asked) -> None:
    """Ends a pause: the mode of each detector decides again what is acted on.

    \b
    Example:
      slurm-watchdog resume
    """
    said = "Resumed: the mode of each detector decides again what is acted on."
    asked.answer(asked.client().post(Paused, "/v1/resume"), lambda: sentence(said))
