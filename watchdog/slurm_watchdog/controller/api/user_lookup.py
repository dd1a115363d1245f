"""Users as this machine's name service knows them, looked up in threads: it may be a directory on the network, and
hang. No request holds up another, nor the controller's loop."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.controller.policy.access import Person

KEPT_S: Final = 60.0
"""A user's number, name and groups are looked up again after this time."""
MAX_KEPT: Final = 256
LOOKUP_S: Final = 5.0
"""Half of the time that a command waits for its answer (slurm_watchdog.cli.client)."""
LOOKUPS: Final = 2
"""At once, in threads of this alone: those that hang hold up nobody who reads Slurm."""


def person_called(name: str) -> Person:
    """A user with his groups. Raises KeyError."""
    found = pwd.getpwnam(name)
    return Person(found.pw_uid, frozenset(os.getgrouplist(name, found.pw_gid)), name=found.pw_name)


def person_numbered(uid: int) -> Person:
    """A user with his groups. Raises KeyError."""
    found = pwd.getpwuid(uid)
    return Person(uid, frozenset(os.getgrouplist(found.pw_name, found.pw_gid)), name=found.pw_name)


def name_of(uid: int) -> Person:
    """A user without his groups. Raises KeyError."""
    return Person(uid, name=pwd.getpwuid(uid).pw_name)


class UserLookup:
    """Asks `look_up` in threads of its own, and keeps what it found for KEPT_S."""

    def __init__(
        self, look_up: Callable[[Any], Person], now: Callable[[], float] = clock.monotonic,
        deadline_s: float = LOOKUP_S,
    ):  # fmt: skip
        """`look_up` gets a name or a number; it may hang, and raises KeyError for what is not known."""
        self._look_up, self._now, self._deadline_s = look_up, now, deadline_s
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="user-lookup")
        self._known: dict[Hashable, tuple[float, Person]] = {}

    async def find(self, key: Hashable) -> Person:
        """The user. Raises KeyError, and TimeoutError where there is no answer in time."""
        known = self._known.get(key)
        if known is None or self._now() - known[0] > KEPT_S:
            looking = asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, key)
            found = await wait_for(looking, self._deadline_s)
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            known = self._known[key] = (self._now(), found)
        return known[1]

    async def named(self, person: Person) -> Person:
        """The same person with a name: `uid N` where the name service has none, or none in time, for the kernel has
        proven the number, and nobody's pause waits for a directory."""
        if person.uid is None or person.name:
            return person
        try:
            return replace(person, name=(await self.find(person.uid)).name)
        except (KeyError, TimeoutError):
            return replace(person, name=f"uid {person.uid}")
