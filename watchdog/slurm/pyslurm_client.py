"""Listings by pyslurm, in a child process; what changes something goes by Slurm's commands all the same.

For that pyslurm (22.5 to 25.11) is no help: its requeue lacks the condition that keeps a finished job from running
again; it names jobs by number only, and the last element of an array has the number of the whole array; and after a signal
it raises the error that was left over from an earlier request. What it can't say in a listing: that a job is STOPPED, SIGNALING,
STAGE_OUT, REVOKED or RESV_DEL_HOLD (it cuts off the higher flags of a state, and gives the state below them).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Mapping
from typing import Any

from watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from watchdog.slurm import pyslurm_child, pyslurm_rows
from watchdog.slurm.client import SlurmUnavailable
from watchdog.slurm.commands import clean_environment
from watchdog.slurm.het_jobs import fold
from watchdog.slurm.listings import Listings, one_job, view_of
from watchdog.slurm.parse import says_unknown_job
from watchdog.slurm.worker import Worker, WorkerGone

LOG = logging.getLogger(__name__)


class PyslurmListings:
    """By pyslurm, which `python` (empty: our interpreter) has to have, built for the site's release."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        # The file and not the module: it may not be able to import ours.
        path = pyslurm_child.__file__
        self._worker = Worker([python or sys.executable, "-I", path], clean_environment(environ))

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
        jobs = fold(await asyncio.to_thread(pyslurm_rows.read_jobs, rows if rows is not None else []))
        like = tuple(job for job in jobs if job_id in (job.job_id, job.raw_id) or job.array_job_id == job_id)
        return one_job(like, job_id)

    async def node(self, name: str) -> SlurmNode | None:
        """One node, looked for among all: pyslurm's error for an unknown one says only that something was wrong."""
        found = pyslurm_rows.read_nodes(await self._rows({"call": "nodes"}))
        return next((node for node in found if node.name == name), None)

    async def close(self) -> None:
        """Ends the process."""
        await self._worker.close()

    async def _rows(self, request: dict[str, Any]) -> Any:
        """What is asked for; None if Slurm says that there is no such job. Raises SlurmUnavailable."""
        answer = await self._worker.ask(request)
        if "rows" in answer:
            return answer["rows"]
        said = str(answer.get("refused") or answer.get("failed") or "nothing")[:300]
        if "refused" in answer and says_unknown_job(said):
            return None
        raise SlurmUnavailable(f"pyslurm: {said}")


class FirstOf:
    """`first` as long as it can be had at all, otherwise `second`. That Slurm does not answer is no reason to change."""

    def __init__(self, first: Listings, second: Listings) -> None:
        self._first, self._second = first, second
        self._told = False

    async def view(self) -> SlurmView:
        """All jobs and all nodes."""
        try:
            return await self._first.view()
        except WorkerGone as error:
            self._tell(error)
            return await self._second.view()

    async def job(self, job_id: str) -> SlurmJob | None:
        """One job."""
        try:
            return await self._first.job(job_id)
        except WorkerGone as error:
            self._tell(error)
            return await self._second.job(job_id)

    async def node(self, name: str) -> SlurmNode | None:
        """One node."""
        try:
            return await self._first.node(name)
        except WorkerGone as error:
            self._tell(error)
            return await self._second.node(name)

    async def close(self) -> None:
        """Ends what was started for either."""
        await self._first.close()
        await self._second.close()

    def _tell(self, error: WorkerGone) -> None:
        if not self._told:
            LOG.warning("Slurm is asked by its commands: %s", error)
        self._told = True


def is_importable() -> bool:
    """Whether our own interpreter has pyslurm. It is not imported: that may end the process."""
    return importlib.util.find_spec("pyslurm") is not None
