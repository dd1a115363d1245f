"""What `run` prints: the greeting, two lines an incident, the summary."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterable, Sequence

from slurm_watchdog.base.redact import mask_text
from slurm_watchdog.base.text import duration, one_line, plural
from slurm_watchdog.config.schema import Config
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.notify.dispatcher import Notifier, Worker
from slurm_watchdog.notify.notification import Topic, message_of
from slurm_watchdog.notify.programs import Numbered, Programs
from slurm_watchdog.standalone.own_runs import PASSWORD_FILE, SOCKET, OwnRun

PAGE_LISTEN = "127.0.0.1:9767"  # Of `run`, where that is free.
TOLD = frozenset({Topic.OPENED, Topic.DECIDED, Topic.ENDED, Topic.RESOLVED})
SAID_TWICE = ("slurm_watchdog.controller.incident_news", "slurm_watchdog.controller.actions.manager")
"""Loggers of what these lines say, too."""

log = logging.getLogger(__name__)


def command_line(words: Sequence[str]) -> str:
    """A command for one line: without secrets, and cut."""
    return one_line(mask_text(shlex.join(words)), 120)


def print_lines(lines: Iterable[str]) -> None:
    """To standard error: standard output is the command's own. A terminal that is gone ends nothing."""
    try:
        sys.stderr.write("".join(f"{mask_text(one_line(line, 4096))}\n" for line in lines))
        sys.stderr.flush()
    except OSError:
        return


def tell(notifier: Notifier) -> None:
    """Adds two lines an incident to what a person sees: what is wrong, and what came of it, or why nothing is done."""
    told = set[str]()

    async def post(notices: Sequence[Numbered]) -> None:
        for _, notice in notices:
            incident, decision = notice.incident, notice.decision
            will_end = notice.topic is Topic.DECIDED and decision is not None and decision.acts
            if notice.topic is Topic.OPENED:
                log.warning("%s", notice.headline)
            elif notice.topic is Topic.ENDED or not (will_end or incident.id in told):
                told.add(incident.id)
                log.warning("%s", message_of(notice).sentence)

    for name in SAID_TWICE:
        logging.getLogger(name).setLevel(logging.ERROR)
    notifier.workers.append(Worker(notifier, Programs("terminal", post, TOLD)))


def greeting(run: OwnRun, config: Config, *, job_id: str = "") -> list[str]:
    """Where this run is looked at; `job_id` is the number that it has in the place of a job's."""
    mode, page = config.mode, config.controller.page_listen
    directory = shlex.quote(run.directory)
    acts = "restarts it when it hangs" if mode == "act" else "only reports a hang"
    acts += "" if run.command == "attach" else " or fails" if mode == "act" else ", restarts it when it fails"
    password = f"any user name, the password is in {run.directory}/{PASSWORD_FILE}"
    number = f"  job        {job_id} is its number in messages, and in: slurm-watchdog restart {job_id}"
    return [
        f"slurm-watchdog run: watching {run.what} ({acts})",
        *([number] if job_id else []),
        f"  page       {f'http://{page} ({password})' if page else 'disabled'}",
        f"  directory  {run.directory} (logs, journal)",
        f"  socket     {run.directory}/{SOCKET}",
        "  status     slurm-watchdog status --watch",
        f"  history    slurm-watchdog incidents --journal {directory}",
    ]


def summary(run: OwnRun, journal: Journal, *, how: str, took_s: float, restarts: int) -> list[str]:
    """What happened: restarts, incidents, steps lost. `how` it ended, such as "ended with exit code 0"."""
    try:
        incidents = [each for each in journal.incidents() if each.inhibited_by is None]
        actions = [action for each in incidents for action in journal.actions(each.id)]
    except JournalError as error:
        return [f"slurm-watchdog run: {run.what} {how} after {duration(took_s)}. {error}"]
    wrong = [each for each in incidents if each.kind != IncidentKind.OPERATOR_RESTART and each.fired_at is not None]
    ends = [action.end for action in actions if action.end is not None]
    least = sum(end.steps_lost or 0 for end in ends)
    most = sum(end.steps_lost_at_most or end.steps_lost or 0 for end in ends)
    counts = [
        plural(restarts, "restart"),
        plural(len(wrong), "incident"),
        *([f"{f'{least:,} to ' if most > least else ''}{plural(most, 'step')} lost"] if most else []),
    ]
    return [
        f"slurm-watchdog run: {run.what} {how} after {duration(took_s)}: {', '.join(counts)}",
        f"  journal    {run.directory}/journal.sqlite",
        f"  history    slurm-watchdog incidents --journal {shlex.quote(run.directory)}",
    ]
