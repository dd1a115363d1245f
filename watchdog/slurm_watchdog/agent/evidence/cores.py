"""Core files of a job: where the kernel puts them, and which are its own. Found in a child that is the job's owner."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from pathlib import Path

from slurm_watchdog.agent.workers.request_types import FindFiles
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.model.evidence import FoundFile

MAX_ENTRIES = 8192  # Names that are looked at in one directory.
MAX_FOUND = 16
SYSTEMD_PLACE = "/var/lib/systemd/coredump"
"""Where systemd-coredump(8) keeps them: core.NAME.UID.BOOT.PID.TIME, mostly compressed."""
_SPECIFIER = re.compile(r"%.")


def places(core_pattern: str, directories: list[str], uses_pid: bool = True) -> list[tuple[str, str]]:
    """(directory, pattern of names) where core files of a process may lie, for the text of
    /proc/sys/kernel/core_pattern and the working directories of the job. Empty where a program takes them
    that we do not know (see core(5))."""
    pattern = core_pattern.strip()
    if pattern.startswith("|"):
        return [(SYSTEMD_PLACE, "core.*")] if "systemd-coredump" in pattern else []
    if not pattern:
        return []
    name = _SPECIFIER.sub(lambda found: "%" if found[0] == "%%" else "*", pattern)
    directory, _, base = name.rpartition("/")
    patterns = [base, f"{base}.*"] if uses_pid and "*" not in base else [base]
    if directory.startswith("/") and "*" not in directory:
        return [(directory, each) for each in patterns]
    return [(where, each) for where in directories for each in patterns] if not directory else []


def find_cores(request: FindFiles) -> list[FoundFile]:
    """Every core file of the owner that is not older than the job, newest first. A directory that cannot be read
    is no error: nothing is there."""
    wall = clock.wall()
    found: dict[str, FoundFile] = {}
    for directory, pattern in request.places:
        try:
            with os.scandir(directory) as entries:
                for number, entry in enumerate(entries):
                    if number >= MAX_ENTRIES:
                        break
                    if not fnmatch.fnmatchcase(entry.name, pattern):
                        continue
                    about = entry.stat(follow_symlinks=False)
                    age_s = wall - about.st_mtime
                    mine = about.st_uid == request.uid or f".{request.uid}." in entry.name
                    if stat.S_ISREG(about.st_mode) and mine and age_s <= request.max_age_s and _is_core(entry):
                        found[entry.path] = FoundFile(
                            kind="core", path=entry.path, size_bytes=about.st_size, age_s=max(0.0, age_s)
                        )
        except OSError:
            continue
    return sorted(found.values(), key=lambda each: each.age_s)[:MAX_FOUND]


def _is_core(entry: os.DirEntry[str]) -> bool:
    """Whether it begins as a core file does (ELF, type 4), or is one that was compressed by systemd."""
    if entry.name.endswith((".zst", ".lz4", ".xz")):
        return True
    try:
        with opened(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            head = os.read(fd, 18)
    except OSError:
        return False
    return head[:4] == b"\x7fELF" and head[16:18] in (b"\x04\x00", b"\x00\x04")


def read_pattern() -> tuple[str, bool]:
    """(/proc/sys/kernel/core_pattern, whether the pid is appended); empty where it cannot be read."""
    try:
        uses_pid = Path("/proc/sys/kernel/core_uses_pid").read_text().strip() == "1"
        return Path("/proc/sys/kernel/core_pattern").read_text(), uses_pid
    except OSError:
        return "", False
