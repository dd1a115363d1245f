"""`slurm-watchdog doctor`: what is missing on this node, on this cluster, in this job or its script to be protected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from subprocess import DEVNULL

import click
from click.core import ParameterSource
from msgspec import to_builtins

from slurm_watchdog.base import clock
from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.cli import options
from slurm_watchdog.cli.client import find
from slurm_watchdog.cli.options import Answer, Asked, ClientError, Refusal, command
from slurm_watchdog.cli.terminal import LEVELS, sentence
from slurm_watchdog.config.loading import ConfigError, load_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.doctor import cluster
from slurm_watchdog.doctor.finding import Advice, Level, examine, exit_code, ranked
from slurm_watchdog.doctor.node import misspelt, read_node, run
from slurm_watchdog.model.documents import Status
from slurm_watchdog.model.incidents import Severity

STYLES = {level.lower(): style for level, style in LEVELS} | {"hint": "cyan"}
PROGRAM = "from slurm_watchdog.cli.main import main; main()"
NO_RECEIVER = (
    "No receiver is configured (notify.slack, notify.webhook, notify.alertmanager): "
    "notifications go to the controller's log only."
)
COLLECTIVE_TIMEOUT_S = 600.0
"""Of NCCL in PyTorch, which has the shortest: torch.distributed.constants.default_pg_nccl_timeout."""
MAX_SCRIPT_BYTES = 4 << 20  # Slurm takes scripts of up to 4 MiB (max_script_size).


@command(
    """
    script [SCRIPT]
    -j, --job J  A job that waits or runs: its script, and what is seen of it.
    --node  This compute node, for the agent.
    --deadline TIME  Answer within TIME (20s), whatever hangs; with --node.
    --only RULES  Only these findings (service,nvml,munge,…); with --node.
    --notify  Send a test notification to every receiver, and then that it is over.
    --torch F  ignored: no finding depends on PyTorch's release any more
    --severity info|warning|critical=info  Of that test; a critical one also mentions people and pages.
    """,
    options.ASKS,
)
def doctor(
    asked: Asked,
    script: str | None,
    job: str | None,
    node: bool,
    deadline: float | None,
    only: str | None,
    notify: bool,
    severity: str,
) -> Answer:
    """Checks a cluster, node, job or job script (- is standard input) for missing settings.

    Without an argument: the cluster, from the management node. Each finding is one sentence, what it was seen from,
    and the line to add. It changes nothing. Exit code 0 nothing is missing (a hint alone: 0), 1 warning, 2 critical,
    3 unknown (something that matters could not be seen).

    With --config F and no SCRIPT, --job, --node or --socket it checks that file, and the site's knowledge files that it
    names: every error with its key or place and line, and warnings. Exit code 0, or 2 with errors.

    With --notify it sends with the code that sends incidents, and needs no controller: run it as a user who can read
    the receivers' secrets. Exit code 0 if every receiver took it, else 1.

    \b
    Examples:
      slurm-watchdog doctor --node              on a compute node, as root
      slurm-watchdog doctor --node --deadline 20s --only nvml,state_space    for a HealthCheckProgram
      slurm-watchdog doctor train.sbatch        no root, no controller, no Slurm needed
      slurm-watchdog doctor --config my.yaml    every error of this file
    """
    if sum((script is not None, job is not None, node, notify)) > 1:
        raise click.UsageError("give a script, --job, --node or --notify, not several of them")
    if notify:
        return _send_test(asked.config or options.service_paths().config, severity)
    names_socket = click.get_current_context().get_parameter_source("socket") is ParameterSource.COMMANDLINE
    if asked.config is not None and script is None and job is None and not node and not names_socket:
        return _check_config(asked.config)
    if (deadline is not None or only is not None) and not node:
        raise click.UsageError("--deadline and --only go with --node")
    file = asked.config or options.readable_config()

    try:
        config = Config() if file is None else options.load_or_exit(file)
    except Refusal as refused:
        if only is not None:  # a health check drains for code 2, and none of its findings was looked for
            refused.end_with(options.EXIT_UNKNOWN)
        raise
    if script is not None:
        name, directory = ("standard input", ".") if script == "-" else (script, os.path.dirname(script))
        return _findings("script", script, cluster.examine_text(_read(script), name, directory, config))
    if job is not None:
        return _findings("job", job, cluster.examine_job(job, config, _status(asked)))
    if not node:
        return _findings("cluster", config.cluster_name, cluster.examine_cluster(config, _status(asked)))
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    subject = host if config.agent.node_name == "auto" else config.agent.node_name
    if deadline is None:
        wanted = [name.strip() for name in only.split(",")] if only is not None else []
        found = examine("node", read_node(config, "agent", subject))
        of_these = [each for each in found if only is None or each.rule in wanted]
        return _findings("node", subject, (*of_these, *misspelt(wanted)))
    given = {"--only": only, "--config": file}
    words = [word for name, value in given.items() if value is not None for word in (name, value)]
    return _findings("node", subject, _examine_in_time(deadline, subject, *words, *["--json"] * asked.json))


def _read(path: str) -> str:
    """A script. Raises Refusal if it cannot be read."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            return file.read(MAX_SCRIPT_BYTES).decode(errors="replace")
    except OSError as error:
        raise Refusal([f"{path} cannot be read: {error.strerror}."]) from error


def _status(asked: Asked) -> Status | str:
    """What the controller reports, or why it does not."""
    try:
        return find(asked).get(Status, "/v1/status")
    except ClientError as error:
        return error.what


def _examine_in_time(deadline_s: float, node: str, *words: str) -> tuple[Advice, ...]:
    """What a child finds on this node; it prints that, and ends this process with its code. One that does not end in
    time is left behind, and is the finding: a node of which nothing is known is not well."""
    code, said = run([*run_code(PROGRAM), "doctor", "--node", *words], deadline_s, DEVNULL)
    if code in range(len(LEVELS)) and said:
        click.echo(said)
        sys.exit(code)
    waits = said if code is None else f"the checking process ended with {code} and printed {said[-100:]!r}"
    return examine("look", {"where": node, "waits": waits})


def _check_config(file: str) -> Answer:
    """Every error of a configuration file at once."""
    try:
        config = load_config(file)
    except ConfigError as error:
        lines = [f"{file} has {plural(len(error.problems), 'error')} and would be refused:", *error.lines()]
        document = {"file": file, "ok": False, "problems": to_builtins(error.problems)}
        return Answer(document, lines, options.EXIT_USAGE)
    found = [*config.warnings, *warnings(config)]
    lines = [f"{file} is fine: restart: {config.restart}, controller on {config.controller.listen}."]
    if config.site_texts:
        lines.append(f"{config.knowledge.directory} is fine: {plural(len(config.site_texts), 'knowledge file')}.")
    lines += [f"Warning: {each}" for each in found]
    document = {"file": file, "ok": True, "problems": [], "warnings": found}
    return Answer(document, lines)


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


def _send_test(file: str, severity: str) -> Answer:
    """A test notification to every receiver of the configuration."""
    import asyncio
    import logging

    from slurm_watchdog.notify.dispatcher import try_receivers

    config = options.load_or_exit(file)
    # What fails is printed below, once.
    logging.getLogger("slurm_watchdog.notify").addHandler(logging.NullHandler())
    tried = asyncio.run(try_receivers(config, Severity(severity), clock.wall()))
    failed = sum(error is not None for error in tried.values())
    lines = [f"{name}: {'sent' if error is None else f'FAILED: {error}'}" for name, error in tried.items()]
    if failed:
        lines.append(f"{plural(failed, 'receiver')} of {len(tried)} failed.")
    else:
        lines.append(f"{plural(len(tried), 'receiver')} took the test notification." if tried else NO_RECEIVER)
    rows = [{"receiver": name, "sent": error is None, "error": error} for name, error in tried.items()]
    return Answer({"receivers": rows}, lines, bool(failed or not tried))


def _findings(what: str, subject: str, advice: Iterable[Advice]) -> Answer:
    """What was found, the gravest first."""
    found = ranked(advice)
    code = exit_code(found)
    level, style = LEVELS[code]
    faults = sum(1 for each in found if each.level is not Level.HINT)
    said = plural(faults, "finding") if faults else "nothing is missing"
    more = f", {plural(len(found) - faults, 'hint')}" if len(found) > faults else ""

    def show_all() -> None:
        sentence(f"{level}: {what} {subject}: {said}{more}.", style)
        for each in found:
            click.echo()
            sentence(f"{each.level.value.upper()}: {each.sentence}", STYLES[each.level.value])
            for title, text in (("seen", each.evidence), ("add", each.add), ("where", each.where)):
                if text:
                    sentence(f"  {title + ':':6} {text}")

    document = {"what": what, "subject": subject, "level": level.lower(), "findings": to_builtins(found)}
    return Answer(document, show_all, code)
