"""What a cluster, or a job that Slurm has, lacks: Slurm is asked with a deadline for each command."""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.doctor.finding import Advice, Names, examine
from slurm_watchdog.doctor.node import last_words, read_node, run
from slurm_watchdog.doctor.script import examine_script, parse_script
from slurm_watchdog.slurm.node_names import expand_nodes

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.model.documents import Job, Status

USER = "slurm-watchdog"  # The controller's.
PROGRAM_BYTES = 1 << 20
MAX_PROGRAMS = 8
MAX_REASONS = 5  # Reasons why jobs are not judged, of which each is a finding.


def read_slurm(bin_directory: str, command: str, *arguments: str) -> tuple[str, str]:
    """(what a command of Slurm's printed, why it failed; empty if it did not)."""
    code, said = run([os.path.join(bin_directory, command), *arguments])
    return (said, "") if code == 0 else ("", last_words(said) or f"{command} failed")


def read_slurm_config(bin_directory: str) -> tuple[dict[str, str], str]:
    """(`scontrol show config`, why there is none)."""
    said, problem = read_slurm(bin_directory, "scontrol", "show", "config")
    return parse_slurm_config(said), problem


def parse_slurm_config(text: str) -> dict[str, str]:
    """`Key = value` of each line of `scontrol show config`."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def examine_cluster(config: Config, status: Status | str) -> Iterator[Advice]:
    """Slurm, the controller with what it reports (or why it does not), and the node it runs on."""
    ask = partial(read_slurm, config.slurm.bin_directory)
    slurm, problem = read_slurm_config(config.slurm.bin_directory)
    partitions: dict[str, None] = {}
    nodes: dict[str, None] = {}
    for line in ask("sinfo", "--noheader", "--all", "--format=%R|%N")[0].splitlines() if slurm else ():
        name, _, names = line.partition("|")
        partitions[name] = None
        nodes |= dict.fromkeys(expand_nodes(names.strip()))
    operator = None
    if not isinstance(status, str):
        said, no_accounting = ask("sacctmgr", "-nP", "show", "user", USER, "format=user,adminlevel")
        if not no_accounting and "disabled" not in said:
            operator = re.search(rf"^{USER}\|(Operator|Administrator)\b", said, re.MULTILINE) is not None
    yield from examine_answers(slurm, problem, tuple(nodes), status, operator)
    yield from examine_partitions(config, tuple(partitions))
    here = read_node(config, "controller", os.uname().nodename)
    # A machine without the service lacks nothing for it: this was asked from a login node, say.
    is_installed = not here["state_problem"] or here["unit_state"] not in (None, "not installed")
    if not isinstance(status, str) or is_installed:
        yield from examine("node", here)


def examine_answers(
    slurm: Mapping[str, str], slurm_problem: str, nodes: Sequence[str], status: Status | str, operator: bool | None
) -> Iterator[Advice]:
    """What is wrong in Slurm's settings and in what the controller reports; `operator`: whether its user is one."""
    facts: dict[str, object] = {"TaskProlog": "(null)", **slurm} if slurm else {"slurm_problem": slurm_problem}
    facts |= {"slurm_nodes": Names(nodes), "user": USER, "operator": operator}
    if isinstance(status, str):
        yield from examine("cluster", {**facts, "controller_problem": status})
        return
    known = {*status.nodes.reporting, *status.nodes.silent}
    facts |= {
        "blind": status.controller.journal_error or status.slurm.error,
        "paused": status.paused and (status.paused.reason or "no reason given"),
        "mode": status.mode,
        "silent": Names(status.nodes.silent),
        "reporting": status.nodes.reporting,
        "without": Names(node for node in nodes if node not in known),
    }
    yield from examine("cluster", facts)
    for note in status.slurm.notes:
        what, _, todo = note.rstrip(".").partition("; ")
        todo = todo or "slurm-watchdog status  # shows it until it is repaired"
        yield from examine("note", {"what": what[:1].upper() + what[1:].rstrip("."), "todo": todo})
    for each in status.deliveries:
        failing = None if each.failing_s is None else duration(each.failing_s)
        waiting = plural(each.waiting, "notification")
        yield from examine("delivery", {"failing": failing, "delivery": each, "waiting": waiting})
    yield from examine_jobs(status.jobs)


def examine_jobs(jobs: Sequence[Job]) -> Iterator[Advice]:
    """The jobs that cannot be judged, by the reason, the most frequent first."""
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for job in jobs:
        if job.health is not None and job.health.not_judged is not None:
            by_reason[job.health.reason, job.health.todo].append(job.job_id)
    ordered = sorted(by_reason.items(), key=lambda each: -len(each[1]))
    for (reason, todo), ids in ordered[:MAX_REASONS]:
        yield from examine("unjudged", {"jobs": Names(ids), "reason": reason, "todo": todo})


def examine_partitions(config: Config, partitions: Sequence[str]) -> Iterator[Advice]:
    """What of the configuration is for partitions alone that Slurm does not have; nothing where these are not known."""
    parts = [(each.match.words, each.match.partition) for each in config.exceptions]
    for part, globs in parts if partitions else ():
        if globs and not any(fnmatchcase(name, glob) for name in partitions for glob in globs):
            facts = {"part": part, "wanted": Names(globs), "partitions": Names(partitions)}
            yield from examine("partition", facts)


def examine_job(job_id: str, config: Config, status: Status | str) -> Iterator[Advice]:
    """A job that Slurm has, with what the controller sees of it."""
    ask = partial(read_slurm, config.slurm.bin_directory)
    shown = ask("scontrol", "show", "job", job_id, "--oneliner")[0]
    job = dict(re.findall(r"(?:^|\s)([A-Za-z:]+)=(.*?)(?=\s+[A-Za-z:/]+=|$)", shown))
    if not job:
        yield from examine("job", {"job_id": job_id, "known": False})
        return
    text, problem = ask("scontrol", "write", "batch_script", job_id, "-")
    if not text.startswith("#!"):  # it exits with 0 also if there is none
        text, problem = "", problem or last_words(text) or "no batch script"
    facts: dict[str, object] = {"script_problem": problem}
    watched: Sequence[Job] = ()
    if job.get("JobState") == "RUNNING" and not isinstance(status, str):
        watched = [each for each in status.jobs if each.job_id == job_id]
        facts["watched"] = bool(watched)
    yield from examine("job", facts)
    line = ask("sacct", "--noheader", "--parsable2", "--allocations", "-j", job_id, "-o", "SubmitLine")[0]
    try:
        command = shlex.split(line.partition("\n")[0])
    except ValueError:
        command = []
    given = command[1:] if command and command[0].endswith("sbatch") else []
    found = examine_text(text, f"script of job {job_id}", job.get("WorkDir", "/"), config, given, job)
    yield from (each for each in found if text or each.rule == "requeue")
    yield from examine_jobs(watched)


def examine_text(
    text: str, path: str, directory: str, config: Config, given: Sequence[str] = (), job: dict[str, str] | None = None
) -> Iterator[Advice]:
    """A script by its text; `directory` is where it runs, `given` the options of its submission. Its programs are read
    in children with a deadline: they are on file systems of jobs."""
    script = parse_script(text, path, given=given)
    names = [name for name in script.programs[:MAX_PROGRAMS] if "$" not in name and "`" not in name]
    asked = ((name, run(["head", "-c", str(PROGRAM_BYTES), "--", os.path.join(directory, name)])) for name in names)
    return examine_script(
        script,
        slurm=read_slurm_config(config.slurm.bin_directory)[0],
        read={name: said for name, (code, said) in asked if code == 0},
        checkpoint_directories=config.jobs.checkpoint_directories + config.jobs.checkpoint_trackers,
        comment=(job or {}).get("Comment", ""),
        requeueable=None if job is None else job.get("Requeue") == "1",
    )
