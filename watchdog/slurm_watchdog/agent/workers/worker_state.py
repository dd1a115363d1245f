"""What a worker keeps from one request to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Memory = TypeVar("Memory")


def _drop(part: Any) -> None:
    """No one waits for parts."""


@dataclass
class WorkerState:
    """One worker's: the functions that serve its requests get it with each of them."""

    uid: int = -1  # The user that it has become; -1: none.
    own_uid: int | None = None  # The one user that an agent without rights, and without a helper, may look at: itself.
    send_part: Callable[[Any], None] = _drop
    """Sends a part of the answer ahead: it arrives even if the next line of the function never returns."""
    ends: bool = False  # Set by a function: the worker ends with this answer, and the next request goes to a fresh one.
    is_limited: bool = False  # Its address space is bounded already.
    _memories: dict[type[Any], Any] = field(default_factory=dict)

    def memory(self, kind: type[Memory]) -> Memory:
        """The one value of this type that lasts as long as the worker; made when it is first wanted."""
        if kind not in self._memories:
            self._memories[kind] = kind()
        memory: Memory = self._memories[kind]
        return memory
