"""`slurm-watchdog replay`: what the watchdog would have said and done about a trace."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final

import click

from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_USAGE,
    config_option,
    controller_packages,
    json_option,
    knowledge_option,
    load_or_exit,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, count, duration, moment, sentence, table

if TYPE_CHECKING:
    from slurm_watchdog.model.actions import Decision
    from slurm_watchdog.model.incidents import Incident
    from slurm_watchdog.replay.player import Outcome

GZIP_MAGIC: Final = b"\x1f\x8b"
DATED_FROM: Final = 1e8
"""A clock that says more than three years is a date (seconds since 1970); anything less counts from the
trace's own start."""
MUCH_SKIPPED: Final = 0.1
"""Where this share of a trace was skipped, nothing found says nothing."""


@click.command(short_help="Re-run a recorded trace offline: what would have happened.")
@click.argument("traces", metavar="TRACE…", nargs=-1, required=True, type=click.Path(allow_dash=True))
@config_option("Configuration file. [default: every setting's default]")
@knowledge_option
@partial(json_option, text="For programs: one JSON document, as `incidents --json`.")
def replay(traces: tuple[str, ...], config_file: str | None, as_json: bool) -> None:
    """Reads traces (*trace v1*, plain or gzip; `-` is standard input), each by itself, and prints what would
    have been found and done. It asks neither Slurm nor a controller, and takes no action. Exit code
    0 nothing found, 1 something found, 2 a trace can't be read, or nothing was found and a tenth of its lines or
    more was skipped, such as lines whose time goes back.

    \b
    Examples:
      slurm-watchdog replay /var/tmp/today.jsonl     written by: slurm-watchdog controller --record /var/tmp/today.jsonl
      slurm-watchdog replay --json --config /etc/slurm-watchdog/config.yaml trace.jsonl
    """
    import logging

    from slurm_watchdog.config.knowledge_files import put_in_force
    from slurm_watchdog.config.schema import Config

    config = load_or_exit(config_file) if config_file else Config()
    put_in_force(config.site_texts)
    with controller_packages("Replaying"):
        from slurm_watchdog.replay.player import numbered_ids
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    new_id, found, unreadable = numbered_ids(), [], False
    for path in traces:
        outcome = _replay_one(path, config, new_id)
        unreadable = unreadable or outcome is None
        if outcome is not None:
            found.append((path, outcome))
    if as_json:
        print_json(
            [
                _json(outcome, each) | ({"trace": path} if len(traces) > 1 else {})
                for path, outcome in found
                for each in outcome.incidents
            ]
        )
    else:
        for path, outcome in found:
            _print(path, outcome)
    for path, outcome in found:
        if _is_blind(outcome):
            name = clean("standard input" if path == "-" else path)
            click.echo(f"{name}: too much was skipped to say that nothing is wrong.", err=True)
            unreadable = True
    fired = any(_has_fired(outcome) for _, outcome in found)
    sys.exit(EXIT_USAGE if unreadable else EXIT_FOUND if fired else EXIT_FINE)


def _has_fired(outcome: Outcome) -> bool:
    return any(each.fired_at is not None for each in outcome.incidents)


def _is_blind(outcome: Outcome) -> bool:
    """Whether so much of a trace was not judged that nothing found says nothing."""
    return not _has_fired(outcome) and outcome.tally.skipped_lines >= MUCH_SKIPPED * outcome.tally.lines


def _replay_one(path: str, config: Any, new_id: Any) -> Outcome | None:
    """The outcome of one trace; None, after saying why, if it can't be read or holds no trace."""
    from slurm_watchdog.replay.player import replay as play

    name = "standard input" if path == "-" else path
    try:
        with _opened(path) as file:
            outcome = play(file.read, config, new_id)
    except Exception as error:  # zlib.error is no OSError, and zlib may be missing from a Python
        packed = isinstance(error, EOFError | gzip.BadGzipFile) or type(error).__module__ == "zlib"
        if not packed and not isinstance(error, OSError | ValueError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if packed:
            reason = f"broken gzip data ({reason}); to replay what is whole of it: zcat FILE | slurm-watchdog replay -"
        click.echo(f"{clean(name)} can't be read: {clean(reason)}", err=True)
        return None
    tally = outcome.tally
    for text in tally.sentences():
        click.echo(f"{clean(name)}: {clean(text)}", err=True)
    if not tally.used:
        click.echo(f"{clean(name)} {_why_unused(tally.lines)}", err=True)
        return None
    if tally.skipped:
        click.echo(f"{clean(name)}: {count(tally.skipped_lines, 'line')} of {tally.lines} skipped in all.", err=True)
    return outcome


def _why_unused(lines: int) -> str:
    """What is wrong with a file of which no line was used, and what a trace is."""
    what = "holds no line of a trace" if lines else "is empty"
    return f"{what}; a trace has one JSON object a line, in UTF-8, as `controller --record FILE` writes it"


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """The bytes of a trace, unpacked if they are packed. Raises OSError, EOFError."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        if file.peek(2)[:2] == GZIP_MAGIC:
            with gzip.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield file


def _json(outcome: Outcome, incident: Incident) -> dict[str, Any]:
    from slurm_watchdog.controller.api.json_views import incident_json

    return incident_json(incident, outcome.decisions[incident.id], ())


def _print(path: str, outcome: Outcome) -> None:
    tally = outcome.tally
    lines = count(tally.used, "line") if not tally.skipped else f"{tally.used} of {count(tally.lines, 'line')} used"
    if not outcome.incidents:
        sentence(f"{path}: {lines}, nothing found{' in those' if tally.skipped else ''}.")
        return
    sentence(f"{path}: {lines}, {count(len(outcome.incidents), 'incident')}.")
    table(
        ("ID", "STATE", "KIND", "JOB", "OPENED", "FOUND AFTER", "WHO", "WOULD HAVE BEEN DONE", "SUMMARY"),
        [_row(each, outcome.decisions[each.id]) for each in outcome.incidents],
    )


def _row(incident: Incident, decisions: tuple[Decision, ...]) -> tuple[str, ...]:
    from slurm_watchdog.cli.incidents import named

    return (
        incident.id,
        incident.state,
        incident.kind,
        incident.job_ids[0] if incident.job_ids else "-",
        moment(incident.opened_at) if incident.opened_at >= DATED_FROM else f"{incident.opened_at:g} s",
        duration(incident.detected_after_s),
        named(incident.culprits),
        _done(incident, decisions),
        incident.summary,
    )


def _done(incident: Incident, decisions: tuple[Decision, ...]) -> str:
    if incident.inhibited_by:
        return f"nothing: {incident.inhibited_by} explains it"
    if not decisions:
        return "-" if incident.fired_at is None else "alert only"
    last = decisions[-1]
    if last.action == "none":
        return "alert only"
    without = f" without {', '.join(last.exclude)}" if last.exclude else ""
    if last.verdict == "suppressed":
        return f"nothing, because of {last.by}: {last.reason}"
    return f"{last.action}{without}"
