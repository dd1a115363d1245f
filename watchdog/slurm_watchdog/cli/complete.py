"""Shell completion of jobs, incidents and nodes that the controller knows. It never fails and never waits long."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from typing import Final

import click
from click.shell_completion import CompletionItem

from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import Refusal

DEADLINE_S: Final = 2.0
"""Deadline of the request to the controller: a user has pressed Tab and waits."""
MAX_OFFERED: Final = 200
"""A list of thousands is no help."""
JOB_ID: Final = re.compile(r"\d+(_\d+)?", re.ASCII)
Candidates = Iterable[tuple[str, str]]
"""(word, explanation), the most likely first."""
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completion(ask: Callable[[Client], Candidates]) -> Complete:
    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        try:
            with redirect_stderr(io.StringIO()):  # a broken configuration must not write into the command line
                asked = choose(context.params.get("socket_path"), context.params.get("config_file"))
                offered = list(ask(Client(asked.path, DEADLINE_S)))
        except (ClientError, OSError, ValueError, Refusal):
            return []
        fitting = [each for each in offered if each[0].startswith(begun)]
        return [CompletionItem(word, help=words) for word, words in fitting[:MAX_OFFERED]]

    return complete


def _jobs(client: Client) -> Candidates:
    return [(job.job_id, f"{job.name} of {job.user}") for job in client.status()[0].jobs]


def _incidents(client: Client) -> Candidates:
    order = {"firing": 0, "pending": 1}
    found = client.incidents(None)[0]
    return [(each.id, each.summary) for each in sorted(found, key=lambda each: order.get(each.state, 2))]


def _nodes(client: Client) -> Candidates:
    status = client.status()[0]
    names = {name for job in status.jobs for name in job.nodes}
    return [(name, "") for name in sorted(names.union(status.nodes.reporting, status.nodes.silent))]


jobs = _completion(_jobs)
incidents = _completion(_incidents)
nodes = _completion(_nodes)


def check_job(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A callback of an option: the id of a job. Raises click.BadParameter: a name has no incidents, which looks like
    health."""
    return value if value is None else _check_job_id(context, parameter, value)


def _check_job_id(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if (value or parameter.required) and not JOB_ID.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no job id; 4711 and 4711_3 (an array element) are. See: squeue")
    return value


def _check_job_or_directory(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if os.path.isdir(value):
        return value
    if "/" in value:
        raise click.BadParameter(f"{value!r} is no directory that you may read, and no job id")
    return _check_job_id(context, parameter, value)


job_argument = click.argument("job_id", metavar="JOB", callback=_check_job_id, shell_complete=jobs)
optional_job_argument = click.argument(
    "job_id", metavar="[JOB]", required=False, callback=_check_job_id, shell_complete=jobs
)
job_or_directory = click.argument(
    "job_id", metavar="JOB|DIRECTORY", callback=_check_job_or_directory, shell_complete=jobs
)
