"""`slurm-watchdog doctor`: what is missing on this node, on this cluster, in this job or its script to be protected."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from slurm_watchdog.base.text import duration, plural
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
    from slurm_watchdog.doctor.finding import Advice, Facts
    from slurm_watchdog.model.documents import Job, Status

LEVEL_NAMES = {0: "OK", 1: "WARNING", 2: "CRITICAL", 3: "UNKNOWN"}
LEVEL_STYLES = {"critical": "bold red", "warning": "yellow", "unknown": "magenta", "hint": "cyan"}
MAX_REASONS = 5
"""Reasons why jobs are not judged, of which each is a finding."""
MAX_SCRIPT_BYTES = 4 << 20
"""Slurm takes scripts of up to 4 MiB (max_script_size)."""


class _NotLookedFor(Refusal):
    """A health check drains for code 2, and none of its findings was looked for."""

    exit_code = EXIT_UNKNOWN


@click.command(short_help="What is missing to be protected: cluster, node, job or job script.")
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
    try:
        config = _configuration(file)
    except Refusal as refused:
        raise _NotLookedFor(refused.lines, refused.todo) if only is not None else refused from refused
    if script is not None:
        what, subject, found = "script", script, _examine_file(script, config)
    elif job_id is not None:
        what, subject, found = "job", job_id, _examine_job(job_id, config, _status(socket_path, config_file))
    elif on_node:
        host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        what, subject = "node", host if config.agent.node_name == "auto" else config.agent.node_name
        found = _examine_node(config, subject, deadline, only, file)
    else:
        what, subject = "cluster", config.cluster_name
        found = _examine_cluster(config, _status(socket_path, config_file))
    _print_findings(what, subject, tuple(found), as_json)


def _configuration(file: str | None) -> Config:
    from slurm_watchdog.config.schema import Config

    return Config() if file is None else load_or_exit(file)


def _status(socket_path: str | None, config_file: str | None) -> Status | ClientError:
    try:
        return choose(socket_path, config_file).status()[0]
    except ClientError as error:
        return error


# ------------------------------------------------------------------------------------------------ what is examined


def _examine_node(
    config: Config, node: str, deadline_s: float | None, only: str | None, file: str | None
) -> Iterator[Advice]:
    """This node, as a place for an agent; with a deadline from a child, which is left behind if it does not answer in
    time. With `only` these rules, and that the look was not finished: a node of which nothing is known is not well."""
    from slurm_watchdog.doctor.deadline import examine_in_time
    from slurm_watchdog.doctor.finding import examine
    from slurm_watchdog.doctor.node import misspelt, read_node

    if deadline_s is None:
        found = examine("node", read_node(config, "agent", node))
    else:
        found = examine_in_time(deadline_s, node, file)
    wanted = None if only is None else [name.strip() for name in only.split(",")]
    yield from (each for each in found if wanted is None or each.rule in ("deadline", *wanted))
    yield from misspelt(wanted or ())


def _examine_file(path: str, config: Config) -> Iterator[Advice]:
    """A script that is not submitted yet. Raises Refusal if it can't be read."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            text = file.read(MAX_SCRIPT_BYTES).decode(errors="replace")
    except OSError as error:
        raise Refusal([f"{path} can't be read: {error.strerror}."]) from error
    directory = "." if path == "-" else os.path.dirname(os.path.abspath(path))
    return _of_script(text, "standard input" if path == "-" else path, directory, config)


def _of_script(
    text: str, path: str, directory: str, config: Config, given: Sequence[str] = (), job: dict[str, str] | None = None
) -> Iterator[Advice]:
    from slurm_watchdog.doctor import cluster as read
    from slurm_watchdog.doctor.script import examine_script, parse_script

    script = parse_script(text, path, given=given)
    return examine_script(
        script,
        slurm=read.read_slurm_config(config.slurm.bin_directory)[0],
        read=read.read_programs(script.programs, directory),
        checkpoint_directories=config.jobs.checkpoint_directories + config.jobs.checkpoint_trackers,
        comment=(job or {}).get("Comment", ""),
        requeueable=None if job is None else job.get("Requeue") == "1",
    )


def _examine_job(job_id: str, config: Config, status: Status | ClientError) -> Iterator[Advice]:
    """A job that Slurm has, with what the controller sees of it."""
    from slurm_watchdog.doctor import cluster as read
    from slurm_watchdog.doctor.finding import examine

    where = config.slurm.bin_directory
    job = read.read_job(where, job_id)
    facts: dict[str, object] = {"job_id": job_id, "known": bool(job), "script_problem": None, "watched": None}
    text = ""
    if job:
        script, facts["script_problem"] = read.read_script(where, job_id)
        text = script or ""
    watched: Sequence[Job] = ()
    if job.get("JobState") == "RUNNING" and not isinstance(status, ClientError):
        watched = [each for each in status.jobs if each.job_id == job_id]
        facts["watched"] = bool(watched)
    yield from examine("job", facts)
    if job:
        given, path = read.read_submit_line(where, job_id), f"script of job {job_id}"
        found = _of_script(text, path, job.get("WorkDir", "/"), config, given=given, job=job)
        yield from (each for each in found if text or each.rule == "requeue")
        yield from _unjudged(watched)


def _examine_cluster(config: Config, status: Status | ClientError) -> Iterator[Advice]:
    """Slurm, the controller, and the node it runs on."""
    from slurm_watchdog.doctor import cluster as read
    from slurm_watchdog.doctor.finding import Names, examine
    from slurm_watchdog.doctor.node import read_node

    where = config.slurm.bin_directory
    slurm, problem = read.read_slurm_config(where)
    partitions = read.read_partitions(where) if slurm is not None else {}
    nodes = Names(dict.fromkeys(node for names in partitions.values() for node in names))
    facts: dict[str, object] = {**read.settings(slurm, problem), **cluster_facts(status, nodes)}
    if not isinstance(status, ClientError):
        facts["operator"] = read.read_operator(where)
    yield from examine("cluster", facts)
    yield from examine_status(status)
    yield from read.examine_partitions(config, tuple(partitions))
    here = read_node(config, "controller", os.uname().nodename)
    # A machine without the service lacks nothing for it: this was asked from a login node, say.
    is_installed = not here["state_problem"] or here["unit_state"] not in (None, "not installed")
    if facts["controller_problem"] is None or is_installed:
        yield from examine("node", here)


def cluster_facts(status: Status | ClientError, slurm_nodes: Sequence[str]) -> Facts:
    """What the controller reports, by the names that the rules of a cluster use."""
    from slurm_watchdog.doctor.cluster import USER
    from slurm_watchdog.doctor.finding import Names

    unknown = ("controller_problem", "blind", "paused", "mode", "silent", "reporting", "without", "operator")
    facts: Facts = {**dict.fromkeys(unknown), "slurm_nodes": Names(slurm_nodes), "user": USER}
    if isinstance(status, ClientError):
        return {**facts, "controller_problem": status.what}
    known = {*status.nodes.reporting, *status.nodes.silent}
    return {
        **facts,
        "blind": status.controller.journal_error or status.slurm.error,
        "paused": None if status.paused is None else status.paused.reason or "no reason given",
        "mode": status.mode,
        "silent": Names(status.nodes.silent),
        "reporting": status.nodes.reporting,
        "without": Names(node for node in slurm_nodes if node not in known),
    }


def examine_status(status: Status | ClientError) -> Iterator[Advice]:
    """What the controller reports as wrong: how it asks Slurm, what does not arrive, which jobs it can't judge."""
    from slurm_watchdog.doctor.finding import examine

    if isinstance(status, ClientError):
        return
    for note in status.slurm.notes:
        what, _, todo = note.rstrip(".").partition("; ")
        todo = todo or "slurm-watchdog status  # shows it until it is mended"
        yield from examine("note", {"what": what[:1].upper() + what[1:].rstrip("."), "todo": todo})
    for each in status.deliveries:
        failing = None if each.failing_s is None else duration(each.failing_s)
        waiting = f"; {plural(each.waiting, 'notification')} waiting" if each.waiting else ""
        facts = {"channel": each.channel, "failing": failing, "waiting": waiting, "error": each.error}
        yield from examine("delivery", facts)
    yield from _unjudged(status.jobs)


def _unjudged(jobs: Sequence[Job]) -> Iterator[Advice]:
    """The jobs that cannot be judged, by the reason, the most frequent first."""
    from slurm_watchdog.doctor.finding import Names, examine

    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for job in jobs:
        if job.health is not None and job.health.not_judged is not None:
            by_reason[job.health.reason, job.health.todo].append(job.job_id)
    ordered = sorted(by_reason.items(), key=lambda each: -len(each[1]))
    for (reason, todo), ids in ordered[:MAX_REASONS]:
        yield from examine("unjudged", {"jobs": Names(ids), "reason": reason, "todo": todo})


# ------------------------------------------------------------------------------------------------ what is said


def _print_findings(what: str, subject: str, found: Sequence[Advice], as_json: bool) -> NoReturn:
    import msgspec

    from slurm_watchdog.doctor.finding import Level, exit_code, ranked

    found, code = ranked(found), exit_code(found)
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
