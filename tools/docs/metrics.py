"""Writes docs/metrics.md, the reference of every series, from the code that serves them: `python -m
tools.docs metrics`.

Names, types, labels and help come from the registries themselves; what a label holds, and queries that join
our series with those of other exporters, are tables here. The queries are run by promtool in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurm_watchdog.agent.metrics import DROPPED, PREFIX, AgentMetrics
from slurm_watchdog.base.loop import Isolated
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.model.report import Report

FILE = Path(__file__).parents[2] / "docs/metrics.md"

LABELS = {
    "action": "`none`, `requeue`, `graceful_restart` and the other actions of the journal",
    "by": "the guard that took an action away, the kind whose rule allowed it, or `mode`",
    "call": "what Slurm was asked: `squeue`, `scontrol requeuehold`, …",
    "channel": "where messages go: `slack`, `webhook`, `alertmanager`, `log`",
    "certificate": "`own` or `authority`: the certificate of the agent or controller itself, or the one that signed it",
    "collector": "one of the agent's collectors",
    "gpu": "NVML's index on that node, which may change when another GPU goes away",
    "gpu_uuid": "the GPU's UUID, the same as `UUID` of DCGM's exporter",
    "job_id": "Slurm's number, `123` or `123_4`; `other` for what is none",
    "kind": "a kind of incident, see [Detectors](detectors.md)",
    "level": "`ok`, `warning`, `critical`, `unknown`: how everything is, as `status` has it",
    "mount": "a mount point, as in /proc/self/mounts",
    "pattern": "the name of an error line ([knowledge](knowledge.md)), or `other`",
    "operation": "an operation of the ladder, or `between`",
    "uid": "the number of a job's owner",
    "what": "a container with a cap, such as `processes`",
    "why": "`standstill` or `redone`",
    "name": "a class of message of the kernel or NVML ([knowledge](knowledge.md))",
    "node": "Slurm's name of a node",
    "outcome": "what became of it",
    "phase": "`starting`, `training`, `evaluating`, `checkpointing`, `finishing`",
    "probe": "a kind of child of the agent, with its mount: `files:/scratch`, `nvml`",
    "rank": "a rank's number; empty for other processes of a job",
    "link": "a port of an adapter (`mlx5_0/1`) or an interface",
    "part": "`some`: at least one process waited, `full`: all that had something to do",
    "resource": "what has a limit, or is waited for: `memory`, `pids`, `files`, `shared_memory`; `cpu`, `memory`, `io`",
    "reason": "a throttle reason of NVML; why a connection was refused (`no_certificate`), or a job is not judged (`no_step`)",
    "field": "a field of a job or node, `row` or `partial`",
    "severity": "`info`, `warning`, `error`, `critical`",
    "state": "of incidents `pending`, `firing`; of nodes `reporting`, `silent`; of children `idle`, `busy`, `hung`",
    "verdict": "`allowed`, `observed`, `suppressed`",
    "version": "of slurm-watchdog",
    "xid": "NVIDIA's number of a fault",
}
"""What each label holds. None holds a pid, or what a user wrote."""

HEAD = f"""# Metrics and alerts

Generated from the code by `make docs`.

The controller serves `/metrics` and `/healthz` on `controller.listen`, each agent on `agent.metrics_listen` (the loopback address unless you change
it). Every name begins with `{PREFIX}`; units are in the names: seconds, bytes, hertz, watts, degrees Celsius, ratios between 0 and 1. What ends in
`_total` is a counter. `gpu_…` also have the labels `gpu_uuid` and `gpu`, `link_…` have `link`, `job_…` have `job_id`. A controller serves at most 20,000 series, an agent at most 512 of one name: what would be more is left out and counted
(`{PREFIX}jobs_without_series`, `{PREFIX}agent_series_dropped`).

- **Prometheus:** [deploy/prometheus](../deploy/prometheus/prometheus.example.yaml) has an example of the scrape configuration and of Alertmanager's (pages,
  tickets, a dead man's switch), and the alert rules ([alerts.yaml](../deploy/prometheus/alerts.yaml)), each with a unit test (`promtool test rules`).
  With TLS [Prometheus needs a certificate](authentication.md#tls).
- **Grafana:** four dashboards (cluster, job, node, the watchdog itself) are in `deploy/grafana/dashboards`, with provisioning files beside them.

The shipped rules alert on: the dead man's switch `{PREFIX}controller_last_complete_tick_timestamp_seconds`, `{PREFIX}incidents{{state="firing"}}`,
`{PREFIX}nodes{{state="silent"}}`, [`{PREFIX}probe_hung`](collectors.md#what-probe_hung-means), `{PREFIX}collector_success` and
`{PREFIX}detector_failures_total` (a defect of ours).
"""

MORE = {
    "collector_success": "1 if the collector worked and could see in the last tick",
    "probes": "Children of the agent, by what they do: `idle`, `busy`, `hung`",
    "certificate_expiry_timestamp_seconds": "When the own certificate (`own`) and that of the `authority` end. None without TLS",
    "nvml_driver_seconds": "Time that the last tick spent in NVML, as the child measured it",
    "probe_hung": "Time that a child has not answered; no series if none hangs. [What each means]"
    "(collectors.md#what-probe_hung-means)",
    "mount_probe_seconds": "Time that the probe of a mount took, in the tick in which it answered, or that it has not "
    "answered yet",
    "node_events_total": "What the kernel's log and NVML reported about this node since the agent started",
    "gpu_job": "1 for the job and the rank whose processes hold it: joins the series of a GPU with those of a job",
    "gpu_xid_total": "Xids since the agent started, reported by the kernel's log or NVML, each counted once",
    "process_uninterruptible_seconds": 'Time that the longest blocked thread of a rank has been in one call; `rank=""`: of any other '
    "process of the job",
    "checkpoint_age_seconds": "Its age, by the file server's clock",
    "agent_series_dropped": "Series left out because their metric reached its limit of 512",
    "job_progress_age_seconds": "Time since the job's last step; before the first, since the run was first seen",
    "job_step": "Newest step of the present run",
    "job_phase": "1 for the phase that the job is in",
    "incidents": "Open incidents, of every kind",
    "decisions_total": "Decisions, with the guard or rule that made them",
    "actions_total": "Actions that ended: `ok`, `failed`, `needless` (the job trains again, or is over, without it)",
    "lost_work_seconds_total": "Work that was done again after restarts, where the time of a step is known",
    "lost_gpu_seconds_total": "GPU time of jobs that hung in an incident (`standstill`) or did work again after a restart (`redone`)",
    "restarted_gpus_total": "GPUs of jobs that the watchdog brought back to work by itself",
    "job_operation": "1 for the operation of the ladder at which an action on a job is",
    "job_log_errors": "Error lines that are kept of the job's present run, by signature. At most 500 series",
    "job_incident": "1 for an incident that fires and that no other one explains, for each of its jobs; 800 at most",
    "job_not_judged": "1 for a job whose progress cannot be judged, and why; 400 at most",
    "health": "1 for how everything is, 0 for the other levels",
    "notifications_total": "Attempts to send messages: `sent`, `failed` (tried again), `dropped`",
    "nodes": "Nodes by what their agents do: `reporting`, `silent`",
    "reports_total": "Reports received: `accepted`, `duplicate`, `expired`, refused ones by the reason, and `wrong_job` beside "
    "`accepted`: about a job that its node does not have",
    "refused_connections_total": "Connections that were refused before they asked anything, by the reason",
    "controller_last_complete_tick_timestamp_seconds": "Dead man's switch: has to keep rising",
    "slurm_requests_total": "Requests to Slurm: `ok`, `refused`, `unavailable`",
    "detector_failures_total": "Detectors that raised, which is a defect of ours",
    "jobs_without_series": "Running jobs beyond 3,500: these have no `job_*` series",
    "left_out_total": "Entries (processes, log files, filesystems, …) for which a node, a user or a job had no room left",
}
"""Series whose HELP text is shorter than what a reader of the page has to know -> the meaning that the page
has instead."""


class Metric(NamedTuple):
    """One metric as Prometheus reads it; `name` without the common beginning."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Example(NamedTuple):
    """A query, with series on which it gives `found` (labels to value)."""

    title: str
    query: str
    given: Mapping[str, float]
    found: Mapping[str, float]


GPU_JOB = 'slurm_watchdog_gpu_job{gpu_uuid="GPU-1",gpu="0",job_id="7",rank="3",instance="n1:9766"}'
EXAMPLES = (
    Example(
        "The temperature that DCGM measures, with the job and the rank that use the GPU",
        'slurm_watchdog_gpu_job * on (gpu_uuid) group_left () '
        'max by (gpu_uuid) (label_replace(DCGM_FI_DEV_GPU_TEMP, "gpu_uuid", "$1", "UUID", "(.+)"))',
        {GPU_JOB: 1, 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1",gpu="0",Hostname="n1"}': 71,
         'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-2",gpu="1",Hostname="n1"}': 30},
        {'{gpu_uuid="GPU-1",gpu="0",job_id="7",rank="3",instance="n1:9766"}': 71},
    ),
    Example(
        "Ranks whose GPU is busy while their job makes no step: they wait in a collective, or turn in vain",
        '(slurm_watchdog_gpu_job * on (gpu_uuid) group_left () max by (gpu_uuid) '
        '(label_replace(DCGM_FI_DEV_GPU_UTIL, "gpu_uuid", "$1", "UUID", "(.+)")) > 90) '
        'and on (job_id) (slurm_watchdog_job_progress_age_seconds > slurm_watchdog_job_stall_limit_seconds)',
        {GPU_JOB: 1, 'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1"}': 100,
         'slurm_watchdog_job_progress_age_seconds{job_id="7",instance="c"}': 600,
         'slurm_watchdog_job_stall_limit_seconds{job_id="7",instance="c"}': 90},
        {'{gpu_uuid="GPU-1",gpu="0",job_id="7",rank="3",instance="n1:9766"}': 100},
    ),
    Example(
        "Memory of the jobs that hang, by slurm-job-exporter, whose label is `slurmjobid`",
        'sum by (job_id, user) (label_replace(slurm_job_memory_usage, "job_id", "$1", "slurmjobid", '
        '"(.+)")) * on (job_id) group_left () (slurm_watchdog_job_progress_age_seconds > bool '
        'slurm_watchdog_job_stall_limit_seconds)',
        {'slurm_job_memory_usage{slurmjobid="7",user="ann",instance="n1"}': 100,
         'slurm_job_memory_usage{slurmjobid="7",user="ann",instance="n2"}': 200,
         'slurm_watchdog_job_progress_age_seconds{job_id="7"}': 600,
         'slurm_watchdog_job_stall_limit_seconds{job_id="7"}': 90},
        {'{job_id="7",user="ann"}': 300},
    ),
    Example(
        "Steps an hour of every job",
        "3600 * deriv(slurm_watchdog_job_step[5m]) > 0",
        {'slurm_watchdog_job_step{job_id="7"} +30': 100},
        {'{job_id="7"}': 1800},
    ),
)  # fmt: skip
"""A series whose name ends in ` +N` rises by N a minute."""


def agent_metrics() -> list[Metric]:
    """What an agent may serve."""
    metrics = AgentMetrics()
    metrics.update(Report(node="n", boot_id="b", agent_id="a", sequence=1), Isolated(), 0)
    text = metrics.render().decode()
    histograms = re.findall(rf"^# TYPE {PREFIX}(\w+) histogram$", text, re.MULTILINE)
    found = [Metric(each.name, each.kind, each.labels, each.help) for each in (*metrics.families(), DROPPED)]
    return [*found, *(Metric(name, "histogram", (), _help(text, name)) for name in histograms)]


def _help(text: str, name: str) -> str:
    found = re.search(rf"^# HELP {PREFIX}{name} (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def controller_metrics() -> list[Metric]:
    """What a controller may serve; labels from its registries, for most have no value before something happens."""
    metrics = ControllerMetrics()
    text = metrics.text().decode()
    kinds = dict(re.findall(rf"^# TYPE {PREFIX}(\w+) (\w+)$", text, re.MULTILINE))
    labels: dict[str, tuple[str, ...]] = {}
    for registry in (metrics._counters, metrics.registry):  # a counter also claims its name without `_total`
        for collector, names in registry._collector_to_names.items():
            labels.update((name.removeprefix(PREFIX), tuple(collector._labelnames)) for name in names)
    return [
        Metric(name, kind, labels[name], _help(text, name))
        for name, kind in kinds.items()
        if not name.endswith("_created")
    ]


def series() -> dict[str, Metric]:
    """Every series of agent and controller, by its name without the common beginning."""
    return {metric.name: metric for metric in (*agent_metrics(), *controller_metrics())}


IMPLIED = {"gpu": ("gpu_uuid", "gpu"), "link": ("link",), "job": ("job_id",)}
"""First word of a name -> labels that all series with it have; the page says so once."""


def table(metrics: Iterable[Metric]) -> list[str]:
    """The rows of a table, by name."""
    rows = ["| series | labels | meaning |", "|---|---|---|"]
    for metric in sorted(metrics):
        implied = IMPLIED.get(metric.name.partition("_")[0], ())
        labels = " ".join(f"`{label}`" for label in metric.labels if label not in implied)
        meaning = MORE.get(metric.name, metric.meaning).replace("|", "\\|").rstrip(".")
        rows.append(f"| `{metric.name}` | {labels} | {meaning} |")
    return rows


def write() -> str:
    """The whole page."""
    agent, controller = agent_metrics(), controller_metrics()
    used = sorted({label for metric in (*agent, *controller) for label in metric.labels})
    parts = [
        HEAD,
        "## The controller's series\n",
        *table(controller),
        "\n## Each agent's series\n",
        "Prometheus knows the node by `instance`. A GPU that does not answer has no value.\n",
        *table(agent),
        "\n## Labels\n",
        "No label holds a pid, or anything that a user wrote.\n",
        "| label | holds |",
        "|---|---|",
        *(f"| `{label}` | {LABELS[label]} |" for label in used),
        "\n## Joins with other exporters\n",
        "By `gpu_uuid` with NVIDIA's dcgm-exporter (`DCGM_FI_DEV_*`, label `UUID`), by `job_id` with an exporter of Slurm's jobs.",
    ]
    for example in EXAMPLES:
        parts += ["", f"{example.title}:", "", "```", example.query, "```"]
    return "\n".join(parts) + "\n"
