"""`slurm-watchdog`: the list of commands. Each one is a module of its own beside this one."""

from __future__ import annotations

import click

from watchdog import __version__
from watchdog.cli import manual
from watchdog.cli.agent import agent
from watchdog.cli.attach import attach
from watchdog.cli.ca import ca
from watchdog.cli.check_config import check_config
from watchdog.cli.controller import controller
from watchdog.cli.demo import demo
from watchdog.cli.diagnose import diagnose
from watchdog.cli.doctor import doctor
from watchdog.cli.explain import explain
from watchdog.cli.group_stacks import group_stacks
from watchdog.cli.helper import helper
from watchdog.cli.incidents import incidents
from watchdog.cli.notify import notify
from watchdog.cli.pause import pause
from watchdog.cli.replay import replay
from watchdog.cli.restart import restart
from watchdog.cli.resume import resume
from watchdog.cli.run import run
from watchdog.cli.scan_log import scan_log
from watchdog.cli.status import status


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 fine, 1 something found, 2 wrong usage or configuration, 3 unknown (the controller gave no "
    "answer). `status` and `doctor` are monitoring plugins: 0 OK, 1 warning, 2 critical, 3 unknown.",
)
@click.version_option(__version__, prog_name="slurm-watchdog")
@click.option(
    "--man",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=manual.show,
    help="Print the manual page: slurm-watchdog --man | man -l -",
)
def main() -> None:
    """Watches training jobs on Slurm: says which rank on which node stopped and why, and can restart the job.

    \b
    Examples:
      slurm-watchdog status
      slurm-watchdog explain 7f3a
      slurm-watchdog diagnose 4711         who keeps the others waiting, now
      slurm-watchdog group-stacks stacks/  the same, from files of stacks
      slurm-watchdog doctor train.sbatch   what a job script lacks to be protected
      slurm-watchdog pause "moving the storage"
      slurm-watchdog agent --once          what the agent sees on this node
    """


for _command in (
    status,
    diagnose,
    incidents,
    explain,
    doctor,
    pause,
    resume,
    restart,
    check_config,
    notify,
    ca,
    replay,
    scan_log,
    group_stacks,
    run,
    attach,
    demo,
    agent,
    helper,
    controller,
):
    main.add_command(_command)
