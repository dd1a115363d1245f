"""Scanning blocks gives what parse_line gives line by line, and stays bounded where a log says the same a
thousand times."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.knowledge.log_signatures import HARMLESS, HARMLESS_NEEDLES, SIGNATURES
from slurm_watchdog.knowledge.progress_patterns import (
    EPOCH_KEYS,
    MAPPING_NEEDLES,
    NOT_PROGRESS,
    NOT_PROGRESS_NEEDLES,
    PATTERNS,
    SIGNS,
    SPOKEN_OF,
    SPOKEN_OF_NEEDLES,
    STEP_KEYS,
)
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log import line_scan
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.line_scan import (
    BARREN,
    IN_FULL,
    PIECE_BYTES,
    ShapeMemory,
    letters,
    needles_in_force,
    scan,
)
from slurm_watchdog.parse.training_log.text import LogFact, has_needle


def line_by_line(block: bytes) -> list[LogFact]:
    """The slow way: every line through every row."""
    lines = [line[:8192].decode("utf-8", errors="replace") for line in block.split(b"\n")]
    facts = [parse_line(line) for line in lines]
    return [replace(fact, line=at) for at, fact in enumerate(facts) if fact is not None]


REAL = [
    b" iteration       10/   15000 | consumed samples:         2560 | elapsed time per iteration (ms): "
    b"1234.5 | lm loss: nan |",
    b"[rank0]:\x1b[31mstep: 10  \x1b[32mloss:  7.5467  \x1b[33mmemory: 12.00GiB(15.1%)  tps: 1,234",
    b"\r 12%|\xe2\x96\x88\xe2\x96\x8f        | 120/1000 [00:10<01:13, 1.25s/it, loss=3.5]",
    b"Validation DataLoader 0:  20%|##        | 2/10 [00:01<00:04,  2.00it/s]",
    b'{"global_step": 120, "loss": 2.5, "step_time": 0.5}',
    b"{'loss': 2.31, 'learning_rate': 5e-05, 'epoch': 0.5, 'step': 500}",
    b"  successfully saved checkpoint at iteration   45000 to /ckpt",
    b"saving checkpoint, step 40",
    b"starting from step 40",
    b"Loading checkpoint shards: 100%|##########| 4/4 [00:10<00:00,  2.5s/it]",
    b"[rank17]:[E ProcessGroupNCCL.cpp:1182] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
    b"slurm0-a3-ghpc-8: [rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    b"17: OSError: [Errno 28] No space left on device",
    b"OSError: [Errno 28] No\tspace\x00left on device",
    b"er\x1b[0mror: CUDA er\x1b[1mror\x1b[0m: x",
    b"\x1b]0;title with step 5/10\x07",
    b"\x1b]8;;http://x\x1b\\RuntimeError\x1b]8;;\x1b\\: x",
    b"OSError: [Errno 28] No space\x1b]0;title\x07 left on device",
    b"CUDA_ERROR_ECC_UNCORRECTABLE",
    b"ConnectionError: will be retried in 5 s",
    b"consumed to\xe2\x84\xaaens: 25600",
    b"\xc4\xb0teration 5/10 \xc5\xbftep 5/10",
    b"n1:77:78 [0] NCCL INFO Channel 00/24 : 0 1 2 3",
    b"what():  std::bad_alloc",
    b"step \xd9\xa1\xd9\xa2/100",
]
CAPTURED = [
    text.partition("\t")[2].replace("\\x1b", "\x1b").encode()
    for path in sorted((Path(__file__).parents[2] / "captures/logs").glob("*.txt"))
    for text in path.read_text().splitlines()
    if "\t" in text
]
NEEDLES = sorted({needle for row in (*SIGNATURES, *SIGNS, *PATTERNS) for needle in row.needles})
PARTS = st.one_of(
    st.sampled_from([needle.encode() for needle in NEEDLES]),
    st.sampled_from([needle.upper().encode() for needle in NEEDLES]),
    st.sampled_from([line[at : at + 40] for line in [*REAL, *CAPTURED] for at in range(0, len(line), 20)]),
    st.sampled_from(
        [b" ", b"\t", b"\0", b"\x1b[0m", b"\x1b[31;1m", b"\x1b", b"\x1b]0;t\x07", b"\x1b]", b"\x07", b"\xc2\x85", b"\xff", b"\xe2\x84",
         b"\xe2\x84\xaa", b"\xc4\xb0", b"\xc5\xbf", b"\xef\xac\x86", b"12", b"5/10", b": ", b"=", b"{", b"}", b"'", b'"', b"[", b"]", b"|",
         b"[rank3]: ", b"[default7]:", b"host-1: ", b"3: ", b"loss", b"will be retried", b"\x0c", b"\r", b"\x7f"]
    ),
    st.binary(max_size=6),
    st.text(max_size=6).map(str.encode),
)  # fmt: skip
LINES = st.one_of(st.sampled_from([*REAL, *CAPTURED]), st.lists(PARTS, max_size=8).map(b"".join)).map(
    lambda line: line.replace(b"\n", b"")
)


@given(st.lists(LINES, max_size=40))
@example(REAL)
@example(CAPTURED)
@example([b"x" * 4094 + b"\x1b]0;", b"RuntimeError: CUDA error: \x1b]0;title\x07 x"])
@example([b"a" * 4090 + b"\x1b[31merror step 5/10"])
@example([b"\x1b[31mRuntimeError: CUDA error\x1b]0;title\x07"])
def test_a_block_says_what_its_lines_say_one_by_one(lines: list[bytes]) -> None:
    block = b"\n".join(lines) + b"\n"
    assert repr(scan(block).facts) == repr(line_by_line(block))  # nan is not itself


def test_lines_at_the_borders_of_pieces_are_whole() -> None:
    lines = [*REAL, *(b"step %d/100000 %s" % (at, b"x" * (at % 97)) for at in range(9 * PIECE_BYTES // 100)), *REAL]
    found = scan(b"\n".join(lines), ShapeMemory(steps_in_full=len(lines)))
    assert repr(found.facts) == repr(line_by_line(b"\n".join(lines)))


@given(LINES)
def test_the_quick_looks_before_slow_expressions_miss_nothing(line: bytes) -> None:
    text = line.decode(errors="replace")
    if not text.isascii():
        return  # a letter of another alphabet that folds to ASCII matches the expression alone: both ways, it is none
    lower = text.lower()
    assert not NOT_PROGRESS.search(text) or has_needle(NOT_PROGRESS_NEEDLES, lower)
    assert not HARMLESS.search(text) or has_needle(HARMLESS_NEEDLES, lower)
    phrases = [phrase for thing, words in SPOKEN_OF_NEEDLES.items() if thing in lower for phrase in words]
    assert not SPOKEN_OF.search(text) or has_needle(tuple(phrases), lower)


@pytest.mark.parametrize("needle", [*NEEDLES, *MAPPING_NEEDLES])
def test_every_needle_is_found_by_its_letters(needle: str) -> None:
    assert needle == needle.lower()
    assert needle.isascii()
    assert any(part in letters(needle) for part in needles_in_force().cover)
    assert all(len(part) > 1 for part in needles_in_force().cover)


def test_every_key_of_a_step_in_a_mapping_holds_a_needle() -> None:
    assert all(has_needle(MAPPING_NEEDLES, key) for key in (*STEP_KEYS, *EPOCH_KEYS))


def cascade(count: int) -> list[bytes]:
    return [
        b"[rank%d]:[E ProcessGroupNCCL.cpp:563] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=%d)"
        % (number % 384, number)
        for number in range(count)
    ]


def test_a_shape_that_is_known_is_parsed_also_where_the_memory_of_shapes_is_full() -> None:
    memory, error = ShapeMemory(), b"cudaoutofmemory"
    for piece in range(40):
        others = {f"quiet{chr(97 + piece % 26)}{chr(97 + piece // 26)}{chr(97 + n)}".encode() for n in range(26)}
        assert error in memory.telling(others | {error}, needles_in_force(), ()), piece
        assert len(memory.known) <= line_scan.MAX_SHAPES


def test_of_a_cascade_a_bounded_part_is_parsed_and_the_rest_counted() -> None:
    lines = cascade(100_000)
    lines[60_000] = b"OSError: [Errno 28] No space left on device"
    found = scan(b"\n".join(lines))
    assert found.parsed < 3_000
    assert found.left_out + len(found.facts) == 100_000
    assert "disk_full" in {fact.pattern for fact in found.facts}
    assert found.facts[0].text.encode() == lines[0]
    assert [fact.rank for fact in found.facts[:IN_FULL]] == list(range(IN_FULL))
    assert found.facts[-1].text.encode() == lines[-1]


@pytest.mark.parametrize(
    ("line", "errors"), [(b"step %d/9000 loss 0.3 error 0.01\n", 0), (b"[rank%d] CUDA out of memory\n", 9000 - 129)]
)
def test_lines_that_were_not_parsed_count_as_errors_only_where_those_of_their_shape_were(
    line: bytes, errors: int
) -> None:
    memory = ShapeMemory(steps_in_full=128, evenly=1)
    found = scan(b"".join(line % number for number in range(9000))[:-1], memory)
    assert found.left_out > 0
    assert found.errors_left_out <= errors
    assert bool(found.errors_left_out) is bool(errors)


def test_of_nothing_but_progress_the_first_the_last_and_an_even_choice_are_parsed() -> None:
    found = scan(b"".join(b"step %d/100000 | loss: %.3f |\n" % (n, 1 / (n + 1)) for n in range(100_000)))
    steps = [fact.step or 0 for fact in found.facts]
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert steps == sorted(steps)
    assert max(b - a for a, b in pairwise(steps)) <= PIECE_BYTES / 25 / (line_scan.EVENLY - 2) + 1
    assert found.parsed < 1_000


def test_an_address_in_hexadecimal_makes_no_new_shape() -> None:
    lines = [b"frame #3: c10::Error::Error() + 0x%x (0x%x in libc10.so)" % (n, n * 7919) for n in range(20_000)]
    assert scan(b"\n".join(lines)).parsed < 1_000


def test_scan_samples_shapes_known_from_an_earlier_block() -> None:
    seen, block = ShapeMemory(), b"\n".join(cascade(1000))
    first, second = scan(block, seen), scan(block, seen)
    assert first.parsed >= IN_FULL
    assert second.parsed <= line_scan.EVENLY * (len(block) // PIECE_BYTES + 1)
    assert sum(shape is not None for shape in seen.known.values()) == 1


def test_shapes_are_not_remembered_without_end() -> None:
    seen, names = ShapeMemory(), [f"{a}{b}{c}" for a in "ghij" for b in "klmnopqrst" for c in "uvwxyz"]
    for first in names[:12]:
        scan("".join(f"{first} step of {name}\n" for name in names).encode(), seen)
        assert len(seen.known) <= line_scan.MAX_SHAPES
    scan(b"step " + b"x" * 10_000, seen)
    assert max(map(len, seen.known)) <= line_scan.MAX_SHAPE_BYTES


def test_no_needle_holds_an_address_or_begins_like_the_end_of_one() -> None:
    assert not [needle for needle in NEEDLES if "0x" in needle or re.match(r"[0-9a-f]+$", needle)]


def test_a_line_of_megabytes_is_one_line() -> None:
    block = b"y" * 3_000_000 + b"\nstep 5/10\n" + b"z" * 300_000
    assert [fact.step for fact in scan(block).facts] == [5]


def test_lines_that_say_nothing_are_not_parsed() -> None:
    block = b"".join(b"n1:%d:%d [0] NCCL INFO Channel %02d/24 : 0 1 2 3\n" % (n, n * 3, n % 24) for n in range(5000))
    assert scan(block).parsed == 0


def test_rows_say_which_kind_a_fact_is() -> None:
    assert [fact.kind for fact in scan(b"step 5/10\nsaving checkpoint\nMemoryError\n").facts] == [
        EventKind.PROGRESS,
        EventKind.PHASE,
        EventKind.ERROR,
    ]


def test_a_shape_that_said_nothing_for_long_is_sampled_and_one_that_tells_is_read_in_full() -> None:
    seen = ShapeMemory(errors_in_full=5000, steps_in_full=5000, evenly=1)
    quiet = "".join(f"optimizer-inner-step ....: ({n}.05, 1.41)\n" for n in range(3 * BARREN)).encode()
    assert scan(quiet, seen).parsed <= BARREN + 1
    loud = "".join(
        f"[rank{n}]: RuntimeError: CUDA error: unspecified launch failure\n" for n in range(3 * BARREN)
    ).encode()
    assert len(scan(loud, seen).facts) == 3 * BARREN


def test_a_shape_that_begins_to_tell_after_long_is_read_again() -> None:
    seen = ShapeMemory(errors_in_full=5000, steps_in_full=5000, evenly=1)
    scan(b"note: step of ten -\n" * (2 * BARREN), seen)
    found = scan(b"note: step 7 of 900 ten -\n" + b"note: step of ten -\n", seen)
    later = scan("".join(f"note: step {n} of 900 ten -\n" for n in range(8, 100)).encode(), seen)
    assert found.parsed >= 1
    assert len(later.facts) >= 1


@given(st.lists(st.tuples(st.sampled_from(["2.5", "nan", "inf"]), st.integers(1, 12)), min_size=1, max_size=12))
@example([("nan", 9), ("2.5", 20), ("nan", 1), ("2.5", 1), ("nan", 1), ("2.5", 1), ("nan", 1), ("2.5", 30)])
def test_losses_that_are_read_one_after_the_other_have_no_better_one_between_them(runs: list[tuple[str, int]]) -> None:
    losses = [loss for loss, times in runs for _ in range(times)]
    block = "".join(f"iteration {at}/ 900 | lm loss: {loss} |\n" for at, loss in enumerate(losses)).encode()
    found = scan(block, ShapeMemory(steps_in_full=2, evenly=4))
    for one, two in pairwise(found.facts):
        if not math.isfinite(one.loss or 0.0) and not math.isfinite(two.loss or 0.0):
            assert "2.5" not in losses[one.line : two.line]
    assert found.facts[-1].line == len(losses) - 1
    assert sum(fact.stands_for for fact in found.facts) == len(losses)
