"""`filesystem_outage`: a filesystem does not answer on two nodes or more.

Fires: as `filesystem_stall`, with two nodes or more that are blocked or get no answer.
Names: the ranks that are blocked, and the mount.
Acts: no job is restarted into the filesystem; when it answers again, the timeouts of its jobs are restarted.
"""

from __future__ import annotations

from slurm_watchdog.detect.filesystem_stall import FilesystemStall, filesystem_finding
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity


def detect(view: ClusterView, settings: FilesystemStall) -> list[Finding]:
    """One finding for each filesystem in trouble: BAD if two nodes or more get no answer from it."""
    return [
        filesystem_finding(view, filesystem, IncidentKind.FILESYSTEM_OUTAGE, settings.blocked_for)
        for filesystem in view.filesystems
    ]


SPEC = DetectorSpec(
    detect=detect,
    also=(FilesystemStall,),
    subject=Subject.FILESYSTEM,
    severity=Severity.CRITICAL,
    sentence="A filesystem does not answer",
    job_state="waits for a filesystem",
    wants_evidence=True,
    why_no_action="restarting would not help while the filesystem is unavailable",
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogFilesystem"),
)
