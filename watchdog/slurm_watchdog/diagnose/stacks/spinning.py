"""A rank stuck in a small Python loop: what one dump after another shows of it. Pure.

From one dump to the next, a loop that waits for what never comes looks like work: the interpreter runs. Over
minutes it differs from most work: the same few lines of the same functions, nothing read, nothing written, no
byte more memory. A call into compiled code that takes long (a sort, a regular expression, an index built in
C++) shows one line, too: what releases the interpreter's lock is left out by that, what has a telling name by
the name, and the rest by the time that it is given.

What is followed is bounded: a few ranks of a run, a few stacks of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.diagnose.stacks.places import RankPlace, is_waiting_room, locate, normal_file, place_of
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey
from slurm_watchdog.knowledge.stack_frames import WAITING, WORK, Place, has_word
from slurm_watchdog.model.evidence import Frame, ProcessStack
from slurm_watchdog.model.past_runs import Steady

MAX_STACKS = 64  # More ranks than these are not followed.
LOOKS = 8  # Different stacks, line by line, that a small loop may show.
DEPTH = 6  # Functions that it may call below each other.
LINES = 12  # Between the first and the last line of it.
REGULAR = frozenset({"re", "regex", "re2"})
"""Modules of regular expressions: one call may take minutes. A program's own function `match` proves nothing."""
MEMORY_BYTES = 1 << 20
"""What is collected and given back again; an index or a list of results grows by more within seconds."""
IO_BYTES = 256
"""In all. Threads that wake each other write 8 bytes each time; one line of a log every minute is more than that."""
LEAST_CPU, MOST_CPU = 0.1, 1.2
"""Cores of the whole process: its main thread and no one else. Less still on a machine that has too few cores
for its ranks, if it was found running or waiting for a core."""
LEAST_GIL = 0.5  # Share of the dumps in which the main thread held the interpreter's lock.
PLACES = frozenset({Place.OTHER, Place.QUEUE, Place.LOCK, Place.DATALOADER})
"""Where a loop may poll. Every other place is something that takes its time, or another matter."""
NAMED_FILES = 4  # Innermost frames whose files' names count as well.


def follow(before: Mapping[ProcessKey, Steady], stacks: Sequence[ProcessStack], at: float) -> dict[ProcessKey, Steady]:
    """The ranks that may be in such a loop, after one more dump of all ranks, taken `at`; `before` is what
    came of the last one. `stacks` are those of the few ranks that stand outside of the collective in which
    the others wait.

    A rank whose dump is missing is forgotten; one that shows something else starts again.
    """
    found = {}
    for stack in stacks[:MAX_STACKS]:
        place = locate(stack)
        if place.error is None and _may_spin(place) and None not in (stack.io_bytes, stack.resident_bytes):
            found[place.key] = _one_more(before.get(place.key), stack, place, at)
    return found


def _may_spin(place: RankPlace) -> bool:
    frames = place.raw
    if place.place not in PLACES or place.contexts or place.gil_held_by is not None:
        return False
    if any(place_of(frame.function, frame.file) not in PLACES for frame in frames):
        return False
    return not is_named_work(frames)


def is_named_work(frames: Sequence[Frame]) -> bool:
    """Whether a function, or the file of one of the innermost, is named after something that takes its time. Frames of
    known libraries tell of nothing by their names (`_MultiProcessingDataLoaderIter`): what they mean is known."""
    own = [
        each for each in frames if not is_waiting_room(each.file) and place_of(each.function, each.file) is Place.OTHER
    ]
    if any(has_word(frame.function, WORK) for frame in own):
        return True
    files = [_named_after(frame.file) for frame in own[:NAMED_FILES]]
    return any(name in REGULAR or has_word(name, WORK) for name in files)


def _named_after(file: str) -> str:
    """`index` of data/index.py; of a package's `__init__.py` the package, for every package has one."""
    return normal_file(file).removesuffix("/__init__.py").rpartition("/")[2].removesuffix(".py")


def _one_more(before: Steady | None, stack: ProcessStack, place: RankPlace, at: float) -> Steady:
    io_bytes, resident_bytes = stack.io_bytes or 0, stack.resident_bytes or 0
    first = Steady(
        node=stack.node, pid=stack.pid, rank=place.rank, first_at=at, last_at=at, dumps=1,
        with_gil=int(place.holds_gil),
        stacks=(place.raw,), io_bytes=io_bytes, resident_bytes=(resident_bytes, resident_bytes),
        cpu_s=(stack.cpu_s, stack.cpu_s),
    )  # fmt: skip
    if before is None:
        return first
    low, high = before.resident_bytes
    grown = replace(
        before,
        last_at=at,
        dumps=before.dumps + 1,
        with_gil=before.with_gil + first.with_gil,
        stacks=before.stacks if place.raw in before.stacks else (*before.stacks, place.raw),
        resident_bytes=(min(low, resident_bytes), max(high, resident_bytes)),
        cpu_s=(before.cpu_s[0], stack.cpu_s),
    )
    moved = not 0 <= io_bytes - before.io_bytes <= IO_BYTES
    return first if moved or not _is_small(grown) or not _uses_a_core(before, stack, at) else grown


def _uses_a_core(before: Steady, stack: ProcessStack, at: float) -> bool:
    passed_s = at - before.last_at
    used_s = stack.cpu_s - before.cpu_s[1]
    if passed_s <= 0 or not 0 < used_s / passed_s <= MOST_CPU:
        return False
    return used_s / passed_s >= LEAST_CPU or stack.state == "R"


def _is_small(seen: Steady) -> bool:
    low, high = seen.resident_bytes
    if len(seen.stacks) > LOOKS or high - low > MEMORY_BYTES:
        return False
    outwards = [tuple(reversed(stack)) for stack in seen.stacks]
    common = _common(outwards)
    loops = {(stack[common].function, stack[common].file) for stack in outwards if len(stack) > common}
    lines = [stack[common].line for stack in outwards if len(stack) > common]
    deepest = max(len(stack) - common for stack in outwards)
    return len(loops) <= 1 and deepest <= DEPTH and (not lines or max(lines) - min(lines) <= LINES)


def _common(outwards: Sequence[tuple[Frame, ...]]) -> int:
    """So many frames, from the outermost, are the same in all stacks, lines included; the next one goes round."""
    shortest = min(len(stack) for stack in outwards)
    same = next((place for place in range(shortest) if len({stack[place] for stack in outwards}) > 1), shortest)
    # A function that the loop calls from one and the same line is there in some dumps and not in others.
    return same if same < shortest else max(0, shortest - 1)


def keeps_the_lock(seen: Steady) -> bool:
    """Whether it was mostly seen with the interpreter's lock: it runs Python, or a call that keeps the lock."""
    return seen.with_gil >= LEAST_GIL * seen.dumps


def is_named_waiting(seen: Steady) -> bool:
    """Whether the functions of the loop are called after waiting."""
    return any(has_word(frame.function, WAITING) for stack in seen.stacks for frame in stack[:3])


def where(seen: Steady) -> str:
    """`poll (train.py:88)`: the frame of the program that goes round, or that calls what does."""
    stack = seen.stacks[0]
    common = _common([tuple(reversed(each)) for each in seen.stacks])
    loop = stack[max(0, len(stack) - common - 1) :]
    frame = next((each for each in loop if not is_waiting_room(each.file)), loop[0])
    return f"{frame.function} ({frame.file}:{frame.line})"
