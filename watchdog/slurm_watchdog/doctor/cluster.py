"""What Slurm says about a cluster, a job and its script; each command with a deadline."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from slurm_watchdog.doctor.deadline import last_words, run
from slurm_watchdog.doctor.finding import Advice, Facts, Names, examine
from slurm_watchdog.slurm.node_names import expand_nodes

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

USER: Final = "slurm-watchdog"
"""The controller's."""
SETTINGS: Final = (
    "JobRequeue", "TaskProlog", "MinJobAge", "KillWait", "UnkillableStepTimeout", "ProctrackType", "SLURM_VERSION",
    "PrivateData",
)  # fmt: skip
"""Of `scontrol show config`, by which rules judge."""
PROGRAM_BYTES: Final = 1 << 20
MAX_PROGRAMS: Final = 8


def read_slurm(bin_directory: str, command: str, *arguments: str) -> tuple[str | None, str]:
    """(what a command of Slurm's printed, why there is none)."""
    code, said = run([os.path.join(bin_directory, command), *arguments])
    return (said, "") if code == 0 else (None, last_words(said))


def read_slurm_config(bin_directory: str) -> tuple[dict[str, str] | None, str]:
    """(`scontrol show config`, why there is none)."""
    said, problem = read_slurm(bin_directory, "scontrol", "show", "config")
    return None if said is None else parse_slurm_config(said), problem


def parse_slurm_config(text: str) -> dict[str, str]:
    """`Key = value` of each line of `scontrol show config`."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def settings(config: Mapping[str, str] | None, problem: str) -> Facts:
    """The facts of `read_slurm_config`; None: Slurm does not answer, or does not have the setting."""
    known = dict.fromkeys(SETTINGS) if config is None else {"TaskProlog": "(null)", **config}
    return {**{key: known.get(key) for key in SETTINGS}, "slurm_problem": problem if config is None else None}


def read_partitions(bin_directory: str) -> dict[str, tuple[str, ...]]:
    """All partitions with their nodes, those that are down or hidden, too."""
    said, _ = read_slurm(bin_directory, "sinfo", "--noheader", "--all", "--format=%R|%N")
    found: dict[str, tuple[str, ...]] = {}
    for line in (said or "").splitlines():
        name, _, nodes = line.partition("|")
        found[name] = (*found.get(name, ()), *expand_nodes(nodes.strip()))
    return found


def examine_partitions(config: Config, partitions: Sequence[str]) -> tuple[Advice, ...]:
    """What of the configuration is for partitions alone that Slurm does not have; nothing where these are not known."""
    policy, slack = config.policy.overrides, config.notify.slack.mentions
    parts = [(f"policy.overrides[{number}]", each.match.partition) for number, each in enumerate(policy)]
    parts += [(f"thresholds[{number}]", each.match.partition) for number, each in enumerate(config.thresholds)]
    named = (key.removeprefix("partition:") for key in slack if key.startswith("partition:"))
    parts += [("notify.slack.mentions", [name]) for name in named]
    return tuple(
        advice
        for part, globs in parts
        if globs and partitions and not any(fnmatchcase(name, glob) for name in partitions for glob in globs)
        for advice in examine("partition", {"part": part, "wanted": Names(globs), "partitions": Names(partitions)})
    )


def read_operator(bin_directory: str) -> bool | None:
    """Whether accounting has the controller's user as operator or administrator; None without accounting."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "user", USER, "format=user,adminlevel")
    said, _ = read_slurm(bin_directory, *command)
    if said is None or "disabled" in said:
        return None
    return re.search(rf"^{USER}\|(Operator|Administrator)\b", said, re.MULTILINE) is not None


def read_job(bin_directory: str, job_id: str) -> dict[str, str]:
    """`scontrol show job`, the fields of its lines; empty if Slurm has none."""
    said, _ = read_slurm(bin_directory, "scontrol", "show", "job", job_id, "--oneliner")
    return dict(re.findall(r"(?:^|\s)([A-Za-z:]+)=(.*?)(?=\s+[A-Za-z:/]+=|$)", said or ""))


def read_script(bin_directory: str, job_id: str) -> tuple[str | None, str]:
    """(the batch script that Slurm keeps, why there is none)."""
    said, problem = read_slurm(bin_directory, "scontrol", "write", "batch_script", job_id, "-")
    if (said or "").startswith("#!"):
        return said, ""
    return None, problem or last_words(said or "") or "no batch script"


def read_submit_line(bin_directory: str, job_id: str) -> list[str]:
    """The words of the sbatch command that submitted a job; none without accounting."""
    command = ("sacct", "--noheader", "--parsable2", "--allocations", "-j", job_id, "-o", "SubmitLine")
    said, _ = read_slurm(bin_directory, *command)
    try:
        words = shlex.split((said or "").partition("\n")[0])
    except ValueError:
        return []
    return words[1:] if words and words[0].endswith("sbatch") else []


def read_programs(names: Sequence[str], directory: str) -> dict[str, str]:
    """Texts of the programs that can be read, by their names. Asked in a child with a deadline: they are on
    file systems of jobs."""
    known = [name for name in names[:MAX_PROGRAMS] if "$" not in name and "`" not in name]
    asked = ((name, run(["head", "-c", str(PROGRAM_BYTES), "--", os.path.join(directory, name)])) for name in known)
    return {name: said for name, (code, said) in asked if code == 0}
