"""The benchmark measures what it says, prints nothing but figures, and leaves nothing behind. How fast
anything is, is not tested here."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.bench import hostile_load, logs, noise, process_tree, scheduling
from lab.bench.figures import Figures, quantile
from lab.bench.metrics_text import parse_metrics
from tests.munged import THERE

CHECKOUT = Path(__file__).resolve().parents[3]
AGENT_FIGURES = {
    "both.cpu_percent_of_core",
    "both.pss_mib",
    "agent.cpu_percent_of_core",
    "agent.pss_mib",
    "agent.rss_mib",
    "agent.wakeups_per_second",
    "agent.reads_per_tick",
    "agent.descriptors",
    "agent.threads",
    "both.tick_cpu_p50_ms",
    "both.tick_cpu_p99_ms",
}
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the load")


# ---------------------------------------------------------------------------------------- figures


def test_a_figure_is_a_line_of_json_and_a_missed_bound_is_remembered() -> None:
    out = io.StringIO()
    figures = Figures(out)
    figures.add("a.kept", 0.0999949, "%", at_most=0.1)
    figures.add("a.missed", 999_999.0, "1/s", at_least=1e6)
    figures.add("a.free", 123456.0, "B")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"bench": "a.kept", "value": 0.09999, "unit": "%", "bound": 0.1, "ok": True},
        {"bench": "a.missed", "value": 1e6, "unit": "1/s", "bound": 1e6, "ok": False},
        {"bench": "a.free", "value": 123500.0, "unit": "B", "bound": None, "ok": None},
    ]
    assert figures.missed == ["a.missed"]
    figures.add("a.rough", 5.0, "%", at_most=1.0, doubtful=True)
    assert json.loads(out.getvalue().splitlines()[-1])["ok"] is None
    assert (figures.missed, figures.doubtful) == (["a.missed"], ["a.rough"])


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 1001)]
    assert [quantile(values, share) for share in (0.5, 0.99, 0.999, 1.0)] == [500, 990, 999, 1000]
    assert quantile([7.0], 0.999) == quantile([7.0], 0.0) == 7.0
    with pytest.raises(ValueError):
        quantile([], 0.5)


# ---------------------------------------------------------------------------------------- what /proc says


def test_a_stat_line_is_read_whatever_the_name_of_the_process_holds() -> None:
    text = "77 (a) R (b) S 5 77 77 0 -1 4194560 900 0 0 0 12 3 40 2 20 0 9 0 8812 1 2 3\n"
    assert process_tree.parse_stat(text) == process_tree.Stat(ppid=5, used=15, used_by_ended_children=42, start=8812)


def test_fields_are_the_first_number_of_each_line() -> None:
    text = "Rss:  5120 kB\nPss: 2048 kB\nName:\tidle\nsyscr: 17\nempty:\n[rollup]\n"
    fields = process_tree.parse_fields(text)
    assert fields == {"Rss": 5120, "Pss": 2048, "syscr": 17}


def test_a_tree_holds_children_of_children_and_nobody_else() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 20
        while len(process_tree.read_tree(process.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        tree = process_tree.read_tree(process.pid)
        assert len(tree) == 2
        assert process.pid in tree
        usage = process_tree.read_usage(process.pid, None)
        assert (usage.processes, usage.threads) == (2, 2)
        assert usage.rss_bytes >= usage.pss_bytes > 1024**2
        assert usage.descriptors >= 6
        assert usage.reads > 10
        assert usage.cpu_s == usage.cpu_proc_s
    finally:
        process.communicate(b"\n", timeout=20)
    assert process_tree.read_tree(process.pid) == {}


V1 = (
    "30 23 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"
    "33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "41 30 0:37 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("mounts", "own", "expected"),
    [
        (V1, "4:cpu,cpuacct:/\n0::/\n", Path("/sys/fs/cgroup/cpu,cpuacct")),
        (V2, "0::/user.slice\n", Path("/sys/fs/cgroup/user.slice")),
        (V2, "0::/\n", Path("/sys/fs/cgroup")),
        ("30 23 0:26 / /proc rw - proc proc rw\n", "", None),
    ],
)
def test_the_control_group_is_made_where_cpu_time_is_counted(mounts: str, own: str, expected: Path | None) -> None:
    assert process_tree.find_group_parent(mounts, own) == expected


def test_cpu_time_of_children_that_ended_is_counted() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True)\n"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with process_tree.started("test", ["sleep", "60"], log) as idle:
            assert idle.cpu_s() < 0.2
        command = [sys.executable, "-c", code.replace("input()", "import time; time.sleep(60)")]
        with process_tree.started("test", command, log) as target:
            end = time.monotonic() + 20
            while not log.read_bytes() and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.2)
            assert 0.3 <= target.cpu_s() < 5
            assert target.usage().cpu_proc_s >= 0.29
        assert process_tree.read_tree(target.pid) == {}
        assert target.group is None or not target.group.exists()


# ---------------------------------------------------------------------------------------- what the scheduler says

TRACE = """\
# tracer: nop
          <idle>-0       [001] d..2.   100.000100: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=a b next_pid=7 next_prio=120
             a b-7       [001] d..2.   100.000400: sched_switch: prev_comm=a b prev_pid=7 prev_prio=120 prev_state=R+ ==> next_comm=x next_pid=9 next_prio=120
               x-9       [001] d..2.   100.000500: sched_switch: prev_comm=x prev_pid=9 prev_prio=120 prev_state=S ==> next_comm=a b next_pid=7 next_prio=120
             a b-7       [001] .....   100.000550: sched_process_fork: comm=a b pid=7 child_comm=a b child_pid=12
             a b-7       [001] d..2.   100.000600: sched_switch: prev_comm=a b prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120
          <idle>-0       [001] d..2.   105.000100: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=a b next_pid=7 next_prio=120
             a b-7       [001] d..2.   105.000200: sched_switch: prev_comm=a b prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120
"""


def test_a_stretch_lasts_until_the_thread_gives_way_by_itself() -> None:
    lines = TRACE.splitlines()
    schedule = scheduling.arrange(scheduling.parse_switches(lines), frozenset({7}))
    assert [round(each * 1e6) for each in schedule.stretches_s] == [400, 100], "300 us, put aside, 100 us more"
    assert len(schedule.runs) == 3
    assert schedule.sleeps == {7: 2}
    assert [round((end - begin) * 1e6) for begin, end in scheduling.bursts(schedule.runs, 0.5)] == [500, 100]
    assert list(scheduling.parse_forks(lines)) == [12]


# ---------------------------------------------------------------------------------------- noise, logs, metrics


def test_the_change_of_a_quantile_is_that_of_all_rounds_together() -> None:
    calm = noise.summarise([0.001] * 998 + [0.002, 0.0015])
    disturbed = noise.summarise([0.001] * 985 + [0.003] * 15)
    assert noise.pooled([calm], 0.999) == 0.0015
    assert noise.pooled([calm, calm], 0.999) == 0.0015, "two of 2,000 are longer"
    assert noise.pooled([calm, disturbed], 0.999) == 0.003
    assert noise.change_percent([(calm, disturbed)], 0.999) == pytest.approx(100)
    same, mixed = [(calm, calm)] * 6, [(calm, calm), (calm, disturbed)] * 3
    assert noise.change_percent(same, 0.999) == noise.uncertainty_percent(same, 0.999) == 0
    assert noise.uncertainty_percent(mixed, 0.999) > 5


@pytest.mark.parametrize("kind", logs.KINDS)
def test_every_kind_of_log_is_read_to_its_end(kind: str, tmp_path: Path) -> None:
    pieces = list(logs.chunks(logs.KINDS[kind], 100_000, 50_000))
    rate = logs.measure(iter(pieces), tmp_path / "log", warm_up=0)
    assert rate.lines == sum(number for _, number in pieces) > 500
    assert rate.bytes == sum(len(data) for data, _ in pieces)
    assert rate.skipped == 0
    assert rate.cpu_s > 0
    assert (rate.events > 0) == (kind not in ("text", "nccl"))


def test_metrics_are_found_by_name_and_labels() -> None:
    text = '# HELP a b\n# TYPE a gauge\na 1.5\nb_sum{x="y z"} 2e-05\n\n'
    assert parse_metrics(text) == {"a": 1.5, 'b_sum{x="y z"}': 2e-05}


# ---------------------------------------------------------------------------------------- the whole


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For the benchmark's own temporary files; the job's owner may go there, too."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-watchdog-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def start_bench(scratch: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lab.bench", *words]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.Popen(
        command, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def leftovers(bench: int, scratch: Path) -> list[str]:
    """Processes, control groups, traces and files that the benchmark with this pid has not taken away."""
    found = [str(path) for path in scratch.iterdir()]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(scratch).encode() in (entry / "cmdline").read_bytes():
                found.append(f"process {entry.name}: {(entry / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    mounts, own = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    for parent in (process_tree.find_group_parent(mounts, own), scheduling.TRACING / "instances"):
        for pattern in (f"slurm-watchdog-bench.{bench}.*", f"slurm_bench{bench}"):
            found += [str(path) for path in parent.glob(pattern)] if parent is not None else []
    return found


@needs_compiler
@pytest.mark.thorough
def test_a_short_run_prints_every_figure_as_json_and_leaves_nothing_behind(scratch: Path) -> None:
    words = ("agent", "--seconds", "4", "--warm-up", "1", "--interval", "1", "--no-peers")
    bench = start_bench(scratch, *words)
    out, err = bench.communicate(timeout=200)
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["bench"] for row in rows} >= AGENT_FIGURES, err
    assert all(set(row) == {"bench", "value", "unit", "bound", "ok"} for row in rows)
    assert bench.returncode == int(any(row["ok"] is False for row in rows)), err
    values = {row["bench"]: row["value"] for row in rows}
    assert values["agent.cpu_percent_of_core"] > 0
    assert values["agent.pss_mib"] > 1
    assert values["agent.report_bytes"] > 1000, "eight ranks and ten logs are in it"
    assert leftovers(bench.pid, scratch) == []


@needs_compiler
@pytest.mark.thorough
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse") or not THERE,
    reason="needs root, FUSE and munge: processes of several users, mounts that never answer",
)
def test_a_short_run_beside_a_hostile_user_names_him_and_leaves_nothing_behind(scratch: Path) -> None:
    words = ("hostile-load", "--processes", "2000", "--seconds", "6", "--interval", "0.5")
    bench = start_bench(scratch, *words)
    out, err = bench.communicate(timeout=300)
    values = {row["bench"]: row["value"] for row in map(json.loads, out.splitlines())}
    assert values["hostile.processes"] > 2000, err
    assert (values["hostile.culprit_named"], values["hostile.culprit_in_metrics"]) == (1, 1), err
    assert 0 < values["hostile.finding_loaded_s"] < hostile_load.START_S, err
    assert values["hostile.agent_pss_mib"] < hostile_load.AGENT_MIB
    assert values["hostile.helper_pss_mib"] < hostile_load.HELPER_MIB
    assert leftovers(bench.pid, scratch) == []


@needs_compiler
@pytest.mark.thorough
def test_an_interrupted_run_leaves_nothing_behind(scratch: Path) -> None:
    bench = start_bench(scratch, "agent", "--seconds", "600", "--warm-up", "1", "--interval", "1", "--no-peers")
    assert bench.stderr is not None
    said = [bench.stderr.readline()]
    while "measuring" not in said[-1]:
        assert said[-1], f"it ended before it measured: {''.join(said)}"
        said.append(bench.stderr.readline())
    time.sleep(2)
    assert leftovers(bench.pid, scratch)
    bench.send_signal(signal.SIGTERM)
    out, err = bench.communicate(timeout=60)
    assert (bench.returncode, out) == (143, ""), err
    assert leftovers(bench.pid, scratch) == []


def test_a_part_that_does_not_exist_is_named(scratch: Path) -> None:
    bench = start_bench(scratch, "agnet")
    out, err = bench.communicate(timeout=60)
    assert (bench.returncode, out) == (2, "")
    assert "there is no part 'agnet'" in err
