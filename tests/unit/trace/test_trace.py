"""Lines of a trace: what is believed of them, what is counted, in which order they come, who of a node is there."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.trace import records
from slurm_watchdog.trace.processes import MISSED, PROVEN, REGULAR, RELIABLE, WHOLE, Processes
from slurm_watchdog.trace.read import in_order, moments, read_records, typical_interval_s
from slurm_watchdog.trace.records import MAX_LINE_BYTES, BadLine, ParseStats, Proc, parse_record
from slurm_watchdog.trace.to_report import Node

ISSUE = """
{"t":0,"kind":"job","job_id":"1882409","state":"RUNNING","nodes":["n0","n1"],"restarts":0,"name":"m4","user":"u","batch_host":"n0"}
{"t":5,"kind":"proc","node":"n0","job_id":"1882409","rank":0,"pid":280058,"start":123.0,"state":"D","state_age_s":65,"wchan":"rpc_wait_bit_killable","syscall":"write","path":"/gpfs/m4/main_log.txt","mount":"/gpfs","cpu_s":1234.5}
{"t":5,"kind":"gpu","node":"n0","job_id":"1882409","gpu":0,"uuid":"GPU-eb00","util":0,"sm_clock_mhz":1155,"power_w":68,"temp_c":28,"mem_used_mib":22377,"throttle":[],"pids":[280058]}
{"t":5,"kind":"log","node":"n0","job_id":"1882409","stream":"stdout","line":"..."}
{"t":5,"kind":"kmsg","node":"n0","line":"..."}
{"t":5,"kind":"mount","node":"n0","mount":"/gpfs","responding":false,"probe_s":null}
{"t":5,"kind":"checkpoint","node":"n0","job_id":"1882409","step":45000,"complete":true}
{"t":5,"kind":"report","node":"n0"}
{"t":5,"kind":"fault","name":"a remark"}
"""


def parse(text: str | bytes) -> tuple[Any, ParseStats]:
    tally = ParseStats()
    return parse_record(text if isinstance(text, bytes) else text.encode(), 7, tally), tally


def ordered(*lines: str | bytes) -> tuple[list[Any], ParseStats]:
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    tally = ParseStats()
    return list(in_order(read_records(io.BytesIO(data).read, tally), tally)), tally


def at(t: float, node: str = "n0") -> str:
    return json.dumps({"t": t, "kind": "report", "node": node})


@pytest.mark.parametrize("line", ISSUE.strip().splitlines())
def test_every_kind_of_line_is_read_whole(line: str) -> None:
    record, tally = parse(line)
    said = json.loads(line)
    assert record.__struct_config__.tag == said.pop("kind")
    assert {name: getattr(record, name) for name in said} == said
    assert not tally.skipped and not tally.ignored


def test_missing_fields_are_unknown_and_strange_ones_are_ignored() -> None:
    record, tally = parse('{"t":1,"kind":"proc","node":"n0","weather":"rain"}')
    assert (record.node, record.rank, record.pid, record.state) == ("n0", None, None, None)
    assert not tally.skipped and not tally.ignored


def test_a_job_id_may_be_a_number_and_a_count_may_have_a_point() -> None:
    record, tally = parse('{"t":1,"kind":"proc","node":"n0","job_id":17,"rank":3.0}')
    assert (str(record.job_id), record.rank) == ("17", 3)
    assert not tally.ignored


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"t":1,"kind":"repo', "no whole JSON in it"),
        ("# a remark", "no whole JSON in it"),
        ("[" * 100_000, "no whole JSON in it"),
        ("[1,2]", "JSON, but no object"),
        ('{"t":1,"node":"n0"}', "no `kind`"),
        ('{"t":1,"kind":"banana"}', "a `kind` that trace v1 does not have"),
        ('{"t":1,"kind":{}}', "a `kind` that trace v1 does not have"),
        ('{"kind":"report","node":"n0"}', "report without `t`"),
        ('{"t":1,"kind":"report"}', "report without `node`"),
        ('{"t":-1,"kind":"report","node":"n0"}', "report with a negative number as `t`"),
        ('{"t":NaN,"kind":"report","node":"n0"}', "report with no finite number as `t`"),
        ('{"t":1e999,"kind":"report","node":"n0"}', "report with no finite number as `t`"),
        ('{"t":1e300,"kind":"report","node":"n0"}', "report with a number out of range as `t`"),
        ('{"t":null,"kind":"report","node":"n0"}', "report with nothing as `t`"),
        ('{"t":"1","kind":"report","node":"n0"}', "report with a string as `t`"),
        ('{"t":1,"kind":"report","node":["n0"]}', "report with something of another type as `node`"),
    ],
)
def test_a_line_that_cannot_be_used_is_skipped_with_its_reason_and_number(line: str, why: str) -> None:
    record, tally = parse(line)
    assert record is None or isinstance(record, BadLine)
    assert tally.skipped == {why: [1, 7]}


def test_nonsense_in_one_field_makes_that_field_unknown() -> None:
    line = '{"t":1,"kind":"proc","node":"n0","rank":2,"pid":-4,"cpu_s":"much","state_age_s":NaN,"state":"D"}'
    record, tally = parse(line)
    assert (record.rank, record.pid, record.cpu_s, record.state_age_s, record.state) == (
        2,
        None,
        None,
        None,
        "D",
    )
    assert set(tally.ignored) == {
        "proc with a negative number as `pid`",
        "proc with a string as `cpu_s`",
        "proc with no finite number as `state_age_s`",
    }


def test_bytes_that_are_no_text_cost_only_themselves() -> None:
    record, tally = parse(b'{"t":1,"kind":"log","node":"n0","job_id":"1","line":"caf\xe9 \x01","x":NaN}')
    assert record.line == "caf\ufffd \x01"
    assert tally.ignored == {"bytes that are not UTF-8": [1, 7]}


def test_only_lines_that_could_have_said_who_is_there_are_damage() -> None:
    assert isinstance(parse('{"t":1,"kind":"pr')[0], BadLine)
    assert parse('{"t":1,"kind":"proc","job_id":"1"}')[0].node is None
    assert parse('{"t":1,"kind":"gpu"}')[0] is None


def test_lines_of_any_length_cost_bounded_memory_and_the_next_one_is_read() -> None:
    long = b"x" * (3 * MAX_LINE_BYTES)
    good = at(5).encode()
    data = io.BytesIO(b"\xef\xbb\xbf" + good + b"\r\n\n" + long + b"\n" + good + b"\n" + long)
    tally = ParseStats()
    found = list(read_records(data.read, tally))
    assert [(number, type(record).__name__) for number, record in found] == [
        (1, "Report"), (3, "BadLine"), (4, "Report"), (5, "BadLine"),
    ]  # fmt: skip
    assert (tally.lines, tally.skipped) == (4, {f"longer than {MAX_LINE_BYTES} bytes": [2, 3, 5]})


@pytest.mark.parametrize("piece", [1, 7, 50, 100_000])
def test_a_trace_reads_alike_in_pieces_of_any_size_and_with_a_line_that_is_none(piece: int) -> None:
    lines = [at(t).encode() for t in range(60)]
    lines[13], lines[20], lines[31], lines[40] = b"", b"{", b"  " + lines[31] + b" ", b'{"kind":"x"}'
    data = io.BytesIO(b"\n".join(lines) + b"\n")
    tally = ParseStats()
    found = list(read_records(lambda _: data.read(piece), tally))
    assert [number for number, _ in found] == [n for n in range(1, 61) if n not in (14, 41)]
    assert (tally.lines, tally.skipped) == (
        59, {"no whole JSON in it": [1, 21], "a `kind` that trace v1 does not have": [1, 41]},
    )  # fmt: skip


def test_counts_name_the_first_lines_only() -> None:
    tally = ParseStats()
    for number in range(1, 9):
        tally.skip("no whole JSON in it", number)
    for number in (2, 5, 9):
        tally.skip("no `kind`", number)
    tally.ignore("gpu with a string as `util`", 3)
    tally.ignore("a GPU without number and UUID")
    assert tally.sentences() == [
        "8 lines skipped: no whole JSON in it (lines 1, 2, 3, …)",
        "3 lines skipped: no `kind` (lines 2, 5, 9)",
        "1 time ignored: a GPU without number and UUID",
        "1 time ignored: gpu with a string as `util` (line 3)",
    ]


# ---------------------------------------------------------------------------------------------- order


def test_records_that_are_slightly_out_of_order_are_put_in_order() -> None:
    times = [float(t) for t in range(200)]
    disturbed = sorted(times, key=lambda t: t + random.Random(t).uniform(0, 4))
    assert disturbed != times
    found, tally = ordered(*(at(t) for t in disturbed))
    assert [record.t for record in found] == times
    assert (tally.used, tally.skipped) == (200, {})


def test_first_lines_far_apart_are_all_used() -> None:
    found, tally = ordered(*(at(20 * t) for t in range(60)))
    assert [record.t for record in found] == [20 * t for t in range(60)]
    assert not tally.skipped


def test_a_time_that_goes_back_is_skipped() -> None:
    found, tally = ordered(*(at(t) for t in range(100)), at(3), at(100))
    assert [record.t for record in found] == list(range(101))
    assert tally.skipped == {"the time goes back": [1, 101]}


def test_a_single_time_far_ahead_costs_only_its_own_line() -> None:
    found, tally = ordered(at(0), at(1e9), *(at(t) for t in range(1, 50)), at(1e11))
    assert [record.t for record in found] == list(range(50))
    assert tally.skipped == {"a time far from that of all other lines": [2, 2, 52]}


def test_a_first_line_with_a_strange_time_does_not_hide_the_trace() -> None:
    for strange in (0, 9e11):
        found, tally = ordered(at(strange), *(at(1.7e9 + t) for t in range(50)))
        assert [record.t for record in found] == [1.7e9 + t for t in range(50)]
        assert tally.skipped_lines == 1


def test_a_trace_that_goes_on_a_year_later_is_read_on() -> None:
    found, tally = ordered(*(at(t) for t in range(30)), *(at(3e7 + t) for t in range(30)))
    assert len(found) == 60
    assert not tally.skipped


def test_trace_records_within_half_a_second_are_one_moment() -> None:
    found, _ = ordered(at(1), at(1.2), at(1.4), at(1.6), at(9))
    assert [(m.t, len(m.records)) for m in moments(found)] == [(1.4, 3), (1.6, 1), (9, 1)]


def test_the_interval_of_reports_is_seen_in_the_trace() -> None:
    found, _ = ordered(*(at(60 * t, node) for t in range(20) for node in ("n0", "n1")))
    assert typical_interval_s(moments(found)) == 60
    assert typical_interval_s([]) is None


# ---------------------------------------------------------------------------------------------- who is there


class Listing:
    """The processes of one node, as a trace lists them every five seconds."""

    def __init__(self, seen: tuple[int, ...] = ()) -> None:
        self.tally = ParseStats()
        self.processes = Processes(self.tally)
        self.now = 0.0
        self.seen = seen
        """Pids that a GPU lists."""

    def say(self, *ranks: int, wait: float = 5.0, **fields: Any) -> float | None:
        self.now += wait
        said = [
            Proc(
                t=self.now,
                node="n0",
                **{"job_id": "7", "rank": r, "pid": 100 + r, "start": 1.0, "state": "S"} | fields,
            )
            for r in ranks
        ]
        listed = self.processes.list(said, self.now, {"7": 0}, {"/gpfs"})
        return self.processes.miss(listed, self.now, (), self.seen)

    @property
    def ranks(self) -> list[int | None]:
        return sorted(p.rank for p in self.processes.present() if p.rank is not None)


def test_a_rank_that_is_missed_again_and_again_after_regular_listings_is_gone_since_the_first() -> None:
    listing = Listing()
    for _ in range(WHOLE):
        listing.say(0, 1)
    since = [listing.say(0) for _ in range(MISSED)]
    assert since == [*(MISSED - 1) * [None], 5.0 * (WHOLE + 1)]
    assert listing.ranks == [0]


def test_a_rank_that_was_stopped_is_not_held_to_be_so_while_only_others_are_listed() -> None:
    listing = Listing()
    for _ in range(3):
        listing.say(0, 1, state="T")
    listing.say(0)
    assert [p.state for p in listing.processes.present()] == ["S", "T"]
    listing.say(0)
    assert [p.state for p in listing.processes.present()] == ["S", "?"]


def test_after_few_listings_a_rank_has_to_be_missed_for_longer() -> None:
    listing = Listing()
    for _ in range(REGULAR):
        listing.say(0, 1)
    for _ in range(2 * MISSED - 1):
        assert listing.say(0) is None
    assert listing.ranks == [0, 1]
    listing.say(0)
    assert listing.ranks == [0]


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1, 0.4])
def test_a_trace_that_lacks_lines_by_chance_makes_hardly_ever_anybody_dead(share: float) -> None:
    """Four ranks on a node, ten minutes; one in a hundred such traces at most."""
    chance, wrong = random.Random(5), 0
    for _ in range(300):
        listing = Listing()
        for _ in range(120):
            listing.say(*(rank for rank in range(4) if chance.random() >= share))
        wrong += listing.ranks != [0, 1, 2, 3]
    assert wrong <= 3


@pytest.mark.parametrize(
    "said",
    [
        ((0, 1), (0, 1), (0,), (0,), (0,), (0,)),  # not often enough
        ((0, 1), (0, 1), (0, 1), (0,), (0, 1), (0,), (0, 1)),  # it comes back
        ((0, 1, 2, 3), (3,), (3,), (3,), (3,), (), (), ()),  # of the others it was said once
        ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), *9 * [(3,)]),  # now it tells of the interesting one
    ],
)
def test_a_trace_that_does_not_list_everybody_every_time_makes_nobody_dead(
    said: tuple[tuple[int, ...], ...],
) -> None:
    listing = Listing()
    for ranks in said:
        listing.say(*ranks)
    assert listing.ranks == sorted({r for ranks in said for r in ranks})


def test_a_trace_that_once_left_somebody_out_has_to_be_whole_for_longer() -> None:
    listing = Listing()
    for ranks in ((0, 1), (0, 1), (0, 1), (0,), (0, 1), *5 * [(0, 1)], *5 * [(0,)]):
        listing.say(*ranks)
    assert listing.ranks == [0, 1]
    for ranks in (*22 * [(0, 1)], *MISSED * [(0,)]):
        listing.say(*ranks)
    assert listing.ranks == [0]


def test_two_lines_that_are_missing_running_make_nobody_dead_before_a_thousand_were_there() -> None:
    listing = Listing()
    for _ in range(PROVEN // 4 - 2):
        listing.say(0, 1, 2, 3)
    for _ in range(MISSED - 1):
        listing.say(0, 1, 2)
    assert listing.ranks == [0, 1, 2, 3]
    for _ in range(PROVEN // 4 + RELIABLE):
        listing.say(0, 1, 2, 3)  # it came back: the count begins anew
    for _ in range(MISSED - 1):
        listing.say(0, 1, 2)
    assert listing.ranks == [0, 1, 2, 3]
    proven = Listing()
    for _ in range(PROVEN // 4):
        proven.say(0, 1, 2, 3)
    for _ in range(MISSED - 1):
        proven.say(0, 1, 2)
    assert proven.ranks == [0, 1, 2]


def test_a_process_that_its_gpu_still_lists_has_to_be_missed_for_longer() -> None:
    listing = Listing(seen=(101,))
    for _ in range(PROVEN):
        listing.say(0, 1)
    for _ in range(2 * MISSED - 1):
        listing.say(0)
    assert listing.ranks == [0, 1]
    listing.say(0)
    assert listing.ranks == [0]


def test_reports_that_come_more_often_than_listings_make_nobody_dead() -> None:
    listing = Listing()
    for _ in range(4):
        listing.say(0, 1, wait=60)
    for _ in range(10):
        listing.say(wait=5)  # a minute is not over
    assert listing.ranks == [0, 1]


def test_everybody_of_a_node_may_be_gone_at_once() -> None:
    listing = Listing()
    for _ in range(WHOLE):
        listing.say(0, 1)
    assert [listing.say() for _ in range(MISSED)][-1] == 5.0 * (WHOLE + 1)
    assert listing.ranks == []


def test_a_process_keeps_its_name_where_single_lines_leave_it_out() -> None:
    listing = Listing()
    listing.say(0, 1)
    listing.say(0, 1, pid=None)
    listing.say(0, 1, start=None)
    known = {p.rank: (p.pid, p.start_ticks) for p in listing.processes.present()}
    assert known == {0: (100, 100), 1: (101, 100)}


def test_a_pid_that_is_told_late_takes_the_place_of_its_stand_in() -> None:
    listing = Listing()
    listing.say(0, pid=None, start=None)
    assert [p.pid for p in listing.processes.present()] == [-1]
    listing.say(0)
    assert [p.pid for p in listing.processes.present()] == [100]


@pytest.mark.parametrize(
    ("fields", "blocked"),
    [
        ({"state": "D", "state_age_s": 65, "syscall": "write", "path": "/gpfs/a", "mount": "/gpfs"}, (65, "/gpfs")),
        ({"state": "D", "state_age_s": 65, "path": "/gpfs/a"}, (65, "/gpfs")),  # the mount is known from elsewhere
        ({"state": "S", "state_age_s": 65, "syscall": "read", "path": "/fuse/a", "mount": "/fuse"}, (65, "/fuse")),
        ({"state": None, "state_age_s": 65, "path": "/gpfs/a"}, (65, "/gpfs")),
        ({"state": "D", "state_age_s": 65, "syscall": "write"}, (65, None)),
        ({"state": "D", "syscall": "write", "path": "/gpfs/a"}, None),  # since when is not said
        ({"state": "S", "state_age_s": 65, "syscall": "futex"}, None),
        ({"state": "T", "state_age_s": 65, "path": "/gpfs/a"}, None),
        ({"state": "D", "state_age_s": 65}, None),
    ],
)  # fmt: skip
def test_a_process_stands_in_a_call_if_the_line_says_how_long_and_where(
    fields: dict[str, Any], blocked: tuple[float, str | None] | None
) -> None:
    listing = Listing()
    listing.say(0, **fields)
    (process,) = listing.processes.present()
    call = process.blocked
    assert (None if call is None else (call.seconds, call.mount)) == blocked


def test_a_call_whose_age_no_line_tells_lasts_since_it_was_first_listed_with_the_same_processor_time() -> None:
    def blocked_s(*cpu_s: float | None, path: str = "/gpfs/log") -> float | None:
        listing = Processes(ParseStats())
        for number, seconds in enumerate(cpu_s):
            state, file = ("D", path) if number >= 2 else ("R", None)
            each = Proc(t=10.0 * number, node="n0", job_id="7", rank=0, state=state, path=file, cpu_s=seconds)
            listing.list([each], each.t, {}, set())
        (process,) = listing.present()
        return process.blocked.seconds if process.blocked is not None else None

    assert blocked_s(1.0, 9.0, 18.0, 18.0, 18.0, 18.0) == 30.0
    assert blocked_s(1.0, 9.0, 18.0, 18.1, 18.2, 18.3) == 0.0  # it does something
    assert blocked_s(None, None, None, None, None, None) is None
    assert blocked_s(18.0, 18.0, 18.0, 18.0, 18.0, 18.0) is None  # a figure that never changes says nothing


def test_a_process_that_nobody_can_place_is_counted() -> None:
    listing = Listing()
    listing.say(0, job_id=None)
    listing.say(0, rank=None, pid=None)
    assert listing.processes.present() == ()
    assert listing.tally.ignored == {"a process without a job, or without pid and rank": [2]}


# ---------------------------------------------------------------------------------------------- whatever comes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted({name for kind in records.KINDS.values() for name in kind.__struct_fields__} | {"kind", "x"})
LINES = st.one_of(
    st.binary(max_size=60).map(lambda data: data.replace(b"\n", b"")),
    st.dictionaries(st.sampled_from(NAMES), JSON | st.sampled_from(sorted(records.KINDS)), max_size=8).map(
        lambda data: json.dumps(data).encode()
    ),
)


@given(st.lists(LINES, max_size=30))
def test_whatever_stands_in_a_file_every_line_is_used_or_counted(lines: list[bytes]) -> None:
    found, tally = ordered(*lines)
    records_found = [each for each in found if not isinstance(each, BadLine)]
    assert tally.used == len(records_found)
    assert tally.used + tally.skipped_lines == tally.lines == sum(1 for line in lines if line.strip())
    assert [each.t for each in found] == sorted(each.t for each in found)


def test_a_checkpoint_that_is_told_again_with_every_report_is_as_old_as_it_was() -> None:
    node = Node("n0", ParseStats(), 5.0)
    told = []
    for t, step, complete in ((5, 10, True), (10, 10, True), (15, 20, False), (20, 20, True), (25, 20, True)):
        record = records.Checkpoint(t=t, node="n0", job_id="7", step=step, complete=complete)
        report = node.reports([record], t, damaged=False, restarts={}, mounts=set())[-1]
        told.append([event.step for event in report.events])
    assert told == [[10], [], [], [20], []]
