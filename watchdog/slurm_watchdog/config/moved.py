"""Options that were elsewhere before this release, or are no more (moved.conf): each is taken, with a warning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from slurm_watchdog.config.converting import Wrong

ROWS: Final = Path(__file__).with_name("moved.conf").read_text(encoding="utf-8").splitlines()
MOVED: Final = [tuple(row.split(" -> ")) for row in ROWS if " -> " in row]
REMOVED: Final = dict(row.split(": ", 1) for row in ROWS if ": " in row and not row.startswith("#"))
RESTART_OF_MODE: Final = {"observe": "never", "act": "all"}
OPT_OUT: Final = "watchdog=off"
OFF: Final = ("off", False)  # As YAML reads it.


class Moves:
    """Moves the values of a document that shares none of them, in place; then takes out what was removed."""

    def __init__(self, data: dict[str, Any]):
        self.warned: Wrong = []
        self.wrong: Wrong = []
        self._data, self._from = data, dict[str, str]()
        for old, new in MOVED:
            *sections, name = old.split(".")
            inside = self._at(*sections)
            if isinstance(inside, dict) and name in inside and (old != "controller" or isinstance(inside[name], dict)):
                written = self.written(old)
                self._warn(old, new)
                self._put(new, inside.pop(name), written)
        words = self._at("expert", "jobs", "opt_out_comment")
        if words not in (None, "", OPT_OUT):
            why = f"jobs with these words would be acted on: use {OPT_OUT}, or an entry of except with restart: never"
            self.wrong.append((self.written("expert.jobs.opt_out_comment"), why))
        self.warned += [(self.written(path), why) for path, why in take_removed(data)]
        self._exceptions()

    def written(self, path: str) -> str:
        """The path at which the user wrote what is now at `path`."""
        near = path
        while near and near not in self._from:
            near = near[: max(near.rfind("."), near.rfind("["), 0)]
        return self._from[near] + path[len(near) :] if near else path

    def _at(self, *path: str) -> Any:
        inside: Any = self._data
        for name in path:
            inside = inside.get(name) if isinstance(inside, dict) else None
        return inside

    def _warn(self, old: str, new: str) -> None:
        self.warned.append((self.written(old), f"is now {new}; the old place is read until the next release"))

    def _put(self, new: str, value: Any, written: str) -> None:
        *sections, name = new.split(".")
        inside: Any = self._data
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                return  # which is an error by itself
        if name not in inside:
            inside[name] = _restart_of(value) if written == "mode" else value
            self._from[new] = written
        elif new == "controller":
            inside[name] = [*_listed(inside[name]), *_listed(value)]
        elif isinstance(value, dict) and isinstance(inside[name], dict):
            for key, each in value.items():
                self._put(f"{new}.{key}", each, f"{written}.{key}")
        else:
            self.wrong.append((written, f"is given twice: also as {new}; remove one"))

    # ------------------------------------------------------------------------------------ the list `except`

    def _exceptions(self) -> None:
        """What was different in four places becomes entries of `except`, behind those that are there: rules of jobs,
        rules of kinds and modes of detectors, thresholds, mentions."""
        overrides = self._taken("expert.policy.overrides", list)
        for number, each in enumerate(overrides):
            self._rule(each, place := f"expert.policy.overrides[{number}]", {})
            later = [other.get("mode") for other in overrides[number + 1 :] if isinstance(other, dict)]
            if isinstance(each, dict) and not each.keys() & {"restart", "ladder"} and "act" in later:
                why = "give it a mode, too: the entries after it hold as well where it has none"
                self.wrong.append((self.written(place), why))
        kinds, detectors = self._taken("expert.policy.kinds", dict), self._at("detectors")
        places = {kind: f"expert.policy.kinds.{kind}" for kind in kinds}
        for kind, block in detectors.items() if isinstance(detectors, dict) else ():
            mode = block.pop("mode", None) if isinstance(block, dict) else None
            if mode in OFF:
                self._warn(f"detectors.{kind}.mode", f"detectors.{kind}.enabled")
                block["enabled"] = False
            elif mode is not None:
                self._warn(f"detectors.{kind}.mode", "an entry of except, with restart")
                places.setdefault(kind, f"detectors.{kind}")
                if isinstance(rule := kinds.setdefault(kind, {}), dict):
                    rule.setdefault("mode", mode)
        for kind, each in kinds.items():
            self._rule(each, places[kind], {"kind": kind})
        for number, each in enumerate(self._taken("thresholds", list)):
            self._add(each, f"thresholds[{number}]")
        for who, identity in self._taken("notify.slack.mentions", dict).items():
            key, _, name = str(who).partition(":")
            self._add({"match": {key: name}, "mention": identity}, f"notify.slack.mentions.{who}")

    def _taken(self, path: str, kind: type) -> Any:
        """The values of an option whose place is `except` now, taken out; nothing where it is of another kind."""
        *sections, name = path.split(".")
        inside = self._at(*sections)
        if not isinstance(inside, dict) or not isinstance(inside.get(name), kind):
            return kind()
        if inside[name]:
            self._warn(path, "except, where each value is taken from the first entry that matches and has it")
        return inside.pop(name)

    def _rule(self, given: Any, old: str, match: Mapping[str, str]) -> None:
        if not given:
            return
        place, written = self._add(given, old), self.written(old)
        if isinstance(given, dict):
            if match:
                given["match"] = match
            if "kinds" in given and isinstance(given.get("match"), dict):
                given["match"]["kind"] = given.pop("kinds")
                self._from[f"{place}.match.kind"] = f"{written}.kinds"
            if "mode" in given:
                mode = given.pop("mode")
                given |= {"ladder": []} if mode in OFF else {"restart": _restart_of(mode)}
                self._from[f"{place}.restart"] = f"{written}.mode"

    def _add(self, entry: Any, old: str) -> str:
        """Adds an entry to `except`; gives its place."""
        entries = self._data.setdefault("except", [])
        if not isinstance(entries, list):
            return "except"  # which is an error by itself
        entries.append(entry)
        place = f"except[{len(entries) - 1}]"
        self._from[place] = self.written(old)
        return place


def _restart_of(mode: Any) -> Any:
    return "never" if mode in OFF else RESTART_OF_MODE.get(mode, mode) if isinstance(mode, str) else mode


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def take_removed(data: dict[str, Any], rows: Mapping[str, str] = REMOVED) -> list[tuple[str, str]]:
    """Takes the removed options out of a file's values, in place; those of `except`, too. Returns the path of
    each, with the sentence about it."""
    found: list[tuple[str, str]] = []
    for path, instead in rows.items():
        for place in ("", "expert.", "thresholds.*.", "except.*."):
            *names, name = f"{place}{path}".split(".")
            for at, section in _sections(data, names, ""):
                if name in section:
                    del section[name]
                    found.append((f"{at}.{name}".strip("."), f"was removed and has no effect; {instead}"))
    return found


def _sections(inside: Any, names: list[str], at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings below `names`, each with its path; `*` is any key, or any of a list."""
    if not names:
        yield from ((at, inside),) if isinstance(inside, dict) else ()
    elif isinstance(inside, list) and names[0] == "*":
        for index, each in enumerate(inside):
            yield from _sections(each, names[1:], f"{at}[{index}]")
    elif isinstance(inside, dict):
        for name in inside if names[0] == "*" else names[:1]:
            yield from _sections(inside.get(name), names[1:], f"{at}.{name}".strip("."))
