"""What is asked of the controller in one request: `incidents`, `nodes`, `report`, `silence`, `pause` and `resume`."""

from __future__ import annotations

import pwd
import sys
import uuid
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import click
from click.core import ParameterSource
from msgspec import structs

from slurm_watchdog.base import clock
from slurm_watchdog.base.python310 import read_iso_time
from slurm_watchdog.base.text import plural
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    JOB,
    NODE,
    PARTITION,
    USER,
    check_job,
    expand_nodes,
    flag,
    parsed,
    seconds_of,
    table_option,
    value,
)
from slurm_watchdog.cli.terminal import duration, sentence, show, who
from slurm_watchdog.model.documents import Incident, Paused, PauseRequest, SilenceRequest, Silences
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.node_events import NodeEventRequest, NodeHistory, NodeTable
from slurm_watchdog.model.run_record import Report

WEEK_S = 7 * 86400.0
HOUR_S = 3600.0
ENOUGH_FAILURES = 10  # the mean of fewer is known to a third at best: 1 / sqrt(n)
SHOWN_SIZES = 4  # The largest numbers of nodes, for which an interval between checkpoints is advised.


def _known_kinds(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds, if all are: a misspelt one has no incidents, which looks like health. Raises click.BadParameter."""
    if value:
        from slurm_watchdog.config.converting import did_you_mean
        from slurm_watchdog.detect.registry import KINDS

        for each in value:
            if each not in KINDS:
                raise click.BadParameter(f"{each!r} is not a kind of incident{did_you_mean(each, tuple(KINDS))}")
    return value


@click.command()
@value(*JOB, "job_id", metavar="J", callback=check_job, help="Only incidents of this job.")
@value("--kind", "kinds", metavar="KIND", multiple=True, callback=_known_kinds, help="Only this kind; repeatable.")
@click.option(
    "--state",
    "states",
    type=click.Choice(["pending", "firing", "resolved", "explained"]),
    multiple=True,
    help="Only incidents in this state; repeatable.",
)
@value(*USER, metavar="USER", help="Only incidents of this user's jobs: a name or a uid.")
@value("--since", "since_s", metavar="TIME", callback=seconds_of, help="Only those of the last 2h, 7d, …")
@value("--limit", metavar="N", type=click.IntRange(min=1), help="At most N, the newest.")
@table_option
@asks_controller(or_journal=True)
def incidents(asked: Asked, job_id: str | None, **which: Any) -> None:
    """What happened: pending, firing and resolved incidents. Exit code 1 while one of those listed is firing.

    \b
    Examples:
      slurm-watchdog incidents
      slurm-watchdog incidents --job 4711 --json
      slurm-watchdog incidents --since 7d --kind gpu_fault --limit 20
      slurm-watchdog incidents --journal ~/.slurm-watchdog/4711   of an `run --job` that has ended
    """
    from slurm_watchdog.cli.show import hints_of

    which["owner_uid"] = _uid(which.pop("user"))
    known = asked.client().get(list[Incident], "/v1/incidents", job=job_id)
    found = wanted(known, clock.wall(), **which)
    firing = sum(map(is_wrong, found))
    whole = found if asked.as_json else []
    rows = [structs.asdict(each) | {"hints": [hint.as_json() for hint in hints_of(each)]} for each in whole]
    values = {"found": found, "firing": firing, "job_id": job_id, "state": shown_state}
    asked.answer(rows, lambda: show("incidents", named=named, **values))
    sys.exit(EXIT_FOUND if firing else EXIT_FINE)


def wanted(
    incidents: Sequence[Incident],
    now: float,
    kinds: Sequence[str] = (),
    states: Sequence[str] = (),
    owner_uid: int | None = None,
    since_s: float | None = None,
    limit: int | None = None,
) -> list[Incident]:
    """Those that are asked for, in their order; empty and None: all."""
    found = [
        each
        for each in incidents
        if (not kinds or each.kind in kinds)
        and (not states or shown_state(each) in states)
        and (owner_uid is None or owner_uid in each.owner_uids)
        and (since_s is None or (each.opened_at is not None and each.opened_at >= now - since_s))
    ]
    newest = sorted(range(len(found)), key=lambda at: found[at].opened_at or 0.0)[-(limit or len(found)) :]
    return [found[at] for at in sorted(newest)]


def _uid(user: str | None) -> int | None:
    """The uid of a user who is given by name or number. Raises click.BadParameter for a name that this
    machine does not know."""
    if user is None or user.isdecimal():
        return None if user is None else int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise click.BadParameter(
            f"no user {user!r} on this machine; give the uid: --user 1000", param_hint="--user"
        ) from None


def is_wrong(each: Incident) -> bool:
    """Whether it fires, no other incident explains it, and it is no person's own restart: what `status` and
    the page count."""
    return each.state == "firing" and each.inhibited_by is None and each.kind != "operator_restart"


def shown_state(each: Incident) -> str:
    """Its state; `explained` if another incident that is open explains it, so that it is neither announced
    nor acted on."""
    return "explained" if each.inhibited_by is not None and each.state != "resolved" else each.state


def named(culprits: Sequence[Culprit]) -> str:
    """The first of them, and how many more there are."""
    more = f" +{len(culprits) - 1}" if len(culprits) > 1 else ""
    return who(culprits[0]) + more if culprits else "-"


@click.command()
@click.argument("node", required=False)
@value("--mended", metavar="WHY", help="Record the repair of NODE: earlier events no longer count. For operators.")
@table_option
@asks_controller()
def nodes(asked: Asked, node: str | None, mended: str | None) -> None:
    """List suspect nodes and why. With NODE: its whole history.

    The weight of an event depends on its kind and its age (half after 28 days); a bad node fails in the same part
    again. Exit code 1 while a node (with NODE: this one) is suspect.

    \b
    Examples:
      slurm-watchdog nodes
      slurm-watchdog nodes n17
      slurm-watchdog nodes n17 --mended "GPU 3 exchanged"
    """
    if mended is not None and node is None:
        raise click.UsageError("--mended needs a NODE")
    client = asked.client()
    if node is not None and mended is not None:
        event = NodeEventRequest(kind="mended", id=uuid.uuid4().hex[:12], what=mended)
        client.post(dict, "/v1/nodes/{}/events", node, body=event)
    if node is not None:
        from slurm_watchdog.cli.show import print_node

        print_node(asked, client.get(NodeHistory, "/v1/nodes/{}", node))
    found = client.get(NodeTable, "/v1/nodes")
    asked.answer(found, lambda: show("nodes", found=found, now=clock.wall()))
    sys.exit(EXIT_FOUND if found.suspects else EXIT_FINE)


date_of = parsed(
    lambda value: read_iso_time(value).astimezone().timestamp(), "is not a date such as 2026-11-01 or 2026-11-01T06:00"
)


@click.command()
@flag("--week", help="The last seven days. [default]")
@value("--from", "since", callback=date_of, metavar="DATE", help="Begin, a local date.")
@value("--to", "until", callback=date_of, metavar="DATE", help="End, a local date. [default: now]")
@value(*USER, metavar="USER", help="Jobs of these users alone, names or globs with commas.")
@value("-A", "--account", metavar="ACCOUNT", help="Jobs of these accounts alone.")
@value(*PARTITION, metavar="PARTITION", help="Jobs of these partitions alone.")
@value(*JOB, metavar="J", callback=check_job, help="This job alone. See also: slurm-watchdog show.")
@value(
    "--save-time",
    "save_s",
    default="60s",
    metavar="TIME",
    callback=seconds_of,
    help="Time that a checkpoint takes, for the advice on its interval.",
)
@table_option
@asks_controller(or_journal=True)
def report(
    asked: Asked, week: bool, since: float | None, until: float | None, save_s: float, **query: str | None
) -> None:
    """What the time of the jobs went to: steps that were kept, and what was lost to which cause.

    Effective is the time of the steps that were kept, by the usual time of a step: those that a restart made again
    count as lost. Operators see all jobs, others their own. docs/report.md says how each hour is counted.

    \b
    Examples:
      slurm-watchdog report
      slurm-watchdog report --from 2026-11-01 --to 2026-12-01 --account vision
      slurm-watchdog report --json | jq .share
    """
    if week and since is not None:
        raise click.UsageError("--week and --from exclude each other")
    now = clock.wall()
    query |= {"from": str(now - WEEK_S if since is None else since), "to": str(now if until is None else until)}
    found = asked.client().get(Report, "/v1/report", **query)
    asked.answer(found, lambda: print_report(found, save_s))


def print_report(found: Report, save_s: float) -> None:
    """One sentence, what was lost to what, the jobs that lost most, advice."""
    advised = intervals(found, save_s) if found.failures >= ENOUGH_FAILURES else ""
    show("report", found=found, before_h=dict(found.to_be_noticed_h), save_s=save_s, intervals=advised)


def intervals(found: Report, save_s: float) -> str:
    """How often to save: on each size of job, with the formula's name."""
    from slurm_watchdog.analysis.lost_time import checkpoint_interval

    between_h = found.node_hours_between_failures or 0.0
    sizes = sorted({job.nodes for job in found.jobs})[-SHOWN_SIZES:]
    advised = [(checkpoint_interval(between_h * HOUR_S / size, save_s), size) for size in sizes]
    parts = []
    for formula, same in groupby(advised, key=lambda each: each[0].formula):
        of_sizes = (f"{duration(interval.seconds)} on {plural(size, 'node')}" for interval, size in same)
        parts.append(f"{', '.join(of_sizes)} ({formula})")
    return ", ".join(parts)


@click.command()
@value("--for", "for_s", default="2h", metavar="TIME", callback=seconds_of, help="How long, at most 30d.")
@value("--kind", "kinds", multiple=True, metavar="KIND", help="Incidents of this kind; repeatable.")
@value(*JOB, "jobs", multiple=True, metavar="J", help="Incidents of this job or array alone; repeatable.")
@value(
    *NODE,
    "nodes",
    multiple=True,
    metavar="NODE",
    callback=expand_nodes,
    help="Incidents that name this node and no other, or n[1-3]; repeatable.",
)
@value("--reason", default="", metavar="TEXT", help="Shown wherever the silence is shown.")
@value("--end", "end_id", metavar="ID", help="End a silence.")
@asks_controller()
def silence(asked: Asked, end_id: str | None, **request: Any) -> None:
    """No messages and no alerts for a while about incidents of a kind, a job or a node; several options have to match
    together. Without any of them it lists the silences in effect.

    It does not hide an incident that is also about something else, and does not change what the watchdog judges,
    shows and does: `pause` stops actions. What still fires when it ends is announced then. It outlasts restarts of
    the controller.

    \b
    Examples:
      slurm-watchdog silence --node n[1-3] --for 4h --reason "new firmware"
      slurm-watchdog silence --kind slow_job --job 4711
      slurm-watchdog silence
      slurm-watchdog silence --end 3f2a9c11
    """
    body = SilenceRequest(**request | {"nodes": tuple(request["nodes"])})
    selects = bool(body.kinds or body.jobs or body.nodes)
    given = click.get_current_context().get_parameter_source
    if end_id is None and not selects and (body.reason or given("for_s") is ParameterSource.COMMANDLINE):
        raise click.UsageError("name what to silence: --kind, --job or --node")
    client = asked.client()
    if end_id is not None:
        answer = client.post(Silences, "/v1/silences/{}/end", end_id)
    elif selects:
        answer = client.post(Silences, "/v1/silences", body=body)
    else:
        answer = client.get(Silences, "/v1/silences")
    asked.answer(answer, lambda: show("silences", silences=answer.silences, made=answer.id, before=""))


@click.command()
@click.argument("reason", default="", metavar="[REASON]")
@asks_controller()
def pause(asked: Asked, reason: str) -> None:
    """Pause all automatic actions. Watching and alerts continue; the pause outlasts restarts of the controller.

    \b
    Example:
      slurm-watchdog pause "storage maintenance until Monday"
    """
    answer = asked.client().post(Paused, "/v1/pause", body=PauseRequest(reason=reason))
    why = f" ({answer.paused.reason})" if answer.paused and answer.paused.reason else ""
    said = f"Paused{why}: nothing is acted on until `slurm-watchdog resume`. Watching and alerts continue."
    asked.answer(answer, lambda: sentence(said))


@click.command()
@asks_controller()
def resume(asked: Asked) -> None:
    """Ends a pause: the mode of each detector decides again what is acted on.

    \b
    Example:
      slurm-watchdog resume
    """
    said = "Resumed: the mode of each detector decides again what is acted on."
    asked.answer(asked.client().post(Paused, "/v1/resume"), lambda: sentence(said))
