"""What befalls nodes and GPUs: an Xid, a GPU off the bus, an agent that is gone, a node without power."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lab.live.run import LOOK_EVERY_S, SLACK_S, Result, tell
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import HEALTHY, Gpu, Scenario

FAULT_S = 10.0
SILENT_S = 45.0
NODE_DOWN_S = 60.0
"""Slurm's own word is needed for it: `SlurmdTimeout` is 15 s here, the controller asks every 10 s."""
SETTLE_S = 20.0
"""For agents to have seen their GPUs, and for the controller to have seen every node."""


def run_nodes() -> list[Result]:
    """All four, one after the other, at the shipped thresholds; GPUs are those of the stand-in NVML, read by
    the real library."""
    with Cluster(nodes=4) as cluster:
        place = Path(cluster.directory) / "stand-in"
        place.mkdir()
        library = standin.build(place)
        scenarios = {node: Scenario(place / node, gpus=_gpus(node)) for node in cluster.nodes}

        def environment(node: str) -> Mapping[str, str]:
            return standin.environment_of(library, scenarios[node].path)

        with Watchdog(cluster, mode="observe", shipped=True, agent_env=environment) as watchdog:
            time.sleep(SETTLE_S)
            results = [
                _verdict(
                    watchdog,
                    "xid",
                    "gpu_fault",
                    ("n1", "GPU-n1-1"),
                    FAULT_S,
                    lambda: scenarios["n1"].event(1, 79),
                ),
                _verdict(
                    watchdog,
                    "gpu_off_the_bus",
                    "gpu_fault",
                    ("n2", "GPU-n2-0"),
                    FAULT_S,
                    lambda: scenarios["n2"].change(0, rules=("lost",)),
                ),
                _verdict(
                    watchdog,
                    "agent_silent",
                    "agent_silent",
                    ("n3", None),
                    SILENT_S,
                    lambda: watchdog.stop_agent("n3", signal.SIGKILL),
                ),
                _verdict(
                    watchdog,
                    "node_down",
                    "node_down",
                    ("n4", None),
                    NODE_DOWN_S,
                    lambda: cluster.kill_node("n4"),
                ),
            ]
            expected = {
                ("gpu_fault", "n1"),
                ("gpu_fault", "n2"),
                ("agent_silent", "n3"),
                ("agent_silent", "n4"),
                ("node_down", "n4"),
            }
            for each in watchdog.incidents():
                if each["state"] == "firing" and not {(each["kind"], c["node"]) for c in each["culprits"]} & expected:
                    results[-1].false_incidents.append(f"{each['kind']}: {each['summary']}")
            return results


def _gpus(node: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            uuid=f"GPU-{node}-{index}",
            bus=f"00000000:{(0x07, 0x0F)[index]:02X}:00.0",
            minor=1 - index,
            **HEALTHY,
        )
        for index in range(2)
    )


def _verdict(
    watchdog: Watchdog,
    name: str,
    kind: str,
    culprit: tuple[str, str | None],
    bound_s: float,
    break_it: Callable[[], Any],
) -> Result:
    """Breaks something and waits until it is reported. There is no job, and so no diagnosis."""
    result = Result(f"node.{name}", bound_s=bound_s, asks_ranks=False)
    at = time.time()
    break_it()
    while time.time() < at + bound_s + SLACK_S:
        for each in watchdog.incidents():
            if each["kind"] == kind and each["state"] == "firing":
                named = [(c["node"], c["gpu_uuid"]) for c in each["culprits"]]
                if culprit in named:
                    result.verdict_s = time.time() - at
                    result.culprit_right = named == [culprit]
                    result.say(f"{kind} after {result.verdict_s:.1f} s: {each['summary']}")
                    return result
        time.sleep(LOOK_EVERY_S)
    tell(f"{name}: NOTHING was said: {[(i['kind'], i['summary']) for i in watchdog.incidents()]}")
    return result
