"""Whether anything in a file could be read as a job's log: nothing wrong in what was not understood is no good news.
Pure."""

from __future__ import annotations

from slurm_watchdog.base.text import plural
from slurm_watchdog.diagnose.logs.case import Source
from slurm_watchdog.diagnose.logs.digest import HEAD_LINES
from slurm_watchdog.knowledge.frameworks import recognise
from slurm_watchdog.knowledge.other_documents import GIVE_OUTPUT, looks_like

RECORDS, RECORD_SHARE = 3, 0.02
"""So many lines, and so large a part of them, have a time, a level or a rank, as the lines of a log have."""


def why_unread(source: Source) -> str | None:
    """What a file looks like in which nothing of a run was recognised, as sentences; None if it is a log."""
    if source.digest.facts:
        return None
    ends = {error.line for error in source.errors}
    lines = [line for line in source.digest.lines if line.raw.strip()]
    others = [line for line in lines if line.number not in ends]
    if not lines:
        return f"it is empty. {GIVE_OUTPUT}"
    if ends:
        last = f"only how the run ended is in it (line {min(ends)}). {GIVE_OUTPUT}"
        return last if len(others) < RECORDS else None
    records = sum(1 for line in lines if line.stamp is not None or line.level is not None or line.who.named)
    kind = looks_like([line.raw for line in lines], records)
    if kind is not None:
        return f"it looks like {kind.looks_like}. {kind.instead}".strip()
    head = "\n".join(line.raw for line in lines[:HEAD_LINES]).encode(errors="replace")
    if records >= max(RECORDS, RECORD_SHARE * len(lines)) or recognise(head) is not None:
        return None
    return f"no step and no error was recognised in its {plural(len(lines), 'line')}. {GIVE_OUTPUT}"
