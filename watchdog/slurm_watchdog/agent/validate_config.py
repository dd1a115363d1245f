"""Whether an agent could start with a configuration: `python -m slurm_watchdog.agent.validate_config FILE`,
with the running settings on standard input.

It is the program that would start with it, as it is installed now. On standard output: {"problems":
[sentence…], "settings": text}.
"""

from __future__ import annotations

import os
import shutil
import sys

import msgspec

import slurm_watchdog.agent.service  # noqa: F401 -- what is installed now has to be loadable
from slurm_watchdog.agent.reload.settings import NO_CONTROLLER, Settings, settings_of
from slurm_watchdog.agent.workers.answer_types import ConfigCheck
from slurm_watchdog.base.descriptors import why_not_address
from slurm_watchdog.config.loading import ConfigError, load_config
from slurm_watchdog.config.types import split_address
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles


def validate(file: str, running: Settings) -> ConfigCheck:
    """Reads and checks everything that could keep an agent with `running` from going on as one with `file`."""
    try:
        settings = settings_of(load_config(file))
    except ConfigError as error:
        return ConfigCheck(problems=tuple(error.lines()))
    problems = why_not(settings, running)
    if problems:
        return ConfigCheck(problems=tuple(problems))
    return ConfigCheck(settings=msgspec.json.encode(settings).decode())


def why_not(settings: Settings, running: Settings) -> list[str]:
    """Why an agent could not work with settings that are right by themselves, a line each."""
    agent, security, found = settings.agent, settings.security, []
    if not settings.controller_urls:
        found.append(NO_CONTROLLER)
    if security.mode == "tls":
        found += _why_no_tls(settings)
    if security.mode == "munge" and running.security.mode != "munge" and shutil.which("munge") is None:
        found.append("expert.security.mode: munge is not installed here: apt-get install munge, or dnf install munge")
    address = agent.metrics_listen
    if address and address != running.agent.metrics_listen and (problem := why_not_address(*split_address(address))):
        found.append(f"expert.agent.metrics_listen: {address} {problem}")
    directory = agent.state_directory
    if directory != running.agent.state_directory and os.path.isdir(directory) and not os.access(directory, os.W_OK):
        found.append(f"expert.agent.state_directory: {directory} cannot be written")
    return found


def _why_no_tls(settings: Settings) -> list[str]:
    from slurm_watchdog.identity.tls import make_context

    if not all(url.startswith("https://") for url in settings.controller_urls):
        return ["controller: has to begin with https:// where nodes prove themselves by certificates"]
    try:
        make_context(TlsFiles(settings.security.tls_directory, "agent"), server=False)
    except IdentityError as error:
        return [f"expert.security.tls_directory: {error}"]
    return []


def main(argv: list[str]) -> int:
    """Answers on standard output; gives 0."""
    running = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    sys.stdout.write(msgspec.json.encode(validate(argv[0], running)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
