"""Which nodes look bad before a start, from what each said of itself: one of few, or no one is accused. An interpreter
that is missing everywhere, a filesystem that hangs for all, is no node's fault. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from slurm_watchdog.base.averages import median
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import one_line

LOOK_MARK = "slurm-watchdog-look "  # Begins the line that `look` prints on each node: a site's prolog may print, too.
SKEW_S = 5.0  # Between a node's clock and most others: far more than NTP leaves, and than a line takes.
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
    wall: float
    gpus: int | None = None  # That NVML counts; None: there is no NVML.
    expected: int | None = None  # That Slurm gave the job there.
    gpu_problems: tuple[Text, ...] = ()
    directories: Mapping[str, Text] = {}  # Those that answered, with what they said; empty: all was well.
    command: tuple[int, Text] | None = None  # Exit code and last line of the site's command.
    late: tuple[Text, ...] = ()  # What has not answered within its time.


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


def suspects(asked: Sequence[str], looks: Sequence[tuple[NodeLook, float]], *, spares: int = 0) -> dict[str, str]:
    """Node to what is wrong there, a part of a sentence. `looks`: what was answered, each with this host's time (since
    the epoch) when it came. `spares`: so many nodes may be silent, and the start does without them."""
    answered = {look.node: (look, at) for look, at in looks if look.node in asked}
    silent = len(asked) - len(answered)
    found: dict[str, str] = {}
    if answered and (len(answered) >= ANSWERED * len(asked) or silent <= spares):
        found = {node: "it did not answer, and the others did" for node in asked if node not in answered}
    most = _most_gpus([look for look, _ in answered.values()])
    usual_s = _usual_skew_s([look.wall - at for look, at in answered.values()])
    for node, (look, at) in answered.items():
        others = [other for name, (other, _) in answered.items() if name != node]
        problems = [*_gpus(look, most), *_places(look, others)]
        ahead_s = 0.0 if usual_s is None else look.wall - at - usual_s
        if abs(ahead_s) > SKEW_S:
            problems.append(f"its clock is {ahead_s:+.0f} s off")
        if look.command is not None and look.command[0]:
            code, line = look.command
            problems.append(f"the site's check ended with {code}{f': {line}' if line else ''}")
        elif look.command is None and "command" in look.late:
            problems.append("the site's check does not answer")
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
    found = list(look.gpu_problems) if look.gpus is not None or wanted else []
    if look.gpus is not None and wanted is not None and look.gpus < wanted:
        found.append(f"NVML sees {look.gpus} GPUs, and {source} {wanted}")
    return found


def _places(look: NodeLook, others: Sequence[NodeLook]) -> list[str]:
    """Directories that fail here and answer on most of the other nodes."""
    found = []
    failed = {place: said for place, said in look.directories.items() if said}
    failed |= {place: "does not answer" for place in look.late if place.startswith("/")}
    for place, said in failed.items():
        well = sum(other.directories.get(place) == "" for other in others)
        if well and 2 * well >= len(others):
            found.append(f"{place}: {said}")
    return found


def _usual_skew_s(ahead_s: Sequence[float]) -> float | None:
    """How far most clocks are ahead of this host's: if that one is off, all others are, seen from here. None: they do
    not agree. Of two nodes, this host's is right."""
    if len(ahead_s) < 3:
        return 0.0
    usual_s = median(ahead_s)
    return usual_s if 2 * sum(abs(each - usual_s) <= SKEW_S for each in ahead_s) > len(ahead_s) else None
