"""All collectors of one agent: each is isolated, timed, and asked for what it knows, by its name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec, Problem
from slurm_watchdog.base.loop import Isolated, isolate
from slurm_watchdog.base.structs import Struct

log = logging.getLogger(__name__)


class Collectors:
    """The collectors of `specs`, made from `context`, in their order."""

    def __init__(self, specs: Iterable[CollectorSpec], context: CollectorContext):
        self._sections = context.sections
        self._all: list[tuple[CollectorSpec, Collector]] = [(spec, spec.make(context)) for spec in specs]

    def begin(self, now: float, seen: Isolated) -> None:
        """A tick begins."""
        for spec, each in self._all:
            isolate(spec.name, partial(each.begin, now), None, seen)

    def collect(self, now: float, seen: Isolated) -> Iterator[Struct]:
        """One section after the other. A collector that raises has an empty one, and a sentence in `seen`."""
        for spec, each in self._all:
            section = isolate(spec.name, partial(each.collect, now), None, seen) or spec.section()
            self._sections.put(section)
            yield section

    def note_problems(self, now: float, seen: Isolated) -> None:
        """Adds to `seen` why collectors that worked did not see everything."""
        for spec, each in self._all:
            problems: list[Problem] = isolate(spec.name, partial(_problems, each, now), [], seen)
            seen.problems.extend(f"{spec.name}: {problem.text}" for problem in problems)
            if any(problem.failed for problem in problems):
                seen.failed.add(spec.name)

    def retell(self) -> None:
        """The controller is new, or reports did not reach it: the next sections begin with the recent past."""
        for _, each in self._all:
            if hasattr(each.keeper, "retell"):
                each.keeper.retell()

    def memories(self) -> dict[str, Any]:
        """What collectors know, by name, for `remember` of the agent that this process becomes."""
        return {spec.name: each.keeper.memory() for spec, each in self._all if spec.memory is not None}

    def remember(self, memories: Mapping[str, Any]) -> None:
        """Hands out what an agent before this one left, read from its handover. What is not understood of it
        is logged and dropped."""
        for spec, each in self._all:
            if spec.memory is None or spec.name not in memories:
                continue
            try:
                memory = msgspec.convert(memories[spec.name], spec.memory, str_keys=True)
            except msgspec.ValidationError as error:
                log.warning("%s starts without what the agent before this one knew: %s", spec.name, error)
            else:
                each.keeper.remember(memory)

    def close(self, now: float) -> None:
        """The agent ends."""
        for _, each in self._all:
            if hasattr(each.keeper, "close"):
                each.keeper.close(now)


def _problems(collector: Collector, now: float) -> list[Problem]:
    return list(collector.problems(now))
