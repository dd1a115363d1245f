"""Options that releases before this one had: a file that still has them loads, with a warning for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

FIXED: Final = "the value that was shipped now holds everywhere"
ALWAYS: Final[Mapping[str, str]] = {
    "agent.spool_bytes": "8MiB",
    "controller.evidence_spread": "5s",
    "controller.max_reports_per_s": "1000",
    "controller.report_lifetime": "three quarters of controller.agent_silent_after",
    "controller.resolve_after": "twice agent.interval",
    "detectors.chain_broken.grace": "2min",
    "detectors.collective_hang.answer_limit": "5min",
    "detectors.collective_hang.everybody_limit": "2min",
    "detectors.collective_hang.factor": "3",
    "detectors.crash_loop.runs": "3",
    "detectors.crash_loop.within": "30min",
    "detectors.dead_rank.gone_for": "3s",
    "detectors.gpu_clock_low.percent": "10",
    "detectors.gpu_fault.driver_silent_for": "1min",
    "detectors.loss_nan.steps": "3",
    "detectors.near_limit.near": "95",
    "detectors.partition_or_outage.nodes": "3",
    "detectors.rank_stopped.stopped_for": "15s",
    "detectors.slow_job.lasts": "5min",
    "detectors.suspect_node.score": "2.25",
    "detectors.wedged_teardown.grace": "10min",
    "detectors.wedged_teardown.teardown_limit": "2min",
    "ladder.evidence_limit": "90s",
    "jobs.opt_out_comment": "watchdog=off",
    "ladder.kill_limit": "1min",
    "ladder.kill_switch_limit": "1min",
    "ladder.mount_limit": "1d",
    "ladder.term_limit": "30s",
    "policy.drain_reason": "'slurm-watchdog:'",
    "policy.storm_nodes_percent": "20",
}
"""Options that are constants now, with their value."""
REMOVED: Final[Mapping[str, str]] = {
    **{path: f"it is always {value}" for path, value in ALWAYS.items()},
    "agent.spool_age": FIXED,
    "controller.evidence_per_user": "one user has a quarter of controller.evidence_per_day",
    "detectors.*.hold": FIXED,
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
    **{f"policy.{rules}.*.exit_limit": "ladder.exit_limit holds for every kind" for rules in ("kinds", "overrides")},
    **{f"policy.{rules}.*.kill_switch_limit": "it is always 1min" for rules in ("kinds", "overrides")},
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
    """Takes the removed options out of a file's values, in place; those of `except`, too. Returns the path of
    each, with the sentence about it."""
    found: list[tuple[str, str]] = []
    for path, instead in rows.items():
        for place in ("", "expert.", "thresholds.*.", "except.*."):
            *names, name = f"{place}{path}".split(".")
            for at, section in _sections(data, names, ""):
                if name in section:
                    del section[name]
                    found.append((f"{at}.{name}".strip("."), f"was removed and has no effect; {instead}"))
    return found


def _sections(inside: Any, names: list[str], at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings below `names`, each with its path; `*` is any key, or any of a list."""
    if not names:
        yield from ((at, inside),) if isinstance(inside, dict) else ()
    elif isinstance(inside, list) and names[0] == "*":
        for index, each in enumerate(inside):
            yield from _sections(each, names[1:], f"{at}[{index}]")
    elif isinstance(inside, dict):
        for name in inside if names[0] == "*" else names[:1]:
            yield from _sections(inside.get(name), names[1:], f"{at}.{name}".strip("."))
