"""Parts of a machine, in words for people, and how lines of its kernel about them are weighed.

A line names its part (slurm_watchdog.knowledge.kernel_signatures.PARTS). What is uncorrected or fatal
(`may_exclude_node`) is reported at once and keeps jobs away; an error whose outcome is not known is reported at once;
what was corrected, and what a driver usually survives, is reported where it comes again and again. GPUs and links
are not here: `gpu_fault` and `link_fault` have them.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class PartWords(NamedTuple):
    """How a line about this part is reported."""

    place: str  # Lines of one place are about one fault; empty: the device that the line names.
    broken: str  # Uncorrected or fatal.
    failed: str  # An error that was survived, or whose outcome is not known.
    often: str = ""  # What was corrected, if it comes at a rate; empty: it is not reported.


PARTS: Final[dict[str, PartWords]] = {
    "memory": PartWords("board", "Uncorrected memory error", "Recovered memory error", "Corrected memory errors"),
    "cpu": PartWords("board", "Uncorrected machine check", "Machine check", "Corrected machine checks"),
    "heat": PartWords("heat", "Critical temperature", "High temperature", "CPUs throttled by heat"),
    "nic": PartWords("", "Network adapter failed", "Network adapter error", "Network adapter warnings"),
    "disk": PartWords("", "Disk failed", "Disk error", "Disk errors"),
    "filesystem": PartWords("", "Local filesystem failed", "Local filesystem failed"),
    "pcie": PartWords("", "Fatal PCIe error", "PCIe error", "PCIe errors"),
    "none": PartWords("board", "Hardware failed", ""),
}
"""The first part of several is the one that is reported: a memory error comes with a machine check, a dead adapter or
disk with a PCIe error. `none`: a site's own rows, and agents of an earlier release."""

SURVIVED = frozenset(
    {
        "pcie_uncorrected", "pcie_recovery_failed", "nic_firmware", "nic_stuck", "nvme_timeout", "ata_error", "disk_error", "filesystem_error",
        "raid_controller",
    }
)  # fmt: skip
"""Lines that a driver writes as errors, and usually survives (a reset, another try, a device that no job uses): they
are weighed as corrected ones are."""
