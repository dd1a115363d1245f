"""Ends of jobs: cancel, hold, and a new job in the place of the old one."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.actuate.answered import answered
from slurm_watchdog.model.actions import Decision, Fence, OperationOutcome, Outcome
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import COMES, ENDED_BY_PERSON, HOLDS_NODES
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable, Submission


@answered
async def cancel(client: SlurmClient, fence: Fence) -> Outcome:
    """Cancels the run of `fence`, and no other. Done when Slurm does not show it running any more."""
    try:
        before = await client.read_job(fence.job_id)
    except (SlurmUnavailable, SlurmRefused) as error:
        return OperationOutcome.UNKNOWN, f"nothing was sent: {error}"
    if before is None or before.restarts != fence.restarts:
        return OperationOutcome.UNKNOWN, "nothing was sent: the job is not the run that the decision was about"
    await client.cancel(fence.job_id)
    after = await client.read_job(fence.job_id)
    if after is not None and after.state in COMES:
        return OperationOutcome.UNKNOWN, f"Slurm still shows it {after.state}"
    return OperationOutcome.DONE, "cancelled"


@answered
async def hold(client: SlurmClient, job_id: str) -> Outcome:
    """Keeps a job that waits from starting."""
    await client.hold(job_id)
    after = await client.read_job(job_id)
    if after is None or not after.held:
        return OperationOutcome.UNKNOWN, "Slurm does not show it held"
    return OperationOutcome.DONE, "held"


def mark_of(decision: Decision) -> str:
    """The words in the new job's comment by which it is known again, whatever becomes of sbatch's answer."""
    return f"slurm-watchdog-resubmit={decision.id}"


@answered
async def resubmit(client: SlurmClient, decision: Decision, exclude: Sequence[str]) -> Outcome:
    """Submits the script of the decision's job again: held, behind the old job, with our mark in its comment."""
    assert decision.fence is not None
    job_id = decision.fence.job_id
    try:
        job = await client.read_job(job_id)
        script = await client.read_script(job_id)
    except SlurmUnavailable as error:
        return OperationOutcome.UNKNOWN, f"nothing was submitted: {error}"
    if job is None or job.restarts != decision.fence.restarts:
        return OperationOutcome.UNKNOWN, "nothing was submitted: the job is not the run that the decision was about"
    if job.state == "COMPLETING":  # by whose hand is known when it has ended
        return OperationOutcome.UNKNOWN, "nothing was submitted: the job is ending"
    if job.state in ENDED_BY_PERSON:
        return OperationOutcome.FAILED, f"the job was ended outside the watchdog ({job.state}): it is not run again"
    options, workdir = options_for(job, exclude, mark_of(decision)), job.workdir or "/"
    try:
        new = await client.submit(Submission(script=script, options=options, like=job_id, uid=job.uid, workdir=workdir))
    except SlurmUnavailable as error:
        return OperationOutcome.UNKNOWN, f"it may have been submitted: {error}"
    return OperationOutcome.DONE, f"submitted again as job {new}, held"


def options_for(job: SlurmJob, exclude: Sequence[str], mark: str) -> tuple[str, ...]:
    """sbatch's options for a new job like `job`: what is decided here. The client adds what else Slurm tells
    of it (`like`)."""
    options = ["--hold", f"--comment={f'{job.comment} {mark}'.strip()}"]
    if job.state in HOLDS_NODES:
        options.append(f"--dependency=afterany:{job.job_id}")
    given = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "reservation": job.reservation,
        "nodes": str(job.node_count) if job.node_count else "",
        "time": _minutes(job.time_limit_s),
        "nodelist": ",".join(job.required_nodes),
        "exclude": ",".join(dict.fromkeys((*job.excluded_nodes, *exclude))),
    }
    return (*options, *(f"--{name}={value}" for name, value in given.items() if value))


def _minutes(seconds: float | None) -> str:
    """As sbatch takes it, rounded up: minutes."""
    return "" if seconds is None else str(max(1, -int(-seconds // 60)))
