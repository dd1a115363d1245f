"""Pure: the options of sbatch that a job was submitted with, as far as a listing of it tells them.

A stored script holds its #SBATCH lines and not what was given on sbatch's command line. What is the same for
every job, and what the caller decides (name, partition, nodes to avoid, time limit, comment), is not here.
"""

from __future__ import annotations

import math
import re

from slurm_watchdog.model.slurm_states import HAD_PROCESSES
from slurm_watchdog.slurm.node_names import ParseError, all_or_none
from slurm_watchdog.slurm.parse import Marks, checked_id, parse_count, split_table

OPTION_FIELDS = (
    "jobid", "jobarrayid", "arraytaskid", "state", "numnodes", "numtasks", "cpus-per-task", "ntpernode",
    "tres-per-node",
    "tres-per-job", "tres-per-task", "tres-per-socket", "licenses", "oversubscribe", "contiguous", "tres-alloc",
    # From here on a user has a hand in it.
    "feature", "workdir", "stdout", "stderr",
)  # fmt: skip
"""What squeue -O is asked for. All of them exist in 22.05, 24.11 and 26.05."""
NO_VALUE = frozenset({"", "N/A", "(null)", "0", "*"})
SHARING = {
    "NO": "--exclusive",
    "USER": "--exclusive=user",
    "MCS": "--exclusive=mcs",
    "YES": "--oversubscribe",
}
GPUS = (
    ("tres-per-job", "--gpus"),
    ("tres-per-task", "--gpus-per-task"),
    ("tres-per-socket", "--gpus-per-socket"),
)
UNITS_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
DEFAULT_OUTPUT = re.compile(r"slurm-(\d+|%j|%A_%a|\d+_\d+)\.out", re.ASCII)


def options_of(text: str, marks: Marks, job_id: str) -> tuple[str, ...]:
    """The options of one job in a listing of OPTION_FIELDS. Raises ParseError, also if the listing is not about it."""
    listed = all_or_none(split_table(text, OPTION_FIELDS, marks))
    rows = [dict(zip(OPTION_FIELDS, row, strict=True)) for row in listed]
    found = {checked_id(row["jobarrayid"]): row for row in rows}
    if job_id not in found:
        raise ParseError(f"the answer for job {job_id} is about {list(found)[:5]}")
    return tuple(_options(found[job_id]))


def _options(row: dict[str, str]) -> list[str]:
    options = []
    if (tasks := parse_count(row["numtasks"])) is not None:
        options.append(f"--ntasks={tasks}")
    for field, option in (("cpus-per-task", "--cpus-per-task"), ("ntpernode", "--ntasks-per-node")):
        number = parse_count(row[field])
        if number:
            options.append(f"{option}={number}")
    if row["tres-per-node"] not in NO_VALUE:
        options.append(f"--gres={_without_gres(row['tres-per-node'])}")
    for field, option in GPUS:
        if gpus := re.fullmatch(r"(?:gres[:/])?gpu[:=]([\w:.-]+)", row[field]):
            options.append(f"{option}={gpus.group(1)}")
    if row["licenses"] not in NO_VALUE:
        options.append(f"--licenses={row['licenses']}")
    if row["feature"] not in NO_VALUE:
        options.append(f"--constraint={row['feature']}")
    if row["oversubscribe"] in SHARING:
        options.append(SHARING[row["oversubscribe"]])
    if row["contiguous"] == "1":
        options.append("--contiguous")
    if (memory := memory_a_node_mib(row)) is not None:
        options.append(f"--mem={memory}M")
    if row["arraytaskid"].isdigit():
        options.append(f"--array={row['arraytaskid']}")
    return options + _outputs(row)


def memory_a_node_mib(row: dict[str, str]) -> int | None:
    """MiB that the job has on each of its nodes; None if memory was not asked for, or it has no nodes yet.

    (What squeue calls MIN_MEMORY does not say whether it is per node or per CPU.)
    """
    nodes = parse_count(row["numnodes"])
    found = re.search(r"(?:^|,)mem=(\d+(?:\.\d+)?)([KMGTP])?(?:,|$)", row["tres-alloc"], re.ASCII)
    if found is None or not nodes or row["state"] not in HAD_PROCESSES:
        return None
    return math.ceil(float(found.group(1)) * UNITS_MIB[found.group(2) or "M"] / nodes)


def _without_gres(text: str) -> str:
    """`gres:gpu:2` of 22.05, `gres/gpu:2` of later releases: `gpu:2`."""
    return ",".join(re.sub(r"^gres[:/]", "", part) for part in text.split(","))


def _outputs(row: dict[str, str]) -> list[str]:
    """The patterns of the output files, unless default; of 22.05 the errors' is the output's if not given."""
    options = []
    stdout = "" if row["stdout"] in NO_VALUE else row["stdout"]
    stderr = "" if row["stderr"] in NO_VALUE else row["stderr"]
    if stdout and not _is_default(stdout, row["workdir"]):
        options.append(f"--output={stdout}")
    if stderr and stderr != stdout and not _is_default(stderr, row["workdir"]):
        options.append(f"--error={stderr}")
    return options


def _is_default(path: str, workdir: str) -> bool:
    return DEFAULT_OUTPUT.fullmatch(path.removeprefix(workdir.rstrip("/") + "/")) is not None
