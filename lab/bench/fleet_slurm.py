"""Slurm as far as the controller asks it, for a fleet that does not exist: squeue and sinfo as scripts that
print a prepared listing.

The controller's own client starts them, hands over its marks and parses what they print, as it does with the real ones.
"""

from __future__ import annotations

import time
from pathlib import Path

from lab.bench.fleet_reports import Shape
from slurm_watchdog.slurm.parse import JOB_FIELDS, NODE_FIELDS

FIELD, RECORD = "@F@", "@R@"

SCRIPT = """#!/bin/bash
format="{format}"
first="${{format%%,*}}"; last="${{format##*,}}"
exec sed -e "s/{field}/${{first##*:0}}/g" -e "s/{record}/${{last##*:0}}/g" {listing}
"""


def install(directory: Path, shape: Shape) -> Path:
    """Writes both commands and what they print; returns the folder for `slurm.bin_directory`."""
    nodes = [node_row(shape.name(n), shape.name(n)) for n in range(shape.nodes)]
    return write(directory, [_job(shape, n) for n in range(shape.jobs)], nodes)


def write(directory: Path, jobs: list[dict[str, str]], nodes: list[dict[str, str]]) -> Path:
    """As `install`, of these rows (`job_row`, `node_row`)."""
    commands = directory / "slurm"
    commands.mkdir()
    (commands / "jobs").write_text(_listing(JOB_FIELDS, jobs))
    (commands / "nodes").write_text(_listing(NODE_FIELDS, nodes))
    for name, listing, format in (("squeue", "jobs", "$SQUEUE_FORMAT2"), ("sinfo", "nodes", "${@: -1}")):
        script = commands / name
        script.write_text(SCRIPT.format(format=format, field=FIELD, record=RECORD, listing=commands / listing))
        script.chmod(0o755)
    return commands


def node_row(name: str, address: str) -> dict[str, str]:
    """A node that jobs have, as sinfo lists it."""
    return {
        "nodelist": name, "nodeaddr": address, "statecomplete": "allocated", "reason": "none", "partitionname": "gpu",
        "timestamp": "Unknown", "user": "Unknown",
    }  # fmt: skip


def _listing(fields: tuple[str, ...], rows: list[dict[str, str]]) -> str:
    header = {name: "NODELIST" if name == "nodelist" else name.upper() for name in fields}
    return "".join(FIELD.join(row[name] for name in fields) + RECORD + "\n" for row in (header, *rows))


def _job(shape: Shape, number: int) -> dict[str, str]:
    first, job_id = number * shape.nodes_a_job, str(100_001 + number)
    row = job_row(
        job_id, [shape.name(first)], uid=1000, user="trainer", stdout=f"/shared/runs/{job_id}/slurm-{job_id}.out",
        workdir=f"/shared/runs/{job_id}",
    )  # fmt: skip
    nodes = f"n[{first:05d}-{first + shape.nodes_a_job - 1:05d}]"
    return {**row, "nodelist": nodes, "numnodes": str(shape.nodes_a_job), "name": f"pretrain-{number}"}


def job_row(job_id: str, nodes: list[str], *, uid: int, user: str, stdout: str, workdir: str) -> dict[str, str]:
    """A job that runs on these nodes, as squeue lists it."""
    return {
        "jobid": job_id,
        "jobarrayid": job_id,
        "state": "RUNNING",
        "restartcnt": "0",
        "batchflag": "1",
        "requeue": "1",
        "prioritylong": "4000",
        "starttime": str(int(time.time()) - 7200),
        "userid": str(uid),
        "username": user,
        "batchhost": nodes[0],
        "nodelist": ",".join(nodes),
        "partition": "gpu",
        "reason": "None",
        "account": "research",
        "workdir": workdir,
        "stdout": stdout,
        "stderr": stdout,
        "comment": "(null)",
        "name": f"job-{job_id}",
        "arrayjobid": job_id,
        "arraytaskid": "N/A",
        "hetjobid": "N/A",
        "hetjoboffset": "N/A",
        "numnodes": str(len(nodes)),
        "timelimit": "3-00:00:00",
        "qos": "normal",
        "submittime": str(int(time.time()) - 7300),
        "eligibletime": str(int(time.time()) - 7300),
        "reqnodes": "",
        "reservation": "(null)",
        "dependency": "(null)",
        "command": f"{workdir}/train.sbatch",
    }
