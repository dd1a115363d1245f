"""`slurm-watchdog check-config`: every error of a configuration file at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click
import msgspec

from slurm_watchdog.cli.options import DEFAULT_CONFIG, EXIT_USAGE, json_option, print_json
from slurm_watchdog.cli.terminal import clean, count, duration, sentence

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

COLLECTIVE_TIMEOUT_S: Final = 600.0
"""Of NCCL in PyTorch, which has the shortest: torch.distributed.constants.default_pg_nccl_timeout."""


@click.command("check-config")
@click.argument("file", metavar="[F]", default=DEFAULT_CONFIG, type=click.Path())
@json_option
def check_config(file: str, as_json: bool) -> None:
    """Checks a configuration file (/etc/slurm-watchdog/config.yaml unless F is given), and the site's
    knowledge files that it names (knowledge.directory), and lists every error with its key or place and line.
    What loads and is hardly meant is a warning. Exit code 0, or 2 with errors.

    \b
    Examples:
      slurm-watchdog check-config
      slurm-watchdog check-config my.yaml
    """
    from slurm_watchdog.config.loading import ConfigError, load_config

    try:
        config = load_config(file)
    except ConfigError as error:
        if as_json:
            print_json({"file": file, "ok": False, "problems": msgspec.to_builtins(error.problems)})
        else:
            click.echo(f"{clean(file)} has {count(len(error.problems), 'error')} and would be refused:")
            for line in error.lines():
                click.echo(clean(line))
        sys.exit(EXIT_USAGE)
    found = [*config.warnings, *warnings(config)]
    if as_json:
        print_json({"file": file, "ok": True, "problems": [], "warnings": found})
        return
    sentence(f"{file} is fine: restart: {config.restart}, controller on {config.controller.listen}.")
    if config.site_texts:
        files = count(len(config.site_texts), "knowledge file")
        sentence(f"{config.knowledge.directory} is fine: {files}.")
    for each in found:
        sentence(f"Warning: {each}")


def warnings(config: Config) -> Iterator[str]:
    """What is allowed and hardly meant, a key and a sentence each."""
    from slurm_watchdog.detect.collective_hang import CollectiveHang
    from slurm_watchdog.detect.registry import KINDS, why_ladder_unfit

    if not config.controller_urls:
        yield "controller: not set, so no agent starts with this file; set it on nodes"
    hang = config.detectors.of(CollectiveHang)
    for name, seconds in (("floor", hang.floor), ("proven_floor", hang.proven_floor)):
        if seconds >= COLLECTIVE_TIMEOUT_S:
            yield (
                f"detectors.collective_hang.{name}: {duration(seconds)} is longer than the timeout of a collective, "
                "which ends the job before (NCCL's is 10 min in PyTorch)"
            )
    modes = {kind: getattr(config.detectors, kind).mode for kind in KINDS if hasattr(config.detectors, kind)}
    asked = [(f"detectors.{kind}", kind) for kind, mode in modes.items() if mode == "act"]
    asked += [(f"expert.policy.kinds.{kind}", kind) for kind, each in config.policy.kinds.items() if each.mode == "act"]
    for where, kind in asked:
        if why := (why_ladder_unfit(kind, ()) or "").partition("; kinds with")[0]:
            yield f"{where}.mode: act has no effect, since {why}"
