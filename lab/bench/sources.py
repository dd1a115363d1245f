"""What limits, pressure and links cost the agent beside all else: the CPU of a look, children included, by how often there
is one. 8 ranks, 12 ports of InfiniBand and 8 interfaces."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lab.bench.figures import Figures
from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.children.requests import ReadLinks
from slurm_watchdog.agent.collectors import link, usage
from slurm_watchdog.agent.collectors.link import links_in
from slurm_watchdog.agent.collectors.usage import read_usage
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import Process, Role
from tests.builders.links import INTERFACE, PORT, tree
from tests.builders.requests import tasks

RANKS, DESCRIPTORS, LOOKS = 8, 160, 25
APART_S = 0.2
"""Between two looks: the processor's caches have something else in them by then."""
RANK = "import os, sys; kept = [os.dup(0) for _ in range(int(sys.argv[1]))]; print(flush=True); sys.stdin.read()"


def run(figures: Figures) -> None:
    """All figures."""
    with ExitStack() as stack:
        ranks = [stack.enter_context(_rank()) for _ in range(RANKS)]
        processes = [
            Process(
                pid=each.pid, start_ticks=1, job_id="7", step_id="0", role=Role.RANK, rank=number, comm="python",
                state="S", uid=os.getuid(),
            )
            for number, each in enumerate(ranks)
        ]  # fmt: skip
        usage_ms = _cost_ms(lambda: read_usage(processes))
        for each in ranks:
            assert each.stdin is not None
            each.stdin.close()
    with tempfile.TemporaryDirectory() as name:
        places = {f"infiniband/mlx5_{n}/ports/1": PORT for n in range(12)} | {f"net/ib{n}": INTERFACE for n in range(8)}
        root = tree(Path(name), places)
        links_ms = _cost_ms(lambda: links_in(root)) + _child_ms_of_an_agent()
    figures.add("sources.usage_look", usage_ms, "ms")
    figures.add("sources.links_look", links_ms, "ms")
    together = 100 * (usage_ms / usage.EVERY_S + links_ms / link.EVERY_S) / 1000
    figures.add("sources.cpu", together, "% of a core", at_most=0.01)


def _rank() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", RANK, str(DESCRIPTORS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _cost_ms(look: Callable[[], object]) -> float:
    look()
    used_s = 0.0
    for _ in range(LOOKS):
        time.sleep(APART_S)
        began = time.process_time()
        look()
        used_s += time.process_time() - began
    return 1000 * used_s / LOOKS


def _child_ms_of_an_agent() -> float:
    """`child_ms` in a process that has imported what an agent has: what a fork costs depends on how large it is, and
    that of all benchmarks is three times as large."""
    done = subprocess.run(
        [sys.executable, "-m", "lab.bench.sources"], stdout=subprocess.PIPE, start_new_session=True, check=True,
        text=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return float(done.stdout)


def child_ms() -> float:
    """A child for one question, which is started for it and ended: of all processes of it, this one included."""
    pool = Children(tasks("read_links"))
    answers: list[object] = []

    def ask() -> None:
        number = pool.ask("links", ReadLinks(), 20.0, clock.monotonic(), answers.append, idle_s=0.0)
        while number is None or not answers:
            pool.settle(0.5, [] if number is None else [number])
            pool.poll(clock.monotonic())
        answers.clear()

    ask()
    began_s = _group_s()
    for _ in range(LOOKS):
        time.sleep(APART_S)
        pool.poll(clock.monotonic())
        ask()
    used_s = _group_s() - began_s
    pool.close()
    return 1000 * used_s / LOOKS


def _group_s() -> float:
    """CPU time of this process group, and of its children that have ended (utime to cstime of proc(5))."""
    ticks = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == os.getpgrp():
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    importlib.import_module("slurm_watchdog.agent.service")
    print(child_ms())
