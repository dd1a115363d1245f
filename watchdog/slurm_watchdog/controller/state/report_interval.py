"""How often agents report: as configured, and less often where so many of them would fill the controller's core.

A controller whose core is full judges late and grows, and sees no more for it. A rank's end and the answer to a command
are reported at once in any case (slurm_watchdog.agent.service).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_REPORTS_PER_S = 1000.0
"""Over mutual TLS, of nodes with 8 GPUs each, 1,000 a second took 68 to 88 % of a core of the measuring machines, and
2,000 more than a whole one (docs/evaluation.md)."""
LONGEST_S = 10.0
"""What detectors allow for reports to be late (a node that reports was heard within 12 s: `node_down`) is made for one
every 5 to 10 s, and an agent waits 15 s for an answer that is held back until its next report is due."""
TOO_BUSY, AT_EASE = 0.85, 0.5
"""Of a core: above the first agents are asked to report less often, below the second more often again. STEP changes the
load by less than what lies between them."""
STEP = 1.25
SETTLED_S = 120.0
"""Between two such changes: twice the window over which the load is measured, for all agents have to hear of one."""


@dataclass
class ReportInterval:
    """Times in seconds. One event loop owns it."""

    usual_s: float = 5.0  # `agent.interval`.
    max_reports_per_s: float = MAX_REPORTS_PER_S  # Of all agents together.
    longest_s: float = LONGEST_S  # No agent is asked to report less often.
    _by_load_s: float = 0.0  # What a full core has asked for; 0: nothing.
    _changed_at: float | None = None

    def follow(self, now: float, agents: int, busy_share: float | None) -> None:
        """Takes how much of a core the controller took lately; None: it is not known."""
        if self._changed_at is None:
            self._changed_at = now  # the start, too, has to be over: all agents come at once
        if busy_share is None or now - self._changed_at < SETTLED_S:
            return
        if busy_share > TOO_BUSY and self.of(agents) < self.longest_s:
            self._by_load_s = min(float(math.ceil(self.of(agents) * STEP)), self.longest_s)
        elif busy_share < AT_EASE and self._by_load_s:
            shorter_s = float(math.floor(self._by_load_s / STEP))
            self._by_load_s = shorter_s if shorter_s > max(self.usual_s, self._by_number_s(agents)) else 0.0
        else:
            return
        self._changed_at = now

    def least_s(self, agents: int) -> float:
        """The shortest interval that each of so many agents may have; 0 where any will do."""
        return max(self._by_number_s(agents), self._by_load_s)

    def of(self, agents: int) -> float:
        """The interval of each of so many agents."""
        return max(self.usual_s, self.least_s(agents))

    def _by_number_s(self, agents: int) -> float:
        """Whole seconds, so that it does not change with every agent that comes."""
        needed_s = agents / self.max_reports_per_s
        return min(float(math.ceil(needed_s)), self.longest_s) if needed_s > 1.0 else 0.0
