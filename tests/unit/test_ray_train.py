"""Which process is which rank, in the words of Ray Train (recorded with Ray 2.60; those of 2.9 from its source)."""

from __future__ import annotations

import pytest

from watchdog.knowledge.ray_train import Seat, SeatReader, speaker_of

BEFORE = b"\x1b[36m(TrainController pid=9371)\x1b[0m "
STARTED = BEFORE + b"Started training worker group of size 2: \n"
SEATS = (
    BEFORE + b"- (ip=192.0.2.2, pid=12426) world_rank=0, local_rank=0, node_rank=0\n"
    + BEFORE + b"- (ip=192.0.2.2, pid=13121) world_rank=1, local_rank=1, node_rank=0\n"
)  # fmt: skip
TWO = {12426: Seat(0, 0, 2), 13121: Seat(1, 1, 2)}


def seats(*blocks: bytes) -> dict[int, Seat]:
    reader = SeatReader()
    for block in blocks:
        reader.feed(block)
    return reader.seats()


def test_the_table_of_a_started_group_is_read_whole_in_pieces_and_in_its_older_words() -> None:
    assert seats(b"Requesting resources\n" + STARTED + SEATS + b"step 1\n") == TWO
    assert seats(STARTED, *SEATS.splitlines(keepends=True), b"step 1\n") == TWO
    older = SEATS.replace(b"(ip=", b"(node_id=81ab, ip=")
    assert seats(b"(TorchTrainer pid=7) Started distributed worker processes: \n" + older) == TWO


def test_a_group_that_starts_again_is_other_processes_and_a_replaced_worker_another_process() -> None:
    again = SEATS.replace(b"12426", b"501").replace(b"13121", b"502")
    assert set(seats(STARTED + SEATS, STARTED + again)) == {501, 502}
    replica = BEFORE + b"Started training replica group of size 1: \n"
    one = replica + BEFORE + b"- (ip=192.0.2.2, pid=600) world_rank=1, local_rank=1, node_rank=0\n"
    assert seats(STARTED + SEATS, one) == {12426: Seat(0, 0, 2), 600: Seat(1, 1, 2)}


@pytest.mark.parametrize(
    "said",
    [
        STARTED + SEATS.replace(b"192.0.2.2, pid=13121", b"192.0.2.3, pid=13121"),  # a pid of another node is no process here
        STARTED + SEATS.splitlines(keepends=True)[1],  # rank 0 is missing
        SEATS,  # the table's head was not seen: whose rows they are is not known
        STARTED,
    ],
)  # fmt: skip
def test_a_table_that_is_not_whole_or_not_of_one_node_says_nothing(said: bytes) -> None:
    assert seats(said) == {}


def test_the_worker_that_wrote_a_line_is_named_before_it_on_its_own_node_alone() -> None:
    assert speaker_of("(RayTrainWorker pid=12426) RuntimeError: bad sample") == 12426
    assert speaker_of("\x1b[36m(RayTrainWorker pid=12426)\x1b[0m RuntimeError: bad sample") == 12426
    assert speaker_of("(RayTrainWorker pid=12426, ip=10.0.0.7) RuntimeError") is None
    assert speaker_of("(TrainController pid=9371) RuntimeError") is None
    assert speaker_of("RuntimeError: in (RayTrainWorker pid=3)") is None
