"""What is asked of the controller in one request: `incidents`, `nodes`, `report`, `silence`, `pause` and `resume`."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import click
from msgspec import structs

from slurm_watchdog.base import clock
from slurm_watchdog.cli.client import find
from slurm_watchdog.cli.options import ASKS, JOURNAL, ROWS_ONLY, Answer, Asked, command
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.model.documents import Incident, Paused, PauseRequest, SilenceRequest, Silences
from slurm_watchdog.model.node_events import NodeEventRequest, NodeHistory, NodeTable
from slurm_watchdog.model.run_record import Report
from slurm_watchdog.report.story import HOUR_S, hints_of, intervals, is_wrong, named, shown_state, wanted

WEEK_S = 7 * 86400.0
ENOUGH_FAILURES = 10  # the mean of fewer is known to a third at best: 1 / sqrt(n)


@command(
    """
    -j, --job J  Only incidents of this job.
    --kind KIND…  Only this kind; repeatable.
    --state pending|firing|resolved|explained…  Only incidents in this state; repeatable.
    -u, --user UID  Only incidents of this user's jobs: a name or a uid.
    --since TIME  Only those of the last 2h, 7d, …
    --limit N<1..>  At most N, the newest.
    """,
    ROWS_ONLY,
    ASKS,
    JOURNAL,
)
def incidents(asked: Asked, job: str | None, user: int | None, **which: Any) -> Answer:
    """What happened: pending, firing and resolved incidents. Exit code 1 while one of those listed is firing.

    \b
    Examples:
      slurm-watchdog incidents --since 7d --kind gpu_fault --limit 20
      slurm-watchdog incidents --journal ~/.slurm-watchdog/4711   of a `run --job` that has ended
    """
    found = wanted(find(asked).get(list[Incident], "/v1/incidents", job=job), clock.wall(), user, **which)
    firing = sum(map(is_wrong, found))
    whole = found if asked.json else []
    rows = [structs.asdict(each) | {"hints": [hint.as_json() for hint in hints_of(each)]} for each in whole]
    values = {"found": found, "firing": firing, "job_id": job, "state": shown_state, "named": named}
    return Answer(rows, partial(show, "incidents", **values), bool(firing))


@command(
    """
    node [NAME]
    --mended WHY  Record the repair of the node: earlier events no longer count. For operators.
    """,
    ROWS_ONLY,
    ASKS,
)
def nodes(asked: Asked, node: str | None, mended: str | None) -> Answer:
    """List suspect nodes and why. With NAME: its whole history.

    The weight of an event depends on its kind and its age (half after 28 days); a bad node fails in the same part
    again. Exit code 1 while a node (with NAME: this one) is suspect.

    \b
    Examples:
      slurm-watchdog nodes n17
      slurm-watchdog nodes n17 --mended "GPU 3 exchanged"
    """
    if mended is not None and node is None:
        raise click.UsageError("--mended needs the name of a node")
    client = find(asked)
    if mended is not None:
        event = NodeEventRequest(kind="mended", id=uuid.uuid4().hex[:12], what=mended)
        client.post(dict, "/v1/nodes/{}/events", node, body=event)
    if node is not None:
        from slurm_watchdog.cli.show import of_node

        return of_node(client.get(NodeHistory, "/v1/nodes/{}", node))
    found = client.get(NodeTable, "/v1/nodes")
    return Answer(found, partial(show, "nodes", found=found, now=clock.wall()), bool(found.suspects))


@command(
    """
    --week  The last seven days. [default]
    --from DATE  Begin, a local date.
    --to DATE  End, a local date. [default: now]
    -u, --user USER  Jobs of these users alone, names or globs with commas.
    -A, --account ACCOUNT  Jobs of these accounts alone.
    -p, --partition PARTITION  Jobs of these partitions alone.
    -j, --job J  This job alone. See also: slurm-watchdog show.
    --html F  ignored: use --json, and Grafana for plots
    --save-time TIME=60s  Time that a checkpoint takes, for the advice on its interval.
    """,
    ROWS_ONLY,
    ASKS,
    JOURNAL,
)
def report(asked: Asked, week: bool, save_time: float, **query: Any) -> Answer:
    """What the time of the jobs went to: steps that were kept, and what was lost to which cause.

    Effective is the time of the steps that were kept, by the usual time of a step: those that a restart made again
    count as lost. Operators see all jobs, others their own. docs/report.md says how each hour is counted.

    \b
    Examples:
      slurm-watchdog report --from 2026-11-01 --to 2026-12-01 --account vision
      slurm-watchdog report --json | jq .share
    """
    if week and query["from"] is not None:
        raise click.UsageError("--week and --from exclude each other")
    now = clock.wall()
    query |= {name: at if query[name] is None else query[name] for name, at in (("from", now - WEEK_S), ("to", now))}
    found = find(asked).get(Report, "/v1/report", **query)
    return Answer(found, lambda: print_report(found, save_time))


def print_report(found: Report, save_s: float) -> None:
    """One sentence, what was lost to what, the jobs that lost most, advice."""
    advised = intervals(found, save_s) if found.failures >= ENOUGH_FAILURES else ""
    show("report", found=found, before_h=dict(found.to_be_noticed_h), save_s=save_s, intervals=advised)


@command(
    """
    --for TIME  How long, at most 30d. [default: 2h]
    --kind KIND…  Incidents of this kind; repeatable.
    -j, --job J…  Incidents of this job or array alone; repeatable.
    -w, --node NODE…  Incidents that name this node and no other, or n[1-3]; repeatable.
    --reason TEXT  Shown wherever the silence is shown.
    --end ID  End a silence.
    """,
    ASKS,
)
def silence(asked: Asked, kind: tuple[str, ...], job: tuple[str, ...], node: tuple[str, ...], **given: Any) -> Answer:
    """No messages and no alerts for a while about incidents of a kind, a job or a node; several options have to match
    together. Without any of them it lists the silences in effect.

    It does not hide an incident that is also about something else, and does not change what the watchdog judges,
    shows and does: `pause` stops actions. What still fires when it ends is announced then. It outlasts restarts of
    the controller.

    \b
    Examples:
      slurm-watchdog silence --node n[1-3] --for 4h --reason "new firmware"
      slurm-watchdog silence --end 3f2a9c11
    """
    selects, for_s, reason = bool(kind or job or node), given["for"], given["reason"] or ""
    if given["end"] is None and not selects and (reason or for_s is not None):
        raise click.UsageError("name what to silence: --kind, --job or --node")
    client = find(asked)
    if given["end"] is not None:
        answer = client.post(Silences, "/v1/silences/{}/end", given["end"])
    elif selects:
        body = SilenceRequest(
            for_s=2 * HOUR_S if for_s is None else for_s, kinds=kind, jobs=job, nodes=node, reason=reason
        )
        answer = client.post(Silences, "/v1/silences", body=body)
    else:
        answer = client.get(Silences, "/v1/silences")
    return Answer(answer, partial(show, "silences", silences=answer.silences, made=answer.id, before=""))


@command("reason [REASON]", ASKS)
def pause(asked: Asked, reason: str | None) -> Answer:
    """Pause all automatic actions. Watching and alerts continue; the pause outlasts restarts of the controller.

    \b
    Example:
      slurm-watchdog pause "storage maintenance until Monday"
    """
    answer = find(asked).post(Paused, "/v1/pause", body=PauseRequest(reason=reason or ""))
    why = f" ({answer.paused.reason})" if answer.paused and answer.paused.reason else ""
    said = f"Paused{why}: nothing is acted on until `slurm-watchdog resume`. Watching and alerts continue."
    return Answer(answer, [said])


@command(ASKS)
def resume(asked: Asked) -> Answer:
    """Ends a pause: the mode of each detector decides again what is acted on.

    \b
    Example:
      slurm-watchdog resume
    """
    said = "Resumed: the mode of each detector decides again what is acted on."
    return Answer(find(asked).post(Paused, "/v1/resume"), [said])
