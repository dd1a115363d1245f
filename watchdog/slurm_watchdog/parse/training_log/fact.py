"""What one line of a training log says: a value. Pure."""

from __future__ import annotations

from slurm_watchdog.model.observations import Said


class LogFact(Said):
    """What a line says. A line of progress has a `step` or a `count`; both compare within one pattern only."""

    pattern: str
    epoch: int | None = None
    """Epochs that were finished before, of a line that counts steps within one; `in_epoch` of `epoch_steps`
    are done of this one."""
    in_epoch: int | None = None
    epoch_steps: int | None = None
    epochs: int | None = None  # How many there are to be.
    local_rank: int | None = None
    host: str | None = None

    @property
    def has_own_loss(self) -> bool:
        """Whether it gives a loss beside a count that is rounded (`'epoch': 0.01`): news at the same count, too."""
        return self.loss is not None and self.step is None
