"""What the debug server of PyTorch answers (`torch.distributed.debug.start_debug_server`): a page with
the Flight Recorder of each rank as JSON. Pure.

Format: torch/distributed/debug/_frontend.py, JSON_RESP_TEMPLATE of 2.13. Ranks that did not answer have a reason in its
place.
"""

from __future__ import annotations

import re
from typing import Final

from slurm_watchdog.model.collective_records import CollectiveRecord
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder

MAX_BYTES: Final = 32 << 20
"""Of one answer: 1,024 ranks of 100 entries have some 30 MiB."""
MAX_RANKS: Final = 4096
_RANK: Final = re.compile(rb"<h2>Rank (\d{1,7}): [^<\n]{0,300}</h2>\s{0,100}<pre>(?=\{)")


def parse_debug_server(body: bytes, made_at: float) -> tuple[CollectiveRecord, ...]:
    """The records of all ranks that answered, asked for at `made_at` (date); of one that can't be read, none. Raises
    ValueError, with the reason, for what is no such page."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"an answer of more than {MAX_BYTES} bytes")
    if b"Torch Distributed Debug Server" not in body[:65_536]:
        raise ValueError(f"no page of PyTorch's debug server: {body[:60]!r}")
    found: dict[int, CollectiveRecord] = {}
    for match in _RANK.finditer(body):
        end = body.find(b"</pre>", match.end())
        if end < 0 or len(found) == MAX_RANKS:
            break
        try:
            record = parse_flight_recorder(body[match.end() : end].strip(), int(match[1]), made_at)
        except ValueError:
            continue
        found.setdefault(record.rank, record)
    return tuple(found.values())
