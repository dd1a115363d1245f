"""One line of the kernel's log, and files of them: time, level, message. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.base.late_regex import late_regex

KERNELS_OWN = late_regex(
    r"(?:<\d+>)?\[ *\d+\.\d{3,9}\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] |(?:kern"
    r"|daemon) *:\w+ *: |.{0,90}\bkernel: "
)
"""What stands before the kernel's words in dmesg (time since the boot, date, or -x), the journal and syslog."""
_MOSTLY = 0.6
_ENOUGH = 3


def is_kernel_log(lines: Iterable[str]) -> bool:
    """Whether most of these lines are the kernel's own: then someone gave a kernel log for a job's."""
    filled = [line for line in lines if line.strip()]
    own = sum(1 for line in filled if KERNELS_OWN.match(line))
    return own >= _ENOUGH and own >= _MOSTLY * len(filled)
