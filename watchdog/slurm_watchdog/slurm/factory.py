"""Makes the Slurm client that the configuration names, or that works here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Literal

from slurm_watchdog.slurm.command_line import CommandLineSlurm
from slurm_watchdog.slurm.commands import ALWAYS, Commands, Right
from slurm_watchdog.slurm.listings import CommandLineListings, Listings
from slurm_watchdog.slurm.pyslurm_client import FallbackListings, PyslurmListings, is_importable
from slurm_watchdog.slurm.request_guard import Observe

LOG = logging.getLogger(__name__)

Choice = Literal["auto", "pyslurm", "command_line"]


def make_client(
    choice: Choice,
    *,
    bin_directory: str = "",
    deadline_s: float = 20.0,
    pyslurm_python: str = "",
    token_file: str = "",
    environ: Mapping[str, str] | None = None,
    observe: Observe = lambda call, outcome: None,
    right: Right = ALWAYS,
) -> CommandLineSlurm:
    """A client for the site's Slurm.

    `pyslurm`: questions go to pyslurm, and without it nothing is known. `auto`: they do if `pyslurm_python`,
    or our own interpreter where that is empty, has it, and to the commands whenever it can't be started.
    `right`: see Commands.
    `command_line`: never, nor with a `token_file`: pyslurm reads its token once.
    """
    environ = os.environ if environ is None else environ
    listings: Listings | None = None
    if choice == "pyslurm":
        listings = PyslurmListings(pyslurm_python, environ)
    elif choice == "auto" and not token_file and (pyslurm_python or is_importable()):
        commands = CommandLineListings(Commands(bin_directory, environ))
        listings = FallbackListings(PyslurmListings(pyslurm_python, environ), commands)
    LOG.info("Slurm is asked by %s", "its commands" if listings is None else "pyslurm")
    return CommandLineSlurm(bin_directory, deadline_s, environ, observe, listings, token_file, right=right)
