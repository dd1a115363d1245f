"""Kill switches: where the file may lie, and its one line. It never holds a program. Pure.

A file that is written as someone else must not be one that a shell, sshd, cron, a desktop or an interpreter
runs: so it lies below fixed directories alone, has no hidden part in its name, and its line is composed here
from four values of a closed alphabet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

KILL_SWITCH_BASE = "/run/slurm-watchdog/jobs"  # The agent makes directories in it, one a run, called JOB.RUN.
FIELDS = ("by", "why", "incident", "decision")
"""What the line says: who wrote it, why, the ids of incident and decision. In this order."""
MAX_FIELD = 300  # Characters of one value.
MAX_PATH = 4096  # linux/limits.h
PROGRAM_PLACES = frozenset({"bin", "sbin", "libexec", "cron.d", "profile.d", "autostart", "site-packages"})
"""Directories whose files are run by their place: a switch has no business there."""
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9 .,:_/-]")
RUN_NAME = re.compile(r"[0-9]{1,10}\.[0-9]{1,6}")


def clean_field(text: object) -> str:
    """A value as the line may hold it: everything outside of `[A-Za-z0-9 .,:_/-]` is an underscore; it has an end."""
    return _NOT_ALLOWED.sub("_", str(text)[:MAX_FIELD])


def compose_line(fields: Mapping[str, object]) -> str:
    """The line, with its end of line, of the values in `fields` by name; one that is missing is empty."""
    pairs = (f'"{name}": "{clean_field(fields.get(name, ""))}"' for name in FIELDS)
    return f"{{{', '.join(pairs)}}}\n"


def parse_line(line: str) -> dict[str, str] | None:
    """The values that a line holds; None if it is no kill switch of ours."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value.keys() <= {*FIELDS} or not value.get("by"):
        return None
    return {name: str(value.get(name, ""))[:MAX_FIELD] for name in FIELDS}


def is_absolute_path(path: str) -> bool:
    """Whether the kernel takes it for a file's name below /."""
    return path.startswith("/") and "\0" not in path and len(path.encode(errors="replace")) < MAX_PATH


def problem_of_path(path: str, prefixes: Iterable[str] = ()) -> str | None:
    """Why no kill switch may lie at `path`, a sentence, or None. `prefixes`: allowed besides KILL_SWITCH_BASE."""
    shown = repr(path[:100])
    if not is_absolute_path(path):
        return f"{shown} is not an absolute path"
    parts = path.split("/")[1:]
    if any(part in ("", ".", "..") for part in parts):
        return f"the path of a kill switch has no detours, got {shown}"
    if parts[:-2] == KILL_SWITCH_BASE.split("/")[1:] and RUN_NAME.fullmatch(parts[-2]):
        return "a kill switch must not be a hidden file" if parts[-1].startswith(".") else None
    base = next((each.rstrip("/") for each in prefixes if _is_below(path, each)), None)
    if base is None:
        return (
            f"{shown} is neither in a directory of {KILL_SWITCH_BASE} nor below jobs.kill_switch_prefixes: "
            "no kill switch is written elsewhere"
        )
    below = path[len(base) + 1 :].split("/")
    if any(part.startswith(".") for part in below):
        return f"no part of the path of a kill switch is hidden, got {shown}"
    if any(part in PROGRAM_PLACES for part in below[:-1]):
        return f"{shown} is a place of programs"
    return None


def problem_of_prefix(prefix: str, *, hidden: bool = False) -> str | None:
    """What is wrong with a directory for kill switches; None: nothing. `hidden`: it may have hidden parts."""
    parts = prefix.rstrip("/").split("/")[1:]
    if not prefix.startswith("/") or not parts or "\0" in prefix:
        return f"{prefix[:100]!r} is not an absolute path of a directory below /"
    if any(part in ("", ".", "..") or (part.startswith(".") and not hidden) for part in parts):
        return f"{prefix[:100]!r} has a hidden part, or a detour"
    return None


def _is_below(path: str, prefix: str) -> bool:
    return problem_of_prefix(prefix, hidden=True) is None and path.startswith(f"{prefix.rstrip('/')}/")
