"""Answers of NCCL's RAS, text and JSON, and the rank that they show behind the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_watchdog.analysis.collective_order import order_of, words_of
from slurm_watchdog.analysis.ras_records import JobProcesses, ras_facts, ras_records, unreachable
from slurm_watchdog.model.collective_records import RasAnswer, RasCommunicator, RasRank
from slurm_watchdog.parse.nccl_ras import MAX_BYTES, parse_ras

CAPTURES = Path(__file__).parents[2] / "captures" / "ras"
PIDS = {rank: 100 + rank for rank in range(8)}
NODES = {"10.0.0.1": "n1", "10.0.0.2": "n2"}


def processes(pids: Mapping[int, int] = PIDS, nodes: Mapping[str, str] | None = None) -> JobProcesses:
    """Four ranks on each of two nodes, whose addresses nobody knows."""
    return JobProcesses({rank: (f"n{1 + rank // 4}", pid) for rank, pid in pids.items()}, nodes or {})


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
            "Ranks 4 and 5 have not entered all_reduce 1 of communicator 27a079b8 of 8; 6 of 8 ranks wait.",
        ),
        ("2.24-missing.txt", "Rank 1 has not entered collective 12 of communicator 27a079b8 of 8; 6 of 7 ranks wait."),
        ("2.28.json", "Rank 5 has not entered all_reduce 64 of communicator ae94423c of 8; 7 of 8 ranks wait."),
    ],
)
def test_an_answer_names_the_rank_that_has_called_less_or_something_else(name: str, words: str) -> None:
    assert words_of(order_of(ras_records(read(name), processes()))) == words


@pytest.mark.parametrize("name", ["2.24-missing.txt", "2.28-missing.json", "2.29-missing.json"])
def test_a_rank_whose_process_does_not_answer_is_unreachable_and_accused_of_nothing(name: str) -> None:
    answer = read(name)
    assert unreachable(answer, processes()) == (5,)
    assert 5 not in {record.rank for record in ras_records(answer, processes())}


def test_the_release_is_the_one_that_answered() -> None:
    assert [read(name).release for name in ("2.24.txt", "2.28.json")] == ["2.24.3+cuda12.4", "2.28.9+cuda12.8"]


def test_ranks_of_a_part_of_the_job_are_known_by_their_pids_and_a_pid_that_two_have_tells_nothing() -> None:
    pair = RasCommunicator(
        key="ab", size=2,
        ranks=tuple(RasRank(rank=n, pid=106 + n, counts=(("AllGather", 9 - n),)) for n in range(2)),
    )  # fmt: skip
    answer = RasAnswer(release="2.28.9", communicators=(pair,))
    assert [each.rank for each in order_of(ras_records(answer, processes())).odd] == []  # one of two: no majority
    assert [each.rank for each in ras_records(answer, processes())] == [6, 7]
    assert [each.rank for each in ras_records(answer, processes(PIDS | {0: 107}))] == [6]


def test_a_communicator_of_which_no_pid_is_known_is_nobodys() -> None:
    for pid in (None, 7):
        ranks = tuple(RasRank(rank=n, pid=pid, counts=(("AllReduce", 60 if n == 0 else 61),)) for n in range(8))
        answer = RasAnswer(release="2.28.9", communicators=(RasCommunicator(key="ab", size=8, ranks=ranks),))
        assert ras_records(answer, processes()) == ()


def test_a_communicator_of_the_jobs_size_with_other_numbers_is_known_by_pids() -> None:
    turned = RasCommunicator(
        key="ab", size=8,
        ranks=tuple(RasRank(rank=n, pid=107 - n, counts=(("AllReduce", 60 if n == 0 else 61),)) for n in range(8)),
    )  # fmt: skip
    found = order_of(ras_records(RasAnswer(release="2.28.9", communicators=(turned,)), processes()))
    assert [each.rank for each in found.odd] == [7]


def test_ranks_in_containers_which_have_the_same_pids_on_both_nodes_are_known_by_their_hosts() -> None:
    """Node n2's communicator alone: ranks 4 to 7 of the job are 0 to 3 there, and its pids are n1's, too."""
    inside = processes({rank: 100 + rank % 4 for rank in range(8)}, NODES)
    four = RasCommunicator(
        key="ab", size=4,
        ranks=tuple(RasRank(rank=n, host="10.0.0.2", pid=100 + n, counts=(("AllReduce", 61 - (n == 2)),)) for n in range(4)),
    )  # fmt: skip
    answer = RasAnswer(release="2.28.9", communicators=(four,))
    assert [each.rank for each in order_of(ras_records(answer, inside)).odd] == [6]
    assert ras_records(answer, processes({rank: 100 + rank % 4 for rank in range(8)})) == ()


def test_all_ranks_with_numbers_of_their_own_and_the_same_pids_are_known_by_their_hosts() -> None:
    body = (CAPTURES / "2.28.json").read_bytes()
    for rank in range(4, 8):
        body = body.replace(b'"pid": %d,' % (100 + rank), b'"pid": %d,' % (96 + rank))
    swapped = {"10.0.0.1": "n2", "10.0.0.2": "n1"}  # the communicator begins on the job's second node
    found = order_of(ras_records(parse_ras(body), processes({rank: 100 + rank % 4 for rank in range(8)}, swapped)))
    assert [each.rank for each in found.odd] == [1]


def test_a_pid_on_a_host_that_is_none_of_the_known_ones_is_nobodys() -> None:
    """Of every node the addresses are known, and this is another: a process that has our rank's pid by chance."""
    pair = RasCommunicator(
        key="ab", size=2,
        ranks=tuple(RasRank(rank=n, host="10.0.0.3", pid=106 + n, counts=(("AllReduce", 9),)) for n in range(2)),
    )  # fmt: skip
    assert ras_records(RasAnswer(release="2.28.9", communicators=(pair,)), processes(nodes=NODES)) == ()


def test_a_process_that_is_several_ranks_of_a_communicator_is_none_of_them() -> None:
    ranks = tuple(RasRank(rank=n, host="10.0.0.1", pid=100, counts=(("AllReduce", 9 - n),)) for n in range(2))
    answer = RasAnswer(release="2.28.9", communicators=(RasCommunicator(key="ab", size=2, ranks=ranks),))
    assert ras_records(answer, processes(nodes=NODES)) == ()


def test_a_process_that_does_not_answer_is_known_also_where_no_rank_of_the_job_has_its_number() -> None:
    text = (CAPTURES / "2.24-missing.txt").read_text()
    alone = text[: text.index("#0-0")]
    assert parse_ras(alone.encode()).silent == (("10.0.0.2", 105),)
    assert unreachable(parse_ras(alone.encode()), processes(nodes=NODES)) == (5,)
    dead = alone.replace("INCOMPLETE\n  Missing communicator data from 1 job", "DEAD\n  1 job")
    assert unreachable(parse_ras(dead.encode()), processes()) == (5,)


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


WHERE = "GPU {gpu} managed by process {pid} on node 10.0.0.{node}"


def with_status(ranks: tuple[int, ...]) -> RasAnswer:
    """As text, where these have left the communicator of all, and rank 1 of the others has called less."""
    places = {rank: WHERE.format(gpu=rank % 4, pid=100 + rank, node=1 + rank // 4) for rank in ranks}
    one = [f"  Rank {rank} has status NOCOMM -- {place}" for rank, place in places.items()]
    several = [f"  {len(ranks)} ranks have status NOCOMM", *(f"  Rank {rank} -- {p}" for rank, p in places.items())]
    status = [f"  {8 - len(ranks)} ranks have status RUNNING", *(one if len(ranks) == 1 else several)]
    head = "  Communicator ranks have different {} operation counts"
    text = (CAPTURES / "2.26.txt").read_text().partition(head.format("Broadcast"))[0] + "\n".join(
        ["  Communicator ranks have different status", *status, head.format("AllReduce"),
         f"  {7 - len(ranks)} ranks have launched up to operation 12",
         f"  Rank 1 has launched up to operation 11 -- {WHERE.format(gpu=1, pid=101, node=1)}", ""]
    )  # fmt: skip
    return parse_ras(text.encode())


@pytest.mark.parametrize(
    ("ranks", "left"),
    [
        ((5,), "rank 5 has left communicator 27a079b8 of 8, or not come to it, and answers"),
        ((5, 6), "ranks 5 and 6 have left communicator 27a079b8 of 8, or not come to it, and answer"),
    ],
)
def test_ranks_that_left_a_communicator_and_answer_are_said_and_accused_of_nothing(
    ranks: tuple[int, ...], left: str
) -> None:
    answer = with_status(ranks)
    assert ras_facts(answer, processes(nodes=NODES)) == (left,)
    assert [each.rank for each in order_of(ras_records(answer, processes())).odd] == [1], "of those that are in it"
    body = (CAPTURES / "2.29-missing.json").read_bytes()
    gone = ras_facts(parse_ras(body), processes())
    assert gone == ("rank 5 does not answer it: stopped, or gone",)
    answering = body.replace(b'"unresponsive": true', b'"unresponsive": false')
    (said,) = ras_facts(parse_ras(answering), processes())
    assert said == "rank 5 has left communicator ae94423c of 8, or not come to it, and answers"


def test_a_communicator_that_most_have_left_is_one_that_ends() -> None:
    assert ras_facts(with_status((0, 2, 3, 4, 5)), processes()) == ()
