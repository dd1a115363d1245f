"""Which process is which rank, in the words of Ray Train (recorded with Ray 2.60; those of 2.9 from its source)."""

from __future__ import annotations

import pytest

from slurm_watchdog.diagnose.logs.root_cause import find_cause, logged_error
from slurm_watchdog.knowledge.ray_train import Row, WorkerRank, WorkerRankReader, died_of, seat_of, speaker_of
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.past_runs import PastRun
from slurm_watchdog.model.past_runs import RankLocation as RankSeat
from slurm_watchdog.parse.training_log.line import parse_line
from tests.builders.failed_logs import verdict_of

BEFORE = b"\x1b[36m(TrainController pid=9371)\x1b[0m "
STARTED = BEFORE + b"Started training worker group of size 2: \n"
SEATS = (
    BEFORE + b"- (ip=192.0.2.2, pid=12426) world_rank=0, local_rank=0, node_rank=0\n"
    + BEFORE + b"- (ip=192.0.2.2, pid=13121) world_rank=1, local_rank=1, node_rank=0\n"
)  # fmt: skip
TWO = {12426: WorkerRank(0, 0, 2), 13121: WorkerRank(1, 1, 2)}


def seats(*blocks: bytes) -> dict[int, WorkerRank]:
    reader = WorkerRankReader()
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
    assert seats(STARTED + SEATS, one) == {12426: WorkerRank(0, 0, 2), 600: WorkerRank(1, 1, 2)}


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


DIED = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs "
    "for the dead worker. Lease ID: 05 Worker ID: f1 Node ID: 73 Worker IP address: 192.0.2.2 Worker "
    "port: 37393 Worker PID: {} "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection "
    "error code 2. End of file."
)
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:421: Connection reset by peer"
LOST_WORKER = (STARTED + SEATS).decode().replace("13121", "984") + "step 1\n" + DIED.format(984) + "\n"
SUMMED_UP = "(TrainController pid=852) ray.train.WorkerGroupError: Training failed due to worker errors:"


def test_a_row_of_the_table_and_the_word_of_a_dead_worker_are_read() -> None:
    row = seat_of("(TrainController pid=852) - (ip=192.0.2.2, pid=984) world_rank=1, local_rank=1, node_rank=0")
    assert row == Row("192.0.2.2", 984, 1)
    assert seat_of("world_rank=1") is None
    assert died_of(DIED.format(984)) == (984, "192.0.2.2")
    assert died_of("Worker PID: 984") is None


Said = tuple[tuple[str, str, int | None], ...]
"""Of each line its text, its row, and the rank whose worker wrote it."""


SPEAKER = {None: "", 0: "(RayTrainWorker pid=1010) ", 1: "(RayTrainWorker pid=984) "}


def run_with(*said: tuple[str, str, int | None]) -> PastRun:
    errors = [
        logged_error(Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", line=f"{SPEAKER[rank]}{line}", pattern=pattern, rank=rank), "n1", 100.0 + at)
        for at, (line, pattern, rank) in enumerate(said)
    ]  # fmt: skip
    return PastRun(
        restarts=0,
        began_at=0.0,
        ended_at=120.0,
        steps_seen=9,
        rose_at=90.0,
        state="FAILED",
        errors=tuple(errors),
        ranks=2,
        nodes=("n1",),
        batch_host="n1",
        seats=(RankSeat(0, "n1", 1010), RankSeat(1, "n1", 984)),
    )


def test_the_rank_that_ray_says_has_died_is_the_one_whom_its_peers_lost() -> None:
    said = (
        (LOST, "peer_lost", 0),
        (DIED.format(984), "ray_actor_died", None),
        (SUMMED_UP, "ray_actor_died", None),
    )
    cause = find_cause(run_with(*said))
    assert cause is not None
    assert (cause.rank, cause.pid, cause.node) == (1, 984, "n1")


def test_of_two_workers_that_ray_says_have_died_none_is_named() -> None:
    said = (DIED.format(984), "ray_actor_died", None), (DIED.format(1010), "ray_actor_died", None)
    cause = find_cause(run_with(*said))
    assert cause is not None and cause.rank is None


def test_the_word_about_a_process_that_is_no_rank_names_nobody() -> None:
    cause = find_cause(run_with((DIED.format(5), "ray_actor_died", None)))
    assert cause is not None and cause.rank is None


def test_ray_summary_of_the_run_controller_is_no_exception_of_the_program() -> None:
    fact = parse_line(SUMMED_UP)
    assert fact is not None and fact.pattern == "ray_actor_died"
    assert verdict_of(LOST_WORKER) == ("ray_actor_died", 1, "192.0.2.2")


HEADER = ("Traceback (most recent call last):", "traceback", 0)
BOOM = ("RuntimeError: the group of processes is not usable", "python_exception", 0)
DIED_984 = (DIED.format(984), "ray_actor_died", None)


@pytest.mark.parametrize(
    "said",
    [
        (
            DIED_984,
            (LOST, "peer_lost", 0),
            HEADER,
        ),  # Ray holds the header back: another process wrote the same
        (DIED_984, HEADER),
        (DIED_984, HEADER, BOOM),
        (HEADER, (LOST, "peer_lost", 0), DIED_984, HEADER),
    ],
)
def test_ray_errors_of_a_survivor_after_a_death_do_not_name_it(said: Said) -> None:
    cause = find_cause(run_with(*said))
    assert cause is not None and cause.only_consequence
    assert (cause.rank, cause.pid) == (1, 984)


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        ((HEADER, BOOM, DIED_984), 0),  # it raised first, and another one died of that
        ((DIED_984, ("ValueError: bad", "python_exception", 1)), 1),  # its own words come later than Ray's
        ((DIED_984, ("CUDA out of memory", "cuda_oom", 0)), 0),  # nobody says that because a peer is gone
        (((LOST, "peer_lost", 1), DIED_984), None),  # it died of having lost another one
    ],
)
def test_rays_word_of_a_death_clears_nobody_who_says_why_it_failed(said: Said, rank: int | None) -> None:
    cause = find_cause(run_with(*said))
    assert cause is not None and cause.rank == rank
