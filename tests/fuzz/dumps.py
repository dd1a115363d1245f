"""`python -m tests.fuzz.dumps [number]`: spoilt dumps of the Flight Recorder, spoilt answers of NCCL's RAS, and spoilt
error files of ranks, through their readers, which may refuse them with a reason and do nothing else. It ends with 1 if one did more."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_watchdog.agent.workers.resource_limits import limit_address_space
from slurm_watchdog.analysis.collective_order import order_of, words_of
from slurm_watchdog.analysis.ras_records import ras_records
from slurm_watchdog.parse.error_file import parse_error_file, parse_fatal_error
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
from slurm_watchdog.parse.nccl_ras import parse_ras

NUMBER = 100_000
LONGEST_S = 5.0
"""As a worker's CPU time for one request."""
CAPTURES = Path(__file__).parents[1] / "captures"
PIDS = {rank: 100 + rank for rank in range(8)}
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
    rng, mark = random.Random(options.seed), Path("FUZZED")
    read = 0
    for number, body in zip(range(options.number), _bodies(rng), strict=False):
        began = time.monotonic()
        try:
            if number % 3 == 2:
                parse_fatal_error(body)
                parse_error_file(body)
            elif number % 3:
                words_of(order_of([parse_flight_recorder(body, 0), parse_flight_recorder(body, 1)]))
            else:
                words_of(order_of(ras_records(parse_ras(body), PIDS)))
            read += 1
        except ValueError:
            pass
        except BaseException:
            print(f"seed {options.seed}, body {number}: {body[:200]!r}", file=sys.stderr)
            raise
        if mark.exists() or time.monotonic() - began > LONGEST_S:
            print(f"seed {options.seed}, body {number} did harm: {body[:200]!r}", file=sys.stderr)
            return 1
    print(f"{options.number} bodies, {read} of them read", file=sys.stderr)
    return 0


def _bodies(rng: random.Random) -> Iterator[bytes]:
    dumps = [path.read_bytes() for path in sorted(CAPTURES.glob("flight_recorder/*/trace_*"))]
    answers = [path.read_bytes() for path in sorted(CAPTURES.glob("ras/2*"))]
    words = [path.read_bytes() for path in sorted(CAPTURES.glob("own_words/[es]*"))]
    while True:
        yield rng.choice(SPOIL)(rng, bytearray(rng.choice(answers)), answers)
        yield rng.choice(SPOIL)(rng, bytearray(rng.choice(dumps)), dumps)
        yield rng.choice(SPOIL)(rng, bytearray(rng.choice(words)), words)


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
