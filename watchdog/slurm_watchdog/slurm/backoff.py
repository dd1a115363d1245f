"""Exponential backoff after repeated failures. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Nothing after the first failure, then `first_s`, doubled with each further one up to `most_s`."""

    first_s: float
    most_s: float
    failures: int = 0
    _failed_at: float = 0.0

    def failed(self, now: float) -> None:
        """One more failure in a row."""
        self.failures += 1
        self._failed_at = now

    def succeeded(self) -> None:
        """The pauses start from the beginning."""
        self.failures = 0

    def wait_s(self, now: float) -> float:
        """Seconds until the next try, 0 if it may be made now."""
        if self.failures < 2:
            return 0.0
        delay_s = min(self.most_s, self.first_s * 2.0 ** min(self.failures - 2, 30))
        return max(0.0, self._failed_at + delay_s - now)
