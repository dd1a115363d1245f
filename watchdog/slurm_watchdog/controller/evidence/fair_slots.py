"""Which collections of evidence run, or were over lately; and a few places for work that takes a while, shared among
users: one who wants a hundred of them keeps no one waiting for his own."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slurm_watchdog.controller.state.evidence_collection import Collected
from slurm_watchdog.model.slurm import SlurmJob


class FairSlots:
    """`places` at once, at most `most_of_one` of them one user's. Users who wait take turns. One event loop owns it."""

    def __init__(self, places: int, most_of_one: int):
        self._places, self._most_of_one = places, most_of_one
        self._held: Counter[int] = Counter()
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()
        """User -> those that wait, the first first. The user who was served last comes last."""
        self._newest: int | None = None  # Whose turn it was last.

    @asynccontextmanager
    async def of(self, uid: int) -> AsyncIterator[None]:
        """Waits for a place of this user's, and gives it back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(uid)
            raise
        try:
            yield
        finally:
            self._give_back(uid)

    def _give_back(self, uid: int) -> None:
        self._held[uid] -= 1
        self._held += Counter()  # without users who hold none
        self._serve()

    def _serve(self) -> None:
        """Gives free places to those who wait."""
        while self._held.total() < self._places:
            able = [uid for uid in self._waiting if self._held[uid] < self._most_of_one]
            if not able:
                return
            uid = self._newest = next((uid for uid in able if uid != self._newest), able[0])
            mine = self._waiting[uid]
            turn = mine.popleft()
            if mine:
                self._waiting.move_to_end(uid)
            else:
                del self._waiting[uid]
            if not turn.done():
                self._held[uid] += 1
                turn.set_result(None)


class KnownCollections:
    """Knows every one that runs, and the newest of those that are over. One event loop owns it."""

    def __init__(self, finished_kept: int):
        """`finished_kept`: so many of those that are over are remembered."""
        self._finished_kept = finished_kept
        self._by_id: dict[str, Collected] = {}
        self._of_run: dict[tuple[str, int], list[Collected]] = {}
        """(job, restarts) -> those of this run, the newest last."""
        self._over: deque[Collected] = deque()  # Those that are over, the newest last.

    def add(self, found: Collected) -> None:
        """One that begins."""
        self._by_id[found.id] = found
        self._of_run.setdefault(found.key, []).append(found)

    def get(self, collection_id: str) -> Collected | None:
        """The one with this id, if it is known still."""
        return self._by_id.get(collection_id)

    def of(self, job: SlurmJob) -> list[Collected]:
        """Those of this run of the job, the newest first."""
        return self._of_run.get((job.job_id, job.restarts), [])[::-1]

    def is_over(self, found: Collected) -> None:
        """Forgets the oldest of those that are over; one that runs is someone's answer."""
        self._over.append(found)
        while len(self._over) > self._finished_kept:
            oldest = self._over.popleft()
            del self._by_id[oldest.id]
            left = [each for each in self._of_run[oldest.key] if each is not oldest]
            if left:
                self._of_run[oldest.key] = left
            else:
                del self._of_run[oldest.key]
