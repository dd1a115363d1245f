"""`slurm-watchdog silence`: who is not notified of what."""

from __future__ import annotations

import click
from click.core import ParameterSource

from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import expand_nodes, seconds_of
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.model.documents import SilenceRequest, Silences

DEFAULT_FOR = "2h"


@click.command()
@click.option("--for", "for_s", default=DEFAULT_FOR, show_default=True, metavar="TIME", callback=seconds_of,
              help="How long, at most 30d.")  # fmt: skip
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Incidents of this kind; may be repeated.")
@click.option("--job", "jobs", multiple=True, metavar="J",
              help="Incidents of this job alone, or of this array; may be repeated.")  # fmt: skip
@click.option("--node", "nodes", multiple=True, metavar="NODE", callback=expand_nodes,
              help="Incidents that name this node and no other, or n[1-3]; may be repeated.")  # fmt: skip
@click.option("--reason", default="", metavar="TEXT", help="Shown wherever the silence is shown.")
@click.option("--end", "end_id", metavar="ID", help="End a silence.")
@asks_controller()
def silence(
    asked: Asked,
    for_s: float,
    kinds: tuple[str, ...],
    jobs: tuple[str, ...],
    nodes: list[str],
    reason: str,
    end_id: str | None,
) -> None:
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
    selects = bool(kinds or jobs or nodes)
    given = click.get_current_context().get_parameter_source
    if end_id is None and not selects and (reason or given("for_s") is ParameterSource.COMMANDLINE):
        raise click.UsageError("name what to silence: --kind, --job or --node")
    client = asked.client()
    if end_id is not None:
        answer = client.post(Silences, "/v1/silences/{}/end", end_id)
    elif selects:
        body = SilenceRequest(kinds=kinds, jobs=jobs, nodes=tuple(nodes), for_s=for_s, reason=reason)
        answer = client.post(Silences, "/v1/silences", body=body)
    else:
        answer = client.get(Silences, "/v1/silences")
    asked.answer(answer, lambda: show("silences", silences=answer.silences, made=answer.id, before=""))
