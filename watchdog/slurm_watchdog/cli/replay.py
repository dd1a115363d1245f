"""`slurm-watchdog replay`: what the watchdog would have said and done about a recording."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import msgspec

from slurm_watchdog.base.text import plural
from slurm_watchdog.cli.options import EXIT_USAGE, JSON, KNOWLEDGE, Answer, Asked, command, configured, warn
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.health.views import shown
from slurm_watchdog.parse.text_input import Unreadable, opened
from slurm_watchdog.replay.player import NoRecording, Outcome
from slurm_watchdog.replay.player import replay as play
from slurm_watchdog.replay.stand_ins import numbered_ids
from slurm_watchdog.report.story import named

MUCH_SKIPPED = 0.1  # Where this share of a recording was skipped, nothing found says nothing.


@command("recordings RECORDING…", "--config F  Configuration file. [default: every setting's default]", KNOWLEDGE, JSON)
def replay(asked: Asked, recordings: tuple[str, ...]) -> Answer:
    """Reads recordings (plain or packed; `-` is standard input), each alone; says what would have been found and done.
    It asks neither Slurm nor a controller, and takes no action. Exit code 0 nothing found, 1 something found,
    2 a recording cannot be read, or nothing was found and a tenth of its entries or more was skipped.

    \b
    Example:
      slurm-watchdog replay /var/tmp/today.rec     written by: slurm-watchdog controller --record /var/tmp/today.rec
    """
    config = configured(asked.config) or Config()
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(message)s")
    new_id = numbered_ids()
    found = [(path, outcome) for path in recordings if (outcome := _replay_one(path, config, new_id)) is not None]
    rows = [
        msgspec.to_builtins(shown(each, lambda _: True, outcome.decisions(each), ()))
        | ({"trace": path} if len(recordings) > 1 else {})
        for path, outcome in found
        for each in outcome.incidents
    ]
    fired = [path for path, outcome in found if any(each.fired_at is not None for each in outcome.incidents)]
    blind = [
        path
        for path, outcome in found
        if path not in fired and sum(outcome.tally.skipped.values()) >= MUCH_SKIPPED * outcome.tally.entries
    ]

    def show_all() -> None:
        for path, outcome in found:
            decided = [(each, outcome.decisions(each)) for each in outcome.incidents]
            show("replay", name=_name(path), tally=outcome.tally, found=decided, named=named)

    for path in blind:
        warn(f"{_name(path)}: too much was skipped to say that nothing is wrong.")
    return Answer({"incidents": rows}, show_all, EXIT_USAGE if blind or len(found) < len(recordings) else bool(fired))


def _name(path: str) -> str:
    return "standard input" if path == "-" else path


def _replay_one(path: str, config: Config, new_id: Callable[[], str]) -> Outcome | None:
    """The outcome of one recording; None, after a warning, if it cannot be read or is none."""
    try:
        with opened(path) as file:
            outcome = play(file.readline, config, new_id)
    except (Unreadable, NoRecording) as error:
        warn(error if isinstance(error, Unreadable) else f"{_name(path)} {error}")
        return None
    except Exception as error:  # zlib.error is no OSError, and zlib may be missing from a Python
        if not isinstance(error, EOFError | ValueError) and type(error).__module__ != "zlib":
            raise
        todo = "what is whole of it: zcat FILE | slurm-watchdog replay -"
        warn(f"{_name(path)} cannot be read to its end ({error}); {todo}")
        return None
    for why, times in outcome.tally.skipped.items():
        warn(f"{_name(path)}: {plural(times, 'entry', 'entries')} skipped: {why}")
    if outcome.differs:
        warn(f"{_name(path)} was recorded with other settings: {', '.join(outcome.differs)}")
    return outcome
