"""Metrics of a process, as Prometheus would read them."""

from __future__ import annotations

import gzip
from http.client import HTTPConnection, HTTPException

from lab.bench import peers


def read_metrics(port: int) -> dict[str, float]:
    """The agent's own metrics by name and labels, as text; empty if there are none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        data = peers.scrape(connection)
    except (OSError, HTTPException):
        return {}
    finally:
        connection.close()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float]:
    """`name{labels} value` lines of the Prometheus text format, by all that stands before the value."""
    found = {}
    for line in text.splitlines():
        name, space, value = line.rpartition(" ")
        if space and not line.startswith("#"):
            found[name] = float(value)
    return found
