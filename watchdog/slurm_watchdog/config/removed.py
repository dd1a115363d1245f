"""Options that releases before this one had: a file that still has them loads, with a warning for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FIXED: Final = "the value that was shipped now holds everywhere"
REMOVED: Final[Mapping[str, str]] = {
    "agent.spool_age": FIXED,
    "controller.evidence_per_user": "one user has a quarter of controller.evidence_per_day",
    "detectors.checkpoint_overdue.factor": FIXED,
    "detectors.checkpoint_overdue.floor": FIXED,
    "detectors.driver_stall.blocked_for": FIXED,
    "detectors.driver_stall.unsure_for": FIXED,
    "detectors.filesystem_stall.supervised_blocked_for": FIXED,
    "detectors.gpu_clock_low.own_percent": FIXED,
    "detectors.gpu_clock_low.peers": FIXED,
    "detectors.gpu_idle_rank.idle_for": FIXED,
    "detectors.gpu_idle_rank.idle_for_while_steps": FIXED,
    "detectors.lingering_job.killed_grace": FIXED,
    "detectors.lingering_job.supervised_grace": FIXED,
    "detectors.log_error.gone_for": FIXED,
    "detectors.log_error.recent": FIXED,
    "detectors.loss_spike.deviations": FIXED,
    "detectors.loss_spike.percent": FIXED,
    "detectors.memory_kill.recent": FIXED,
    "detectors.near_limit.waits": FIXED,
    "detectors.partition_or_outage.percent": FIXED,
    "detectors.slurm_unreachable.silent_for": FIXED,
    "detectors.suspect_node.until": FIXED,
    "detectors.wedged_teardown.busy_limit": FIXED,
    "ladder.end_limit": FIXED,
    "ladder.restart_step_limit": FIXED,
    "node_tests.check": "let a program of the site's own call it: node_tests.program",
    "node_tests.check_limit": "let a program of the site's own call it: node_tests.program",
    "node_tests.directory": "results come through the pipe of srun",
    "node_tests.gpu_python": "write --torch=PYTHON to node_tests.options",
    "node_tests.interface": "the network of the nodes' addresses is measured; for another one see node_tests.program",
    "node_tests.local_directories": "write --local=DIR to node_tests.options",
    "node_tests.parts": "write --only=PART,… to node_tests.options",
    "node_tests.shared_directories": "write --shared=DIR to node_tests.options",
    "node_tests.tools": "tools that are on the PATH are used; for none of them see node_tests.program",
    "notify.alertmanager.deadline": FIXED,
    "notify.alertmanager.repeat": FIXED,
    "notify.heartbeat.deadline": FIXED,
    "notify.heartbeat.every": FIXED,
    "notify.receivers": "use Alertmanager (notify.alertmanager), which mails and pages",
    "notify.slack.deadline": FIXED,
    "notify.slack.weekly_report": "use `slurm-watchdog report --json` in cron",
    "notify.webhook.deadline": FIXED,
    "notify.webhook.weekly_report": "use `slurm-watchdog report --json` in cron",
    "policy.keep_checkpoint": "the incident names the last good checkpoint: copy it before the trainer deletes it",
    "policy.kinds.slow_job.attempts": "no restart is made for a slow job",
    "policy.kinds.slow_job.ladder": "no restart is made for a slow job",
    "policy.quarantine_by": "a suspect node is drained: jobs that run there continue, as in a reservation",
    "policy.quarantine_test_peers": "up to five idle nodes are tested beside it, and none is waited for where "
    "node_tests.floors has what is accepted",
    "policy.slow_search": "restarts that happen anyway, and test-nodes, narrow down which node is slow",
    "policy.slow_search_restarts": "no restart is made to find a slow node",
    "policy.slow_search_test": "use test-nodes on idle nodes: one that fails is the one",
    "security.may.acknowledge": "`ack` was removed, use `slurm-watchdog silence` (security.may.silence)",
    "security.may.drain": "use scontrol",
    "security.may.force_drain": "use scontrol",
    "security.page_acts_as": "use the commands: the page shows",
}
"""What to use instead, a clause, by the dotted path of the option. A row stays for one release."""


def take_removed(data: dict[str, Any], rows: Mapping[str, str] = REMOVED) -> list[tuple[str, str]]:
    """Takes the removed options out of a file's values, in place; those of detectors out of `thresholds`, too. Returns
    the path of each, with the sentence about it."""
    expert = data.get("expert")
    thresholds = expert.get("thresholds") if isinstance(expert, dict) else None
    places: list[tuple[str, Any]] = [("", data), ("expert.", expert)]
    places += [
        (f"expert.thresholds[{n}].", each) for n, each in enumerate(thresholds if isinstance(thresholds, list) else ())
    ]
    found: list[tuple[str, str]] = []
    for path, instead in rows.items():
        *sections, name = path.split(".")
        for where, inside in places:
            for section in sections:
                inside = inside.get(section) if isinstance(inside, dict) else None
            if isinstance(inside, dict) and name in inside:
                del inside[name]
                found.append((where + path, f"was removed and has no effect; {instead}"))
    return found
