"""Listings by pyslurm, in a child process; what changes something goes by Slurm's commands all the same.

For that pyslurm (22.5 to 25.11) is no help: its requeue lacks the condition that keeps a finished job from
running again; it names jobs by number only, and the last element of an array has the number of the whole
array; and after a signal it raises the error that was left over from an earlier request. What it can't say in
a listing: that a job is STOPPED, SIGNALING, STAGE_OUT, REVOKED or RESV_DEL_HOLD (it cuts off the higher flags
of a state, and gives the state below them).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.slurm import pyslurm_child, pyslurm_rows
from slurm_watchdog.slurm.child_process import PyslurmProcess, WorkerGone
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.commands import clean_environment
from slurm_watchdog.slurm.het_jobs import merge_components
from slurm_watchdog.slurm.listings import Listings, one_job, view_of
from slurm_watchdog.slurm.parse import is_unknown_job

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class PyslurmListings:
    """By pyslurm, which `python` (empty: our interpreter) has to have, built for the site's release."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        # The file and not the module: it may not be able to import ours.
        path = pyslurm_child.__file__
        self._worker = PyslurmProcess([python or sys.executable, "-I", path], clean_environment(environ))

    async def view(self) -> SlurmView:
        """All jobs, with their excluded nodes, and all nodes."""
        rows = await self._rows({"call": "view"})
        if not isinstance(rows, dict) or rows.keys() != {"jobs", "nodes"}:
            raise SlurmUnavailable("pyslurm's process gave no listing")
        return view_of(
            await asyncio.to_thread(pyslurm_rows.list_jobs, rows["jobs"]),
            await asyncio.to_thread(pyslurm_rows.list_nodes, rows["nodes"]),
        )

    async def job(self, job_id: str) -> SlurmJob | None:
        """One job; an element of an array, and one that is not found at once, is looked for among all."""
        number, _, element = job_id.partition("_")
        if not element:
            rows = await self._rows({"call": "job", "id": int(number)})
            if rows is not None and (found := pyslurm_rows.read_jobs(rows)) and not found[0].het_job_id:
                return one_job(found, job_id)
        rows = await self._rows({"call": "jobs"})
        jobs = merge_components(await asyncio.to_thread(pyslurm_rows.read_jobs, rows if rows is not None else []))
        like = tuple(job for job in jobs if job_id in (job.job_id, job.raw_id) or job.array_job_id == job_id)
        return one_job(like, job_id)

    async def node(self, name: str) -> SlurmNode | None:
        """One node, looked for among all: pyslurm's error for an unknown one says only that something was wrong."""
        found = pyslurm_rows.read_nodes(await self._rows({"call": "nodes"}))
        return next((node for node in found if node.name == name), None)

    async def close(self) -> None:
        """Ends the process."""
        await self._worker.close()

    def notes(self) -> tuple[str, ...]:
        """Nothing: it answers, or it raises."""
        return ()

    async def _rows(self, request: dict[str, Any]) -> Any:
        """What is asked for; None if Slurm says that there is no such job. Raises SlurmUnavailable."""
        answer = await self._worker.ask(request)
        if "rows" in answer:
            return answer["rows"]
        said = str(answer.get("refused") or answer.get("failed") or "nothing")[:300]
        if "refused" in answer and is_unknown_job(said):
            return None
        raise SlurmUnavailable(f"pyslurm: {said}")


FIRST_ANSWER_S = 8.0
"""The first answer of a client that has never given one may take so long, well within the deadline of a
request (slurm.deadline): one that was built for another release of Slurm may hang."""
MAX_FAILURES = 3
"""So many in a row, and the other one is asked too: slurmctld may have been upgraded under it."""


class FallbackListings:
    """`first` as long as it answers at all, otherwise `second`.

    That Slurm does not answer is no reason to change: but as long as `first` has never once answered, or not
    the last few times, it is unknown whether Slurm or `first` is at fault (pyslurm of another release than
    slurmctld), and so `second` is asked as well.
    """

    def __init__(self, first: Listings, second: Listings) -> None:
        self._first, self._second = first, second
        self._answered = False
        self._failures = 0
        self._note = ""

    async def view(self) -> SlurmView:
        """All jobs and all nodes."""
        return await self._ask(lambda listings: listings.view())

    async def job(self, job_id: str) -> SlurmJob | None:
        """One job."""
        return await self._ask(lambda listings: listings.job(job_id))

    async def node(self, name: str) -> SlurmNode | None:
        """One node."""
        return await self._ask(lambda listings: listings.node(name))

    async def _ask(self, question: Callable[[Listings], Awaitable[T]]) -> T:
        try:
            async with timeout(None if self._answered else FIRST_ANSWER_S):
                answer = await question(self._first)
        except (SlurmUnavailable, TimeoutError) as error:
            self._failures += 1
            gone = isinstance(error, WorkerGone)
            if self._answered and not gone and self._failures < MAX_FAILURES:
                raise
            answer = await question(self._second)  # raises what is wrong with Slurm itself, if anything is
            self._note_fallback(str(error) or f"no answer within {FIRST_ANSWER_S:g} s", gone)
            return answer
        self._answered, self._failures, self._note = True, 0, ""
        return answer

    async def close(self) -> None:
        """Ends what was started for either."""
        await self._first.close()
        await self._second.close()

    def notes(self) -> tuple[str, ...]:
        """That `second` is asked, and why."""
        return (self._note,) if self._note else ()

    def _note_fallback(self, why: str, gone: bool) -> None:
        hint = "" if gone else "; its commands do answer: is pyslurm built for the release of slurmctld?"
        if not self._note:
            LOG.warning("Slurm is asked by its commands: %s%s", why, hint)
        self._note = f"Slurm is asked by its commands, not by pyslurm: {why}{hint}"


def is_importable() -> bool:
    """Whether our own interpreter has pyslurm. It is not imported: that may end the process."""
    return importlib.util.find_spec("pyslurm") is not None
