"""driver_stall: state D in a driver's call is named with the driver and the GPU; a filesystem's is left to others."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.detect.device_rules import DRIVER_STALL
from slurm_watchdog.detect.registry import causes_of
from slurm_watchdog.knowledge.drivers import driver_of
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, Severity, Truth
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import Role
from tests.builders.gpu_faults import card
from tests.builders.views import blocked, cluster, job, progress, seen

IOCTL = {"syscall": "ioctl", "path": "/dev/nvidia1", "mount": None, "wchan": "os_acquire_mutex"}
EXITS = {"syscall": "exit_group", "path": None, "mount": None, "wchan": "uvm_va_space_destroy"}


PACES = {"paces_s": (10.0,) * 60, "longest_pace_s": 10.0, "read_age_s": 1.0}


def view(
    seconds: float = 70.0, *, ranks: tuple[int, ...] = (3,), role: Role = Role.RANK, **changes: Any
) -> ClusterView:
    call = {
        **IOCTL,
        **{
            name: changes.pop(name)
            for name in ("syscall", "path", "wchan", "mount", "state", "candidates")
            if name in changes
        },
    }
    held = tuple(seen(r, role=role, state="D", blocked=blocked(seconds, **call)) for r in ranks)
    rest = tuple(seen(r) for r in range(4) if r not in ranks or role is not Role.RANK)
    node = NodeView(name="n2", reported_at=9_998.0, gpus=(card(1, node="n2", minor=1),))
    given: dict[str, Any] = {"processes": (*held, *rest), "progress": progress(75.0, **PACES)}
    return cluster(job(**{**given, **changes}), nodes=(node,))


WRONG = view()


def found(of: ClusterView) -> Finding:
    (finding,) = DRIVER_STALL.detect(of)
    return finding


def test_rank_in_a_call_on_the_gpus_file_is_named_with_gpu_driver_and_wait_channel() -> None:
    finding = found(WRONG)
    assert (finding.truth, finding.severity, finding.actionable) == (Truth.BAD, Severity.CRITICAL, True)
    (culprit,) = finding.culprits
    assert (culprit.rank, culprit.node, culprit.pid, culprit.gpu_uuid) == (3, "n2", 103, "GPU-n2-1")
    assert finding.exclude_nodes == ("n2",)
    assert finding.summary == (
        "Rank 3 (pid 103 on n2) of job 7 has been in state D in the NVIDIA driver (ioctl on /dev/nvidia1, at "
        "os_acquire_mutex) for 70 s: no signal ends it."
    )
    assert "driver_stall" in causes_of("collective_hang") & causes_of("wedged_teardown")


def test_teardown_without_a_file_is_known_by_its_wait_channel() -> None:
    finding = found(view(**EXITS))
    assert finding.actionable and "exit_group, at uvm_va_space_destroy" in finding.summary


def test_before_the_first_step_it_is_said_at_once_and_acted_on_later() -> None:
    young, old = found(view(70.0, progress=None)), found(view(310.0, progress=None))
    assert (young.truth, young.severity, young.actionable) == (Truth.BAD, Severity.WARNING, False)
    assert (old.severity, old.actionable) == (Severity.CRITICAL, True)


def test_many_nodes_at_once_are_no_nodes_fault() -> None:
    several = tuple(seen(r, node=f"n{r}", state="D", blocked=blocked(70.0, **IOCTL)) for r in range(4))
    finding = found(view(processes=several))
    assert (finding.truth, finding.actionable, finding.exclude_nodes) == (Truth.BAD, False, ())


@pytest.mark.parametrize(
    ("changes", "truth"),
    [
        ({"progress": progress(75.0)}, Truth.UNKNOWN),
        ({"progress": progress(75.0, **{**PACES, "longest_pace_s": 60.0})}, Truth.UNKNOWN),
        ({"progress": progress(75.0, **{**PACES, "paces_s": (90.0,) * 60})}, Truth.UNKNOWN),
        ({"progress": progress(75.0, phase="evaluation", **PACES)}, Truth.UNKNOWN),
        ({"phase": "checkpointing"}, Truth.UNKNOWN),
        ({"growing_age_s": 20.0}, Truth.UNKNOWN),
        ({"progress": progress(75.0, total_steps=500, **PACES)}, Truth.BAD),
        ({"seconds": 400.0, "progress": progress(405.0, **PACES), "growing_age_s": 20.0}, Truth.UNKNOWN),
        ({"seconds": 400.0, "progress": None, "growing_age_s": 20.0}, Truth.BAD),
        ({"seconds": 400.0, "progress": progress(405.0, total_steps=500, **PACES)}, Truth.BAD),
        ({"seconds": 400.0, "progress": progress(405.0, **{**PACES, "paces_s": (600.0,) * 60})}, Truth.UNKNOWN),
    ],
)
def test_job_that_may_be_well_or_is_over_is_not_acted_on(changes: dict[str, Any], truth: Truth) -> None:
    finding = found(view(**changes))
    assert (finding.truth, finding.actionable) == (truth, False)
    assert truth is not Truth.BAD or finding.severity is Severity.WARNING


def test_where_no_step_is_known_to_be_overdue_it_is_acted_on_later() -> None:
    finding = found(view(310.0, progress=progress(320.0)))
    assert (finding.severity, finding.actionable) == (Severity.CRITICAL, True)


@pytest.mark.parametrize(
    ("of", "truth"),
    [
        (view(30.0), Truth.UNKNOWN),
        (view(progress=progress(5.0)), Truth.UNKNOWN),
        (view(mount="/shared", path="/shared/log.txt", wchan="nv_x"), Truth.OK),
        (view(syscall="page fault", path=None, candidates=("/shared",)), Truth.OK),
        (view(path="/shared/x", wchan="nvme_wait"), Truth.UNKNOWN),
        (view(path=None, wchan=None), Truth.UNKNOWN),
        (view(state="S"), Truth.OK),
        (view(role=Role.HELPER, progress=None), Truth.UNKNOWN),
        (view(silent_nodes=("n2",)), Truth.UNKNOWN),
    ],
    ids=["short", "steps", "file", "page fault", "a disk", "not known", "S", "helper before a step", "silent"],
)
def test_what_is_short_of_a_filesystem_or_not_known_is_no_driver(of: ClusterView, truth: Truth) -> None:
    assert found(of).truth is truth


@pytest.mark.parametrize(
    ("path", "wchan", "name"),
    [
        ("/dev/nvidia-uvm", None, "NVIDIA"), ("/dev/nvidiactl", None, "NVIDIA"), ("/dev/nvidia-fs0", "nv_x", None),
        ("/dev/nvidia0", "nvfs_io_wait", None), ("/dev/nvidia-caps/nvidia-cap1", None, "NVIDIA"), (None, "_nv038416rm", "NVIDIA"), (None, "nvme_submit_sync_cmd", None),
        ("/dev/nvme0n1", None, None), ("/dev/infiniband/uverbs0", "down_read", "InfiniBand"), (None, "mlx5_cmd_exec", "InfiniBand"),
        (None, "cmd_exec", "InfiniBand"), ("/dev/kfd", None, "AMD"), ("/dev/gdrdrv", None, "GPUDirect"), (None, "nfs_wait_bit_killable", None),
        ("/dev/dri/renderD128", None, "a GPU driver"), (None, "dma_fence_default_wait", "a GPU driver"), (None, "cma_alloc", None),
        (None, "rpc_wait_bit_killable", None), (None, "folio_wait_bit_common", None), (None, "rmap_walk", None), (None, "", None), (None, None, None),
    ],
)  # fmt: skip
def test_drivers_are_told_from_disks_and_filesystems(path: str | None, wchan: str | None, name: str | None) -> None:
    driver = driver_of(path, wchan)
    assert driver is None if name is None else driver is not None and name in driver.name


def test_rank_that_was_killed_and_whose_other_thread_sleeps_in_the_driver_is_named_until_it_has_gone() -> None:
    killed = {"state": "Z", "threads": 2, "blocked": blocked(70.0, **IOCTL)}
    rest = tuple(seen(r) for r in range(3))
    finding = found(view(processes=(*rest, seen(3, gone_s=72.0, **killed))))
    assert (finding.truth, [c.rank for c in finding.culprits]) == (Truth.BAD, [3])
    assert "ioctl on /dev/nvidia1, at os_acquire_mutex" in finding.summary
    assert any("its main thread has ended" in fact for fact in finding.facts)
    gone = found(view(processes=(*rest, seen(3, gone_s=72.0, state="Z", threads=2))))
    assert gone.truth is not Truth.BAD
