"""NVIDIA's numbered faults (Xid): what each means, what to blame, and whether it alone may keep jobs off a
node: `data/xids.conf`.

Sources: NVIDIA's Xid catalogue for Ampere and newer (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors
with the Xid Catalog": name, meaning, immediate resolution), the older "Xid Errors" listing for what that
leaves out, and the driver's own header nverror.h (open-gpu-kernel-modules 590) for the newest numbers. The
words are ours.

`may_exclude_node` is true only where the number alone says that a piece of hardware is broken or will not
work again before it is reset. What is usually the hardware, but may also come from a neighbour, a driver or
someone's reset, says no: a wrong yes costs a healthy node, a wrong no costs a second look. The kernel's line
often says more than the number (see slurm_watchdog.parse.kernel_log.line).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields, read_shipped
from slurm_watchdog.model.observations import FaultSeverity

Blame = Literal["application", "hardware", "driver", "either"]


class XidRow(msgspec.Struct, frozen=True):
    """One fault. `blame` is who usually causes it; `either` where the number alone does not tell."""

    number: int
    name: str
    text: str
    blame: Blame
    severity: FaultSeverity
    may_exclude_node: bool = False
    consequence: bool = False  # It follows from something else, which is to be looked for before it.
    needs_reset: bool = False  # NVIDIA's catalogue asks for a reset of the GPU before it is used again.


Side = Literal["gpu", "link", "peer", "none"]
"""Whose an event of NVLink is: this GPU's, the wire's, the other end's, or no one's."""
SIDES: tuple[Side, ...] = get_args(Side)


class NvlinkUnit(msgspec.Struct, frozen=True):
    """How a unit of NVLink numbers its events (Xids 144 to 150)."""

    names: tuple[str, ...]
    by_event: bool  # Its code is that of the link's event; otherwise the unit's status.
    sides: Mapping[int, Side]


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
        fields.flag("needs_reset"),
    )


def nvlink_row(fields: Fields) -> NvlinkUnit:
    """The row of a section [nvlink UNIT]."""
    names = (fields.entry.name, *fields.text("also").split())
    by_event = fields.choice("code", ("event", "status")) == "event"
    sides = {int(code, 16): side for side in SIDES for code in fields.text(side).split()}
    return NvlinkUnit(names, by_event, sides)


_ROWS = read_shipped("xids.conf", {"xid": xid_row, "nvlink": nvlink_row})
XIDS: dict[int, XidRow] = {row.number: row for row in _ROWS["xid"]}
"""Every number that is known to be used. Numbers that NVIDIA's lists call unused are absent."""


def describe_xid(number: int) -> XidRow:
    """The row of `number`; for one that is not in the table a careful one that blames no one and excludes nothing."""
    own = site_rows.current().by_kind.get("xid", ())
    row: XidRow | None = next((row for row in own if row.number == number), XIDS.get(number))
    if row is not None:
        return row
    return XidRow(number, "unknown", f"Xid {number}: not in our table", "either", FaultSeverity.WARNING)


NVLINK: dict[str, NvlinkUnit] = {name: row for row in _ROWS["nvlink"] for name in row.names}
"""Each unit, by each name that a driver prints."""
_NVLINK_EVENT = late_regex(
    r",? (?P<unit>[a-z_0-9]+)(?:/\w+)? (?P<word>non-?fatal|fatal) xc\d i\d+ link -?\d+ "
    r"\((?P<info>0x[0-9a-f]{1,8}) (?P<status>0x[0-9a-f]{1,8})\b"
)
EVENT_CODE = 0x3F << 20  # Bits of the first number: the code of a link's event.


def side_of_nvlink_event(rest: str) -> Side | None:
    """Whose the event is that an Xid 144 to 150 reports, by the text (in lower case) behind its number; None: the
    line does not say, or says a code that is not known."""
    match = _NVLINK_EVENT.match(rest)
    unit = NVLINK.get(match["unit"].upper()) if match else None
    if match is None or unit is None:
        return None
    code = (int(match["info"], 16) & EVENT_CODE) >> 20 if unit.by_event else int(match["status"], 16)
    side = unit.sides.get(code)
    return "none" if side == "gpu" and match["word"] != "fatal" else side
