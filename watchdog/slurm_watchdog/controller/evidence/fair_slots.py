"""A few places for work that takes a while, shared among users: one who wants a hundred of them keeps nobody
waiting for his own."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """`places` at once, at most `most_of_one` of them one user's. Users who wait take turns. One event loop owns it."""

    def __init__(self, places: int, most_of_one: int):
        self._places, self._most_of_one = places, most_of_one
        self._held: Counter[int] = Counter()
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()
        """User -> those that wait, the first first. The user who was served last comes last."""
        self._newest: int | None = None
        """Whose turn it was last."""

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
