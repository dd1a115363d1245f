"""One incident, what was decided and done about it, and a clock of one's own: for tests of the journal and of
notifiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.policy import Except, Match
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import (
    Action,
    ActionEnd,
    ActionRun,
    Decision,
    Fence,
    Operation,
    OperationOutcome,
    OperationRecord,
    Verdict,
)
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.notify.dispatcher import Channel, Notifier, make_notifier
from slurm_watchdog.notify.notification import Caller, Message, Notice, Site, Topic, message_of

replace = msgspec.structs.replace
INCIDENT = Incident(
    id="i1",
    kind=IncidentKind.COLLECTIVE_HANG,
    subject="job:7",
    state=IncidentState.FIRING,
    severity=Severity.CRITICAL,
    job_ids=("7",),
    opened_at=100.0,
    pending_mono=5.0,
    fired_at=160.0,
    detected_after_s=60.0,
    summary="rank 3 waits alone.",
    culprits=(Culprit(node="n1", rank=3, pid=42, reason="the only one in forward"),),
    facts=("no step for 90 s",),
    runs=(("7", 0),),
)
DECISION = Decision(
    id="d1",
    incident_id="i1",
    action=Action.GRACEFUL_RESTART,
    verdict=Verdict.ALLOWED,
    by="collective_hang",
    reason="a rank is stuck",
    decided_at=200.0,
    fence=Fence(job_id="7", restarts=0, start_at=90.0),
    exclude=("n1",),
    nodes=("n1", "n2"),
)
RUN = ActionRun(
    decision=DECISION,
    records=(
        OperationRecord(
            operation=Operation.REQUEUE_HOLD, attempt=1, intent_at=1.0, outcome=OperationOutcome.DONE, detail="held"
        ),
    ),
    end=ActionEnd(ok=True, ended_at=300.0, detail="runs on n2", resumed_at_step=500, steps_lost=20, downtime_s=700.0),
)
FAILED = replace(RUN, end=ActionEnd(ok=False, ended_at=1.0, detail="no checkpoint"))
SITE = Site(cluster="a")
CALLING = Site(
    cluster="a",
    mention="here",
    exceptions=(
        Except(match=Match(user=("ann",)), mention="U0ANN"),
        Except(match=Match(partition=("large",)), mention="S0LARGE"),
    ),
)
LINKED = Site(cluster="a", external_url="https://w.example/", runbook_url="https://r.example/{kind}?a=1&b=2")
OVER = replace(INCIDENT, state=IncidentState.RESOLVED, resolved_at=7300.0, resolution="steps again")


def incident(number: int, **changes: Any) -> Incident:
    """One of many: incident `number` is about job `number`."""
    return replace(INCIDENT, id=f"i{number}", subject=f"job:{number}", job_ids=(str(number),), **changes)


def notice(topic: Topic = Topic.OPENED, **changes: Any) -> Notice:
    return Notice(**{"topic": topic, "at": 1.0, "incident": INCIDENT, **changes})


def told(incident: Incident, what: Decision | ActionRun | None = None, caller: Caller = Caller.SERVICE) -> Message:
    """What people read of it, or of what was decided or done about it."""
    if isinstance(what, Decision):
        return message_of(notice(Topic.DECIDED, incident=incident, decision=what, caller=caller))
    return message_of(notice(Topic.ENDED if what else Topic.OPENED, incident=incident, run=what, caller=caller))


def open_journal(directory: Path) -> Journal:
    return Journal(f"sqlite:///{directory}/journal.sqlite")


class Ticking:
    """A notifier whose clock only moves when it waits: hours take no time."""

    def __init__(
        self, journal: Journal, channels: Sequence[Channel] = (), now: float = 1_000_000.0, config: str = "{}"
    ) -> None:
        """`config`: the section `notify` of the configuration that the channels are made from, if not given."""
        self.journal = journal
        self.now = now
        if channels:
            self.notifier = Notifier(journal.outbox, channels)
        else:
            self.notifier = make_notifier(parse_config(f"cluster_name: a\nnotify: {config}"), journal.outbox)
        self.notifier.wall = lambda: self.now
        self.workers = self.notifier.workers

    async def run_until(self, until: float) -> None:
        """Let the channels send until this date."""
        due = [self.now] * len(self.workers)
        while (first := min(due)) < until:
            self.now = max(self.now, first)
            index = due.index(first)
            wait_s = await self.workers[index].send_next()
            due[index] = self.now + max(0.001, 5.0 if wait_s is None else min(wait_s, 5.0))
        self.now = until

    async def run_until_empty(self, limit_s: float = 7200.0) -> None:
        """Let them send until nothing waits any more."""
        end = self.now + limit_s
        while self.journal.outbox.pending(1):
            assert self.now < end, f"still there: {self.journal.outbox.pending(3)}"
            await self.run_until(self.now + 1.0)
