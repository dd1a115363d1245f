"""Runs the phases that a node is asked for, each in a child process with a limit, and prints one line of JSON at the
beginning and at the end of each. Standard library only.

A phase that does not end in time is a result (`late`): its child is killed and left behind, and the next phase begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any

from slurm_watchdog.base import clock
from slurm_watchdog.nodetest.probes import (
    cores,
    disk,
    fio,
    gpu_dcgm,
    gpu_health,
    gpu_nccl,
    gpu_rate,
    pair,
    site_check,
    state,
)

MARK = "slurm-watchdog-test "
"""Begins each of our lines: a prolog or the site's script may print, too."""
MEASURES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "state": state.measure_state,
    "cpu": cores.measure_cpu,
    "memory": cores.measure_memory,
    "disk": disk.measure_local,
    "mount": disk.measure_shared,
    "pair": pair.measure_pair,
    "fio": fio.measure_fio,
    "gpu_dcgm": gpu_dcgm.measure_gpu_dcgm,
    "gpu_health": gpu_health.measure_gpu_health,
    "gpu_nccl": gpu_nccl.measure_gpu_nccl,
    "gpu_rate": gpu_rate.measure_gpu_rate,
    "site_check": site_check.measure_site_check,
}
"""By name. Each is given what was asked and returns {"figures": {name: [median, spread, repetitions, disturbed]},
"facts": {…}}, or raises OSError or ValueError."""
AFTER_OTHERS = frozenset({"fio"})
"""Phases that are not begun where an earlier one about the same directory hangs: they would take their limit, too."""
MOST = 1 << 20
"""Bytes of one phase's answer."""


def main(question: str) -> None:
    """Answers {"phases": [{"phase": …, "limit_s": …, …}], "pair": {…}?} and ends the process, whatever hangs."""
    asked = json.loads(question)
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    job = os.environ.get("SLURM_JOB_ID", "")
    with contextlib.suppress(OSError):  # Slurm binds a task that asks for nothing to one core; its cpuset stays
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    hung = set()
    for phase in asked["phases"]:
        if phase["phase"] == "pair":
            phase["listens"] = node == phase["listener"]
        about = {"node": node, "job": job, "phase": phase["phase"], "subject": phase.get("subject", "")}
        say({**about, "state": "begun", "at": clock.wall()})
        began = clock.monotonic()
        if phase["phase"] in AFTER_OTHERS and phase.get("subject") in hung:
            found = {"state": "ok", "facts": {"skipped": "the phase before it hangs there"}}
        else:
            found = measured(phase)
        if found["state"] == "late":
            hung.add(phase.get("subject"))
        say({**about, **found, "at": clock.wall(), "took_s": round(clock.monotonic() - began, 3)})
    say({"node": node, "job": job, "phase": "end", "subject": "", "state": "ok", "at": clock.wall()})
    os._exit(0)


def say(line: dict[str, Any]) -> None:
    """One line, in one write."""
    os.write(1, f"{MARK}{json.dumps(line)}\n".encode())


def measured(phase: dict[str, Any]) -> dict[str, Any]:
    """State (`ok`, `late`, `failed`) and what the phase found, from a child in a process group of its own."""
    back, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(back)
        os.setsid()
        _answer(phase, there)
    os.close(there)
    answer, until, ended = b"", clock.monotonic() + phase["limit_s"], False
    while not ended and (left := until - clock.monotonic()) > 0 and len(answer) < MOST:
        if select.select([back], [], [], left)[0]:
            part = os.read(back, 65_536)
            answer, ended = answer + part, not part
    os.close(back)
    for target in (os.killpg, os.kill):
        try:
            target(pid, signal.SIGKILL)
        except OSError:
            pass  # it has ended
    if ended:
        os.waitpid(pid, 0)
    if not ended:
        return {"state": "late", "said": f"no end within {phase['limit_s']:g} s"}
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        return {"state": "failed", "said": "the measurement died"}
    return found


def _answer(phase: dict[str, Any], there: int) -> None:
    """In the child: measures, writes the answer, and does not return."""
    try:
        found = {"state": "ok", **MEASURES[phase["phase"]](phase)}
    except Exception as error:  # noqa: BLE001 - whatever a node does wrong is its result
        found = {"state": "failed", "said": f"{type(error).__name__}: {error}"[:500]}
    try:
        os.write(there, json.dumps(found).encode())
    finally:
        os._exit(0)
