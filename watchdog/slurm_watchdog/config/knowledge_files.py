"""A site's own knowledge files (`knowledge.directory`): reads, checks and applies them."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from typing import Final

from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.site_rows import SiteRows, SiteText

log = logging.getLogger(__name__)

SUFFIX: Final = ".conf"
MAX_BYTES: Final = 256 * 1024
"""Of all files together: they go to each agent with its settings. The package's have as much, for 720 rows."""


def read_texts(directory: str) -> tuple[tuple[SiteText, ...], list[str]]:
    """The files of the directory by name, and why some cannot be used, a sentence each; a missing one is empty."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX) and name[0] != ".")
        problem = _why_untrusted(directory, os.stat(directory)) if names else None
    except FileNotFoundError:
        return (), []
    except OSError as error:
        return (), [f"{directory} cannot be read: {error.strerror or error}"]
    texts: list[SiteText] = []
    problems = [problem] if problem else []
    for name in names:
        path = os.path.join(directory, name)
        try:
            texts.append(SiteText(file=path, text=_read(path)))
        except UnicodeDecodeError as error:
            problems.append(f"{path} is not UTF-8 text ({error.reason})")
        except (OSError, ValueError) as error:
            problems.append(
                str(error) if isinstance(error, ValueError) else f"{path} cannot be read: {error.strerror or error}"
            )
    size = sum(len(each.text.encode()) for each in texts)
    if size > MAX_BYTES:
        problems.append(f"{directory} holds {size // 1024} KiB of rows; {MAX_BYTES // 1024} KiB are possible")
    return tuple(texts), problems


def _read(path: str) -> str:
    """The text of a regular file that only its trusted owner may write. Raises OSError, ValueError with the reason."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if problem := _why_untrusted(path, about):
            raise ValueError(problem)
        return file.read(MAX_BYTES + 1).decode()


def _why_untrusted(path: str, about: os.stat_result) -> str | None:
    if about.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to uid {about.st_uid}, neither root nor this user: chown root {path}"
    if about.st_mode & 0o022:
        return f"{path} may be written by its group or by others: chmod go-w {path}"
    return None


def check_texts(texts: Sequence[SiteText]) -> list[str]:
    """What is wrong with the rows in them, a sentence each."""
    return _rows_of(texts)[1] if texts else []


def put_in_force(texts: Sequence[SiteText]) -> None:
    """Makes this process use their rows. Texts with errors, which `check_texts` refused before, are only logged."""
    if not texts:
        return
    rows, problems = _rows_of(texts)
    for problem in problems:
        log.error("%s", problem)
    if problems:
        log.error("none of the site's own knowledge is used: correct the files, then reload")
        return
    site_rows.use(rows)


def _rows_of(texts: Sequence[SiteText]) -> tuple[SiteRows, list[str]]:
    from slurm_watchdog.knowledge.entries import shipped_parts
    from slurm_watchdog.knowledge.site_files import read_site

    return read_site(texts, shipped_parts())
