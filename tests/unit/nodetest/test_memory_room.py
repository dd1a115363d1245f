"""How much memory the copies of a node's test take: within the node's, and within the cgroup of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.nodetest.probes.cores import cgroup_room, copy_size, memory_within

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712
"""What memory.limit_in_bytes has where no limit is set."""


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"memory.{name}").write_text(f"{text}\n")


def test_of_nested_limits_of_version_2_the_nearest_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    job = tmp_path / "system.slice/slurmstepd.scope/job_7"
    write(job, max=str(GIB), high="max", current=str(600 << 20), stat="anon 5\ninactive_file 104857600")
    write(job / "step_0/user/task_0", max="max", current=str(10 << 20))
    own = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
    assert cgroup_room(own, str(tmp_path)) == GIB - (500 << 20)
    write(job / "step_0", max="max", high=str(100 << 20), current=str(20 << 20))
    assert cgroup_room(own, str(tmp_path)) == 80 << 20


def test_of_version_1_the_memory_controllers_path_counts(tmp_path: Path) -> None:
    write(tmp_path / "memory", limit_in_bytes=str(UNLIMITED_V1), usage_in_bytes=str(GIB))
    job = tmp_path / "memory/slurm/uid_1000/job_7"
    write(job, limit_in_bytes=str(GIB), usage_in_bytes=str(GIB // 2), stat="cache 1\ntotal_inactive_file 4096")
    own = "12:cpuset:/slurm/uid_1000/job_7/step_0\n5:memory:/slurm/uid_1000/job_7/step_0\n0::/\n"
    assert cgroup_room(own, str(tmp_path)) == GIB // 2 + 4096


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/../../job\n", "5:memory:/job\n"])
def test_without_a_limit_that_can_be_read_there_is_none(tmp_path: Path, own: str) -> None:
    assert cgroup_room(own, str(tmp_path)) is None


@pytest.mark.parametrize(
    ("workers", "available", "size"),
    [
        (1, 64 * GIB, 64 << 20),
        (32, 64 * GIB, 64 << 20),
        (128, 64 * GIB, 32 << 20),
        (2, 100 << 20, 8 << 20),
        (2, 60 << 20, 0),  # the smallest buffers would take more than half of it
        (128, 2 * GIB, 0),
    ],
)
def test_buffers_stay_within_their_share_and_are_not_made_where_they_would_not_fit(
    workers: int, available: int, size: int
) -> None:
    assert copy_size(workers, available) == size
    assert 2 * workers * size <= available // 2


def test_a_job_with_too_little_memory_has_no_figure_and_no_fault() -> None:
    found = memory_within(1 << 20, 0.2)
    assert found["figures"] == {}
    assert "1 MiB of memory, too little" in found["facts"]["skipped"]
