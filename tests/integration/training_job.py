"""The training job of live tests: submitting it, breaking it, and waiting for its steps and for what is done about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog, train_script

SAVE_INTERVAL = 10
"""Steps from one checkpoint to the next."""


def submit(cluster: Cluster, *options: str, nodes: int = 2, sbatch: tuple[str, ...] = ()) -> str:
    faults = cluster.shared / "faults"
    faults.mkdir(exist_ok=True)
    faults.chmod(0o777)  # the job renames what it has done
    output = Path(cluster.directory) / "log" / "job-%j.out"
    script = train_script(
        cluster,
        f"--steps 100000 --step-seconds 0.3 --save-interval {SAVE_INTERVAL} --fault-dir {faults}",
        *options,
    )
    return cluster.sbatch(script, f"-N{nodes}", f"--output={output}", *sbatch)


def submit_supervised(
    cluster: Cluster, *more: str, nodes: int, spares: int, launch: str = "", run_options: str = ""
) -> str:
    """The same with a supervisor in its batch script, on `nodes` of which `spares` wait; `launch` in place of srun."""
    faults = cluster.shared / "faults"
    faults.mkdir(exist_ok=True)
    faults.chmod(0o777)
    options = f"--steps 100000 --step-seconds 0.3 --save-interval {SAVE_INTERVAL} --fault-dir {faults}"
    run = "import sys; from slurm_watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
    ahead = f'{cluster.place.python} -c "{run}" run --spares {spares} {run_options} --'
    exports = "".join(
        f"export {name}='{value}'\n" for name, value in cluster.place.environment.items() if name != "PATH"
    )
    script = train_script(cluster, options, *more, ahead=ahead, launch=launch)
    first, _, rest = script.partition("mkdir -p")
    output = Path(cluster.directory) / "log" / "job-%j.out"
    return cluster.sbatch(f"{first}{exports}mkdir -p{rest}", "--no-kill", f"-N{nodes}", f"--output={output}")


def inject(cluster: Cluster, fault: str, content: str = "") -> None:
    (cluster.shared / "faults" / fault).write_text(content)


def training(watchdog: Watchdog, job: str, at_least: int = 5) -> None:
    watchdog.wait_for(lambda: watchdog.step(job) >= at_least, 60, f"job {job} to reach step {at_least}")


def ended_action(watchdog: Watchdog, incident_id: str, timeout_s: float = 90) -> dict[str, Any]:
    def ended() -> Any:
        return next((a for a in watchdog.explain(incident_id)["actions"] if a["end"]), None)

    found: dict[str, Any] = watchdog.wait_for(ended, timeout_s, "the action to end")
    return found
