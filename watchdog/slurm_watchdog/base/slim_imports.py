"""Imported before all else by the agent and its helper: what msgspec finds it uses, and typing_extensions is
0.4 MiB in each of their images.

It is there for pydantic's sake, which neither of them loads; from 3.11 on the standard typing has all that
msgspec needs.
"""

from __future__ import annotations

import sys
from typing import Any, cast

if "msgspec" not in sys.modules and "typing_extensions" not in sys.modules:
    modules = cast("dict[str, Any]", sys.modules)
    modules["typing_extensions"] = None  # an import fails, as if it were not installed
    import msgspec  # noqa: F401

    del modules["typing_extensions"]
