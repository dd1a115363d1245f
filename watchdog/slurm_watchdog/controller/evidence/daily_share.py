"""How much evidence is kept in a day: in all, and of each user's jobs, so that one who hangs all day fills no
disk. Pure bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

DAY_S: Final = 86_400.0


@dataclass
class EvidenceShare:
    """One loop owns it. A day begins with the first piece; a controller that starts begins a new one."""

    most_bytes: int
    """Of all evidence in a day."""
    most_of_user: int
    began: float = float("-inf")
    used: int = 0
    _of_user: dict[int, int] = field(default_factory=dict)
    """Users as Slurm has them: a few thousand at most."""

    def acquire(self, uid: int, size: int, now: float) -> str | None:
        """Counts `size` bytes of a job of `uid`; why they are not to be kept, else None. `now` is monotonic."""
        if now - self.began >= DAY_S:
            self.began, self.used = now, 0
            self._of_user.clear()
        own = self._of_user.get(uid, 0)
        if own + size > self.most_of_user:
            return f"the evidence of uid {uid} has used up its share of a day (controller.evidence_per_user)"
        if self.used + size > self.most_bytes:
            return "all evidence has used up its share of a day (controller.evidence_per_day)"
        self._of_user[uid] = own + size
        self.used += size
        return None
