"""Feeds a recording to the service's own controller, on the recording's clock: frames, Slurm's answers, ticks and what
people asked for come when they came. Nothing is asked of anyone, and nothing is done.

A detector, a rule or a limit that differs now is the only thing that can come out differently; also, what was not asked
of a node then cannot be answered now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

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
from slurm_watchdog.recording.entries import Entry, Own, Tally, read_entries, value_of
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

T = TypeVar("T")
MOST_INCIDENTS = 1_000_000
OF_RELEASE_0_1 = b'{"t":'


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


def replay(read: Callable[[int], bytes], config: Config, new_id: Callable[[], str]) -> Outcome:
    """Replays the recording that `read(n)` gives in pieces of at most n bytes. Raises NoRecording, and what `read`
    raises."""
    tally, head = Tally(), b""

    def read_on(size: int) -> bytes:
        nonlocal head
        data = read(size)
        head = head or data[: len(OF_RELEASE_0_1)]
        return data

    outcome = play(read_entries(read_on, tally), config, new_id, tally)
    if tally.used:
        return outcome
    if head == OF_RELEASE_0_1:
        todo = "replay it with that release, or record again: slurm-watchdog controller --record FILE"
        raise NoRecording(f"is a trace of release 0.1: {todo}")
    what = "holds no entry of a recording" if tally.entries else "is empty"
    raise NoRecording(f"{what}; `slurm-watchdog controller --record FILE` writes recordings")


def play(flow: Iterable[Entry], config: Config, new_id: Callable[[], str], tally: Tally | None = None) -> Outcome:
    """Replays entries."""
    with Player(config, new_id, tally) as player:
        for entry in flow:
            player.take(entry)
        return player.outcome()


class Player:
    """One recording while it is played. Inside of `with` this process lives by its clock."""

    controller: Controller

    def __init__(
        self,
        config: Config,
        new_id: Callable[[], str] | None = None,
        tally: Tally | None = None,
        *,
        commands: Callable[[], CommandQueue] = RecordedCommands,
        recorder: Recorder | None = None,
    ):
        """`commands` and `recorder`: of a simulation, whose agents answer, and which may be recorded."""
        self._make_commands, self._recorder = commands, recorder
        self.config, self.tally = config, tally or Tally()
        self._new_id = new_id or numbered_ids()
        self._settings = entries.settings_of(config)
        self._differs: set[str] = set()
        self._ahead_s = 0.0  # Of the date, to the monotonic clock.
        self._loop: TimelessLoop | None = None
        self._clock = clock.simulated(self._time, lambda: self._time() + self._ahead_s)

    def __enter__(self) -> Player:
        self._clock.__enter__()
        self._journal = ReplayJournal()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_life()
        self._journal.close()
        self._clock.__exit__(None, None, None)

    def _time(self) -> float:
        return 0.0 if self._loop is None else self._loop.now

    def take(self, entry: Entry) -> Reply | None:
        """Lets the time until this entry pass, and takes it over. Returns what the controller answers to a frame."""
        if entry.kind == entries.BEGIN or self._loop is None:
            self._begin_life(entry)
        assert self._loop is not None
        if entry.at < self._loop.now:
            self.tally.skip("the time goes back")
            return None
        self.advance(entry.at, entry.wall)
        try:
            reply = self._apply(entry)
        except (ValueError, WireError) as error:
            self.tally.skip(f"not of this release ({one_line(str(error), 80)})")
            return None
        self.tally.used += 1
        return reply

    def advance(self, at: float, wall: float) -> None:
        """Lets the time until then pass."""
        assert self._loop is not None
        self._ahead_s = wall - at
        self._loop.run_to(at)

    def within(self, work: Callable[[], T]) -> T:
        """Does something as the controller would, and all that follows from it at this moment."""
        assert self._loop is not None

        async def run() -> T:
            return work()

        done = self._loop.run_until_complete(run())
        self._loop.run_to(self._loop.now)
        return done

    def _begin_life(self, entry: Entry) -> None:
        """A controller starts, with the journal of the one before."""
        self._end_life()
        self._loop, self._ahead_s = TimelessLoop(entry.at), entry.wall - entry.at
        self._slurm = RecordedSlurm()
        outside = Outside(commands=self._make_commands, actions=ReplayActions, new_id=self._new_id)

        def build() -> None:
            self.controller = Controller(
                self.config, journal=self._journal, slurm=cast(SlurmClient, self._slurm),
                notifier=Notifier(self._journal.outbox), metrics=ControllerMetrics(),
                recorder=self._recorder, outside=outside,
            )  # fmt: skip
            self.controller.actions.resume_open_actions()

        self.within(build)

    def _end_life(self) -> None:
        if self._loop is None:
            return
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_to(self._loop.now)
        self._loop.close()
        self._loop = None

    # ------------------------------------------------------------------------------------ entries

    def _apply(self, entry: Entry) -> Reply | None:
        """Raises ValueError or WireError where it cannot be understood."""
        match entry.kind:
            case entries.BEGIN:
                begin: entries.Begin = value_of(entry, entries.Begin)
                if begin.version != entries.VERSION:
                    raise ValueError(f"it has version {begin.version} of release {begin.release}")
                self._differs |= {name for name, each in begin.settings.items() if each != self._settings.get(name)}
            case entries.FRAME:
                return self._take_frame(entry.body[:1], entry.body[1:])
            case entries.LISTING | entries.NO_ANSWER:
                self._slurm.take(
                    value_of(entry, entries.Listing if entry.kind == entries.LISTING else entries.NoAnswer)
                )
                assert self._loop is not None
                self._loop.run_until_complete(self.controller.read_slurm())
            case entries.TICK:
                self.within(self.controller.tick)
            case entries.COMMAND:
                self._note_command(value_of(entry, entries.Asked))
            case entries.OWN:
                own: Own = value_of(entry, Own)
                self.within(lambda: self._follow(own))
            case _:
                raise ValueError(f"an entry of kind {entry.kind!r}")
        return None

    def _take_frame(self, kind: bytes, body: bytes) -> Reply:
        if kind != REPORT:
            raise ValueError(f"a frame of kind {kind!r}")
        report = decode_report(body)
        return self.within(lambda: self.controller.accept(report))

    def _note_command(self, asked: entries.Asked) -> None:
        """What was asked of a node then is asked now: its answer, which is about that moment, comes soon."""
        command, evidence, now = asked.command, self.controller.evidence, self._time()
        commands = cast(RecordedCommands, self.controller.commands)
        if commands.note(asked.node, command):
            return
        if isinstance(command, DumpStacks):
            jobs = self.controller.state.jobs.values()
            job_id = next((job.job_id for job in jobs if job.process_id == command.job_id), command.job_id)
            self.within(lambda: evidence.dump(StackRequest(job_id=job_id), now))
        elif isinstance(command, ProbeMount):
            probe = picked(MountProbeRequest, command, "mount", "directory", "uid", nodes=(asked.node,))
            self.within(lambda: evidence.probe(probe, now))
        commands.note(asked.node, command)

    def _follow(self, own: Own) -> None:
        """What the recorded controller says of itself, and what people asked of it."""
        actions = cast(ReplayActions, self.controller.actions)
        match own:
            case entries.State():
                self._journal.follow(own)
                actions.follow(own)
            case entries.Ended():
                actions.end(own)
            case entries.Touched():
                at = None if own.age_s is None else self._time() - own.age_s
                self.controller.state.runs.note_action(own.job_id, own.restarts, at)
            case entries.Request():
                job = self.controller.state.jobs.get(own.job_id)
                if job is None:
                    raise ValueError("a restart of a job that is not listed")
                with suppress(JournalError):  # it could not be written, and so it was refused
                    self.controller.decider.ask_restart(
                        job, own.exclude, own.reason, own.by, at_once=own.at_once, wish=Wish(own.wish),
                        within_s=own.within_s,
                    )  # fmt: skip

    def outcome(self) -> Outcome:
        """What there is to say by now."""
        self._journal.follow(entries.State())  # it can be read again
        open_ones = [] if self._loop is None else list(self.controller.judge.incidents)
        written = [each for each in self._journal.incidents(limit=MOST_INCIDENTS) if each.fired_at is not None]
        found = {each.id: each for each in (*written, *open_ones)}
        return Outcome(
            incidents=tuple(sorted(found.values(), key=lambda each: (each.opened_at, each.id))),
            decided=tuple(self._journal.decided),
            tally=self.tally,
            differs=tuple(sorted(self._differs)),
        )
