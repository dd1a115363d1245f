"""`disk_full`: a filesystem has no space left, or a user's quota is used up: where, and which node or job noticed it.

Three witnesses: a probe of the mount, the kernel of a node, and a job's log. A log line names a file at best; its mount
is looked up among those that agents probe. A probe that can write again clears it.

Fires: a probe, a kernel line or a log line says that no space is left, or that a quota is used up.
Names: the mount, and who noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_watchdog.base.text import shortened
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.diagnose.logs.reported_run import attributed_errors
from slurm_watchdog.diagnose.logs.root_cause import running
from slurm_watchdog.knowledge.limits import span
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Culprit, Finding, Severity
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import FaultSeverity, MountProbe
from slurm_watchdog.model.past_runs import PastRun

FULL = re.compile(r"ENOSPC|EDQUOT|No space left on device|[Dd]isk quota exceeded|[Qq]uota exceeded")
"""How the probe's answer says it: errno's name or its text (errno(3))."""
LOUD = frozenset({FaultSeverity.ERROR, FaultSeverity.CRITICAL})
SAME_LOOK_S = 0.1  # A step and the error after it are often read in one look: which came first is not known.
NEXT_STEP_S = 1.0  # After two steps, an interval of reports and so much more a job that trains on shows it.
NETWORK = re.compile("nfs|lustre|gpfs|beegfs|ceph|weka|fuse|cifs|smb|glusterfs|afs|panfs|9p|gfs2|ocfs2")
"""Beginnings of the types of filesystems that are the same one on every node (filesystems(5) and the vendors'
names)."""
_FILE = re.compile(r"""['"](?P<path>/[^'"]{1,400})['"]|(?:^|[\s(\[=:])(?P<bare>/[\w.+@%,~/-]{1,400})""")


@dataclass
class _FullDisk:
    """One filesystem, or what is known of it, and who said what about it."""

    name: str
    where: str
    evidence: list[str] = field(default_factory=list)
    culprits: list[Culprit] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    stands: bool = False  # A job that noticed has made no step since.
    holds: bool = False  # Or none that is known: it is not restarted.
    since: float = 0.0
    writable: bool = False  # A newer probe could write there.
    full: bool = False  # By a probe: what a log has said stays true for as long.


@dataclass(frozen=True, kw_only=True)
class DiskFull:
    """No space is left on a filesystem, or a quota is used up: a probe, a kernel or a job's log says so.
    Never acted on."""

    recent: float = span(600.0, "A line of a log or of the kernel counts for so long.")


def detect(view: ClusterView, settings: DiskFull) -> list[Finding]:
    """One finding for each filesystem, or job where its mount is not known, about which someone said so
    lately, and an OK for each that a probe can write to."""
    places: dict[str, _FullDisk] = {}
    silent = set(view.silent_nodes)
    nodes = [node for node in view.nodes if node.name not in silent] if _is_mentioned(view) else ()
    for node in nodes:
        _from_probes(view, node, places)
    for node in nodes:
        _from_kernel(view, node, places, settings.recent)
    for job in view.jobs if _logs_say_full(view) else ():
        if not job.silent_nodes and _says_full(e.event.pattern for e in job.errors):
            _from_log(view, job, running(job, view.now), places, settings.recent)
    for ended in view.ended:
        if ended.run is not None:
            last = JobView(job=ended.job, run_age_s=0.0)
            _from_log(view, last, ended.run, places, settings.recent)
    return [_finding(view, key, place) for key, place in places.items()]


def _is_mentioned(view: ClusterView) -> bool:
    """Whether anybody may have said that something is full, or is asked whether it still is: then all nodes
    are listened to."""
    if view.asked is None or any(subject.startswith("full:") for subject in view.asked):
        return True
    return (
        any(node.events or node.mounts for node in view.nodes if not node.quiet)
        or _logs_say_full(view)
        or _says_full(e.pattern for ended in view.ended if ended.run for e in ended.run.errors)
    )


def _logs_say_full(view: ClusterView) -> bool:
    return _says_full(e.event.pattern for job in view.ageless_jobs for e in job.errors)


def _says_full(patterns: Iterable[str | None]) -> bool:
    return any(each in log_table().storage_full for each in patterns)


# ---------------------------------------------------------------------------------------- the witnesses


def _from_probes(view: ClusterView, node: NodeView, places: dict[str, _FullDisk]) -> None:
    for seen in node.mounts:
        probe = seen.probe
        full = probe.error is not None and FULL.search(probe.error) is not None
        if not full and not probe.wrote:
            continue
        place = _place(places, node.name, probe)
        if not full:
            place.writable = True
            continue
        place.full = True
        place.evidence.append(f"a probe of {probe.mount} on {node.name}: {probe.error}")
        place.culprits.append(Culprit(node=node.name, mount=probe.mount, reason=f"a probe: {probe.error}"))
        place.since = max(place.since, view.now - seen.at)


def _from_kernel(view: ClusterView, node: NodeView, places: dict[str, _FullDisk], recent_s: float) -> None:
    """Only what the kernel says of a device as an error; a warning is often of a container's layer or a full /boot."""
    for seen in node.events:
        event = seen.event
        age_s = view.now - seen.at
        if event.name != "no_space" or event.severity not in LOUD:
            continue
        devices = {(m.probe.device or "").rpartition("/")[2]: m.probe for m in reversed(node.mounts)}
        probe = devices.get(event.device) if event.device else None
        name = event.device or "a filesystem"
        if probe is not None:
            place = _place(places, node.name, probe)
        else:
            place = places.setdefault(f"full:{node.name}/{name}", _FullDisk(name=name, where=f" of {node.name}"))
        if age_s > recent_s or place.writable:
            continue
        place.evidence.append(f"the kernel of {node.name}, {age_s:.0f} s ago: {event.line}")
        mount, reason = event.mount if probe is None else probe.mount, shortened(event.line, 200)
        place.culprits.append(Culprit(node=node.name, mount=mount, path=event.device, reason=reason))
        place.since = max(place.since, age_s)


def _from_log(view: ClusterView, job: JobView, run: PastRun, places: dict[str, _FullDisk], recent_s: float) -> None:
    """What a job's log says. That a checkpoint was completed since, or that a probe could write, takes it back."""
    job_id = job.job.job_id
    last_increase_age_s = None if job.progress is None else job.progress.last_increase_age_s
    saved_age_s = float("inf") if job.checkpoint is None else job.checkpoint.age_s
    for evidence in attributed_errors(run) if _says_full(error.pattern for error in run.errors) else ():
        error = evidence.error
        if error.pattern not in log_table().storage_full:
            continue
        age_s = view.now - error.at
        match = _FILE.search(error.line)
        path = None if match is None else match["path"] or match["bare"]
        found = _mount_of(view, job, evidence.node, path)
        if found is None:
            place = places.setdefault(f"full:job/{job_id}", _FullDisk(name=f"what job {job_id} writes to", where=""))
        else:
            place = _place(places, *found)
        is_old = age_s > recent_s and not place.full
        mounts = [] if found is None else [s for node in view.nodes if node.name == found[0] for s in node.mounts]
        written = any(s.probe.wrote and s.at > error.at for s in mounts if found and s.probe.mount == found[1].mount)
        if is_old or saved_age_s < age_s or written:
            continue
        if job_id not in place.jobs:
            place.jobs.append(job_id)
        place.evidence.append(f"job {job_id}, {age_s:.0f} s ago: {error.line}")
        place.culprits.append(
            Culprit(
                node=evidence.node, rank=evidence.rank, pid=evidence.pid, path=path,
                mount=found[1].mount if found is not None else None, reason=shortened(error.line, 200),
            )
        )  # fmt: skip
        place.since = max(place.since, age_s)
        ahead_s = float("inf") if last_increase_age_s is None else last_increase_age_s - age_s
        step_s = 0.0 if job.progress is None else job.progress.step_s or 0.0
        holds = ahead_s > -SAME_LOOK_S
        place.holds = place.holds or holds
        place.stands = place.stands or ahead_s > 0 or (holds and age_s > job.read_later_s + NEXT_STEP_S + 2 * step_s)


def _mount_of(view: ClusterView, job: JobView, its_node: str | None, path: str | None) -> tuple[str, MountProbe] | None:
    """(node, the newest probe of the mount that `path` lies on), of the rank's node if it is known, else of a
    shared mount."""
    if path is None:
        return None
    best: tuple[str, MountProbe] | None = None
    for node in view.nodes:
        if node.name not in job.job.nodes or (its_node is not None and node.name != its_node):
            continue
        for seen in node.mounts:
            probe = seen.probe
            point = probe.mount.rstrip("/")
            inside = path == point or path.startswith(point + "/")
            if not inside or (its_node is None and not _is_shared(probe)):
                continue
            if best is None or len(probe.mount) > len(best[1].mount):
                best = (node.name, probe)
    return best


def _is_shared(probe: MountProbe) -> bool:
    return NETWORK.match(probe.fs_type or "") is not None


def _place(places: dict[str, _FullDisk], node: str, probe: MountProbe) -> _FullDisk:
    shared = _is_shared(probe)
    key = f"full:{probe.mount}" if shared else f"full:{node}:{probe.mount}"
    return places.setdefault(key, _FullDisk(name=probe.mount, where="" if shared else f" of {node}"))


# ---------------------------------------------------------------------------------------- the sentence


def _finding(view: ClusterView, key: str, place: _FullDisk) -> Finding:
    finding = SPEC.about(key, *place.jobs)
    if not place.evidence:
        return finding.ok(f"{place.name}{place.where} can be written to")
    culprits: dict[tuple[object, ...], Culprit] = {}
    for each in place.culprits:
        culprits.setdefault((each.node, each.rank, each.mount), each)
    quota = all("uota" in line for line in place.evidence)
    nodes = sorted({c.node for c in place.culprits if c.node})
    jobs = f" It concerns job {', '.join(place.jobs[:8])}." if place.jobs else ""
    what = "The quota is used up on" if quota else "No space is left on"
    seen = f", seen on {', '.join(nodes[:8])}" if nodes and not place.where else ""
    severity = Severity.CRITICAL if place.stands or not place.jobs else Severity.WARNING
    mounts = (f"{place.name}{place.where}",) if place.stands or place.holds else ()
    return finding.bad(
        f"{what} {place.name}{place.where}{seen}: {place.evidence[0]}.{jobs} Nothing that is written there is kept.",
        severity=severity,
        mounts=mounts,
        culprits=tuple(culprits.values())[:16],
        facts=tuple(place.evidence[:8]),
        duration_s=max(0.0, place.since),
    )


SPEC = DetectorSpec(
    detect=detect,
    settings=DiskFull,
    subject=Subject.FILESYSTEM,
    severity=Severity.CRITICAL,
    sentence="A filesystem is full",
    why_no_action="a person has to free space",
    alerts=("SlurmWatchdogFilesystem",),
)
