"""Feeds a recording to the service's own controller, on the recording's clock: frames, Slurm's answers, ticks and what
people asked for come when they came. Nothing is asked of anyone, and nothing is done.

Only a detector, a rule or a limit that differs now comes out differently; what was not asked then is not answered now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import one_line
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.controller import Controller, Outside
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.model.actions import Decision, Wish
from slurm_watchdog.model.incidents import Incident, MountProbeRequest, StackRequest
from slurm_watchdog.model.protocol import DumpStacks, ProbeMount, Reply
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.recording import entries
from slurm_watchdog.recording.entries import OF_RELEASE_0_1, Entry, Tally, read_entries
from slurm_watchdog.recording.recorder import Recorder
from slurm_watchdog.replay.stand_ins import (
    RecordedCommands,
    RecordedSlurm,
    ReplayActions,
    ReplayJournal,
    TimelessLoop,
    numbered_ids,
)
from slurm_watchdog.slurm.client import SlurmClient
from slurm_watchdog.wire.codec import WireError, decode_report
from slurm_watchdog.wire.frames import REPORT

MOST_INCIDENTS = 1_000_000


class NoRecording(Exception):
    """Why a file cannot be replayed, a sentence."""


@dataclass(frozen=True)
class Outcome:
    """What a recording gave."""

    incidents: tuple[Incident, ...]  # That fired, or were pending at the end; in the order of their opening.
    decided: tuple[Decision, ...]  # In the order in which they were made.
    tally: Tally
    differs: tuple[str, ...] = ()  # Sections of the configuration that were others when it was recorded.

    def decisions(self, incident: Incident) -> tuple[Decision, ...]:
        """Those about one of the incidents."""
        return tuple(each for each in self.decided if each.incident_id == incident.id)


def replay(readline: Callable[[int], bytes], config: Config, new_id: Callable[[], str] | None = None) -> Outcome:
    """Replays the recording of which `readline(n)` gives the lines, or n bytes of one. `new_id` names incidents. Raises
    NoRecording, and what `readline` raises."""
    with Player(config, new_id) as player:
        for entry in read_entries(readline, player.tally):
            player.take(entry)
        outcome = player.outcome()
    if (tally := outcome.tally).used:
        return outcome
    if OF_RELEASE_0_1 in tally.skipped:
        todo = "replay it with that release, or record again: slurm-watchdog controller --record FILE"
        raise NoRecording(f"is a trace of release 0.1: {todo}")
    what = "holds no entry of a recording" if tally.entries else "is empty"
    raise NoRecording(f"{what}; `slurm-watchdog controller --record FILE` writes recordings")


class Player:
    """One recording while it is played. Inside of `with` this process lives by its clock."""

    controller: Controller

    def __init__(
        self,
        config: Config,
        new_id: Callable[[], str] | None = None,
        *,
        commands: Callable[[], CommandQueue] = RecordedCommands,
        recorder: Recorder | None = None,
    ):
        """`commands` and `recorder`: of a simulation, whose agents answer, and which may be recorded."""
        self.config, self.tally, self._recorder = config, Tally(), recorder
        self._outside = Outside(commands=commands, actions=ReplayActions, new_id=new_id or numbered_ids())
        self._differs: set[str] = set()
        self._ahead_s = 0.0  # Of the date, to the monotonic clock.
        self._loop, self._began = TimelessLoop(0.0), False
        self._clock = clock.simulated(lambda: self._loop.now, lambda: self._loop.now + self._ahead_s)

    def __enter__(self) -> Player:
        self._clock.__enter__()
        self._journal = ReplayJournal()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_life()
        self._journal.close()
        self._clock.__exit__(None, None, None)

    def take(self, entry: Entry) -> Reply | None:
        """Lets the time until this entry pass, and takes it over. Returns what the controller answers to a frame."""
        if isinstance(entry.what, entries.Begin) or not self._began:
            self._end_life()
            self._began, self._loop, self._ahead_s = True, TimelessLoop(entry.at), entry.wall - entry.at
            self._do(self._begin_life())
        if entry.at < self._loop.now:
            self.tally.skipped["the time goes back"] += 1
            return None
        self.advance(entry.at, entry.wall)
        try:
            reply = self._do(self._apply(entry.what))
        except (ValueError, WireError) as error:
            self.tally.skipped[f"not of this release ({one_line(str(error), 80)})"] += 1
            return None
        self.tally.used += 1
        return reply

    def advance(self, at: float, wall: float) -> None:
        """Lets the time until then pass."""
        self._ahead_s = wall - at
        self._loop.run_to(at)

    def _do(self, work: Coroutine[Any, Any, Reply | None]) -> Reply | None:
        """Does something in the controller's loop, and all that follows from it at this moment."""
        done = self._loop.run_until_complete(work)
        self._loop.run_to(self._loop.now)
        return done

    async def _begin_life(self) -> None:
        """A controller starts, with the journal of the one before."""
        self._slurm = RecordedSlurm()
        self.controller = Controller(
            self.config, journal=self._journal, slurm=cast(SlurmClient, self._slurm), outside=self._outside,
            notifier=Notifier(self._journal.outbox), metrics=ControllerMetrics(), recorder=self._recorder,
        )  # fmt: skip
        self.controller.actions.resume_open_actions()

    def _end_life(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_to(self._loop.now)
        self._loop.close()

    # ------------------------------------------------------------------------------------ entries

    async def _apply(self, what: bytes | entries.Value) -> Reply | None:
        """Raises ValueError or WireError where it cannot be understood."""
        controller, actions = self.controller, cast(ReplayActions, self.controller.actions)
        match what:
            case bytes():
                if what[:1] != REPORT:
                    raise ValueError(f"a frame of kind {what[:1]!r}")
                return controller.accept(decode_report(what[1:]))
            case entries.Begin():
                if what.version != entries.VERSION:
                    raise ValueError(f"it has version {what.version} of release {what.release}")
                ours = entries.settings_of(self.config)
                self._differs |= {name for name, each in what.settings.items() if each != ours.get(name)}
            case entries.Answer():
                self._slurm.answer = what
                await controller.read_slurm()
            case entries.Tick():
                controller.tick()
            case entries.Asked():
                self._note_command(what)
            case entries.State():
                self._journal.state = actions.state = what
            case entries.Ended():
                actions.end(what)
            case entries.Touched():
                at = None if what.age_s is None else self._loop.now - what.age_s
                controller.state.runs.note_action(what.job_id, what.restarts, at)
            case entries.Request():
                if (job := controller.state.jobs.get(what.job_id)) is None:
                    raise ValueError("a restart of a job that is not listed")
                with suppress(JournalError):  # it could not be written, and so it was refused
                    controller.decider.ask_restart(
                        job, what.exclude, what.reason, what.by, at_once=what.at_once, wish=Wish(what.wish),
                        within_s=what.within_s,
                    )  # fmt: skip
        return None

    def _note_command(self, asked: entries.Asked) -> None:
        """What was asked of a node then is asked now: its answer, which is about that moment, comes soon."""
        command, evidence, now = asked.command, self.controller.evidence, self._loop.now
        if cast(RecordedCommands, self.controller.commands).note(asked.node, command):
            return
        if isinstance(command, DumpStacks):
            jobs = self.controller.state.jobs.values()
            job_id = next((job.job_id for job in jobs if job.process_id == command.job_id), command.job_id)
            evidence.dump(StackRequest(job_id=job_id), now)
        elif isinstance(command, ProbeMount):
            evidence.probe(picked(MountProbeRequest, command, "mount", "directory", "uid", nodes=(asked.node,)), now)

    def outcome(self) -> Outcome:
        """What there is to say by now."""
        self._journal.state = entries.State()  # it can be read again
        open_ones = list(self.controller.judge.incidents) if self._began else []
        written = [each for each in self._journal.incidents(limit=MOST_INCIDENTS) if each.fired_at is not None]
        found = {each.id: each for each in (*written, *open_ones)}
        incidents = sorted(found.values(), key=lambda each: (each.opened_at, each.id))
        return Outcome(tuple(incidents), tuple(self._journal.decided), self.tally, tuple(sorted(self._differs)))
