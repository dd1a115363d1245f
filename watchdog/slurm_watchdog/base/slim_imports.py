"""Imported before all else by the agent: what msgspec finds it uses, and typing_extensions is
0.4 MiB in each of their images.

It is there for SQLAlchemy's sake, on machines with the controller's package; msgspec does without it.
"""

from __future__ import annotations

import sys
from typing import Any, cast

if "msgspec" not in sys.modules and "typing_extensions" not in sys.modules:
    modules = cast("dict[str, Any]", sys.modules)
    modules["typing_extensions"] = None  # an import fails, as if it were not installed
    import msgspec  # noqa: F401

    del modules["typing_extensions"]
