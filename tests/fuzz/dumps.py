"""`python -m tests.fuzz.dumps [number]`: spoilt dumps of the Flight Recorder, answers of NCCL's RAS, error files of ranks,
small files and lines of the kernel, through their readers, which may refuse them with a reason and do nothing else. It ends with 1 if one did more."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurm_watchdog.agent.collectors.usage import (
    parse_file_limit,
    parse_meminfo,
    parse_open_files,
    parse_threads,
)
from slurm_watchdog.agent.files.links import parse_rate, parse_speed
from slurm_watchdog.agent.proc.control_groups import (
    group_of,
    levels_of,
    parse_counts,
    parse_number,
    parse_pressure,
    read_group,
)
from slurm_watchdog.agent.workers.resource_limits import limit_address_space
from slurm_watchdog.analysis.collective_order import order_of, words_of
from slurm_watchdog.analysis.ras_records import JobProcesses, ras_records, unreachable
from slurm_watchdog.model.usage import Resource
from slurm_watchdog.parse.error_file import parse_error_file, parse_fatal_error
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
from slurm_watchdog.parse.kernel_log.file import read_messages
from slurm_watchdog.parse.kernel_log.line import is_interesting, parse_message
from slurm_watchdog.parse.kernel_log.prefix import parse_record, readable
from slurm_watchdog.parse.nccl_ras import parse_ras

NUMBER = 500_000
"""100,000 for each reader."""
LONGEST_S = 5.0
"""As a worker's CPU time for one request."""
CAPTURES = Path(__file__).parents[1] / "captures"
PROCESSES = JobProcesses({rank: (f"n{rank // 4}", 100 + rank) for rank in range(8)}, {"10.0.0.1": "n0"})
OPCODES = bytes(
    getattr(pickle, name)[0] for name in pickle.__all__ if name.isupper() and type(getattr(pickle, name)) is bytes
)
HARMFUL = (b"cos\nsystem\n(S'touch FUZZED'\ntR", b"c__builtin__\neval\n(V1/0\ntR", b"\x82\x01", b"P1\n", b"2" * 3000, b"r\xff\xff\xff\xff", b"b", b"\x92")  # fmt: skip


def main() -> int:
    """Returns 0 if each was read, or refused with a ValueError, in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=NUMBER)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limit_address_space()
    return fuzz(options.number, options.seed)


def fuzz(number: int, seed: int) -> int:
    """So many bodies, in turn for each reader: 0 if each was read, or refused with a ValueError, in time."""
    rng, mark, read = random.Random(seed), Path("FUZZED"), 0
    for at in range(number):
        reader, whole = READERS[at % len(READERS)]
        body = rng.choice(SPOIL)(rng, bytearray(rng.choice(whole)), whole)
        began = time.monotonic()
        try:
            reader(body)
            read += 1
        except ValueError:
            pass
        except BaseException:
            print(f"seed {seed}, body {at}: {body[:200]!r}", file=sys.stderr)
            raise
        if mark.exists() or time.monotonic() - began > LONGEST_S:
            print(f"seed {seed}, body {at} did harm: {body[:200]!r}", file=sys.stderr)
            return 1
    print(f"{number} bodies, {read} of them read", file=sys.stderr)
    return 0


def _read_dump(body: bytes) -> None:
    words_of(order_of([parse_flight_recorder(body, 0), parse_flight_recorder(body, 1)]))


def _read_answer(body: bytes) -> None:
    answer = parse_ras(body)
    words_of(order_of(ras_records(answer, PROCESSES))), unreachable(answer, PROCESSES)


def _read_own_words(body: bytes) -> None:
    parse_fatal_error(body)
    parse_error_file(body)


def _read_usage(body: bytes) -> None:
    """Every small file of the kernel through every reader of one: whichever it is, none of them raises."""
    for resource in ("cpu", "memory", "io"):
        parse_pressure(body, resource)
    for name in ("memory", "pids"):
        levels_of((group_of(body.decode(errors="replace"), name) or ("", False))[0])
    parse_threads(body, [parse_number(body), parse_open_files(body) and 5])
    read_group("", Resource.MEMORY, True, lambda path: body)
    parse_counts(body), parse_meminfo(body), parse_file_limit(body)
    parse_rate(body), parse_speed(body)


def _read_kernel_lines(body: bytes) -> None:
    """As records of /dev/kmsg, and as a file of them that somebody saved."""
    for line in body.split(b"\n"):
        record = parse_record(line)
        message = line if record is None else record.message
        if is_interesting(message):
            parse_message(readable(message))
    list(read_messages(body.decode(errors="replace").split("\n")))


def _of(pattern: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(CAPTURES.glob(pattern)) if path.name != "README"]
    assert found, pattern
    return found


READERS: tuple[tuple[Callable[[bytes], None], list[bytes]], ...] = (
    (_read_answer, _of("ras/2*")),
    (_read_dump, _of("flight_recorder/*/trace_*")),
    (_read_own_words, _of("own_words/*")),
    (
        _read_usage,
        [
            b"some avg10=0.31 avg60=1.25 avg300=0.40 total=12345\nfull avg10=0.00 avg60=0.50 avg300=0.10 total=99\n",
            b"anon 4096\nactive_file 8192\ninactive_file 4096\nslab_reclaimable 512\noom_kill 1\nmax 3\n",
            b"MemTotal:       131072000 kB\nMemFree:  1024 kB\nMemAvailable:   65536000 kB\n",
            b"Limit                     Soft Limit           Hard Limit           Units\n"
            b"Max open files            1024                 524288               files\n",
            b"4:memory:/slurm/uid_1000/job_42/step_0/task_0\n0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n",
            b"9223372036854771712\n", b"0.83 1.10 1.39 2/204 31337\n", b"1504\t0\t9223372036854775807\n",
            b"400 Gb/sec (4X NDR)\n", b"100000\n",
        ],
    ),
    (_read_kernel_lines, [b"3,7,99,-;" + line for body in _of("kernel/*.txt") for line in body.splitlines() if line]),
)  # fmt: skip
"""What reads, and what its bodies are made of."""


def _flipped(rng: random.Random, body: bytearray, dumps: list[bytes]) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 10))):
        body[rng.randrange(len(body))] = rng.choice(OPCODES) if rng.random() < 0.5 else rng.randrange(256)
    return bytes(body)


def _cut(rng: random.Random, body: bytearray, dumps: list[bytes]) -> bytes:
    return bytes(body[: rng.randrange(len(body))])


def _harmed(rng: random.Random, body: bytearray, dumps: list[bytes]) -> bytes:
    at = rng.randrange(len(body))
    return bytes(body[:at]) + rng.choice(HARMFUL) + bytes(body[at + rng.choice((0, 0, 7)) :])


def _spliced(rng: random.Random, body: bytearray, dumps: list[bytes]) -> bytes:
    other = rng.choice(dumps)
    return bytes(body[: rng.randrange(len(body))]) + other[rng.randrange(len(other)) :]


SPOIL: tuple[Callable[[random.Random, bytearray, list[bytes]], bytes], ...] = (
    _flipped,
    _flipped,
    _cut,
    _harmed,
    _spliced,
)

if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    sys.exit(main())
