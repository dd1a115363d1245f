"""A process that reads from Slurm by pyslurm: `PYTHON -I pyslurm_child.py`, asked and answering by frames.

It is a process of its own because libslurm ends the whole one on `import pyslurm` if it finds no slurm.conf,
and because a request to a slurmctld that hangs cannot be cancelled, only killed. The interpreter is the
one that has pyslurm, often the system's: standard library only, Python 3.9 or later, nothing of ours. A frame
is the length in bytes, a line feed, and JSON. On starting it sends {"pyslurm": version} or {"failed": why}.
Then each request {"call": …} gets {"rows": …}, {"refused": Slurm's words} or {"failed": why}. It ends when
its standard input does.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from typing import Any

JOB_ATTRIBUTES = (
    "id", "array_id", "array_task_id", "array_tasks_waiting", "heterogeneous_id",
    "heterogeneous_offset", "state", "requeue_count", "is_batch_job", "is_requeueable", "priority", "start_time",
    "submit_time", "eligible_time", "user_id", "partition", "allocated_nodes", "batch_host", "required_nodes",
    "excluded_nodes", "num_nodes", "time_limit",
)  # fmt: skip
"""Without one of these a job cannot be described. The same names in pyslurm 22.5 to 25.11."""
JOB_TEXTS = (
    "name", "state_reason", "account", "qos", "reservation", "dependencies", "command", "working_directory",
    "standard_output", "standard_error", "comment",
)  # fmt: skip
"""What users write: pyslurm raises where a byte of it is no UTF-8, and one user's job must not hide all others."""
NODE_ATTRIBUTES = ("name", "address", "state", "reason_time", "reason_user", "partitions")
NODE_TEXTS = ("reason",)
ELEMENTS_CHARACTERS = "4096"
"""So many of the list of an array's waiting elements, the most that libslurm takes. By itself it cuts after 64, and
then they cannot be named to be held."""


def main() -> int:
    """Answers requests until there are no more."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is not an answer
    os.environ["SLURM_BITSTR_LEN"] = ELEMENTS_CHARACTERS
    try:
        import pyslurm
    except ImportError as error:
        send(sink, {"failed": f"pyslurm can't be imported: {error}"})
        return 1
    send(sink, {"pyslurm": str(getattr(pyslurm, "__version__", "unknown"))})
    while True:
        size = source.readline()
        if not size:
            return 0
        request = json.loads(source.read(int(size)))
        try:
            answer = {"rows": answer_to(pyslurm, request)}
        except pyslurm.RPCError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever pyslurm does, the next request is answered
            answer = {"failed": f"{type(error).__name__}: {error}"}
        send(sink, answer)


def send(sink: Any, value: Any) -> None:
    """One frame; what is no text any more goes as a replacement character."""
    data = json.dumps(value).encode("utf-8", "replace")
    sink.write(b"%d\n" % len(data) + data)
    sink.flush()


def answer_to(pyslurm: Any, request: dict[str, Any]) -> Any:
    """The rows that are asked for."""
    users: dict[int, str] = {}
    call = request["call"]
    if call == "view":
        return {"jobs": job_rows(pyslurm.Jobs.load(), users), "nodes": node_rows(pyslurm.Nodes.load())}
    if call == "jobs":
        return job_rows(pyslurm.Jobs.load(), users)
    if call == "job":
        return [job_row(pyslurm.Job.load(request["id"]), users)]
    if call == "nodes":
        return node_rows(pyslurm.Nodes.load())
    raise ValueError(f"no such call: {call}")


def job_rows(jobs: Any, users: dict[int, str]) -> list[dict[str, Any]]:
    return [job_row(job, users) for job in jobs.values()]


def job_row(job: Any, users: dict[int, str]) -> dict[str, Any]:
    """Attribute -> value, and the user's name, which is looked up once a listing and user."""
    row = {name: value_of(job, name) for name in JOB_ATTRIBUTES}
    row.update((name, text_of(job, name)) for name in JOB_TEXTS)
    uid = row["user_id"] if isinstance(row["user_id"], int) else -1
    if uid not in users:
        users[uid] = user_name(uid)
    row["user_name"] = users[uid]
    return row


def node_rows(nodes: Any) -> list[dict[str, Any]]:
    rows = []
    for node in nodes.values():
        row = {name: value_of(node, name) for name in NODE_ATTRIBUTES}
        row.update((name, text_of(node, name)) for name in NODE_TEXTS)
        rows.append(row)
    return rows


def value_of(thing: Any, name: str) -> Any:
    """The attribute; where pyslurm cannot read it for this job alone, the error in a form that is no value."""
    try:
        return getattr(thing, name)
    except AttributeError:
        raise  # it exists in no job: another release of pyslurm
    except Exception as error:  # noqa: BLE001 - one job's odd value must not hide all others
        return {"unreadable": type(error).__name__}


def text_of(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name)
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "replace")


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError, TypeError):
        return str(uid)


if __name__ == "__main__":
    sys.exit(main())
