"""What the offline commands share: the files that were given, how one is read, and how an answer is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from slurm_watchdog.cli.options import load_or_exit, print_json
from slurm_watchdog.cli.terminal import clean

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.parse.text_input import Block

T = TypeVar("T")

MAX_FILES = 20_000
MAX_DEPTH = 6


@dataclass(frozen=True)
class Answer:
    """What one command says of its files."""

    document: dict[str, Any]
    show: Callable[[], None]  # Prints it for people.
    code: int

    def finish(self, as_json: bool) -> NoReturn:
        """Prints it and ends the process."""
        print_json(self.document) if as_json else self.show()
        sys.exit(self.code)


def warn(text: object) -> None:
    """A line on standard error."""
    click.echo(clean(text), err=True)


def configured(config_file: str | None) -> Config | None:
    """A configuration, with its rows of knowledge in force; None without one. Ends the process with code 2 if the file
    is wrong."""
    if config_file is None:
        return None
    from slurm_watchdog.config.knowledge_files import put_in_force

    config = load_or_exit(config_file)
    put_in_force(config.site_texts)
    return config


def read_file(path: str, take: Callable[[Iterator[Block]], T]) -> tuple[T | None, bool]:
    """(what `take` makes of a file, whether it was read to its end); None, after a warning, if it cannot be read."""
    from slurm_watchdog.parse.text_input import Unreadable, read_blocks

    damage: list[str] = []
    try:
        found = take(read_blocks(path, lambda: damage.append(path)))
    except Unreadable as error:
        warn(error)
        return None, False
    if damage:
        warn(f"{path}: the archive is cut short or damaged; what could be unpacked was read")
    return found, not damage


def files_in(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """(the part of its name that may say whose it is, its path), for each file, and each below a directory."""
    given = sorted(set(paths))
    common = os.path.commonpath([str(Path(path).absolute().parent) for path in given if path != "-"] or ["/"])
    seen = 0
    for path in given:
        if path == "-" or not Path(path).is_dir():
            yield ("standard input" if path == "-" else os.path.relpath(Path(path).absolute(), common)), path
            continue
        base = Path(path).absolute()
        for folder, folders, files in os.walk(base, onerror=lambda error: problems.append(str(error))):
            depth = len(Path(folder).relative_to(base).parts)
            folders[:] = sorted(each for each in folders if not each.startswith(".")) if depth < MAX_DEPTH else []
            for whole in (Path(folder) / each for each in sorted(files) if not each.startswith(".")):
                seen += 1
                if seen > MAX_FILES:
                    problems.append(f"{path} holds more than {MAX_FILES} files: the others were left out")
                    return
                if whole.is_file():
                    name = str(whole.relative_to(base))
                    yield (name if len(given) == 1 else f"{os.path.relpath(base, common)}/{name}"), str(whole)
