"""Tests of nodes in quarantine that the controller starts by itself, once no job runs there. One at a time.

Each is an intent in the journal before it is started, and has a time by which it is over whatever became of who
started it. A controller that finds an intent that is not its own waits for that time: so no two tests of one node are
ever under way, also where another controller was the active one. Then it puts back what the test had lifted: jobs are
cancelled, the node drained again, the reservation deleted. The results are written in one transaction with the end of
the test.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.controller.actions.quarantine import QuarantineTools
from slurm_watchdog.controller.policy.node_tests import (
    enough_peers,
    events_of_results,
    is_free,
    objection_to_testing,
    peers_for,
)
from slurm_watchdog.controller.policy.quarantine import verdict
from slurm_watchdog.controller.ports.journals import Writer
from slurm_watchdog.controller.ports.node_tests import NodeTester, NotTested
from slurm_watchdog.model.node_events import NodeEventKind
from slurm_watchdog.model.node_test import Ending, NodeTest, NodeVerdict
from slurm_watchdog.model.quarantine import TESTED_MARK, Quarantine, QuarantineState
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import OVER, is_drained
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

LIMIT_S: Final = 3600.0
"""Of one test. Six nodes and their links take 2 min where nothing hangs (docs/test-nodes.md); each job that hangs costs
its own limit, minutes, and a second look at nodes and links the same again."""


class NodeTests:
    """One event loop owns it."""

    def __init__(
        self, tools: QuarantineTools, tester: NodeTester, writer: Writer, held_back: Callable[[], str | None], *,
        floors: bool,
    ) -> None:  # fmt: skip
        """`held_back`: why nothing is begun now, a sentence. `floors`: the site has said which figures it accepts."""
        self._tools, self._tester, self._writer, self._held_back = tools, tester, writer, held_back
        self._floors = floors
        self._running: asyncio.Task[None] | None = None

    async def turn(self, known: Sequence[SlurmNode], jobs: Mapping[str, SlurmJob], *, permitted: bool) -> None:
        """One round; a test is only begun if it is `permitted`. `known`, `jobs`: Slurm's newest listing. Raises
        JournalError."""
        if self._running is not None:
            if not self._running.done():
                return
            if not self._running.cancelled() and (error := self._running.exception()) is not None:
                log.error("a test of nodes failed", exc_info=error)
            self._running = None
        tools, now = self._tools, self._tools.wall()
        left = tools.journal.node_tests.open()
        for each in left:
            if now >= each.until:
                await self._settle(each, jobs)
        if left or not permitted or self._held_back() is not None:
            return
        test = self._next(known, now)
        if test is None:
            return
        tools.journal.node_tests.intend(test)
        log.warning("%s is tested (%s)", ", ".join(test.nodes), test.name)
        self._running = asyncio.create_task(self._run(test))

    async def ended(self) -> None:
        """Waits for the test that is under way."""
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        """Cancels the test that is under way; the next controller finds its intent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _next(self, known: Sequence[SlurmNode], now: float) -> NodeTest | None:
        open_ones = self._tools.journal.quarantines.open()
        before = self._tools.journal.node_tests.since(now - self._tools.policy.quarantine_test_again - LIMIT_S)
        found = (self._of(each, known, before, {each.node for each in open_ones}, now) for each in open_ones)
        return next((each for each in found if each is not None), None)

    def _of(
        self, entry: Quarantine, known: Sequence[SlurmNode], before: Sequence[NodeTest], out: set[str], now: float
    ) -> NodeTest | None:
        node = next((each for each in known if each.name == entry.node), None)
        if entry.state is not QuarantineState.DRAINED or node is None or not is_free(node):
            return None
        if entry.reservation is None and not (is_drained(node.state) and node.reason == entry.reason):
            return None
        again_s = self._tools.policy.quarantine_test_again
        said = verdict(entry, self._tools.journal.node_events.of_node((entry.node,)))
        if said is not None and (said.kind != NodeEventKind.TEST_FAILED or now - said.at < again_s):
            return None
        if objection_to_testing(entry.node, before, now, again_s) is not None:
            return None
        peers = peers_for(node, known, out)
        ended = [each.ended_at for each in before if entry.node in each.nodes and each.ended_at is not None]
        if not enough_peers(len(peers), now - max([entry.at, *ended]), floors=self._floors):
            return None
        name = f"{TESTED_MARK}{secrets.token_hex(6)}"
        return NodeTest(name=name, nodes=(entry.node,), peers=tuple(peers), at=now, until=now + LIMIT_S)

    # ------------------------------------------------------------------------------------ its life

    async def _run(self, test: NodeTest) -> None:
        results, why = tuple[NodeVerdict, ...](), ""
        try:
            results = tuple(await self._tester.test(test))
        except NotTested as error:
            log.warning("the test %s has ended without results: %s", test.name, error)
            why = str(error)
        self._writer.together(lambda: self._finish(test, results, why))

    def _finish(self, test: NodeTest, results: Sequence[NodeVerdict], why: str) -> None:
        """Results and end, in one transaction: none is without the other."""
        now = self._tools.wall()
        suspicious = {node: self._tools.journal.node_events.of_node((node,)) for node in test.nodes}
        for event in events_of_results(test, results, now, suspicious, why):
            log.warning("%s: %s: %s", event.node, event.kind, event.what)
            self._tools.record(event)
        self._save(replace(test, ended_at=now, ending=Ending.DONE if results else Ending.NOT_DONE, why=why))

    def _save(self, test: NodeTest) -> None:
        self._writer.write_or_queue(lambda: self._tools.journal.node_tests.save(test))

    async def _settle(self, test: NodeTest, jobs: Mapping[str, SlurmJob]) -> None:
        """A test that is over by its time, and whose controller has written nothing more: what it may have left is put
        back. What cannot be done now, the next round tries."""
        slurm, tools = self._tools.slurm, self._tools
        try:
            for job in jobs.values():
                if test.name in job.comment and job.state not in OVER:
                    await slurm.cancel(job.job_id)
            if any(each.name == test.name for each in await slurm.read_reservations()):
                for entry in tools.journal.quarantines.open():
                    if entry.node in test.nodes and entry.reservation is None:
                        await self._drain_again(entry)
                await slurm.delete_reservation(test.name)
        except (SlurmUnavailable, SlurmRefused) as error:
            log.warning("what test %s has left is put back when Slurm lets us: %s", test.name, error)
            return
        log.warning("the test %s was aborted", test.name)
        why = "its controller ended before it did"
        tools.journal.node_tests.save(replace(test, ended_at=tools.wall(), ending=Ending.ABORTED, why=why))

    async def _drain_again(self, entry: Quarantine) -> None:
        """Its reservation is still there, so nobody else has given the node back: the test had lifted the drain."""
        now = await self._tools.slurm.read_node(entry.node)
        if now is not None and not is_drained(now.state):
            await self._tools.slurm.drain_node(entry.node, entry.reason)
