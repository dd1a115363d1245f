"""`slurm-watchdog incidents`: what happened, one line each."""

from __future__ import annotations

import json
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from slurm_watchdog.base import clock
from slurm_watchdog.cli.find_controller import choose_or_journal
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    check_job,
    journal_option,
    operator_options,
    print_json,
    reported_errors,
    seconds_of,
)
from slurm_watchdog.cli.terminal import count, duration, moment, sentence, table
from slurm_watchdog.model.documents import Incident
from slurm_watchdog.model.incidents import Culprit

if TYPE_CHECKING:
    from slurm_watchdog.knowledge.remediation_hints import Hint

STYLES = {"firing": "bold red", "pending": "yellow", "resolved": "dim", "explained": "dim"}
HEADINGS = ("ID", "STATE", "KIND", "JOB", "OPENED", "FOUND AFTER", "WHO", "DECISION", "SUMMARY")
COLUMN_PRIORITY = [
    HEADINGS.index(name)
    for name in ("ID", "SUMMARY", "STATE", "JOB", "OPENED", "KIND", "WHO", "DECISION", "FOUND AFTER")
]
"""The order in which a narrow terminal leaves room for them."""


def _known_kinds(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds, if all are: a misspelt one has no incidents, which looks like health. Raises click.BadParameter."""
    if value:
        from difflib import get_close_matches

        from slurm_watchdog.detect.registry import KINDS

        for each in value:
            if each not in KINDS:
                near = get_close_matches(each, KINDS, n=1)
                meant = f"; did you mean {near[0]}?" if near else f"; known are: {', '.join(KINDS)}"
                raise click.BadParameter(f"{each!r} is no kind of incident{meant}")
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
@journal_option
@operator_options
def incidents(  # noqa: PLR0913 - click hands each option over by itself
    job_id: str | None,
    kind: tuple[str, ...],
    state: tuple[str, ...],
    user: str | None,
    since_s: float | None,
    limit: int | None,
    journal: str | None,
    socket_path: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """What happened: pending, firing and resolved incidents. Exit code 1 while one of those listed is firing.

    \b
    Examples:
      slurm-watchdog incidents
      slurm-watchdog incidents --job 4711 --json
      slurm-watchdog incidents --since 7d --kind gpu_fault --limit 20
      slurm-watchdog incidents --journal ~/.slurm-watchdog/4711   of an `attach` that has ended
    """
    wanted = IncidentFilter(kind, state, _uid(user), since_s, limit)
    with reported_errors(as_json):
        client = choose_or_journal(socket_path, config_file, journal)
        both = client.incidents(job_id)
    chosen = wanted.apply(list(zip(*both, strict=True)), clock.wall())
    found, document = [each for each, _ in chosen], [row for _, row in chosen]
    firing = [each for each in found if is_wrong(each)]
    if as_json:
        rows = [
            {**row, "hints": [hint.as_json() for hint in hints_of(each)]}
            for each, row in zip(found, document, strict=True)
        ]
        print_json(rows)
    else:
        _print(found, len(firing), job_id)
    sys.exit(EXIT_FOUND if firing else EXIT_FINE)


@dataclass(frozen=True)
class IncidentFilter:
    """Which incidents are asked for; empty and None: all."""

    kinds: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    owner_uid: int | None = None
    since_s: float | None = None
    limit: int | None = None

    def apply(self, rows: list[tuple[Incident, Any]], now: float) -> list[tuple[Incident, Any]]:
        """Those of `rows` (incident, its document) that are wanted, in their order; `now` is a date."""
        found = [row for row in rows if self._is_wanted(row[0], now)]
        if self.limit is None or len(found) <= self.limit:
            return found
        newest = sorted(found, key=lambda row: row[0].opened_at or 0.0)[-self.limit :]
        kept = {id(row) for row in newest}
        return [row for row in found if id(row) in kept]

    def _is_wanted(self, each: Incident, now: float) -> bool:
        old = self.since_s is not None and (each.opened_at is None or each.opened_at < now - self.since_s)
        of_kind = not self.kinds or each.kind in self.kinds
        of_owner = self.owner_uid is None or self.owner_uid in each.owner_uids
        return of_kind and of_owner and (not self.states or shown_state(each) in self.states) and not old


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


def _print(found: list[Incident], firing: int, job_id: str | None) -> None:
    of_job = f" of job {job_id}" if job_id else ""
    if not found:
        sentence(f"No incident{of_job} is known.")
        return
    sentence(f"{count(len(found), 'incident')}{of_job}, {firing or 'none'} firing.")
    table(
        HEADINGS,
        [_row(each) for each in found],
        [STYLES.get(shown_state(each), "") for each in found],
        wanted=COLUMN_PRIORITY,
        wraps=HEADINGS.index("SUMMARY"),
    )
    sentence("More: slurm-watchdog explain ID")


def shown_state(each: Incident) -> str:
    """Its state; `explained` if another incident that is open explains it, so that it is neither announced
    nor acted on."""
    return "explained" if each.inhibited_by is not None and each.state != "resolved" else each.state


def _row(each: Incident) -> tuple[str, ...]:
    last = each.decisions[-1] if each.decisions else None
    decided = "alert only" if last and last.action == "none" else f"{last.action} {last.verdict}" if last else "-"
    return (
        each.id,
        shown_state(each),
        each.kind,
        each.job_id or "-",
        moment(each.opened_at) if each.opened_at is not None else "-",
        duration(each.detected_after_s),
        named(each.culprits),
        decided + (f": {last.outcome}" if last and last.outcome else ""),
        each.summary,
    )


def named(culprits: Sequence[Culprit]) -> str:
    """The first of them, and how many more there are."""
    more = f" +{len(culprits) - 1}" if len(culprits) > 1 else ""
    return culprit_text(culprits[0]) + more if culprits else "nobody"


def culprit_text(culprit: Culprit) -> str:
    """`rank 2 (pid 4711 on n3)`, or what of it is known."""
    parts = [f"rank {culprit.rank}"] if culprit.rank is not None else []
    if culprit.pid is not None:
        parts.append(f"pid {culprit.pid}")
    if culprit.node:
        parts.append(f"on {culprit.node}")
    if culprit.gpu_uuid:
        parts.append(culprit.gpu_uuid)
    if not parts and culprit.mount:
        parts.append(culprit.mount)
    return " ".join(parts) or "unknown"


def hints_of(incident: Incident) -> tuple[Hint, ...]:
    """What it usually is and what to try: advice, read from its kind and from the lines that it quotes."""
    from slurm_watchdog.detect.registry import spec_of
    from slurm_watchdog.diagnose.incident_hints import incident_hints

    facts = [as_text(fact) for fact in incident.evidence]
    return incident_hints(incident.kind, incident.summary, facts, spec_of(incident.kind).hint)


def as_text(document: object) -> str:
    """A piece of evidence for people: words as they are, anything else as JSON."""
    return document if isinstance(document, str) else json.dumps(document, indent=2, ensure_ascii=False)
