"""Which jobs measure which nodes, and what each of them asks a node. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from slurm_watchdog.base.structs import Struct

JOB_NAME: Final = "slurm-watchdog-test"
NICE: Final = 10_000
"""Above what users give each other, so that a test waits behind every other job of its partition."""
PHASES: Final = ("state", "cpu", "memory", "disk", "mount", "gpu", "site_check", "network")
"""Which parts there are, in the order in which they are done; `state` is always done."""
START_S: Final = 30.0
"""For prolog, launch and interpreter, within a job's limit."""
REPEATS: Final = 3
"""As repeat.MORE: how often a disturbed measurement is done again."""

MOST_GPUS: Final = 16
"""Of a node, for which a phase's limit suffices."""
NCCL_S: Final = 60.0
"""For an all-reduce of nccl-tests: seconds of work, and the start of CUDA and NCCL on 16 GPUs (a judgement)."""
DCGM_S: Final = 60.0
"""For `dcgmi diag -r 1`, which "normally lasts seconds" (NVIDIA's reference of dcgmi diag)."""


class Wanted(Struct, frozen=True, kw_only=True):
    """What is to be measured."""

    phases: frozenset[str] = frozenset(PHASES)
    seconds: float = 2.0
    """Of each figure."""
    local_directories: tuple[str, ...] = ("/tmp",)
    shared_directories: tuple[str, ...] = ()
    interface: str = ""
    """Of the fabric; empty: the one by which the nodes' addresses are reached."""
    gpu_python: str = ""
    """An interpreter with torch."""
    site_command: str = ""
    site_limit_s: float = 60.0
    tools: bool = True
    """iperf3, fio, dcgmi and nccl-tests do their part where they are installed."""


class NodeJob(NamedTuple):
    """One job: its nodes, what is asked of each, its limit in minutes, and how long it may wait for its nodes (None: as
    long as the others)."""

    nodes: tuple[str, ...]
    question: Mapping[str, Any]
    minutes: int
    partition: str = ""
    wait_s: float | None = None


def node_job(node: str, wanted: Wanted, partition: str = "") -> NodeJob:
    """Measures one node by itself."""
    seconds, found = wanted.seconds, list[dict[str, Any]]()

    def ask(phase: str, limit_s: float, **more: object) -> None:
        if phase in wanted.phases or phase.partition("_")[0] in wanted.phases:
            found.append({"phase": phase, "limit_s": limit_s, "seconds": seconds, **more})

    def by_fio(part: str, directory: str) -> None:
        if part in wanted.phases and wanted.tools:
            limit_s = 2 * seconds + 30.0
            about = {"name": part, "directory": directory, "subject": directory}
            found.append({"phase": "fio", "limit_s": limit_s, "seconds": seconds, **about})

    found.append({"phase": "state", "limit_s": 10.0, "interface": wanted.interface})
    ask("gpu_health", 20.0, subject="before")
    if wanted.tools:
        ask("gpu_dcgm", DCGM_S + 15.0, dcgm_s=DCGM_S)
    ask("cpu", 2 * REPEATS * seconds + 30.0)
    ask("memory", 2 * REPEATS * seconds + 40.0)
    for directory in wanted.local_directories:
        ask("disk", 3 * seconds + 30.0, directory=directory, subject=directory)
        by_fio("disk", directory)
    for directory in wanted.shared_directories:
        ask("mount", 4 * seconds + 30.0, directory=directory, subject=directory)
        by_fio("mount", directory)
    if wanted.gpu_python:
        ask("gpu_rate", MOST_GPUS * (4 * seconds + 8.0) + 60.0, python=wanted.gpu_python)
    if wanted.tools:
        ask("gpu_nccl", NCCL_S + 30.0, nccl_s=NCCL_S)
    ask("gpu_health", 20.0, subject="after")
    if wanted.site_command:
        ask("site_check", wanted.site_limit_s, command=wanted.site_command)
    return NodeJob((node,), {"phases": found}, minutes_of(found), partition)


def pair_job(pair: tuple[str, str], address: str, token: str, wanted: Wanted, partition: str = "") -> NodeJob:
    """Measures the way between two nodes: the first one listens at `address`, the second one connects."""
    phase = {
        "phase": "pair", "limit_s": 4 * wanted.seconds + 30.0, "seconds": wanted.seconds, "listener": pair[0],
        "address": address, "token": token, "interface": wanted.interface, "iperf3": wanted.tools,
    }  # fmt: skip
    return NodeJob(pair, {"phases": [phase]}, minutes_of([phase]), partition)


def minutes_of(phases: Sequence[Mapping[str, Any]]) -> int:
    """Limit of a job with these phases."""
    total_s = sum(float(each["limit_s"]) for each in phases)
    return math.ceil((START_S + total_s) / 60.0)


class Placement(Struct, frozen=True, kw_only=True):
    """Options of every test job, beside its nodes."""

    comment: str
    """Whose it is."""
    account: str = ""
    reservation: str = ""
    after: str = ""
    """A job that has to end first."""


def job_options(job: NodeJob, placement: Placement) -> list[str]:
    """For sbatch and salloc alike: exclusive with all memory of the nodes (--exclusive alone leaves the default of the
    partition), low priority, bounded, never requeued."""
    given = {
        "--partition": job.partition, "--account": placement.account, "--reservation": placement.reservation,
        "--dependency": f"afterany:{placement.after}" if placement.after else "",
    }  # fmt: skip
    return [
        f"--job-name={JOB_NAME}", f"--comment={placement.comment}", "--exclusive", "--mem=0",
        f"--nice={NICE}",
        f"--nodes={len(job.nodes)}", f"--ntasks={len(job.nodes)}", "--ntasks-per-node=1",
        f"--nodelist={','.join(job.nodes)}", f"--time={job.minutes}",
        *(f"{name}={value}" for name, value in given.items() if value),
    ]  # fmt: skip
