"""What a node sends of its looks: whole reports when something changed or lasts, small ones while all is as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.agent.frames import AFTER_NEWS_S, BUSY_S, IDLE_S, LONG_LIVED_S, Frames, is_calm, stuck_in
from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.model.observations import (
    Blocked,
    Checkpoint,
    FaultSeverity,
    Gpu,
    GpuHolder,
    HungProbe,
    Link,
    MountProbe,
    NodeEvent,
    Pressure,
    Process,
    Resource,
    Role,
    Usage,
)
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import HELD, JobDirectives, LeftOut, Report
from slurm_watchdog.wire.codec import MAX_STATE, WireError, decode_report, encode_report
from tests.builders.summed import Memory, framed

BLOCKED = Blocked(thread_id=10, seconds=6.0, state="D", syscall="write", path="/data/x", mount="/data")


def process(pid: int = 10, role: Role = Role.RANK, **more: Any) -> Process:
    given = {"job_id": "7", "comm": "python", "state": "S", "state_age_s": None, "uid": 1, "start_ticks": 100}
    rank = {"rank": 0, "step_id": "0"} if role is Role.RANK else {}
    return Process(pid=pid, role=role, **{**given, **rank, **more})


def gpu(**more: Any) -> Gpu:
    return Gpu(**{"uuid": "GPU-1", "index": 0, "utilization_ratio": 1.0, "pids": (10,), **more})


def look(*processes: Process, **more: Any) -> Report:
    return Report(node="n1", boot_id="b", agent_id="a", sequence=1, made_s=1e6, processes=processes, **more)


CALM = look(process(), gpus=(gpu(),))


def sent(looks: Sequence[Report], every_s: float = 5.0, frames: Frames | None = None) -> str:
    """`W` for each whole report, `s` for each small one."""
    frames, found = frames or Frames(), ""
    for number, each in enumerate(looks, start=1):
        frame = frames.frame(replace(each, sequence=number), every_s * number)
        found += "s" if frame.same_as else "W"
    return found


def test_a_calm_node_sends_all_every_30_s_and_in_between_next_to_nothing() -> None:
    assert sent([CALM] * 14) == "WsssssWsssssWs"
    assert sent([replace(CALM, interval_s=15.0)] * 5, every_s=15.0) == "WsWsW"
    assert sent([replace(CALM, interval_s=60.0)] * 3, every_s=60.0) == "WWW"
    small = framed(replace(CALM, sequence=2), 10.0, memory := Memory())
    small = framed(replace(CALM, sequence=3, events_dropped=4), 15.0, memory)
    assert small.same_as == 2 and small.events_dropped == 4
    assert not any(getattr(small, name) for name in HELD)


def alike(name: str, *rows: object) -> Report:
    return replace(CALM, **{name: rows})


def with_process(*rows: Process) -> Report:
    return replace(CALM, processes=rows)


NEWS = {
    "another rank": with_process(process(), process(11, rank=1)),
    "a rank that was started again": with_process(process(start_ticks=101)),
    "a rank that is gone": with_process(),
    "a process that is known to be a rank by now": with_process(process(rank=3)),
    "a GPU less": replace(CALM, gpus=()),
    "another program on it": replace(CALM, gpus=(gpu(pids=(11,)),)),
    "a memory error": replace(CALM, gpus=(gpu(ecc_uncorrected=1),)),
    "a row to be replaced": replace(CALM, gpus=(gpu(remap_pending=True),)),
    "a bus with fewer lanes": replace(CALM, gpus=(gpu(pcie_link_width=8),)),
    "a GPU that does not say how busy it is": replace(CALM, gpus=(gpu(utilization_ratio=None),)),
    "a mount that is new": alike("mounts", MountProbe(mount="/data", responding=True, seconds=0.1)),
    "a checkpoint": alike("checkpoints", Checkpoint(job_id="7", directory="/c", step=5)),
    "a link that is down": alike("links", Link(name="ib0", kind="infiniband", up=False)),
    "a limit that is near": alike("usages", Usage(resource=Resource.MEMORY, used=81, limit=100)),
    "someone was refused": alike("usages", Usage(resource=Resource.PIDS, used=1, limit=100, refused=1)),
    "all wait for memory": alike("pressures", Pressure(resource="memory", some_ratio=0.5, full_ratio=0.11)),
    "a process without a job": alike(
        "gpu_holders", GpuHolder(pid=4, start_ticks=5, uid=1, user="u", comm="c", state="S", orphan_for_s=60.0)
    ),
    "what an owner wants": alike("wishes", JobDirectives(job_id="7", restarts=0, variables=(("A", "1"),), uid=0)),
    "a problem": alike("problems", "gpu: OSError"),
    "rows that had no room": alike("left_out", LeftOut(job_id="7", uid=1, count=3)),
    "a helper that is stopped": with_process(process(), process(20, Role.HELPER, state="T", state_age_s=3.0)),
}


@pytest.mark.parametrize("changed", NEWS.values(), ids=NEWS.keys())
def test_a_change_is_reported_at_once_and_the_way_back_too(changed: Report) -> None:
    mounts = bool(changed.mounts)  # each answer is in one report: one that is missing is no change
    assert sent([CALM, CALM, changed, changed, CALM, CALM]) == ("WsWsss" if mounts else "WsWsWs")


NO_NEWS = {
    "a helper that comes": with_process(process(), process(20, Role.HELPER)),
    "a loader that comes": with_process(process(), process(20, Role.WORKER, start_ticks=99_999_000)),
    "counters": with_process(process(cpu_s=9.0, io_bytes=10**9, threads=4, context_switches=7)),
    "a rank that runs": with_process(process(state="R")),
    "a moment in D": with_process(process(state="D")),
    "two looks in D": with_process(process(state="D", state_age_s=5.0)),
    "a loader that no one waited for": with_process(process(), process(20, Role.WORKER, state="Z", state_age_s=5.0)),
    "a helper that no one waited for": with_process(process(), process(20, Role.HELPER, state="Z", state_age_s=5.0)),
    "warmth": replace(CALM, gpus=(gpu(temperature_c=70.0, power_w=300.0, ecc_corrected=3, pcie_replays=5),)),
    "a slower cycle of the bus": replace(CALM, gpus=(gpu(pcie_link_generation=1),)),
    "use of memory": alike("usages", Usage(resource=Resource.MEMORY, used=70, limit=100)),
    "waits for the disk": alike("pressures", Pressure(resource="io", some_ratio=0.9, full_ratio=0.9)),
}


@pytest.mark.parametrize("changed", NO_NEWS.values(), ids=NO_NEWS.keys())
def test_what_comes_and_goes_on_a_healthy_node_waits_for_the_sums(changed: Report) -> None:
    assert sent([CALM, CALM, changed, changed, CALM, CALM]) == "Wsssss"


TROUBLE = {
    "a blocked rank": with_process(process(state="D", blocked=BLOCKED)),
    "a blocked loader": with_process(process(), process(20, Role.WORKER, blocked=BLOCKED)),
    "a blocked helper": with_process(process(), process(20, Role.HELPER, blocked=BLOCKED)),
    "D for long": with_process(process(state="D", state_age_s=10.0)),
    "a stopped rank": with_process(process(state="T", state_age_s=5.0)),
    "a traced rank": with_process(process(state="t")),
    "a stopped loader": with_process(process(), process(20, Role.WORKER, state="T")),
    "a rank that has ended and is not gone": with_process(process(state="Z")),
    "a GPU that is lost": replace(CALM, gpus=(gpu(error="NVML_ERROR_GPU_IS_LOST"),)),
    "a mount that does not answer": alike("mounts", MountProbe(mount="/data", responding=False, seconds=12.0)),
    "a child that hangs": alike("hung_probes", HungProbe(probe="files:/data", seconds=30.0)),
    "a checkpoint that is written": alike("checkpoints", Checkpoint(job_id="7", directory="/c", writing=True)),
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE.keys())
def test_what_lasts_and_may_be_judged_by_how_long_is_reported_whole_all_the_time(trouble: Report) -> None:
    assert not is_calm(trouble)
    assert sent([CALM, CALM, *[trouble] * 9]) == "Ws" + "W" * 9
    if not trouble.mounts:  # that one answers again, it says itself
        assert sent([CALM, trouble, CALM, CALM]) == "WWWs", "that it is over is news"


EVENT = NodeEvent(source="kernel_log", name="xid", severity=FaultSeverity.ERROR, age_s=1.0, xid=79)
BY_THEMSELVES = {
    "a result": replace(CALM, results=(CommandResult(command_id="1", ok=True),)),
    "a line of the kernel": replace(CALM, node_events=(EVENT,)),
    "lines of the kernel that are lost": replace(CALM, node_events_dropped=3),
}


@pytest.mark.parametrize("news", BY_THEMSELVES.values(), ids=BY_THEMSELVES.keys())
def test_what_happened_is_reported_whole_and_so_is_what_comes_of_it(news: Report) -> None:
    assert AFTER_NEWS_S == 15.0
    assert sent([CALM, CALM, news, *[CALM] * 5]) == "WsWWWsss"


def test_a_loader_that_lived_for_long_and_ends_is_news() -> None:
    old, young = (process(20, Role.WORKER, start_ticks=ticks) for ticks in (100, 100 * (10**6 - int(LONG_LIVED_S) + 9)))
    assert sent([look(process(), old)] * 2 + [look(process())] * 2) == "WsWs"
    assert sent([look(process(), young)] * 2 + [look(process())] * 2) == "Wsss"


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (0.79, 0.81, True), (0.81, 0.79, False), (0.81, 0.77, True), (0.94, 0.96, True), (0.96, 0.94, False),
        (0.96, 0.92, True), (0.85, 0.9, False),
    ],
)  # fmt: skip
def test_a_limit_that_is_near_stays_so_until_it_is_well_below(before: float, after: float, changes: bool) -> None:
    looks = [
        alike("usages", Usage(resource=Resource.MEMORY, used=round(1000 * ratio), limit=1000))
        for ratio in (before, before, after, after)
    ]
    assert sent(looks) == ("WsWs" if changes else "Wsss")


def summed(looks: Sequence[Report]) -> tuple[str, list[Report]]:
    memory, found = Memory(), []
    for number, each in enumerate(looks, start=1):
        found.append(framed(replace(each, sequence=number), 5.0 * number, memory))
    return "".join("s" if each.same_as else "W" for each in found), found


def changes(found: list[Report]) -> int:
    """How often its classes were other ones than before."""
    return len({each.state for each in found}) - 1


def loads(*ratios: float) -> list[Report]:
    return [replace(CALM, gpus=(gpu(utilization_ratio=ratio),)) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "times"),
    [
        ([1.0] * 60, 0),
        ([1.0, 0.0] * 120, 0),  # steps shorter than two looks
        ([1.0] * 20 + [0.0] * 6 + [1.0] * 60, 0),  # a save
        ([1.0] * int(BUSY_S / 5 + 2), 1),
        ([1.0] * int(BUSY_S / 5 + 2) + [0.3] + [1.0] * 60, 2),  # one look only, and it is not busy throughout for long
        ([0.0] * int(IDLE_S / 5 + 2), 1),
        ([0.0] * int(IDLE_S / 5 + 2) + [1.0] * 10, 2),
    ],
)
def test_a_gpu_is_busy_or_idle_once_it_has_been_so_for_long(ratios: list[float], times: int) -> None:
    assert changes(summed(loads(*ratios))[1]) == times


def clocks(*clocks_hz: float) -> list[Report]:
    return [replace(CALM, gpus=(gpu(sm_clock_hz=each),)) for each in clocks_hz]


def test_a_clock_under_load_is_news_once_it_has_moved_by_a_twentieth() -> None:
    noisy = [1.9e9 + 3e7 * (number % 3) for number in range(100)]
    assert changes(summed(clocks(*noisy))[1]) == 1, "that it is known"
    found = summed(clocks(*[1.9e9] * 60, *[1.5e9] * 60))[1]
    assert 3 <= changes(found) <= 6
    first = next(number for number, each in enumerate(found) if number > 66 and not each.same_as)
    assert 5 * (first - 60) <= 45


def test_cards_that_are_throttled_half_of_the_time_are_news_and_a_moment_is_not() -> None:
    def held_back(looks: int, *reasons: str) -> list[Report]:
        return [replace(CALM, gpus=(gpu(throttle=reasons),)) for _ in range(looks)]

    cool, hot = held_back(10), held_back(100, "hw_thermal_slowdown")
    assert changes(summed([*cool, *hot[:10], *held_back(10)])[1]) == 0
    assert changes(summed([*cool, *hot])[1]) == 1
    assert changes(summed(held_back(100, "gpu_idle"))[1]) == 0


def ranks_with(cpu_a_look: Callable[[int], float], looks: int) -> list[Report]:
    found, used = [], 0.0
    for number in range(looks):
        used += cpu_a_look(number)
        found.append(with_process(process(cpu_s=10.0 + used)))
    return found


@pytest.mark.parametrize(
    ("cpu_a_look", "times"),
    [
        (lambda number: 5.0, 0),
        (lambda number: 5.0 * (number % 2), 0),
        (lambda number: 0.0, 0),  # it was never seen to compute: it hands on what others do
        (lambda number: 5.0 if number < 20 or number > 25 else 0.0, 0),  # half a minute
        (lambda number: 5.0 if number < 20 else 0.0, 1),
        (lambda number: 5.0 if number < 20 else 0.0 if number < 40 else 5.0, 2),
        (lambda number: 5.0 if number < 20 else 0.0 if number < 40 else 1.5, 1),  # some, of what it used: still quiet
    ],
)
def test_a_rank_that_fell_quiet_is_news(cpu_a_look: Callable[[int], float], times: int) -> None:
    assert changes(summed(ranks_with(cpu_a_look, 80))[1]) == times


def test_answers_of_mounts_come_with_the_next_whole_report() -> None:
    def answered(mount: str, **more: Any) -> Report:
        return alike("mounts", MountProbe(**{"mount": mount, "responding": True, "seconds": 0.1, **more}))

    frames, looks = (
        Frames(),
        [answered("/a"), answered("/b"), answered("/a", seconds=0.3), CALM, answered("/b"), CALM, CALM],
    )
    found = [frames.frame(replace(each, sequence=number), 5.0 * number) for number, each in enumerate(looks, 1)]
    assert ["s" if each.same_as else "W" for each in found] == [*"WWsssss"]
    whole = [each for each in found if not each.same_as]
    assert [[(row.mount, row.seconds) for row in each.mounts] for each in whole][:2] == [[("/a", 0.1)], [("/b", 0.1)]]
    later = frames.frame(replace(CALM, sequence=9), 45.0)
    assert [(row.mount, row.seconds) for row in later.mounts] == [("/a", 0.3), ("/b", 0.1)]
    refused = frames.frame(replace(answered("/a", error="Permission denied"), sequence=10), 50.0)
    assert not refused.same_as
    assert frames.frame(replace(answered("/a", error="Permission denied"), sequence=11), 55.0).same_as


def test_a_small_report_names_the_whole_one_that_was_made_last() -> None:
    found = summed([CALM] * 3 + [NEWS["another rank"]] * 3 + [CALM] * 7)[1]
    assert [each.same_as for each in found] == [0, 1, 1, 0, 4, 4, 0, 7, 7, 7, 7, 7, 0]
    wholes = {each.sequence: each for each in found if not each.same_as}
    assert all(each.state == wholes[each.same_as].state for each in found if each.same_as)


def test_all_that_was_said_may_be_lost() -> None:
    frames = Frames()
    assert sent([CALM] * 3, frames=frames) == "Wss"
    frames.forget()
    assert sent([CALM] * 3, frames=frames) == "Wss"
    frames.closely = True
    assert sent([CALM] * 3, frames=frames) == "WWW"


def test_a_small_report_has_about_200_bytes() -> None:
    ids = {"boot_id": "6ac1b1f4-94d1-4b39-8b75-4e0ec3f1f0b3", "agent_id": "0123456789abcdef" * 2, "node": "node0001"}
    ranks = [process(1000 + rank, rank=rank) for rank in range(8)]
    looks = [replace(look(*ranks, agent_version="1.0.0"), **ids)] * 2
    small = summed(looks)[1][1]
    assert small.same_as and len(encode_report(small)) <= 200
    assert decode_report(encode_report(small)) == small
    odd = replace(small, made_s=float("inf"))
    assert decode_report(encode_report(replace(small, events_dropped=1, age_s=1.0))).state == small.state
    with pytest.raises(WireError):
        decode_report(encode_report(odd))
    with pytest.raises(WireError, match="its state has 65 bytes"):
        decode_report(encode_report(replace(small, state=b"x" * (MAX_STATE + 1))))


# ------------------------------------------------------------------------------ any sequence of looks


STATES = st.sampled_from([*"RRRSSSDTtZI"])


@st.composite
def rows(draw: st.DrawFn) -> tuple[Process, ...]:
    found = []
    for pid in draw(st.sets(st.integers(10, 15))):
        state = draw(STATES)
        age_s = draw(st.sampled_from([None, 5.0, 10.0, 60.0])) if state in "DTtZ" else None
        blocked = draw(st.sampled_from([None, None, None, BLOCKED, replace(BLOCKED, path="/data/y", seconds=80.0)]))
        role = Role.RANK if pid < 13 else Role.WORKER if pid < 15 else Role.HELPER
        found.append(process(pid, role, state=state, state_age_s=age_s, blocked=blocked, cpu_s=draw(st.floats(0, 99))))
    return tuple(found)


@st.composite
def looks(draw: st.DrawFn) -> Report:
    gpus = st.builds(
        gpu, utilization_ratio=st.sampled_from([None, 0.0, 0.3, 1.0]), error=st.sampled_from([None, None, "lost"]),
        ecc_uncorrected=st.sampled_from([0, 0, 1]), sm_clock_hz=st.sampled_from([1.0e9, 1.9e9]),
    )  # fmt: skip
    mounts = st.builds(
        MountProbe, mount=st.sampled_from(["/a", "/b"]), responding=st.booleans(), seconds=st.just(0.1),
        error=st.sampled_from([None, "EIO"]),
    )  # fmt: skip
    used = st.builds(Usage, resource=st.just(Resource.MEMORY), used=st.integers(70, 100), limit=st.just(100))
    return look(
        *draw(rows()),
        gpus=tuple(draw(st.lists(gpus, max_size=1))),
        mounts=tuple(draw(st.lists(mounts, max_size=1))),
        usages=tuple(draw(st.lists(used, max_size=1))),
        hung_probes=draw(st.sampled_from([(), (), (HungProbe(probe="p", seconds=3.0),)])),
        problems=draw(st.sampled_from([(), ("gpu: OSError",)])),
        results=draw(st.sampled_from([(), (CommandResult(command_id="1", ok=True),)])),
        node_events=draw(st.sampled_from([(), (EVENT,)])),
    )


def odd_of(report: Report) -> object:
    """What of a node may not be hidden: who is there, what they are stuck in, what is broken."""
    return (
        {(row.pid, row.start_ticks, row.rank) for row in report.processes if row.role is Role.RANK},
        {(row.pid, stuck_in(row)) for row in report.processes if stuck_in(row)},
        {(each.uuid, each.error, each.ecc_uncorrected, each.utilization_ratio is None) for each in report.gpus},
        {each.resource for each in report.usages if each.ratio >= 0.95},
        report.hung_probes,
        report.problems,
    )


def completed(small: Report, whole: Report) -> Report:
    return replace(small, **{name: getattr(whole, name) for name in HELD})


@given(st.lists(st.tuples(looks(), st.integers(1, 8)), min_size=1, max_size=12), st.booleans())
@settings(max_examples=100, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_who_keeps_the_last_whole_report_knows_all_that_is_odd(runs: list[tuple[Report, int]], closely: bool) -> None:
    """Of any sequence of looks, each a few times in a row; results and lines of the kernel come once."""
    sums, frames = NodeSums(), Frames(closely=closely)
    wholes: dict[int, Report] = {}
    answers: dict[str, tuple[bool, str | None]] = {}
    known: dict[str, tuple[bool, str | None]] = {}
    whole_at = number = 0
    for first, times in runs:
        for seen in (first, *[replace(first, results=(), node_events=())] * (times - 1)):
            number += 1
            full = sums.add(replace(seen, sequence=number), 5.0 * number)
            frame = decode_report(encode_report(frames.frame(full, 5.0 * number)))
            answers |= {row.mount: (row.responding, row.error) for row in seen.mounts}
            if not frame.same_as:
                wholes, whole_at = {number: frame}, number
                known |= {row.mount: (row.responding, row.error) for row in frame.mounts}
                assert odd_of(frame) == odd_of(full)
            else:
                assert not closely and number - whole_at <= 6
                whole = wholes[frame.same_as]
                assert frame.state == whole.state
                assert odd_of(completed(frame, whole)) == odd_of(full)
                assert is_calm(full) and not (seen.results or seen.node_events)
            assert known == answers
            assert frame.results == seen.results and frame.node_events == seen.node_events
