"""Which nodes look bad before a start, from what each said of itself: one of few, or no one is accused. An interpreter
that is missing everywhere, a filesystem that hangs for all, is no node's fault. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import one_line

LOOK_MARK = "slurm-watchdog-look "  # Begins the line that `look` prints on each node: a site's prolog may print, too.
ANSWERED = 0.9  # Of the nodes, and more: who is silent then is so by itself. At fewer all are slow. A judgement.
LOOK_S = 5.0  # For up to LOOK_NODES nodes to answer; see look.DEADLINE_S.
LOOK_NODES = 64
LOOK_DOUBLED_S = 1.0
"""For each doubling beyond: srun starts its tasks by a tree, and their interpreters come from one filesystem. A
judgement."""
MAX_LINE = 65_536

Text = Annotated[str, Meta(max_length=4096)]


class NodeLook(Struct):
    """What one node said of itself."""

    node: Text
    gpus: int | None = None  # That NVML counts; None: there is no NVML.
    expected: int | None = None  # That Slurm gave the job there.
    gpu_problem: Text = ""
    problems: Mapping[str, Text] = {}  # Directories, and the site's check: what is wrong with each.


def parse_look(line: str) -> NodeLook | None:
    """What a line of the look's output says; None: it is none of ours."""
    _, mark, answer = line.partition(LOOK_MARK)  # before it a task's number, under `--label`
    if not mark or len(line) > MAX_LINE:
        return None
    try:
        return msgspec.json.decode(answer, type=NodeLook)
    except (msgspec.MsgspecError, RecursionError):
        return None


def look_s(count: int) -> float:
    """How long the answers of `count` nodes are waited for, in seconds."""
    return LOOK_S + LOOK_DOUBLED_S * max(0.0, math.log2(max(1, count) / LOOK_NODES))


def suspects(asked: Sequence[str], looks: Sequence[NodeLook], *, spares: int = 0) -> dict[str, str]:
    """Node to what is wrong there, a part of a sentence. `looks`: what was answered. `spares`: so many nodes may be
    silent, and the start does without them."""
    answered = {look.node: look for look in looks if look.node in asked}
    silent = len(asked) - len(answered)
    found: dict[str, str] = {}
    if answered and (len(answered) >= ANSWERED * len(asked) or silent <= spares):
        found = {node: "it did not answer, and the others did" for node in asked if node not in answered}
    most = _most_gpus(list(answered.values()))
    for node, look in answered.items():
        problems = _gpus(look, most)
        for place, said in look.problems.items():
            well = sum(place not in other.problems for other in answered.values())
            # What fails on most nodes is no fault of this one.
            if not place.startswith("/") or (well and 2 * well >= len(answered) - 1):
                problems.append(f"{place}{':' if place.startswith('/') else ''} {said}")
        if problems:
            found[node] = one_line("; ".join(problems), 400)
    return {node: found[node] for node in asked if node in found}


def _most_gpus(looks: Sequence[NodeLook]) -> int | None:
    """The number of GPUs that more than half of at least three nodes have."""
    counts = Counter(look.gpus for look in looks if look.gpus is not None)
    number, times = counts.most_common(1)[0] if counts else (None, 0)
    return number if len(looks) >= 3 and 2 * times > len(looks) else None


def _gpus(look: NodeLook, most: int | None) -> list[str]:
    wanted, source = (look.expected, "Slurm gave the job") if look.expected else (most, "most of the nodes have")
    if not wanted or look.gpus is None:
        return [look.gpu_problem] if wanted and look.gpu_problem else []
    return [f"NVML sees {look.gpus} GPUs, and {source} {wanted}"] if look.gpus < wanted else []
