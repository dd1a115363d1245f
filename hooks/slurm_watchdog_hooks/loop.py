"""A training loop of one's own, and what all callbacks are made of: kill switch and heartbeat together."""

import contextlib
import sys

from slurm_watchdog_hooks.heartbeat import Heartbeat
from slurm_watchdog_hooks.switch import KillSwitch


class Watchdog(object):
    """Kill switch and heartbeat of one process. Make one on all ranks after they know each other.

    total      steps of the whole training, for people.
    heartbeat  a Heartbeat of one's own.
    options    of KillSwitch.
    """

    def __init__(self, total=None, heartbeat=None, **options):
        self.switch = KillSwitch(**options)
        self.heartbeat = heartbeat or Heartbeat()
        self.leaving = False
        self._total = total
        self.heartbeat.report(total=total)

    def report(self, step, loss=None, total=None):
        """Remembers that a step was made, for the heartbeat. Costs nothing and never raises."""
        self.heartbeat.report(step=step, total=total or self._total, loss=loss)

    def step(self, step, loss=None, total=None):
        """A step was made: whether to save and leave now. The same on all ranks, which call it once a step."""
        self.report(step, loss, total)
        return self.should_leave()

    def should_leave(self):
        """Whether all ranks have agreed to save and leave; it stays so."""
        self.leaving = self.leaving or self.switch.agreed()
        return self.leaving

    @contextlib.contextmanager
    def phase(self, name):
        """`with watchdog.phase("evaluating"):` or "checkpointing": so long the steps may stand."""
        self.heartbeat.report(phase=name)
        try:
            yield
        finally:
            self.heartbeat.report(phase="training")

    def steps(self, first, last):
        """`range(first, last)` that ends after the step at which all ranks agreed to leave; then `leaving` is true."""
        for step in range(first, last):
            yield step
            if self.should_leave():
                return

    def why(self):
        """Why we leave, as far as this rank knows."""
        return self.switch.reason or "another rank saw the switch"

    def announce(self, step):
        """Says on standard output that a checkpoint was saved for the kill switch."""
        sys.stdout.write("kill switch: saved checkpoint at step {}: {}\n".format(step, self.why()))
        sys.stdout.flush()
