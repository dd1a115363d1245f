"""What the demo prints: who says what, and when."""

from __future__ import annotations

import os
import time
from typing import Any

import click

STYLES: dict[str, dict[str, Any]] = {
    "act": {"bold": True},
    "we": {"fg": "cyan"},
    "training": {"dim": True},
    "cards": {"fg": "green"},
    "watchdog": {"fg": "yellow"},
    "slack": {"fg": "magenta"},
}


def echo(text: str, **style: Any) -> None:
    """Prints a line, coloured on a terminal."""
    click.echo(click.style(text, **style), color=False if os.environ.get("NO_COLOR") else None)


class Teller:
    """Prints the story: who says what, and when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, who: str, text: str) -> None:
        seconds = int(time.monotonic() - self._began)
        since = click.style(f"{seconds // 60:02d}:{seconds % 60:02d}", dim=True)
        echo(f"{since} {click.style(f'{who:>8}', **STYLES[who])}  {text}")

    def act(self, title: str) -> None:
        echo("")
        self.say("act", title)
