"""Traces of literal lines, replayed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.replay.player import Outcome, numbered_ids, replay

Line = dict[str, Any]


def play(lines: Iterable[Line | bytes], config: str = "") -> Outcome:
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return replay(io.BytesIO(data).read, parse_config(config) if config else Config(), numbered_ids())


def verdict(outcome: Outcome) -> list[Any]:
    return [
        (i.kind, i.state, i.opened_at, i.fired_at, i.resolved_at, i.job_ids, i.culprits, i.summary)
        for i in outcome.incidents
    ]
