"""`driver_stall`: a process of a job is in uninterruptible sleep in a driver's call (GPU, network adapter), about no
file of any filesystem: no signal ends it, and its job waits for it.

Fires: a thread has been in state D in one call of a driver for 60 s (`ioctl` on /dev/nvidia0, the release of a
context), no step was made since, and the next one is overdue by the run's own measure, in no phase. Where that is not
known, after 5 min. Before the first step, after the last one, or where steps cannot be read: a warning after 60 s.
Names: the rank, its pid, the driver, the wait channel, and the GPU where the call is on its file.
Acts: requeues the job without the node, on at most two nodes; where no step is known to be overdue, after 5 min.
Never after the last step, before the next is due, or while a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import has_ended
from slurm_watchdog.analysis.lateness import is_overdue, is_unheard_of, late_after_s
from slurm_watchdog.analysis.progress_limit import saves_now
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import and_more, describe
from slurm_watchdog.knowledge.drivers import Driver, driver_of
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity
from slurm_watchdog.model.observations import Blocked, Role

STEP_SLACK_S = 10.0  # As in `filesystem_stall`: a step may be read so late, and a call be seen so late.
MOST_NODES = 2  # More at once is a fabric or a release of the driver: no restart elsewhere mends it.
NAMED = 16
HUNG_TASK = "hung_task"
ENDED = "its main thread has ended (a zombie, as after SIGKILL); another thread of it is in this call"

BLOCKED_FOR_S = 60.0  # In the same call before it is reported.
UNSURE_FOR_S = 300.0  # In the same call before it is acted on, where no step is known to be overdue.


def _sleeping(job: JobView) -> Iterable[tuple[ProcessView, Blocked]]:
    for each in job.processes:
        blocked = each.process.blocked
        if blocked is None or blocked.state != "D" or blocked.mount or blocked.candidates:
            continue
        if each.alive or each.unending is not None:
            yield each, blocked


@each_job
def detect(view: ClusterView, job: JobView) -> Finding:
    """One finding for each running job."""
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id)
    if job.silent_nodes:
        return finding
    sleeping = list(_sleeping(job))
    stuck = [(p, b, d) for p, b in sleeping if (d := driver_of(b.path, b.wchan)) is not None]
    stuck.sort(key=lambda each: (each[0].process.role is not Role.RANK, -each[1].seconds, each[0].process.pid))
    long = [each for each in stuck if each[1].seconds >= BLOCKED_FOR_S]
    if not long:
        if sleeping or not job.ranks or not job.every_rank_known or job.unlisted:
            return finding
        return finding.ok(f"no process of job {job_id} sleeps in a driver")
    process, blocked, driver = long[0]
    rose_s = None if job.progress is None else job.progress.last_increase_age_s
    longest_s = max(each[1].seconds for each in long)
    # A job that makes steps does not wait for it; where steps are not known, only a rank shows that it does.
    if process.process.role is not Role.RANK if rose_s is None else rose_s + STEP_SLACK_S < longest_s:
        return finding
    over, saves = has_ended(job), saves_now(job)
    overdue = is_overdue(job) and not saves
    patient = longest_s < UNSURE_FOR_S or _is_usual(job) or saves
    if rose_s is not None and not over and not overdue and patient:
        return finding
    sure = not over and (overdue or (longest_s >= UNSURE_FOR_S and not saves))
    culprits = tuple(_culprit(view, *each) for each in long)
    nodes = tuple(sorted({each.node for each in culprits if each.node}))
    few, who = len(nodes) <= MOST_NODES, describe(culprits[0])
    where = f"; {len(nodes)} nodes have it at once" if not few else ""
    return finding.bad(
        f"{who[0].upper()}{who[1:]} of job {job_id}{and_more(len(culprits))} {_what(blocked, driver)}: no signal ends "
        f"it{where}.",
        culprits=culprits[:NAMED],
        facts=(
            *(f"{describe(c)} {c.reason}" for c in culprits[:8]),
            *(f"pid {each.process.pid} on {each.node}: {ENDED}" for each, _, _ in long[:8] if each.unending),
            *_kernels_words(view, long),
            "what sleeps there ends when the driver lets it, else with a restart of the node",
        ),
        severity=Severity.CRITICAL if sure else Severity.WARNING,
        duration_s=longest_s,
        actionable=sure and few,
        exclude_nodes=nodes if few else (),
    )


def _is_usual(job: JobView) -> bool:
    """Whether the run is known to take so long for a step."""
    progress, late_s = job.progress, late_after_s(job.progress)
    return progress is not None and late_s is not None and (progress.age_s < late_s or not is_unheard_of(progress))


def _what(blocked: Blocked, driver: Driver) -> str:
    call = blocked.syscall or "a system call"
    on = f" on {blocked.path}" if blocked.path else ""
    wchan = f", at {blocked.wchan}" if blocked.wchan else ""
    return f"has been in state D in {driver.name} ({call}{on}{wchan}) for {blocked.seconds:.0f} s"


def _culprit(view: ClusterView, process: ProcessView, blocked: Blocked, driver: Driver) -> Culprit:
    minor = (blocked.path or "").removeprefix("/dev/nvidia")
    gpus = [gpu.gpu for node in view.nodes if node.name == process.node for gpu in node.gpus] if minor.isdigit() else ()
    uuid = next((gpu.uuid for gpu in gpus if gpu.minor is not None and str(gpu.minor) == minor), None)
    named = process.culprit(_what(blocked, driver))
    return replace(named, gpu_uuid=uuid or None, path=blocked.path, is_worker=process.process.role is Role.WORKER)


def _kernels_words(view: ClusterView, long: Iterable[tuple[ProcessView, Blocked, Driver]]) -> tuple[str, ...]:
    pids = {(process.node, process.process.pid) for process, _, _ in long}
    return tuple(
        f"the kernel of {node.name}: {seen.event.line}"
        for node in view.nodes
        for seen in node.events
        if seen.event.name == HUNG_TASK and (node.name, seen.event.pid) in pids
    )[:4]


SPEC = DetectorSpec(
    detect=detect,
    severity=Severity.CRITICAL,
    blames_node=0.9,
    sentence="A process hangs in a driver",
    job_state="waits for a driver",
    explained_by=(IncidentKind.NODE_DOWN,),
    explains=(
        IncidentKind.COLLECTIVE_HANG,
        IncidentKind.WEDGED_TEARDOWN,
        IncidentKind.STALLED_PROGRESS,
        IncidentKind.GPU_IDLE_RANK,
    ),
    has_aftermath=False,
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs",),
    hint=Hint(
        usually="The GPU or adapter, or the firmware of it, does not answer, and the driver waits for it under a lock.",
        try_next="dmesg for Xid, mlx5 and hung tasks; cat /proc/PID/stack as root; drain and restart the node.",
        documented="proc(5), /proc/PID/stack; NVIDIA, XID Errors",
    ),
)
