"""Whether the command has lost a node for good. Pure.

Under `--no-kill` Slurm takes a node that is DOWN out of the job and leaves the rest to run: to end it, and to start it
again, is the supervisor's work. Slurm's word alone ends nothing: its slurmd may have died alone, its network may be
another one than that of the ranks, or the trainer may continue without the node.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.launch_options import NODES

LOOK_S = 30.0  # Between two questions to Slurm for the job's nodes: it is one job's row.
AGAIN_S = 5.0  # The same once one is missing.
LISTINGS = 2  # Answers in a row without the node, as `node_down` wants them.
TRIES = 3  # Connections to its slurmd in vain, in a row: as `node_down` wants them.
STILL_S = 15.0
"""Since the last new step, where the node is gone for certain. Slurm has waited for its SlurmdTimeout before."""
STILL_LINES = 3.0
"""The same in times between two lines that say a step: the ranks may reach each other by another network."""
UNKNOWN_S = 180.0
"""The same where that time is not known: longer than most. A judgement. Where the log has said no step at all, waiting
shows nothing: STILL_S."""
PATIENT_S = 900.0
"""The same where the node still answers, or where the trainer can continue with fewer nodes: more than the 10 min after
which NCCL's own limit ends what waits for a lost rank. A judgement."""

_NAMES = "|".join(sorted(each.replace("_", "[_-]") for each in NODES))
_LEAST = re.compile(rf"(?:^|[\s\"'])--?(?:{_NAMES})(?:=|\s+)[\"']?(\d{{1,6}}):(\d{{1,6}})\b")


class Missing(Struct, kw_only=False):
    """A node of the command that Slurm has taken out of the job."""

    listings: int = 0  # Answers in a row without it.
    tries: int = 0  # Connections in vain, in a row.


class Watch(Struct, kw_only=False):
    """What was seen of the present start."""

    missing: Mapping[str, Missing] = {}
    counts: Mapping[str, float] = {}  # Steps, by what prints them, when one was new last; none: the log says none.
    line_s: float | None = None  # Between two lines that say a step; None: not known.
    still_since: float = 0.0  # When that was, or when the first node was missing.


def seen(
    watch: Watch,
    missing: Sequence[str],
    answering: Collection[str],
    counts: Mapping[str, float],
    now: float,
    *,
    line_s: float | None = None,
) -> Watch:
    """After one more answer of Slurm's. `answering`: those of `missing` whose slurmd, or kernel, answers; `counts` and
    `line_s`: the newest steps of the command, and the time between two lines with one."""
    line_s = watch.line_s if line_s is None else line_s
    if not missing:
        return Watch(counts={**watch.counts, **counts}, line_s=line_s)
    nodes = {}
    for node in missing:
        known = watch.missing.get(node, Missing())
        nodes[node] = Missing(known.listings + 1, 0 if node in answering else known.tries + 1)
    # A trainer that continues without the node may begin at its last checkpoint.
    moves = any(count != watch.counts.get(name, count) for name, count in counts.items())
    new = moves or not watch.missing
    return Watch(nodes, {**watch.counts, **counts}, line_s, now if new else watch.still_since)


def lost(watch: Watch, now: float, *, elastic: bool) -> tuple[str, ...]:
    """The nodes without which the command has to be started again; none while it may still do well."""
    listed = tuple(node for node, each in watch.missing.items() if each.listings >= LISTINGS)
    gone = any(watch.missing[node].tries >= TRIES for node in listed)
    limit_s = PATIENT_S
    if gone and not elastic:
        unknown_s = UNKNOWN_S if watch.counts else STILL_S
        limit_s = unknown_s if watch.line_s is None else min(PATIENT_S, max(STILL_S, STILL_LINES * watch.line_s))
    return listed if listed and now - watch.still_since >= limit_s else ()


def least_nodes(command: Sequence[str], count: int) -> int:
    """On how few nodes the command can run by its own words (torchrun's --nnodes=MIN:MAX), or `count`."""
    found = _LEAST.search(" ".join(command))
    return min(count, max(1, int(found[1]))) if found is not None and int(found[1]) < int(found[2]) else count
