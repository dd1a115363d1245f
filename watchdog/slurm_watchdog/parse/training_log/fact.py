"""What one line of a training log says: a value. Pure."""

from __future__ import annotations

import msgspec

from slurm_watchdog.model.observations import EventKind


class LogFact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a line says. A line of progress has a `step` or a `count`; both compare within one pattern only."""

    kind: EventKind
    pattern: str
    step: int | None = None
    count: float | None = None
    """Where there is no step: a number that rises and is none (epochs, tokens, samples). It is never shown or
    subtracted as a step."""
    total_steps: int | None = None
    epoch: int | None = None
    """Epochs that were finished before, of a line that counts steps within one; `in_epoch` of `epoch_steps`
    are done of this one."""
    in_epoch: int | None = None
    epoch_steps: int | None = None
    epochs: int | None = None  # How many there are to be.
    initial: bool = False
    """It says where a bar begins (`40/90 [00:00<?, ?it/s]`): a position, and no step that was made."""
    step_s: float | None = None
    loss: float | None = None
    phase: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None

    @property
    def has_own_loss(self) -> bool:
        """Whether it gives a loss beside a count that is rounded (`'epoch': 0.01`): news at the same count, too."""
        return self.loss is not None and self.step is None
