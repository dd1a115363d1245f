"""The users and groups that `security.operators` and `security.may` name, looked up on this machine."""

from __future__ import annotations

import grp
import logging
import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_watchdog.controller.policy.access import GROUP, Operators, Person
from slurm_watchdog.model.slurm import SlurmPerson

log = logging.getLogger(__name__)

SLURM_OPERATOR, SLURM_COORDINATOR = "slurm:operator", "slurm:coordinator"
"""Words of `security.may`: operators and administrators of Slurm; coordinators, for jobs of their accounts."""


@dataclass(frozen=True)
class Others:
    """Who may use one command, beside those who may anyway."""

    named: Operators
    slurm: frozenset[str] = frozenset()
    """SLURM_OPERATOR, SLURM_COORDINATOR."""

    def include(self, person: Person, user: str, accounts: Iterable[str], known: Iterable[SlurmPerson]) -> bool:
        """Whether `person`, called `user`, may use it on jobs of these accounts. `known`: of Slurm's accounting."""
        if person.uid in self.named.uids or not self.named.gids.isdisjoint(person.groups):
            return True
        found = next((each for each in known if each.user == user), None) if self.slurm else None
        if found is None:
            return False
        of = set(accounts)
        return (found.is_operator and SLURM_OPERATOR in self.slurm) or (
            SLURM_COORDINATOR in self.slurm and bool(of) and of.issubset(found.coordinates)
        )


def operators_of(names: Iterable[str]) -> Operators:
    """Those of `security.operators`, with root and this process's user; one unknown here is logged."""
    found = _named(names, "security.operators")
    return Operators(found.uids | {0, os.geteuid()}, found.gids)


def others_of(names: Iterable[str], command: str) -> Others:
    """Those of `security.may` for one command; one unknown here is logged."""
    words = frozenset(names)
    slurm = words & {SLURM_OPERATOR, SLURM_COORDINATOR}
    return Others(_named(words - slurm, f"security.may.{command}"), slurm)


def _named(names: Iterable[str], option: str) -> Operators:
    uids, gids = set[int](), set[int]()
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
                "%s: this machine knows no %s, so nobody may more for it; correct the name",
                option,
                f"group {name.removeprefix(GROUP)!r}" if name.startswith(GROUP) else f"user {name!r}",
            )
    return Operators(frozenset(uids), frozenset(gids))
