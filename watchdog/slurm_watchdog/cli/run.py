"""`slurm-watchdog run`: one command, watched and restarted, on one machine or inside of a batch script; or a job of
one's own that runs already."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from slurm_watchdog.cli.options import Asked, Refusal, command, load_or_exit, warn

if TYPE_CHECKING:
    from slurm_watchdog.supervisor.placement import Allocation
    from slurm_watchdog.supervisor.service import Wanted

OF_JOB = ("act", "listen", "page", "kill_switch")  # Options that go with `--job` alone.


@command(
    """
    --observe  Report what is wrong and what would be done; restart only a command that failed.
    --max-restarts N<0..1000>=3  Restarts in all, after failures and after hangs. [$SLURM_WATCHDOG_MAX_RESTARTS]
    -N, --nodes N<1..>  In a job: nodes of a start. [default: all but spares]
    --spares N<0..>=0  In a job: nodes of it that wait as spares, for one that fails. [$SLURM_WATCHDOG_SPARES]
    --preflight CMD  In a job: shell command for each node before a start; one where it fails is left out.
      [$SLURM_WATCHDOG_PREFLIGHT]
    --alone  In a job: use its own agent and controller, even where the site has some.
    --checkpoint-dir DIR…  Checkpoint directory, if the command's options do not name it; repeatable.
    --config F  Thresholds, detectors, Slack, as for the services; its addresses and directories are not used.
    --directory DIR  Directory of this run's log, journal and kill switch. [default: below
      ~/.local/state/slurm-watchdog; with --job ~/.slurm-watchdog/JOB, which all nodes have to see]
    --no-page  Serve no page.
    --quiet  Show none of the command's lines; they are in DIR, output.log and errors.log.
    -j, --job JOB  Watch this job of yours; start no command.
    --act  With --job: restart it when the evidence is clear; without it, only report.
    --listen HOST:PORT  With --job: address of this machine that the nodes reach. [default: automatic; a free port]
    --page HOST:PORT  With --job: serve the page there, such as on 127.0.0.1:9767. [default: no page]
    --kill-switch PATH  With --job: the trainer looks for this file at each step; {job_id} and {restarts} may be in it.
    --resume-option X  ignored: $SLURM_WATCHDOG_RESUME_FROM has the last checkpoint from before a bad loss
    words [COMMAND]…
    """,
    options_metavar="[OPTIONS] --",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(asked: Asked, words: tuple[str, ...], **options: object) -> NoReturn:
    """Starts COMMAND, what follows `--` (torchrun, deepspeed, python, srun …), and again when it hangs or fails.

    COMMAND has to continue from its newest checkpoint; after a bad loss $SLURM_WATCHDOG_RESUME_FROM names the last good
    one. Exit code: that of its last run, 128 + N if signal N ended it; 2 if it could not be started.

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
      slurm-watchdog run --job 4711 --act                      a job that runs already
      slurm-watchdog status --socket DIR/controller.sock       from another terminal
    """
    wish = SimpleNamespace(config=asked.config, **options)
    given = {name for name in ("words", *vars(wish)) if _is_from(name, ParameterSource.COMMANDLINE)}
    if wish.job is not None:
        if given - {*OF_JOB, "job", "config", "directory"}:
            others = "--act, --config, --directory, --kill-switch, --listen and --page alone"
            raise click.UsageError(f"--job goes with {others}")
        _watch_job(wish)
    words = words[1:] if words[:1] == ("--",) else words
    if not words or given & set(OF_JOB):
        raise click.UsageError("name a COMMAND; --act, --kill-switch, --listen and --page are for a --job")
    from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
    from slurm_watchdog.supervisor import service as supervisor
    from slurm_watchdog.supervisor.placement import is_in_job, node_count, read_allocation

    if f"BASH_FUNC_{words[0]}%%" in os.environ:  # a function that the script exports
        words = ("bash", "-c", '"$@"', "slurm-watchdog run", *words)
    if shutil.which(words[0]) is None:
        refuse(_why_not_started(words[0]))
    allocation = None
    try:
        if is_in_job(os.environ):
            allocation = read_allocation(os.environ)
            vars(wish).update(_limits_of_job(allocation.job_id))
            node_count(wish.nodes, wish.spares, allocation)
    except ValueError as error:
        refuse(f"The command was not started: {error}.")
    # A variable may be meant for jobs.
    if allocation is None and (wish.nodes is not None or (wish.spares and "spares" in given)):
        refuse("--nodes and --spares are for a batch script: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set here.")
    wanted = supervisor.Wanted(
        command=words,
        nodes=wish.nodes,
        spares=wish.spares,
        max_restarts=wish.max_restarts,
        check=wish.preflight or "",
        checkpoints=tuple(map(os.path.abspath, wish.checkpoint_dir)),
    )
    watched = os.path.isdir(KILL_SWITCH_BASE)
    if allocation is not None and wish.alone and watched:
        warn(
            "The site's watchdog may act on this job, too, and neither knows about the other. To opt out of it: "
            f"scontrol update JobId={allocation.job_id} Comment=watchdog=off"
        )
    if allocation is None or wish.alone or not watched:
        _run_alone(wanted, allocation, wish)
    for name in ("observe", "config", "directory"):
        if getattr(wish, name):
            warn(f"--{name} has no effect here: the site's watchdog watches this job (--alone: not).")
    try:
        sys.exit(supervisor.supervise(wanted, allocation, os.environ))
    except OSError as error:
        refuse(f"The command was not started: {error}")


def _watch_job(wish: SimpleNamespace) -> NoReturn:
    """Watches a job that is there."""
    from slurm_watchdog.base import log_setup
    from slurm_watchdog.base.descriptors import describe
    from slurm_watchdog.config.loading import ConfigError
    from slurm_watchdog.identity.secret_files import IdentityError
    from slurm_watchdog.journal.journal import JournalError
    from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable
    from slurm_watchdog.standalone import attach as service
    from slurm_watchdog.standalone.own_runs import home_directory

    if shutil.which("srun") is None:
        refuse("There is no srun here. On a machine without Slurm: slurm-watchdog run -- COMMAND…")
    log_setup.set_up("WARNING", for_person=True)
    request = service.AttachRequest(
        job_id=wish.job,
        directory=Path(wish.directory or home_directory() / ".slurm-watchdog" / wish.job).absolute(),
        act=wish.act,
        listen=wish.listen or "",
        page_listen=wish.page or "",
        kill_switch=wish.kill_switch or "",
        config_file=wish.config,
    )
    try:
        sys.exit(service.run(request))
    except ConfigError as error:
        raise Refusal(error.lines()) from error
    except (OSError, JournalError, IdentityError, SlurmUnavailable, SlurmRefused) as error:
        refuse(f"Job {wish.job} is not watched: {describe(error) if isinstance(error, OSError) else error}")


def _run_alone(wanted: Wanted, allocation: Allocation | None, wish: SimpleNamespace) -> NoReturn:
    from slurm_watchdog.base import clock, log_setup
    from slurm_watchdog.base.descriptors import describe
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.journal.journal import JournalError
    from slurm_watchdog.standalone import run as service
    from slurm_watchdog.standalone.own_runs import home_directory, state_home

    base = load_or_exit(wish.config) if wish.config else Config()
    new = f"run-{int(clock.wall())}-{os.getpid()}"
    log_setup.set_up("WARNING", for_person=True)
    request = service.RunRequest(
        **vars(wanted),
        directory=Path(wish.directory or state_home(home_directory(), os.environ) / new).absolute(),
        allocation=allocation,
        mode="observe" if wish.observe else "act",
        page=not wish.no_page,
        quiet=wish.quiet,
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
