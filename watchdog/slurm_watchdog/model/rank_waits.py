"""How often each rank of a run was found waiting, in the looks of agents and in dumps of stacks."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct

WHOLE = 255  # Of the shares in a WaitBlock.


class RankKey(Struct, kw_only=False):
    """One process that holds a rank."""

    rank: int
    node: str
    pid: int
    start_ticks: int


class WaitBlock(Struct):
    """A minute or so. One byte a rank, in the order of `ranks`: thousands of ranks for hours."""

    begin_at: float
    end_at: float  # On the clock of `ClusterView.now`.
    ranks: tuple[RankKey, ...]
    seconds: bytes  # For which it is known how long its main thread slept.
    asleep: bytes  # The share of these in which it did, in 255ths.
    gpu_looks: bytes  # At the utilisation of its GPU.
    gpu_idle: bytes  # The share of that time in which its GPU did nothing, in 255ths.


class DumpedRank(Struct):
    """Where one rank stood in one dump."""

    key: RankKey
    asleep: bool  # Its main thread slept.
    with_peers: bool  # It stood in a call that waits for other ranks.
    in_backward: bool = False
    """In a backward pass: DistributedDataParallel waits there for its buckets, without a frame of its own."""
    call: str  # `function (file:line)` of the innermost frame that is its own program's; empty: not known.


class WaitDump(Struct):
    """One dump of all ranks, taken to see where they usually are."""

    at: float
    ranks: tuple[DumpedRank, ...]
