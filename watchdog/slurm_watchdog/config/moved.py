"""Where options were in releases before this one: a file that has them there loads, with a warning for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from slurm_watchdog.config.converting import Wrong

SECTIONS: Final = ("agent", "controller", "slurm", "security", "jobs", "policy", "ladder", "knowledge", "node_tests")
MOVED: Final[tuple[tuple[str, str], ...]] = (
    *((name, f"expert.{name}") for name in (*SECTIONS, "thresholds")),
    ("mode", "restart"),
    ("expert.agent.controller_url", "controller"),
    ("expert.agent.standby_urls", "controller"),
    ("expert.policy.budget", "restarts_per_hour"),
)
"""Old place -> new one, in this order: a row may begin with what a row before it has moved. Rows stay for one
release."""
RESTART_OF_MODE: Final = {"off": "never", False: "never", "observe": "never", "act": "all"}


class Moves:
    """Moves the values of a document that is no longer shared, in place."""

    def __init__(self, data: dict[str, Any], rows: tuple[tuple[str, str], ...] = MOVED):
        self.warned: Wrong = []
        self.wrong: Wrong = []
        self._data, self._from = data, dict[str, str]()
        for old, new in rows:
            *sections, name = old.split(".")
            inside: Any = data
            for section in sections:
                inside = inside.get(section) if isinstance(inside, dict) else None
            if isinstance(inside, dict) and name in inside and not (old == "controller" and _is_address(inside[name])):
                written = self.written(old)
                self.warned.append((written, f"is now {new!r}; the old place is read until the next release"))
                self._put(new, inside.pop(name), written)

    def written(self, path: str) -> str:
        """The path at which the user wrote what is now at `path`."""
        near = path
        while near and near not in self._from:
            near = near[: max(near.rfind("."), near.rfind("["), 0)]
        return self._from[near] + path[len(near) :] if near else path

    def _put(self, new: str, value: Any, written: str) -> None:
        *sections, name = new.split(".")
        inside: Any = self._data
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                return  # which is an error by itself
        if name not in inside:
            inside[name] = RESTART_OF_MODE.get(value, value) if written == "mode" else value
            self._from[new] = written
        elif new == "controller":
            inside[name] = [*_listed(inside[name]), *_listed(value)]
        elif isinstance(value, dict) and isinstance(inside[name], dict):
            for key, each in value.items():
                self._put(f"{new}.{key}", each, f"{written}.{key}")
        else:
            self.wrong.append((written, f"is given twice: also as {new}; remove one"))


def _is_address(value: object) -> bool:
    """Whether `controller` is that of agents, and not the section of releases before."""
    return not isinstance(value, Mapping)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []
