"""Patterns of progress that a site wrote itself: what is refused when the configuration is loaded, and what
they are on a node.

Their form has to bound what they can cost (slurm_watchdog.base.regex_cost), and they see the first characters
of a line only. Pure.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

from slurm_watchdog.base.regex_cost import MAX_LENGTH, why_costly
from slurm_watchdog.knowledge.progress_patterns import Pattern

MAX_PATTERNS = 32
GROUPS = frozenset({"step", "total", "loss", "step_seconds", "tokens"})


def problem_of(text: str) -> str | None:
    """Why `text` is no pattern to be used, or None. Half a sentence, for behind the name of the option."""
    if len(text) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = re.compile(text)
        names = set(compiled.groupindex)
        if not names & {"step", "tokens"}:
            return "has no group (?P<step>...), nor (?P<tokens>...)"
        if names - GROUPS:
            return f"has a group {sorted(names - GROUPS)[0]!r}; known are {', '.join(sorted(GROUPS))}"
        if compiled.match("") is not None:
            return "matches an empty line"
        costly = why_costly(text)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        return f"is not a valid regular expression: {error}"
    return f"may take very long on some lines: {costly}" if costly else None


def compile_patterns(texts: Iterable[str]) -> tuple[Pattern, ...]:
    """Rows for those of `texts` that are fit to be used: an agent trusts no controller to have checked them."""
    kept = [text for text in list(texts)[:MAX_PATTERNS] if problem_of(text) is None]
    return tuple(Pattern(f"own_{number}", (), re.compile(text)) for number, text in enumerate(kept, 1))
