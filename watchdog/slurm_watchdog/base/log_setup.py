"""Logging to standard error, one line a record, in the form journald understands."""

from __future__ import annotations

import logging
import os
import sys

from slurm_watchdog.base.redact import mask_text

# Severity prefixes of sd-daemon(3): journald takes them off and sets the priority of the line.
_PRIORITY = {
    logging.DEBUG: "<7>",
    logging.INFO: "<6>",
    logging.WARNING: "<4>",
    logging.ERROR: "<3>",
    logging.CRITICAL: "<2>",
}


class MaskingFormatter(logging.Formatter):
    """What is written to the log has no secrets in it: lines of jobs, paths and errors of others go there, too."""

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


class _JournalFormatter(MaskingFormatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", "\n  ")
        return f"{_PRIORITY.get(record.levelno, '<6>')}{text}"


def set_up(level: str = "INFO", *, for_person: bool = False) -> None:
    """Sends all records of `level` and above to standard error; dates only where journald does not add them.
    `for_person`: between the lines of his own command, so without names of modules."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("JOURNAL_STREAM"):
        handler.setFormatter(_JournalFormatter("%(name)s: %(message)s"))
    elif for_person:
        handler.setFormatter(MaskingFormatter("slurm-watchdog %(asctime)s: %(message)s", "%H:%M:%S"))
    else:
        handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
