"""Which jobs something holds for: globs of partition, account, user and name. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.slurm import SlurmJob


class JobMatch(Struct, frozen=True, kw_only=True):
    """Globs (`*`, `?`, `[abc]`); an empty tuple matches every job. All four have to match."""

    partition: tuple[str, ...] = ()
    account: tuple[str, ...] = ()
    user: tuple[str, ...] = ()
    job_name: tuple[str, ...] = ()

    def matches(self, job: SlurmJob) -> bool:
        """Whether this is one of them."""
        pairs = (
            # A job that waits may name several partitions.
            (self.partition, job.partition.split(",")),
            (self.account, [job.account]),
            (self.user, [job.user]),
            (self.job_name, [job.name]),
        )
        return all(
            not globs or any(fnmatchcase(value, glob) for glob in globs for value in values) for globs, values in pairs
        )
