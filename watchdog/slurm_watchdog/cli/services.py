"""`slurm-watchdog agent`, `courier` and `controller`: the services of nodes and of the management node."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from slurm_watchdog.base.loop import sleep
from slurm_watchdog.cli.options import SERVICE, Asked, Refusal, command, load_or_exit

log = logging.getLogger(__name__)


@command(SERVICE, "--json  Reports as JSON on standard output, one a line; with --once one document.")
def agent(asked: Asked, once: bool) -> NoReturn:
    """The service on a compute node: observes the jobs there and reports to the controller.

    At SIGHUP (systemctl reload) it reads its configuration again, and takes it whole or not at all. With --once it
    looks twice, a second apart, and prints what it sees; nothing is sent or kept, and an agent beside it is not
    disturbed. Exit code 1 if it could not see which processes there are.

    \b
    Examples:
      slurm-watchdog agent --once             as tables, for a person
      slurm-watchdog agent --once --json      the report that would be sent
    """
    file, as_json = asked.config or "", asked.json
    config = load_or_exit(file)
    from slurm_watchdog.agent.settings import NO_CONTROLLER, become_agent, settings_of

    settings = settings_of(config)
    if not once and not settings.controller_urls:
        raise Refusal([f"{file}: {NO_CONTROLLER}"])
    try:
        become_agent(settings, once=once, as_json=as_json, file=file)
    except OSError as error:  # such as for a person who may not look where the interpreter lies
        from slurm_watchdog.agent.service import run_agent
        from slurm_watchdog.base import log_setup

        log_setup.set_up()
        log.warning("the agent keeps the memory that its start took: %s: %s", sys.executable, error.strerror)
        sys.exit(run_agent(settings, once=once, as_json=as_json, file=os.path.abspath(file)))


REFUSED_S = 5.0  # A courier whose configuration is refused is started so often.


def _courier_words(file: str) -> list[str]:
    config = load_or_exit(file)
    from slurm_watchdog.agent.agent import node_name
    from slurm_watchdog.agent.delivery.courier_link import courier_command
    from slurm_watchdog.agent.settings import NO_CONTROLLER, settings_of

    settings = settings_of(config)
    if not settings.controller_urls:
        raise Refusal([f"{file}: {NO_CONTROLLER}"])
    return courier_command(node_name(settings), settings.security, settings.controller_urls)


@command("--config F  The configuration.")
def courier(asked: Asked) -> NoReturn:
    """The network of an agent, which has none: a service beside it, without any right.

    It passes what the agent reports to the controller and what the controller asks back, and reads the certificates
    or calls munge by which both ends prove themselves. systemd starts it when the agent connects to its socket; an
    agent without systemd has it as its child.

    \b
    Examples:
      slurm-watchdog courier --config /etc/slurm-watchdog/config.yaml     as slurm-watchdog-courier.service starts it
    """
    try:
        words = _courier_words(asked.config or "")
    except Refusal:
        if "LISTEN_PID" in os.environ:  # the agent's attempt waits at the socket, and would start it again at once
            sleep(REFUSED_S)
        raise
    os.execve(words[0], words, {"MALLOC_ARENA_MAX": "1", **os.environ})  # noqa: S606 -- a list, and no shell is wanted


@command(
    SERVICE,
    "--record FILE  Append every report and listing to FILE, for `replay`; it holds names, paths, log lines of users.",
)
def controller(asked: Asked, once: bool, record: str | None) -> NoReturn:
    """The service on the management node: judges what agents report, decides, and acts where the mode allows it.

    At SIGHUP (systemctl reload) it reads its configuration again, and takes it whole or not at all.

    \b
    Examples:
      slurm-watchdog controller --once        one look at the cluster
      slurm-watchdog controller --record /var/tmp/today.jsonl
    """
    file = asked.config or ""
    config = load_or_exit(file)
    from slurm_watchdog.base import log_setup
    from slurm_watchdog.controller.app import run_controller
    from slurm_watchdog.controller.standby import RESTART, restart_process

    log_setup.set_up()
    code = run_controller(config, once=once, record=record, config_file=file)
    if code == RESTART:
        restart_process()
    sys.exit(code)
