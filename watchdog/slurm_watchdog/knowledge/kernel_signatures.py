"""How kernels and drivers write that something is wrong: the rows of `data/kernel_signatures.conf`; the first
that matches is taken.

`heads` are the first three characters of every line that the row can match; a row without heads is for lines
that may begin with anything, such as a program's name. One of the `needles` is in every such line, in lower case. Head
and needles are what most lines cost. `regex` is matched from the beginning of the message, so that a program's
name or a file's name inside a line can't play another line. Its groups are the fields of
slurm_watchdog.parse.kernel_log.line.KernelFact. The words of the rows are from the sources: Linux 4.18 to
6.18, NVIDIA's open-gpu-kernel-modules 470 to 590, amdgpu, Lustre 2.10 to 2.15, libceph and ceph, mlx5 and its
peers, and for drivers without public source (GPFS, WekaFS, BeeGFS) what their users published.

Lines that hold words of users where a driver's stand are in slurm_watchdog.knowledge.kernel_user_text.
"""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields
from slurm_watchdog.knowledge.shipped import read_shipped
from slurm_watchdog.model.observations import FaultSeverity

PARTS = ("none", "memory", "cpu", "pcie", "nic", "disk", "filesystem", "heat", "gpu", "link")
"""Parts of a machine that a line may be about; `none`: a program, a server, the kernel itself."""
AS_WARNING = 4
AS_INFORMATION = 6  # The kernel's level of dev_info and pci_info.


class Signature(msgspec.Struct, frozen=True):
    """One way to write one thing."""

    name: str
    heads: tuple[str, ...]
    needles: tuple[str, ...]  # One of them is in every such line, in lower case.
    regex: re.Pattern[str]
    severity: FaultSeverity
    may_exclude_node: bool = False
    consequence: bool = False  # It follows from something else, which is to be looked for before it.
    highest_level: int = AS_WARNING
    """Of lines that may take a node away: the kernel's level (4: warning). Programs that crash write theirs
    as information (6)."""
    part: str = "none"  # One of PARTS.


def kernel_row(fields: Fields) -> Signature:
    """The row of a section [kernel NAME]."""
    severity = FaultSeverity(fields.choice("severity", tuple(FaultSeverity)) or FaultSeverity.WARNING)
    heads, needles = fields.texts("begins"), fields.needles()
    return Signature(
        fields.name(),
        heads,
        needles,
        fields.expression(re.IGNORECASE),
        severity,
        fields.flag("excludes_node"),
        fields.flag("consequence"),
        AS_INFORMATION if fields.flag("as_information") else AS_WARNING,
        fields.choice("part", PARTS, required=False) or PARTS[0],
    )


SIGNATURES: tuple[Signature, ...] = read_shipped("kernel_signatures.conf", {"kernel": kernel_row})["kernel"]

"""The rows of the package."""


def kernel_rows() -> tuple[Signature, ...]:
    """The rows in force in this process: a site's, and then those of the package."""
    return site_rows.current().before("kernel", SIGNATURES, lambda row: row.name)


HARMLESS = late_regex(
    r"audit[:(]|type=\d+ audit|perf: interrupt took too long|\[Firmware (?:Bug|Warn|Info)\]|ACPI (?:BIOS )?(?:Error|Warning)|systemd\[1\]:"
    r"|device-mapper: core: CONFIG_|Command line:|Kernel command line:"
    r"|(?:blk_update_request: |print_req_error: )?(?:Buffer )?(?:I/O|critical \w+) error(?:,| on) dev(?:ice)? (?:fd|sr)\d+,",
    re.IGNORECASE,
)
"""Beginnings of lines that are about nothing which concerns a job, whatever words they contain: a drive for floppy disks
or CDs, that a virtual machine or a management controller has, fails whenever it is empty."""
