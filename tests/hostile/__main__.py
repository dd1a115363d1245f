"""`python -m tests.hostile [number]`: as many strings that are meant to harm through Slack, other programs,
the terminal, metrics and the page; figures as JSON lines on standard output. It ends with 1 if any of them
did anything."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Callable

from lab.bench.figures import Figures, say, take_standard_output
from tests.hostile import page
from tests.hostile.shown import CHANNELS
from tests.hostile.text import batches

NUMBER = 100_000


def main() -> int:
    """Returns 0 if nothing was anything but text."""
    parser = argparse.ArgumentParser(prog="make hostile", description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=NUMBER, help=f"of strings (default {NUMBER})")
    number = parser.parse_args().number
    figures = Figures(take_standard_output())
    for name, check in CHANNELS.items():
        _count(figures, name, number, lambda check=check: _all(check, number))  # type: ignore[misc]
    _count(figures, "page_json", number, lambda: asyncio.run(page.answers(number)))
    if shutil.which("chromium"):
        _count(figures, "page_in_chromium", number, lambda: asyncio.run(page.drawn(number)))
    else:
        say("no chromium here, nothing is drawn: apt-get install --no-install-recommends chromium")
    for name in figures.missed:
        say(f"{name} misses its bound")
    return 1 if figures.missed else 0


def _all(check: Callable[[list[str]], None], number: int) -> None:
    for batch in batches(number):
        check(batch)


def _count(figures: Figures, name: str, number: int, work: Callable[[], object]) -> None:
    """Runs one of them; the first string that did something ends it, and is shown."""
    began, broken = time.monotonic(), 0
    try:
        work()
    except AssertionError as error:
        broken = 1
        say(f"{name}: {str(error)[:2000]}")
    figures.add(f"hostile.{name}.strings", number, "1")
    figures.add(f"hostile.{name}.did_anything", broken, "1", at_most=0)
    figures.add(f"hostile.{name}.seconds", time.monotonic() - began, "s")


if __name__ == "__main__":
    sys.exit(main())
