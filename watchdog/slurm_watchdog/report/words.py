"""Values of the documents as words for people: times and ages, node-hours, culprits, advice. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from slurm_watchdog.base.text import plural


def moment(at: float | None) -> str:
    """Date and time where the reader is, to the second; `-` for None."""
    if at is None:
        return "-"
    try:
        return datetime.fromtimestamp(at, tz=timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"epoch {at:g}"


def hours(number: float) -> str:
    """Node-hours in a cell: `75.0`, below one `24 min`."""
    return f"{number:,.1f}" if number >= 1 else f"{number * 60:.0f} min"


def node_time(number: float) -> str:
    """`127.5 node-hours`, below one hour `24 node-minutes`."""
    return f"{number:,.1f} node-hours" if number >= 1 else plural(round(number * 60), "node-minute")


def more(them: Sequence[object], shown: int, what: str = "more") -> str:
    """What a list leaves out; empty if it has all."""
    return f"… and {len(them) - shown} {what}: --json has them" if len(them) > shown else ""


def who(each: Any) -> str:
    """`rank 2 pid 4711 on n3`, or what is known of a culprit."""
    node = getattr(each, "node", None) or getattr(each, "host", None)
    known = (("rank", each.rank), ("pid", each.pid), ("on", node), ("", getattr(each, "gpu_uuid", None)))
    return " ".join(f"{word} {value}".strip() for word, value in known if value is not None) or each.mount or "unknown"


def with_reason(each: Any) -> str:
    """A culprit, and why it is one, or why nothing is known of it."""
    return f"{who(each)}: {each.reason or 'no reason given'}"


def as_text(document: object) -> str:
    """A piece of evidence for people: words as they are, anything else as JSON."""
    return document if isinstance(document, str) else json.dumps(document, indent=2, ensure_ascii=False)


def advice(hint: Any) -> str:
    """What it usually is, and what to try."""
    return f"{hint.usually} Try: {hint.try_next}" + (f" ({hint.documented})" if hint.documented else "")
