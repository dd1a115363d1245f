"""Stands for the pool of workers: remembers what was asked, and answers when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import Request
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.model.observations import MountProbe

FINE = {
    "mounted": True, "responding": True, "seconds": 0.01, "error": None, "device": "srv:/x", "fs_type": "nfs4",
    "wrote": False,
}  # fmt: skip


@dataclass
class FakeChildren:
    """Stands for Probes: remembers what was asked, and answers, times out or dies when the test says so."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    busy: dict[str, tuple[float, Callable[[Answer], None]]] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    somewhere: set[str] = field(default_factory=set)
    """Hung, and not seen to stand in a call."""

    def ask(
        self, key: str, request: Request[Any], deadline_s: float, now: float, then: Callable[[Answer[Any]], None],
        uid: int = -1, **_: Any,
    ) -> int | None:  # fmt: skip
        if key in self.busy:
            return None
        self.alive.add(key)
        self.busy[key] = (now, then)
        self.asked.append(
            {
                "key": key,
                "function": request.task,
                "uid": uid,
                "at": now,
                **msgspec.structs.asdict(request),
            }
        )
        return len(self.asked)

    def answer(self, value: Any = FINE, error: str | None = None, key: str = "") -> None:
        key = key or list(self.busy)[-1]
        _, then = self.busy.pop(key)
        if isinstance(value, dict) and "mounted" in value:
            mount = next(each["mount"] for each in reversed(self.asked) if each["key"] == key)
            value = {"responding": False, "seconds": 0.0, **value, "mount": mount if value["mounted"] else ""}
            del value["mounted"]
            value = MountProbe(**value)
        if key in self.hung:
            self.hung.discard(key)  # too late: the answer is dropped
        else:
            then(Answer(1, key, value, error))

    def time_out(self, now: float, key: str = "") -> None:
        key = key or list(self.busy)[-1]
        since, then = self.busy[key]
        self.hung.add(key)
        then(Answer(1, key, None, "no answer", True, now - since))

    def die(self, key: str = "") -> None:
        key = key or list(self.busy)[-1]
        self.alive.discard(key)
        self.hung.discard(key)
        self.busy.pop(key, None)

    def hung_since(self, key: str, now: float) -> float | None:
        return now - self.busy[key][0] if key in self.hung else None

    def is_stuck(self, key: str) -> bool:
        return key in self.hung and key not in self.somewhere

    def retire(self, key: str) -> None:
        if key not in self.busy:
            self.alive.discard(key)

    def names(self) -> list[str]:
        return list(self.alive)


def looks(children: Any) -> UserLooks:
    """Every user may be asked about, of these children."""
    made = UserLooks(cast("Children", children), ProcessTable())
    made.refusal = lambda uid: None  # type: ignore[method-assign]
    return made
