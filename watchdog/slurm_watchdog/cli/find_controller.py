"""Finds the controller that a command asks: this machine's, otherwise a `run` of the same user."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from slurm_watchdog.cli.client import Client
from slurm_watchdog.cli.options import (
    EXIT_USAGE,
    ClientError,
    Refusal,
    journal_option,
    load_or_exit,
    operator_options,
    print_json,
    service_paths,
)
from slurm_watchdog.cli.terminal import clean, moment
from slurm_watchdog.model.documents import Explanation
from slurm_watchdog.standalone.own_runs import OwnRun, ended_runs, home_directory, is_absent, running_runs, state_home


def find_socket(socket_path: str | None, config_file: str | None) -> str:
    """The socket that the options, the environment or the configuration name, in this order."""
    service = service_paths()
    if socket_path:
        return socket_path
    if config_file is not None:
        return load_or_exit(config_file, with_knowledge=False).controller.socket
    if not os.access(service.config, os.R_OK):
        return service.socket
    import yaml

    try:  # this key alone: errors elsewhere must not keep anybody from `pause`, and to check all takes a second
        known = yaml.safe_load(Path(service.config).read_text(encoding="utf-8"))
        return str(known.get("expert", known)["controller"]["socket"])  # without `expert`: the release before
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
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


@dataclass(frozen=True)
class Asked:
    """Which controller a command asks, and in which form it answers: the options that such commands share."""

    socket_path: str | None
    config_file: str | None
    as_json: bool
    journal: str | None = None
    or_journal: bool = False  # A journal can answer, too.

    def client(self, incident_id: str | None = None) -> Client:
        """For the controller that was named, this machine's, or the user's own and only run; with `or_journal` else for
        the journal of the user's newest run that has ended, or of the newest that has the incident. Raises ClientError.
        """
        if self.journal is not None:
            return _past(self.journal)
        is_over = self.or_journal and not os.access(service_paths().config, os.R_OK)
        is_over = is_over and _is_absent(self.socket_path, self.config_file) and not running_runs(own_place())
        for run in ended_runs(own_place()) if is_over else ():
            try:
                client = _past(run.directory)
                if incident_id is not None:
                    client.get(Explanation, "/v1/incidents/{}", incident_id)
            except ClientError:
                continue
            click.echo(f"From the journal of your {clean(describe(run))}", err=True)
            return client
        return choose(self.socket_path, self.config_file)

    def answer(self, document: object, show: Callable[[], None]) -> None:
        """Prints the document for a program, or what `show` prints for people."""
        if self.as_json:
            print_json(document)
        else:
            show()


def asks_controller(*, or_journal: bool = False, refused: int = EXIT_USAGE) -> Callable[[Callable[..., None]], Any]:
    """Decorates a command whose first argument is an `Asked`, of these options. Where the request was refused it ends
    with the code `refused`."""

    def decorate(function: Callable[..., None]) -> Any:
        @wraps(function)
        def command(
            *, socket_path: str | None, config_file: str | None, as_json: bool, journal: str | None = None, **given: Any
        ) -> None:
            try:
                function(Asked(socket_path, config_file, as_json, journal, or_journal), **given)
            except ClientError as error:
                if error.exit_code == EXIT_USAGE:
                    error.end_with(refused)
                raise

        whole = operator_options(command)
        return journal_option(whole) if or_journal else whole

    return decorate


def _past(journal: str) -> Client:
    from slurm_watchdog.cli.past import client_of_journal

    return client_of_journal(journal)


def own_place() -> Path:
    """Where the user's own runs are written down."""
    return state_home(home_directory(), os.environ)


def describe(run: OwnRun) -> str:
    """One run in a few words."""
    when = f"since {moment(run.started_at)}" if run.ended_at is None else f"ended {moment(run.ended_at)}"
    return f"`run` of {run.what} ({when}), {run.directory}"
