"""How fast logs are read: lines a second of one core, by the function that the agent's children run, on a
file that grows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from lab.bench.figures import Figures, say
from slurm_watchdog.agent.children.answers import FollowedFile
from slurm_watchdog.agent.children.requests import Follow, WorkerState
from slurm_watchdog.agent.logs import follow

MIN_LINES_PER_SECOND = 1e6
"""What the project promises."""
CHUNK = 1_000_000
"""Bytes that a file grows between two looks: NCCL's debug output has been seen to write 1 MB/s; an interval has 5 s."""
MEASURED = 24_000_000
WARM_UP = 2_000_000
REPEATS = 3


def megatron() -> Iterator[str]:
    """Megatron-LM: timers and a line of progress each step, a warning now and then."""
    for step in count(1):
        yield (
            f" [2026-11-21 08:{step // 60 % 60:02d}:{step % 60:02d}] iteration {step:8d}/  500000 | consumed samples: {step * 1024:12d} | "
            f"elapsed time per iteration (ms): {3000 + step % 37:.1f} | throughput per GPU (TFLOP/s/GPU): 401.5 | learning rate: 1.499E-04 | "
            f"global batch size:  1024 | lm loss: {2 + 4 / step:.6E} | loss scale: 1.0 | grad norm: 0.{step % 1000:03d} | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        )
        yield f"    forward-backward ...............................: ({2800 + step % 97}.{step % 100:02d}, {2900 + step % 89}.11)\n"
        yield f"    forward-compute ................................: ({900 + step % 31}.55, {901 + step % 29}.13)\n"
        yield f"    backward-compute ...............................: ({1700 + step % 13}.55, {1801 + step % 7}.98)\n"
        yield f"    grads-reduce-scatter ...........................: ({step % 17}.05, {step % 19}.40)\n"
        yield f"    optimizer-inner-step ...........................: ({step % 23}.05, {step % 11}.41)\n"
        if step % 50 == 0:
            yield f"[rank{step % 64}]: UserWarning: The given buffer is not writable, and PyTorch does not support it.\n"


def nccl() -> Iterator[str]:
    """NCCL_DEBUG=INFO of many ranks."""
    for number in count():
        rank, channel = number % 512, number // 512 % 32
        yield (
            f"node{rank // 8:03d}:{41000 + rank}:{42000 + rank} [{rank % 8}] NCCL INFO Channel {channel:02d}/0 : "
            f"{rank}[{rank % 8}] -> {(rank + 1) % 512}[{(rank + 1) % 8}] via P2P/CUMEM/read\n"
        )
        yield (
            f"node{rank // 8:03d}:{41000 + rank}:{42000 + rank} [{rank % 8}] NCCL INFO NET/IB : Using [0]mlx5_{rank % 8}:1/IB "
            f"[RO]; OOB ib0:10.0.{rank // 8}.{rank % 8}<{number % 65536}>\n"
        )


def progress() -> Iterator[str]:
    """Nothing but progress, a new step each line."""
    for step in count(1):
        yield f"[2026-11-21 08:00:00] iteration {step}/ 90000000 | elapsed time per iteration (ms): {step % 977}.5 | lm loss: 2.{step % 9973:04d}E+00 |\n"


def errors() -> Iterator[str]:
    """A thousand ranks that fail, each in its own words."""
    for number in count():
        rank = number % 1024
        yield f"[rank{rank}]: Traceback (most recent call last):\n"
        yield f'[rank{rank}]:   File "/workspace/train.py", line {number % 977}, in <module>\n'
        yield (
            f"[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:{number % 3000}, "
            f"remote process exited or there was a network error, NCCL version 2.21.{number % 9}\n"
        )
        yield f"[rank{rank}]: RuntimeError: CUDA error: an illegal memory access was encountered ({number})\n"


def prefixed() -> Iterator[str]:
    """`srun --label` of 1,024 ranks that print a dictionary each step, as the Hugging Face Trainer does."""
    for number in count():
        rank, step = number % 1024, number // 1024 + 1
        yield f"{rank:4d}: {{'loss': {2 + 3 / step:.4f}, 'grad_norm': 0.{number % 997:03d}, 'learning_rate': 1.5e-05, 'epoch': {step / 1000:.2f}}}\n"


def redraws() -> Iterator[str]:
    """tqdm: the same bar, drawn again and again over itself."""
    for number in count():
        done = number % 100_000
        yield f"\rEpoch 3: {done // 1000:3d}%|{'█' * (done // 10000)}{' ' * (10 - done // 10000)}| {done}/100000 [12:{done % 60:02d}<10:01, {1 + done % 7}.31it/s, loss=2.{done % 997:03d}]"


def ordinary_text() -> Iterator[str]:
    """What people print."""
    for number in count():
        yield f"2026-11-21 08:00:{number % 60:02d},{number % 1000:03d} - data.loader - DEBUG - shard {number} of 4096 opened, {number * 37 % 9999} documents, 3 workers\n"


Kind = Callable[[], Iterator[str]]
KINDS: dict[str, Kind] = {
    "megatron": megatron,
    "text": ordinary_text,
    "nccl": nccl,
    "prefixed": prefixed,
    "progress": progress,
    "errors": errors,
    "redraws": redraws,
}


@dataclass(frozen=True)
class Rate:
    """What reading one kind of log took."""

    lines: int
    bytes: int
    cpu_s: float
    skipped: int
    """Bytes that were not looked at: then the rate is not one of reading."""
    events: int


def chunks(kind: Callable[[], Iterator[str]], total: int, size: int = CHUNK) -> Iterator[tuple[bytes, int]]:
    """About `total` bytes of such a log in pieces of whole lines, each with its number of lines."""
    lines = kind()
    made = 0
    while made < total:
        piece: list[str] = []
        length = 0
        while length < size:
            more = list(islice(lines, 500))
            piece += more
            length += sum(map(len, more))
        data = "".join(piece).encode()
        made += len(data)
        yield data, len(piece)


def measure(pieces: Iterator[tuple[bytes, int]], path: Path, warm_up: int = WARM_UP) -> Rate:
    """Lets the file at `path` grow by a piece at a time and follows it, as the agent's child does; the
    growing is not timed."""
    state = WorkerState()
    lines = size = skipped = events = written = 0
    cpu_s = 0.0
    with open(path, "wb", buffering=0) as file:
        _look(path, state)
        for data, number in pieces:
            file.write(data)
            written += len(data)
            began = time.process_time()
            rows = _read_to(path, state, written)
            if written > warm_up:
                cpu_s += time.process_time() - began
                lines, size = lines + number, size + len(data)
                skipped += sum(row.skipped_bytes for row in rows)
                events += sum(len(row.events) for row in rows)
    return Rate(lines, size, cpu_s, skipped, events)


def _look(path: Path, state: WorkerState) -> FollowedFile:
    answer = follow.follow(Follow([("1", str(path), 0)], taken=state.memory(follow.FollowMemory).token), state)
    row = answer.files[0]
    if row.error:
        raise RuntimeError(f"the log can't be read: {row.error}")
    return row


def _read_to(path: Path, state: WorkerState, size: int) -> list[FollowedFile]:
    """Looks until the file is read to its end; one look may stop before it, to stay cheap."""
    rows = []
    for _ in range(1000):
        rows.append(_look(path, state))
        if rows[-1].offset == size:
            return rows
    raise RuntimeError(f"a log of {size} bytes is not read to its end in 1,000 looks, only to {rows[-1]['offset']}")


def run(figures: Figures, total: int = MEASURED) -> None:
    """Lines a second for each kind of log, the slowest of them, and megabytes a second of lines that have no end."""
    rates = {}
    with tempfile.TemporaryDirectory(prefix="slurm-watchdog-bench-") as directory:
        path = Path(directory) / "log"
        for name, kind in KINDS.items():
            pieces = list(chunks(kind, total))
            tries = [measure(iter(pieces), path, min(WARM_UP, total // 4)) for _ in range(REPEATS)]
            best = min(tries, key=lambda rate: rate.cpu_s)
            rates[name] = best.lines / best.cpu_s
            figures.add(f"logs.lines_per_second_{name}", rates[name], "1/s")
            if best.skipped:
                say(f"{name}: {best.skipped} of {best.bytes} bytes were skipped: this is not a rate of reading")
            say(f"{name}: {best.bytes / best.cpu_s / 1e6:.0f} MB/s, {best.events} events of {best.lines} lines")
        slowest = min(rates, key=lambda name: rates[name])
        figures.add("logs.lines_per_second_slowest", rates[slowest], "1/s", at_least=MIN_LINES_PER_SECOND)
        say(f"the slowest is {slowest}")
        endless = [(b"x" * (2 * CHUNK) + b"\n", 1)] * max(4, total // (2 * CHUNK))
        best = min((measure(iter(endless), path, 2 * CHUNK) for _ in range(REPEATS)), key=lambda rate: rate.cpu_s)
        figures.add("logs.megabytes_per_second_endless_lines", best.bytes / best.cpu_s / 1e6, "MB/s")
