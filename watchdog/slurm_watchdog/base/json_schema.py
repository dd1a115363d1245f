"""The version of the JSON that commands print."""

from __future__ import annotations

JSON_SCHEMA_VERSION = 1  # Rises when a key is taken away or changes its meaning, not when one is added.
