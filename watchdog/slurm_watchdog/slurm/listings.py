"""Where a client's knowledge comes from: squeue and sinfo."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import may_hold_nodes
from slurm_watchdog.slurm import parse
from slurm_watchdog.slurm.client import Refusal, SlurmRefused, SlurmUnavailable, parse_refusal
from slurm_watchdog.slurm.commands import Answer, Commands, first_line, gather
from slurm_watchdog.slurm.node_names import Listed, all_or_none

LISTING = ("--local", "--all", "--states=all", "--array")
"""This cluster only, hidden partitions too, whatever the state; and each element of an array on a line of its
own: otherwise squeue puts all that wait on one line, also those that have run, were requeued and are jobs of
their own. (22.05 has a finer option for it, --array-unique, that later releases lack.) list_jobs folds the
unstarted rest again."""
NODE_LISTING = ("--local", "--all", "--Node")


class Listings:
    """By squeue and sinfo. Each answer raises SlurmUnavailable or ParseError rather than leave something out."""

    note = ""  # What is not as it should be in how Slurm is asked, a sentence; empty: nothing.

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def view(self) -> SlurmView:
        """All jobs, without their excluded nodes, and all nodes."""
        marks = new_marks()
        jobs, nodes = await gather(self._jobs(marks), self._nodes(marks))
        return view_of(
            await asyncio.to_thread(parse.list_jobs, listing_text(jobs, "squeue"), marks),
            await asyncio.to_thread(parse.list_nodes, listing_text(nodes, "sinfo"), marks),
        )

    async def job(self, job_id: str) -> SlurmJob | None:
        """One job with its excluded nodes, None if there is none; raises SlurmRefused for what is not one job."""
        marks, which = new_marks(), ("--jobs", job_id)
        long, short = await gather(
            self._jobs(marks, *which),
            self._commands.run(
                "squeue", *LISTING, *which, SQUEUE_FORMAT=parse.short_format(parse.EXCLUDED_FIELDS, marks)
            ),
        )
        if long.code and parse.is_unknown_job(long.stderr):
            return None
        found = one_job(merge_components(all_or_none(parse.list_jobs(listing_text(long, "squeue"), marks))), job_id)
        if found is None:
            return None
        excluded = parse.parse_excluded(listing_text(short, "squeue"), marks, job_id)
        return replace(found, excluded_nodes=excluded)

    async def node(self, name: str) -> SlurmNode | None:
        """One node, None if there is none of that name."""
        marks = new_marks()
        answer = await self._nodes(marks, "--nodes", name)
        found = all_or_none(parse.list_nodes(listing_text(answer, "sinfo"), marks))
        return next((one for one in found if one.name == name), None)

    def _jobs(self, marks: parse.Marks, *which: str) -> Awaitable[Answer]:
        return self._commands.run("squeue", *LISTING, *which, SQUEUE_FORMAT2=parse.long_format(parse.JOB_FIELDS, marks))

    def _nodes(self, marks: parse.Marks, *which: str) -> Awaitable[Answer]:
        # An administrator's reason is all that a person writes in a node, so this format may be an argument.
        return self._commands.run("sinfo", *NODE_LISTING, *which, "-O", parse.long_format(parse.NODE_FIELDS, marks))


def view_of(jobs: Listed[SlurmJob], nodes: Listed[SlurmNode]) -> SlurmView:
    """One answer of both. Where a row of jobs had to be left out, a job that is not in it may exist all the same."""
    dropped = (*jobs[1], *nodes[1])
    partial = f"{len(jobs[1])} rows of Slurm's listing cannot be read, first: {jobs[1][0]}" if jobs[1] else ""
    return SlurmView(jobs=merge_components(jobs[0]), nodes=nodes[0], dropped=dropped, partial=partial)


def one_job(jobs: tuple[SlurmJob, ...], job_id: str) -> SlurmJob | None:
    """The job of that id among those that Slurm gave for it, None if it gave none; raises SlurmRefused for others."""
    for job in jobs:
        if job.job_id == job_id:
            return job
    if not jobs:
        return None
    shown = ", ".join(job.job_id for job in jobs[:5])
    raise SlurmRefused(f"{job_id} does not name one job; Slurm has {shown}", Refusal.NOT_ASKED)


def new_marks() -> parse.Marks:
    """Marks for one call, of 64 random bits each."""
    return parse.Marks(field=f"x{secrets.token_hex(8)}f", record=f"x{secrets.token_hex(8)}r")


def listing_text(answer: Answer, command: str) -> str:
    """The text of a listing; raises SlurmUnavailable if the command failed."""
    if answer.code:
        refusal = parse_refusal(answer.stderr)
        hidden = refusal is not None and refusal[1] is Refusal.NO_PERMISSION
        why = f"{refusal[0]} (PrivateData of slurm.conf?)" if refusal and hidden else first_line(answer.stderr)
        raise SlurmUnavailable(f"{command} ended with exit code {answer.code}: {why}", answered=hidden)
    return answer.stdout


# ------------------------------------------------------------------------------------------------- components


def merge_components(jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
    """The jobs with each heterogeneous one folded into its first component. One whose first component is not
    listed stays as it is.

    They start and end together, one srun may run over all of them, and every rank has the first one's id as
    SLURM_JOB_ID: to judge them one by one would tear one training apart, and one hang would be two incidents.
    """
    all_jobs = tuple(jobs)
    groups: dict[str, list[SlurmJob]] = {}
    for job in all_jobs:
        if job.het_job_id:
            groups.setdefault(job.het_job_id, []).append(job)
    if not groups:
        return all_jobs
    whole: dict[str, SlurmJob] = {}
    absorbed: set[str] = set()
    for group in groups.values():
        leader = next((job for job in group if job.het_offset == 0), None)
        if leader is not None:
            others = sorted((job for job in group if job is not leader), key=lambda job: job.het_offset or 0)
            whole[leader.job_id] = _merged(leader, others)
            absorbed |= {job.job_id for job in others}
    return tuple(whole.get(job.job_id, job) for job in all_jobs if job.job_id not in absorbed)


def _merged(leader: SlurmJob, others: Sequence[SlurmJob]) -> SlurmJob:
    parts = (leader, *others)
    nodes = dict.fromkeys(node for job in parts if may_hold_nodes(job.state) for node in job.nodes)
    counts = [job.node_count for job in parts]
    return replace(
        leader,
        state=_state(leader, others),
        nodes=tuple(nodes) or leader.nodes,
        required_nodes=tuple(dict.fromkeys(node for job in parts for node in job.required_nodes)),
        node_count=None if None in counts else sum(count or 0 for count in counts),
        component_ids=tuple(job.raw_id or job.job_id for job in others),
        unreadable=tuple(sorted({name for job in parts for name in job.unreadable})),
    )


def _state(leader: SlurmJob, others: Sequence[SlurmJob]) -> str:
    """The first component's; after its end the job is ending as long as another one holds nodes."""
    if may_hold_nodes(leader.state) or not any(may_hold_nodes(job.state) for job in others):
        return leader.state
    return "COMPLETING"
