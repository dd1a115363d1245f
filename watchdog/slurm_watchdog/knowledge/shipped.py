"""The knowledge files of the package: `data/*.conf`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_watchdog.knowledge.entries import NOTES, Reader, parse_entries, parts_of, read_rows

DATA = Path(__file__).parent / "data"
_NOTES = re.compile(rf"^(?:{'|'.join(NOTES)}): .*$", re.MULTILINE)  # Half of the text, which no row keeps.


def read_shipped(name: str, readers: Mapping[str, Reader]) -> dict[str, tuple[Any, ...]]:
    """Kind -> rows of one file of the package. Raises ValueError with every error in it: a package that is
    broken must not start."""
    text = (DATA / name).read_text(encoding="utf-8")
    rows = read_rows({name: _NOTES.sub("", text)}, readers, late=True)
    if rows.problems:
        raise ValueError("\n".join(rows.problems))
    return {kind: tuple(rows.of(kind)) for kind in readers}


def shipped_parts() -> dict[str, str]:
    """Name -> expression of all sections [part NAME] of the package, which a site's rows may use."""
    found: dict[str, str] = {}
    for path in sorted(DATA.glob("*.conf")):
        found.update(parts_of(parse_entries(path.read_text(encoding="utf-8"), path.name)[0]))
    return found
