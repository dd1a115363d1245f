"""Whose agent has reported, and when: what came twice, what builds on an earlier report, who is silent."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from msgspec.structs import replace

from watchdog.model.messages import Report
from watchdog.report_changes import make_whole, without_news


@dataclass(slots=True)
class _Agent:
    boot_id: str
    agent_id: str
    sequence: int
    reported_at: float
    whole: Report | None = None
    """The newest report in full, for those of changes that build on it; events and other news are not kept."""
    excused: bool = False
    """`reported_at` is when it was given its time again; its newest report is older."""


class Agents:
    """One for each node that has ever reported. Not thread-safe: the state owns it."""

    def __init__(self, silent_after_s: float):
        self.silent_after_s = silent_after_s
        self._agents: dict[str, _Agent] = {}
        self._taken = 0
        """Reports so far."""
        self._reporting: tuple[tuple[float, int], tuple[str, ...]] | None = None
        """Who reports, and at which moment: (now, reports taken until then)."""
        self._names: tuple[str, ...] = ()
        """Of all nodes that have reported, sorted; empty: to be sorted anew."""

    def complete(self, report: Report) -> Report | None:
        """A report of changes as the full one it stands for, any other as it is; None if it builds on one that is not known here."""
        if report.changes is None:
            return report
        agent = self._agents.get(report.node)
        if agent is None or agent.agent_id != report.agent_id or agent.whole is None:
            return None
        if report.sequence <= agent.sequence:
            return replace(report, changes=None)  # told before: what is in it will not be looked at
        return make_whole(agent.whole, report)

    def take(self, report: Report, made_at: float) -> bool:
        """Remembers this report of a node, made at `made_at`. False: it, or a later one, has come before."""
        before = self._agents.get(report.node)
        if before is not None and before.agent_id == report.agent_id and report.sequence <= before.sequence:
            return False
        self._taken += 1
        if before is None:
            self._names = ()
        same_boot = before is not None and before.boot_id == report.boot_id
        same_agent = before is not None and before.agent_id == report.agent_id
        self._agents[report.node] = _Agent(
            boot_id=before.boot_id if before is not None and same_boot else report.boot_id,
            agent_id=before.agent_id if before is not None and same_agent else report.agent_id,
            sequence=report.sequence,
            reported_at=max(made_at, before.reported_at) if before is not None else made_at,
            whole=without_news(report),
        )
        return True

    def hear(self, node: str, now: float) -> None:
        """This node does not count as silent: nothing is known of an agent there that should have reported."""
        self._agents[node].reported_at = now
        self._taken += 1

    def forget_silence(self, now: float) -> None:
        """No agent counts as silent: they all get their time again. That is no report: see `excused`."""
        self._taken += 1
        for agent in self._agents.values():
            agent.reported_at, agent.excused = now, True

    def excused(self) -> tuple[str, ...]:
        """Nodes that have not reported since they were given their time again, by name."""
        return tuple(name for name in self.known() if self._agents[name].excused)

    def forget_older_than(self, since: float, kept: Container[str]) -> list[str]:
        """Forgets the nodes that have not reported since then, but those in `kept`. Returns who they were."""
        gone = [
            name for name, agent in self._agents.items() if agent.reported_at < since and name not in kept
        ]
        for name in gone:
            del self._agents[name]
            self._names, self._reporting = (), None
        return gone

    def boot_id(self, node: str) -> str | None:
        """Of the kernel under the agent that reported last; None for a node that never did."""
        agent = self._agents.get(node)
        return None if agent is None else agent.boot_id

    def reports(self, node: str, now: float) -> bool:
        """Whether this node has reported lately."""
        agent = self._agents.get(node)
        return agent is not None and now - agent.reported_at <= self.silent_after_s

    def reporting(self, now: float) -> tuple[str, ...]:
        """Who has reported lately, by name. Asked for hundreds of incidents at one moment, it is worked out once."""
        moment = (now, self._taken)
        if self._reporting is None or self._reporting[0] != moment:
            agents, since = self._agents, now - self.silent_after_s
            found = tuple(name for name in self.known() if agents[name].reported_at >= since)
            self._reporting = (moment, found)
        return self._reporting[1]

    def known(self) -> tuple[str, ...]:
        """Everybody who has ever reported, by name."""
        if not self._names:
            self._names = tuple(sorted(self._agents))
        return self._names
