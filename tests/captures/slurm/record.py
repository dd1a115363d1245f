"""Makes the captures in this directory: runs a cluster, gives it jobs and nodes in many states, keeps what
Slurm prints.

    .venv/bin/python -m tests.captures.slurm.record questions >questions.json      what the client asks for
    python3 -m tests.captures.slurm.record answers DIRECTORY <questions.json       as root, where that Slurm is

With PYSLURM_PYTHON, an interpreter that has pyslurm of that release, what the child of the pyslurm client
says is kept, too.
The second needs no package but Slurm's, so that it also runs in the root directory of another distribution; see README.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.rig.cluster import Cluster

SLEEP = "#!/bin/bash\nexec sleep 900\n"
STUBBORN = "#!/bin/bash\ntrap '' TERM\nwhile true; do sleep 1; done\n"
USER = "games"
MARK_IN_A_NAME = "xF1f 7 xR2r\n8 xF1f RUNNING"
HOSTILE = {
    "pipes": "two  words | JobState=COMPLETED",
    "lines": "line\nbreak JobId=999 JobState=FAILED",
    "shell": "%j,:;$(touch pwned)`x`\t'\"\\",
    "option": "--all",
    "unicode": "—unicode 你好",
}


def questions() -> dict[str, list[str]]:
    """Name of a listing -> its command, with fixed marks."""
    from slurm_watchdog.slurm import parse
    from slurm_watchdog.slurm.listings import LISTING, NODE_LISTING

    marks, guessed = parse.Marks("q7f", "q8r"), parse.Marks("xF1f", "xR2r")
    jobs = ["squeue", *LISTING]
    unknown = (*parse.JOB_FIELDS[:3], "nosuch", *parse.JOB_FIELDS[3:])
    return {
        "jobs": [*jobs, "-O", parse.long_format(parse.JOB_FIELDS, marks)],
        "jobs_guessed_mark": [*jobs, "-O", parse.long_format(parse.JOB_FIELDS, guessed)],
        "jobs_none": [*jobs, "--name=nobody-has-this-name", "-O", parse.long_format(parse.JOB_FIELDS, marks)],
        "jobs_unknown_field": [*jobs, "-O", parse.long_format(unknown, marks)],
        "excluded": [*jobs, "-o", parse.short_format(parse.EXCLUDED_FIELDS, marks)],
        "nodes": ["sinfo", *NODE_LISTING, "-O", parse.long_format(parse.NODE_FIELDS, marks)],
    }


def tell_story(cluster: Cluster) -> dict[str, str]:
    """Jobs and nodes in many states; returns what each job is for -> its id."""
    run, submit = cluster.slurm, cluster.sbatch
    pending = "--begin=now+1day"
    jobs = {
        "plain": submit(
            SLEEP, "--exclude=n2", "--comment=cmt plain", "-o/tmp/%j-%x.out", "-J", "plain", "-t60", "-wn1"
        ),
        "array": submit(SLEEP, "--array=0-9%2", "--output=%A_%a.out", "-J", "array", "-wn1", user=USER),
        "het": submit("#!/bin/bash\n#SBATCH -wn1\n#SBATCH hetjob\n#SBATCH -wn2\nexec sleep 900\n", "-J", "het"),
        "stubborn": submit(STUBBORN, "-J", "stubborn", "-o/dev/null", "-wn3"),
        "fails": submit("#!/bin/bash\nexit 3\n", "-J", "fails", "-o/dev/null"),
        "completes": submit("#!/bin/bash\ntrue\n", "-J", "completes", "-o/dev/null"),
        "cancelled": submit(SLEEP, pending, "-J", "cancelled"),
        "times out": submit(SLEEP, "-t1", "-J", "times-out", "-o/dev/null", "-wn2"),
        "on n5": submit(SLEEP, "--no-requeue", "--nodelist=n5", "-J", "on-n5", "-o/dev/null"),
        "suspended": submit(SLEEP, "-J", "suspended", "-o/dev/null", "-e/tmp/%j.err", "-wn2"),
        "stopped": submit(SLEEP, "-J", "stopped", "-o/dev/null", "-wn2"),
        "special": submit(SLEEP, "-J", "special", "-o/dev/null"),
        "requeued": submit(SLEEP, "-J", "requeued", "-o/dev/null", user=USER),
        "fixed": submit(SLEEP, pending, "--no-requeue", "-J", "fixed"),
        "held": submit(SLEEP, "--hold", "-J", "held", "--nodelist=n[1-3]", "-N3", "-t1-02:03:04"),
        "begins": submit(SLEEP, pending, "-J", "begins", "-N2-4"),
        "too large": submit(SLEEP, "-N5", "-J", "too-large"),
        "gaps": submit(SLEEP, pending, f"--array={','.join(str(n * n) for n in range(30))}%2", "-J", "gaps"),
        "guess": submit(SLEEP, pending, f"--job-name={MARK_IN_A_NAME}"),
    }
    jobs["depends"] = submit(SLEEP, f"--dependency=afterok:{jobs['plain']}", "-J", "depends")
    for what, name in HOSTILE.items():
        jobs[what] = submit(SLEEP, pending, f"--job-name={name}", f"--comment=cmt {name}")
    for what in ("stubborn", "suspended", "stopped", "special", "requeued", "plain", "times out", "on n5"):
        cluster.wait_for_job_state(jobs[what], "RUNNING")
    run("scontrol", "update", f"JobId={jobs['gaps']}_4,{jobs['gaps']}_9", "Comment=split off")
    run("scancel", jobs["cancelled"])
    run("scontrol", "suspend", jobs["suspended"])
    run("scancel", "--signal=STOP", jobs["stopped"])
    run("scontrol", "requeuehold", "State=SpecialExit", jobs["special"])
    run("scontrol", "requeuehold", jobs["requeued"])
    run("scontrol", "create", "PartitionName=debug", "Nodes=n1,n2", "State=UP")
    run("scontrol", "update", "NodeName=n3", "State=DRAIN", 'Reason=bad | "disk"  JobState=x')
    run("scontrol", "update", "NodeName=n5", "State=DOWN", "Reason=broken")
    cluster.kill_node("n4")  # nothing runs there
    for what, state in (("fails", "FAILED"), ("completes", "COMPLETED"), ("cancelled", "CANCELLED"),
                        ("on n5", "NODE_FAIL"), ("times out", "TIMEOUT"), ("requeued", "PENDING")):  # fmt: skip
        cluster.wait_for_job_state(jobs[what], state, timeout_s=150)
    cluster.wait_for_node_state("n4", "DOWN*", timeout_s=150)
    run("scancel", jobs["stubborn"])
    cluster.wait_for_job_state(jobs["stubborn"], "COMPLETING")
    return jobs


def refusals(cluster: Cluster, jobs: dict[str, str]) -> dict[str, dict[str, object]]:
    """What is answered to requests that Slurm refuses, or takes without a word. What it is about -> the answer."""
    update = ("scontrol", "update")
    requests: dict[str, tuple[str | None, list[str]]] = {
        "requeuehold, finished": (None, ["scontrol", "requeuehold", "Incomplete", jobs["completes"]]),
        "requeuehold, unknown": (None, ["scontrol", "requeuehold", "Incomplete", "99999"]),
        "requeuehold, pending": (None, ["scontrol", "requeuehold", jobs["begins"]]),
        "requeuehold, another's": (USER, ["scontrol", "requeuehold", jobs["plain"]]),
        "requeue, unknown": (None, ["scontrol", "requeue", "99999"]),
        "release, unknown": (None, ["scontrol", "release", "99999"]),
        "release, another's": (USER, ["scontrol", "release", jobs["held"]]),
        "hold, unknown": (None, ["scontrol", "hold", "99999"]),
        "exclude, running": (None, [*update, f"JobId={jobs['plain']}", "ExcNodeList=n3"]),
        "exclude, finished": (None, [*update, f"JobId={jobs['completes']}", "ExcNodeList=n3"]),
        "exclude, no such node": (None, [*update, f"JobId={jobs['begins']}", "ExcNodeList=nowhere"]),
        "exclude, another's": (USER, [*update, f"JobId={jobs['begins']}", "ExcNodeList=n3"]),
        "cancel, unknown": (None, ["scancel", "99999"]),
        "cancel, another's": (USER, ["scancel", jobs["plain"]]),
        "signal, another's": (USER, ["scancel", "--verbose", "--signal=USR1", "--full", jobs["plain"]]),
        "signal, finished": (None, ["scancel", "--verbose", "--signal=USR1", "--full", jobs["completes"]]),
        "script, unknown": (None, ["scontrol", "write", "batch_script", "99999", "-"]),
        "script, another's": (USER, ["scontrol", "write", "batch_script", jobs["plain"], "-"]),
        "script": (None, ["scontrol", "write", "batch_script", jobs["plain"], "-"]),
        "submit, no such partition": (None, ["sbatch", "--parsable", "--partition=no", "--wrap=true"]),
        "submit, no such node": (None, ["sbatch", "--parsable", "--nodelist=nowhere", "--wrap=true"]),
        "submit, no such option": (None, ["sbatch", "--parsable", "--nonsense", "--wrap=true"]),
        "submit, too many nodes": (None, ["sbatch", "--parsable", "-N99", "--hold", "--wrap=true"]),
        "read, unknown": (None, ["squeue", "--states=all", "--jobs", "99999"]),
        "drain, not allowed": (USER, [*update, "NodeName=n1", "State=DRAIN", "Reason=x"]),
        "drain, unknown": (None, [*update, "NodeName=nowhere", "State=DRAIN", "Reason=x"]),
        "resume, idle": (None, [*update, "NodeName=n1", "State=UNDRAIN"]),
    }  # fmt: skip
    answers: dict[str, dict[str, object]] = {}
    for what, (user, argv) in requests.items():
        answers[what] = answer(cluster, user, argv)
    cluster.stop_controller()
    answers["controller away"] = answer(cluster, None, ["squeue", "--states=all"])
    answers["controller away, requeue"] = answer(cluster, None, ["scontrol", "requeue", jobs["plain"]])
    return answers


def answer(cluster: Cluster, user: str | None, argv: list[str]) -> dict[str, object]:
    begin = time.monotonic()
    done = cluster.slurm(*argv, user=user, check=False, env=cluster.env | {"LC_ALL": "C"})
    print(f"{time.monotonic() - begin:.1f} s {argv}", file=sys.stderr)
    return {"argv": argv, "code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def ask_pyslurm(python: str, environment: dict[str, str]) -> Any:
    """The rows that the program of the pyslurm client gives."""
    child = Path(__file__).parents[3] / "watchdog/slurm_watchdog/slurm/pyslurm_child.py"
    done = subprocess.run([python, "-I", child], capture_output=True, env=environment, check=True)
    return json.loads(done.stdout)


def record(directory: Path, listings: dict[str, list[str]]) -> None:
    """Runs the cluster and writes all answers to `directory`."""
    directory.mkdir(exist_ok=True, parents=True)
    with Cluster(nodes=5, prefix="slurm-captures", options={"KillWait": "120"}, say=print) as cluster:
        jobs = tell_story(cluster)
        environment = cluster.env | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        for name, argv in listings.items():
            done = cluster.slurm(*argv, env=environment)
            (directory / f"{name}.txt").write_text(done.stdout)
        if python := os.environ.get("PYSLURM_PYTHON"):
            rows = ask_pyslurm(python, environment)
            (directory / "pyslurm.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        told = {"version": cluster.slurm("squeue", "--version").stdout.strip(), "jobs": jobs}
        told["answers"] = refusals(cluster, jobs)
        (directory / "story.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "questions":
        print(json.dumps(questions()))
    else:
        record(Path(sys.argv[2]), json.load(sys.stdin))
