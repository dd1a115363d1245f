"""`slurm-watchdog attach`: watch a job of one's own, on a cluster where the watchdog is not installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from slurm_watchdog.cli.options import Refusal, job_argument
from slurm_watchdog.cli.run import own_config_option, refuse


@click.command()
@click.option("--act", is_flag=True, help="Restart the job when the evidence is clear; without it, only report.")
@own_config_option
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Directory that all nodes see. [default: ~/.slurm-watchdog/JOBID]",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="",
    help="Address of this machine that the nodes reach. [default: found by itself; a free port]",
)
@click.option(
    "--page",
    "page_listen",
    metavar="HOST:PORT",
    default="",
    help="Serve the page on this address, such as 127.0.0.1:9767. [default: no page]",
)
@click.option(
    "--kill-switch",
    metavar="PATH",
    default="",
    help="The file that the trainer looks for at each step, with {job_id} and {restarts} in it.",
)
@job_argument
def attach(job_id: str, directory: str | None, **asked: Any) -> None:
    """Watches your JOB until it is over: agents run as a step inside of it (srun --overlap), the
    controller runs here.

    It follows the job through requeues. This program has to be installed where all nodes of the job see it
    (below your home directory, as a rule). Ctrl-C ends the watching, and leaves the job
    alone. Exit code 0 when the job is over, 1 if there is no such job (any more), 2 if it cannot be watched.

    \b
    Examples:
      slurm-watchdog attach 4711
      slurm-watchdog attach 4711 --act --page 127.0.0.1:9767
      slurm-watchdog explain 7f3a --socket ~/.slurm-watchdog/4711/controller.sock
    """
    from slurm_watchdog.base import log_setup
    from slurm_watchdog.base.os_errors import describe
    from slurm_watchdog.config.loading import ConfigError
    from slurm_watchdog.identity.secret_files import IdentityError
    from slurm_watchdog.journal.journal import JournalError
    from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable
    from slurm_watchdog.standalone import attach as service
    from slurm_watchdog.standalone.own_runs import home_directory

    if shutil.which("srun") is None:
        refuse("There is no srun here. On a machine without Slurm: slurm-watchdog run -- COMMAND…")
    place = Path(directory) if directory else home_directory() / ".slurm-watchdog" / job_id
    log_setup.set_up("WARNING", for_person=True)
    try:
        code = service.run(service.AttachRequest(job_id=job_id, directory=place.absolute(), **asked))
    except ConfigError as error:
        raise Refusal(error.lines()) from error
    except (OSError, JournalError, IdentityError, SlurmUnavailable, SlurmRefused) as error:
        refuse(f"Job {job_id} is not watched: {describe(error) if isinstance(error, OSError) else error}")
    sys.exit(code)
