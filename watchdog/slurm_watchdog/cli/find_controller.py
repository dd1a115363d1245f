"""Finds the controller that a command asks: this machine's, otherwise a `run` or `attach` of the same user."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.options import Refusal, load_or_exit, service_paths
from slurm_watchdog.cli.terminal import clean, moment
from slurm_watchdog.standalone.own_runs import (
    OwnRun,
    ended_runs,
    home_directory,
    is_absent,
    running_runs,
    state_home,
)


def find_socket(socket_path: str | None, config_file: str | None) -> str:
    """The socket that the options, the environment or the configuration name, in this order. A broken file of the
    service must not keep anybody from `pause`: it costs a warning and the default is used."""
    from slurm_watchdog.config.loading import ConfigError, load_config

    service = service_paths()
    if socket_path:
        return socket_path
    if config_file is not None:
        return load_or_exit(config_file, with_knowledge=False).controller.socket
    try:
        if os.access(service.config, os.R_OK):
            return load_config(service.config, with_knowledge=False).controller.socket
    except ConfigError:
        broken = f"{service.config} has errors, so the socket is taken to be {service.socket}"
        click.echo(f"{broken}; see: slurm-watchdog check-config {service.config}", err=True)
    return service.socket


def own_instead(socket_path: str | None, config_file: str | None) -> list[OwnRun]:
    """The user's own runs that answer, where nothing was named and no controller of this machine answers."""
    return running_runs(own_place()) if _is_absent(socket_path, config_file) else []


def _is_absent(socket_path: str | None, config_file: str | None) -> bool:
    return not socket_path and config_file is None and is_absent(find_socket(None, None))


def choose(socket_path: str | None, config_file: str | None) -> Client:
    """A client for the controller that was named, this machine's, or the user's own and only run; ends with
    code 2 if there are several."""
    own = own_instead(socket_path, config_file)
    if len(own) > 1:
        known = [line for each in own for line in (f"  {describe(each)}", f"    --socket {shlex.quote(each.socket)}")]
        raise Refusal([f"{len(own)} of your runs answer; name one with --socket:", *known])
    if own:
        return Client(own[0].socket)
    for ended in ended_runs(own_place())[:1] if _is_absent(socket_path, config_file) else ():
        click.echo(f"Your newest {clean(describe(ended))}", err=True)
        click.echo(f"Ask its journal: slurm-watchdog incidents --journal {shlex.quote(ended.directory)}", err=True)
    return Client(find_socket(socket_path, config_file))


def choose_or_journal(
    socket_path: str | None, config_file: str | None, journal: str | None, incident_id: str | None = None
) -> Client:
    """The same for what a journal can answer: the one that was named, else that of the user's newest run that
    has ended, or of the newest that has the incident. Raises ClientError."""
    from slurm_watchdog.cli.past import client_of_journal

    if journal is not None:
        return client_of_journal(journal)
    is_over = not os.access(service_paths().config, os.R_OK) and _is_absent(socket_path, config_file)
    for run in ended_runs(own_place()) if is_over and not running_runs(own_place()) else ():
        try:
            client = client_of_journal(run.directory)
            if incident_id is not None:
                client.incident(incident_id)
        except ClientError:
            continue
        click.echo(f"From the journal of your {clean(describe(run))}", err=True)
        return client
    return choose(socket_path, config_file)


def own_place() -> Path:
    """Where the user's own runs are written down."""
    return state_home(home_directory(), os.environ)


def describe(run: OwnRun) -> str:
    """One run in a few words."""
    when = f"since {moment(run.started_at)}" if run.ended_at is None else f"ended {moment(run.ended_at)}"
    return f"`{run.command}` of {run.what} ({when}), {run.directory}"
