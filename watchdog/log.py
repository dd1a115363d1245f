"""Logging to standard error, one line a record, in the form journald understands."""

from __future__ import annotations

import logging
import os
import sys

# Severity prefixes of sd-daemon(3): journald takes them off and sets the priority of the line.
_PRIORITY = {
    logging.DEBUG: "<7>",
    logging.INFO: "<6>",
    logging.WARNING: "<4>",
    logging.ERROR: "<3>",
    logging.CRITICAL: "<2>",
}


class _JournalFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", "\n  ")
        return f"{_PRIORITY.get(record.levelno, '<6>')}{text}"


def set_up(level: str = "INFO") -> None:
    """Sends all records of `level` and above to standard error; dates only where journald does not add them."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("JOURNAL_STREAM"):
        handler.setFormatter(_JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
