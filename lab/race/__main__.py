"""`make race`: 100,000 swaps of names, as lines of JSON. Needs root."""

from __future__ import annotations

import argparse
import json
import sys

from lab.race.run import race


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures = race(options.swaps, options.seed)
    for violation in figures.violations:
        print(violation, file=sys.stderr)
    rows: list[tuple[str, float, str, float | None]] = [
        ("race.swaps", figures.swaps, "", None),
        ("race.seconds", round(figures.seconds, 1), "s", None),
        *((f"race.{name.replace(' ', '_')}", count, "", None) for name, count in sorted(figures.done.items())),
        ("race.violations", len(figures.violations), "", 0),
    ]
    for name, value, unit, bound in rows:
        print(
            json.dumps(
                {
                    "bench": name,
                    "value": value,
                    "unit": unit,
                    "bound": bound,
                    "ok": bound is None or value <= bound,
                }
            )
        )
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
