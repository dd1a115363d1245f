"""An incident, a process and all that a decision about them depends on."""

from __future__ import annotations

from slurm_watchdog.config.policy import Policy
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.policy.guards import PolicyInput
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentKind, IncidentState, Severity
from tests.builders.views import slurm_job

LIMITS = Config(policy=Policy(max_excluded_nodes=3, max_drained_nodes=0, storm_cooldown=60))
INCIDENT = Incident(
    id="i",
    kind=IncidentKind.COLLECTIVE_HANG,
    subject="job:7",
    state=IncidentState.FIRING,
    severity=Severity.CRITICAL,
    job_ids=("7",),
    opened_at=0,
    pending_mono=0,
    runs=(("7", 0),),
    actionable=True,
    exclude_nodes=("n1",),
    mounts=("/shared",),
)
PROCESS = GpuProcess(
    node="n1",
    boot_id="b",
    pid=4711,
    start_ticks=9,
    uid=1000,
    user="eve",
    comm="python",
    job_id="6",
    minors=(0,),
)
SITUATION = PolicyInput(
    incident=INCIDENT,
    config=LIMITS,
    now_wall=1e6,
    rule=Rule(acts=True, ladder=spec_of(IncidentKind.COLLECTIVE_HANG).ladder, source="test"),
    job=slurm_job(),
    paused=None,
    blind=None,
    recent=(),
    busy=False,
    running_jobs=40,
    jobs_in_trouble=1,
    nodes_known=10,
    nodes_silent=0,
    mounts_stalled=(),
    step=500,
)
