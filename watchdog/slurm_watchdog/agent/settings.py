"""The settings of an agent process: the section `agent` of the configuration, and what it needs of others.

The command `agent` loads and checks the file, writes these values down and becomes the agent, a fresh interpreter that
has never seen the rest: no YAML, no options of detectors.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import msgspec

from slurm_watchdog.base.python310 import run_module
from slurm_watchdog.base.structs import picked
from slurm_watchdog.config.agent import Agent, Security
from slurm_watchdog.knowledge.site_rows import SiteText

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

NO_CONTROLLER = (
    "controller is not set: name the controller's address there, such as http://mgmt1:9765, "
    "or https:// with expert.security.mode: tls"
)
"""An agent has no default address: any host could hold it."""
OF_SECURITY = ("tls_directory", "controller_user", "munge_socket")
"""Options of the section `security` that concern an agent, beside `mode`."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of an agent process."""

    agent: Agent
    controller_urls: tuple[str, ...] = ()  # `controller` of the configuration.
    security: Security  # What concerns the agent, with `auto` resolved.
    kill_switch_prefixes: tuple[str, ...] = ()  # `jobs.kill_switch_prefixes` of the configuration.
    site_texts: tuple[SiteText, ...] = ()  # The site's own knowledge files, which were checked with the configuration.
    personal: bool = False  # `slurm-watchdog run`: the agent reads and writes only files of the user who started it.


def settings_of(config: Config) -> Settings:
    """The agent's part of a configuration that was checked."""
    security = {name: getattr(config.security, name) for name in OF_SECURITY}
    return picked(
        Settings,
        config,
        "agent",
        "controller_urls",
        "site_texts",
        security=Security(mode=config.security.identity(), **security),
        kill_switch_prefixes=config.jobs.kill_switch_prefixes,
        # One that ends without its controller is a step inside of a user's own job (`attach`).
        personal=config.agent.give_up_after > 0,
    )


def write_settings(settings: Settings) -> int:
    """Puts them into a file in memory, which exec passes on; returns its descriptor. Raises OSError."""
    fd = os.memfd_create("settings", 0)
    with open(fd, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(settings))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_settings(fd: int) -> Settings:
    """The settings that `write_settings` put there; closes `fd`. Raises OSError or msgspec.DecodeError."""
    with open(fd, "rb") as file:
        return msgspec.json.decode(file.read(), type=Settings)


def become_agent(settings: Settings, *, once: bool = False, as_json: bool = False, file: str = "") -> NoReturn:
    """Replaces this process by the agent, a fresh interpreter. Raises OSError if the interpreter cannot be executed.
    `file` is where the settings came from, to be read again at SIGHUP."""
    flags = ["--once"] * once + ["--json"] * as_json
    flags += [f"--config={os.path.abspath(file)}"] if file else []
    # One arena for all threads: the second would cost as much as what the sender needs altogether.
    environment = {"MALLOC_ARENA_MAX": "1", **os.environ}
    command = [*run_module("slurm_watchdog.agent"), str(write_settings(settings)), *flags]
    os.execve(sys.executable, command, environment)  # noqa: S606 -- a list, and no shell is wanted
