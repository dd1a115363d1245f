"""Where Slurm puts the processes of a job among the kernel's control groups. Pure."""

from __future__ import annotations

from slurm_watchdog.base.late_regex import late_regex

_PLACE = late_regex(
    r"/(?:slurm(?:_[^/]+)?/uid_\d+|[^/]+\.slice/(?:[^/]+_)?slurmstepd\.scope)/job_(\d+)"
    r"(?:/step_([0-9a-z]+)(?:\+\d+)?)?(?=[/ ]|$)"
)
"""Slurm's own places: `/slurm/uid_U/job_N` (version 1; `slurm_NODE` where a host has several slurmd) and
`slurmstepd.scope/job_N` in a slice (version 2; `NODE_slurmstepd.scope` likewise, any slice since
CgroupSlice). A step of several components has a group for each, `step_4+1`. Source: cgroup.conf(5), cgroup_v2.html."""
_USERS_OWN = late_regex(r"/user(?:\.slice|-\d+\.slice|@\d+\.service)(?:/|$)")
"""What systemd hands to a user, who may make groups of any name below it."""


def step_of_group(path: str) -> tuple[str, str | None] | None:
    """Job and step ("0", "batch"; None: the job's own) of a control group; None outside of jobs.

    Only a group in Slurm's own place counts, within a container's group, too: a user may make a `job_N` in what was
    delegated to him. The outermost one counts, for what a job makes is below its own group.
    """
    match = _PLACE.search(path)
    if match is None or _USERS_OWN.search(path, 0, match.start() + 1):
        return None
    return match[1], match[2]
