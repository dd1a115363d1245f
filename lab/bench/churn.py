"""Jobs of short processes: 20 nodes on which 128 end and 128 others begin between two reports, through the
controller's own door.

The clock is simulated, so that an hour takes minutes. What is kept of processes that have ended has a bound:
memory and the time of a round have to level off.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from pathlib import Path

from lab.bench.figures import Figures, quantile, say
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_report
from tests.behaviour.cluster import Job
from tests.builders.views import process
from tests.fuzz.place import STEP_S, Place

NODES, PROCESSES = 20, 128
JOB = "9"
INTERVAL_S = 5.0
WARM_UP_SHARE = 0.25
MAX_TIME_RATIO = 1.3
MAX_GROWTH_MIB = 4.0
"""From the first quarter's end to the end; other load moves times by a quarter."""
FIRST_PID = 100


def run(figures: Figures, minutes: float) -> None:
    """So many simulated minutes."""
    rounds = max(8, round(60 * minutes / INTERVAL_S))
    with tempfile.TemporaryDirectory(prefix="slurm-watchdog-bench-") as directory:
        spent_ms, grown_mib, kept = asyncio.run(_rounds(f"{directory}/journal.db", rounds))
    begin = int(rounds * WARM_UP_SHARE)
    size = max(1, (rounds - begin) // 4)
    early, late = (quantile(each, 0.5) for each in (spent_ms[begin : begin + size], spent_ms[rounds - size :]))
    say(f"{rounds} rounds of {NODES} nodes x {PROCESSES} processes, none of which lives for two")
    figures.add("churn.round_cpu_early_ms", early, "ms")
    figures.add("churn.round_cpu_late_ms", late, "ms")
    figures.add("churn.round_cpu_ratio", late / early, "1", at_most=MAX_TIME_RATIO)
    figures.add("churn.kept_processes", kept, "1")
    figures.add("churn.rss_growth_mib", grown_mib, "MiB", at_most=MAX_GROWTH_MIB)
    figures.add("load_average", os.getloadavg()[0], "1")


async def _rounds(journal: str, rounds: int) -> tuple[list[float], float, int]:
    """CPU time of each round, in ms; MiB gained after the warm-up; processes of the job that are remembered
    in the end."""
    place = Place(journal)
    names = [f"c{number:02}" for number in range(NODES)]
    others = tuple(place.cluster.nodes)  # the place's own, with jobs of their own
    place.cluster.add_nodes(*names)
    place.cluster.jobs[JOB] = Job(JOB, wants=NODES, excluded=others)
    spent_ms: list[float] = []
    settled_mib = 0.0
    with place.time():
        await place.open()
        for number in range(rounds):
            if number == int(rounds * WARM_UP_SHARE):
                settled_mib = _rss_mib()
            bodies = [_body(name, number) for name in names]
            began = time.process_time()
            for body in bodies:
                await place.give("churn", body)
            for _ in range(round(INTERVAL_S - NODES * STEP_S)):
                place.now += 1.0  # a controller whose clock jumps believes that it was stalled
                await place.judge()
            spent_ms.append(1000 * (time.process_time() - began))
        grown_mib = _rss_mib() - settled_mib
        kept = len(place.controller.state.runs._runs[JOB].processes)
        await place.close()
    return spent_ms, grown_mib, kept


def _body(node: str, number: int) -> bytes:
    """A report in which every process but the rank is a new one."""
    first = FIRST_PID + number * PROCESSES
    rows = [
        process(pid=first + each, start_ticks=first + each, job_id=JOB, role=Role.WORKER, rank=None, comm="cc1")
        for each in range(PROCESSES)
    ]
    rank = process(pid=2, start_ticks=2, job_id=JOB, role=Role.RANK, rank=int(node[1:]))
    return encode_report(
        Report(
            node=node,
            boot_id=node,
            agent_id=node,
            sequence=number + 1,
            interval_s=INTERVAL_S,
            agent_version="0",
            processes=(rank, *rows),
        )
    )


def _rss_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2
