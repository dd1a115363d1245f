"""Reports as a node sends them: with what it has summed up from look to look."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.model.report import Report


@dataclass
class Memory:
    """What the nodes of one test remember; a node that boots again has forgotten all."""

    sums: dict[tuple[str, str], NodeSums] = field(default_factory=dict)  # (node, boot_id) -> its own.

    def of(self, report: Report) -> NodeSums:
        return self.sums.setdefault((report.node, report.boot_id), NodeSums())


def summed(report: Report, now: float, memory: Memory) -> Report:
    """The whole report that the node makes of this look. `now` is when the report arrives, of any clock that does not
    jump: the look was `age_s` before."""
    sums = memory.of(report)
    whole = sums.add(report, now - report.age_s)
    sums.begin()
    return whole
