"""One request to several jobs, followed to its end: what became of each, those first that were not saved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import click
from msgspec import structs

from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.find_controller import Asked
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, EXIT_UNKNOWN, fail
from slurm_watchdog.cli.terminal import drawn_columns, print_lines, render, show
from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.documents import (
    MAX_AT_ONCE,
    MAX_FOLLOWED,
    ActionRun,
    Answered,
    FollowRequest,
    SaveRequest,
    SelectedJob,
)

SAVED: Final = ("wait_checkpoint", "done")
LOOK_EVERY_S: Final = 1.0
RECONNECT_LIMIT_S: Final = 120.0
"""Wait for a controller that is itself restarted; it then continues what it has begun."""
UNSEEN_ANSWERS: Final = 3
"""Answers in a row without an action, after which it is not waited for: an older controller hides it."""
ORDER: Final = ("cannot be asked", "failed", "under way", "not needed", "done")
ENDS: Final = {"ok": "done", "needless": "not needed", "failed": "failed"}


def named_jobs(client: Client, job_ids: Sequence[str]) -> list[SelectedJob]:
    """These jobs; all that run if none is named. Raises ClientError."""
    running = {job.job_id: job for job in client.get(list[SelectedJob], "/v1/requests/jobs")}
    if not job_ids:
        return list(running.values())
    gone = "it does not run, or is not watched"
    return [running.get(each) or SelectedJob(job_id=each, why_not=gone) for each in dict.fromkeys(job_ids)]


@dataclass
class Row:
    """One job, and what became of it."""

    job: SelectedJob
    state: str = "under way"
    why: str = ""
    incident_id: str = ""
    action: ActionRun | None = None
    """As it was seen last."""
    unseen: int = 0
    """Answers in a row that did not show it."""

    def __post_init__(self) -> None:
        if self.job.why_not:
            self.state, self.why = "cannot be asked", self.job.why_not

    @property
    def has_saved(self) -> bool:
        """A complete checkpoint has come since it was asked: it may end by itself still."""
        return self.action is not None and any(
            (each.operation, each.outcome) == SAVED for each in self.action.operations
        )

    @property
    def is_followed(self) -> bool:
        """Whether its action may still be seen to end."""
        return self.state == "under way" and bool(self.incident_id) and self.unseen < UNSEEN_ANSWERS

    def take(self, answered: Answered) -> None:
        """What the controller says to the request."""
        self.incident_id = answered.incident_id or ""
        if answered.verdict != "allowed":
            self.state, self.why = "cannot be asked", answered.reason

    def follow(self, action: ActionRun | None) -> None:
        """How far the action is; None: the controller does not show it."""
        if action is None:
            self.unseen += 1
            self.why = self.why if self.is_followed else "its progress is for its owner and operators to see"
            return
        self.action, self.unseen = action, 0
        if action.end is not None:
            self.state, self.why = ENDS.get(action.end.outcome, "failed"), action.end.detail or ""
        elif action.waiting is not None:
            self.why = action.waiting.what
        elif action.operations:
            self.why = action.operations[-1].operation.replace("_", " ")


def ask_many(client: Client, jobs: Sequence[SelectedJob], body: SaveRequest, asked: Asked, *, wait: bool) -> int:
    """Asks for the same of all jobs that can be asked, follows it to its end unless not to `wait`, and prints what
    became of each. Returns the exit code: 1 if it was not done to all, or no job was selected. Raises ClientError."""
    rows = {job.job_id: Row(job) for job in jobs}
    able = [job_id for job_id, row in rows.items() if row.state == "under way"]
    for start in range(0, len(able), MAX_AT_ONCE):
        some = structs.replace(body, job_ids=tuple(able[start : start + MAX_AT_ONCE]))
        for answered in client.post(list[Answered], "/v1/requests", body=some):
            rows[answered.job_id].take(answered)
    if wait:
        follow(client, list(rows.values()), asked, lambda: _news(list(rows.values())))
    print_rows(list(rows.values()), asked)
    fine = {"done", "not needed"} | ({"under way"} if body.wish is Wish.RESTART and not wait else set())
    good = bool(rows) and all(row.state in fine for row in rows.values())
    return EXIT_FINE if good else EXIT_FOUND


def follow(client: Client, rows: Sequence[Row], asked: Asked, news: Callable[[], list[str]]) -> None:
    """Until the action of each has ended; prints every line of `news` once."""
    answered_at, printed = clock.monotonic(), set[str]()
    try:
        while left := {row.incident_id: row for row in rows if row.is_followed}:
            try:
                found = _progress(client, tuple(left))
            except ClientError as error:
                if error.is_final or clock.monotonic() - answered_at > RECONNECT_LIMIT_S:
                    fail(error, asked.as_json, EXIT_UNKNOWN)
            else:
                answered_at = clock.monotonic()
                for incident_id, row in left.items():
                    row.follow(found.get(incident_id))
                if not asked.as_json:
                    lines = [line for line in news() if line not in printed]
                    printed.update(lines)
                    print_lines(lines)
                    sys.stdout.flush()
            if any(row.is_followed for row in rows):
                wait_readable((), LOOK_EVERY_S)
    except KeyboardInterrupt:
        click.echo("No longer following; what was begun continues: slurm-watchdog status", err=True)


def _progress(client: Client, incident_ids: tuple[str, ...]) -> dict[str, ActionRun]:
    found: dict[str, ActionRun] = {}
    for start in range(0, len(incident_ids), MAX_FOLLOWED):
        some = FollowRequest(incident_ids=incident_ids[start : start + MAX_FOLLOWED])
        found |= client.post(dict[str, ActionRun], "/v1/requests/progress", body=some)
    return found


def _news(rows: Sequence[Row]) -> list[str]:
    """A line for each job whose action has ended, and how many have not."""
    ended = [row for row in rows if row.action is not None and row.action.end is not None]
    waiting = [row for row in rows if row.state == "under way"]
    saved = sum(row.has_saved for row in waiting)
    return render("asked", drawn_columns(), ended=ended, jobs=len(rows), waits=len(waiting), saved=saved)


def print_rows(rows: Sequence[Row], asked: Asked) -> None:
    """The table, those first that need a decision of yours."""
    ranked = sorted(rows, key=lambda row: ORDER.index(row.state))
    names = ("job_id", "user", "nodes", "step")
    jobs = [
        {name: getattr(row.job, name) for name in names}
        | {"state": row.state, "why": row.why, "incident_id": row.incident_id}
        for row in ranked
    ]
    asked.answer({"jobs": jobs}, lambda: show("asked_jobs", rows=ranked))
