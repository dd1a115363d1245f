"""Who is what in Slurm's accounting: operators, administrators, coordinators of accounts."""

from __future__ import annotations

from slurm_watchdog.model.slurm import SlurmPerson
from slurm_watchdog.slurm.commands import Commands
from slurm_watchdog.slurm.fields import ParseError
from slurm_watchdog.slurm.listings import listing_text

FORMAT = "format=user,adminlevel,coordinators"


async def read_people(commands: Commands) -> tuple[SlurmPerson, ...]:
    """Everybody who is more than a user. Raises SlurmUnavailable."""
    answer = await commands.run("sacctmgr", "-nP", "show", "user", "withcoord", FORMAT)
    return parse_people(listing_text(answer, "sacctmgr"))


def parse_people(text: str) -> tuple[SlurmPerson, ...]:
    """What `sacctmgr -nP show user withcoord` prints: `ann|None|vision,physics`. Raises ParseError."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        user, *more = line.split("|")
        if len(more) != 2 or not user:
            raise ParseError(f"no user of Slurm's accounting: {line[:80]!r}")
        operator, accounts = more[0] in ("Operator", "Administrator"), tuple(filter(None, more[1].split(",")))
        if operator or accounts:
            found.append(SlurmPerson(user=user, is_operator=operator, coordinates=accounts))
    return tuple(found)
