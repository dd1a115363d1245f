"""`slurm-watchdog doctor`: what is missing on this node, on this cluster, in this job or its script to be protected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from slurm_watchdog.cli.client import ClientError
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import (
    EXIT_UNKNOWN,
    Refusal,
    load_or_exit,
    operator_options,
    print_json,
    removed_option,
    service_paths,
)
from slurm_watchdog.cli.terminal import count, sentence

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.doctor.cluster_rules import Undelivered, Unjudged
    from slurm_watchdog.doctor.finding import Advice
    from slurm_watchdog.doctor.script import Script
    from slurm_watchdog.model.documents import Status

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
@click.option(
    "--job",
    "job_id",
    metavar="J",
    help="A job that waits or runs: its script, and what is seen of it.",
)
@click.option("--node", "on_node", is_flag=True, help="This compute node, for the agent.")
@removed_option("--torch", "no finding depends on PyTorch's release any more")
@click.option("--deadline", metavar="TIME", help="Answer within TIME (20s), whatever hangs; with --node.")
@click.option("--only", metavar="RULE,…", help="Only these findings (service, nvml, munge, …); with --node.")
@operator_options
def doctor(
    script: str | None,
    job_id: str | None,
    on_node: bool,
    deadline: str | None,
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
    found: Sequence[Advice]
    try:
        config = _configuration(config_file)
    except Refusal as refused:
        if only is not None:
            raise _NotLookedFor(refused.lines, refused.todo) from refused
        raise
    if script is not None:
        what, subject, found = "script", script, examine_script(script, config)
    elif job_id is not None:
        what, subject, found = "job", job_id, examine_job(job_id, config, socket_path, config_file)
    elif on_node:
        subject = _node_name(config)
        what, found = "node", _only(only, _node(config, subject, deadline, config_file))
    else:
        what, subject, found = (
            "cluster",
            config.cluster_name,
            examine_cluster(config, socket_path, config_file),
        )
    _print_findings(what, subject, found, as_json)


def _only(names: str | None, found: Sequence[Advice]) -> Sequence[Advice]:
    """The findings of these rules, and that the look was not finished: a node of which nothing is known is not well."""
    if names is None:
        return found
    from slurm_watchdog.doctor.node_rules import misspelt

    wanted = [name.strip() for name in names.split(",")]
    wrong = misspelt(wanted)
    return [each for each in found if each.rule in ("deadline", *wanted)] + ([] if wrong is None else [wrong])


def _node(config: Config, node: str, deadline: str | None, config_file: str | None) -> Sequence[Advice]:
    """The findings on this node; with a deadline from a child, which is left behind if it does not answer in time."""
    if deadline is None:
        return examine_node(config, node)
    from slurm_watchdog.config.types import parse_duration
    from slurm_watchdog.doctor.deadline import examine_in_time

    try:
        deadline_s = parse_duration(deadline)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--deadline") from error
    return examine_in_time(deadline_s, node, config_file or _readable_default())


def _configuration(config_file: str | None) -> Config:
    from slurm_watchdog.config.schema import Config

    file = _readable_default() if config_file is None else config_file
    return Config() if file is None else load_or_exit(file)


def _readable_default() -> str | None:
    default = service_paths().config
    return default if os.access(default, os.R_OK) else None


def _node_name(config: Config) -> str:
    if config.agent.node_name != "auto":
        return config.agent.node_name
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


# ------------------------------------------------------------------------------------------------ what is examined


def examine_script(path: str, config: Config) -> tuple[Advice, ...]:
    """A script that is not submitted yet. Ends the process with code 2 if it can't be read."""
    from slurm_watchdog.doctor.script import parse_script

    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            raw = file.read(MAX_SCRIPT_BYTES)
    except OSError as error:
        raise Refusal([f"{path} can't be read: {error.strerror}."]) from error
    script = parse_script(raw.decode(errors="replace"), "standard input" if path == "-" else path)
    return _of_script(script, "." if path == "-" else os.path.dirname(os.path.abspath(path)), config)


def _of_script(script: Script, directory: str, config: Config, **seen: Any) -> tuple[Advice, ...]:
    from slurm_watchdog.doctor import facts as read
    from slurm_watchdog.doctor.finding import examine
    from slurm_watchdog.doctor.script_rules import SCRIPT_RULES, JobFacts

    facts = JobFacts(
        script=script,
        slurm=read.read_slurm_config(config.slurm.bin_directory)[0],
        read=read.read_programs(script.programs, directory),
        checkpoint_directories=config.jobs.checkpoint_directories + config.jobs.checkpoint_trackers,
        **seen,
    )
    return examine(facts, SCRIPT_RULES)


def examine_job(job_id: str, config: Config, socket_path: str | None, config_file: str | None) -> tuple[Advice, ...]:
    """A job that Slurm has, with what the controller sees of it."""
    from slurm_watchdog.doctor import facts as read
    from slurm_watchdog.doctor.finding import Advice, Level
    from slurm_watchdog.doctor.script import parse_script

    where = config.slurm.bin_directory
    job = read.read_job(where, job_id)
    if not job:
        return (
            Advice(
                "job",
                Level.UNKNOWN,
                f"Slurm has no job {job_id}, or gives no answer.",
                f"scontrol show job {job_id}",
                "squeue --me",
            ),
        )
    text, problem = read.read_script(where, job_id)
    script = parse_script(text or "", f"script of job {job_id}", given=read.read_submit_line(where, job_id))
    found = _of_script(
        script, job.get("WorkDir", "/"), config,
        comment=job.get("Comment", ""), requeueable=job.get("Requeue") == "1",
    )  # fmt: skip
    if text is None:
        unseen = Advice(
            "script",
            Level.UNKNOWN,
            "The job's script can't be read: what it lacks is not known.",
            problem,
            "ask as the job's owner or an administrator",
        )
        found = (unseen, *(each for each in found if each.rule == "requeue"))
    return (*found, *_unseen(job_id, job, socket_path, config_file))


def _unseen(job_id: str, job: dict[str, str], socket_path: str | None, config_file: str | None) -> Iterator[Advice]:
    """Of a job that runs: whether the controller can judge it."""
    from slurm_watchdog.doctor.finding import Advice, Level

    status = _status(socket_path, config_file)
    if isinstance(status, ClientError) or job.get("JobState") != "RUNNING":
        return
    known = next((each for each in status.jobs if each.job_id == job_id), None)
    if known is None:
        yield Advice(
            "not_watched",
            Level.WARNING,
            "The controller does not watch this job.",
            "it is not in its list",
            "jobs: {partitions: [...]} leaves out others; slurm-watchdog status",
        )
    elif known.health is not None and known.health.not_judged is not None:
        text = f"The job cannot be judged: {known.health.reason}."
        yield Advice("not_judged", Level.WARNING, text, "slurm-watchdog status", known.health.todo)


def examine_node(config: Config, node: str) -> tuple[Advice, ...]:
    """This node, as a place for an agent."""
    from slurm_watchdog.doctor import facts as read
    from slurm_watchdog.doctor.finding import examine
    from slurm_watchdog.doctor.node_rules import NODE_RULES

    return examine(read.read_node(config, "agent", node), NODE_RULES)


def examine_cluster(config: Config, socket_path: str | None, config_file: str | None) -> tuple[Advice, ...]:
    """Slurm, the controller, and the node it runs on."""
    from msgspec.structs import replace

    from slurm_watchdog.doctor import facts as read
    from slurm_watchdog.doctor.cluster_rules import CLUSTER_RULES, ClusterFacts
    from slurm_watchdog.doctor.finding import ORDER, examine
    from slurm_watchdog.doctor.node_rules import NODE_RULES

    where = config.slurm.bin_directory
    slurm, problem = read.read_slurm_config(where)
    status = _status(socket_path, config_file)
    nodes = read.read_slurm_nodes(where) if slurm is not None else ()
    if isinstance(status, ClientError):
        facts = ClusterFacts(slurm=slurm, slurm_problem=problem, slurm_nodes=nodes, controller_problem=status.what)
    else:
        blind = status.controller.journal_error or status.slurm.error
        facts = ClusterFacts(
            slurm=slurm, slurm_problem=problem, slurm_nodes=nodes, mode=status.mode, blind=blind,
            paused=None if status.paused is None else status.paused.reason, reporting=status.nodes.reporting,
            silent=status.nodes.silent, notes=status.slurm.notes, deliveries=_undelivered(status),
            unjudged=_unjudged(status),
            user="slurm-watchdog", operator=read.read_operator(where, "slurm-watchdog"),
        )  # fmt: skip
    partitions = read.read_partitions(where) if slurm is not None else ()
    facts = replace(facts, partitions=partitions, for_partitions=read.for_partitions(config))
    here = read.read_node(config, "controller", os.uname().nodename)
    # A machine without the service lacks nothing for it: this was asked from a login node, say.
    is_controllers = (
        facts.controller_problem is None or here.state_problem is None or here.unit_state not in (None, "not installed")
    )
    found = (*examine(facts, CLUSTER_RULES), *(examine(here, NODE_RULES) if is_controllers else ()))
    return tuple(sorted(found, key=lambda each: ORDER.index(each.level)))


def _undelivered(status: Status) -> tuple[Undelivered, ...]:
    from slurm_watchdog.doctor.cluster_rules import Undelivered

    return tuple(
        Undelivered(channel=each.channel, failing_s=each.failing_s, error=each.error, waiting=each.waiting)
        for each in status.deliveries
        if each.failing_s is not None
    )


def _unjudged(status: Status) -> tuple[Unjudged, ...]:
    """The jobs that cannot be judged, by the reason, the most frequent first."""
    from slurm_watchdog.doctor.cluster_rules import Unjudged

    by_reason: dict[tuple[str, str], list[str]] = {}
    for job in status.jobs:
        if job.health is not None and job.health.not_judged is not None:
            by_reason.setdefault((job.health.reason, job.health.todo), []).append(job.job_id)
    ranked = sorted(by_reason.items(), key=lambda each: -len(each[1]))
    return tuple(Unjudged(reason=reason, todo=todo, job_ids=tuple(ids)) for (reason, todo), ids in ranked[:MAX_REASONS])


def _status(socket_path: str | None, config_file: str | None) -> Status | ClientError:
    try:
        return choose(socket_path, config_file).status()[0]
    except ClientError as error:
        return error


# ------------------------------------------------------------------------------------------------ what is said


def _print_findings(what: str, subject: str, found: Sequence[Advice], as_json: bool) -> None:
    from slurm_watchdog.doctor.finding import Level, exit_code

    code = exit_code(found)
    if as_json:
        rows = [
            {"rule": each.rule, "level": each.level.value, "sentence": each.sentence, "evidence": each.evidence,
            "add": each.add,
             "where": each.where}
            for each in found
        ]  # fmt: skip
        print_json({"what": what, "subject": subject, "level": LEVEL_NAMES[code].lower(), "findings": rows})
        sys.exit(code)
    faults = sum(1 for each in found if each.level is not Level.HINT)
    hints = len(found) - faults
    said = count(faults, "finding") if faults else "nothing is missing"
    more = f", {count(hints, 'hint')}" if hints else ""
    sentence(
        f"{LEVEL_NAMES[code]}: {what} {subject}: {said}{more}.",
        LEVEL_STYLES.get(LEVEL_NAMES[code].lower(), "green"),
    )
    for each in found:
        click.echo()
        sentence(f"{each.level.value.upper()}: {each.sentence}", LEVEL_STYLES[each.level.value])
        for title, text in (("seen", each.evidence), ("add", each.add), ("where", each.where)):
            if text:
                sentence(f"  {title + ':':6} {text}")
    sys.exit(code)
