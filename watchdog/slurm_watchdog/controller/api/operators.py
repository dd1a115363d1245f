"""The users and groups that `security.operators` names, looked up on this machine."""

from __future__ import annotations

import grp
import logging
import os
import pwd
from collections.abc import Iterable

from slurm_watchdog.controller.policy.access import GROUP, Operators

log = logging.getLogger(__name__)


def operators_of(names: Iterable[str]) -> Operators:
    """The users and groups (`group:NAME`) of `security.operators`, with root and this process's user; one
    unknown here is logged."""
    uids, gids = {0, os.geteuid()}, set[int]()
    for name in names:
        try:
            if name.startswith(GROUP):
                gids.add(grp.getgrnam(name.removeprefix(GROUP)).gr_gid)
            elif name.isdecimal():
                uids.add(int(name))
            else:
                uids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            log.error(
                "security.operators: this machine knows no %s, so nobody sees more for it; correct the name",
                f"group {name.removeprefix(GROUP)!r}" if name.startswith(GROUP) else f"user {name!r}",
            )
    return Operators(frozenset(uids), frozenset(gids))
