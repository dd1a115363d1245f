"""What an incident usually is: the hints of its kind, and of the error lines that its facts quote.

Pure. They are advice for the reader, shown beside what was found; nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.knowledge.remediation_hints import MAX_HINTS, Hint, hints_for
from slurm_watchdog.parse.kernel_log.line import parse_message

MAX_FACTS = 40  # Facts that are looked at; an incident's sentence and its first facts name its cause.
MAX_FACT = 2000  # Characters of one fact.


def incident_hints(kind: str, summary: str, facts: Iterable[str], own: Hint | None = None) -> tuple[Hint, ...]:
    """At most `MAX_HINTS`: of the errors that summary and facts quote, then of the kind of incident, `own` last."""
    quoted = [summary[:MAX_FACT]]
    for fact in facts:
        if len(quoted) > MAX_FACTS:
            break
        quoted.append(fact[:MAX_FACT])
    text = "\n".join(quoted)
    found = [hint for line in quoted for name in _classes_of(line) for hint in hints_for(name, line)]
    return tuple(dict.fromkeys([*found[: MAX_HINTS - 1], *hints_for(kind, text), *([own] if own else [])]))[:MAX_HINTS]


def _classes_of(line: str) -> Iterator[str]:
    """The class of an error that the line quotes, of a log or of the kernel; nothing if it quotes none."""
    at = line.find("NVRM: ")
    if at >= 0 and (fact := parse_message(line[at:])) is not None:
        from slurm_watchdog.diagnose.kernel_log.verdict import class_of

        yield class_of(fact)
        return
    low = line.lower()
    for row in log_table().signatures:
        if any(needle in low for needle in row.needles) and row.regex.search(line):
            yield row.name
            return
