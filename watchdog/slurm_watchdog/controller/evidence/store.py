"""Writes evidence into the journal: within each user's share of a day, compressed, and removed when it has expired."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.redact import masked
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.evidence.collection import Collected
from slurm_watchdog.journal.evidence import pack
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.wire.rate_limits import TokenBuckets

DAY_S = 86_400.0


class EvidenceShare:
    """Of a day: `most_bytes` of all evidence, a quarter of it one user's. A controller that starts begins a new one."""

    def __init__(self, most_bytes: int):
        self._whole = TokenBuckets(most_bytes, most_bytes / DAY_S)
        self._of_user = TokenBuckets(most_bytes // 4, most_bytes / 4 / DAY_S)

    def acquire(self, uid: int, size: int, now: float) -> str | None:
        """Counts `size` bytes of a job of `uid`; why they are not to be kept, else None. `now` is monotonic."""
        if self._of_user.left(str(uid), now) < size:
            return f"the evidence of uid {uid} has used up its share (a quarter of controller.evidence_per_day)"
        if not self._whole.acquire("", now, size):
            return "all evidence has used up its share of a day (controller.evidence_per_day)"
        self._of_user.acquire(str(uid), now, size)
        return None


MAX_COLLECTION_BYTES = 96 << 20  # Of one collection in the journal, packed; more is judged and not kept.
LARGE_BYTES = 1 << 20  # A document of this size is compressed in a thread.
PRUNE_EVERY_S = 3600.0
REMEMBERED_INCIDENTS = 64  # Of which it is known that their timeline has the note that evidence was not kept.


class EvidenceStore:
    """Where evidence of all incidents is kept. One event loop owns it."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        writer: JournalWriter,
        left_out: LeftOut,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ):
        """`left_out` counts what is not kept; `spawn` runs what takes a while as a task."""
        self._journal, self._writer, self._left_out, self._spawn = journal, writer, left_out, spawn
        self._keep_s = config.controller.evidence_keep
        self._share = EvidenceShare(config.controller.evidence_per_day)
        self._noted: deque[str] = deque(maxlen=REMEMBERED_INCIDENTS)
        self._pruned = float("-inf")

    def keep(self, found: Collected, kind: str, packed: str) -> None:
        """One packed document of a collection, with the incident that the collection is stored with, if any."""
        incident_id = found.incident_id
        if incident_id is None:
            return
        too_large = kind == "node" and found.kept_bytes + len(packed) > MAX_COLLECTION_BYTES
        if too_large or not self._has_share(incident_id, found.job, len(packed), needed=kind == "diagnosis"):
            found.not_kept += 1
            return
        found.kept_bytes += len(packed)
        if not self._add(incident_id, clock.wall(), kind, packed, found.id):
            found.lost = True

    def keep_view(self, incident: Incident, view: JobView) -> None:
        """What the controller itself knows of a job, with its incident."""
        # Its paths, comment and script are used as they are; what is kept is for people.
        document = msgspec.json.encode(replace(view, job=masked(view.job)))
        at = clock.wall()
        if len(document) < LARGE_BYTES:
            self._keep_job(incident.id, view.job, at, pack(document))
        else:
            self._spawn(self._keep_large(incident.id, view.job, at, document))

    async def _keep_large(self, incident_id: str, job: SlurmJob, at: float, document: bytes) -> None:
        self._keep_job(incident_id, job, at, await asyncio.to_thread(pack, document))

    def _keep_job(self, incident_id: str, job: SlurmJob, at: float, packed: str) -> None:
        if self._has_share(incident_id, job, len(packed)):
            self._add(incident_id, at, "job", packed)

    def _add(self, incident_id: str, at: float, kind: str, packed: str, collection: str | None = None) -> bool:
        return self._writer.write(lambda: self._journal.evidence.add(incident_id, at, kind, packed, collection))

    def _has_share(self, incident_id: str, job: SlurmJob, size: int, *, needed: bool = False) -> bool:
        """Whether so many bytes more of this job's evidence are kept; what is `needed` (a diagnosis) is, and
        counts. That its share is used up is noted once for each incident."""
        why = self._share.acquire(job.uid, size, clock.monotonic())
        if why is None or needed:
            return True
        self._left_out.note("evidence", f"job {job.job_id}", uid=job.uid)
        if incident_id not in self._noted:
            self._noted.append(incident_id)
            self._writer.write(
                lambda: self._journal.add_note(incident_id, clock.wall(), f"evidence is not kept: {why}")
            )
        return False

    def prune(self, now: float) -> None:
        """Once an hour, removes evidence that has expired."""
        if now - self._pruned >= PRUNE_EVERY_S:
            self._pruned = now
            self._writer.write(lambda: self._journal.evidence.forget(clock.wall() - self._keep_s))
