"""Whether an agent could start with a configuration: `python -m slurm_watchdog.agent.validate_config FILE`.

It is the program that would start with it, as it is installed now. Its settings are printed as JSON, exit code 0; or
each error is logged, exit code 1.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress

import msgspec

import slurm_watchdog.agent.service  # noqa: F401 -- what is installed now has to be loadable
from slurm_watchdog.agent.settings import NO_CONTROLLER, Settings, settings_of
from slurm_watchdog.base import log_setup
from slurm_watchdog.config.loading import ConfigError, load_config
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles

log = logging.getLogger(__name__)


def why_not(settings: Settings) -> list[str]:
    """Why an agent could not work with settings that are right by themselves, a line each."""
    agent, security, found = settings.agent, settings.security, []
    if not settings.controller_urls:
        found.append(NO_CONTROLLER)
    if security.mode == "tls":
        found += _why_no_tls(settings)
    elif shutil.which("munge") is None:
        found.append("expert.security.mode: munge is not installed here: apt-get install munge, or dnf install munge")
    if os.path.isdir(agent.state_directory) and not os.access(agent.state_directory, os.W_OK):
        found.append(f"expert.agent.state_directory: {agent.state_directory} cannot be written")
    return found


def _why_no_tls(settings: Settings) -> list[str]:
    from slurm_watchdog.identity.tls import make_context

    if not all(url.startswith("https://") for url in settings.controller_urls):
        return ["controller: has to begin with https:// where nodes prove themselves by certificates"]
    files = TlsFiles(settings.security.tls_directory, "agent")
    try:
        with suppress(FileNotFoundError), open(files.key, "rb"):
            pass
        make_context(files, server=False)
    except PermissionError:
        return []  # it is the courier's, who runs as another user
    except IdentityError as error:
        return [f"expert.security.tls_directory: {error}"]
    return []


def main(argv: list[str]) -> int:
    """Checks the file; returns the exit code."""
    log_setup.set_up()
    try:
        settings = settings_of(load_config(argv[0]))
    except ConfigError as error:
        return _refuse(error.lines())
    if problems := why_not(settings):
        return _refuse(problems)
    sys.stdout.write(msgspec.json.encode(settings).decode())
    return 0


def _refuse(problems: Iterable[str]) -> int:
    for line in problems:
        log.error("%s", line)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
