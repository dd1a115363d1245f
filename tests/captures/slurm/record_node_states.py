"""Nodes that are planned, rebooted, switched off or in maintenance, as sinfo of a real Slurm lists them.

    .venv/bin/python -m tests.captures.slurm.record questions >questions.json
    python3 -m tests.captures.slurm.record_node_states DIRECTORY <questions.json     as root, where that Slurm is

Writes node_states.json: what was done -> the listing, whenever one of its states was new. With names of steps behind
DIRECTORY those alone are recorded again, and `planned`, which is always.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.rig.cluster import Cluster

OPTIONS = {
    "SuspendProgram": "/bin/true", "ResumeProgram": "/bin/true", "RebootProgram": "/bin/true", "SuspendTime": "86400",
    "SuspendTimeout": "4", "ResumeTimeout": "20", "SchedulerParameters": "bf_interval=1,sched_interval=1",
}  # fmt: skip
SLEEP = "#!/bin/bash\nexec sleep 900\n"
EACH_S = 12.0
"""For the states that follow one request to come and go."""
STEPS: tuple[tuple[str, ...], ...] = (
    ("idle",),
    ("maintenance", "scontrol", "create", "reservation", "ReservationName=maint", "Nodes=n1", "StartTime=now",
     "Duration=60", "Users=root", "Flags=MAINT,IGNORE_JOBS"),
    ("reboot of an idle node", "scontrol", "reboot", "ASAP", "n2"),
    ("reboot of a node with a job", "scontrol", "reboot", "n3"),
    ("power down", "scontrol", "update", "NodeName=n4", "State=POWER_DOWN"),
    ("power up", "scontrol", "update", "NodeName=n4", "State=POWER_UP"),
    ("power down of a node with a job", "scontrol", "update", "NodeName=n3", "State=POWER_DOWN_ASAP"),
)  # fmt: skip


def main(directory: str, *steps: str) -> None:
    listing = json.load(sys.stdin)["nodes"]
    found: list[dict[str, str]] = []
    with Cluster(nodes=6, cpus=1, options=OPTIONS) as cluster:

        def watch(step: str) -> None:
            seen, ends_at = set(), time.monotonic() + EACH_S
            while time.monotonic() < ends_at:
                done = subprocess.run(
                    listing,
                    env={**cluster.env, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"},
                    capture_output=True,
                    text=True,
                )
                states = json.dumps([line.split("q7f")[2] for line in done.stdout.split("q8r")[1:-1]])
                if states not in seen:
                    seen.add(states)
                    found.append({"step": step, "text": done.stdout})
                    print(step, states, flush=True)
                time.sleep(0.5)

        for step, *command in (each for each in STEPS if not steps or each[0] in steps):
            if step.endswith("with a job") and command[1] == "reboot":
                job = cluster.sbatch(SLEEP, "-N1", "--nodelist=n3")
                cluster.wait_for_job_state(job, "RUNNING")
            if command:
                done = subprocess.run(command, env=cluster.env, capture_output=True, text=True)
                print("$", *command, done.returncode, done.stderr.strip(), flush=True)
            watch(step)
        cluster.sbatch(SLEEP, "-N1", "--nodelist=n5", "--time=10")  # one without a limit leaves nothing to plan
        cluster.sbatch(SLEEP, "-N2", "--nodelist=n5,n6", "--time=10")
        watch("planned")
    file = Path(directory, "node_states.json")
    kept = [each for each in json.loads(file.read_text()) if each["step"] not in (*steps, "planned")] if steps else []
    file.write_text(json.dumps(kept + found, indent=1) + "\n")


if __name__ == "__main__":
    os.umask(0o022)
    main(*sys.argv[1:])
