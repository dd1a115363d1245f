"""Who may see what: the evidence of an incident belongs to the owner of its jobs, to root and to named operators. Pure.

Everybody who may use the socket, or open the page, is given the sentence of `public_sentence`: which kind, which job,
where. Lines of logs, frames, paths, variables and sentences made of them are for those for which `may_see` is true.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.incidents import NOBODY, Incident
from slurm_watchdog.model.slurm import SlurmPerson

GROUP = "group:"  # Before the name of a group in `security.operators`.


@dataclass(frozen=True)
class Person:
    """Who asks. `uid` None: no one knows, as with a browser."""

    uid: int | None = None
    groups: frozenset[int] = frozenset()  # Numbers of all groups of the process at the other end.
    knows_password: bool = False  # It gave the page's password, which is an operator's.
    name: str = ""  # Of the user, where it is known already: to look it up may hang.


@dataclass(frozen=True)
class Operators:
    """Who may see everything."""

    uids: frozenset[int] = frozenset({0})  # Root, the controller's own user, and those that `security.operators` names.
    gids: frozenset[int] = frozenset()

    def include(self, person: Person) -> bool:
        """Whether this is one of them."""
        return person.knows_password or person.uid in self.uids or not self.gids.isdisjoint(person.groups)


SLURM_OPERATOR, SLURM_COORDINATOR = "slurm:operator", "slurm:coordinator"
"""Words of `security.may`: operators and administrators of Slurm; coordinators, for jobs of their accounts."""


@dataclass(frozen=True)
class Others:
    """Who may use one command, beside those who may anyway."""

    named: Operators
    slurm: frozenset[str] = frozenset()  # SLURM_OPERATOR, SLURM_COORDINATOR.

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


class Right(NamedTuple):
    """Who may use a command, beside root, the controller's user and those of `security.may`."""

    what: str  # it does, after "may"
    owner: bool = False  # of all that it is about
    operators: bool = False  # those of `security.operators`


RIGHTS = {
    "pause": Right("pause and resume actions"),
    "restart": Right("restart the job", owner=True),
    "silence": Right("silence this", owner=True, operators=True),
    "mend": Right("say that a node is mended", operators=True),
}


def may_see(owners: Iterable[int], person: Person, operators: Operators) -> bool:
    """Whether `person` may see evidence that belongs to all of `owners` (uids): operators all, an owner what is his
    alone. Of no owner at all, as with a fault of a node, it belongs to operators: the lines of a kernel name other
    people's programs."""
    return operators.include(person) or (person.uid not in (None, NOBODY) and set(owners) == {person.uid})


def may_see_incident(incident: Incident, person: Person, operators: Operators) -> bool:
    """The same of an incident and everything that is kept with it."""
    return may_see(incident.owners, person, operators)


MAX_NAMED = 8  # Jobs and nodes in a sentence.


def public_sentence(incident: Incident) -> str:
    """What anybody may read of an incident: what kind it is, of which jobs, on which nodes. No word of it
    comes from a user."""
    nodes = list(dict.fromkeys(each.node for each in incident.culprits if each.node))
    jobs = incident.job_ids
    of = f" (job{'s' if len(jobs) > 1 else ''} {_some(jobs)})" if jobs else ""
    where = f" on {_some(nodes)}" if nodes else ""
    return f"{spec_of(incident.kind).sentence}{where}{of}."


def _some(names: Iterable[str]) -> str:
    known = list(names)
    return ", ".join(known[:MAX_NAMED]) + (f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else "")
