"""`slurm-watchdog check-config`: every error of a configuration file at once."""

from __future__ import annotations

import sys

import click

from slurm_watchdog.cli.options import DEFAULT_CONFIG, EXIT_USAGE, json_option, print_json
from slurm_watchdog.cli.terminal import clean, count, sentence


@click.command("check-config", short_help="Every error of a configuration file at once.")
@click.argument("file", metavar="[F]", default=DEFAULT_CONFIG, type=click.Path())
@json_option
def check_config(file: str, as_json: bool) -> None:
    """Checks a configuration file (/etc/slurm-watchdog/config.yaml unless F is given), and the site's
    knowledge files that it names (knowledge.directory), and lists every error with its key or place and line.
    Exit code 0, or 2 with errors.

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
            problems = [problem.model_dump() for problem in error.problems]
            print_json({"file": file, "ok": False, "problems": problems})
        else:
            click.echo(f"{clean(file)} has {count(len(error.problems), 'error')} and would be refused:")
            for line in error.lines():
                click.echo(clean(line))
        sys.exit(EXIT_USAGE)
    if as_json:
        print_json({"file": file, "ok": True, "problems": []})
        return
    sentence(f"{file} is fine: mode {config.mode}, controller on {config.controller.listen}.")
    if config.site_texts:
        files = count(len(config.site_texts), "knowledge file")
        sentence(f"{config.knowledge.directory} is fine: {files}.")
