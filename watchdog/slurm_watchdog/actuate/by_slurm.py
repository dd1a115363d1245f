"""Levers that Slurm pulls: on a job, on its place in the queue, on nodes. Each is looked up in Slurm afterwards: an
exit code proves nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec

from slurm_watchdog.model.actions import Decision, Fence, OperationOutcome, Outcome
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView, elements_of, why_not_set_down
from slurm_watchdog.model.slurm_states import (
    COMES,
    ENDED_BY_PERSON,
    HOLDS_NODES,
    RESTARTABLE,
    STARTED,
    WAITING,
    is_drained,
)
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmClient, SlurmRefused, SlurmUnavailable, Submission

P = ParamSpec("P")


def refusal(error: SlurmRefused) -> Outcome:
    """A no for good ends the operation; one that the job's next state may lift is tried again."""
    return (OperationOutcome.FAILED if error.terminal else OperationOutcome.UNKNOWN), str(error)


def answered(operation: Callable[P, Awaitable[Outcome]]) -> Callable[P, Coroutine[Any, Any, Outcome]]:
    """`operation`, where a refusal of Slurm's that it does not handle itself is a `refusal`, and silence `unknown`."""

    @wraps(operation)
    async def carried_out(*args: P.args, **kwargs: P.kwargs) -> Outcome:
        try:
            return await operation(*args, **kwargs)
        except SlurmRefused as error:
            return refusal(error)
        except SlurmUnavailable as error:
            return OperationOutcome.UNKNOWN, str(error)

    return carried_out


async def _same_run(client: SlurmClient, fence: Fence) -> SlurmJob | str:
    """The job, read now, if it is in the run of `fence`; otherwise a sentence."""
    try:
        job = await client.read_job(fence.job_id)
    except (SlurmUnavailable, SlurmRefused) as error:
        return f"nothing was sent: {error}"
    if job is None or job.restarts != fence.restarts:
        return "nothing was sent: the job is not the run that the decision was about"
    return job


@answered
async def requeue_hold(client: SlurmClient, fence: Fence, *, only_unfinished: bool) -> Outcome:
    """Puts the run of `fence`, and no other, back into the queue, held. The job is read immediately before and after.
    `only_unfinished` leaves a job alone that has ended in between (Slurm then does nothing and says nothing, so only
    the second look tells), or that someone has suspended. SKIPPED: nothing was sent, so that a requeue that is seen
    afterwards is someone else's."""
    try:
        before = await client.read_job(fence.job_id)
    except SlurmUnavailable as error:
        return OperationOutcome.SKIPPED, f"nothing was sent: {error}"
    if before is not None and before.unsure:
        return OperationOutcome.SKIPPED, f"nothing was sent: {before.unsure}"
    if before is None or before.restarts != fence.restarts or before.start_at != fence.start_at:
        return OperationOutcome.SKIPPED, "nothing was sent: the job is not the run that the decision was about"
    if only_unfinished and before.state in STARTED - RESTARTABLE:
        return OperationOutcome.SKIPPED, f"nothing was sent: the job has become {before.state}"
    if not only_unfinished and before.state == "CANCELLED":
        return OperationOutcome.FAILED, "the job was cancelled in the meantime: it is not run again"
    try:
        await client.requeue_hold(fence.job_id, only_unfinished=only_unfinished)
        after = await client.read_job(fence.job_id)
    except SlurmRefused as error:
        return await _ended_meanwhile(client, fence, error)
    if after is not None and after.restarts == fence.restarts:
        return OperationOutcome.UNKNOWN, f"Slurm did not requeue it: the job is {after.state}"
    return OperationOutcome.DONE, "requeued and held"


async def _ended_meanwhile(client: SlurmClient, fence: Fence, said: SlurmRefused) -> Outcome:
    """A run that ended between the look and the request is no refusal for good: the ladder looks again."""
    try:
        job = await client.read_job(fence.job_id)
    except (SlurmUnavailable, SlurmRefused):
        return refusal(said)
    if job is not None and job.state != "RUNNING":
        final = said.kind in (Refusal.NO_PERMISSION, Refusal.NOT_BATCH, Refusal.NOT_REQUEUEABLE)
        outcome = OperationOutcome.FAILED if final else OperationOutcome.UNKNOWN
        return outcome, f"the job had become {job.state}: {said}"
    return refusal(said)


@answered
async def cancel(client: SlurmClient, fence: Fence) -> Outcome:
    """Cancels the run of `fence`, and no other. Done when Slurm does not show it running any more."""
    before = await _same_run(client, fence)
    if isinstance(before, str):
        return OperationOutcome.UNKNOWN, before
    await client.cancel(fence.job_id)
    after = await client.read_job(fence.job_id)
    if after is not None and after.state in COMES:
        return OperationOutcome.UNKNOWN, f"Slurm still shows it {after.state}"
    return OperationOutcome.DONE, "cancelled"


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
        "time": "" if job.time_limit_s is None else str(max(1, -int(-job.time_limit_s // 60))),  # minutes, rounded up
        "nodelist": ",".join(job.required_nodes),
        "exclude": ",".join(dict.fromkeys((*job.excluded_nodes, *exclude))),
    }
    return (*options, *(f"--{name}={value}" for name, value in given.items() if value))


TARGETS: dict[str, tuple[SignalTo, str]] = {
    "steps": (SignalTo.STEPS, "its tasks"),
    "batch": (SignalTo.BATCH, "its batch shell"),
    "all": (SignalTo.FULL, "its batch shell and all tasks"),
}  # The configuration's word -> Slurm's, and how people call it.


async def send_signal(client: SlurmClient, fence: Fence, signal: str, to: str) -> Outcome:
    """Sends `signal` (USR1, TERM) to the run of `fence`, and no other, once: what became of it is seen in what the job
    does. `skipped`: it is sure that nothing was sent."""
    target, receivers = TARGETS[to]
    job = await _same_run(client, fence)
    if isinstance(job, str):
        return OperationOutcome.SKIPPED, job
    if job.state != "RUNNING":
        return OperationOutcome.SKIPPED, f"nothing was sent: the run does not run ({job.state})"
    try:
        await client.send_signal(fence.job_id, signal, target)
    except SlurmRefused as error:
        return (OperationOutcome.FAILED if error.terminal else OperationOutcome.SKIPPED), f"nothing was sent: {error}"
    except SlurmUnavailable as error:
        return OperationOutcome.UNKNOWN, f"it may have been sent: {error}"
    return OperationOutcome.DONE, f"SIG{signal} sent to {receivers}"


@answered
async def exclude(client: SlurmClient, job_id: str, nodes: Sequence[str]) -> Outcome:
    """Gives the pending job its whole new list of excluded nodes (Slurm replaces the old one)."""
    await client.set_excluded_nodes(job_id, nodes)
    after = await client.read_job(job_id)
    missing = set(nodes) - set(after.excluded_nodes if after else ())
    if missing:
        return OperationOutcome.UNKNOWN, f"Slurm does not show {', '.join(sorted(missing))} among the excluded nodes"
    return OperationOutcome.DONE, f"excluded: {', '.join(nodes)}"


@answered
async def release(client: SlurmClient, job_id: str) -> Outcome:
    """Lets the held job run again."""
    await client.release(job_id)
    after = await client.read_job(job_id)
    if after is not None and after.held:
        return OperationOutcome.UNKNOWN, "Slurm still holds the job"
    return OperationOutcome.DONE, "released"


@answered
async def hold(client: SlurmClient, job_id: str) -> Outcome:
    """Keeps a job that waits from starting."""
    await client.hold(job_id)
    after = await client.read_job(job_id)
    if after is None or not after.held:
        return OperationOutcome.UNKNOWN, "Slurm does not show it held"
    return OperationOutcome.DONE, "held"


@answered
async def hold_others(client: SlurmClient, decision: Decision) -> Outcome:
    """The other elements of a job's array: held while a kill switch is there that they would see, then released. Slurm
    starts the next element of an array with `%1` within a second of the end of the one before, and no file is removed
    from a filesystem as fast for certain; an element that is held does not start. Done when Slurm lists no element that
    could start, nor one that has started in between."""
    for name in decision.hold_first:
        with suppress(SlurmRefused):  # one that has ended or started: what Slurm lists afterwards counts
            await client.hold(name)
    others, partial = await _others(client, decision)
    if partial:
        return OperationOutcome.UNKNOWN, f"Slurm does not list all jobs: {partial}"
    started = [job.job_id for job in others if job.state in HOLDS_NODES and job.job_id in _named(decision)]
    if started:
        return OperationOutcome.FAILED, f"{started[0]} has started, and would see the kill switch"
    free = [job.job_id for job in others if job.state in WAITING and not job.held]
    if free:
        return OperationOutcome.UNKNOWN, f"Slurm does not show {', '.join(free[:5])} held"
    return OperationOutcome.DONE, f"held: {', '.join(decision.hold_first)}"


@answered
async def release_others(client: SlurmClient, decision: Decision) -> Outcome:
    """Done when none of those that were held is held any more; one that has ended since is not missed."""
    for job in await _held(client, decision):
        await client.release(job.job_id)
    still = [job.job_id for job in await _held(client, decision)]
    if still:
        return OperationOutcome.UNKNOWN, f"Slurm still holds {', '.join(still[:5])}"
    return OperationOutcome.DONE, f"released: {', '.join(decision.hold_first)}"


async def _held(client: SlurmClient, decision: Decision) -> list[SlurmJob]:
    """Those of `hold_first` that wait, held."""
    named = _named(decision)
    others = (await _others(client, decision))[0]
    return [
        job for job in others if job.held and job.state in WAITING and not named.isdisjoint(elements_of(job.job_id))
    ]


def _named(decision: Decision) -> frozenset[str]:
    return frozenset[str]().union(*map(elements_of, decision.hold_first))


async def _others(client: SlurmClient, decision: Decision) -> tuple[list[SlurmJob], str]:
    """The elements of the job's array but itself, and why there may be more. Raises what the client raises."""
    assert decision.fence is not None
    view = await client.read_view()
    array = decision.fence.job_id.partition("_")[0]
    return [job for job in view.jobs if job.array_job_id == array and job.job_id != decision.fence.job_id], view.partial


@answered
async def drain(client: SlurmClient, nodes: Sequence[str], reason: str, note: Callable[[SlurmNode], None]) -> Outcome:
    """Drains `nodes`; `note` gets each as Slurm has it afterwards. One that is out already keeps its reason."""
    done, left = [], []
    for name in nodes:
        before = await client.read_node(name)
        if before is None or is_drained(before.state):
            why = "Slurm does not know it" if before is None else f"drained already: {before.reason}"
            left.append(f"{name} ({why})")
            continue
        await client.drain_node(name, reason)
        after = await client.read_node(name)
        if after is not None and after.reason.startswith(reason):
            note(after)
        done.append(name)
    words = [f"drained: {', '.join(done)}"] if done else []
    words += [f"left as it is: {', '.join(left)}"] if left else []
    return (OperationOutcome.DONE if done else OperationOutcome.SKIPPED), "; ".join(words)


async def undrain(client: SlurmClient, node: str, reason: str, reason_at: float | None) -> tuple[bool, str]:
    """Gives back a node if reason and time of its drain are still ours. (whether this is settled, a sentence)."""
    if reason_at is None:
        return True, f"{node} stays drained: when we drained it is not known"
    try:
        await client.undrain_node(node, reason, reason_at)
    except SlurmRefused as error:
        return error.terminal, f"{node} is not returned to service: {error}"
    except SlurmUnavailable as error:
        return False, f"{node} is not returned to service yet: {error}"
    return True, f"{node} is returned to service: our drain expired and was unchanged"


@answered
async def set_down(
    client: SlurmClient,
    fence: Fence,
    nodes: Sequence[str],
    reason: str,
    note: Callable[[SlurmNode], None],
    unkillable: Callable[[SlurmJob, str], bool],
) -> Outcome:
    """Tells Slurm that nodes are down whose processes it cannot end, so that the requeued job that waits for them
    starts elsewhere. Slurm 25.11 and later keep a requeued job COMPLETING as long as a process of its old run is alive,
    also one in state D that nothing can end (22.05 and 24.11 let go after UnkillableStepTimeout). With the node DOWN
    the job starts within seconds. State=DOWN ends every job on the node: so nothing is sent unless Slurm itself has
    given the node up, or its agent shows the process, and Slurm shows no other job there, at this very moment. Sets
    those of `nodes` DOWN that hold up the run after `fence`; `note` gets each as Slurm has it afterwards; `unkillable`
    answers whether a node's agent shows, at this moment, a process of the job that cannot be killed. Everything is read
    again just before; `skipped`: nothing was sent, and nothing is to be sent."""
    done: list[str] = []
    for name in nodes:
        view = await client.read_view()
        node = await client.read_node(name)
        job = next((job for job in view.jobs if job.job_id == fence.job_id), None)
        why = objection(job, node, view, fence, unkillable=job is not None and unkillable(job, name))
        if why or node is None:
            outcome = OperationOutcome.DONE if done else OperationOutcome.SKIPPED
            return outcome, f"{name} is left as it is: {why}" + (f"; DOWN: {', '.join(done)}" if done else "")
        await client.set_node_down(name, reason)
        after = await client.read_node(name)
        if after is None or not after.reason.startswith(reason[:40]):
            return OperationOutcome.UNKNOWN, f"Slurm does not show {name} with our reason"
        note(after)
        done.append(name)
    return OperationOutcome.DONE, f"set DOWN: {', '.join(done)}"


def objection(job: SlurmJob | None, node: SlurmNode | None, view: SlurmView, fence: Fence, *, unkillable: bool) -> str:
    """Why the node must not be set DOWN for this job, a sentence; empty if it may."""
    if job is None or job.unsure or node is None:
        return "Slurm does not show the job, or the node, as it has to be known"
    if job.restarts != fence.restarts + 1 or job.state != "COMPLETING" or node.name not in job.nodes:
        return f"it does not hold up the job any more ({job.state})"
    return why_not_set_down(job, node, view.jobs, view.partial, unkillable=unkillable)
