"""`slurm-watchdog notify test`: whether notifications arrive, before the first incident needs them."""

from __future__ import annotations

import asyncio
import logging
import sys

import click

from slurm_watchdog.base import clock
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    controller_packages,
    default_config_option,
    json_option,
    load_or_exit,
    print_json,
)
from slurm_watchdog.cli.terminal import count, sentence

NO_RECEIVER = (
    "No receiver is configured (notify.slack, notify.webhook, notify.alertmanager): "
    "notifications go to the controller's log only."
)


@click.group(short_help="Send a test notification to every configured receiver.")
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
    config = load_or_exit(config_file)
    with controller_packages():
        from slurm_watchdog.model.incidents import Severity
        from slurm_watchdog.notify.dispatcher import try_receivers
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
