"""Several dumps of one process put together, and an answer cut to what one report may hold. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.evidence import NodeEvidence, ProcessStack, RankEvidence, StackDump, ThreadStack
from slurm_watchdog.wire.printable import printable

MAX_NODE_BYTES = 3 << 20  # As JSON. A report may have 8 MiB (see slurm_watchdog.wire.codec), and holds more than this.
FEW_THREADS = 8
FEW_FRAMES = 40


def join_dumps(dumps: Sequence[tuple[float, ProcessStack | None]]) -> tuple[StackDump, ...]:
    """The dumps of one process, oldest first, (seconds after the first, stack); of each but the first only
    what changed."""
    joined: list[StackDump] = []
    before: dict[int, ThreadStack] = {}
    for after_s, stack in dumps:
        if stack is None:
            joined.append(StackDump(after_s=after_s, error="it was not dumped"))
            continue
        same = tuple(t.thread_id for t in stack.threads if before.get(t.thread_id) == t)
        joined.append(
            picked(
                StackDump,
                stack,
                *("error", "state", "cpu_s", "main_cpu_s"),
                after_s=after_s,
                threads=tuple(t for t in stack.threads if before.get(t.thread_id) != t),
                unchanged=same,
            )
        )
        if stack.threads:
            before = {thread.thread_id: thread for thread in stack.threads}
    return tuple(joined)


def bounded(evidence: NodeEvidence, limit: int = MAX_NODE_BYTES) -> NodeEvidence:
    """`evidence` in at most `limit` bytes of JSON, as far as leaving things out can do it; what went is said
    in `problems`. Names of files that are no UTF-8 have their odd bytes replaced."""
    steps: tuple[tuple[str, Callable[[NodeEvidence], NodeEvidence]], ...] = (
        ("Flight Recorder dumps stay on the node", _without_contents),
        ("and what they say is left out", _without_records),
        ("only the first threads of each process were kept", _with_few_threads),
        ("environment, sockets and the lines of logs were left out", _without_details),
        (
            "only stacks of ranks were kept",
            lambda e: replace(e, ranks=tuple(r for r in e.ranks if r.role == "rank")),
        ),
    )
    try:
        size = len(msgspec.json.encode(evidence))
    except UnicodeEncodeError:
        evidence = printable(evidence)
        size = len(msgspec.json.encode(evidence))
    for what, step in steps:
        if size <= limit:
            break
        evidence = replace(step(evidence), problems=(*evidence.problems, f"too much for one report: {what}"))
        size = len(msgspec.json.encode(evidence))
    return evidence


def _without_contents(evidence: NodeEvidence) -> NodeEvidence:
    return replace(evidence, files=tuple(replace(each, content=None) for each in evidence.files))


def _without_records(evidence: NodeEvidence) -> NodeEvidence:
    return replace(evidence, files=tuple(replace(each, record=None) for each in evidence.files))


def _with_few_threads(evidence: NodeEvidence) -> NodeEvidence:
    return replace(evidence, ranks=tuple(replace(each, dumps=_few(each)) for each in evidence.ranks))


def _few(rank: RankEvidence) -> tuple[StackDump, ...]:
    def order(thread: ThreadStack) -> bool:
        return thread.name != "MainThread" and thread.thread_id != rank.pid

    return tuple(
        replace(
            dump,
            threads=tuple(
                replace(t, frames=t.frames[:FEW_FRAMES]) for t in sorted(dump.threads, key=order)[:FEW_THREADS]
            ),
        )
        for dump in rank.dumps
    )


def _without_details(evidence: NodeEvidence) -> NodeEvidence:
    ranks = tuple(replace(each, environment=(), sockets=(), status=()) for each in evidence.ranks)
    return replace(evidence, ranks=ranks, log_lines=(), kernel_lines=())
