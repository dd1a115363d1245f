"""Limits of jobs and nodes: control groups as slurmstepd makes them, and what the kernel writes of the node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.agent.collectors import usage
from slurm_watchdog.agent.proc import control_groups as groups
from slurm_watchdog.model.observations import Pressure, Resource, Usage

CAPTURE = Path(__file__).parents[2] / "captures" / "cgroups" / "22.05-v2-kill.txt"
SCOPE = "/system.slice/slurmstepd.scope/job_7"
V2_JOB = {
    "memory.current": "4831838208", "memory.max": "5368709120", "memory.peak": "5000000000",
    "memory.events": "low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\n", "memory.stat": "anon 1\ninactive_file 1073741824\nactive_file 0\nslab_reclaimable 4096\n",
    "memory.pressure": "some avg10=50.00 avg60=40.00 avg300=1.00 total=1\nfull avg10=30.00 avg60=25.50 avg300=1.00 total=1\n",
    "pids.current": "40", "pids.max": "max", "pids.events": "max 0\n",
}  # fmt: skip
V2_TASK = {"memory.current": "1000", "memory.max": "max", "memory.events": "oom_kill 1\n"}
V1 = {"memory.usage_in_bytes": "60000000", "memory.failcnt": "269", "memory.oom_control": "under_oom 0\noom_kill 0\n"}


def tree(root: Path, files: dict[str, dict[str, str]]) -> str:
    for group, content in files.items():
        (root / group.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            (root / group.lstrip("/") / name).write_text(text)
    return str(root)


def read(path: str) -> bytes | None:
    return Path(path).read_bytes() if Path(path).is_file() else None


def rows(cgroup: str, root: str) -> dict[tuple[Resource, str | None], Usage]:
    found = groups.usages_of([cgroup], read, root)
    return {(each.resource, each.step_id): each for each in found}


def test_groups_of_version_2_have_use_limit_and_kills_without_the_cache_of_files(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"": {"cgroup.controllers": "memory pids"}, SCOPE: V2_JOB, f"{SCOPE}/step_0/user/task_3": V2_TASK}
    )
    cgroup = f"0::{SCOPE}/step_0/user/task_3\n"
    found = rows(cgroup, root)
    assert found[Resource.MEMORY, None] == Usage(
        resource=Resource.MEMORY,
        used=4831838208 - 1073741824 - 4096,
        limit=5368709120,
        peak=5000000000,
        refused=1,
        by_limit=True,
        job_id="7",
    )
    assert found[Resource.MEMORY, "0"].limit is None and found[Resource.MEMORY, "0"].refused == 1
    assert found[Resource.PIDS, None] == Usage(resource=Resource.PIDS, used=40, refused=0, job_id="7")
    assert list(groups.pressures_of([cgroup], read, root)) == [
        Pressure(resource="memory", some_ratio=0.4, full_ratio=0.255, job_id="7")
    ]


def test_real_groups_of_version_2_after_a_kill_blame_the_step_and_its_job_and_no_other_step(tmp_path: Path) -> None:
    scope = "/system.slice/a1_slurmstepd.scope"
    found: dict[str, dict[str, str]] = {"": {"cgroup.controllers": "memory"}}
    for line in CAPTURE.read_text().splitlines():
        group, *words = re.split(r" (?=memory\.)", line)
        found[scope + group] = dict(each.split(" ", 1) for each in words)
        events = found[scope + group]["memory.events"]
        found[scope + group]["memory.events"] = re.sub(r" (?=[a-z])", "\n", events)
    root = tree(tmp_path, found)
    cgroups = [f"0::{scope}/job_22/{place}\n" for place in ("step_0/user/task_0", "step_batch")]
    rows = {each.step_id: each for each in groups.usages_of(cgroups, read, root)}
    assert {step: (row.refused, row.limit) for step, row in rows.items()} == {
        None: (1, 600 << 20), "0": (1, 300 << 20), "batch": (0, 600 << 20),
    }  # fmt: skip
    assert rows["0"].peak == 300 << 20
    assert (rows["0"].by_limit, rows["batch"].by_limit) == (True, False)


def test_groups_of_version_1_count_the_kills_of_all_tasks(tmp_path: Path) -> None:
    job = "/slurm/uid_1000/job_7"
    limits = {"memory.limit_in_bytes": "62914560", "memory.max_usage_in_bytes": "62914560"}
    killed = V1 | {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"}
    unlimited = {"memory.limit_in_bytes": "9223372036854771712"}
    levels = {f"{job}/step_0": V1 | limits, f"{job}/step_0/task_0": killed | unlimited, f"{job}/step_0/task_1": killed}
    root = tree(tmp_path, {f"/memory{at}": files for at, files in {job: V1 | unlimited, **levels}.items()})
    cgroups = [f"9:name=systemd:/\n4:memory:{job}/step_0/task_{n}\n3:cpuset:{job}\n0::/\n" for n in (0, 1)]
    job_row, step = groups.usages_of(cgroups, read, root)
    assert (job_row.step_id, job_row.limit, job_row.refused) == (None, None, 0)
    assert (step.step_id, step.used, step.limit, step.peak, step.refused) == ("0", 60000000, 62914560, 62914560, 2)
    assert (job_row.by_limit, step.by_limit) == (None, True), "its peak is its limit; a job without one tells nothing"


@pytest.mark.parametrize(
    ("events", "kills", "by_limit"),
    [
        (("low 0\noom 2\noom_kill 2\noom_group_kill 1\n", "oom 0\noom_kill 1\n", "oom_kill 1\n"), 2, True),
        (("oom 0\noom_kill 1\n", "oom 0\noom_kill 1\n", "oom 0\noom_kill 0\n"), 1, False),
        (("oom 1\noom_kill 0\n", "oom 0\noom_kill 1\n", "oom 0\noom_kill 2\n"), 3, True),
        (("", "", ""), None, None),
    ],
    ids=["all that is below", "the node had none left", "memory_localevents", "a kernel that does not count"],
)
def test_kills_of_a_step_are_counted_once_and_whether_its_limit_was_the_reason(
    events: tuple[str, str, str], kills: int | None, by_limit: bool | None, tmp_path: Path
) -> None:
    """The step's own group, and those of two tasks; Linux counts in all above, unless it is mounted with memory_localevents."""
    step = f"{SCOPE}/step_0"
    levels = {at: V2_TASK | {"memory.events": text}
              for at, text in zip((step, f"{step}/user/task_0", f"{step}/user/task_1"), events, strict=True)}  # fmt: skip
    root = tree(tmp_path, {"": {"cgroup.controllers": "memory"}, **levels})
    (row,) = groups.usages_of([f"0::{step}/user/task_{n}\n" for n in (0, 1)], read, root)
    assert (row.step_id, row.refused, row.by_limit) == ("0", kills, by_limit)


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/user.slice/user-1000.slice/job_7",
        "0::/",
        "",
        "0::/system.slice/docker-1.scope",
        "x",
        "4:memory:/slurm/job_7",
    ],
)
def test_groups_of_no_job_of_slurms_are_not_looked_at(cgroup: str, tmp_path: Path) -> None:
    assert list(groups.usages_of([cgroup], pytest.fail, str(tmp_path))) == []


def test_group_that_is_gone_by_now_says_nothing(tmp_path: Path) -> None:
    assert rows(f"0::{SCOPE}/step_0", str(tmp_path)) == {}


def test_what_the_kernel_says_of_the_node() -> None:
    meminfo = b"MemTotal:       24684084 kB\nMemFree: 3 kB\nMemAvailable:   20000000 kB\n"
    assert usage.parse_meminfo(meminfo) == Usage(resource=Resource.MEMORY, used=4684084 << 10, limit=24684084 << 10)
    threads = usage.parse_threads(b"0.83 1.10 1.39 2/204 31337\n", [32768, None, 190000])
    assert threads == Usage(resource=Resource.PIDS, used=204, limit=32768)
    assert usage.parse_open_files(b"1216\t0\t9223372036854775807\n") == Usage(resource=Resource.FILES, used=1216)
    assert (
        usage.parse_file_limit(b"Max open files            32768                65536                files     \n")
        == 32768
    )
    assert (
        usage.parse_file_limit(b"Max open files            unlimited            unlimited            files     \n")
        is None
    )


PIECES = st.sampled_from(
    [b"some", b"full", b" avg10=", b"avg60=", b"1.00", b"max", b"oom_kill", b" ", b"\n", b":", b"::", b"/job_7", b"/step_0",
     b"/slurm/uid_1", b"9" * 30, b"-1", b"MemTotal:", b"MemAvailable:", b"kB", b"Max open files", b"\xff", b"\0", b"/", b"memory"]
)  # fmt: skip


@settings(max_examples=500)
@given(st.lists(st.one_of(PIECES, st.binary(max_size=6)), max_size=40))
def test_no_text_makes_a_parser_raise_or_say_something_impossible(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    pressure = groups.parse_pressure(data, "memory")
    assert pressure is None or (0 <= pressure.some_ratio <= 1 and 0 <= pressure.full_ratio <= 1)
    assert all(0 <= number < groups.UNLIMITED for number in groups.parse_counts(data).values())
    number = groups.parse_number(data)
    assert number is None or 0 <= number < groups.UNLIMITED
    for parse in (usage.parse_meminfo, usage.parse_open_files, lambda text: usage.parse_threads(text, [1])):
        row = parse(data)
        assert row is None or row.used >= 0
    usage.parse_file_limit(data)
    text = data.decode(errors="replace")
    assert all(row.job_id for row in groups.usages_of([text], lambda path: data, "/x"))
    assert len(list(groups.pressures_of([text], lambda path: data, "/x"))) <= 3
