"""Records data_loader.json: what a controller answers about a hang in a data loader, found and mended at the
shipped thresholds.

    sudo .venv/bin/python -m tests.captures.explain.record          # five minutes; a real Slurm of this machine, stand-in GPUs

README.md shows what `slurm-watchdog explain` prints of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.integration.training_job import ended_action, inject, submit, training
from tests.rig.cards import SimulatedCards
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

FILE = Path(__file__).with_name("data_loader.json")


def main() -> int:
    """Writes the file."""
    with (
        Cluster(nodes=4) as cluster,
        SimulatedCards(cluster) as cards,
        Watchdog(cluster, mode="act", shipped=True, agent_env=cards.environment) as watchdog,
    ):
        job = submit(cluster, nodes=2)
        training(watchdog, job, at_least=100)

        def hang() -> Any:
            return watchdog.firing(job, "collective_hang")

        inject(cluster, "dataloader_hang.rank3")
        incident = watchdog.wait_for(hang, 180, "the hang to be found")["id"]
        ended_action(watchdog, incident, 300)
        watchdog.wait_for(
            lambda: watchdog.explain(incident)["incident"]["state"] == "resolved",
            60,
            "the incident to resolve",
        )
        FILE.write_text(json.dumps(watchdog.explain(incident), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
