"""Makes `accounting.txt` and `accounting.json`: jobs that end in every way, in a real slurmdbd, as sacct prints them.

    .venv/bin/python -m tests.captures.slurm.record_accounting DIRECTORY      as root, with the packages of tests/rig/accounting.py

accounting.json: which job is which.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from slurm_watchdog.slurm.accounting import FIELDS, OPTIONAL, options_of, without
from tests.captures.slurm.record import HOSTILE, SLEEP
from tests.rig.accounting import query
from tests.rig.cluster import Cluster

PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
"""Of the cluster whose story is told."""
MONTHS_S = 100 * 86_400
HET = "#!/bin/bash\n#SBATCH -N1 -n1\n#SBATCH hetjob\n#SBATCH -N1 -n1\nsleep 1\n"


def tell_story(cluster: Cluster) -> dict[str, str]:
    """Jobs that end, and some that do not; returns what each is for -> its id."""
    run, submit = cluster.slurm, cluster.sbatch
    run("scontrol", "create", "PartitionName=urgent", "Nodes=ALL", "PriorityTier=10", "State=UP")
    run("scontrol", "update", "PartitionName=main", "PreemptMode=REQUEUE")
    run("scontrol", "create", "PartitionName=cheap", "Nodes=ALL", "PreemptMode=CANCEL", "State=UP")

    def requeued(job: str) -> None:
        cluster.wait_for_job_state(job, "RUNNING")
        time.sleep(1.1)  # sacct has whole seconds
        run("scontrol", "requeue", job)
        cluster.wait_for_job_state(job, "RUNNING", timeout_s=60)

    jobs = {
        "completes": submit("#!/bin/bash\nsleep 1\n", "-J", "completes"),
        "fails": submit("#!/bin/bash\nexit 3\n", "-J", "fails"),
        "killed": submit("#!/bin/bash\nkill -SEGV $$\n", "-J", "killed"),
        "array": submit("#!/bin/bash\nexit $((SLURM_ARRAY_TASK_ID == 1))\n", "--array=0-2", "-J", "array"),
        "held": submit(SLEEP, "--hold", "-J", "held"),
        "never": submit(SLEEP, "--hold", "-J", "never"),
        "het": submit(HET, "-J", "het"),
        "odd name": submit("#!/bin/bash\n", "-J", HOSTILE["pipes"]),
        "two lines": submit("#!/bin/bash\n", "-J", HOSTILE["lines"]),
    }
    run("scancel", jobs["never"])
    for what in ("completes", "fails", "killed", "odd name", "two lines", "het"):
        cluster.wait_for_job_state(jobs[what], ("COMPLETED", "FAILED"))
    # One job a node; what is requeued stays where it is.
    jobs["cancelled"] = submit(SLEEP, "-J", "cancelled", "-wn1", "-n4")
    cluster.wait_for_job_state(jobs["cancelled"], "RUNNING")
    jobs["requeued"] = submit(SLEEP, "-J", "requeued", "-wn2", "-n4")
    jobs["requeued element"] = submit(SLEEP, "--array=5", "-J", "element", "-wn3", "-n4") + "_5"
    run("scancel", jobs["cancelled"])
    requeued(jobs["requeued"])
    requeued(jobs["requeued element"])
    requeued(jobs["requeued"])
    run("scancel", jobs["requeued"], jobs["requeued element"])
    jobs["preempted"] = submit(SLEEP, "-J", "preempted", "-wn1", "-n4")
    jobs["preempted for good"] = submit(SLEEP, "-J", "preempted-for-good", "-pcheap", "-wn2", "-n4")
    for what in ("preempted", "preempted for good"):
        cluster.wait_for_job_state(jobs[what], "RUNNING")
    time.sleep(1.1)
    urgent = [submit("#!/bin/bash\nsleep 2\n", "-purgent", f"-w{node}", "-n4") for node in ("n1", "n2")]
    for each in urgent:
        cluster.wait_for_job_state(each, "COMPLETED", timeout_s=60)
    cluster.wait_for_job_state(jobs["preempted"], "RUNNING", timeout_s=60)
    jobs["node fails"] = submit(SLEEP, "-J", "node-fails", "--no-requeue", "-wn2", "-n2")
    jobs["node fails, requeued"] = submit(SLEEP, "-J", "node-fails-requeued", "-wn2", "-n2")
    for what in ("node fails", "node fails, requeued"):
        cluster.wait_for_job_state(jobs[what], "RUNNING", timeout_s=60)
    cluster.kill_node("n2")
    cluster.wait_for_job_state(jobs["node fails"], "NODE_FAIL", timeout_s=90)
    cluster.start_node("n2")
    cluster.wait_for_job_state(jobs["node fails, requeued"], "RUNNING", timeout_s=90)
    jobs["runs"] = submit(SLEEP, "-J", "runs", "-wn3")
    cluster.wait_for_job_state(jobs["runs"], "RUNNING")
    while (
        "PENDING" in run("sacct", "-X", "-n", "-o", "state", "-j", jobs["runs"]).stdout
    ):  # slurmctld tells slurmdbd later
        time.sleep(0.5)
    table = f"demo{cluster.layout.index}_job_table"
    ago = ", ".join(f"time_{name} = time_{name} - {MONTHS_S}" for name in ("submit", "eligible", "start", "end"))
    query(cluster.directory, f"update {table} set {ago} where id_job = {jobs['fails']};")
    return jobs


def record(directory: Path) -> None:
    """Runs the cluster and writes what sacct prints of each job."""
    with Cluster(nodes=3, accounting=True, options=PREEMPTION, prefix="slurm-captures", say=print) as cluster:
        jobs = tell_story(cluster)
        time.sleep(2)  # slurmctld sends in bundles
        environment = cluster.env | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        asked = [f"{jobs['array']}_1" if what == "array" else job for what, job in jobs.items()]
        options = options_of(without(FIELDS, *OPTIONAL))
        texts = [
            cluster.slurm("sacct", *options, "--jobs", job, env=environment).stdout for job in [*asked, jobs["array"]]
        ]
    (directory / "accounting.txt").write_text("".join(texts))
    (directory / "accounting.json").write_text(json.dumps(jobs, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
