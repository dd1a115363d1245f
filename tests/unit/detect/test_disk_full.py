"""disk_full: what probes, kernels and logs say of a filesystem without room is one incident, with its mount
and node."""

from __future__ import annotations

import pytest

from slurm_watchdog.detect.disk_full import DiskFull, detect
from slurm_watchdog.diagnose.logs.root_cause import running
from slurm_watchdog.model.cluster_view import Checkpoint, ClusterView
from slurm_watchdog.model.incidents import Finding, Severity, Truth
from slurm_watchdog.model.node_view import SeenEvent
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent
from slurm_watchdog.model.past_runs import EndedJob
from tests.builders.full_disks import ENOSPC, NOW, STANDS, mount, node
from tests.builders.logged_runs import errors
from tests.builders.views import cluster, job, progress, slurm_job


def kernel(age_s: float = 30.0, severity: FaultSeverity = FaultSeverity.ERROR) -> SeenEvent:
    line = "EXT4-fs (sda2): Delayed block allocation failed for inode 12 with error -28"
    event = NodeEvent(source="kernel_log", name="no_space", severity=severity, age_s=0, line=line, device="sda2")
    return SeenEvent(at=NOW - age_s, event=event)


def judge(view: ClusterView) -> list[Finding]:
    return detect(view, DiskFull())


def bad(view: ClusterView) -> list[Finding]:
    return [finding for finding in judge(view) if finding.truth is Truth.BAD]


def test_a_log_line_is_about_the_mount_that_its_file_lies_on() -> None:
    (finding,) = bad(cluster(job(**STANDS), nodes=(node("n1", mount()), node("n2", mount()))))
    assert (finding.subject, finding.job_ids) == ("full:/shared", ("7",))
    assert [(c.node, c.rank, c.mount, c.path) for c in finding.culprits] == [
        ("n2", 3, "/shared", "/shared/ckpt/step_400/rank3.pt")
    ]
    assert finding.severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("error_age_s", "step_age_s", "severity", "is_held"),
    [
        (3.0, 3.0, Severity.WARNING, True),  # read in one look: it may train on, and is not restarted meanwhile
        (3.0, 3.2, Severity.CRITICAL, True),
        (20.0, 20.0, Severity.CRITICAL, True),
        (8.0, 3.0, Severity.WARNING, False),
    ],
)
def test_a_job_whose_last_step_and_error_were_read_together_is_not_restarted_and_is_critical_once_no_step_follows(
    error_age_s: float, step_age_s: float, severity: Severity, is_held: bool
) -> None:
    trains = progress(step_age_s, last_increase_age_s=step_age_s, step_s=2.0)
    dying = job(errors=errors((error_age_s, f"[rank3]: {ENOSPC}")), progress=trains)
    (finding,) = bad(cluster(dying, nodes=(node("n1", mount()), node("n2", mount()))))
    assert (finding.severity, bool(finding.mounts)) == (severity, is_held)


def test_probe_and_log_of_one_mount_are_one_incident() -> None:
    full = mount(error="ENOSPC: No space left on device")
    (finding,) = bad(cluster(job(**STANDS), nodes=(node("n1", full), node("n2", full))))
    assert finding.subject == "full:/shared"
    assert len(finding.facts) == 3


def test_a_nodes_own_disk_is_a_place_of_its_own() -> None:
    full = mount("/local", "No space left on device", fs_type="ext4", device="/dev/sda2")
    found = bad(cluster(nodes=(node("n1", full, events=(kernel(),)), node("n2", full))))
    assert [f.subject for f in found] == ["full:n1:/local", "full:n2:/local"]
    assert len(found[0].facts) == 2


def test_the_kernels_word_about_a_disk_that_nobody_probes_names_the_disk() -> None:
    (finding,) = bad(cluster(nodes=(node("n1", events=(kernel(),)),)))
    assert finding.subject == "full:n1/sda2"
    assert [(c.node, c.path) for c in finding.culprits] == [("n1", "sda2")]


def test_a_quota_is_called_so_and_a_job_whose_mount_is_not_known_is_the_subject() -> None:
    line = "OSError: [Errno 122] Disk quota exceeded: 'out'"
    (finding,) = bad(cluster(job(errors=errors((30.0, line)), progress=progress(5.0))))
    assert finding.subject == "full:job/7"
    assert finding.summary.startswith("The quota is used up")
    assert finding.severity is Severity.WARNING


def test_a_run_that_ended_of_it_is_told_of() -> None:
    run = running(job(**STANDS), NOW)
    over = EndedJob(job=slurm_job(state="FAILED"), ended_at=NOW - 10, run=run)
    (finding,) = bad(cluster(ended=(over,), nodes=(node("n2", mount()),)))
    assert finding.subject == "full:/shared"


def test_what_the_log_said_stands_as_long_as_a_probe_finds_it_full() -> None:
    full, said = mount(error="ENOSPC: No space left on device"), errors((3000.0, f"[rank3]: {ENOSPC}"))
    dead = job(errors=said, progress=progress(3010.0))
    (finding,) = bad(cluster(dead, nodes=(node("n2", full),)))
    assert (finding.job_ids, finding.mounts) == (("7",), ("/shared",))
    trains = job(errors=said, progress=progress(5.0))
    (finding,) = bad(cluster(trains, nodes=(node("n2", full),)))
    assert (finding.job_ids, finding.mounts) == (("7",), ())


HEALTHY: dict[str, ClusterView] = {
    "nobody says anything": cluster(job(), nodes=(node("n1", mount()),)),
    "a probe could write since": cluster(job(**STANDS), nodes=(node("n2", mount(wrote=True)),)),
    "a checkpoint was completed since": cluster(job(**STANDS, checkpoint=Checkpoint(step=480, age_s=10))),
    "it is long ago": cluster(job(**{**STANDS, "errors": errors((601.0, ENOSPC))})),
    "the kernel merely warns": cluster(nodes=(node("n1", events=(kernel(severity=FaultSeverity.WARNING),)),)),
    "the kernel said so long ago": cluster(nodes=(node("n1", events=(kernel(601.0),)),)),
    "another error of a probe": cluster(nodes=(node("n1", mount(error="EACCES: Permission denied")),)),
    "the node is silent": cluster(nodes=(node("n1", mount(error="ENOSPC"), events=(kernel(),)),), silent_nodes=("n1",)),
    "a node of the job is silent": cluster(job(**STANDS, silent_nodes=("n2",))),
    "another error": cluster(job(errors=errors((30.0, "OSError: [Errno 5] Input/output error")))),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_incident_if(name: str) -> None:
    assert bad(HEALTHY[name]) == []


def test_disk_full_is_ok_after_a_successful_write() -> None:
    for name in ("a probe could write since", "it is long ago", "the kernel said so long ago"):
        assert [finding.truth for finding in judge(HEALTHY[name])] == [Truth.OK]
