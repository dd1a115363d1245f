"""Finds the controller that a command asks: this machine's, otherwise a `run` or `attach` of the same user."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.options import Refusal, find_socket, open_client, service_paths
from slurm_watchdog.cli.terminal import clean, moment
from slurm_watchdog.standalone.own_runs import (
    OwnRun,
    ended_runs,
    home_directory,
    is_absent,
    running_runs,
    state_home,
)


def own_place() -> Path:
    """Where the user's own runs are written down."""
    return state_home(home_directory(), os.environ)


def own_instead(socket_path: str | None, config_file: str | None) -> list[OwnRun]:
    """The user's own runs that answer, where nothing was named and no controller of this machine answers."""
    if socket_path or config_file is not None or not is_absent(find_socket(None, None)):
        return []
    return running_runs(own_place())


def choose(socket_path: str | None, config_file: str | None) -> Client:
    """A client for the controller that was named, this machine's, or the user's own and only run; ends with
    code 2 if there are several."""
    own = own_instead(socket_path, config_file)
    if len(own) > 1:
        known = [line for each in own for line in (f"  {describe(each)}", f"    --socket {shlex.quote(each.socket)}")]
        raise Refusal([f"{len(own)} of your runs answer; name one with --socket:", *known])
    if own:
        return Client(own[0].socket)
    if not socket_path and config_file is None and is_absent(find_socket(None, None)):
        for ended in ended_runs(own_place())[:1]:
            click.echo(f"Your newest {clean(describe(ended))}", err=True)
            click.echo(
                f"Ask its journal: slurm-watchdog incidents --journal {shlex.quote(ended.directory)}",
                err=True,
            )
    return open_client(socket_path, config_file)


def choose_or_journal(
    socket_path: str | None, config_file: str | None, journal: str | None, incident_id: str | None = None
) -> Client:
    """The same for what a journal can answer: the one that was named, else that of the user's newest run that
    has ended, or of the newest that has the incident. Raises ClientError."""
    from slurm_watchdog.cli.past import client_of_journal

    if journal is not None:
        return client_of_journal(journal)
    if socket_path or config_file is not None or os.access(service_paths().config, os.R_OK):
        return choose(socket_path, config_file)
    if not is_absent(find_socket(None, None)) or running_runs(own_place()):
        return choose(socket_path, config_file)
    for run in ended_runs(own_place()):
        try:
            client = client_of_journal(run.directory)
            if incident_id is not None:
                client.incident(incident_id)
        except ClientError:
            continue
        click.echo(f"From the journal of your {clean(describe(run))}", err=True)
        return client
    return open_client(socket_path, config_file)


def describe(run: OwnRun) -> str:
    """One run in a few words."""
    when = f"since {moment(run.started_at)}" if run.ended_at is None else f"ended {moment(run.ended_at)}"
    return f"`{run.command}` of {run.what} ({when}), {run.directory}"
