"""What ranks recorded of their collectives, as PyTorch's Flight Recorder or NCCL's RAS tells: of all that they did, how
far each is, and what it has not finished."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct


class Call(Struct):
    """One collective that a rank has entered and not finished."""

    seq: int  # Number of the collective in its communicator, the same on all ranks.
    name: str  # `all_reduce`, without the backend.
    elements: int | None = None  # Of its input, where all ranks have to hand in as many; None: not so, or not known.
    types: tuple[str, ...] = ()  # Of its input, where they have to be the same on all ranks.
    needs_all: bool = False  # Whether no rank finishes it before all have entered it.
    since: float | None = None  # When this rank entered it, as a date of its node's clock; None: not known.


class Communicator(Struct):
    """How far one rank is in one communicator."""

    key: str  # The same on all its ranks, and on no rank of another.
    label: str  # As people know it: `default_pg`, `dp`, `group 3`.
    entered: int  # Number of the last collective that this rank has entered; 0: none.
    waits: tuple[Call, ...] = ()  # The first of those that it has not finished.
    members: tuple[int, ...] = ()  # Its ranks in the job, where `waits` has any and that is known.
    finished: int | None = None  # Number of the last collective that this rank has finished; None: not known.
    together: int = 0
    """Number of the last collective that it has finished, and that no rank finishes before all have entered it; 0:
    none is known. A record in which another rank has not entered that one is older than this."""
    sends: bool = False  # This rank sends or receives in it.
    by_status: bool = False  # Its numbers are a status's, which counts sends and receives where there are any.
    comparable: bool = True  # False: ranks count its collectives differently, and no number says who is behind.


class CollectiveRecord(Struct):
    """All that one rank recorded, at one moment."""

    rank: int
    communicators: tuple[Communicator, ...] = ()
    whole: bool = True  # False: it has more communicators than these; of others only `elsewhere` is known.
    elsewhere: int | None = None  # It has entered no later collective in a communicator not in it; None: not known.
    peers: tuple[int, ...] = ()  # Ranks with which it has begun to send or receive, and has not finished.
    peers_since: tuple[float | None, ...] = ()  # For each of them, when it began; as `Call.since`.
    busy: bool = False  # It has such an operation, also where the peer is not known.
    unsure_peers: tuple[int, ...] = ()  # Those of `peers` whose operations wait for others, too: they may be done.
    made_at: float | None = None  # When this was recorded, as `Call.since`.
    since_start: bool = False  # Whether it holds all that the rank did: nothing had left its buffer.
    lossy: bool = False  # Whether what the rank has not finished may have left its buffer, which is small.
    active_only: bool = False  # Finished ones were left out of it: `finished` of its communicators is known.
    point_to_point: bool = True  # Whether its sending and receiving is recorded: with gloo it is not.


class RecordSet(Struct):
    """The records of one source, of all ranks that have one."""

    source: str  # `Flight Recorder`.
    records: tuple[CollectiveRecord, ...]
    facts: tuple[str, ...] = ()  # What else it says.


class RasRank(Struct):
    """One member of a communicator, as NCCL's RAS has it."""

    rank: int  # In the communicator.
    host: str | None = None  # Address of its node, as NCCL's bootstrap network has it; None: not known.
    pid: int | None = None  # In its own PID namespace.
    counts: tuple[tuple[str, int], ...] = ()
    """(kind, how many) of the collectives that it has called; kind is empty before NCCL 2.26, which counts all
    together. In text, kinds of which all ranks have called as many are left out."""
    unreachable: bool = False  # Its process does not answer the others' RAS threads: it is stopped, or gone.
    apart: bool = False  # Its process answers, and has no part in this communicator: it has left it, or not come to it.


class RasCommunicator(Struct):
    """One communicator."""

    key: str
    size: int
    ranks: tuple[RasRank, ...]


class RasAnswer(Struct):
    """What NCCL's RAS said of a whole job, at one moment."""

    release: str  # `2.28.7`.
    communicators: tuple[RasCommunicator, ...] = ()  # In text, only those with something to report.
    silent: tuple[tuple[str, int], ...] = ()  # In text, (host, pid) of each process that does not answer.
