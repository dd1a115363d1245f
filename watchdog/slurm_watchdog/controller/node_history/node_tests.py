"""Tests of nodes in quarantine that the controller starts by itself, once no job runs there. One at a time.

The record of a test of drained nodes is the reservation in which it runs: Slurm keeps it. A controller that
finds one, its own of before or that of a person's `test-nodes`, waits until that test must be over, and then puts back
what it has lifted: jobs are cancelled, the nodes drained again, the reservation deleted. So no two tests of one node
are ever under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.node_history.quarantine import VERDICTS, QuarantineTools
from slurm_watchdog.controller.node_history.suspicion import strength_of
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import GPU_PLACE, LINK_PLACE, MOUNT_PLACE, TESTED_MARK, NodeEvent, NodeEventKind
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import ABSENT, OVER, USED, is_drained, is_lost, node_words, starts_jobs
from slurm_watchdog.nodetest.conduct import LIMIT_S, Terms, conduct_jobs, put_back
from slurm_watchdog.nodetest.judge import LEAST_PEERS, NodeVerdict
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

MOST_PEERS = 5  # Idle nodes tested with one in quarantine; fewer than LEAST_PEERS compare no figures.
PATIENCE_S = 6 * 3600.0  # So long a test waits for idle peers: site figures and earlier tests need none.
TAKEN = ABSENT | {"RESERVED", "RESV", "PLANNED", "PLND"}  # Idle nodes in these states are not available.
Tester = Callable[[str, Sequence[str]], Awaitable[Sequence[NodeVerdict]]]
"""Given the name of a test and its nodes. Raises SlurmRefused, SlurmUnavailable, OSError, TimeoutError."""


def tester_of(config: Config, client: SlurmClient) -> Tester:
    """Tests nodes as `test-nodes --drained-by-us` does for a person, by the controller's own user."""

    async def test(name: str, names: Sequence[str]) -> Sequence[NodeVerdict]:
        comment, place = f"slurm-watchdog test-nodes of the controller {name}", Path(config.controller.state_directory)
        terms = Terms(comment=comment, reservation=name, place=place)
        nodes = [node for each in names if (node := await client.read_node(each)) is not None]
        return (await conduct_jobs(config, client, nodes, terms, log.warning, lifts=True)).verdicts

    return test


class NodeTests:
    """One event loop owns it."""

    def __init__(
        self, tools: QuarantineTools, tester: Tester | None, held_back: Callable[[], str | None], *, floors: bool
    ) -> None:
        """`tester`: None where no node can be tested. `held_back`: why nothing is begun now, a sentence. `floors`: the
        site has set which figures it accepts."""
        self._tools, self._tester, self._held_back, self._floors = tools, tester, held_back, floors
        self._running: asyncio.Task[None] | None = None

    async def turn(
        self,
        known: Sequence[SlurmNode],
        jobs: Mapping[str, SlurmJob],
        reservations: Iterable[Reservation],
        others: Mapping[str, str],
        *,
        permitted: bool,
    ) -> None:
        """One round; a test is only begun if it is `permitted`. `known`, `jobs`, `reservations`: Slurm's newest
        listings. `others`: nodes that we have drained and that are in no quarantine, and the reasons."""
        if self._running is not None and not self._running.done():
            return
        out, left = self._tools.drained(), [each for each in reservations if each.name.startswith(TESTED_MARK)]
        for each in left:
            if self._tools.wall() >= each.start_at + LIMIT_S:
                await self._settle(each, {**others, **out}, jobs)
        if left or not permitted or self._tester is None or self._held_back() is not None:
            return
        for node in (each for each in known if each.name in out):
            if (peers := self._peers_of(node, known, out)) is not None:
                name = f"{TESTED_MARK}{secrets.token_hex(6)}"
                log.warning("%s is tested (%s)", node.name, name)
                self._running = asyncio.create_task(self._run(self._tester, name, node.name, peers))
                return

    async def close(self) -> None:
        """Cancels the test that is under way, which puts everything back."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _peers_of(self, node: SlurmNode, known: Sequence[SlurmNode], out: Mapping[str, str]) -> list[str] | None:
        """The nodes beside which one in quarantine is tested now; None: it is not."""
        words, is_ours = node_words(node.state), is_drained(node.state) and node.reason == out[node.name]
        if words & USED or is_lost(node.state) or not is_ours:  # only where no job runs, and Slurm reaches it
            return None
        events, now = self._tools.of_node(node.name), self._tools.wall()
        began_at = self._tools.newest()[node.name].at
        said = [each for each in events if each.kind in TEST_ENDS and each.at >= began_at]
        newest = max(said, key=lambda each: each.at, default=None)
        if newest is not None and newest.kind not in (NodeEventKind.TEST_FAILED, NodeEventKind.TESTED):
            return None
        waited_s = now - (began_at if newest is None else newest.at)
        if newest is not None and waited_s < self._tools.policy.quarantine_test_again:
            return None
        peers = peers_for(node, known, out)
        return peers if self._floors or len(peers) >= LEAST_PEERS or waited_s >= PATIENCE_S else None

    async def _run(self, tester: Tester, name: str, node: str, peers: Sequence[str]) -> None:
        results, why = tuple[NodeVerdict, ...](), ""
        try:
            results = tuple(await tester(name, (node, *peers)))
        except Exception as error:  # the boundary: nothing waits for this task
            log.warning("the test %s has no result", name, exc_info=error)
            why = "it did not end in time" if isinstance(error, TimeoutError) else str(error)
        self._record(events_of_results(name, node, results, self._tools, why))

    def _record(self, events: Iterable[NodeEvent]) -> None:
        for event in events:
            log.warning("%s: %s: %s", event.node, event.kind, event.what)
            self._tools.record(event)

    async def _settle(self, left: Reservation, ours: Mapping[str, str], jobs: Mapping[str, SlurmJob]) -> None:
        """What a test has left that has died. What cannot be done now, the next round tries."""
        mine = {node: reason for node, reason in ours.items() if node in left.nodes}
        for job in jobs.values():
            if job.reservation == left.name and job.state not in OVER:
                with contextlib.suppress(SlurmUnavailable, SlurmRefused):
                    await self._tools.slurm.cancel(job.job_id)
        await put_back(self._tools.slurm, left.name, mine, log.warning)
        for node in mine:
            self._record(events_of_results(left.name, node, (), self._tools, "who tested it ended before it did"))


TEST_ENDS = VERDICTS | {NodeEventKind.TESTED}


def peers_for(node: SlurmNode, known: Sequence[SlurmNode], but: Collection[str]) -> list[str]:
    """Nodes of the same partitions on which Slurm would start any job at once, to compare with, in Slurm's order; none
    of those in `but`."""
    others = [each for each in known if each.name not in (node.name, *but) and starts_jobs(each.state)]
    idle = [each for each in others if "IDLE" in node_words(each.state) and not node_words(each.state) & TAKEN]
    return [each.name for each in idle if set(node.partitions) & set(each.partitions)][:MOST_PEERS]


def not_covered(found: NodeVerdict, events: Iterable[NodeEvent]) -> tuple[str, ...]:
    """Parts of the node that are suspect, and that the test did not measure: that it passed says nothing of them. A
    place that no test measures under its name is the node as a whole."""

    def is_covered(place: str) -> bool:
        if place.startswith((LINK_PLACE, "link")):
            return any(each.startswith("link") for each in found.measured)
        is_gpu = place.startswith((GPU_PLACE, "gpu"))
        is_own = is_gpu or place.startswith((MOUNT_PLACE, "disk:", "cpu", "memory"))
        return place in found.measured or (is_gpu and "gpu" in found.measured) or not is_own

    standing = {each.place for each in events if strength_of(each.kind) > 0 and not each.withdrawn_why}
    return tuple(sorted(place for place in standing if not is_covered(place)))


def events_of_results(
    name: str, judged: str, results: Iterable[NodeVerdict], tools: QuarantineTools, why: str
) -> Iterable[NodeEvent]:
    """What the nodes' histories get: a failed test for each part that is bad, of every node; a passed one of the node
    that was to be judged, if the test covers what it is suspect for; else only a line. `why`: it has no result."""

    def event(node: str, kind: NodeEventKind, what: str, place: str = "") -> NodeEvent:
        key = f"{kind}:slurm-watchdog:{name}:{node}:{place}"
        what = f"test by slurm-watchdog: {what}"
        return NodeEvent(key=key, node=node, kind=kind, at=tools.wall(), what=what, place=place)

    said = NodeVerdict(node=judged, truth=Truth.UNKNOWN, unsure=(why or "it has no result",))
    for each in results:
        said = each if each.node == judged else said
        for place, what in each.by_place.items():
            yield event(each.node, NodeEventKind.TEST_FAILED, what, place)
    if said.truth is Truth.UNKNOWN:
        yield event(judged, NodeEventKind.TESTED, f"not judged: {'; '.join(said.unsure)}")
    elif said.truth is Truth.OK:
        what = f"well, beside {said.peers} peers{f': {said.figures}' if said.figures else ''}"
        left = ", ".join(not_covered(said, tools.of_node(judged)))
        kind = NodeEventKind.TESTED if left else NodeEventKind.TEST_PASSED
        yield event(judged, kind, f"{what}; not measured: {left}" if left else what)
