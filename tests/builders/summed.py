"""Reports as a node sends them: with what it has summed up from look to look, whole or small."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_watchdog.agent.frames import Frames
from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.model.report import Report


@dataclass
class Memory:
    """What the nodes of one test remember; a node that boots again has forgotten all."""

    sums: dict[tuple[str, str], NodeSums] = field(default_factory=dict)  # (node, boot_id) -> its own.
    frames: dict[tuple[str, str, str], Frames] = field(default_factory=dict)  # … and agent_id.

    def of(self, report: Report) -> NodeSums:
        return self.sums.setdefault((report.node, report.boot_id), NodeSums())

    def frames_of(self, report: Report) -> Frames:
        return self.frames.setdefault((report.node, report.boot_id, report.agent_id), Frames())


def summed(report: Report, now: float, memory: Memory) -> Report:
    """The whole report that the node makes of this look. `now` is when the report arrives, of any clock that does not
    jump: the look was `age_s` before."""
    sums = memory.of(report)
    whole = sums.add(report, now - report.age_s)
    sums.begin()
    return whole


def framed(report: Report, now: float, memory: Memory, closely: bool | None = None) -> Report:
    """What the agent sends of this look, whole or small. `closely` is what the controller has replied to it since the
    look before."""
    sums, frames, at = memory.of(report), memory.frames_of(report), now - report.age_s
    frames.closely = frames.closely if closely is None else closely
    sent = frames.frame(sums.add(report, at), at)
    if not sent.same_as:
        sums.begin()
    return sent
