"""Keeps the checkpoint from before a loss that went bad (`policy.keep_checkpoint`), for its trainer may delete it
before anybody knows whether the loss recovers.

The job itself is not touched, so this is no rung of a ladder; mode, the owner's word, pauses and a budget hold as for
actions. Intent and outcome are notes of the incident. What was done lies on disk: a controller that was killed in
between asks again, and hears that it is kept.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.controller.ports.given import EvidencePorts
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.knowledge.kept_checkpoints import KEPT, kept_words
from slurm_watchdog.model.incidents import Finding, Incident, IncidentState, KeepRequest
from slurm_watchdog.model.protocol import CommandResult, KeepCheckpoint
from slurm_watchdog.model.slurm import SlurmJob

log = logging.getLogger(__name__)

ANSWER_S: Final = 60.0
"""For a node to fetch its command, to make the links, and to answer."""
TRIES: Final = 3
AGAIN_S: Final = 30.0


@dataclass
class _Tried:
    """What became of one incident."""

    tries: int = 0
    next_at: float = 0.0
    over: bool = False
    said: set[str] = field(default_factory=set)


class CheckpointKeeper:
    """One event loop owns it."""

    def __init__(
        self,
        budget: tuple[int, float],
        ports: EvidencePorts,
        rule: Callable[[str, SlurmJob], Rule],
        blind: Callable[[float], str | None],
    ):
        """`budget`: so many within this time (seconds), of all jobs."""
        self._budget, self._ports, self._rule, self._blind = budget, ports, rule, blind
        self._tried: dict[str, _Tried] = {}
        self._asked_at: deque[float] = deque()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def serve(self, findings: Iterable[Finding], incidents: Iterable[Incident], now: float) -> None:
        """Starts what is wanted for incidents that fire; never waits."""
        firing = {(each.kind, job): each for each in incidents if each.state is IncidentState.FIRING
                  for job in each.job_ids}  # fmt: skip
        open_ones = {each.id for each in firing.values()}
        self._tried = {each: tried for each, tried in self._tried.items() if each in open_ones}
        for finding in findings:
            for wanted in finding.wanted:
                if isinstance(wanted, KeepRequest) and (finding.kind, wanted.job_id) in firing:
                    try:
                        self._consider(firing[finding.kind, wanted.job_id], wanted, now)
                    except JournalError as error:  # nothing is done until it works
                        self._ports.writer.failed(error)

    def _consider(self, incident: Incident, wanted: KeepRequest, now: float) -> None:
        job = self._ports.cluster.jobs.get(wanted.job_id)
        tried = self._tried.get(incident.id) or self._remembered(incident)
        if tried.over or job is None or now < tried.next_at or incident.id in self._tasks:
            return
        if why := self._objection(incident, job, wanted, now):
            text = f"the checkpoint of step {wanted.step} ({wanted.path}) is not kept: {why}"
            if text not in tried.said:
                tried.said.add(text)
                self._note(incident, text)
            return
        assert job.batch_host is not None and wanted.size_bytes is not None  # or there was an objection
        tried.tries, tried.next_at = tried.tries + 1, now + AGAIN_S
        self._asked_at.append(now)
        self._note(incident, f"the checkpoint of step {wanted.step} is to be kept: {wanted.path}")
        command = KeepCheckpoint(
            id=uuid.uuid4().hex, job_id=job.process_id, restarts=job.restarts, path=wanted.path, uid=job.uid,
            size_bytes=wanted.size_bytes, expires_s=ANSWER_S,
        )  # fmt: skip
        task = asyncio.create_task(self._keep(incident, wanted, job.batch_host, command, tried))
        self._tasks[incident.id] = task
        task.add_done_callback(lambda ended: self._ended(incident.id, ended))

    def _remembered(self, incident: Incident) -> _Tried:
        """What the journal says of an incident that is met first. Raises JournalError."""
        timeline = self._ports.journal.timeline(incident.id)
        over = any(text.startswith(KEPT) for _, text in timeline)
        tried = self._tried[incident.id] = _Tried(over=over, said={text for _, text in timeline})
        return tried

    def _objection(self, incident: Incident, job: SlurmJob, wanted: KeepRequest, now: float) -> str:
        """Why nothing is done now, as the guards of actions have it; empty if nothing speaks against it. Raises
        JournalError."""
        rule = self._rule(incident.kind, job)
        number, window_s = self._budget
        while self._asked_at and now - self._asked_at[0] >= window_s:
            self._asked_at.popleft()
        if rule.refused or rule.mode != "act":
            return rule.refused or f"the mode is {rule.mode}"
        if (paused := self._ports.journal.paused()) is not None:
            return f"paused: {paused[0] or 'no reason given'}"
        if blind := self._blind(now):
            return blind
        if job.batch_host is None:
            return "the job's batch host is not known, which sees its checkpoints"
        if not wanted.size_bytes:
            return "its size is not known (it has too many files), so that nobody could say whether all was kept"
        if len(self._asked_at) >= number:
            return f"{number} within {window_s:.0f} s are the budget"
        return ""

    async def _keep(
        self, incident: Incident, wanted: KeepRequest, node: str, command: KeepCheckpoint, tried: _Tried
    ) -> None:
        result = await self._ports.agents.ask(node, command, ANSWER_S)
        if result.ok and result.kept:
            tried.over = True
            self._tell(incident, kept_words(wanted.layout, result.kept, wanted.step))
        elif tried.tries >= TRIES:
            tried.over = True
            self._tell(incident, f"the checkpoint of step {wanted.step} could not be kept: {_why(result, node)}")
        else:
            self._note(incident, f"the checkpoint of step {wanted.step} is not kept yet: {_why(result, node)}")

    def _note(self, incident: Incident, text: str) -> None:
        log.warning("incident %s: %s", incident.id, text)
        self._ports.writer.add_note(incident, text)

    def _tell(self, incident: Incident, text: str) -> None:
        """To people, too, while they know of the incident."""
        self._note(incident, text)
        if is_announced(incident):
            self._ports.writer.write(lambda: self._ports.news.diagnosed(incident, [text]))

    def _ended(self, incident_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(incident_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("keeping a checkpoint failed", exc_info=error)

    async def close(self) -> None:
        """Ends what is under way; the next controller asks again."""
        for task in list(self._tasks.values()):
            task.cancel()


def _why(result: CommandResult, node: str) -> str:
    return result.error or f"{node} says no place"
