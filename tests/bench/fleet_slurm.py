"""Slurm as far as the controller asks it, for a fleet that does not exist: squeue and sinfo as scripts that print a prepared listing.

The controller's own client starts them, hands over its marks and parses what they print, as it does with the real ones.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.bench.fleet_reports import Shape
from watchdog.slurm.parse import JOB_FIELDS, NODE_FIELDS

FIELD, RECORD = "@F@", "@R@"

SCRIPT = """#!/bin/bash
format="{format}"
first="${{format%%,*}}"; last="${{format##*,}}"
exec sed -e "s/{field}/${{first##*:0}}/g" -e "s/{record}/${{last##*:0}}/g" {listing}
"""


def install(directory: Path, shape: Shape) -> Path:
    """Writes both commands and what they print; returns the folder for `slurm.bin_directory`."""
    commands = directory / "slurm"
    commands.mkdir()
    (commands / "jobs").write_text(_listing(JOB_FIELDS, [_job(shape, n) for n in range(shape.jobs)]))
    (commands / "nodes").write_text(
        _listing(
            NODE_FIELDS,
            [{"nodelist": shape.name(n), "nodeaddr": shape.name(n), "statecomplete": "allocated", "reason": "none",
              "partitionname": "gpu", "timestamp": "Unknown", "user": "Unknown"}
             for n in range(shape.nodes)],
        )
    )  # fmt: skip
    for name, listing, format in (("squeue", "jobs", "$SQUEUE_FORMAT2"), ("sinfo", "nodes", "${@: -1}")):
        script = commands / name
        script.write_text(
            SCRIPT.format(format=format, field=FIELD, record=RECORD, listing=commands / listing)
        )
        script.chmod(0o755)
    return commands


def _listing(fields: tuple[str, ...], rows: list[dict[str, str]]) -> str:
    header = {name: "NODELIST" if name == "nodelist" else name.upper() for name in fields}
    return "".join(FIELD.join(row[name] for name in fields) + RECORD + "\n" for row in (header, *rows))


def _job(shape: Shape, number: int) -> dict[str, str]:
    first, job_id = number * shape.nodes_a_job, str(100_001 + number)
    return {
        "jobid": job_id, "jobarrayid": job_id, "state": "RUNNING", "restartcnt": "0", "batchflag": "1", "requeue": "1",
        "prioritylong": "4000", "starttime": str(int(time.time()) - 7200), "userid": "1000", "username": "trainer",
        "batchhost": shape.name(first), "nodelist": f"n[{first:05d}-{first + shape.nodes_a_job - 1:05d}]",
        "partition": "gpu", "reason": "None", "account": "research", "workdir": f"/shared/runs/{job_id}",
        "stdout": f"/shared/runs/{job_id}/slurm-{job_id}.out", "stderr": f"/shared/runs/{job_id}/slurm-{job_id}.out",
        "comment": "(null)", "name": f"pretrain-{number}", "arrayjobid": job_id, "arraytaskid": "N/A", "hetjobid": "N/A",
        "hetjoboffset": "N/A", "numnodes": str(shape.nodes_a_job), "timelimit": "3-00:00:00", "qos": "normal",
        "submittime": str(int(time.time()) - 7300), "eligibletime": str(int(time.time()) - 7300), "reqnodes": "",
        "reservation": "(null)", "dependency": "(null)", "command": f"/shared/runs/{job_id}/train.sbatch",
    }  # fmt: skip
