"""Nodes and jobs that notice a full filesystem."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.node_view import NodeView, SeenEvent, SeenMount
from slurm_watchdog.model.observations import MountProbe
from tests.builders.logged_runs import errors
from tests.builders.views import progress

NOW = 10_000.0


ENOSPC = "OSError: [Errno 28] No space left on device: '/shared/ckpt/step_400/rank3.pt'"


def mount(point: str = "/shared", error: str | None = None, *, at: float = NOW - 5, **changes: Any) -> SeenMount:
    given = {
        "mount": point,
        "responding": True,
        "seconds": 0.1,
        "fs_type": "nfs4",
        "device": "server:/export",
    }
    return SeenMount(at=at, probe=MountProbe(**{**given, "error": error, **changes}))


def node(name: str, *mounts: SeenMount, events: tuple[SeenEvent, ...] = ()) -> NodeView:
    return NodeView(name=name, reported_at=NOW - 2, mounts=mounts, events=events)


STANDS = {"errors": errors((30.0, f"[rank3]: {ENOSPC}")), "progress": progress(40.0)}
