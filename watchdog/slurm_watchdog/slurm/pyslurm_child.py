"""A program that lists jobs and nodes by pyslurm: `PYTHON -I pyslurm_child.py`.

It is a process of its own because libslurm ends the whole one on `import pyslurm` if it finds no slurm.conf, and
because a request to a slurmctld that hangs cannot be cancelled, only killed. The interpreter is the one that has
pyslurm, often the system's: standard library only, Python 3.9 or later, nothing of ours. It prints one document:
{"jobs": rows, "nodes": rows} or {"failed": why}.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from typing import Any

JOB = {
    "jobid": "id", "state": "state", "restartcnt": "requeue_count", "batchflag": "is_batch_job",
    "requeue": "is_requeueable", "prioritylong": "priority", "starttime": "start_time", "userid": "user_id",
    "batchhost": "batch_host", "nodelist": "allocated_nodes", "partition": "partition", "arrayjobid": "array_id",
    "arraytaskid": "array_task_id", "waiting": "array_tasks_waiting", "hetjobid": "heterogeneous_id",
    "hetjoboffset": "heterogeneous_offset", "numnodes": "num_nodes", "timelimit": "time_limit",
    "submittime": "submit_time", "eligibletime": "eligible_time", "qos": "qos", "reservation": "reservation",
    "reqnodes": "required_nodes", "excluded": "excluded_nodes", "dependency": "dependencies", "reason": "state_reason",
    "account": "account", "workdir": "working_directory", "stdout": "standard_output",
    "stderr": "standard_error", "comment": "comment", "name": "name",
}  # fmt: skip
"""squeue's word for a field (or ours, of two that squeue -O lacks) -> pyslurm's attribute. The same names in pyslurm
22.5 to 25.11; without one of them a job cannot be described."""
NODE = {
    "nodelist": "name", "nodeaddr": "address", "statecomplete": "state", "partitionname": "partitions",
    "timestamp": "reason_time", "user": "reason_user", "reason": "reason",
}  # fmt: skip
"""The same of a node, by sinfo's words."""
ELEMENTS_CHARACTERS = "4096"
"""So many of the list of an array's waiting elements, the most that libslurm takes. By itself it cuts after 64, and
then they cannot be named to be held."""


def main() -> None:
    """Lists them."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is not an answer
    os.environ["SLURM_BITSTR_LEN"] = ELEMENTS_CHARACTERS
    try:
        import pyslurm
    except ImportError as error:
        sys.exit(f"pyslurm cannot be imported: {error}")
    answer: dict[str, Any]
    try:
        jobs = job_rows(pyslurm.Jobs.load().values())
        answer = {"jobs": jobs, "nodes": [row_of(node, NODE) for node in pyslurm.Nodes.load().values()]}
    except Exception as error:  # noqa: BLE001 - whatever pyslurm does, it is said
        answer = {"failed": f"{type(error).__name__}: {error}"}
    sink.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"))  # a user's name may be no UTF-8
    sink.close()


def job_rows(jobs: Any) -> list[dict[str, Any]]:
    """Each with its user's name, which is looked up once a listing and user."""
    users: dict[Any, str] = {}
    rows = [row_of(job, JOB) for job in jobs]
    for row in rows:
        uid = row["userid"] if isinstance(row["userid"], int) else -1
        if uid not in users:
            users[uid] = user_name(uid)
        row["username"] = users[uid]
    return rows


def row_of(thing: Any, attributes: dict[str, str]) -> dict[str, Any]:
    return {field: value_of(thing, attribute) for field, attribute in attributes.items()}


def value_of(thing: Any, name: str) -> Any:
    """The attribute; where pyslurm cannot read it of this job alone, the error in a form that is no value. What a
    user writes may be no UTF-8, and one user's job must not hide all others."""
    try:
        return getattr(thing, name)
    except AttributeError:
        raise  # it exists in no job: another release of pyslurm
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "replace")
    except Exception as error:  # noqa: BLE001 - one job's odd value must not hide all others
        return {"unreadable": type(error).__name__}


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError, TypeError):
        return str(uid)


if __name__ == "__main__":
    main()
