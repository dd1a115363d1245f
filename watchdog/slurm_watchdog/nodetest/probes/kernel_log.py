"""Xids in the kernel's log of a node, where this user may read it. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

KMSG = "/dev/kmsg"
KERNEL_FACILITY = 0
"""`kern` (syslog(3)): the kernel refuses it to programs that write there."""
NEEDLE = b"NVRM: Xid"
"""As NVIDIA's driver begins the line ("Xid Errors", docs.nvidia.com/deploy/xid-errors)."""
MOST = 20
"""Of the newest lines that are kept."""
RECORD = 8192
"""Bytes of a read: the kernel gives one record at a time, of at most CONSOLE_EXT_LOG_MAX (8192) bytes."""
MOST_RECORDS = 1 << 20


def xid_facts(path: str = KMSG) -> dict[str, Any]:
    """`kernel_log_at` (the sequence of its last record), and `xid_N` of each line with a Xid, N its sequence; or
    `kernel_log` with why it is unknown."""
    try:
        return parse_records(read_records(path))
    except OSError as error:
        return {"kernel_log": f"unknown: {error.strerror}"}


def read_records(path: str = KMSG) -> Iterator[bytes]:
    """All that the kernel still has, oldest first (Documentation/ABI/testing/dev-kmsg). Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(fd, RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:  # it was overwritten meanwhile; the next read continues behind it
                continue
            if not record:
                return
            yield record
    finally:
        os.close(fd)


def parse_records(records: Iterable[bytes]) -> dict[str, Any]:
    """Given records as `6,339,5140900,-;message`: the facts. Raises OSError where there is none at all."""
    last, lines = None, []
    for record in records:
        prefix, _, text = record.partition(b";")
        fields = prefix.split(b",")
        try:
            priority, sequence = int(fields[0]), int(fields[1])
        except (ValueError, IndexError):
            continue
        last = sequence
        if NEEDLE in text and priority >> 3 == KERNEL_FACILITY:
            message = text.partition(b"\n")[0].decode("utf-8", "replace")[:500]
            lines.append({"sequence": sequence, "text": message})
    if last is None:
        raise OSError(0, "it is empty")
    return {"kernel_log_at": last, **{f"xid_{each['sequence']}": each for each in lines[-MOST:]}}
