"""`controller --record`: what is written gives the same incidents again, and no disk stops the controller."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.recorder import Recorder
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.observations import (
    Blocked,
    Checkpoint,
    Event,
    EventKind,
    FaultSeverity,
    Gpu,
    GpuHolder,
    HungProbe,
    Link,
    LogFile,
    MountProbe,
    NodeEvent,
    Pressure,
    Resource,
    Usage,
)
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.replay.player import Outcome, TracePlayer, numbered_ids, replay
from slurm_watchdog.trace.read import Moment, read_moments, typical_interval_s
from slurm_watchdog.trace.records import MAX_LINE_BYTES, ParseStats
from tests.builders.replayed import play, verdict
from tests.builders.views import LOADER, RECV, process, slurm_job, stack
from tests.replay import write_traces as traces


class Recording(ClusterState):
    """A real state that also keeps everything it takes over, as the controller hands it to its recorder."""

    said: list[tuple[float, Report | SlurmView]]

    def go_on(self, until: float) -> None:
        """Slurm answers every ten seconds, as a controller would ask; the replay that feeds us asks less often."""
        at, listing = next(each for each in reversed(self.said) if isinstance(each[1], SlurmView))
        assert isinstance(listing, SlurmView)
        # A node without a job rightly says nothing from then on.
        absent = (replace(node, state="FUTURE") if node.state == "IDLE" else node for node in listing.nodes)
        listing = replace(listing, nodes=tuple(absent))
        while (at := at + 10) < until:
            self.said.append((at, listing))

    def apply_report(self, report: Report, now: float) -> str:
        outcome = super().apply_report(report, now)
        if outcome == "accepted":
            self.said.append((now, report))
        return outcome

    def apply_slurm(self, view: SlurmView, now: float, wall: float | None = None) -> None:
        super().apply_slurm(view, now, wall)
        self.said.append((now, view))


def flow_of(data: bytes, tally: ParseStats) -> Iterator[Moment]:
    return read_moments(io.BytesIO(data).read, tally)


def again(path: Path) -> Outcome:
    with path.open("rb") as file:
        return replay(file.read, Config(), numbered_ids())


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "trace",
    # Without the one in which a node's report of ten seconds ago comes with its newest: no agent does that.
    [trace for trace in traces.TRACES if trace is not traces.dead_rank_not_listed],
    ids=lambda trace: trace.__name__,
)
def test_a_recording_of_a_cluster_gives_its_incidents_again(trace: Any, tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    lines = [json.dumps(line).encode() for line in trace()]
    data = b"\n".join(lines)
    player = TracePlayer(Config(), ParseStats(), numbered_ids(), typical_interval_s(flow_of(data, ParseStats())) or 5.0)
    player.state.__class__ = Recording
    assert isinstance(player.state, Recording)
    player.state.said = []
    for moment in flow_of(data, ParseStats()):
        if player.state.said:
            player.state.go_on(moment.t)
        player.play(moment)
    before = player.outcome()
    recorder = Recorder(str(path))
    for t, what in sorted(player.state.said, key=lambda each: each[0]):
        recorder.record(what, t)
    recorder.close()
    after = again(path)
    assert recorder.dropped == 0
    kinds = [(i.kind, i.fired_at is not None, [(c.node, c.rank, c.pid) for c in i.culprits]) for i in before.incidents]
    assert [
        (i.kind, i.fired_at is not None, [(c.node, c.rank, c.pid) for c in i.culprits]) for i in after.incidents
    ] == kinds
    assert not after.tally.skipped


FULL = Report(
    node="n1", boot_id="boot", agent_id="a", sequence=1, age_s=1.5, interval_s=7.0, agent_version="0.1",
    processes=(
        process(0, state_age_s=3.0, io_bytes=5, cpu_s=12.5, start_ticks=777),
        process(
            1, state="D", state_age_s=20.0, start_ticks=778,
            blocked=Blocked(
                thread_id=55, seconds=61.5, state="S", wchan="w", syscall="fsync", path="/s/a", mount="/s", fs_type="nfs4", device="srv:/s",
            ),
        ),
    ),
    logs=(LogFile(job_id="7", path="/log/out", growth_age_s=4.0, offset=99), LogFile(job_id="7", path="/log/err", error="missing")),
    events=(
        Event(kind=EventKind.PROGRESS, job_id="7", age_s=2.0, source="/log/out", line="step 5", step=5, pattern="p", backlog=True),
        Event(kind=EventKind.CHECKPOINT, job_id="7", age_s=0.0, source="/t", step=4, pattern="tracker"),
    ),
    mounts=(MountProbe(mount="/s", responding=False, seconds=31.0, device="srv:/s", fs_type="nfs4"),),
    hung_probes=(HungProbe(probe="files:/s", seconds=12.0),),
    gpus=(
        Gpu(uuid="GPU-a", index=0, pci_bus_id="0000:c1:00.0", utilization_ratio=0.973, sm_clock_hz=1.41e9, memory_used_bytes=5,
            throttle=("gpu_idle",), pids=(100,), ecc_uncorrected=2),
        Gpu(uuid="", index=1, error="NVML_ERROR_GPU_IS_LOST"),
    ),
    node_events=(
        NodeEvent(source="nvml", name="xid", severity=FaultSeverity.ERROR, age_s=1.0, xid=79, gpu_uuid="GPU-a", sequence=8),
        NodeEvent(source="kernel_log", name="oom_kill", severity=FaultSeverity.WARNING, age_s=0.0, line="Out of memory", backlog=True),
    ),
    checkpoints=(Checkpoint(job_id="7", directory="/s/ckpt", layout="megatron", step=40, writing_step=50, writing=True),),
    gpu_holders=(GpuHolder(pid=5, start_ticks=6, uid=7, user="u", comm="python", state="S", gpu_uuids=("GPU-a",)),),
    problems=("gpu: slow",),
    usages=(Usage(resource=Resource.MEMORY, used=5, limit=9, refused=1, job_id="7", step_id="0"),),
    pressures=(Pressure(resource="memory", some_ratio=0.5, full_ratio=0.25, job_id="7"),),
    links=(Link(name="mlx5_0/1", kind="infiniband", up=False, rate_bits_s=400, downs=3, sent_bytes_s=1.5),),
)  # fmt: skip


class Caught(ClusterState):
    """Keeps the reports that a replay makes."""

    def apply_report(self, report: Report, now: float) -> str:
        CAUGHT.append(report)
        return super().apply_report(report, now)


CAUGHT: list[Report] = []


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(str(path))
    recorder.record(SlurmView(jobs=(slurm_job(),), nodes=()), 100.0)
    recorder.record(FULL, 100.25)
    recorder.close()
    CAUGHT.clear()
    player = TracePlayer(Config(), tally := ParseStats(), numbered_ids(), 5.0)
    player.state.__class__ = Caught
    for moment in flow_of(path.read_bytes(), tally):
        player.play(moment)
    (found,) = CAUGHT
    assert not tally.skipped and not tally.ignored
    whole = NodeSums().add(FULL, 100.25)
    for name in Report.__struct_fields__:
        if name not in ("agent_id", "sequence"):
            assert getattr(found, name) == getattr(whole, name), name


def test_jobs_and_nodes_come_back_as_slurm_listed_them(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(str(path), offset_s=1000.0)
    job = slurm_job(job_id="7_3", raw_id="9", comment="watchdog=off", requeueable=False, excluded_nodes=("n9",))
    node = SlurmNode(name="n1", address="10.0.0.1", state="DOWN", reason="broken")
    for now, jobs in ((1.0, (job,)), (11.0, (job,)), (21.0, ())):
        recorder.record(SlurmView(jobs=jobs, nodes=(node,)), now)
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["t"], line["kind"]) for line in lines] == [
        (1001.0, "job"), (1001.0, "node"), (1011.0, "node"), (1021.0, "job"),
    ]  # fmt: skip
    player = TracePlayer(Config(), ParseStats(), numbered_ids(), 5.0)
    flow = flow_of(path.read_bytes(), player.tally)
    player.play(next(iter(flow)))
    assert player.state.jobs == {"7_3": job}
    for moment in flow:
        player.play(moment)
    assert player.state.jobs["7_3"].state == "NOT_LISTED"


def test_stacks_of_a_dump_come_back_as_one_look_at_the_whole_job(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(str(path))
    recorder.record(SlurmView(jobs=(slurm_job(),), nodes=()), 0.0)
    for number, place in enumerate((5.0, 25.0, 45.0)):
        for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
            stacks = tuple(stack(r, LOADER if r == 3 else RECV) for r in ranks)
            recorder.record(
                Report(
                    node=node, boot_id="b", agent_id="a", sequence=number + 1,
                    processes=tuple(process(r) for r in ranks),
                    results=(CommandResult(command_id=f"{node}{number}", ok=True, stacks=stacks),),
                ),
                place + (1.0 if node == "n2" else 0.0),
            )  # fmt: skip
    recorder.close()
    player = TracePlayer(Config(), ParseStats(), numbered_ids(), 5.0)
    for moment in flow_of(path.read_bytes(), player.tally):
        player.play(moment)
    view = player.state.job_view("7", 46.0)
    assert view is not None
    assert [(s.age_s, len(s.stacks), s.silent_nodes) for s in view.snapshots] == [
        (40.0, 4, ()),
        (20.0, 4, ()),
        (0.0, 4, ()),
    ]


def record_hours(path: Path, reports: Iterable[float], listings: Iterable[float]) -> Outcome:
    """A recording of two idle nodes that report, and of Slurm that answers, at these times; and what is found in it."""
    recorder = Recorder(str(path))
    nodes = tuple(SlurmNode(name=name, address="", state="IDLE") for name in ("n1", "n2"))
    said: list[tuple[float, Any]] = [(t, SlurmView(jobs=(), nodes=nodes)) for t in listings]
    for sequence, t in enumerate(reports):
        said += [(t, Report(node=node.name, boot_id="b", agent_id="a", sequence=sequence)) for node in nodes]
    for t, what in sorted(said, key=lambda each: each[0]):
        recorder.record(what, t)
    recorder.close()
    return again(path)


def test_a_time_in_which_the_controller_stood_still_accuses_nobody(tmp_path: Path) -> None:
    hours = [*range(0, 300, 5), *range(900, 1200, 5)]
    assert record_hours(tmp_path / "r", hours, hours[::2]).incidents == ()


def test_nodes_that_fell_silent_while_slurm_answered_are_found_again(tmp_path: Path) -> None:
    outcome = record_hours(tmp_path / "r", range(0, 300, 5), range(0, 600, 10))
    assert [i.kind for i in outcome.incidents if i.fired_at] == ["partition_or_outage"]


def test_a_slurm_that_did_not_answer_is_found_again(tmp_path: Path) -> None:
    outcome = record_hours(tmp_path / "r", range(0, 600, 5), range(0, 300, 10))
    assert [i.kind for i in outcome.incidents if i.fired_at] == ["slurm_unreachable"]


# ---------------------------------------------------------------------------------------------- disks


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    recorder = Recorder(str(fifo), max_waiting=10)
    recorder.record(FULL, 0.0)
    wait_until(recorder._waiting.empty)
    time.sleep(0.1)  # now the thread waits for a reader
    for now in range(100):
        recorder.record(FULL, float(now))
    assert recorder.dropped == 90
    read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # lets the thread go on
    recorder.close()
    os.close(read)


def test_a_full_disk_costs_records_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("/dev/full")
    for now in range(5):
        recorder.record(FULL, float(now))
        wait_until(recorder._waiting.empty)
    recorder.close()
    assert recorder.dropped == 5
    said = [r.getMessage() for r in caplog.records if "missing from /dev/full" in r.getMessage()]
    assert len(said) == 1
    assert os.strerror(errno.ENOSPC) in said[0]


def test_a_line_that_broke_off_costs_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text('{"t":1,"kind":"rep')  # the controller before was killed while it wrote
    recorder = Recorder(str(path))
    recorder.record(SlurmView(jobs=(slurm_job(),), nodes=()), 5.0)
    recorder.close()
    assert len(path.read_text().splitlines()) == 2
    assert again(path).tally.skipped == {"no whole JSON in it": [1, 1]}


def test_a_line_longer_than_any_reader_takes_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(str(path))
    recorder.record(SlurmView(jobs=(slurm_job(comment="x" * MAX_LINE_BYTES), slurm_job(job_id="8")), nodes=()), 5.0)
    recorder.close()
    assert recorder.dropped == 1
    assert [json.loads(line)["job_id"] for line in path.read_text().splitlines()] == ["8"]


def test_a_file_that_cannot_be_opened_is_told_and_the_controller_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(str(tmp_path / "missing" / "file"))
    recorder.record(FULL, 1.0)
    recorder.close()
    assert recorder.dropped == 1
    assert "No such file or directory" in caplog.text


def test_a_recording_is_closed_to_others(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "r"))
    recorder.record(FULL, 1.0)
    recorder.close()
    assert (tmp_path / "r").stat().st_mode & 0o007 == 0


def test_the_verdict_of_a_hand_written_trace_is_the_same_twice() -> None:
    assert verdict(play(traces.filesystem_stall())) == verdict(play(traces.filesystem_stall()))
