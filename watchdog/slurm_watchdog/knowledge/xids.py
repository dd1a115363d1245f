"""NVIDIA's numbered faults (Xid): what each means, what to blame, and whether it alone may keep jobs off a
node: `data/xids.conf`.

Sources: NVIDIA's Xid catalogue for Ampere and newer (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors
with the Xid Catalog": name, meaning, immediate resolution), the older "Xid Errors" listing for what that
leaves out, and the driver's own header nverror.h (open-gpu-kernel-modules 590) for the newest numbers. The
words are ours.

`may_exclude_node` is true only where the number alone says that a piece of hardware is broken or will not
work again before it is reset. What is usually the hardware, but may also come from a neighbour, a driver or
somebody's reset, says no: a wrong yes costs a healthy node, a wrong no costs a second look. The kernel's line
often says more than the number (see slurm_watchdog.parse.kernel_log.line).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields
from slurm_watchdog.knowledge.shipped import read_shipped
from slurm_watchdog.model.observations import FaultSeverity

Blame = Literal["application", "hardware", "driver", "either"]


@dataclass(frozen=True)
class XidRow:
    """One fault. `blame` is who usually causes it; `either` where the number alone does not tell."""

    number: int
    name: str
    text: str
    blame: Blame
    severity: FaultSeverity
    may_exclude_node: bool = False
    consequence: bool = False
    """It follows from something else, which is to be looked for before it."""


def xid_row(fields: Fields) -> XidRow:
    """The row of a section [xid NUMBER]."""
    severity = fields.choice("severity", tuple(FaultSeverity))
    return XidRow(
        fields.number_of_name(),
        fields.text("name", required=True),
        fields.text("means", required=True),
        cast("Blame", fields.choice("blame", get_args(Blame)) or "either"),
        FaultSeverity(severity or FaultSeverity.WARNING),
        fields.flag("excludes_node"),
        fields.flag("consequence"),
    )


XIDS: dict[int, XidRow] = {row.number: row for row in read_shipped("xids.conf", {"xid": xid_row})["xid"]}
"""Every number that is known to be used. Numbers that NVIDIA's lists call unused are absent."""


def describe_xid(number: int) -> XidRow:
    """The row of `number`; for one that is not in the table a careful one that blames nobody and excludes nothing."""
    own = site_rows.current().by_kind.get("xid", ())
    row: XidRow | None = next((row for row in own if row.number == number), XIDS.get(number))
    if row is not None:
        return row
    return XidRow(number, "unknown", f"Xid {number}: not in our table", "either", FaultSeverity.WARNING)
