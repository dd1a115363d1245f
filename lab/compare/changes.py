"""Lines that a training has to change for a peer: inserted into a copy of the trainer, and counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Lines that go below a line of the trainer, or replace it."""

    below: str
    """A line as it stands there, once, without its indentation."""
    lines: tuple[str, ...]
    """Without indentation, but for that within them: they get that of the line."""
    replaces: bool = False


def apply(source: str, changes: tuple[Change, ...]) -> str:
    """The trainer with these changes. Raises ValueError where a line is not there exactly once."""
    rows = source.splitlines()
    for change in changes:
        found = [number for number, row in enumerate(rows) if row.strip() == change.below]
        if len(found) != 1:
            raise ValueError(f"the trainer has {len(found)} lines {change.below!r}")
        (at,) = found
        indent = rows[at][: len(rows[at]) - len(rows[at].lstrip())]
        rows[at + (not change.replaces) : at + 1] = [indent + line for line in change.lines]
    return "\n".join(rows) + "\n"


def lines_changed(changes: tuple[Change, ...]) -> int:
    """How many lines of a training are new or another; a line that stays is none, nor is an empty one."""
    return sum(bool(line) and line.strip() != change.below for change in changes for line in change.lines)


_IMPORT = Change(
    "import torch.distributed as dist", ("import nvidia_resiliency_ext.fault_tolerance as fault_tolerance",)
)
_CLIENT = Change("self.step = 0", ("self.monitor = fault_tolerance.RankMonitorClient()",))
_LEARNT = Change('self.step = saved["step"]', ('self.monitor.load_state_dict(saved["monitor"])',))
_STATE = Change(
    'state = {"model": self.net.state_dict(), "step": self.step}',
    ('state = {"model": self.net.state_dict(), "step": self.step, "monitor": self.monitor.state_dict()}',),
    replaces=True,
)
_BEGIN = Change("self.net = net", ("self.monitor.init_workload_monitoring()",))
_END = Change("Training(args).train()", ("training = Training(args)", "training.train()", "training.monitor.shutdown_workload_monitoring()"),
              replaces=True)  # fmt: skip

HEARTBEATS: tuple[Change, ...] = (
    _IMPORT, _CLIENT, _LEARNT, _STATE, _BEGIN, _END,
    Change(
        "self.optimizer.step()",
        (
            "self.monitor.send_heartbeat()",
            "if self.step == self.args.save_interval + 2:",
            "    self.monitor.calculate_and_set_hb_timeouts()",
        ),
    ),
)  # fmt: skip
"""NVRx, heartbeats: limits are learnt once a checkpoint has been written, as its integration guide advises."""

SECTIONS: tuple[Change, ...] = (
    _IMPORT, _CLIENT, _LEARNT, _STATE, _END,
    Change("self.net = net", ("self.monitor.init_workload_monitoring()", 'self.monitor.start_section("setup")')),
    Change("batches = iter(self.loader)", ('self.monitor.end_section("setup")',)),
    Change("began = time.monotonic()", ('self.monitor.start_section("step")',)),
    Change('self.say(f"step {self.step}{total} | loss {mean.item() / self.world:.4f} | step_time: {took:.3f} s")',
           ('self.monitor.end_section("step")',)),
    Change(
        "def save_checkpoint(self, seconds):",
        (
            "def save_checkpoint(self, seconds):",
            '    self.monitor.start_section("checkpointing")',
            "    self.write_checkpoint(seconds)",
            '    self.monitor.end_section("checkpointing")',
            "",
            "def write_checkpoint(self, seconds):",
        ),
        replaces=True,
    ),
)  # fmt: skip
"""NVRx, sections."""
