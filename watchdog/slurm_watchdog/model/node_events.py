"""What is remembered of nodes, GPUs, links and mounts: one event each, with its date and its reason."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct

GPU_PLACE, MOUNT_PLACE, LINK_PLACE = "GPU-", "mount:", "link:"
"""Beginnings of places; NVML's UUIDs begin so (nvmlDeviceGetUUID)."""
TESTED_MARK = "slurm-watchdog-test-"
"""Begins the name of every reservation in which nodes are tested whose drain is lifted meanwhile."""


class NodeEventKind(StrEnum):
    """Kinds of events that no detector declares; all others have the kind of their incident."""

    TEST_FAILED = "test_failed"
    TEST_PASSED = "test_passed"
    TESTED = "tested"
    """The controller has tested it, and could not judge it, or not the part that is suspect."""
    USER_TEST_FAILED = "user_test_failed"
    USER_TEST_PASSED = "user_test_passed"
    """Of tests that a user ran for himself: to be read, held against nobody, and no reason to give a node back."""
    DRAINED = "drained"
    LINK_DOWN = "link_down"
    RESTART_HELPED = "restart_helped"
    SLOWED_JOB = "slowed_job"
    SLOWED_ONCE = "slowed_once"
    """The same by too few runs: what made them slow may have been something else."""
    QUARANTINED = "quarantined"
    """We have drained it because it is suspect, given it back, or left it to somebody else."""
    BY_OPERATOR = "by_operator"
    GPU_MOVED = "gpu_moved"
    """These two are of earlier releases."""
    MENDED = "mended"


class NodeEvent(Struct, frozen=True, kw_only=True):
    """One thing that happened to a node or a part of it."""

    key: str
    """Names the event: however often it is reported, it is one."""
    node: str
    kind: str
    """Of an incident, or a `NodeEventKind`."""
    at: float
    """When it happened, a date."""
    what: str
    """A sentence; it may hold words of a user's program."""
    place: str = ""
    """The part of the node: a GPU's UUID, `mount:/scratch`, `link:mlx5_0`, a word of a test; empty: not known."""
    job_id: str = ""
    chain: str = ""
    """Whose job, and its name (`1000/train`): the same for every link of a chain of jobs; empty: no job's."""
    incident_id: str = ""
    withdrawn_at: float | None = None
    withdrawn_why: str = ""
    """Why it is held against nobody after all, a sentence; empty: it stands."""
