"""Makes what the controller needs where nodes prove themselves by MUNGE, and says at its start what is missing."""

from __future__ import annotations

import logging
import os
import pwd

from slurm_watchdog.base import clock
from slurm_watchdog.config.schema import Config
from slurm_watchdog.identity.munge_decoder import BadCredential, Decoder, MungeProcess, MungeUnavailable
from slurm_watchdog.identity.munge_sessions import Sessions
from slurm_watchdog.identity.secret_files import IdentityError

log = logging.getLogger(__name__)

NO_CREDENTIAL = "MUNGE:AAAA:"
"""Asks munged for an answer, which is no."""


def uid_of(user: str) -> int | None:
    """The number of a user given by name or number; None where there is no such name."""
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


async def open_munge(config: Config) -> tuple[Sessions, Decoder]:
    """The sessions, and who decodes credentials. Raises IdentityError."""
    security = config.security
    own = os.geteuid()
    if uid_of(security.controller_user) != own:
        raise IdentityError(
            f"the controller runs as user {own}, and security.controller_user is "
            f"{security.controller_user}: agents' credentials would "
            "be for another user"
        )
    agents = uid_of(security.agent_user)
    if agents is None:
        log.warning(
            "there is no user %s here: only root's agents are believed (security.agent_user)",
            security.agent_user,
        )
    process = MungeProcess(security.munge_socket)
    try:
        await process.decode(NO_CREDENTIAL)
    except BadCredential:
        pass
    except MungeUnavailable as error:
        if "libmunge" in str(error):
            await process.close()
            raise IdentityError(
                f"nodes prove themselves by MUNGE, and {error}: install munge, or set security.tls_directory"
            ) from error
        log.error("MUNGE does not answer (%s): no agent can prove itself until it does", error)
    return Sessions(own, frozenset({0} if agents is None else {0, agents}), clock.monotonic), process
