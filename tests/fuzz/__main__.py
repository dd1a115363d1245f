"""`python -m tests.fuzz [number]`: as many bodies through the controller's door and all behind it; figures as
JSON lines on standard output. It ends with 1 if anything was harmed."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from lab.bench.figures import Figures, say, take_standard_output
from tests.fuzz.place import Place, Unharmed, fuzz

NUMBER = 1_000_000
AT_ONCE = 250_000
"""Bodies for one controller: then another seed, and a controller that knows nothing yet."""
GROWTH_MIB = 200


def main() -> int:
    """Returns 0 if every body was taken or refused, and nothing else happened."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=NUMBER, help=f"of bodies (default {NUMBER})")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    figures = Figures(take_standard_output())
    logging.getLogger("slurm_watchdog").propagate = False
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    say(f"seed {seed}")
    began, harmed, done, outcomes = time.monotonic(), 0, 0, {"taken": 0, "refused": 0}
    warm_mib = 0.0
    while done < options.number and not harmed:
        count = min(AT_ONCE, options.number - done)
        with tempfile.TemporaryDirectory() as scratch:
            place = Place(str(Path(scratch) / "journal.sqlite"))
            try:
                with place.time():
                    asyncio.run(fuzz(place, count, seed, lambda so_far, done=done: say(f"{done + so_far} bodies")))
            except Unharmed as error:
                harmed = 1
                say(str(error))
        for name, number in place.outcomes.items():
            outcomes["taken" if name.endswith(" taken") else "refused"] += number
        done, seed = done + place.bodies, seed + 1
        warm_mib = warm_mib or _memory_mib()
    seconds = time.monotonic() - began
    figures.add("fuzz.bodies", done, "1")
    figures.add("fuzz.taken", outcomes["taken"], "1")
    figures.add("fuzz.refused", outcomes["refused"], "1")
    figures.add("fuzz.harmed", harmed, "1", at_most=0)
    figures.add("fuzz.bodies_per_second", done / seconds, "1/s")
    figures.add("fuzz.memory_growth_mib", _memory_mib() - warm_mib, "MiB", at_most=GROWTH_MIB)
    return 1 if figures.missed else 0


def _memory_mib() -> float:
    """The most that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
