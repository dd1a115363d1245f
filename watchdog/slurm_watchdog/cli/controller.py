"""`slurm-watchdog controller`, the service on the management node; and `notify test` beside it."""

from __future__ import annotations

import sys

import click

from slurm_watchdog.base import clock
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    default_config_option,
    json_option,
    load_or_exit,
    print_json,
    service_options,
)
from slurm_watchdog.cli.terminal import count, sentence

NO_RECEIVER = (
    "No receiver is configured (notify.slack, notify.webhook, notify.alertmanager): "
    "notifications go to the controller's log only."
)


@click.command()
@service_options
@click.option(
    "--record",
    metavar="FILE",
    type=click.Path(),
    help="Append every report and listing to FILE, for `slurm-watchdog replay`; it holds names, paths and "
    "log lines of users.",
)
def controller(config_file: str, once: bool, record: str | None) -> None:
    """The service on the management node: judges what agents report, decides, and acts where the mode allows it.

    At SIGHUP (systemctl reload) it reads its configuration again, and takes it whole or not at all.

    \b
    Examples:
      slurm-watchdog controller --config /etc/slurm-watchdog/config.yaml
      slurm-watchdog controller --once        one look at the cluster
      slurm-watchdog controller --record /var/tmp/today.jsonl
    """
    config = load_or_exit(config_file)
    from slurm_watchdog.base import log_setup
    from slurm_watchdog.controller.app import run_controller
    from slurm_watchdog.controller.reload import RESTART, restart_process

    log_setup.set_up()
    code = run_controller(config, once=once, record=record, config_file=config_file)
    if code == RESTART:
        restart_process()
    sys.exit(code)


@click.group()
def notify() -> None:
    """Notifications to Slack, a webhook, Alertmanager, as the configuration has them.

    \b
    Example:
      slurm-watchdog notify test
    """


@notify.command("test")
@default_config_option
@click.option(
    "--severity", type=click.Choice(["info", "warning", "critical"]), default="info", show_default=True,
    help="Of the test; a critical one also mentions people and pages.",
)  # fmt: skip
@json_option
def send_test(config_file: str, severity: str, as_json: bool) -> None:
    """Sends a test notification to every receiver of the configuration, and then that it is over.

    It uses the code that sends incidents, and needs no controller. Run it as a user who can read the
    receivers' secrets: root, or the controller's user. Exit code 0 if every receiver took it; 1 if one did
    not, or none is configured.

    \b
    Examples:
      slurm-watchdog notify test
      slurm-watchdog notify test --severity critical
      slurm-watchdog notify test --config my.yaml --json
    """
    import asyncio
    import logging

    from slurm_watchdog.model.incidents import Severity
    from slurm_watchdog.notify.dispatcher import try_receivers

    config = load_or_exit(config_file)
    # What fails is printed below, once.
    logging.getLogger("slurm_watchdog.notify").addHandler(logging.NullHandler())
    tried = asyncio.run(try_receivers(config, Severity(severity), clock.wall()))
    failed = [error for error in tried.values() if error is not None]
    if as_json:
        print_json([{"receiver": name, "sent": error is None, "error": error} for name, error in tried.items()])
    else:
        for name, error in tried.items():
            sentence(f"{name}: {'sent' if error is None else f'FAILED: {error}'}")
        sentence(
            f"{count(len(failed), 'receiver')} of {len(tried)} failed." if failed
            else f"{count(len(tried), 'receiver')} took the test notification." if tried else NO_RECEIVER
        )  # fmt: skip
    sys.exit(EXIT_FINE if tried and not failed else EXIT_FOUND)
