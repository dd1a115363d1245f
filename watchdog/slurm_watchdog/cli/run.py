"""`slurm-watchdog run`: one command, watched and restarted, on one machine or inside of a batch script; or a job of
one's own that runs already."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from slurm_watchdog.cli.options import JOB, Refusal, check_job, config_option, flag, load_or_exit, value

OF_JOB = ("act", "listen", "page_listen", "kill_switch")  # Options that go with `--job` alone.

if TYPE_CHECKING:
    from slurm_watchdog.supervisor.allocation import Allocation
    from slurm_watchdog.supervisor.service import Wanted


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@flag("--observe", help="Report what is wrong and what would be done; restart only a command that failed.")
@value(
    "--max-restarts",
    envvar="SLURM_WATCHDOG_MAX_RESTARTS",
    type=click.IntRange(0, 1000),
    default=3,
    metavar="N",
    help="Restarts in all, after failures and after hangs. [$SLURM_WATCHDOG_MAX_RESTARTS]",
)
@value(
    "-N", "--nodes", type=click.IntRange(1), metavar="N", help="In a job: nodes of a start. [default: all but spares]"
)
@value(
    "--spares",
    envvar="SLURM_WATCHDOG_SPARES",
    type=click.IntRange(0),
    default=0,
    metavar="S",
    help="In a job: nodes of it that wait as spares, for one that fails. [$SLURM_WATCHDOG_SPARES]",
)
@value(
    "--preflight",
    "check",
    envvar="SLURM_WATCHDOG_PREFLIGHT",
    default="",
    metavar="CMD",
    help="In a job: shell command for each node before a start; one where it fails is left out. "
    "[$SLURM_WATCHDOG_PREFLIGHT]",
)
@flag("--alone", help="In a job: use its own agent and controller, even where the site has some.")
@value(
    "--checkpoint-dir",
    "checkpoints",
    multiple=True,
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Checkpoint directory, if the command's options do not name it; repeatable.",
)
@config_option("Thresholds, detectors, Slack, as for the services; its addresses and directories are not used.")
@value(
    "--directory",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Directory of this run's log, journal and kill switch. [default: below ~/.local/state/slurm-watchdog; with "
    "--job ~/.slurm-watchdog/JOB, which all nodes have to see]",
)
@flag("--no-page", help="Serve no page.")
@flag("--quiet", help="Show none of the command's lines; they are in DIR, output.log and errors.log.")
@value(*JOB, "job_id", metavar="JOB", callback=check_job, help="Watch this job of yours; start no command.")
@flag("--act", help="With --job: restart it when the evidence is clear; without it, only report.")
@value(
    "--listen",
    metavar="HOST:PORT",
    default="",
    help="With --job: address of this machine that the nodes reach. [default: automatic; a free port]",
)
@value(
    "--page",
    "page_listen",
    metavar="HOST:PORT",
    default="",
    help="With --job: serve the page there, such as on 127.0.0.1:9767. [default: no page]",
)
@value(
    "--kill-switch",
    metavar="PATH",
    default="",
    help="With --job: the trainer looks for this file at each step; {job_id} and {restarts} may be in it.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND…")
def run(command: tuple[str, ...], job_id: str | None, **options: Any) -> None:
    """Starts COMMAND (torchrun, deepspeed, python, srun …), and starts it again when it hangs or fails.

    COMMAND has to continue from its newest checkpoint; after a bad loss $SLURM_WATCHDOG_RESUME_FROM
    names the last good one. Exit code: that of COMMAND's last run,
    128 + N if signal N ended it; 2 if it could not be started.

    In a batch script, on a node with the site's watchdog, that one watches: it orders a restart in the same
    allocation, without the nodes that are to blame, on spares (sbatch --nodes=N+S --no-kill). Before each
    start the nodes are checked.

    Elsewhere COMMAND is watched as a cluster's job is: the same detectors, incidents, page. It finds in
    $SLURM_WATCHDOG_KILL_SWITCH the file to look for at each step: if it is there, save and exit. What it
    prints is shown, and kept in DIR/output.log. A terminal, Ctrl-C and exit codes are as without `run`.

    With --job a JOB of yours is watched until it is over, through requeues: agents run as a step inside of it (srun
    --overlap), the controller runs here. This program has to be installed where all nodes of the job see it (below
    your home directory, as a rule). Ctrl-C ends the watching, and leaves the job alone. Exit code 0 when the job is
    over, 1 if there is no such job (any more), 2 if it cannot be watched.

    \b
    Examples:
      slurm-watchdog run --spares 1 -- srun python train.py    in a batch script
      slurm-watchdog run -- torchrun --nproc-per-node 8 train.py --save-dir ckpt
      slurm-watchdog run --checkpoint-dir ckpt --max-restarts 10 -- python train.py
      slurm-watchdog run --observe -- bash train.sh
      slurm-watchdog run --job 4711 --act                      a job that runs already
      slurm-watchdog status --socket DIR/controller.sock       from another terminal
    """
    given = {name for name in ("command", *options) if _is_from(name, ParameterSource.COMMANDLINE)}
    if job_id is not None and given - {*OF_JOB, "config_file", "directory"}:
        raise click.UsageError("--job goes with --act, --config, --directory, --kill-switch, --listen and --page alone")
    if job_id is not None:
        _watch_job(job_id, options)
    if not command or given & set(OF_JOB):
        raise click.UsageError("name a COMMAND; --act, --kill-switch, --listen and --page are for a --job")
    from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
    from slurm_watchdog.supervisor import service as supervisor
    from slurm_watchdog.supervisor.allocation import is_in_job, node_count, read_allocation
    from slurm_watchdog.supervisor.launcher import is_function

    asked = SimpleNamespace(**options)
    words = command[1:] if command[:1] == ("--",) else command
    if not words or (shutil.which(words[0]) is None and not is_function(words[0], os.environ)):
        refuse(_why_not_started(words[0] if words else ""))
    allocation = None
    try:
        if is_in_job(os.environ):
            allocation = read_allocation(os.environ)
            vars(asked).update(_limits_of_job(allocation.job_id))
            node_count(asked.nodes, asked.spares, allocation)
    except ValueError as error:
        refuse(f"The command was not started: {error}.")
    is_typed = _is_from("spares", ParameterSource.COMMANDLINE)  # a variable may be meant for jobs
    if allocation is None and (asked.nodes is not None or (asked.spares and is_typed)):
        refuse("--nodes and --spares are for a batch script: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set here.")
    wanted = supervisor.Wanted(
        command=words,
        nodes=asked.nodes,
        spares=asked.spares,
        max_restarts=asked.max_restarts,
        check=asked.check,
        checkpoints=tuple(os.path.abspath(each) for each in asked.checkpoints),
    )
    watched = os.path.isdir(KILL_SWITCH_BASE)
    if allocation is not None and asked.alone and watched:
        click.echo(
            "The site's watchdog may act on this job, too, and neither knows about the other. To opt out of it: "
            f"scontrol update JobId={allocation.job_id} Comment=watchdog=off",
            err=True,
        )
    if allocation is None or asked.alone or not watched:
        _run_alone(wanted, allocation, asked)
    for name in ("observe", "config", "directory"):
        if options.get(name, asked.config_file):
            click.echo(f"--{name} has no effect here: the site's watchdog watches this job (--alone: not).", err=True)
    try:
        sys.exit(supervisor.supervise(wanted, allocation, os.environ))
    except OSError as error:
        refuse(f"The command was not started: {error}")


def _watch_job(job_id: str, options: Mapping[str, Any]) -> NoReturn:
    """Watches a job that is there."""
    from slurm_watchdog.base import log_setup
    from slurm_watchdog.base.descriptors import describe
    from slurm_watchdog.config.loading import ConfigError
    from slurm_watchdog.identity.secret_files import IdentityError
    from slurm_watchdog.journal.journal import JournalError
    from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable
    from slurm_watchdog.standalone import attach as service
    from slurm_watchdog.standalone.own_runs import home_directory

    directory = options["directory"]
    if shutil.which("srun") is None:
        refuse("There is no srun here. On a machine without Slurm: slurm-watchdog run -- COMMAND…")
    place = Path(directory) if directory else home_directory() / ".slurm-watchdog" / job_id
    log_setup.set_up("WARNING", for_person=True)
    asked = {name: options[name] for name in (*OF_JOB, "config_file")}
    try:
        sys.exit(service.run(service.AttachRequest(job_id=job_id, directory=place.absolute(), **asked)))
    except ConfigError as error:
        raise Refusal(error.lines()) from error
    except (OSError, JournalError, IdentityError, SlurmUnavailable, SlurmRefused) as error:
        refuse(f"Job {job_id} is not watched: {describe(error) if isinstance(error, OSError) else error}")


def _run_alone(wanted: Wanted, allocation: Allocation | None, asked: SimpleNamespace) -> NoReturn:
    from slurm_watchdog.base import clock, log_setup
    from slurm_watchdog.base.descriptors import describe
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.journal.journal import JournalError
    from slurm_watchdog.standalone import run as service
    from slurm_watchdog.standalone.own_runs import home_directory, state_home

    base = load_or_exit(asked.config_file) if asked.config_file else Config()
    new = f"run-{int(clock.wall())}-{os.getpid()}"
    place = asked.directory or state_home(home_directory(), os.environ) / new
    log_setup.set_up("WARNING", for_person=True)
    request = service.RunRequest(
        **vars(wanted),
        directory=Path(place).absolute(),
        allocation=allocation,
        mode="observe" if asked.observe else "act",
        page=not asked.no_page,
        quiet=asked.quiet,
    )
    try:
        sys.exit(service.run(base, request))
    except (OSError, JournalError, ValueError) as error:
        refuse(f"The command was not started: {describe(error) if isinstance(error, OSError) else error}")


def _why_not_started(name: str) -> str:
    if name.startswith("-"):
        return f"{name!r} is not an option of `slurm-watchdog run`: see slurm-watchdog run --help"
    if os.path.isfile(name):
        return f"{name!r} is not executable: chmod +x, or name what runs it (bash {name})."
    return f"There is no program {name!r} to be started."


def _is_from(name: str, source: ParameterSource) -> bool:
    return click.get_current_context().get_parameter_source(name) is source


def _limits_of_job(job_id: str) -> dict[str, int]:
    """Those of the job's comment that neither the command line nor the environment has. Raises ValueError."""
    import asyncio

    from slurm_watchdog.model.slurm import RUN_LIMITS, run_limits
    from slurm_watchdog.supervisor.job_questions import JobQuestions

    wanted = [name for name in RUN_LIMITS if _is_from(name, ParameterSource.DEFAULT)]
    said = run_limits(asyncio.run(JobQuestions(job_id, os.environ).comment())) if wanted else {}
    return {name: said[name] for name in wanted if name in said}


def refuse(sentence: str) -> NoReturn:
    """Ends a command that watches nothing."""
    raise Refusal([sentence])
