"""Dumps of the Flight Recorder: real ones of gloo, those that NCCL would write, and those that want to run something."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.model.collective_records import Call, CollectiveRecord
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
from slurm_watchdog.parse.flight_recorder_format import MAX_BYTES
from tests.builders.nccl_dumps import Recorder

CAPTURES = Path(__file__).parents[2] / "captures" / "flight_recorder"


def entry(seq: int, name: str = "all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"), "profiling_name": f"nccl:{name}", "collective_seq_id": seq, "pg_id": 0,
        "state": "scheduled", "retired": False, "input_sizes": [[2, 4]], "input_dtypes": ["Float"], "frames": [],
    } | more  # fmt: skip


def read(*entries: dict[str, Any], rank: int = 0, completed: int = -1) -> CollectiveRecord:
    dump = {
        "version": "2.10", "entries": list(entries), "pg_config": {"0": {"name": "0", "ranks": "[0, 1, 4, 5]"}},
        "pg_status": {"0": {"last_enqueued_collective": -1, "last_completed_collective": completed}},
    }  # fmt: skip
    return parse_flight_recorder(pickle.dumps(dump, protocol=2), rank)


def test_a_real_dump_is_the_collective_that_its_rank_has_not_finished() -> None:
    record = parse_flight_recorder((CAPTURES / "missing" / "trace_0").read_bytes(), 0)
    (group,) = record.communicators
    assert (group.label, group.entered, group.members) == ("default_pg", 7, (0, 1, 2, 3))
    (call,) = group.waits
    assert replace(call, since=None) == Call(seq=7, name="all_reduce", elements=8, types=("Float",), needs_all=True)
    assert call.since == pytest.approx(1795462057.43, abs=0.01)
    assert (group.finished, group.together) == (6, 6)


@pytest.mark.parametrize("rank", range(4))
def test_the_json_of_a_rank_says_what_its_pickle_says(rank: int) -> None:
    pickled = parse_flight_recorder((CAPTURES / "missing" / f"trace_{rank}").read_bytes(), rank)
    assert parse_flight_recorder((CAPTURES / "missing_json" / f"trace_{rank}.json").read_bytes(), rank) == pickled


def test_parts_of_a_coalesced_operation_are_finished_when_it_is() -> None:
    parts = [entry(5), entry(5), entry(5, "ALLGATHER_coalesced", state="completed"), entry(6)]
    (group,) = read(*parts).communicators
    assert [call.seq for call in group.waits] == [6]


def test_what_the_status_of_its_group_says_is_complete_is_finished() -> None:
    (group,) = read(entry(1), entry(2), completed=2).communicators
    assert (group.waits, group.entered) == ((), 2)


def test_a_status_that_may_count_sending_finishes_no_collective() -> None:
    sent = entry(0, "send 0->1", is_p2p=True, state="completed")
    for entries in ([entry(5), entry(6)], [sent, entry(1), entry(2)]):
        (group,) = read(*entries, completed=6).communicators
        assert len(group.waits) == 2


def test_who_receives_waits_for_the_rank_of_the_job_that_is_meant() -> None:
    record = read(entry(3, "recv 0<-2", is_p2p=True))
    assert (record.busy, record.peers) == (True, (4,))
    assert record.communicators[0].waits == ()


class Runs:
    """A pickle of it calls os.system when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_something_runs_nothing(tmp_path: Path, protocol: int) -> None:
    body = pickle.dumps({"version": "2.10", "entries": [Runs(tmp_path / "ran")]}, protocol=protocol)
    with pytest.raises(ValueError, match=r"it names (posix|nt)\.system, and a dump names nothing"):
        parse_flight_recorder(body, 0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(S'touch /nowhere'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02(cos\nsystem\nS'true'\no.",
        b"\x82\x01.",
        b"P7\n.",
        b"}}b.",
        b"\x80\x05\x97.",
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"[" * 100_000,
        b"",
        b"{}",
        b'{"version":"1.0","entries":[{"seq_id":1}]}',
        b"\x80\x02}q\x00X\x07\x00\x00\x00versionq\x01h\x00s.",
        b" " * (MAX_BYTES + 1),
    ],
)
def test_what_is_no_dump_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"no dump|bytes"):
        parse_flight_recorder(body, 0)


def test_thousands_of_spoilt_dumps_are_read_or_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.dumps", "3000", "--seed", "1"], cwd=Path(__file__).parents[3],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_parts_of_a_batch_are_finished_when_it_is_and_its_peers_are_unsure_while_it_is_not() -> None:
    before = entry(3, state="completed")
    parts = [before, entry(3, "send 0->1", is_p2p=True, p2p_seq_id=4), entry(3, "recv 0<-2", is_p2p=True, p2p_seq_id=4)]
    done = entry(3, "coalesced", is_p2p=True, p2p_seq_id=4, state="completed")
    assert not read(*parts, done).busy
    record = read(*parts, done | {"state": "started"})
    assert (record.busy, record.peers, record.unsure_peers) == (True, (1, 4), (1, 4))
    record = read(*parts, done | {"state": "started"}, entry(3, "send 0->1", is_p2p=True, p2p_seq_id=5))
    assert (record.peers, record.unsure_peers) == ((1, 4), (4,))


def test_what_has_finished_with_one_peer_finishes_nothing_with_another_nor_a_collective() -> None:
    waits = entry(3, "recv 0<-1", is_p2p=True, p2p_seq_id=1)
    record = read(entry(3), waits, entry(3, "send 0->2", is_p2p=True, p2p_seq_id=2, state="completed"))
    assert (record.peers, [call.seq for call in record.communicators[0].waits]) == ((1,), [3])
    assert not read(waits, entry(3, "recv 0<-1", is_p2p=True, p2p_seq_id=2, state="completed")).busy


def test_the_last_finished_number_is_known_and_whether_all_had_entered_it() -> None:
    (group,) = read(
        *(entry(n, state="completed") for n in (4, 5)), entry(6, "broadcast", state="completed")
    ).communicators
    assert (group.finished, group.together, group.entered) == (6, 5, 6)
    (group,) = read(entry(4, state="completed", input_sizes=[[0]])).communicators
    assert (group.finished, group.together) == (4, 0)


def test_of_a_group_that_was_made_again_the_newest_counts() -> None:
    (group,) = read(entry(400), entry(1, state="completed", pg_id=7), entry(2, pg_id=7)).communicators
    assert ([call.seq for call in group.waits], group.entered, group.finished) == ([2], 2, 1)


def test_of_a_dump_of_what_is_active_alone_the_gaps_have_finished() -> None:
    (group,) = read(entry(4, record_id=4), entry(5, record_id=9), completed=3).communicators
    assert ([call.seq for call in group.waits], group.entered, group.finished) == ([4, 5], 5, 3)


def test_a_dump_with_gaps_that_holds_what_has_finished_is_refused() -> None:
    """Nobody knows then why entries are left out."""
    with pytest.raises(ValueError, match="entries are left out"):
        read(entry(4, record_id=4, state="completed"), entry(9, record_id=9))


def test_a_group_of_which_nothing_is_unfinished_is_known_by_its_status() -> None:
    for as_json in (False, True):
        recorder = Recorder(0, {"0": (0, 1), "tp": (0, 1)}, first=500, counts={"0": 40, "tp": 77})
        assert not parse_flight_recorder(recorder.dump(only_active=True, as_json=as_json), 0).busy
        recorder.collective(group="tp", done=False)
        record = parse_flight_recorder(recorder.dump(only_active=True, as_json=as_json), 0)
        assert {each.label: (each.entered, each.finished) for each in record.communicators} == {
            "0": (40, 40), "tp": (78, 77),
        }  # fmt: skip


def test_groups_that_share_a_name_cost_the_reading_of_its_members_once() -> None:
    """A dump of 1 MB took a minute of CPU: each of its entries had another description of one large group."""
    ranks = str(list(range(60_000)))
    entries = [entry(1, process_group=("0", f"g{number}"), frames=[]) for number in range(4000)]
    dump = {"version": "2.10", "entries": entries, "pg_config": {"0": {"name": "0", "ranks": ranks}}, "pg_status": {}}
    body, began = pickle.dumps(dump, protocol=2), time.process_time()
    parse_flight_recorder(body, 0)
    assert time.process_time() - began < 10.0, "it takes well below a second"


def test_names_that_no_report_can_hold_are_plain_text_and_those_of_two_groups_stay_two() -> None:
    """A pickle may hold half a character, which no JSON has; a training gives its groups names of any kind."""
    names = ("tp\ud800", "tp\udfff", "x" * 4000 + "1", "x" * 4000 + "2")
    calls = [entry(1, "all_reduce\ud800", process_group=(name, name), input_dtypes=["\x1b\ud800"]) for name in names]
    record = read(*calls)
    msgspec.json.encode(record)
    assert len({each.key for each in record.communicators}) == len(names)
    assert max(len(each.key) for each in record.communicators) < 100


def test_what_nccl_gave_up_after_its_timeout_has_not_finished() -> None:
    """As with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 or 2: the entry is retired, and the GPU still in it, or never was."""
    for state in ("started", "scheduled"):
        given_up = entry(2, state=state, retired=True)
        (group,) = read(entry(1, state="completed", retired=True), given_up, completed=2).communicators
        assert ([call.seq for call in group.waits], group.finished, group.together) == ([2], 1, 1)
    (group,) = read(entry(6, retired=True, profiling_name="gloo:all_reduce")).communicators
    assert (group.waits, group.finished) == ((), 6), "gloo knows no other end"
