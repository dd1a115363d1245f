"""What is remembered of nodes, GPUs, links and mounts: one event each, with its date and its reason."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct

GPU_PLACE = "GPU-"
"""Beginning of a place that is a GPU: NVML's UUIDs begin so (nvmlDeviceGetUUID)."""
MOUNT_PLACE = "mount:"
LINK_PLACE = "link:"


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
    """A person, a health check or Slurm itself has drained it, for a fault of the node."""
    LINK_DOWN = "link_down"
    """A network device of it lost its link, or died, as its kernel says."""
    RESTART_HELPED = "restart_helped"
    """A job ran well again once it was started without the node: more proof of the same incident."""
    SLOWED_JOB = "slowed_job"
    """The search for the node that makes a job slow has found it."""
    SLOWED_ONCE = "slowed_once"
    """The same by too few runs: what made them slow may have been something else."""
    QUARANTINED = "quarantined"
    """We took it out of service for its past, or left it to somebody else."""
    BY_OPERATOR = "by_operator"
    """A person had it drained or given back through a release that had `drain` and `undrain`."""
    GPU_MOVED = "gpu_moved"
    """A GPU with a history is in another node now; both are told."""
    MENDED = "mended"
    """A person says that the cause is gone: what was before counts no longer."""


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


class SuspectNode(Struct, frozen=True, kw_only=True):
    """A node with a past, and how suspicious that makes it."""

    node: str
    score: float
    place: str
    """The part that has the most of it; empty: the node as a whole."""
    recent: int
    """Events within 14 days."""
    reasons: tuple[str, ...] = ()
    """The newest of them, a sentence each; no word of them comes from a user."""
