"""The stacks of a recording, put together to dumps of whole jobs again, as the controller had them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.replay.slurm import SlurmListing
from slurm_watchdog.trace.records import ParseStats, Stack

DUMP_DEADLINE_S = 25.0
"""Stacks that have not come by then are missing from their dump: the controller waits as long
(evidence.DUMP_DEADLINE_S)."""


@dataclass
class _Dump:
    begun_at: float
    stacks: dict[str, list[ProcessStack]] = field(default_factory=dict)
    """By node."""
    wanted: dict[str, int] = field(default_factory=dict)


@dataclass
class StackDumps:
    """Those that are not whole yet, by what agents call the job."""

    tally: ParseStats
    state: ClusterState
    listing: SlurmListing
    _open: dict[str, _Dump] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._open)

    def add_stack(self, record: Stack, now: float) -> None:
        """One process's stacks."""
        try:
            stack = msgspec.convert(record.stack, ProcessStack)
        except msgspec.ValidationError:
            self.tally.ignore("a stack that is none of ours")
            return
        job_id, name = str(record.job_id), record.node
        dump = self._open.get(job_id)
        if dump is not None and len(dump.stacks.get(name, ())) >= dump.wanted.get(name, record.of):
            self._end(job_id, now)  # this node is in the next one already
            dump = None
        if dump is None:
            dump = self._open[job_id] = _Dump(now)
        dump.wanted[name] = record.of
        dump.stacks.setdefault(name, []).append(stack)

    def end_those_due(self, now: float) -> None:
        """Hands over the dumps that are whole, or have waited long enough."""
        for job_id in list(self._due(now)):
            self._end(job_id, min(now, self._open[job_id].begun_at + DUMP_DEADLINE_S))

    def _due(self, now: float) -> Iterator[str]:
        for job_id, dump in self._open.items():
            job = self.listing.running(job_id)
            whole = job is not None and all(
                len(dump.stacks.get(name, ())) >= dump.wanted.get(name, 1) for name in job.nodes
            )
            if whole or now - dump.begun_at >= DUMP_DEADLINE_S:
                yield job_id

    def _end(self, process_job_id: str, now: float) -> None:
        dump, job = self._open.pop(process_job_id), self.listing.running(process_job_id)
        if job is not None:
            stacks = tuple(stack for name in sorted(dump.stacks) for stack in dump.stacks[name])
            silent = tuple(name for name in job.nodes if name not in dump.stacks)
            self.state.runs.add_snapshot(job.job_id, job.restarts, stacks, silent, now)
