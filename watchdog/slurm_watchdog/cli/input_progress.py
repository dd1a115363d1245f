"""Reads input files in blocks, with a progress bar on a terminal where it takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from slurm_watchdog.cli.terminal import clean

if TYPE_CHECKING:
    from slurm_watchdog.parse.text_input import Block

PROGRESS_FROM_BYTES: Final = 64 * 1024**2
"""Smaller files are read before a bar could be seen."""


@dataclass
class Reading:
    """A file that is being read."""

    blocks: Iterator[Block]
    damaged: bool = False
    """Whether it is an archive that could not be unpacked to its end: what is not found in it may yet be there."""


@contextmanager
def reading(path: str) -> Iterator[Reading]:
    """The blocks of a file (`-` is standard input); while they are taken a bar is drawn. Raises Unreadable."""
    from slurm_watchdog.parse.text_input import read_blocks

    size = size_of(path)
    opened = Reading(iter(()))

    def note_damage() -> None:
        opened.damaged = True

    if size < PROGRESS_FROM_BYTES or not sys.stderr.isatty():
        opened.blocks = read_blocks(path, on_damage=note_damage)
        yield opened
    else:
        with click.progressbar(length=size, label=os.path.basename(path), file=sys.stderr) as bar:
            opened.blocks = read_blocks(path, lambda done: bar.update(done - bar.pos), note_damage)
            yield opened
    if opened.damaged:
        click.echo(f"{clean(path)}: the archive is cut short or damaged; what could be unpacked was read", err=True)


def size_of(path: str) -> int:
    """Bytes of a file; 0 if that is not known."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
