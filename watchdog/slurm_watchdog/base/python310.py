"""What Python 3.10 lacks: text enumerations, starts that ignore the working directory. Deadlines are in `deadline`.

On a later Python the standard library's own are used.
"""

from __future__ import annotations

import sys
from datetime import datetime
from enum import Enum
from typing import Any, TypeGuard, get_origin

__all__ = ["StrEnum", "is_class", "read_iso_time", "run_code", "run_module"]

if sys.version_info >= (3, 11):
    from enum import StrEnum  # novm
else:

    class StrEnum(str, Enum):
        """Members are texts, and are printed as such."""

        __str__ = str.__str__


def run_code(program: str) -> list[str]:
    """The words that run `program` by this interpreter; nothing is imported from the directory in which it starts."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-c", program]
    return [sys.executable, "-c", f"import sys; del sys.path[0]; {program}"]


def run_module(name: str) -> list[str]:
    """As `run_code`, of a module as a program."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", name]
    return run_code(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)")


def is_class(hint: object) -> TypeGuard[type[Any]]:
    """Whether a type is a class: for Python 3.10 `tuple[str, ...]` is an instance of `type`, too."""
    return isinstance(hint, type) and get_origin(hint) is None


def read_iso_time(text: str) -> datetime:
    """A date and time as ISO 8601 writes it; `Z` is understood. Raises ValueError."""
    return datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in ("Z", "z") else text)
