"""What the demo prints: who says what, and when."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.markup import escape

console = Console(highlight=False, soft_wrap=True, color_system=None if os.environ.get("NO_COLOR") else "auto")

COLOURS = {
    "act": "bold",
    "we": "cyan",
    "training": "dim",
    "cards": "green",
    "watchdog": "yellow",
    "slack": "magenta",
}


class Teller:
    """Prints the story: who says what, and when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, who: str, text: str) -> None:
        seconds = int(time.monotonic() - self._began)
        colour = COLOURS[who]
        console.print(f"[dim]{seconds // 60:02d}:{seconds % 60:02d}[/] [{colour}]{who:>8}[/]  {escape(text)}")

    def act(self, title: str) -> None:
        console.print()
        self.say("act", title)
