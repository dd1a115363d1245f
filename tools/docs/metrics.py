"""Writes docs/metrics.md, the reference of every series, from the code that serves them: `python -m
tools.docs metrics`.

Names, types, labels and help come from the registries themselves; queries that join our series with those of other
exporters are a table here. They are run by promtool in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurm_watchdog.agent.metrics import DROPPED, PREFIX, AgentMetrics
from slurm_watchdog.controller.health.metrics import ControllerMetrics

FILE = Path(__file__).parents[2] / "docs/metrics.md"

HEAD = f"""# Metrics and alerts

Generated from the code by `make docs`.

The controller serves `/metrics` and `/healthz` on `expert.controller.listen`. Each agent writes its series to a file every 15 s, and opens no port:
`node_exporter --collector.textfile.directory=/run/slurm-watchdog-agent/metrics` serves them with the node's own `instance` (the option may be given more
than once; or link `slurm-watchdog.prom` into the directory that is there). Every name begins with `{PREFIX}`; units are in the names. `gpu_…` also have
the labels `gpu_uuid` and `gpu`, `job_…` have `job_id`. No label holds a pid, or what a user wrote. A controller serves at most 20,000 series, an agent
512 of one name; what is left out is counted. Links, memory, pressure: node_exporter's own series.

- [deploy/prometheus](../deploy/prometheus/prometheus.example.yaml): scrape configuration, Alertmanager's, and [alert rules](../deploy/prometheus/alerts.yaml).
  With TLS [Prometheus needs a certificate](authentication.md#tls). `deploy/grafana/dashboards`: cluster, job, node, the watchdog itself.
- To alert on: the dead man's switch `{PREFIX}controller_last_complete_tick_timestamp_seconds`, `{PREFIX}incidents{{state="firing"}}`,
  `{PREFIX}nodes{{state="silent"}}`, [`{PREFIX}probe_hung`](evidence.md#what-probe_hung-means) and `{PREFIX}detector_failures_total`.
"""


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


GPU_JOB = 'slurm_watchdog_gpu_job{gpu_uuid="GPU-1",gpu="0",job_id="7",rank="3",instance="n1:9100"}'
EXAMPLES = (
    Example(
        "The temperature that DCGM measures, with the job and the rank that use the GPU",
        'slurm_watchdog_gpu_job * on (gpu_uuid) group_left () '
        'max by (gpu_uuid) (label_replace(DCGM_FI_DEV_GPU_TEMP, "gpu_uuid", "$1", "UUID", "(.+)"))',
        {GPU_JOB: 1, 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1",gpu="0",Hostname="n1"}': 71,
         'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-2",gpu="1",Hostname="n1"}': 30},
        {'{gpu_uuid="GPU-1",gpu="0",job_id="7",rank="3",instance="n1:9100"}': 71},
    ),
    Example(
        "Ranks whose GPU is busy while their job makes no step: they wait in a collective, or turn in vain",
        '(slurm_watchdog_gpu_job * on (gpu_uuid) group_left () max by (gpu_uuid) '
        '(label_replace(DCGM_FI_DEV_GPU_UTIL, "gpu_uuid", "$1", "UUID", "(.+)")) > 90) '
        'and on (job_id) (slurm_watchdog_job_progress_age_seconds > slurm_watchdog_job_stall_limit_seconds)',
        {GPU_JOB: 1, 'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1"}': 100,
         'slurm_watchdog_job_progress_age_seconds{job_id="7",instance="c"}': 600,
         'slurm_watchdog_job_stall_limit_seconds{job_id="7",instance="c"}': 90},
        {'{gpu_uuid="GPU-1",gpu="0",job_id="7",rank="3",instance="n1:9100"}': 100},
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
    """What an agent may write."""
    found = (*AgentMetrics().families(), DROPPED)
    return [Metric(each.name, each.kind, each.labels, each.help) for each in found]


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


IMPLIED = {"gpu": ("gpu_uuid", "gpu"), "job": ("job_id",)}
"""First word of a name -> labels that all series with it have; the page says so once."""
NAMED_ONLY = ("gpu_",)
"""Their names say it all; the whole sentence is beside the series."""
PLAIN = """
actions_total agent_build_info agent_reports_total agent_series_dropped
build_info certificate_expiry_timestamp_seconds checkpoint_age_seconds
collector_duration_seconds collector_success controller_epoch decisions_total incidents_total job_operation
job_phase job_progress_age_seconds job_step job_step_seconds log_lag_bytes
lost_work_seconds_total nodes notifications_oldest_age_seconds notifications_total
notifications_waiting nvml_driver_seconds refused_connections_total
reports_total restarted_gpus_total slurm_requests_total spool_bytes
tick_duration_seconds ticks_total
"""
"""As NAMED_ONLY, by their whole name."""


def shown(metric: Metric) -> str:
    """Its name with its labels."""
    labels = [label for label in metric.labels if label not in IMPLIED.get(metric.name.partition("_")[0], ())]
    return f"`{metric.name}{'{' + ', '.join(labels) + '}' if labels else ''}`"


def table(metrics: Iterable[Metric]) -> list[str]:
    """The rows of a table, by name, and those whose names say it all."""
    known = sorted(each for each in metrics if not each.name.startswith(NAMED_ONLY))
    told, plain = (
        [each for each in known if each.name not in PLAIN.split()],
        [each for each in known if each.name in PLAIN.split()],
    )
    rows = [f"| {shown(each)} | {each.meaning.replace('|', chr(92) + '|').rstrip('.')} |" for each in told]
    return ["| series | meaning |", "|---|---|", *rows, "", f"Also {', '.join(map(shown, plain))}."]


def write() -> str:
    """The whole page."""
    agent = agent_metrics()
    named = ", ".join(shown(each) for each in sorted(agent) if each.name.startswith(NAMED_ONLY))
    parts = [
        HEAD,
        "## The controller's series\n",
        *table(controller_metrics()),
        "\n## Each agent's series\n",
        *table(agent),
        f"\nOf each GPU, no value where it does not answer: {named}.",
        "\n## Joins with other exporters\n",
        "By `gpu_uuid` with dcgm-exporter (`DCGM_FI_DEV_*`, label `UUID`), by `job_id` with an exporter of Slurm's jobs.",
    ]
    for example in EXAMPLES:
        parts += ["", f"{example.title}:", "", "```", example.query, "```"]
    return "\n".join(parts) + "\n"
