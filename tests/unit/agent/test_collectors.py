"""Collectors as a whole: their sections fit the report, and one that fails stops no other."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast, get_type_hints

import pytest

from slurm_watchdog.agent.collectors.collector import (
    Collector,
    CollectorContext,
    Collectors,
    CollectorSpec,
    Problem,
    Sections,
)
from slurm_watchdog.agent.collectors.registry import COLLECTORS
from slurm_watchdog.base.loop import Isolated
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.report import (
    CheckpointSection,
    DirectiveSection,
    KernelLogSection,
    LogSection,
    MountSection,
    Report,
    with_sections,
)

EMPTY = Report(node="n", boot_id="b", agent_id="a", sequence=1)


@pytest.mark.parametrize("spec", COLLECTORS, ids=lambda spec: spec.name)
def test_section_of_a_collector_has_defaults_and_its_fields_are_those_of_the_report(
    spec: CollectorSpec,
) -> None:
    assert with_sections(EMPTY, [spec.section()]) == EMPTY
    of_report, of_section = get_type_hints(Report), get_type_hints(spec.section)
    assert {name: of_report[name] for name in of_section} == of_section
    assert spec.make.__module__.endswith(f".{spec.name}"), "module, label and problem have one name"


def test_collectors_have_each_their_own_name_and_section() -> None:
    assert len({spec.name for spec in COLLECTORS}) == len({spec.section for spec in COLLECTORS}) == len(COLLECTORS)


def test_report_of_sections_that_share_a_field_joins_lists_and_adds_counts() -> None:
    first, second = (Event(kind=EventKind.CHECKPOINT, job_id="7", source="/o", age_s=age_s) for age_s in (1.0, 2.0))
    report = with_sections(
        EMPTY,
        [
            LogSection(events=(first,), events_dropped=1), CheckpointSection(events=(second,)),
            KernelLogSection(node_events_dropped=3), KernelLogSection(node_events_dropped=2),
        ],
    )  # fmt: skip
    assert report.events == (first, second)
    assert (report.events_dropped, report.node_events_dropped) == (1, 5)


class Scripted(Collector):
    """A collector that returns `section`, or raises it."""

    def __init__(self, section: Struct | Exception, found: tuple[Problem, ...] = ()):
        self.section, self.found, self.keeper = section, found, self

    def begin(self, now: float) -> None:
        if now < 0:
            raise OSError("it can't begin")

    def collect(self, now: float) -> Struct:
        if isinstance(self.section, Exception):
            raise self.section
        return self.section

    def problems(self, now: float) -> Iterator[Problem]:
        yield from self.found


def running(*collectors: Collector) -> tuple[Collectors, Sections]:
    sections = Sections()
    context = cast("CollectorContext", SimpleNamespace(sections=sections))
    kinds = (LogSection, MountSection, DirectiveSection)
    specs = [
        CollectorSpec(f"c{at}", kinds[at], lambda _, made=made: made)  # type: ignore[misc]
        for at, made in enumerate(collectors)
    ]
    return Collectors(specs, context), sections


def test_collector_that_raises_has_an_empty_section_and_the_others_theirs() -> None:
    whole = LogSection(events_dropped=1)
    collectors, sections = running(Scripted(whole), Scripted(ValueError("odd")), Scripted(DirectiveSection()))
    sections.put(MountSection(mounts=cast("Any", ("of the tick before",))))
    seen = Isolated()
    assert list(collectors.collect(1.0, seen)) == [whole, MountSection(), DirectiveSection()]
    assert sections.of(MountSection) == MountSection(), "what was seen in the tick before is not so now"
    assert (seen.problems, seen.failed) == (["c1: ValueError: odd"], {"c1"})
    assert set(seen.seconds) == {"c0", "c1", "c2"}


def test_collector_that_can_not_begin_is_asked_nevertheless() -> None:
    collectors, _ = running(Scripted(LogSection()))
    seen = Isolated()
    collectors.begin(-1.0, seen)
    assert list(collectors.collect(-1.0, seen)) == [LogSection()]
    assert seen.failed == {"c0"}


def test_problem_of_a_collector_is_reported_and_counts_as_failure_only_if_it_says_so() -> None:
    collectors, _ = running(
        Scripted(LogSection(), (Problem("hidden", failed=False),)), Scripted(MountSection(), (Problem("blind"),))
    )  # fmt: skip
    seen = Isolated()
    collectors.note_problems(1.0, seen)
    assert (seen.problems, seen.failed) == (["c0: hidden", "c1: blind"], {"c1"})
