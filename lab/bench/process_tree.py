"""What a tree of processes has used so far: CPU time, memory, context switches, reads, descriptors, threads.

CPU time is taken from a control group of the tree's own where there can be one (nanoseconds, ended children
included, and nothing is walked while it runs); otherwise it is summed over the tree as /proc has it.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.bench.space import Space

NOWHERE = Space()
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_SHARES = 262_144  # MAX_SHARES, kernel/sched/sched.h; everybody else has 1,024
GROUP_PREFIX = "slurm-watchdog-bench"
PAGE_PRESENT = 1 << 63  # Documentation/admin-guide/mm/pagemap.rst
PAGE_FRAME = (1 << 55) - 1


@dataclass(frozen=True)
class Stat:
    """What is used of /proc/PID/stat (see proc(5)); times in clock ticks."""

    ppid: int
    used: int
    used_by_ended_children: int
    start: int


def parse_stat(text: str) -> Stat:
    """The fields of one line of /proc/PID/stat; the name in it may hold anything."""
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(
        ppid=int(fields[1]),
        used=int(fields[11]) + int(fields[12]),
        used_by_ended_children=int(fields[13]) + int(fields[14]),
        start=int(fields[19]),
    )


def parse_fields(text: str) -> dict[str, int]:
    """`name: value [unit]` lines, as in status, io, smaps_rollup: the first number of each, by name."""
    found = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and words and words[0].isdecimal():
            found[name] = int(words[0])
    return found


def read_tree(root: int) -> dict[int, Stat]:
    """`root` and all that descends from it now."""
    table: dict[int, Stat] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                table[int(name)] = parse_stat(Path(f"/proc/{name}/stat").read_text(errors="replace"))
            except (OSError, ValueError):
                continue
    tree = {root: table[root]} if root in table else {}
    grown = True
    while grown:
        below = {pid: stat for pid, stat in table.items() if stat.ppid in tree and pid not in tree}
        tree |= below
        grown = bool(below)
    return tree


@dataclass(frozen=True)
class Usage:
    """Of a whole tree, so far, except memory, descriptors and threads, which are of now."""

    cpu_s: float
    """From the control group, or as `cpu_proc_s` where there is none."""
    cpu_proc_s: float
    """From /proc/PID/stat of all, with what they have inherited from children that ended: in steps of a clock tick."""
    switches: int
    """Voluntary and involuntary context switches of all threads: how often something was woken or put back."""
    reads: int
    """System calls of the kind of read."""
    rss_bytes: int
    pss_bytes: int
    processes: int
    threads: int
    descriptors: int


def read_usage(root: int, group: Path | None) -> Usage:
    """Everything about the tree below `root`; processes that end while it is read are left out."""
    tree = read_tree(root)
    sums = dict.fromkeys(("switches", "reads", "rss", "pss", "threads", "descriptors"), 0)
    for pid in tree:
        try:
            _add_process(pid, sums)
        except OSError:
            continue
    of_proc = sum(stat.used + stat.used_by_ended_children for stat in tree.values()) / CLOCK_TICKS
    return Usage(
        cpu_s=of_proc if group is None else read_group_cpu_s(group),
        cpu_proc_s=of_proc,
        switches=sums["switches"],
        reads=sums["reads"],
        rss_bytes=sums["rss"],
        pss_bytes=sums["pss"],
        processes=len(tree),
        threads=sums["threads"],
        descriptors=sums["descriptors"],
    )


def _add_process(pid: int, sums: dict[str, int]) -> None:
    base = Path(f"/proc/{pid}")
    for task in os.listdir(base / "task"):
        try:
            status = parse_fields((base / "task" / task / "status").read_text(errors="replace"))
        except OSError:
            continue
        sums["threads"] += 1
        sums["switches"] += status["voluntary_ctxt_switches"] + status["nonvoluntary_ctxt_switches"]
    memory = parse_fields((base / "smaps_rollup").read_text())
    sums["rss"] += memory["Rss"] * 1024
    sums["pss"] += memory["Pss"] * 1024
    sums["reads"] += parse_fields((base / "io").read_text())["syscr"]
    sums["descriptors"] += len(os.listdir(base / "fd"))


def count_distinct_pages(root: int) -> int | None:
    """Bytes of physical memory that the tree below `root` maps, each page once, shared or not; None without
    the right to know.

    PSS divides a page by all who map it. Other Pythons on the machine, this benchmark for one, make it look
    smaller than it is on a node where the agent is the only one; this figure is the same everywhere.
    """
    frames: set[int] = set()
    for pid in read_tree(root):
        try:
            frames |= _frames_of(pid)
        except OSError:
            continue
    frames.discard(0)
    return len(frames) * PAGE if frames else None


def _frames_of(pid: int) -> set[int]:
    frames = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for line in maps:
            if "[vsyscall]" in line or "[vdso]" in line or "[vvar" in line:
                continue
            begin, end = (int(part, 16) // PAGE for part in line.split()[0].split("-"))
            pagemap.seek(begin * 8)
            for (entry,) in struct.iter_unpack("=Q", pagemap.read((end - begin) * 8)):
                if entry & PAGE_PRESENT:
                    frames.add(entry & PAGE_FRAME)
    return frames


# ------------------------------------------------------------------------------------------------ control groups


def find_group_parent(mounts: str, own: str) -> Path | None:
    """Where a group that counts CPU time can be made, from the texts of /proc/self/mountinfo and /proc/self/cgroup.

    Version 1 with cpuacct before version 2, where the processes' own group may already hold processes. None: nowhere.
    """
    counting = find_controller(mounts, "cpuacct")
    if counting is not None:
        return counting
    unified = [line.partition(" - ")[0].split()[4] for line in mounts.splitlines() if " - cgroup2 " in line]
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    return Path(unified[0] + path.rstrip("/")) if unified and path is not None else None


def make_group(name: str) -> Path | None:
    """A new control group of this name; None where there can be none (no root, read-only)."""
    parent = find_group_parent(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if parent is None:
        return None
    group = parent / f"{GROUP_PREFIX}.{os.getpid()}.{name}"
    try:
        group.mkdir()
        read_group_cpu_s(group)
    except OSError:
        remove_group(group)
        return None
    return group


@contextmanager
def favoured(name: str, pids: Sequence[int]) -> Iterator[Path | None]:
    """A group that holds `pids`, and gets all but a trace of a processor against other processes that want it, while
    the block runs.

    Among themselves they share as before. None where the kernel's cpu controller is unavailable in its first version.
    """
    parent = find_controller(Path("/proc/self/mountinfo").read_text(), "cpu")
    group = parent / f"{GROUP_PREFIX}.{os.getpid()}.{name}" if parent else None
    try:
        if group is not None:
            group.mkdir()
            (group / "cpu.shares").write_text(str(MAX_SHARES))
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        group = None
    try:
        yield group
    finally:
        if group is not None:
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
            remove_group(group)


def find_controller(mounts: str, controller: str) -> Path | None:
    """Where this controller of version 1 is mounted, from the text of /proc/self/mountinfo."""
    for line in mounts.splitlines():
        left, dash, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if dash and len(fields) >= 5 and len(kind) >= 3 and kind[0] == "cgroup" and controller in kind[2].split(","):
            return Path(fields[4])
    return None


def read_group_cpu_s(group: Path) -> float:
    """CPU time of all that ever ran in `group`. Raises OSError."""
    try:
        return int((group / "cpuacct.usage").read_text()) / 1e9
    except FileNotFoundError:
        fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6


def remove_group(group: Path) -> None:
    """Ends what is in it and removes it."""
    for _ in range(50):
        try:
            pids = [int(line) for line in (group / "cgroup.procs").read_text().split()]
            for pid in pids:
                _kill(pid)
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def sweep() -> None:
    """Removes groups that a benchmark left which was killed."""
    mounts = Path("/proc/self/mountinfo").read_text()
    parents = {
        find_group_parent(mounts, Path("/proc/self/cgroup").read_text()),
        find_controller(mounts, "cpu"),
    }
    for group in [group for parent in parents if parent for group in parent.glob(f"{GROUP_PREFIX}.*")]:
        if not Path(f"/proc/{group.name.split('.')[1]}").exists():
            remove_group(group)


@dataclass(frozen=True)
class Target:
    """A process that is measured, with all below it."""

    name: str
    pid: int
    group: Path | None

    def usage(self) -> Usage:
        return read_usage(self.pid, self.group)

    def cpu_s(self) -> float:
        """CPU time alone, as cheaply as it can be had."""
        if self.group is not None:
            return read_group_cpu_s(self.group)
        tree = read_tree(self.pid).values()
        return sum(stat.used + stat.used_by_ended_children for stat in tree) / CLOCK_TICKS


@contextmanager
def started(
    name: str,
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    space: Space = NOWHERE,
    cpus: set[int] | None = None,
) -> Iterator[Target]:
    """Runs `command` in `space`, in a group of its own; it and everything it started end with the block, or
    with this process."""
    group = make_group(name)
    words = space.words(command)
    if group is not None:
        words = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(group), *words]
    if cpus is not None:
        words = ["taskset", "--cpu-list", ",".join(map(str, sorted(cpus))), *words]
    if shutil.which("setpriv"):
        words = ["setpriv", "--pdeathsig", "KILL", *words]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )  # fmt: skip
    try:
        yield Target(name, space.find(process.pid), group)
    finally:
        tree = list(read_tree(process.pid))
        for pid in tree:
            _kill(pid)
        process.kill()
        process.wait(30)
        if group is not None:
            remove_group(group)
