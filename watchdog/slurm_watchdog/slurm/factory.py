"""Makes the Slurm client that the configuration names, or that works here."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.command_line import CommandLineSlurm
from slurm_watchdog.slurm.commands import ALWAYS, Commands, Right
from slurm_watchdog.slurm.listings import CommandLineListings, Listings
from slurm_watchdog.slurm.pyslurm_client import Gone, PyslurmListings
from slurm_watchdog.slurm.request_guard import Backoff, Observe

LOG = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_ANSWER_S = 8.0
"""The first answer of pyslurm may take so long, well within the deadline of a request (slurm.deadline): one that was
built for another release of Slurm may hang."""
MAX_FAILURES = 3  # So many in a row, and the commands are asked too: slurmctld may have been upgraded under pyslurm.
LONGEST_PAUSE_S = 300.0  # Between two tries of a pyslurm that cannot be asked.


class FallbackListings:
    """`first` as long as it answers at all, otherwise `second`.

    That Slurm does not answer is no reason to change: but as long as `first` has never once answered, or not
    the last few times, it is unknown whether Slurm or `first` is at fault (pyslurm of another release than
    slurmctld), and so `second` is asked as well. One that cannot be asked at all is tried ever more rarely.
    """

    def __init__(self, first: Listings, second: Listings) -> None:
        self._first, self._second = first, second
        self._answered = False
        self._failures = 0
        self._gone = Backoff(first_s=2.0, most_s=LONGEST_PAUSE_S)
        self.note = ""
        """That `second` is asked, and why."""

    async def view(self) -> SlurmView:
        return await self._ask(lambda listings: listings.view())

    async def job(self, job_id: str) -> SlurmJob | None:
        return await self._ask(lambda listings: listings.job(job_id))

    async def node(self, name: str) -> SlurmNode | None:
        return await self._ask(lambda listings: listings.node(name))

    async def _ask(self, question: Callable[[Listings], Awaitable[T]]) -> T:
        if self._gone.wait_s(clock.monotonic()) > 0:
            return await question(self._second)
        try:
            async with timeout(None if self._answered else FIRST_ANSWER_S):
                answer = await question(self._first)
        except (SlurmUnavailable, TimeoutError) as error:
            self._failures += 1
            if gone := isinstance(error, Gone):
                self._gone.failed(clock.monotonic())
            elif self._answered and self._failures < MAX_FAILURES:
                raise
            answer = await question(self._second)  # raises what is wrong with Slurm itself, if anything is
            self._note_fallback(str(error) or f"no answer within {FIRST_ANSWER_S:g} s", gone)
            return answer
        self._answered, self._failures, self.note = True, 0, ""
        self._gone.succeeded()
        return answer

    def _note_fallback(self, why: str, gone: bool) -> None:
        hint = "" if gone else "; its commands do answer: is pyslurm built for the release of slurmctld?"
        if not self.note:
            LOG.warning("Slurm is asked by its commands: %s%s", why, hint)
        self.note = f"Slurm is asked by its commands, not by pyslurm: {why}{hint}"


def is_importable() -> bool:
    """Whether our own interpreter has pyslurm. It is not imported: that may end the process."""
    return importlib.util.find_spec("pyslurm") is not None


def make_client(
    choice: Literal["auto", "pyslurm", "command_line"],
    *,
    bin_directory: str = "",
    deadline_s: float = 20.0,
    pyslurm_python: str = "",
    token_file: str = "",
    environ: Mapping[str, str] | None = None,
    observe: Observe = lambda call, outcome: None,
    right: Right = ALWAYS,
) -> CommandLineSlurm:
    """A client for the site's Slurm.

    `pyslurm`: questions go to pyslurm, and without it nothing is known. `auto`: they do if `pyslurm_python`,
    or our own interpreter where that is empty, has it, and to the commands whenever it cannot be started.
    `right`: see Commands.
    `command_line`: never, nor with a `token_file`: the token changes, and pyslurm does not read it.
    """
    environ = os.environ if environ is None else environ
    listings: Listings | None = None
    if choice == "pyslurm":
        listings = PyslurmListings(pyslurm_python, environ)
    elif choice == "auto" and not token_file and (pyslurm_python or is_importable()):
        commands = CommandLineListings(Commands(bin_directory, environ))
        listings = FallbackListings(PyslurmListings(pyslurm_python, environ), commands)
    LOG.info("Slurm is asked by %s", "its commands" if listings is None else "pyslurm")
    return CommandLineSlurm(bin_directory, deadline_s, environ, observe, listings, token_file, right=right)
