"""What Slurm shows and lets do: its release, what it hides from the user that asks, and how long that user's
token lasts."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from slurm_watchdog.slurm.commands import Commands

TOKEN_WARNING_S = 600.0
"""A token that ends so soon is reported: `scontrol token` gives one for 30 min if nothing else is asked for."""
CANCELS_HET_JOBS = ((25, 5), (26, 5))
"""Releases from the first up to, without, the second: 25.11.7 cancels a running heterogeneous job with an
srun over its components when it is requeued (12 of 12); 22.05.8, 24.11.5 and 26.05.5 requeue it. 25.05 was
not tried."""


@dataclass(frozen=True)
class Access:
    """What is known of it; a field that is empty or None is not known."""

    version: tuple[int, int] | None = None
    private: frozenset[str] = frozenset()  # Words of PrivateData: `jobs`, `nodes`, …
    slurm_user: int | None = None
    admin_level: str = ""  # Of the user that asks, in Slurm's accounting; empty where there is none.


def parse_config(text: str) -> Access:
    """From what `scontrol show config` prints."""
    values = dict(re.findall(r"^(\w+)\s+= (.*)$", text, re.MULTILINE))
    version = re.match(r"(\d+)\.(\d+)", values.get("SLURM_VERSION", ""), re.ASCII)
    user = re.search(r"\((\d+)\)", values.get("SlurmUser", ""), re.ASCII)
    words = re.split(r"[,\s]+", values.get("PrivateData", "none").lower())
    return Access(
        version=(int(version[1]), int(version[2])) if version else None,
        private=frozenset(words) - {"", "none"},
        slurm_user=int(user[1]) if user else None,
    )


async def read_access(commands: Commands, uid: int, user: str) -> Access:
    """The same, asked for; with the level of `user` where PrivateData makes that matter. Raises SlurmUnavailable."""
    answer = await commands.run("scontrol", "show", "config")
    access = parse_config(answer.stdout if not answer.code else "")
    if uid in (0, access.slurm_user) or "jobs" not in access.private:
        return access
    level = await commands.run("sacctmgr", "-nP", "show", "user", user, "format=adminlevel")
    words = level.stdout.split() if not level.code else []
    return Access(access.version, access.private, access.slurm_user, words[0] if words else "")


def hides_jobs(access: Access, uid: int) -> str:
    """Why other users' jobs are not in the listing of `uid`, a sentence; empty if they are."""
    if "jobs" not in access.private or uid in (0, access.slurm_user):
        return ""
    if access.admin_level.startswith(("Operator", "Admin")):
        return ""
    return (
        "PrivateData=jobs hides other users' jobs, and the controller's user is not an operator of Slurm: a job "
        "that is not listed may exist all the same; run it as SlurmUser, or `sacctmgr modify user NAME set "
        "adminlevel=operator`"
    )


def why_not_requeue_het(version: tuple[int, int] | None) -> str:
    """Why a heterogeneous job is not requeued under this release, a sentence; empty if it may be."""
    first, until = CANCELS_HET_JOBS
    if version is not None and not first <= version < until:
        return ""
    which = "a Slurm of unknown release" if version is None else f"Slurm {version[0]}.{version[1]:02}"
    return f"{which} may cancel a heterogeneous job instead of requeueing it, and its work would be lost"


def token_ends_at(token: str) -> float | None:
    """When a JSON Web Token ends, seconds since the epoch; None if it does not say. It is not checked: Slurm
    does that."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (binascii.Error, ValueError, TypeError, KeyError, msgspec.DecodeError):
        return None


def token_note(token: str, now: float) -> Sequence[str]:
    """What to know of the token at the date `now`: nothing as long as it lasts."""
    ends_at = token_ends_at(token) if token else None
    if ends_at is None or ends_at - now > TOKEN_WARNING_S:
        return ()
    how = "write a new one to slurm.token_file before that (scontrol token lifespan=…)"
    if ends_at <= now:
        return (
            f"the token SLURM_JWT ended {(now - ends_at) / 60:.0f} min ago, and Slurm refuses what it is asked: {how}",
        )
    return (f"the token SLURM_JWT ends in {(ends_at - now) / 60:.0f} min, and with it the sight of Slurm: {how}",)
