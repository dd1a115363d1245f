"""`slurm-watchdog incidents`: what happened, one line each."""

from __future__ import annotations

import pwd
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec import structs

from slurm_watchdog.base import clock
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, check_job, seconds_of
from slurm_watchdog.cli.terminal import as_text, show, who
from slurm_watchdog.model.documents import Incident
from slurm_watchdog.model.incidents import Culprit

if TYPE_CHECKING:
    from slurm_watchdog.knowledge.remediation_hints import Hint


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
@click.option(
    "--job",
    "job_id",
    metavar="J",
    callback=check_job,
    help="Only incidents of this job.",
)
@click.option(
    "--kind",
    metavar="KIND",
    multiple=True,
    callback=_known_kinds,
    help="Only this kind (collective_hang, …); may be repeated.",
)
@click.option(
    "--state",
    type=click.Choice(["pending", "firing", "resolved", "explained"]),
    multiple=True,
    help="Only incidents in this state; may be repeated.",
)
@click.option("--user", metavar="USER", help="Only incidents of this user's jobs: a name or a uid.")
@click.option(
    "--since", "since_s", metavar="TIME", callback=seconds_of, help="Only those that began in the last TIME (2h, 7d)."
)
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="At most N, the newest.")
@asks_controller(or_journal=True)
def incidents(
    asked: Asked,
    job_id: str | None,
    kind: tuple[str, ...],
    state: tuple[str, ...],
    user: str | None,
    since_s: float | None,
    limit: int | None,
) -> None:
    """What happened: pending, firing and resolved incidents. Exit code 1 while one of those listed is firing.

    \b
    Examples:
      slurm-watchdog incidents
      slurm-watchdog incidents --job 4711 --json
      slurm-watchdog incidents --since 7d --kind gpu_fault --limit 20
      slurm-watchdog incidents --journal ~/.slurm-watchdog/4711   of an `run --job` that has ended
    """
    owner = _uid(user)
    known = asked.client().get(list[Incident], "/v1/incidents", job=job_id)
    found = wanted(known, clock.wall(), kind, state, owner, since_s, limit)
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


def hints_of(incident: Incident) -> tuple[Hint, ...]:
    """What it usually is and what to try: advice, read from its kind and from the lines that it quotes."""
    from slurm_watchdog.detect.registry import spec_of
    from slurm_watchdog.diagnose.incident_hints import incident_hints

    facts = [as_text(fact) for fact in incident.evidence]
    return incident_hints(incident.kind, incident.summary, facts, spec_of(incident.kind).hint)
