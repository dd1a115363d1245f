"""What ranks recorded of their collectives, of 1,024 ranks in 129 communicators: from 1,024 dumps, and from records that
the nodes have read already; and from the answer of NCCL's RAS."""

from __future__ import annotations

import gc
import json
import pickle
import time
from typing import Any

from lab.bench.figures import Figures
from slurm_watchdog.analysis.collective_order import order_of
from slurm_watchdog.analysis.ras_records import JobProcesses, ras_records
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
from slurm_watchdog.parse.nccl_ras import parse_ras

RANKS, ENTRIES, ABSENT = 1024, 100, 341
LONG_ENTRIES = 2000
"""As docs recommend for TORCH_FR_BUFFER_SIZE."""

STACKS = [[{"name": f"f{n}", "filename": f"/opt/m{n}.py", "line": each} for n in range(12)] for each in range(8)]
"""Of eight places in a training loop: a dump has each stack once, as real ones do."""


def run(figures: Figures) -> None:
    """All figures."""
    gc.disable()  # as the command does
    bodies = [_dump(rank, ENTRIES) for rank in range(RANKS)]
    began = time.process_time()
    records = [parse_flight_recorder(body, rank) for rank, body in enumerate(bodies)]
    read_s = time.process_time() - began
    found = order_of(records)
    all_s = time.process_time() - began
    assert [each.rank for each in found.odd] == [ABSENT], found
    figures.add("collectives.1024_dumps", all_s, "s", at_most=2.0)
    figures.add("collectives.1024_records", all_s - read_s, "s", at_most=0.2)
    long = _dump(0, LONG_ENTRIES)
    began = time.process_time()
    parse_flight_recorder(long, 0)
    figures.add("collectives.dump_of_2000_entries", time.process_time() - began, "s", at_most=0.5)
    answer = _answer()
    nodes = {f"10.0.0.{node}": f"n{node}" for node in range(RANKS // 8)}
    processes = JobProcesses({rank: (f"n{rank // 8}", 100 + rank % 8) for rank in range(RANKS)}, nodes)
    began = time.process_time()
    found = order_of(ras_records(parse_ras(answer), processes))
    figures.add("collectives.1024_ranks_of_ras", time.process_time() - began, "s", at_most=2.0)
    assert [each.rank for each in found.odd] == [ABSENT], found
    gc.enable()


def _answer() -> bytes:
    """As NCCL 2.28 writes it, of containers with the same pids on each of 128 nodes."""
    groups = [range(RANKS), *(range(first, first + 8) for first in range(0, RANKS, 8))]
    return json.dumps({"nccl_version": "2.28.9", "communicators": [
        {"hash": f"0x{number:x}", "secondary_hash": "0x1:0x2", "size": len(group), "ranks": [
            {
                "rank": own, "host": f"10.0.0.{rank // 8}", "pid": 100 + rank % 8, "cuda_dev": 0, "nvml_dev": 0,
                "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False},
                "collective_counts": {"Broadcast": 3, "Reduce": 0, "AllGather": 70, "ReduceScatter": 70, "AllReduce": 61 - (rank == ABSENT and len(group) == RANKS)},
            }
            for own, rank in enumerate(group)
        ]}
        for number, group in enumerate(groups)
    ]}).encode()  # fmt: skip


def _dump(rank: int, entries: int) -> bytes:
    """As PyTorch writes one with NCCL: tensor parallel by eight, data parallel by all, twelve frames an entry."""
    tensor = rank // 8 * 8
    made = [_entry(index, ("0", "default_pg") if index % 2 else (f"t{tensor}", "tp")) for index in range(entries)]
    if rank != ABSENT:
        made.append(_entry(entries + 1, ("0", "default_pg"), record_id=entries, state="started", retired=False))
    groups = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))},
        f"t{tensor}": {"name": "t", "desc": "tp", "ranks": str(list(range(tensor, tensor + 8)))},
    }
    return pickle.dumps({"version": "2.10", "entries": made, "pg_config": groups, "pg_status": {}}, protocol=2)


def _entry(number: int, group: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {
        "frames": STACKS[number % len(STACKS)], "record_id": number, "pg_id": len(group[0]), "process_group": group, "is_p2p": False,
        "collective_seq_id": 1000 + number // 2, "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce",
        "time_created_ns": 10**18 + number, "input_sizes": [[8, 1024]], "output_sizes": [[8, 1024]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "completed", "retired": True,
        "time_discovered_started_ns": 1, "time_discovered_completed_ns": 2, "timeout_ms": 600_000,
    } | more  # fmt: skip
