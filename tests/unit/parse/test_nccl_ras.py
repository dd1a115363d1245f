"""Answers of NCCL's RAS, text and JSON, and the rank that they show behind the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.analysis.collective_order import order_of, words_of
from slurm_watchdog.analysis.ras_records import ras_records, unreachable
from slurm_watchdog.model.collective_records import RasAnswer, RasCommunicator, RasRank
from slurm_watchdog.parse.nccl_ras import MAX_BYTES, parse_ras

CAPTURES = Path(__file__).parents[2] / "captures" / "ras"
PIDS = {rank: 100 + rank for rank in range(8)}


def read(name: str) -> RasAnswer:
    return parse_ras((CAPTURES / name).read_bytes())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2.24.txt", "Rank 5 has not entered collective 6650 of communicator 27a079b8 of 8; 7 of 8 ranks wait."),
        (
            "2.26.txt",
            "Rank 5 called broadcast where the others called all_reduce as number 6653 of communicator 27a079b8 of 8; "
            "8 of 8 ranks wait.",
        ),
        (
            "2.26-two.txt",
            "Rank 4 has not entered all_reduce 1 of communicator 27a079b8 of 8, and so 1 more; 6 of 8 ranks wait.",
        ),
        ("2.24-missing.txt", "Rank 1 has not entered collective 12 of communicator 27a079b8 of 8; 6 of 7 ranks wait."),
        ("2.28.json", "Rank 5 has not entered all_reduce 64 of communicator ae94423c of 8; 7 of 8 ranks wait."),
    ],
)
def test_an_answer_names_the_rank_that_has_called_less_or_something_else(name: str, words: str) -> None:
    assert words_of(order_of(ras_records(read(name), PIDS))) == words


@pytest.mark.parametrize("name", ["2.24-missing.txt", "2.28-missing.json", "2.29-missing.json"])
def test_a_rank_whose_process_does_not_answer_is_unreachable_and_accused_of_nothing(name: str) -> None:
    answer = read(name)
    assert unreachable(answer, PIDS) == (5,)
    assert 5 not in {record.rank for record in ras_records(answer, PIDS)}


def test_the_release_is_the_one_that_answered() -> None:
    assert [read(name).release for name in ("2.24.txt", "2.28.json")] == ["2.24.3+cuda12.4", "2.28.9+cuda12.8"]


def test_ranks_of_a_part_of_the_job_are_known_by_their_pids_and_a_pid_that_two_have_tells_nothing() -> None:
    pair = RasCommunicator(
        key="ab", size=2,
        ranks=tuple(RasRank(rank=n, pid=106 + n, counts=(("AllGather", 9 - n),)) for n in range(2)),
    )  # fmt: skip
    answer = RasAnswer(release="2.28.9", communicators=(pair,))
    assert [each.rank for each in order_of(ras_records(answer, PIDS)).odd] == []  # one of two: no majority
    assert [each.rank for each in ras_records(answer, PIDS)] == [6, 7]
    assert [each.rank for each in ras_records(answer, PIDS | {0: 107})] == [6]


def test_a_communicator_of_which_no_pid_is_known_is_nobodys() -> None:
    for pid in (None, 7):
        ranks = tuple(RasRank(rank=n, pid=pid, counts=(("AllReduce", 60 if n == 0 else 61),)) for n in range(8))
        answer = RasAnswer(release="2.28.9", communicators=(RasCommunicator(key="ab", size=8, ranks=ranks),))
        assert ras_records(answer, PIDS) == ()


def test_a_communicator_of_the_jobs_size_with_other_numbers_is_known_by_pids() -> None:
    turned = RasCommunicator(
        key="ab", size=8,
        ranks=tuple(RasRank(rank=n, pid=107 - n, counts=(("AllReduce", 60 if n == 0 else 61),)) for n in range(8)),
    )  # fmt: skip
    found = order_of(ras_records(RasAnswer(release="2.28.9", communicators=(turned,)), PIDS))
    assert [each.rank for each in found.odd] == [7]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"HTTP/1.1 400 Bad Request\r\n", b"{}", b"[" * 100_000, b"{" * 100_000, b'{"nccl_version": 7}', b"\xff" * 1000,
        b'{"nccl_version":"2","communicators":[{"hash":"0x1","size":-1}]}', b"x" * (MAX_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"answer"):
        parse_ras(body)
