"""`slurm-watchdog doctor`: what is missing on this node, on this cluster, in this job or its script to be protected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource
from msgspec import to_builtins

from slurm_watchdog.base import clock
from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.base.text import plural
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    JOB,
    ClientError,
    Refusal,
    flag,
    load_or_exit,
    operator_options,
    print_json,
    seconds_of,
    service_paths,
    value,
)
from slurm_watchdog.cli.terminal import clean, duration, sentence

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.doctor.finding import Advice
    from slurm_watchdog.model.documents import Status

LEVEL_NAMES = {0: "OK", 1: "WARNING", 2: "CRITICAL", 3: "UNKNOWN"}
LEVEL_STYLES = {"critical": "bold red", "warning": "yellow", "unknown": "magenta", "hint": "cyan"}
PROGRAM = "from slurm_watchdog.cli.main import main; main()"
NO_RECEIVER = (
    "No receiver is configured (notify.slack, notify.webhook, notify.alertmanager): "
    "notifications go to the controller's log only."
)
COLLECTIVE_TIMEOUT_S = 600.0
"""Of NCCL in PyTorch, which has the shortest: torch.distributed.constants.default_pg_nccl_timeout."""
MAX_SCRIPT_BYTES = 4 << 20  # Slurm takes scripts of up to 4 MiB (max_script_size).


@click.command()
@click.argument("script", required=False, metavar="[SCRIPT]", type=click.Path(allow_dash=True))
@value(*JOB, "job_id", metavar="J", help="A job that waits or runs: its script, and what is seen of it.")
@flag("--node", "on_node", help="This compute node, for the agent.")
@value("--deadline", metavar="TIME", callback=seconds_of, help="Answer within TIME (20s), whatever hangs; with --node.")
@value("--only", metavar="RULE,…", help="Only these findings (service, nvml, munge, …); with --node.")
@flag("--notify", help="Send a test notification to every receiver, and then that it is over.")
@click.option(
    "--severity",
    type=click.Choice(["info", "warning", "critical"]),
    default="info",
    show_default=True,
    help="Of that test; a critical one also mentions people and pages.",
)
@operator_options
def doctor(
    script: str | None,
    job_id: str | None,
    on_node: bool,
    deadline: float | None,
    only: str | None,
    notify: bool,
    severity: str,
    **where: Any,
) -> None:
    """Checks a cluster, node, job or job script (- is standard input) for missing settings.

    Without an argument: the cluster, from the management node. Each finding is one sentence, what it was seen from,
    and the line to add. It changes nothing. A hint alone is code 0.

    Exit code 0 nothing is missing, 1 warning, 2 critical, 3 unknown (something that matters could not be seen).

    With --config F and no SCRIPT, --job, --node or --socket it checks that file, and the site's knowledge files that it
    names: every error with its key or place and line, and warnings. Exit code 0, or 2 with errors.

    With --notify it sends with the code that sends incidents, and needs no controller: run it as a user who can read
    the receivers' secrets. Exit code 0 if every receiver took it, else 1.

    \b
    Examples:
      slurm-watchdog doctor
      slurm-watchdog doctor --node              on a compute node, as root
      slurm-watchdog doctor --node --deadline 20s --only nvml,state_space    for a HealthCheckProgram
      slurm-watchdog doctor train.sbatch        no root, no controller, no Slurm needed
      slurm-watchdog doctor --job 4711 --json
      slurm-watchdog doctor --config my.yaml    every error of this file
      slurm-watchdog doctor --notify
    """
    if sum((script is not None, job_id is not None, on_node, notify)) > 1:
        raise click.UsageError("give a script, --job, --node or --notify, not several of them")
    socket_path, config_file, as_json = where["socket_path"], where["config_file"], where["as_json"]
    if notify:
        _send_test(config_file or service_paths().config, severity, as_json)
    names_socket = click.get_current_context().get_parameter_source("socket_path") is ParameterSource.COMMANDLINE
    if config_file is not None and script is None and job_id is None and not on_node and not names_socket:
        _check_config(config_file, as_json)
    if (deadline is not None or only is not None) and not on_node:
        raise click.UsageError("--deadline and --only go with --node")
    file = config_file
    if file is None and os.access(service_paths().config, os.R_OK):
        file = service_paths().config
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.doctor import cluster

    try:
        config = Config() if file is None else load_or_exit(file)
    except Refusal as refused:
        if only is not None:  # a health check drains for code 2, and none of its findings was looked for
            refused.end_with(EXIT_UNKNOWN)
        raise
    found: Iterable[Advice]
    if script is not None:
        name, directory = ("standard input", ".") if script == "-" else (script, os.path.dirname(script))
        what, subject, found = "script", script, cluster.examine_text(_read(script), name, directory, config)
    elif job_id is not None:
        what, subject = "job", job_id
        found = cluster.examine_job(job_id, config, _status(socket_path, config_file))
    elif on_node:
        host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        what, subject = "node", host if config.agent.node_name == "auto" else config.agent.node_name
        if deadline is None:
            found = _examine_node(config, subject, only)
        else:
            given = {"--only": only, "--config": file}
            options = [word for name, value in given.items() if value is not None for word in (name, value)]
            found = _examine_in_time(deadline, subject, *options, *(["--json"] if as_json else []))
    else:
        what, subject = "cluster", config.cluster_name
        found = cluster.examine_cluster(config, _status(socket_path, config_file))
    _print_findings(what, subject, found, as_json)


def _read(path: str) -> str:
    """A script. Raises Refusal if it cannot be read."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            return file.read(MAX_SCRIPT_BYTES).decode(errors="replace")
    except OSError as error:
        raise Refusal([f"{path} cannot be read: {error.strerror}."]) from error


def _status(socket_path: str | None, config_file: str | None) -> Status | str:
    """What the controller reports, or why it does not."""
    from slurm_watchdog.model.documents import Status

    try:
        return choose(socket_path, config_file).get(Status, "/v1/status")
    except ClientError as error:
        return error.what


def _examine_node(config: Config, node: str, only: str | None) -> Iterator[Advice]:
    """This node, as a place for an agent; of what was found these rules alone."""
    from slurm_watchdog.doctor.finding import examine
    from slurm_watchdog.doctor.node import misspelt, read_node

    wanted = [name.strip() for name in only.split(",")] if only is not None else []
    found = examine("node", read_node(config, "agent", node))
    yield from (each for each in found if only is None or each.rule in wanted)
    yield from misspelt(wanted)


def _examine_in_time(deadline_s: float, node: str, *options: str) -> tuple[Advice, ...]:
    """The same in a child, which prints what it finds and ends this process with its code; one that does not end in
    time is left behind, and is the finding: a node of which nothing is known is not well."""
    from subprocess import DEVNULL

    from slurm_watchdog.doctor.finding import examine
    from slurm_watchdog.doctor.node import run

    code, said = run([*run_code(PROGRAM), "doctor", "--node", *options], deadline_s, DEVNULL)
    if code in LEVEL_NAMES and said:
        click.echo(said)
        sys.exit(code)
    waits = said if code is None else f"the checking process ended with {code} and printed {said[-100:]!r}"
    return examine("look", {"where": node, "waits": waits})


def _check_config(file: str, as_json: bool) -> NoReturn:
    """Every error of a configuration file at once."""
    from slurm_watchdog.config.loading import ConfigError, load_config

    try:
        config = load_config(file)
    except ConfigError as error:
        if as_json:
            print_json({"file": file, "ok": False, "problems": to_builtins(error.problems)})
        else:
            click.echo(f"{clean(file)} has {plural(len(error.problems), 'error')} and would be refused:")
            for line in error.lines():
                click.echo(clean(line))
        sys.exit(EXIT_USAGE)
    found = [*config.warnings, *warnings(config)]
    if as_json:
        print_json({"file": file, "ok": True, "problems": [], "warnings": found})
        sys.exit(EXIT_FINE)
    sentence(f"{file} is fine: restart: {config.restart}, controller on {config.controller.listen}.")
    if config.site_texts:
        files = plural(len(config.site_texts), "knowledge file")
        sentence(f"{config.knowledge.directory} is fine: {files}.")
    for each in found:
        sentence(f"Warning: {each}")
    sys.exit(EXIT_FINE)


def warnings(config: Config) -> Iterator[str]:
    """What is allowed and hardly meant, a key and a sentence each."""
    from slurm_watchdog.detect.collective_hang import CollectiveHang
    from slurm_watchdog.detect.registry import why_ladder_unfit

    if not config.controller_urls:
        yield "controller: not set, so no agent starts with this file; set it on nodes"
    hang = config.detectors.of(CollectiveHang)
    for name, seconds in (("floor", hang.floor), ("proven_floor", hang.proven_floor)):
        if seconds >= COLLECTIVE_TIMEOUT_S:
            yield (
                f"detectors.collective_hang.{name}: {duration(seconds)} is longer than the timeout of a collective, "
                "which ends the job before (NCCL's is 10 min in PyTorch)"
            )
    for each in config.exceptions:
        for kind in each.match.kinds() if each.given().get("restart", "never") != "never" else ():
            if why := (why_ladder_unfit(kind, ()) or "").partition("; kinds with")[0]:
                yield f"{each.match.words}: restart has no effect, since {why}"


def _send_test(file: str, severity: str, as_json: bool) -> NoReturn:
    """A test notification to every receiver of the configuration."""
    import asyncio
    import logging

    from slurm_watchdog.model.incidents import Severity
    from slurm_watchdog.notify.dispatcher import try_receivers

    config = load_or_exit(file)
    # What fails is printed below, once.
    logging.getLogger("slurm_watchdog.notify").addHandler(logging.NullHandler())
    tried = asyncio.run(try_receivers(config, Severity(severity), clock.wall()))
    failed = [error for error in tried.values() if error is not None]
    if as_json:
        rows = [{"receiver": name, "sent": error is None, "error": error} for name, error in tried.items()]
        print_json({"receivers": rows})
    else:
        for name, error in tried.items():
            sentence(f"{name}: {'sent' if error is None else f'FAILED: {error}'}")
        sentence(
            f"{plural(len(failed), 'receiver')} of {len(tried)} failed." if failed
            else f"{plural(len(tried), 'receiver')} took the test notification." if tried else NO_RECEIVER
        )  # fmt: skip
    sys.exit(EXIT_FINE if tried and not failed else EXIT_FOUND)


def _print_findings(what: str, subject: str, advice: Iterable[Advice], as_json: bool) -> NoReturn:
    from slurm_watchdog.doctor.finding import Level, exit_code, ranked

    found = ranked(advice)
    code = exit_code(found)
    level = LEVEL_NAMES[code]
    if as_json:
        rows = to_builtins(found)
        print_json({"what": what, "subject": subject, "level": level.lower(), "findings": rows})
        sys.exit(code)
    faults = sum(1 for each in found if each.level is not Level.HINT)
    hints = len(found) - faults
    said = plural(faults, "finding") if faults else "nothing is missing"
    more = f", {plural(hints, 'hint')}" if hints else ""
    sentence(f"{level}: {what} {subject}: {said}{more}.", LEVEL_STYLES.get(level.lower(), "green"))
    for each in found:
        click.echo()
        sentence(f"{each.level.value.upper()}: {each.sentence}", LEVEL_STYLES[each.level.value])
        for title, text in (("seen", each.evidence), ("add", each.add), ("where", each.where)):
            if text:
                sentence(f"  {title + ':':6} {text}")
    sys.exit(code)
