"""`python -m tools.docs [NAME…]` (`make docs`): writes the pages that are generated from the program, all of
them or those named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tools.docs import (
    alerts,
    api,
    cli,
    collectors,
    detectors,
    evaluation,
    examples,
    metrics,
    options,
    rooms,
)


class Page(NamedTuple):
    """A file, and the function that makes its text."""

    file: Path
    write: Callable[[], str]


PAGES: Mapping[str, Page] = {
    "options": Page(options.FILE, options.write),
    "example": Page(options.EXAMPLE, options.example),
    "detectors": Page(detectors.FILE, detectors.write),
    "alerts": Page(alerts.FILE, alerts.write),
    "collectors": Page(collectors.FILE, collectors.write),
    "metrics": Page(metrics.FILE, metrics.write),
    "cli": Page(cli.FILE, cli.write),
    "api": Page(api.FILE, api.write),
    "evaluation": Page(evaluation.FILE, evaluation.write),
    "rooms": Page(rooms.FILE, rooms.write),
    **{page.stem.lower(): Page(page, partial(examples.write, page)) for page in examples.PAGES},
}
"""Every generated page, by the name that `make docs` takes."""


def main(names: Sequence[str]) -> int:
    """Writes the pages; 2 if there is none of a name."""
    if unknown := [name for name in names if name not in PAGES]:
        print(f"There is no page {', '.join(unknown)}; there are: {', '.join(PAGES)}.", file=sys.stderr)
        return 2
    for name in names or PAGES:
        PAGES[name].file.write_text(PAGES[name].write(), encoding="utf-8")
    if "rooms" in names:
        print(rooms.picture(rooms.read_imports()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
