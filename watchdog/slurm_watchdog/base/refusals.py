"""What is refused, in the log: some of it, and how much more."""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

REFUSALS_SHOWN = 10  # In a minute; the others are counted.
MAX_REFUSAL = 500


@dataclass
class Refusals:
    """Counts what was refused, and says some of it."""

    total: int = 0
    _minute: float = float("-inf")
    _shown: int = 0
    _silent: int = 0

    def add(self, reason: str, now: float) -> None:
        """Notes one."""
        self.total += 1
        if now - self._minute >= 60.0:
            if self._silent:
                log.warning("%d more requests were refused in the minute before", self._silent)
            self._minute, self._shown, self._silent = now, 0, 0
        if self._shown < REFUSALS_SHOWN:
            self._shown += 1
            log.warning("refused: %s", reason[:MAX_REFUSAL].encode("unicode_escape").decode())
        else:
            self._silent += 1
