"""What all values have in common."""

from __future__ import annotations

import msgspec


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Common settings of every value: immutable, by keyword only, defaults left off the wire.

    Values are trees, made once and never changed, so none can be part of a cycle: the collector of cycles
    need not walk over the millions of them that a large cluster has.
    """
