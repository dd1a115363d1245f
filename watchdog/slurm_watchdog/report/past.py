"""Asks a journal in the place of a controller: of a run that has ended, or from a copy."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from slurm_watchdog.base.failure import Failure
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.api.answers import Api
from slurm_watchdog.controller.api.asking import Asked
from slurm_watchdog.controller.api.routes import ROUTES, answer
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.standalone.own_runs import JOURNAL

HAS_SCHEMA = "SELECT 1 FROM sqlite_master WHERE name = 'journal_schema'"
FULL = "database or disk is full"
"""SQLite's text of SQLITE_FULL: its number comes with an error only since Python 3.11."""
COPY_PAGES = 1024  # Copied at a time: a controller that writes meanwhile waits for no longer than that takes.
READ = ("/v1/incidents", "/v1/report")
Exchange = Callable[[str, str, bytes], tuple[int, str, bytes]]  # (method, target, body) to (status, its words, body).


def open_journal(given: str) -> tuple[str, Exchange]:
    """The journal that is meant, a file, or that of the directory of a `run`; and what answers from a copy of it: what
    needs a controller is refused. Raises Failure."""
    path = os.path.expanduser(given)
    file = Path(path, JOURNAL) if os.path.isdir(path) else Path(path)
    try:
        what = f"{file} is empty: it is not a journal." if os.stat(file).st_size == 0 else ""
        what = what if os.path.isfile(file) else f"{file} is no file: it is not a journal."
    except OSError as error:
        what = f"The journal {file} cannot be read: {error.strerror}."
    if what:
        raise Failure(what, "Give the directory of a `run`, or its journal.sqlite.")
    with ExitStack() as opened:
        try:
            place = opened.enter_context(tempfile.TemporaryDirectory(prefix="slurm-watchdog-"))
        except OSError as error:
            reason = error.strerror or str(error)
            raise Failure(f"There is no place to copy the journal {file} to: {reason}.", "Set TMPDIR.") from error
        exchange = _answers(opened.enter_context(closing(_open_copy(file, Path(place) / JOURNAL))))
        weakref.finalize(exchange, opened.pop_all().close)
    return str(file), exchange


def _open_copy(file: Path, copy: Path) -> Journal:
    """A consistent copy: reading changes nothing, and an older release's journal is migrated in the copy only."""
    # Who has a journal open keeps a log beside it. Without one nothing is written, not even the files beside it.
    how = "mode=ro" if Path(f"{file}-wal").exists() else "mode=ro&immutable=1"
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(file.absolute()))}?{how}", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target, pages=COPY_PAGES)
            if not target.execute(HAS_SCHEMA).fetchone():
                raise Failure(f"{file} is a database, and no journal of slurm-watchdog.")
        return Journal(f"sqlite:///{copy}")
    except (sqlite3.Error, JournalError, OSError) as error:
        if FULL in str(error):
            raise Failure(f"There is no room in {copy.parent} for a copy of {file}.", "Set TMPDIR.") from error
        reason = str(error).replace(f"sqlite:///{copy}", "there")  # the copy is no one's concern
        raise Failure(
            f"The journal {file} cannot be read: {reason}", "Is it a watchdog's journal, and may you read it?"
        ) from error


def _answers(journal: Journal) -> Exchange:
    """The requests of the controller's table that a journal answers, to one who may see all that is in the file."""
    nothing = SimpleNamespace(incidents={}, jobs={}, people=(), waiting=lambda decision: None)
    past: Any = SimpleNamespace(journal=journal, config=Config(), judge=nothing, state=nothing, actions=nothing)
    routes = [each for each in ROUTES if each.path.startswith(READ)]

    def exchange(method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        asked = Asked(method, target, Person(knows_password=True), body)
        status, document = asyncio.run(answer(Api(past), routes, asked))
        return status, "", document

    return exchange
