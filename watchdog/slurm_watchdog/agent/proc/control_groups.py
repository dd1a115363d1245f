"""Control groups of a job, version 1 and 2: where they are, what they use of their limits. Parsers are pure; nothing
that is read here waits for a device or a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from slurm_watchdog.agent.proc.entry import JobStep, parse_cgroup
from slurm_watchdog.model.observations import Pressure, Resource, Usage

ROOT = "/sys/fs/cgroup"
UNLIMITED = 1 << 60  # More is no limit: version 1 writes 2^63 less a page, and no machine has an exabyte.
CACHE_FROM = 0.8
"""From this share of the limit on it is asked how much of it is cache of files, their names and inodes with it where it
is counted (version 2), which costs the kernel a sum over all processors; that can be dropped, and a group that is full
of it is well."""
OOM = "oom"
"""In memory.events (version 2): how often the limit of this group, or of one below it, was reached and an allocation
was about to fail. `oom_kill` there, and in memory.oom_control (version 1), counts processes of the group that any OOM
killer took, also that of the node (Linux, Documentation/admin-guide/cgroup-v2.rst)."""
AT_LIMIT = 0.99  # Memory is charged by dozens of pages: the peak may stay that much below.
MAX_LEVELS = 8  # Below a job: step, user, task; more may be the job's own.
_JOB = re.compile(r"/job_\d+(?=/|$)")
Read = Callable[[str], bytes | None]  # The content of a small file; None where it is not there, or cannot be read.


def group_of(text: str, controller: str) -> tuple[str, bool] | None:
    """Of /proc/PID/cgroup: the path of its group with `controller`, and whether that is version 2; None without."""
    unified = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller and controller in names.split(","):
            return path, False
        if number == "0" and not names:
            unified = path
    return None if unified is None else (unified, True)


def levels_of(path: str) -> list[str]:
    """The groups from a job's own down to this one; none where it is of no job."""
    match = _JOB.search(path)
    if match is None:
        return []
    found, rest = [path[: match.end()]], path[match.end() :].strip("/").split("/")
    for name in rest[:MAX_LEVELS] if rest != [""] else []:
        found.append(f"{found[-1]}/{name}")
    return found


def parse_number(data: bytes | None) -> int | None:
    """A limit or a count; None for `max`, for what is beyond any machine, and for what is no number."""
    text = (data or b"").strip()
    number = int(text) if text.isdigit() and len(text) < 20 else None
    return None if number is None or number >= UNLIMITED else number


def parse_counts(data: bytes | None) -> dict[str, int]:
    """`name number` lines: memory.events, memory.stat, pids.events, memory.oom_control."""
    found = {}
    for line in (data or b"").splitlines():
        words = line.split()
        if len(words) == 2 and (number := parse_number(words[1])) is not None:
            found[words[0].decode(errors="replace")] = number
    return found


_PRESSURE = re.compile(rb"^(some|full) avg10=[\d.]+ avg60=(\d{1,3}(?:\.\d{1,4})?) ", re.MULTILINE)


def parse_pressure(data: bytes | None, resource: str, job_id: str | None = None) -> Pressure | None:
    """A file of /proc/pressure, or `*.pressure` of a group; None for what is none."""
    found = {kind: min(1.0, float(value) / 100.0) for kind, value in _PRESSURE.findall(data or b"")}
    if b"some" not in found:
        return None
    return Pressure(resource=resource, some_ratio=found[b"some"], full_ratio=found.get(b"full", 0.0), job_id=job_id)


_FILES: dict[tuple[Resource, bool], tuple[str, str, str, str, str]] = {
    (Resource.MEMORY, True): ("memory.current", "memory.max", "memory.peak", "memory.events", "oom_kill"),
    (Resource.MEMORY, False): (
        "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control", "oom_kill"
    ),
    (Resource.PIDS, True): ("pids.current", "pids.max", "pids.peak", "pids.events", "max"),
    (Resource.PIDS, False): ("pids.current", "pids.max", "pids.peak", "pids.events", "max"),
}  # fmt: skip
"""(resource, version 2) -> files of use, limit, peak, events, and the event that says that someone went without."""
_CACHE = {
    True: ("active_file", "inactive_file", "slab_reclaimable"),
    False: ("total_active_file", "total_inactive_file"),
}


def read_group(place: str, resource: Resource, unified: bool, read: Read) -> Usage | None:
    """The use of one group; None where it is gone, or has no such controller."""
    used_file, limit_file, peak_file, events_file, refused = _FILES[resource, unified]
    used = parse_number(read(f"{place}/{used_file}"))
    if used is None:
        return None
    limit = parse_number(read(f"{place}/{limit_file}"))
    if resource is Resource.MEMORY and limit and used >= CACHE_FROM * limit:
        stat = parse_counts(read(f"{place}/memory.stat"))
        used = max(0, used - sum(stat.get(name, 0) for name in _CACHE[unified]))
    peak, events = parse_number(read(f"{place}/{peak_file}")), parse_counts(read(f"{place}/{events_file}"))
    return Usage(
        resource=resource, used=used, limit=limit, peak=peak, refused=events.get(refused),
        by_limit=_by_limit(events.get(OOM), peak, limit) if resource is Resource.MEMORY else None,
    )  # fmt: skip


def _by_limit(oom: int | None, peak: int | None, limit: int | None) -> bool | None:
    """Whether a limit was ever reached with nothing left to give back. Version 1 does not count that; its peak says it,
    and says nothing where swap has a limit of its own."""
    if oom is not None:
        return oom > 0
    return True if peak and limit and peak >= AT_LIMIT * limit else None


def usages_of(cgroups: Iterable[str], read: Read, root: str = ROOT) -> Iterator[Usage]:
    """Given /proc/PID/cgroup of processes of jobs: of each resource the use of each job's own group, and of each
    step the use of that of its groups that is nearest to its limit."""
    places: dict[tuple[Resource, bool], dict[str, JobStep]] = {}
    for text in cgroups:
        for resource in (Resource.MEMORY, Resource.PIDS):
            path, unified = group_of(text, resource.value) or ("", False)
            for level in levels_of(path):
                if (place := parse_cgroup(f"0::{level}")) is not None:
                    places.setdefault((resource, unified), {})[level] = place
    for (resource, unified), levels in places.items():
        base = _base(resource, unified, read, root)
        found: dict[JobStep, list[Usage]] = {}
        for level, place in levels.items():
            row = read_group(base + level, resource, unified, read)
            if row is not None:
                found.setdefault(place, []).append(replace(row, job_id=place.job_id, step_id=place.step_id))
        yield from (_nearest(rows, unified) for rows in found.values())


def pressures_of(cgroups: Iterable[str], read: Read, root: str = ROOT) -> Iterator[Pressure]:
    """The pressure of each job, where the kernel counts it by group (version 2)."""
    jobs = {}
    for text in cgroups:
        path, unified = group_of(text, "") or ("", False)
        place = parse_cgroup(f"0::{path}") if unified else None
        if place is not None:
            jobs[place.job_id] = _base(Resource.MEMORY, True, read, root) + levels_of(path)[0]
    for job_id, place_of in jobs.items():
        for resource in ("cpu", "memory", "io"):
            found = parse_pressure(read(f"{place_of}/{resource}.pressure"), resource, job_id)
            if found is not None:
                yield found


def _base(resource: Resource, unified: bool, read: Read, root: str) -> str:
    if not unified:
        return f"{root}/{resource.value}"
    return root if read(f"{root}/cgroup.controllers") is not None else f"{root}/unified"


def _nearest(rows: list[Usage], unified: bool) -> Usage:
    """The row that is nearest to its limit, with the kills of all, the outermost of which is the first. Version 1
    counts them in the group itself alone, version 2 in all above it, too, unless it was mounted with
    `memory_localevents`."""
    kills = [row.refused for row in rows if row.refused is not None]
    row = max(rows, key=lambda each: (each.ratio, each.used))
    whole = unified and kills[:1] == [max(kills, default=0)]
    known = {each.by_limit for each in rows}
    return replace(
        row, refused=None if not kills else kills[0] if whole else sum(kills),
        by_limit=True if True in known else False if False in known else None,
    )  # fmt: skip
