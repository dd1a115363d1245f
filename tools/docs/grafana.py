#!/usr/bin/env python3
"""Writes the dashboards beside it: `make grafana`. What a panel asks is here, and nowhere else.

Four dashboards: the cluster, one job, one node, the watchdog itself. Every query is run by a real Prometheus
against a real cluster in tests/integration/test_grafana.py and has to return data, or is in MAY_BE_EMPTY.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

HERE = Path(__file__).parents[2] / "deploy/grafana"
W = "slurm_watchdog_"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
OF_JOB = "/d/slurm-watchdog-job?var-job=${__data.fields.job_id}&${__url_time_range}"
"""The dashboard of the job in whose row somebody clicks."""
FULL, HALF, THIRD, QUARTER = 24, 12, 8, 6

MAY_BE_EMPTY: dict[str, str] = {
    "lost work": "no work was lost yet",
    "kernel and driver": "the kernel says nothing where nothing is wrong",
    "operations of the ladder": "no action is under way",
    "ladder": "no action is under way",
    "errors in the log": "the log holds no error",
    "DCGM": "needs NVIDIA's exporter beside ours",
    "Slurm": "needs Slurm's own exporter",
    "health of the cards": "GPUs that answer",
}
"""Parts of titles of panels, and names of annotations, whose query may give nothing on a cluster where all is
well, and why."""


def query(expression: str, legend: str = "", *, as_table: bool = False) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(expression).legend_format(legend or "__auto").datasource(SOURCE)
    made = made.ref_id("A")
    return made.format(PromQueryFormat.TABLE).instant() if as_table else made.range()


def placed(panel: Any, title: str, text: str, width: int, height: int = 8) -> Any:
    return panel.title(title).description(text).datasource(SOURCE).span(width).height(height)


def number(
    title: str,
    text: str,
    expression: str,
    unit: str = "short",
    width: int = QUARTER,
    *,
    colours: Sequence[tuple[float, str]] = (),
) -> Any:
    """One figure. `colours`: from which value on it has which colour; below the first it is green, without
    any it has none."""
    panel = placed(stat.Panel(), title, text, width, 4).unit(unit).with_target(query(expression))
    if not colours:
        return panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("text"))
    steps = [
        Threshold(value=None, color="green"),
        *(Threshold(value=low, color=name) for low, name in colours),
    ]
    panel = panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    return panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))


def curves(title: str, text: str, queries: dict[str, str], unit: str = "short", width: int = HALF) -> Any:
    """`queries`: legend -> expression."""
    panel = placed(timeseries.Panel(), title, text, width).unit(unit).min(0)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.BOTTOM)
    panel = panel.legend(legend.show_legend(True).calcs(["lastNotNull", "max"]))
    for letter, (name, expression) in zip("ABCDEF", queries.items(), strict=False):
        panel = panel.with_target(query(expression, name).ref_id(letter))
    return panel


def bars(title: str, text: str, queries: dict[str, str], unit: str = "short", width: int = HALF) -> Any:
    stacked = common.StackingConfig().mode(StackingMode.NORMAL)
    panel = curves(title, text, queries, unit, width)
    return panel.draw_style(GraphDrawStyle.BARS).fill_opacity(60).stacking(stacked)


def band(title: str, text: str, expression: str, legend: str, width: int = FULL) -> Any:
    return placed(statetimeline.Panel(), title, text, width, 6).with_target(query(expression, legend))


def listing(title: str, text: str, expression: str, unit: str = "short", width: int = HALF) -> Any:
    return placed(table.Panel(), title, text, width).unit(unit).with_target(query(expression, as_table=True))


def heat(title: str, text: str, expression: str, legend: str, unit: str, width: int = HALF) -> Any:
    """A row a series, coloured by its value: the odd one is seen without reading."""
    colour = dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_BL_YL_RD)
    panel = placed(statushistory.Panel(), title, text, width, 10).unit(unit).color_scheme(colour)
    return panel.with_target(query(expression, legend))


MARKS = {
    "incidents that fired": "{{kind}}",
    "errors in the log": "{{pattern}}",
    "kernel and driver": "{{name}} on {{instance}}",
    "operations of the ladder": "{{operation}}",
}
"""Annotations, and what stands at each mark."""


def marks(name: str, colour: str, expression: str) -> Any:
    """A mark at each time at which the query gives something."""
    assert name in MARKS
    made = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True)
    return made.icon_color(colour).expr(expression)


def fresh(series: str, minutes: int = 1) -> str:
    """Where it appeared or rose within so long: a counter that begins with 1 has not risen in Prometheus's eyes."""
    return f"(({series} unless {series} offset {minutes}m) > 0 or increase({series}[{minutes}m]) > 0)"


def board(
    uid: str,
    title: str,
    text: str,
    panels: list[Any],
    variables: tuple[Any, ...] = (),
    annotations: tuple[Any, ...] = (),
) -> Any:
    links = dashboard.DashboardLink("slurm-watchdog").type(DashboardLinkType.DASHBOARDS).tags(["slurm-watchdog"])
    links = links.as_dropdown(True).keep_time(True).include_vars(True)
    fired = f"sum by (kind) (increase({W}incidents_total[1m])) > 0"
    made = (
        dashboard.Dashboard(title)
        .uid(f"slurm-watchdog-{uid}")
        .description(text)
        .tags(["slurm-watchdog"])
        .refresh("15s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(links)
        .annotation(marks("incidents that fired", "red", fired))
    )
    for each in annotations:
        made = made.annotation(each)
    for variable in variables:
        made = made.with_variable(variable)
    for panel in panels:
        made = made.with_panel(panel)
    return made


def choice(name: str, label: str, expression: str) -> Any:
    made = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(expression)
    return made.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def cluster() -> Any:
    return board(
        "cluster",
        "slurm-watchdog: cluster",
        "What runs, what is wrong, what was done.",
        [
            number("jobs watched", "Jobs that run and are judged.", f"count({W}job_progress_age_seconds) or vector(0)"),
            number("incidents firing", "Open now, of all kinds.", f'sum({W}incidents{{state="firing"}})',
            colours=[(1, "red")]),
            number("nodes reporting", "Nodes whose agents report.", f'{W}nodes{{state="reporting"}}'),
            number("nodes silent", "Their agents do not report: nothing is known of them.",
            f'{W}nodes{{state="silent"}}', colours=[(1, "orange")]),
            listing(
                "jobs nearest to their limit",
                "Time since the last step, as a share of the time at which the job counts as hanging. 1 and "
                "more: beyond it.",
                f"topk(20, {W}job_progress_age_seconds / on (job_id) ({W}job_stall_limit_seconds > 0))",
                "percentunit",
            ).data_links([dashboard.DashboardLink("curves of this job").type(DashboardLinkType.LINK).url(OF_JOB)]),
            bars("jobs by phase", "By what their logs say.", {"{{phase}}": f"sum by (phase) ({W}job_phase)"}),
            bars(
                "open incidents",
                "Firing, by kind.",
                {"{{kind}}": f'sum by (kind) ({W}incidents{{state="firing"}}) > 0 or vector(0)'},
            ),
            bars(
                "decisions",
                "What it would do (observed), does (allowed), or is kept from doing, and by which guard.",
                {"{{verdict}} by {{by}}": f"sum by (verdict, by) (increase({W}decisions_total[5m])) > 0 or vector(0)"},
            ),
            bars(
                "actions that ended",
                "ok: the restarted job made its first new step.",
                {"{{action}} {{outcome}}": f"sum by (action, outcome) (increase({W}actions_total[1h]))"},
            ),
            curves(
                "lost work",
                "Work that restarts had to do again, in wall-clock time of the jobs.",
                {"lost": f"{W}lost_work_seconds_total"},
                "s",
            ),
            number(
                "GPU-hours lost",
                "In the time shown: jobs that stalled with their GPUs, and work that was repeated.",
                f"sum(increase({W}lost_gpu_seconds_total[$__range])) / 3600",
            ),
            number(
                "GPU-hours saved",
                "In the time shown: GPUs of jobs that were restarted automatically, times the hours "
                "until a person would have (above).",
                f"sum(increase({W}restarted_gpus_total[$__range])) * $hours",
            ),
            bars(
                "GPU-hours lost, an hour",
                "standstill: a job in an incident holds its GPUs and makes no step. redone: steps that a "
                "restart made again.",
                {"{{why}}": f"sum by (why) (increase({W}lost_gpu_seconds_total[1h])) / 3600"},
            ),
            curves("nodes", "By what their agents do.", {"{{state}}": f"{W}nodes"}),
            curves(
                "mounts, slowest probe",
                "Over all nodes; climbs without end while a filesystem does not answer.",
                {"{{mount}}": f"max by (mount) ({W}mount_probe_seconds)"},
                "s",
            ),
        ],
        (dashboard.TextBoxVariable("hours").label("Hours until a person would have restarted a job").default_value("4"),),
    )  # fmt: skip


def job() -> Any:
    of_nodes = f'and on (instance) max by (instance) ({W}gpu_job{{job_id="$job"}})'
    said = f'{W}node_events_total{{severity=~"error|critical"}}'
    errors = f'{W}job_log_errors{{job_id="$job"}}'
    operation = f'{W}job_operation{{job_id="$job"}}'
    of_job = f'* on (gpu_uuid) group_left (job_id, rank) max by (gpu_uuid, job_id, rank) ({W}gpu_job{{job_id="$job"}})'
    return board(
        "job",
        "slurm-watchdog: one job",
        "Is it turning, how fast, and is one of its GPUs unlike the others?",
        [
            number("step", "Newest step of the present run.", f'{W}job_step{{job_id="$job"}}'),
            number("step time", "Median of the recent ones.", f'{W}job_step_seconds{{job_id="$job"}}', "s"),
            number("since the last step", "", f'{W}job_progress_age_seconds{{job_id="$job"}}', "s"),
            number("limit", "It counts as hanging when no step came for so long.",
            f'{W}job_stall_limit_seconds{{job_id="$job"}}', "s"),
            band("phase", "By what its log says.", f'{W}job_phase{{job_id="$job"}}', "{{phase}}"),
            band("ladder", "What is being done about it, operation by operation.", operation, "{{operation}}"),
            curves(
                "time of a step",
                "A step that lasts longer from some point on is a slow job (5 % are reported).",
                {"median of the recent steps": f'{W}job_step_seconds{{job_id="$job"}}'},
                "s",
            ),
            curves(
                "since the last step, and the limit",
                "A saw tooth is health. A ramp that reaches the limit is a hang.",
                {"since the last step": f'{W}job_progress_age_seconds{{job_id="$job"}}',
                "limit": f'{W}job_stall_limit_seconds{{job_id="$job"}}'},
                "s",
            ),
            heat("GPU utilisation by rank",
            "1 also while a GPU spins in a collective; a rank that stands alone at 0 is the one to "
                    "look at.",
                 f"{W}gpu_utilization_ratio {of_job}", "rank {{rank}}", "percentunit"),
            heat("GPU clock by rank", "A card that is slower than its peers under load.",
                 f"{W}gpu_sm_clock_hertz {of_job}", "rank {{rank}}", "hertz"),
            heat("GPU power by rank", "Low beside 100 % utilisation: it waits.", f"{W}gpu_power_watts {of_job}",
                "rank {{rank}}", "watt"),
            heat("blocked in one system call, by rank", "Seconds that its longest blocked thread has been in one call.",
                 f'max by (rank) ({W}process_uninterruptible_seconds{{job_id="$job"}}) or on () vector(0)',
                 "rank {{rank}}", "s"),
            bars("errors in the log", "Lines that are kept of the present run, by signature.", {"{{pattern}}": errors}),
            bars("kernel and driver, on its nodes", "Errors only.",
            {"{{name}} on {{instance}}": f"increase({said}[5m]) {of_nodes}"}),
            curves("newest complete checkpoint", "Its age: what a restart would cost at most.",
                   {"age": f'max({W}checkpoint_age_seconds{{job_id="$job"}}) or on () '
                           f'{W}job_progress_age_seconds{{job_id="$job"}}'}, "s"),
            curves("DCGM: tensor cores active, by rank",
                   "With NVIDIA's dcgm-exporter beside ours: joined by the card's UUID.",
                   {"rank {{rank}}": 'label_replace(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, "gpu_uuid", "$1", "UUID", '
                           '"(.*)") ' + of_job}, "percentunit"),
        ],
        (choice("job", "Job", f"label_values({W}job_progress_age_seconds, job_id)"),),
        (
            marks("errors in the log", "orange", f"{errors} unless {errors} offset 1m"),
            marks("kernel and driver", "purple", f"{fresh(said)} {of_nodes}"),
            marks("operations of the ladder", "blue", f"{operation} unless {operation} offset 1m"),
        ),
    )  # fmt: skip


def node() -> Any:
    here = '{instance="$node"}'
    return board(
        "node",
        "slurm-watchdog: one node",
        "What its agent sees: cards, mounts, the kernel's log, and what hangs.",
        [
            curves("GPU utilisation", "", {"GPU {{gpu}}": f"{W}gpu_utilization_ratio{here}"}, "percentunit"),
            curves("GPU clock", "", {"GPU {{gpu}}": f"{W}gpu_sm_clock_hertz{here}"}, "hertz"),
            curves("GPU power", "", {"GPU {{gpu}}": f"{W}gpu_power_watts{here}"}, "watt"),
            curves("GPU temperature", "", {"GPU {{gpu}}": f"{W}gpu_temperature_celsius{here}"}, "celsius"),
            curves("GPU memory", "", {"GPU {{gpu}}": f"{W}gpu_memory_used_bytes{here}"}, "bytes"),
            curves("health of the cards", "Uncorrected memory errors, Xids, links that are down.",
                   {"GPU {{gpu}} uncorrected": f"{W}gpu_ecc_uncorrected_errors_total{here}",
                   "GPU {{gpu}} links down": f"{W}gpu_nvlinks_down{here}"}),
            curves("probe of each mount", "", {"{{mount}}": f"{W}mount_probe_seconds{here}"}, "s"),
            curves("what has not returned", "Children of the agent that hang: a mount or the driver does.",
                   {"{{probe}}": f"{W}probe_hung{here} or on () vector(0)"}, "s"),
            bars("kernel and driver", "What they said, by severity.",
                {"{{severity}}": f"sum by (severity) (increase({W}node_events_total{here}[5m])) or on () vector(0)"}),
            curves("processes that no job owns", "They hold a GPU.", {"GPU {{gpu}}": f"{W}gpu_orphans{here}"}),
        ],
        (choice("node", "Node", f"label_values({W}agent_build_info, instance)"),),
    )  # fmt: skip


def itself() -> Any:
    slow = {
        "agents": f"quantile(0.99, {W}agent_tick_seconds)",
        "controller": f"histogram_quantile(0.99, sum by (le) (rate({W}tick_duration_seconds_bucket[5m])))",
    }
    return board(
        "itself",
        "slurm-watchdog: the watchdog itself",
        "Does it see, does it keep up, what does it cost?",
        [
            number("since the last judgement", "More than a minute: it is dead.",
            f"time() - {W}controller_last_complete_tick_timestamp_seconds", "s", colours=[(30, "orange"), (60, "red")]),
            number("agents", "Whose metrics node_exporter serves.", f"count({W}agent_build_info)"),
            number("collectors that fail", "On all nodes: what they would see is unknown.",
            f"count({W}collector_success == 0) or vector(0)", colours=[(1, "orange")]),
            number("children that hang", "On all nodes.", f"count({W}probe_hung) or vector(0)", colours=[(1,
            "orange")]),
            curves("reports", "As the controller counts them, a second.",
            {"{{outcome}}": f"sum by (outcome) (rate({W}reports_total[5m]))"}),
            curves("requests to Slurm", "A second.",
            {"{{call}} {{outcome}}": f"sum by (call, outcome) (rate({W}slurm_requests_total[5m]))"}),
            curves("slowest ticks", "The 99th percentile of agents and controller.", slow, "s"),
            curves("collectors", "The slowest node's time for each.",
            {"{{collector}}": f"max by (collector) ({W}collector_duration_seconds)"}, "s"),
            curves("versions", "One version apart is understood.",
            {"agents {{version}}": f"count by (version) ({W}agent_build_info)",
            "controller {{version}}": f"{W}build_info"}),
            curves("detectors that raised", "A defect of ours.",
            {"all": f"sum(increase({W}detector_failures_total[15m]))"}),
            curves("reports that wait on nodes", "They wait for the controller.",
            {"all nodes": f"sum({W}spool_bytes)"}, "bytes"),
            curves("logs not read yet", "", {"all nodes": f"sum({W}log_lag_bytes)"}, "bytes"),
        ],
    )  # fmt: skip


def main(directory: Path = HERE / "dashboards") -> None:
    for made in (cluster(), job(), node(), itself()):
        document = made.build()
        name = document.uid.removeprefix("slurm-watchdog-")
        plain = json.loads(JSONEncoder().encode(document))
        for each in plain["annotations"]["list"]:  # the library does not know this key of Prometheus's annotations
            each["titleFormat"] = MARKS[each["name"]]
        text = json.dumps(plain, sort_keys=True, indent=1)
        (directory / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
