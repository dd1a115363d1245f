"""Where jobs hung before: told with the next hang in the same place; and whether it is the job and not its nodes. Pure:
the journal keeps what is in here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from slurm_watchdog.base.redact import mask_words
from slurm_watchdog.base.text import duration, ordinal
from slurm_watchdog.diagnose.stacks.places import RankPlace, locate
from slurm_watchdog.diagnose.stacks.waiting import frames_key
from slurm_watchdog.model.cluster_view import ClusterView, JobView, StackSnapshot
from slurm_watchdog.model.incidents import Culprit, HangPlace, Incident
from slurm_watchdog.model.observations import Role

MOST = 5000  # The newest: a cluster with fifty hangs a day has three months of them.
REMEMBERED_S = 90 * 86400.0  # A program changes within a quarter of a year: the same function is another matter.
HELD_AT = 3  # So many at the same step in the same place, on several nodes, are the program's or its data's.
SAME_STEP = 1  # A last line that was not read yet.
FRAMES = 30  # From the innermost on: what is further out is how the program was started.


class HangMemory:
    """`Judge` owns it."""

    def __init__(self, known: Iterable[HangPlace] = ()):
        """`known`: those that the journal has."""
        self._known = {each.incident_id: each for each in sorted(known, key=lambda each: each.at)}
        self._said = {key: said for key, each in self._known.items() if (said := self._said_of(each))}
        """Incident -> the sentence that it is a repeat."""

    def note(self, incident: Incident, view: ClusterView, wall: float) -> str | None:
        """An incident has begun to fire: where its job hangs is kept, if stacks show it. Returns the sentence that it
        is a repeat; None if it is not, or no one knows."""
        job = next((each for each in view.jobs if each.job.job_id in incident.jobs_now), None)
        if job is None or incident.id in self._known:
            return self._said.get(incident.id)
        found = hang_place(incident, job, f"{job.job.uid}/{job.job.name}", wall)
        if found is None:
            return None
        self._known[incident.id] = found
        said = self._said_of(found)
        if said is not None:
            self._said[incident.id] = said
        self._forget(wall)
        return said

    def place(self, incident_id: str) -> HangPlace | None:
        """Where this incident's job hangs, as it was kept."""
        return self._known.get(incident_id)

    def said(self, incident_id: str | None) -> tuple[str, ...]:
        """The sentence that an open incident is a repeat, if it is."""
        said = self._said.get(incident_id or "")
        return () if said is None else (said,)

    def _alike(self, this: HangPlace) -> list[HangPlace]:
        """Earlier hangs of the same user in the same place, the newest first."""
        owner = this.chain.partition("/")[0]
        found = [
            each
            for each in self._known.values()
            if each.fingerprint == this.fingerprint
            and each.incident_id != this.incident_id
            and each.chain.partition("/")[0] == owner
            and 0 <= this.at - each.at <= REMEMBERED_S
        ]
        return sorted(found, key=lambda each: -each.at)

    def _said_of(self, this: HangPlace) -> str | None:
        """The sentence that a hang is a repeat; None if none was alike."""
        before = self._alike(this)
        if not before:
            return None
        last = before[0]
        at_step = f", after step {last.step}" if last.step is not None else ""
        who = f", rank {last.rank} on {last.node}" if last.node else ""
        more = f"; {len(before)} times in all before" if len(before) > 1 else ""
        return (
            f"it hangs in the same place as incident {last.incident_id}, {duration(this.at - last.at)} ago "
            f"(job {last.job_id}{who}{at_step}): {this.where}{more}"
        )

    def why_held(self, incident_id: str) -> str | None:
        """Why a restart for this incident would end in the same place again, a sentence; None if that is not known. The
        same frames at the same step, of one job or chain of jobs, for the third time, and on more than one node."""
        this = self._known.get(incident_id)
        if this is None or this.step is None or not this.node:
            return None
        alike = [each for each in self._alike(this) if each.chain == this.chain and each.node and each.step is not None]
        same = [each for each in alike if abs((each.step or 0) - this.step) <= SAME_STEP]
        nodes = {this.node, *(each.node for each in same)}
        if len(same) + 1 < HELD_AT or len(nodes) < 2:
            return None
        incidents = ", ".join(each.incident_id for each in same[:4])
        where = f"in {this.where}, on {len(nodes)} nodes ({', '.join(sorted(nodes)[:4])})"
        return (
            f"the job hangs for the {ordinal(len(same) + 1)} time after step {this.step} {where}: it is its program or "
            f"its data, and another restart would hang there again (incidents {incidents})"
        )

    def _forget(self, wall: float) -> None:
        old = [key for key, each in self._known.items() if each.at < wall - REMEMBERED_S]
        for key in (*old, *list(self._known)[: max(0, len(self._known) - MOST)]):
            self._known.pop(key, None)
            self._said.pop(key, None)


def hang_place(incident: Incident, view: JobView, chain: str, at: float) -> HangPlace | None:
    """Where the job of `view` hangs, by its newest dump; None where no stack shows it."""
    dump = _newest(view)
    if dump is None:
        return None
    ranks = [locate(each) for each in dump.stacks if each.role is Role.RANK and each.error is None]
    culprit = next((each for each in incident.culprits if each.pid is not None), None)
    stands = _place_of(culprit, ranks)
    if stands is None or not stands.frames:
        return None
    frames = frames_key(stands)[:FRAMES]
    return HangPlace(
        incident_id=incident.id,
        at=at,
        job_id=view.job.job_id,
        chain=chain,
        fingerprint=hashlib.sha256("\n".join(frames).encode("utf-8", "surrogatepass")).hexdigest()[:16],
        where=mask_words(frames[0])[:200],
        node="" if culprit is None else stands.node,
        rank=None if culprit is None else stands.rank,
        step=None if view.progress is None else view.progress.known_step,
    )


def _newest(view: JobView) -> StackSnapshot | None:
    dumps = (*view.snapshots[-1:], *(view.row.snapshots[-1:] if view.row is not None else ()))
    return min(dumps, key=lambda each: each.age_s, default=None)


def _place_of(culprit: Culprit | None, ranks: Sequence[RankPlace]) -> RankPlace | None:
    """Of the culprit; without one, of all: only if they stand in the same frames."""
    if culprit is not None:
        return next((each for each in ranks if (each.node, each.pid) == (culprit.node, culprit.pid)), None)
    alike = {frames_key(each) for each in ranks}
    return ranks[0] if len(alike) == 1 else None
