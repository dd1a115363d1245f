"""Takes back what we did to nodes when it has lasted long enough: exclusions of jobs that wait, and drains
that nobody has touched."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping

from slurm_watchdog.actuate import drain, requeue
from slurm_watchdog.base import clock
from slurm_watchdog.config.policy import Policy
from slurm_watchdog.journal.journal import Journal, NodeEntry
from slurm_watchdog.model.actions import OperationOutcome
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import WAITING
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)


async def sweep(
    journal: Journal, slurm: SlurmClient, jobs: Mapping[str, SlurmJob], busy: Container[str], policy: Policy
) -> None:
    """One round. `jobs` is Slurm's newest listing, `busy` are the jobs that an action is under way for.
    Raises JournalError."""
    wall = clock.wall()
    if policy.drain_lifetime > 0:
        for entry in journal.node_entries("drained"):
            if entry.at < wall - policy.drain_lifetime:
                settled, why = await drain.undrain(slurm, entry.node, entry.reason, entry.reason_at)
                _write_outcome(journal, entry, why, settled=settled)
    for entry in journal.node_entries("excluded"):
        if entry.at < wall - policy.exclusion_lifetime and entry.job_id not in busy:
            settled, why = await _drop_exclusion(slurm, entry, jobs.get(entry.job_id))
            _write_outcome(journal, entry, why, settled=settled)


def _write_outcome(journal: Journal, entry: NodeEntry, why: str, *, settled: bool) -> None:
    if settled:
        log.warning("node %s, %s: %s", entry.node, entry.what, why)
        journal.end_node_entry(entry, clock.wall(), why)
    elif why:
        log.info("node %s, %s: %s", entry.node, entry.what, why)


async def _drop_exclusion(slurm: SlurmClient, entry: NodeEntry, listed: SlurmJob | None) -> tuple[bool, str]:
    """A job that waits may use the node again. One that runs keeps its list: Slurm changes that of pending
    jobs only."""
    if listed is None:
        return True, f"job {entry.job_id} is over"
    if listed.state not in WAITING:
        return False, ""
    try:
        job = await slurm.read_job(entry.job_id)
    except (SlurmUnavailable, SlurmRefused) as error:
        return False, f"job {entry.job_id} cannot be read: {error}"
    if job is None or entry.node not in job.excluded_nodes:
        return True, f"job {entry.job_id} is not kept from it any more"
    nodes = tuple(node for node in job.excluded_nodes if node != entry.node)
    outcome, detail = await requeue.exclude(slurm, entry.job_id, nodes)
    if outcome is OperationOutcome.DONE:
        return True, f"job {entry.job_id} may use it again: our exclusion was over"
    return outcome is OperationOutcome.FAILED, f"job {entry.job_id}: {detail}"
