"""Network links of a node: ports of InfiniBand and RoCE adapters, and Ethernet."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct


class Link(Struct):
    """One link, as the kernel showed it at the newest look. None: it did not say."""

    name: str  # `mlx5_0/1` of a port, else the interface: `ens1f0np0`.
    kind: str  # `infiniband`, `roce` or `ethernet`.
    up: bool | None = None
    rate_bits_s: int | None = None  # At which it runs now.
    downs: int | None = None  # How often it went down since its driver was loaded.
    errors: int | None = None
    """Symbols and packets that arrived broken or had to be sent again so far: the sum of its counters of these."""
    received_bytes_s: float | None = None  # Between the last two looks.
    sent_bytes_s: float | None = None
    waits_s: float | None = None
    """Ticks in each second of that time in which it had something to send and no credit to do so: congestion. How long
    a tick is the adapter knows (PortXmitWait)."""
    marked_s: float | None = None  # Of RoCE: packets in each second of it that arrived with a mark of congestion (ECN).
    slowed_s: float | None = None
    """Of RoCE: notifications of congestion in each second of it for which it slowed down (CNP)."""
    resent_s: float | None = None
    """Of InfiniBand and RoCE: packets in each second of it that were missing, out of order, or not acknowledged."""

    @property
    def moved_bytes_s(self) -> float | None:
        """What went through it, both ways."""
        sent, received = self.sent_bytes_s, self.received_bytes_s
        return None if sent is None or received is None else sent + received
