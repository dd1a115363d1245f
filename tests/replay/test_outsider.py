"""Traces as somebody writes them who knows nothing but the format: some fields are missing, whole kinds of lines may be."""

from __future__ import annotations

import io
import json
from random import Random
from typing import Any

import pytest

from watchdog.config import Config
from watchdog.controller.replay import numbered_ids, replay
from watchdog.model import Incident

JOB, NODES, PER_NODE = "771204", ("gpu001", "gpu002"), 4
LOOKS: dict[str, tuple[str, float, int, int, int]] = {
    "trains": ("R", 1.0, 97, 380, 1410), "spins": ("R", 1.0, 100, 95, 1410), "sleeps": ("S", 0.0, 0, 68, 1155),
    "computes": ("R", 1.0, 0, 68, 1155), "saves": ("R", 0.7, 0, 80, 1410),
}  # fmt: skip
"""State, cores, utilisation, watts and clock of a rank."""


class Trace:
    """One job of eight ranks with a step every ten seconds; `left_out` are fields that its author did not think of."""

    def __init__(self, left_out: tuple[str, ...] = (), log: str = "step {step} loss {loss} time {s:.2f}s"):
        self.left_out, self.log_line = left_out, log
        self.random, self.t, self.step, self.loss = Random(3), 0.0, 100, "2.41"
        self.lines: list[dict[str, Any]] = []
        self.doing: dict[int, str] = dict.fromkeys(range(8), "trains")
        self.gone: set[int] = set()
        self.freed: set[int] = set()
        """Ranks whose GPU is empty."""
        self.job("RUNNING")

    def say(self, kind: str, **fields: Any) -> None:
        told = {name: value for name, value in fields.items() if f"{kind}.{name}" not in self.left_out}
        if kind not in self.left_out:
            self.lines.append({"t": round(self.t, 2), "kind": kind, **told})

    def job(self, state: str) -> None:
        self.say("job", job_id=JOB, state=state, nodes=list(NODES), restarts=0, name="llama", user="ada")

    def log(self, text: str) -> None:
        self.say("log", node=NODES[0], job_id=JOB, stream="stdout", line=text)

    def go_on(self, seconds: float, *, steps: bool = False) -> None:
        until = self.t + seconds
        while self.t < until:
            self.t += 5.0
            if steps and self.t % 10 == 0:
                self.step += 1
                self.log(
                    self.log_line.format(
                        step=self.step, loss=self.loss, s=10 * self.random.uniform(0.99, 1.01)
                    )
                )
            for node in NODES:
                self.say("report", node=node)
            for rank in range(8):
                self._rank(rank)

    def _rank(self, rank: int) -> None:
        state, cores, util, watts, clock = LOOKS[self.doing[rank]]
        node, pid = NODES[rank // PER_NODE], 41000 + rank
        if rank not in self.gone:
            self.say(
                "proc",
                node=node,
                job_id=JOB,
                rank=rank,
                pid=pid,
                state=state,
                cpu_s=round(cores * self.t + 50, 1),
            )
        held = rank not in self.freed
        self.say(
            "gpu", node=node, gpu=rank % PER_NODE, uuid=f"GPU-{rank}", util=util if held else 0, sm_clock_mhz=clock,
            power_w=watts + self.random.randint(-6, 6), mem_used_mib=520 if held else 2, pids=[pid] if held else [],
        )  # fmt: skip

    def told(self) -> list[Incident]:
        data = b"\n".join(json.dumps(line).encode() for line in self.lines)
        found = replay(io.BytesIO(data).read, Config(), numbered_ids()).incidents
        return [each for each in found if each.fired_at is not None and each.inhibited_by is None]


AUTHORS = {
    "every field": (),
    "no lists of processes": ("gpu.pids",),
    "no reports": ("report",),
    "no power": ("gpu.power_w",),
    "no nodes' clocks": ("gpu.sm_clock_mhz", "gpu.mem_used_mib"),
}


@pytest.mark.parametrize("author", AUTHORS)
def test_the_rank_that_sleeps_while_all_others_spin_is_found_and_its_gpu_named(author: str) -> None:
    trace = Trace(AUTHORS[author])
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 6: "sleeps"}
    trace.go_on(130)
    (found,) = trace.told()
    assert found.kind == "collective_hang"
    assert [(c.node, c.rank, c.gpu_uuid) for c in found.culprits] == [("gpu002", 6, "GPU-6")]


@pytest.mark.parametrize("listed", [True, False])
def test_a_process_that_keeps_its_card_after_the_end_of_its_job_is_an_orphan(listed: bool) -> None:
    trace = Trace()
    trace.go_on(100, steps=True)
    trace.job("COMPLETED")
    trace.doing = dict.fromkeys(range(8), "sleeps")
    trace.freed = set(range(8)) - {5}
    trace.gone = trace.freed | (set() if listed else {5})
    trace.go_on(150)
    (found,) = trace.told()
    assert found.kind == "orphan_gpu_process"
    assert [(c.node, c.pid, c.gpu_uuid) for c in found.culprits] == [("gpu002", 41005, "GPU-5")]


@pytest.mark.parametrize("log", ["step={step} loss={loss}", "step {step} loss {loss} time {s:.2f}s"])
def test_a_loss_that_becomes_nan_is_that_and_no_stall(log: str) -> None:
    trace = Trace(log=log)
    trace.go_on(200, steps=True)
    trace.loss = "nan"
    trace.go_on(200, steps=True)
    assert [each.kind for each in trace.told()] == ["loss_nan"]


@pytest.mark.parametrize("author", AUTHORS)
@pytest.mark.parametrize("doing", ["saves", "computes"])
def test_nobody_is_accused_while_rank_0_works_and_the_others_wait(author: str, doing: str) -> None:
    trace = Trace(AUTHORS[author])
    trace.go_on(300, steps=True)
    trace.doing = {**dict.fromkeys(range(8), "spins"), 0: doing}
    trace.go_on(600)
    trace.doing = dict.fromkeys(range(8), "trains")
    trace.go_on(60, steps=True)
    assert [(each.kind, each.summary) for each in trace.told()] == []


def test_a_job_that_ends_well_leaves_nobody_behind() -> None:
    trace = Trace()
    trace.go_on(200, steps=True)
    trace.job("COMPLETED")
    trace.gone = trace.freed = set(range(8))
    trace.go_on(150)
    assert trace.told() == []
