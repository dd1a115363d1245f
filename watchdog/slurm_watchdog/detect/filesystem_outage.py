"""`filesystem_outage`: a filesystem does not answer on two nodes or more. No job is restarted for it.

Fires: as `filesystem_stall`, with two nodes or more that are blocked or get no answer.
Names: the ranks that are blocked, and the mount.
Note: hangs that it explains are not announced, and no job is restarted into the filesystem. When it answers
again, the timeouts of its jobs are restarted.
"""

from __future__ import annotations

from slurm_watchdog.detect.filesystem_stall import judge
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, Kind


def detect(view: ClusterView, *, blocked_for_s: float) -> list[Finding]:
    """One finding for each filesystem in trouble: BAD if two nodes or more get no answer from it."""
    return [judge(view, filesystem, Kind.FILESYSTEM_OUTAGE, blocked_for_s) for filesystem in view.filesystems]
