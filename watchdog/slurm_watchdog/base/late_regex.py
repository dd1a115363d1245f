"""Regular expressions that are compiled when first used: a command that needs few starts sooner. Pure."""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast

METHODS = ("search", "match", "fullmatch", "sub", "split", "findall", "finditer")


class LateRegex:
    """Used as an re.Pattern is. After the first use its methods are the compiled expression's own."""

    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self.pattern, self._asked = pattern, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        compiled: re.Pattern[Any] = re.compile(self.pattern, self._asked)
        for each in METHODS:
            setattr(self, each, getattr(compiled, each))
        return getattr(compiled, name)


def late_regex(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """As re.compile, at the first use; a pattern that is none fails then."""
    return cast("re.Pattern[AnyStr]", LateRegex(pattern, flags))
