"""A node whose link is slow, from the first slower step to the node's return: the search names it by a restart of its own,
the job runs at its old speed without it, the node is tested, kept out, mended, tested again and given back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from slurm_watchdog.cli.options import EXIT_UNKNOWN
from tests.bench.figures import Figures
from tests.integration.training_job import submit_supervised
from tests.live.run import tell
from tests.live.stage import ENVIRONMENT, RANKS_PER_NODE, TRAINER, Job, Stage, typical
from tests.rig import throttle
from tests.rig.cluster import Cluster
from tests.rig.node_tests import TestedNodes, bad_nodes
from tests.rig.stack import Watchdog

NODES, IN_USE = 7, "n4,n5,n6,n7"
"""Two for the job, one free in place of one of these, and four in use: later the peers of the node that is tested."""
DELAY_S = 0.002
"""Of each frame to and from the node: a step of half a second becomes 10 to 20 % longer, as busy as the machine is."""
BEFORE, AFTER = 160, 25
"""Steps whose speed is measured, before the node becomes slow and once it is left out."""
SLOWER, SAME = 1.05, 1.04
# Of one running job one may be acted on within the window, whatever the budget: a search may need a second restart.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "policy": {
        "slow_search": "active", "slow_search_restarts": 6, "quarantine": True, "max_drained_nodes": 1, "drained_percent": 50,
        "budget_window": "30s",
    },
    "detectors": {"slow_job": {"lasts": "15s"}},
}  # fmt: skip


def run_slow_node(python: str, figures: Figures) -> None:
    """The whole chain; its figures, with their bounds."""
    with (
        Cluster(nodes=NODES) as cluster,
        throttle.before_others(cluster),
        Watchdog(cluster, mode="act", settings=SETTINGS) as watchdog,
    ):
        stage, tested = Stage(cluster, watchdog, python), TestedNodes(cluster)
        in_use = cluster.sbatch("#!/bin/bash\nsleep 3600\n", "-N4", "--exclusive", f"--nodelist={IN_USE}")
        job = _training(stage)
        stage.training(job, BEFORE)
        fast, bad = _speed(job), str(cluster.job(job.job_id)["BatchHost"])
        with throttle.link_delay(cluster, bad, DELAY_S):
            began = time.monotonic()
            slow, named_s = _searched(stage, job, bad, began)
            again = _without(stage, job, bad)
            figures.add("live.slow_node.slower_ratio", slow / fast, "", at_least=SLOWER)
            figures.add("live.slow_node.named_s", named_s, "s")
            figures.add("live.slow_node.restarts", float(cluster.job(job.job_id)["Restarts"]), "")
            figures.add("live.slow_node.without_it_ratio", again / fast, "", at_most=SAME)
            tell(f"slow_node: {fast:.3f} s a step, {slow:.3f} s with {bad}, {again:.3f} s without it")
            cluster.slurm("scancel", in_use)
            _drained(stage, tested, bad)
        out, returned = _returned(stage, tested, bad)
        figures.add("live.slow_node.tested_bad", float(out), "", at_least=1)
        figures.add("live.slow_node.returned", float(returned), "", at_least=1)
        job.end()


def run_supervised(figures: Figures) -> None:
    """The same search of a job with a supervisor and a spare: Slurm restarts nothing, and no step is lost."""
    with (
        Cluster(nodes=3) as cluster,
        throttle.before_others(cluster),
        Watchdog(cluster, mode="act", settings=SETTINGS) as watchdog,
    ):
        job = submit_supervised(cluster, "--step-seconds", "0.5", "--jitter", "0.005", nodes=3, spares=1)
        watchdog.wait_for(lambda: watchdog.step(job) >= BEFORE, 180, "steps to compare with")
        with throttle.link_delay(cluster, "n2", 0.02):
            began = time.monotonic()
            incident = watchdog.wait_for(
                lambda: watchdog.firing(job, "slow_job"), 180, "the slower steps to be reported"
            )
            _named(watchdog, "n2")
            figures.add("live.slow_node.supervised.named_s", time.monotonic() - began, "s")
            ended = [each for each in watchdog.explain(incident["id"])["actions"] if each["end"]]
            for each in ended:
                tell(f"slow_node, supervised: {each['end']['detail']}")
            lost = sum(each["end"]["steps_lost"] or 0 for each in ended)
            figures.add(
                "live.slow_node.supervised.in_place", float(sum(each["end"]["ok"] for each in ended)), "", at_least=1
            )
            figures.add("live.slow_node.supervised.steps_lost", float(lost), "steps", at_most=0)
            figures.add("live.slow_node.supervised.requeued", float(cluster.job(job)["Restarts"]), "", at_most=0)


def _training(stage: Stage) -> Job:
    """Two ranks a node, wherever Slurm puts them; it listens to its kill switch."""
    room = stage.room("slow_node")
    script = (
        "#!/bin/bash\n#SBATCH --requeue --open-mode=append\n"
        f"export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT={room.port} {ENVIRONMENT}\n"
        f"srun --ntasks-per-node={RANKS_PER_NODE} bash -c '{stage.python} {room.words(TRAINER)} --step-seconds 0.5 --kill-switch'\n"
    )
    return stage.start(room, script, "-N2", f"--ntasks-per-node={RANKS_PER_NODE}")


def _speed(job: Job) -> float:
    """Seconds of a step at the moment: the median of the newest ones."""
    return typical(job.steps()[-AFTER:])


def _searched(stage: Stage, job: Job, bad: str, began: float) -> tuple[float, float]:
    """Until the node is named: (seconds of a step with it, seconds until then)."""
    watchdog = stage.watchdog
    assert watchdog is not None
    incident = stage.until(lambda: watchdog.firing(job.job_id, "slow_job"), 180, "the slower steps to be reported")
    slow = _speed(job)
    tell(f"slow_node: after {time.monotonic() - began:.0f} s: {incident['summary']}")
    _named(watchdog, bad)
    return slow, time.monotonic() - began


def _named(watchdog: Watchdog, bad: str) -> None:
    """Until the ledger has the node that the search has found."""
    watchdog.wait_for(lambda: any(n["node"] == bad for n in watchdog.ask("GET", "/v1/nodes")["nodes"]), 500, "a name")
    tell(watchdog.command("nodes", bad).stdout)


def _without(stage: Stage, job: Job, bad: str) -> float:
    """Seconds of a step once the job runs without the node."""
    stage.until(lambda: bad not in stage.cluster.job(job.job_id)["NodeList"], 120, "the job to run without it")
    made = len(job.steps())
    stage.until(lambda: len(job.steps()) > made + AFTER, 120, "the job to make steps without it")
    return _speed(job)


def _tested(stage: Stage, tested: TestedNodes, *more: str) -> list[str]:
    """As an administrator tests the nodes on which nothing runs: those that are named."""
    assert stage.watchdog is not None
    idle = [node for node in stage.cluster.nodes if "IDLE" in stage.cluster.node(node)["State"]]
    short = ("--only", "disk,network", "--seconds", "0.4", "--at-once", "1", "--local", str(stage.cluster.scratch))
    code, found = tested.run(*idle, *short, "--config", str(stage.watchdog.config_file), *more, user=None)
    tell(f"slow_node: test-nodes {' '.join((*idle, *more))}: code {code}: {found['sentence']}")
    for each in found["nodes"] if code == EXIT_UNKNOWN else ():
        tell(f"  {each['node']}: {each['reasons']}")
    return bad_nodes(found)


def _drained(stage: Stage, tested: TestedNodes, bad: str) -> None:
    """The test of the throttled node names it, and with what the search found it is suspect."""
    assert stage.watchdog is not None
    named = _tested(stage, tested)
    if named != [bad]:
        raise ValueError(f"the test names {named}, and {bad} is throttled")
    stage.until(lambda: "DRAIN" in stage.cluster.node(bad)["State"], 150, "the node to be drained")
    tell(f"slow_node: {bad} is drained: {stage.cluster.node(bad)['Reason']}")


def _returned(stage: Stage, tested: TestedNodes, mended: str) -> tuple[bool, bool]:
    """Mended, it is tested where it is, and given back: (whether it was out until then, whether it came back)."""
    watchdog = stage.watchdog
    assert watchdog is not None
    out = "DRAIN" in stage.cluster.node(mended)["State"]
    if named := _tested(stage, tested, "--drained-by-us"):
        raise ValueError(f"the test names {named}, and all are well")
    stage.until(lambda: "DRAIN" not in stage.cluster.node(mended)["State"], 150, "the node to be given back")
    tell(watchdog.command("nodes", mended).stdout)
    return out, stage.cluster.node(mended)["State"] == "IDLE"
