"""Dumps of the Flight Recorder as PyTorch writes them with NCCL, entry by entry (ProcessGroupNCCL.cpp, 2.5 and later)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from slurm_watchdog.model.collective_records import CollectiveRecord
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder

WORLD = "0"


class Recorder:
    """What one rank records. Peers are ranks of the job; `done` is whether an operation has finished by the dump; `now`
    is when what comes next begins, as a date (0: the recorder does not say)."""

    def __init__(
        self,
        rank: int,
        groups: Mapping[str, Sequence[int]],
        *,
        room: int = 2000,
        old: bool = False,
        first: int = 0,
        counts: Mapping[str, int] | None = None,
    ):
        """`old`: a release in which a batch takes the number of a collective. `first`: entries that left the ring;
        `counts`: operations of each group that were among these."""
        self.rank, self.groups, self.room, self.old = rank, groups, room, old
        self.entries: list[dict[str, Any]] = []
        self.now, self._next = 0.0, first
        self._before = dict(counts or {})
        self._collectives = dict(self._before)
        self._sendings: dict[str, int] = {}
        self._instances: dict[str, int] = {}

    def collective(self, name: str = "all_reduce", group: str = WORLD, *, done: bool = True, elements: int = 8) -> None:
        self._collectives[group] = self._collectives.get(group, 0) + 1
        self._add(group, name, done, elements=elements)

    def collectives(self, number: int, name: str = "all_reduce", group: str = WORLD) -> None:
        """So many that have finished."""
        for _ in range(number):
            self.collective(name, group)

    def coalesced(self, names: Sequence[str], group: str = WORLD, *, done: bool = True) -> None:
        self._collectives[group] = self._collectives.get(group, 0) + 1
        for name in names:
            self._add(group, name, done=False)
        self._add(group, "coalesced", done, elements=0)

    def send(self, peer: int, group: str = WORLD, *, done: bool = True) -> None:
        self._sendings[group] = self._sendings.get(group, 0) + 1
        self._add(group, self._talk("send", peer, group), done, p2p=True)

    def recv(self, peer: int, group: str = WORLD, *, done: bool = True) -> None:
        self._sendings[group] = self._sendings.get(group, 0) + 1
        self._add(group, self._talk("recv", peer, group), done, p2p=True)

    def batch(self, *parts: tuple[str, int], group: str = WORLD, done: bool = True, ended: bool = True) -> None:
        """`batch_isend_irecv`. Without `ended`: the rank has not come to its end."""
        self._sendings[group] = self._sendings.get(group, 0) + 1
        if self.old:
            self._collectives[group] = self._collectives.get(group, 0) + 1
        for direction, peer in parts:
            self._add(group, self._talk(direction, peer, group), done=False, p2p=True)
        if ended:
            self._add(group, "coalesced", done, p2p=not self.old, elements=0)

    def again(self, group: str = WORLD) -> None:
        """The group is made again under its name, and counts from the beginning."""
        self._instances[group] = self._instances.get(group, 0) + 1
        self._collectives[group] = self._sendings[group] = 0

    def give_up(self) -> None:
        """The watchdog of NCCL has met its timeout, and let go of what has not finished."""
        for each in self.entries:
            each["retired"] = True

    def dump(self, *, only_active: bool = False, hashed: bool = False, as_json: bool = False) -> bytes:
        """`only_active`: without what has finished, and with the status of each group. `hashed`: groups have names
        without an order."""
        kept = self.entries[-self.room :]
        entries = [each for each in kept if not only_active or each["state"] != "completed"]
        name = {group: f"{crc32(group.encode()):08x}x" if hashed else str(at) for at, group in enumerate(self.groups)}
        name = name if only_active else {group: group for group in self.groups}
        config = {
            name[group]: {"name": name[group], "desc": group, "ranks": str(list(members))}
            for group, members in self.groups.items()
            if self.rank in members
        }
        entries = [
            each | {"process_group": (name[each["process_group"][0]], each["process_group"][1])} for each in entries
        ]
        status = self._status() if only_active else {}
        document = {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": status}
        return json.dumps(document).encode() if as_json else pickle.dumps(document, protocol=2)

    def _status(self) -> dict[str, dict[str, int]]:
        """As the watchdog thread keeps it: of what a group has begun last, and finished last, the number."""
        found: dict[str, dict[str, int]] = {
            str(list(self.groups).index(group)): {
                f"last_{what}_collective": number for what in ("enqueued", "completed")
            }
            for group, number in self._before.items()
        }
        for each in self.entries:
            number = each["p2p_seq_id"] if each["is_p2p"] else each["collective_seq_id"]
            status = found.setdefault(str(each["pg_id"]), {})
            status["last_enqueued_collective"] = number
            status.setdefault("last_started_collective", -1)
            status.setdefault("last_completed_collective", -1)
            if each["state"] == "completed" or each["retired"]:
                status["last_completed_collective"] = number
        return found

    def record(self, made_at: float | None = None, **more: bool) -> CollectiveRecord:
        return parse_flight_recorder(self.dump(**more), self.rank, made_at)

    def _talk(self, direction: str, peer: int, group: str) -> str:
        own, other = (sorted(self.groups[group]).index(rank) for rank in (self.rank, peer))
        return f"{direction} {own}{'->' if direction == 'send' else '<-'}{other}"

    def _add(self, group: str, name: str, done: bool, *, p2p: bool = False, elements: int = 8) -> None:
        self.entries.append(
            {
                "record_id": self._next, "pg_id": list(self.groups).index(group) + len(self.groups) * self._instances.get(group, 0), "is_p2p": p2p,
                "process_group": (group, "default_pg" if group == WORLD else group), "profiling_name": f"nccl:{name}",
                "collective_seq_id": self._collectives.get(group, 0), "p2p_seq_id": self._sendings.get(group, 0),
                "state": "completed" if done else "scheduled", "retired": False, "frames": [],
                "time_created_ns": int(self.now * 1e9),
                "input_sizes": [[elements]] if elements else [], "input_dtypes": ["Float"],
            }
        )  # fmt: skip
        self._next += 1


def recorders(ranks: int, groups: Mapping[str, Sequence[int]] | None = None, **more: Any) -> list[Recorder]:
    """One for each rank of a job; the group of all is always there."""
    every = {WORLD: tuple(range(ranks)), **(groups or {})}
    return [Recorder(rank, every, **more) for rank in range(ranks)]
