"""`python -m tests.fuzz.dumps [number]`: spoilt dumps of the Flight Recorder, answers of NCCL's RAS, error files of ranks,
small files and lines of the kernel, links as sysfs has them, lines of sacct and of node tests, through their readers, which may refuse them with a reason and do nothing else. It ends with 1 if one did more."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.child import limit_address_space
from slurm_watchdog.agent.collectors.link import links_in, parse_rate, parse_speed, with_rates
from slurm_watchdog.agent.collectors.usage import (
    parse_file_limit,
    parse_meminfo,
    parse_open_files,
    parse_threads,
)
from slurm_watchdog.agent.evidence.stacks import parse_dump
from slurm_watchdog.agent.proc.control_groups import (
    group_of,
    levels_of,
    parse_counts,
    parse_number,
    parse_pressure,
    read_group,
)
from slurm_watchdog.analysis.collective_order import order_of, words_of
from slurm_watchdog.analysis.ras_records import JobProcesses, ras_records, unreachable
from slurm_watchdog.diagnose.stacks.places import locate
from slurm_watchdog.diagnose.stacks.verdict import diagnose_dumps
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.observations import Resource, Role
from slurm_watchdog.nodetest.judge import Fault, Figure, Line, measured, parse_line
from slurm_watchdog.parse.error_file import parse_error_file, parse_fatal_error
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
from slurm_watchdog.parse.kernel_log.file import parse_record, readable
from slurm_watchdog.parse.kernel_log.line import is_interesting, parse_message
from slurm_watchdog.parse.nccl_ras import parse_ras
from slurm_watchdog.parse.stacks.py_spy_json import why_broken
from slurm_watchdog.parse.stacks.text import parse_stacks
from slurm_watchdog.slurm.accounting import FIELDS, OPTIONAL, parse_accounting, without
from tests.builders import megatron_dumps
from tests.builders.kernel_messages import read_messages
from tests.builders.links import INTERFACE, ROCE
from tests.builders.stacks import INIT, LOADER, LOCK, REDUCE, SAVE, text_of

NUMBER = 900_000
"""100,000 for each reader."""
LONGEST_S = 5.0
"""As a worker's CPU time for one request."""
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Of the trees that are written: in memory."""
CAPTURES = Path(__file__).parents[1] / "captures"
PROCESSES = JobProcesses({rank: (f"n{rank // 4}", 100 + rank) for rank in range(8)}, {"10.0.0.1": "n0"})
PY_SPY = json.dumps([
    {
        "pid": 7, "thread_id": 140_000, "thread_name": "MainThread", "os_thread_id": 7, "active": True, "owns_gil": True,
        "frames": [{"name": name, "filename": file, "short_filename": file, "line": 3, "is_entry": name == "<module>"}
                   for name, file in (("all_reduce", "torch/distributed/distributed_c10d.py"), ("<module>", "train.py"))],
    },
    {"pid": 7, "thread_id": 9, "thread_name": None, "os_thread_id": 8, "active": False, "owns_gil": False, "frames": []},
]).encode()  # fmt: skip
OPCODES = bytes(
    getattr(pickle, name)[0] for name in pickle.__all__ if name.isupper() and type(getattr(pickle, name)) is bytes
)
HARMFUL = (b"cos\nsystem\n(S'touch FUZZED'\ntR", b"c__builtin__\neval\n(V1/0\ntR", b"\x82\x01", b"P1\n", b"2" * 5000, b"r\xff\xff\xff\xff", b"b", b"\x92", b"X\x03\0\0\0\xed\xa0\x80", rb"\ud800")  # fmt: skip


def main() -> int:
    """Returns 0 if each was read, or refused with a ValueError, in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=NUMBER)
    parser.add_argument("--seed", type=int, default=0)
    names = [_name(reader) for reader, _ in READERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these readers, in turn")
    options = parser.parse_args()
    limit_address_space()
    return fuzz(options.number, options.seed, [row for row in READERS if _name(row[0]) in options.only])


def _name(reader: Callable[[bytes], None]) -> str:
    return reader.__name__.removeprefix("_read_")


def fuzz(number: int, seed: int, readers: Sequence[Row]) -> int:
    """So many bodies, in turn for each reader: 0 if each was read, or refused with a ValueError, in time."""
    rng, mark, read = random.Random(seed), Path("FUZZED"), 0
    for at in range(number):
        reader, whole = readers[at % len(readers)]
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
    records = [parse_flight_recorder(body, 0), parse_flight_recorder(body, 1)]
    msgspec.json.encode(records)
    words_of(order_of(records))


def _read_py_spy(body: bytes) -> None:
    """As the agent reads what py-spy prints, and what it sends."""
    threads = parse_dump(body)
    msgspec.json.encode(threads)
    msgspec.msgpack.encode(threads)
    locate(ProcessStack(node="n1", pid=1, start_ticks=1, job_id="7", role=Role.RANK, rank=0, threads=threads))


def _read_stacks(body: bytes) -> None:
    """As `group-stacks` reads a file, beside one that is whole."""
    text = body.decode(errors="replace")
    try:
        why_broken(text)
        dumps = parse_stacks(text, "rank-0")
        verdict = diagnose_dumps([*dumps, *WHOLE])
        kept = any(each.pid == 40001 for group in verdict.groups for each in group.members)
        assert kept or len(dumps) > 1, "the other file counts"
        msgspec.json.encode(verdict)
    except ValueError as error:
        raise AssertionError("a file of stacks is read as far as it goes") from error


def _read_answer(body: bytes) -> None:
    answer = parse_ras(body)
    msgspec.json.encode(answer)
    words_of(order_of(ras_records(answer, PROCESSES))), unreachable(answer, PROCESSES)


def _read_own_words(body: bytes) -> None:
    msgspec.json.encode(parse_fatal_error(body))
    msgspec.json.encode(parse_error_file(body))


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


def _read_accounting(body: bytes) -> None:
    """What sacct prints: nothing of it raises, and no run ends before it began."""
    text = body.decode(errors="replace")
    job_id = text.partition("|")[0] or "7"
    try:
        found = [
            run for fields in (FIELDS, without(FIELDS, *OPTIONAL)) for run in parse_accounting(text, job_id, fields)
        ]
    except ValueError as error:
        raise AssertionError("a line that makes no sense is left out") from error
    assert all(run.ended_at is None or run.began_at <= run.ended_at for run in found)
    msgspec.json.encode(found)


def _read_test_lines(body: bytes) -> None:
    """The output of a job that tests a node: a line is one of ours, or none."""
    try:
        lines = [parse_line(text) for text in body.decode(errors="replace").split("\n")]
        measured("n1", [each for each in lines if each is not None])
    except ValueError as error:
        raise AssertionError("a line that makes no sense is left out") from error


def _read_links(body: bytes) -> None:
    """A tree like /sys/class whose files hold parts of the body: nothing of it raises, and no rate is impossible."""
    with tempfile.TemporaryDirectory(dir=PLACE) as name:
        parts = iter(body.split(b"\0"))
        for place, files in (("infiniband/a/ports/1", ROCE), ("net/e", INTERFACE)):
            for file in files:
                path = Path(name, place, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(next(parts, b""))
        try:
            found = links_in(name)
        except ValueError as error:
            raise AssertionError("a file that makes no sense is left out") from error
    for each in found:
        assert each.link.rate_bits_s is None or 0 < each.link.rate_bits_s < 10**18
        with_rates(each, replace(each, at=each.at - 1.0))
    msgspec.json.encode(found)


def _of(pattern: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(CAPTURES.glob(pattern)) if path.name != "README"]
    assert found, pattern
    return found


ACTIVE = [
    each.dump(only_active=True, as_json=as_json)
    for each in megatron_dumps.recorders(megatron_dumps.job(stopped=(9, 11)), blind=(12,))[8:13]
    for as_json in (False, True)
]
"""Without what has finished."""
WHOLE = parse_stacks(text_of(1, REDUCE), "rank-1")
Row = tuple[Callable[[bytes], None], list[bytes]]
READERS: tuple[Row, ...] = (
    (_read_answer, _of("ras/2*")),
    (_read_dump, [*_of("flight_recorder/*/trace_*"), *ACTIVE]),
    (_read_py_spy, [PY_SPY, PY_SPY.replace(b" ", b""), b"[" * 5000 + PY_SPY]),
    (
        _read_stacks,
        [PY_SPY, b"[" * 5000, *_of("stacks/*.json"), *(text_of(0, each).encode() for each in (LOADER, LOCK, INIT, SAVE))],
    ),
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
    (
        _read_accounting,
        [
            *_of("slurm/22.05/accounting.txt"),
            b"7|NODE_FAIL|1:0|1700000000|1700003600|4|n[1-4]|ann|vision|gpu|Dependency|0:9|n3|gpt\n"
            b"7|RUNNING|0:0|1700010000|Unknown|4|n[1-4]|ann|vision|gpu|None|0:0||gpt\n",
            b"7+0|COMPLETED|0:0|1700000000|1700003600|4|n[1-4]|ann|vision|gpu|gpt\n"
            b"7+1|FAILED|3:0|1700000001|1700003000|2|n[5-6]|ann|vision|gpu|gpt\n",
        ],
    ),
    (
        _read_test_lines,
        [
            msgspec.json.encode(line)
            for line in (
                Line(node="n1", part="cpu", state="begun"),
                Line(node="n1", part="cpu", state="ok", figures=(Figure(name="cpu", value=3.5e9, spread=0.01),)),
                Line(node="n1", part="mount", state="failed", about="/s", said="no space"),
                Line(node="n1", part="gpu", state="ok", faults=(Fault(what="GPU 3 is slow", place="GPU-a"),)),
            )
        ],
    ),
    (_read_links, [b"\0".join(text.encode() for text in (*ROCE.values(), *INTERFACE.values()))]),
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
