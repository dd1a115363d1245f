"""What is kept of a run of a job for reports: when it ran, on how many nodes, and which steps it made; and what a
report counts of it."""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct


class RunRecord(Struct):
    """One run, (job id, restart count). Times are dates (seconds since 1970); None: not known."""

    job_id: str
    restarts: int
    began_at: float
    seen_at: float  # When Slurm last listed it as running.
    watched_from: float | None = None  # Since when a controller has watched it; None: from its beginning.
    ended_at: float | None = None  # None while it runs.
    state: str = ""
    exit_code: str = ""  # As Slurm's accounting has it, `code:signal`; empty: not known.
    steps_exit_code: str = ""  # The highest of its steps (DerivedExitCode), likewise.
    waited_for: str = ""  # Why it did not start for some time, if not for priority or resources (Reason of accounting).
    failed_node: str = ""  # The node whose failure ended it.
    uid: int = -1
    user: str = ""
    account: str = ""
    partition: str = ""
    name: str = ""
    nodes: int = 1
    gpus: int | None = None  # Those that ranks were seen to compute on.
    first_step: int | None = None
    last_step: int | None = None
    stride: int = 1  # Steps between two lines of its log.
    first_rise_at: float | None = None  # When its step first rose.
    last_rise_at: float | None = None
    step_s: float | None = None  # Of one step, the median of the recent ones.


class Spell(Struct):
    """An incident of one run: when it was open (dates)."""

    job_id: str
    restarts: int | None  # None: not known.
    kind: str
    began_at: float
    ended_at: float
    fired_at: float | None = None  # When it was reported, its evidence being complete; None: not known.
    nodes: tuple[str, ...] = ()
    acted: bool = False  # Whether an action of ours for it, on this job, succeeded.
    would_act_at: float | None = None  # When an action for it was decided that its mode left undone; None: none was.
    stops_steps: bool = False  # Its kind means that the job makes no step.
    planned: bool = False  # Nothing was wrong: maintenance, a time limit, or what a person asked for.
    recomputed_s: float = 0.0  # Time of the steps that a restart inside of this run made again.


def merged(before: RunRecord, now: RunRecord) -> RunRecord:
    """Both of one run: a controller that was started in between knows only the later part of it."""
    steps = [each for each in (before.first_step, now.first_step) if each is not None]
    last = [each for each in (before.last_step, now.last_step) if each is not None]
    rises = [each for each in (before.first_rise_at, now.first_rise_at) if each is not None]
    return replace(
        now,
        began_at=min(before.began_at, now.began_at),
        watched_from=before.watched_from,
        gpus=now.gpus if before.gpus is None else max(before.gpus, now.gpus or 0),
        first_step=min(steps, default=None),
        last_step=max(last, default=None),
        stride=max(before.stride, now.stride),
        first_rise_at=min(rises, default=None),
        last_rise_at=before.last_rise_at if now.last_rise_at is None else now.last_rise_at,
        step_s=before.step_s if now.step_s is None else now.step_s,
    )


class Savings(Struct):
    """Of the incidents that an action of ours ended."""

    saved_h: float = 0.0  # Node-hours, of those that could be compared.
    compared: int = 0
    unknown: int = 0  # Those without a comparable one before.
    usual_wait_s: float | None = None  # The median wait that they were compared with; None: there is none.
    would_save_h: float = 0.0  # Node-hours, of runs whose restart was decided and only observed.
    observed: int = 0  # Those runs.
    recovered: int = 0  # Runs of which the same was decided, and that trained again by themselves.


class Hours(Struct):
    """Node-hours of one job, or of all together."""

    allocated_h: float
    measured_h: float
    effective_h: float
    lost_h: tuple[tuple[str, float], ...]  # (cause, node-hours), the largest first.
    failures: int
    """Runs that ended by themselves with an error, or by an action for an incident; not those that ended for
    maintenance, at a time limit, or since a person asked."""
    share: float | None  # Effective share of what was measured; None: nothing was.


class JobTime(Hours):
    """Of one job."""

    job_id: str
    name: str
    user: str
    account: str
    partition: str
    nodes: int
    runs: int
    began_at: float
    ended_at: float
    to_be_noticed_h: tuple[tuple[str, float], ...] = ()  # Of `lost_h`, before the incident was reported, by its kind.
    queued_h: float  # Hours, not node-hours, in the queue between its runs.


class Report(Hours):
    """Of all jobs together."""

    since: float
    until: float
    jobs: tuple[JobTime, ...]  # Those that lost most first.
    known_jobs: int  # An answer has the first of `jobs` only.
    runs: tuple[RunRecord, ...] = ()  # In an answer about one job alone.
    to_be_noticed_h: tuple[tuple[str, float], ...]  # As of a job.
    node_hours_between_failures: float | None
    incidents: tuple[tuple[str, int], ...]  # (kind, how many), the most first.
    nodes: tuple[tuple[str, int], ...]  # (node, incidents that name it), the most first, without maintenance.
    savings: Savings
