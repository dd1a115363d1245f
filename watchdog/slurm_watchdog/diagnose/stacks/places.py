"""Where a rank stands: which of its threads trains, and which known place its frames mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import takewhile

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.kernel_causes import TRACE_WORDS
from slurm_watchdog.knowledge.stack_frames import (
    CONTEXTS,
    IDLE_LOOPS,
    SHORTENED_WAITING_ROOMS,
    THREADS,
    TRAINING_THREAD,
    WAITING_ROOMS,
    FrameTable,
    Place,
    frame_table,
)
from slurm_watchdog.knowledge.syscalls import PLACES_OF_CALLS
from slurm_watchdog.model.evidence import Frame, ProcessStack, ThreadStack
from slurm_watchdog.parse.stacks.frame_lines import begins_program

_INNER_FRAMES = 12  # A collective is looked for this deep under library wrappers; the training loop itself lies deeper.

_OF_A_CALL = 5
"""Who waits for its GPU so near below a collective, a compiler that measures, or a checkpoint does it for that."""

_CALLERS = 30  # So far out the caller of a lock, a sleep or a file is looked for that says what it is for.

WAITS_FOR_PEERS = frozenset({Place.COLLECTIVE, Place.P2P, Place.RENDEZVOUS})

_ERRANDS = {
    **dict.fromkeys(
        (Place.LOCK, Place.QUEUE, Place.SLEEP, Place.SUBPROCESS),
        frozenset(
            {Place.DATALOADER, Place.CHECKPOINT, Place.COMPILATION, Place.NETWORK, Place.TEARDOWN, Place.RENDEZVOUS,
             Place.REMOTE, Place.PREPARATION, Place.DEBUGGER, Place.COLLECTIVE}
        ),
    ),
    Place.FILESYSTEM: frozenset(
        {Place.CHECKPOINT, Place.COMPILATION, Place.IMPORT, Place.PREPARATION, Place.DEBUGGER, Place.NETWORK}
    ),
    Place.NETWORK: frozenset({Place.DEBUGGER}),
}  # fmt: skip
"""A place that is a means, and the callers that are its end: a lock below a data loader is a data loader."""

_OUTERMOST = 4
_AT_END = frozenset({"_run_exitfuncs", "_exit_function", "_shutdown", "_python_exit"})
_FILES_AT_END = late_regex(r"(^|/)(atexit|util|threading|thread)(\.py)?$")
"""Frames of Python below which only exit handlers are: multiprocessing/util.py, concurrent/futures/thread.py."""

_DEVICE_ERRANDS = WAITS_FOR_PEERS | {Place.COMPILATION, Place.CHECKPOINT}

_TELLING_NATIVE = frozenset(
    {
        Place.CRASH,
        Place.COLLECTIVE,
        Place.RENDEZVOUS,
        Place.TEARDOWN,
        Place.DEVICE,
        Place.COLLECTING,
        Place.GIL,
        Place.SUBPROCESS,
    }
)
"""What a native frame says even below a wait of its own: NCCL sleeps while it waits for its peers."""

_AT_REST = frozenset({Place.LOCK, Place.QUEUE, Place.SLEEP})
_UNRESOLVED = late_regex(r"|\?+|0x[0-9a-fA-F]+|[<\[]?unknown[>\]]?|no symbol.*", re.IGNORECASE)
_THREAD_QUEUE = late_regex(r"(^|/)queue\.py$")
_GONE = late_regex(
    r"no such process|\bESRCH\b|os error 3\b|is dead \(a zombie\)|no process (with|found)"
    r"|process (not found|(\d+ )?(has (ended|exited)|is (gone|not running)|does not exist))"
    r"|(find|locate) process|check that the process is running",
    re.IGNORECASE,
)
"""py-spy, gdb, pystack, the kernel and our own words for it."""
_HOSTS_OF_LOOPS = late_regex(r"(^|/)(ray|ipykernel\w*|traitlets|tornado|zmq|grpc|socketserver)(/|\.py|$)|runpy")
"""Packages whose own main thread runs a loop, while another thread trains."""

_SAYS_LITTLE = frozenset({Place.OTHER, Place.BACKWARD, Place.LOCK, Place.QUEUE})
"""Places of Python frames that native frames may correct."""


class RankPlace(Struct):
    """Where one rank's main thread stands in one dump."""

    node: str
    rank: int
    pid: int
    place: Place
    frames: tuple[Frame, ...] = ()  # From the innermost frame outside the interpreter's own library, outwards.
    error: str | None = None
    key: tuple[str, int, int] = ("", 0, 0)  # (node, pid, start ticks).
    contexts: frozenset[str] = frozenset()  # `evaluation`, `startup`: what the rank is about as a whole.
    holds_gil: bool = False  # Whether this very thread held the interpreter's lock.
    gil_held_by: str | None = None
    """Another thread of the process that holds the interpreter's lock, and its innermost frame."""
    raw: tuple[Frame, ...] = ()  # All frames of that thread, innermost first.
    told_by: tuple[Frame, ...] = ()
    """All frames of another thread of it, where that one tells where the rank stands: autograd's."""
    doing: Place = Place.OTHER
    """What its system call tells where its frames say nothing. A word for people: no vote depends on it."""


def is_gone(error: str) -> bool:
    """Whether it is for want of a process that there is no stack: nothing failed then."""
    return bool(_GONE.search(error))


def place_of(function: str, file: str) -> Place:
    """Which known place one frame means. From Python 3.11 on py-spy prints `Class.method`: the last name counts."""
    return _row_of(function, file, frame_table()) or Place.OTHER


@lru_cache(maxsize=8192)
def _row_of(function: str, file: str, table: FrameTable) -> Place | None:
    """The place of the first row that fits, OTHER of a library that calls the program; None if no row does."""
    function, file = function.rpartition(".")[2], _thawed(file)
    for place, function_pattern, file_pattern in table.frames:
        if re.fullmatch(function_pattern, function) and re.fullmatch(file_pattern, file):
            return place
    return None


def is_known_by_name_alone(place: RankPlace) -> bool:
    """Whether it is the name that the program gave a function which tells where a rank stands, and no library's file:
    a function `write` may as well write into memory."""
    telling = next((f for f in place.frames if place_of(f.function, f.file) is place.place), None)
    return telling is not None and _by_name_alone(telling.function, telling.file, frame_table())


@lru_cache(maxsize=8192)
def _by_name_alone(function: str, file: str, table: FrameTable) -> bool:
    name, file = function.rpartition(".")[2], _thawed(file)
    fits = (row for row in table.frames if re.fullmatch(row[1], name) and re.fullmatch(row[2], file))
    pattern = next((row[2] for row in fits), "")
    return pattern == ".*" or pattern.startswith("(?!")


def _thawed(file: str) -> str:
    """The path of a module of the interpreter that is built into it: `<frozen genericpath>` is genericpath.py."""
    return f"{file[8:-1].replace('.', '/')}.py" if file.startswith("<frozen ") else file


def native_place_of(function: str) -> Place:
    """Which known place a frame of compiled code means."""
    return _native_place_of(function, frame_table())


@lru_cache(maxsize=8192)
def _native_place_of(function: str, table: FrameTable) -> Place:
    name = re.sub(r"@.*|\(.*", "", function)
    return next((place for place, pattern in table.native if re.fullmatch(pattern, name)), Place.OTHER)


@lru_cache(maxsize=4096)
def is_waiting_room(file: str) -> bool:
    """Whether a file is one of the interpreter's own in which a thread waits on behalf of its caller."""
    return bool(re.fullmatch(WAITING_ROOMS, file) or re.fullmatch(SHORTENED_WAITING_ROOMS, file))


@lru_cache(maxsize=4096)
def is_native(file: str) -> bool:
    """Whether a frame of that file is compiled code: a shared library, a source of C, the interpreter itself."""
    return bool(
        re.search(r"\.(so|c|cc|cpp|cxx|cu|cuh|h|hpp|rs|S|dylib)\b(?!\.py)", file)
        or re.fullmatch(r"\?+|(.*/)?python[\d.]*|\[?vdso\]?|\[.*\]", file)
    )


@lru_cache(maxsize=8192)
def normal_file(file: str) -> str:
    """The path without what differs between machines and runs: environments, notebooks, generated code."""
    file = re.sub(r"^.*/(site|dist)-packages/|^.*/lib(64)?/python3\.\d+t?/", "", file)
    file = re.sub(r"^.*/ipykernel_\d+/\d+\.py$|^<ipython-input-.*>$", "<notebook>", file)
    return re.sub(r"^.*/torchinductor_[^/]+/.*\.py$|^<eval_with_key>.*$", "<generated>", file)


@lru_cache(maxsize=8192)
def normal_function(function: str) -> str:
    """The name without addresses and running numbers of generated functions."""
    function = re.sub(r"0x[0-9a-fA-F]+", "0x", function)
    return re.sub(r"(?<=[a-z])_\d+(_[0-9a-f]{6,}(_[0-9a-f]+)*)?(?=$|\.)", "_N", function)


def frame_key(frame: Frame) -> str:
    """`function (file)`, the same for every rank that stands in that function."""
    return f"{normal_function(frame.function)} ({normal_file(frame.file)})"


def main_thread(stack: ProcessStack) -> ThreadStack | None:
    """The thread that runs the training loop: the one named MainThread, else the one whose id is the pid."""
    named = [thread for thread in stack.threads if thread.name == "MainThread"]
    by_id = [thread for thread in stack.threads if thread.thread_id == stack.pid]
    with_script = [thread for thread in stack.threads if begins_program(thread.frames)]
    sole = stack.threads if len(stack.threads) == 1 else ()
    main: ThreadStack | None = next(iter((*named, *by_id, *with_script[:1], *sole)), None)
    if main is None or not any(_is_idle_loop(frame.function, frame.file) for frame in main.frames[:6]):
        return main
    trains = [each for each in stack.threads if each.frames and re.match(TRAINING_THREAD, each.name)]
    if trains:
        return trains[0]
    others = [each for each in stack.threads if each is not main and each.frames and not thread_role(each)]
    if _runs_the_loop_itself(main):
        others = [each for each in others if _may_train(each)]
    known = [each for each in others if _place(each.frames)[0] is not Place.OTHER]
    return max(known or others or [main], key=lambda each: (len(each.frames), each.thread_id))


def _may_train(thread: ThreadStack) -> bool:
    """Whether it does anything, or waits for what a training waits for."""
    place = _place(thread.frames)[0]
    return place not in _AT_REST and (thread.active or place is not Place.OTHER)


def _runs_the_loop_itself(main: ThreadStack) -> bool:
    """Whether a function of the program runs the loop: `asyncio.run` of a few calls to a server within a step. A thread
    that does nothing is not what trains then."""
    outer = (frame for frame in main.frames if not is_waiting_room(frame.file) and frame.function != "<module>")
    return any(not _HOSTS_OF_LOOPS.search(frame.file) for frame in outer if not is_native(frame.file))


def thread_role(thread: ThreadStack) -> str:
    """What a thread other than the main one is known to be for; empty if it is not known."""
    return _role_of(thread.name, tuple(frame.function.rpartition(".")[2] for frame in thread.frames[-8:]))


@lru_cache(maxsize=4096)
def _role_of(name: str, functions: tuple[str, ...]) -> str:
    for role, name_pattern, function_pattern in THREADS:
        if re.fullmatch(name_pattern, name, re.IGNORECASE):
            return role
        if any(re.fullmatch(function_pattern, function) for function in functions):
            return role
    return ""


def locate(stack: ProcessStack) -> RankPlace:
    """Where a rank's main thread stands. The innermost known frame decides, lock and library frames last.

    Every look asks this of the same dumps, several times: 30 % of the time in which 128 ranks were judged.
    """
    return _locate(stack, frame_table())


@by_identity
def _locate(stack: ProcessStack, _rows_in_force: FrameTable) -> RankPlace:
    thread = main_thread(stack)
    rank = stack.rank if stack.rank is not None else -1
    key = (stack.node, stack.pid, stack.start_ticks)
    if thread is None or not thread.frames:
        error = stack.error or "no Python frames"
        return RankPlace(node=stack.node, rank=rank, pid=stack.pid, place=Place.OTHER, error=error, key=key)
    place, frames = _place(thread.frames)
    told_by: tuple[Frame, ...] = ()
    if place in (Place.BACKWARD, Place.DEVICE) and (backward := _autograd(stack, thread)) is not None:
        place, frames, told_by = backward
    if place is Place.OTHER and any(place_of(f.function, f.file) is Place.COMPILATION for f in thread.frames):
        place = Place.COMPILATION  # however deep in a library for expressions or graphs
    return RankPlace(
        node=stack.node,
        rank=rank,
        pid=stack.pid,
        place=place,
        frames=frames,
        key=key,
        contexts=contexts_of(thread.frames),
        holds_gil=thread.owns_gil,
        gil_held_by=_gil_holder(stack, thread),
        raw=thread.frames,
        told_by=told_by,
        doing=PLACES_OF_CALLS.get(stack.syscall or "", Place.OTHER) if place is Place.OTHER else place,
    )


def waits_for_own_thread(place: RankPlace) -> bool:
    """Whether it waits in a queue that only threads of its own process can fill."""
    rooms = takewhile(lambda frame: is_native(frame.file) or is_waiting_room(frame.file), place.raw)
    return place.place is Place.QUEUE and any(_THREAD_QUEUE.search(frame.file) for frame in rooms)


def contexts_of(frames: Sequence[Frame]) -> frozenset[str]:
    """What the whole stack says a rank is about: `evaluation`, `startup`."""
    return frozenset(found for frame in frames for found in _contexts_of(frame.function, frame.file))


@lru_cache(maxsize=8192)
def _contexts_of(function: str, file: str) -> tuple[str, ...]:
    name = function.rpartition(".")[2]
    return tuple(c for c, f, p in CONTEXTS if re.fullmatch(f, name) and re.fullmatch(p, file))


def _place(frames: tuple[Frame, ...]) -> tuple[Place, tuple[Frame, ...]]:
    return _place_in(frames, frame_table())


@lru_cache(maxsize=4096)
def _place_in(frames: tuple[Frame, ...], table: FrameTable) -> tuple[Place, tuple[Frame, ...]]:
    first = next((i for i, frame in enumerate(frames) if not is_native(frame.file)), len(frames))
    native, own = frames[:first], tuple(frame for frame in frames[first:] if not is_native(frame.file))
    outer = next((i for i, frame in enumerate(own) if not is_waiting_room(frame.file)), 0)
    rows = [_row_of(frame.function, frame.file, table) for frame in own[: outer + _CALLERS]]
    # Further out than a library that calls the program again is not what the program waits for in there.
    calls = next((i for i, row in enumerate(rows) if row is Place.OTHER and i > outer), len(rows))
    places = [row or Place.OTHER for row in rows[:calls]]
    place = next(_known(places[outer : outer + _INNER_FRAMES]), Place.OTHER)
    if outer > 0:
        rooms = list(_known(places[:outer]))
        # The pipes of a program that was started are read with `select`, too, and a queue waits on a lock of its own.
        means = (each for each in (Place.SUBPROCESS, Place.QUEUE) if each in rooms)
        room = next(means, next(iter(rooms), Place.OTHER))
        if place is Place.OTHER or (room in _ERRANDS and place not in _ERRANDS[room]):
            # What the caller is for is known only if it calls directly: a lock three functions further in is a lock.
            direct = places[outer] is place and place is not Place.OTHER
            place = place if direct or room is Place.OTHER else room
    if place in _ERRANDS:
        place = next((each for each in places[outer:] if each in _ERRANDS[place]), place)
    if (place in _ERRANDS or place is Place.DATALOADER) and any(map(_ends_program, own[-_OUTERMOST:])):
        place = Place.TEARDOWN
    if place is Place.DEVICE:
        caller = next((p for p in _known(places[outer : outer + _OF_A_CALL]) if p is not Place.DEVICE), place)
        place = caller if caller in _DEVICE_ERRANDS else place
    if place in _SAYS_LITTLE and native:
        place = _native(native, place)
    return place, own[outer:] or tuple(f for f in native if is_resolved(f)) or native


def is_resolved(frame: Frame) -> bool:
    """Whether a frame has a name, and not only an address."""
    return not _UNRESOLVED.fullmatch(frame.function.strip())


def _ends_program(frame: Frame) -> bool:
    return frame.function.rpartition(".")[2] in _AT_END and bool(_FILES_AT_END.search(frame.file))


def _known(places: Sequence[Place]) -> Iterator[Place]:
    return (place for place in places if place is not Place.OTHER)


def _native(frames: Sequence[Frame], otherwise: Place) -> Place:
    places = [_kernel_place(frame) or native_place_of(frame.function) for frame in frames]
    telling = next((place for place in places if place in _TELLING_NATIVE), None)
    if telling is not None:
        return telling
    return next(_known(places), otherwise) if otherwise is Place.OTHER else otherwise


def is_of_kernel(frames: Sequence[Frame]) -> bool:
    """Whether a stack is one of /proc/PID/stack: functions of the kernel, and no others."""
    return bool(frames) and all(re.fullmatch(r"\[\w+\]", frame.file) for frame in frames)


@lru_cache(maxsize=8192)
def _kernel_place(frame: Frame) -> Place | None:
    """What a task waits for in the kernel: a filesystem, or a GPU's driver; None of anything else."""
    if not is_of_kernel((frame,)):
        return None
    text = f"{frame.function} {frame.file}"
    word = next((name for name, pattern in TRACE_WORDS if re.search(pattern, text)), "network")
    return {"nvidia": Place.DEVICE, "amdgpu": Place.DEVICE, "network": None}.get(word, Place.FILESYSTEM)


def _autograd(stack: ProcessStack, main: ThreadStack) -> tuple[Place, tuple[Frame, ...], tuple[Frame, ...]] | None:
    """Where the thread stands that runs the backward pass for the main one, if it is in Python at all: its place, the
    frames from the first that tells of it, and all of them."""
    for thread in stack.threads:
        if thread is main or not thread.frames or thread_role(thread) not in ("", "autograd"):
            continue
        if thread.frames[-1].function in ("Thread._bootstrap", "_bootstrap"):
            continue  # a thread that Python started is not autograd's
        if not thread_role(thread) and all(is_native(frame.file) for frame in thread.frames):
            continue  # nor is every thread without a name, as eu-stack and old gdb have them
        place, frames = _place(thread.frames)
        if place is not Place.OTHER:
            return place, frames, thread.frames
    return None


@lru_cache(maxsize=8192)
def _is_idle_loop(function: str, file: str) -> bool:
    name = function.rpartition(".")[2]
    return any(re.fullmatch(f, name) and re.fullmatch(p, file) for f, p in IDLE_LOOPS)


def _gil_holder(stack: ProcessStack, main: ThreadStack) -> str | None:
    for thread in stack.threads:
        if thread.owns_gil and thread is not main and thread.frames:
            return f"thread {thread.name or thread.thread_id}, in {call_of(thread.frames[0])}"
    return None


def call_of(frame: Frame) -> str:
    """`function (file:line)`."""
    return f"{frame.function} ({frame.file}:{frame.line})" if frame.line else f"{frame.function} ({frame.file})"
