"""`slurm-watchdog doctor`: what is missing on this node, on this cluster, in this job or its script to be protected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

import click

from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.cli.client import ClientError
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import (
    EXIT_UNKNOWN,
    Refusal,
    load_or_exit,
    operator_options,
    print_json,
    removed_option,
    seconds_of,
    service_paths,
)
from slurm_watchdog.cli.terminal import count, sentence

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.doctor.finding import Advice
    from slurm_watchdog.model.documents import Status

LEVEL_NAMES = {0: "OK", 1: "WARNING", 2: "CRITICAL", 3: "UNKNOWN"}
LEVEL_STYLES = {"critical": "bold red", "warning": "yellow", "unknown": "magenta", "hint": "cyan"}
PROGRAM = "from slurm_watchdog.cli.main import main; main()"
MAX_SCRIPT_BYTES = 4 << 20
"""Slurm takes scripts of up to 4 MiB (max_script_size)."""


class _NotLookedFor(Refusal):
    """A health check drains for code 2, and none of its findings was looked for."""

    exit_code = EXIT_UNKNOWN


@click.command()
@click.argument("script", required=False, metavar="[SCRIPT]", type=click.Path(allow_dash=True))
@click.option("--job", "job_id", metavar="J", help="A job that waits or runs: its script, and what is seen of it.")
@click.option("--node", "on_node", is_flag=True, help="This compute node, for the agent.")
@removed_option("--torch", "no finding depends on PyTorch's release any more")
@click.option(
    "--deadline",
    metavar="TIME",
    callback=seconds_of,
    help="Answer within TIME (20s), whatever hangs; with --node.",
)
@click.option("--only", metavar="RULE,…", help="Only these findings (service, nvml, munge, …); with --node.")
@operator_options
def doctor(
    script: str | None,
    job_id: str | None,
    on_node: bool,
    deadline: float | None,
    only: str | None,
    socket_path: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """What is missing for a cluster, a node, a job or a job script (- is standard input) to be protected.

    Without an argument: the cluster, from the management node. Each finding is one sentence, what it was seen from,
    and the line to add. It changes nothing. A hint alone is code 0.

    Exit code 0 nothing is missing, 1 warning, 2 critical, 3 unknown (something that matters could not be seen).

    \b
    Examples:
      slurm-watchdog doctor
      slurm-watchdog doctor --node              on a compute node, as root
      slurm-watchdog doctor --node --deadline 20s --only nvml,state_space    for a HealthCheckProgram
      slurm-watchdog doctor train.sbatch        no root, no controller, no Slurm needed
      slurm-watchdog doctor --job 4711 --json
    """
    if sum((script is not None, job_id is not None, on_node)) > 1:
        raise click.UsageError("give a script, --job or --node, not several of them")
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
        raise _NotLookedFor(refused.lines, refused.todo) if only is not None else refused from refused
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
    """A script. Raises Refusal if it can't be read."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            return file.read(MAX_SCRIPT_BYTES).decode(errors="replace")
    except OSError as error:
        raise Refusal([f"{path} can't be read: {error.strerror}."]) from error


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
    waits = said if code is None else f"the child that looks ended with {code} and printed {said[-100:]!r}"
    return examine("look", {"where": node, "waits": waits})


def _print_findings(what: str, subject: str, advice: Iterable[Advice], as_json: bool) -> NoReturn:
    import msgspec

    from slurm_watchdog.doctor.finding import Level, exit_code, ranked

    found = ranked(advice)
    code = exit_code(found)
    level = LEVEL_NAMES[code]
    if as_json:
        rows = msgspec.to_builtins(found)
        print_json({"what": what, "subject": subject, "level": level.lower(), "findings": rows})
        sys.exit(code)
    faults = sum(1 for each in found if each.level is not Level.HINT)
    hints = len(found) - faults
    said = count(faults, "finding") if faults else "nothing is missing"
    more = f", {count(hints, 'hint')}" if hints else ""
    sentence(f"{level}: {what} {subject}: {said}{more}.", LEVEL_STYLES.get(level.lower(), "green"))
    for each in found:
        click.echo()
        sentence(f"{each.level.value.upper()}: {each.sentence}", LEVEL_STYLES[each.level.value])
        for title, text in (("seen", each.evidence), ("add", each.add), ("where", each.where)):
            if text:
                sentence(f"  {title + ':':6} {text}")
    sys.exit(code)
