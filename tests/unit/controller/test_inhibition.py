"""Incidents do not hold each other back for ever: of whatever is wrong at once, something is reported, and it
explains the rest."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.controller.incidents.correlate import (
    UNREPORTED_HOLDS_S,
    CorrelateContext,
    correlate,
)
from slurm_watchdog.detect.registry import SPECS, causes_of, spec_of
from slurm_watchdog.model.incidents import (
    Culprit,
    Finding,
    Incident,
    IncidentKind,
    IncidentState,
    StackRequest,
    Truth,
)

KINDS = tuple(spec.kind for spec in SPECS)
HOLDS = {spec.kind: spec.hold_s for spec in SPECS}
LONGEST_S = UNREPORTED_HOLDS_S + max(HOLDS.values()) + 10.0
PLACES = {IncidentKind.GPU_FAULT: "gpu:GPU-1", IncidentKind.NODE_DOWN: "node:n1", IncidentKind.AGENT_SILENT: "node:n1", IncidentKind.PARTITION_OR_OUTAGE: "cluster",
          IncidentKind.FILESYSTEM_OUTAGE: "mount:/s", IncidentKind.FILESYSTEM_STALL: "mount:/s", IncidentKind.LOG_ERROR: "run:7.0"}  # fmt: skip


def finding(kind: IncidentKind, truth: Truth, at: float) -> Finding:
    return Finding(
        kind=kind, subject=PLACES.get(kind, "job:7"), truth=truth, summary="wrong", job_ids=("7",), duration_s=at + 1,
        culprits=(Culprit(node="n1"),), wanted=(StackRequest(job_id="7", apart_s=5.0),),
    )  # fmt: skip


def live(bad: frozenset[IncidentKind], suspected: frozenset[IncidentKind]) -> list[Incident]:
    """The incidents after all of `bad` has been seen, and all of `suspected` suspected, for longer than
    anything may hold them back."""
    incidents: list[Incident] = []
    numbers = iter(range(10_000))
    for second in range(0, int(LONGEST_S) + 10, 10):
        at = float(second)
        moment = CorrelateContext(mono=at, wall=at, hold_s=HOLDS, restarts={"7": 0})
        found = [finding(kind, Truth.BAD, at) for kind in sorted(bad)]
        found += [finding(kind, Truth.UNKNOWN, at) for kind in sorted(suspected - bad)]
        incidents = correlate(incidents, found, moment, lambda: str(next(numbers)))
    return incidents


def assert_reported(incidents: list[Incident]) -> None:
    """Everything is reported, or explained by something that is, directly or over others; and no explanation
    goes in a circle."""
    by_id = {incident.id: incident for incident in incidents}
    for incident in incidents:
        seen: list[str] = []
        each = incident
        while each.inhibited_by is not None:
            assert each.inhibited_by in by_id, f"{incident.kind} is held back by {each.inhibited_by}"
            assert each.id not in seen, f"a circle: {[by_id[name].kind for name in seen]}"
            seen.append(each.id)
            each = by_id[each.inhibited_by]
        assert each.state is IncidentState.FIRING, f"{incident.kind} waits for {each.kind}, which is not reported"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_reported_beside_each_other_kind_and_every_suspicion(kind: IncidentKind) -> None:
    everything = frozenset(KINDS)
    assert_reported(live(frozenset({kind}), everything))
    for other in KINDS:
        assert_reported(live(frozenset({kind, other}), frozenset()))
        assert_reported(live(frozenset({kind, other}), everything))


@given(st.sets(st.sampled_from(KINDS), min_size=1), st.sets(st.sampled_from(KINDS)))
@settings(max_examples=150, deadline=None)
def test_any_set_of_faults_and_suspicions_ends_with_all_of_it_reported_or_explained(
    bad: set[IncidentKind], suspected: set[IncidentKind]
) -> None:
    assert_reported(live(frozenset(bad), frozenset(suspected)))


def test_no_two_kinds_explain_each_other() -> None:
    assert not [(a, b) for a, b in combinations(KINDS, 2) if b in causes_of(a) and a in causes_of(b)]


def test_held_pending_incident_holds_nobody_back() -> None:
    """A hang that is suspected, an error that waits for it, a stall that waited for the error: all were
    silent for as long as it lasted."""
    incidents = live(
        frozenset({IncidentKind.LOG_ERROR, IncidentKind.STALLED_PROGRESS}),
        frozenset({IncidentKind.COLLECTIVE_HANG}),
    )
    firing = {each.kind for each in incidents if each.state is IncidentState.FIRING and each.inhibited_by is None}
    assert firing == {IncidentKind.LOG_ERROR}


class Replay:
    """Rounds of judgement at given seconds, with what has ended lately."""

    def __init__(self) -> None:
        self.open: list[Incident] = []
        self.settled: list[Incident] = []
        self.numbers = iter(range(10_000))

    def fired(self, at: float, *found: Finding) -> set[IncidentKind]:
        moment = CorrelateContext(mono=at, wall=at, hold_s=HOLDS, restarts={"7": 0})
        after = correlate(self.open, found, moment, lambda: str(next(self.numbers)), self.settled)
        self.settled += [each for each in after if each.state is IncidentState.RESOLVED]
        self.open = [each for each in after if each.state is not IncidentState.RESOLVED]
        return {each.kind for each in self.open if each.state is IncidentState.FIRING}


@pytest.mark.parametrize(("kind", "cause"), [(kind, cause) for kind in KINDS for cause in sorted(causes_of(kind))])
def test_what_was_explained_from_its_first_moment_on_is_no_news_when_the_explanation_ends(
    kind: IncidentKind, cause: IncidentKind
) -> None:
    replay = Replay()
    for at in range(0, 200, 10):
        fired = replay.fired(at, finding(cause, Truth.BAD, at), finding(kind, Truth.BAD, at))
    assert fired == {cause}
    for at in range(200, 500, 20):
        fired = replay.fired(at, finding(cause, Truth.OK, at), finding(kind, Truth.BAD, at))
        assert kind not in fired or not spec_of(kind).has_aftermath, f"{at - 200} s after {cause} was over"
    for at in range(500, 640, 20):
        fired = replay.fired(at, finding(cause, Truth.OK, at), finding(kind, Truth.BAD, at))
    assert (kind in fired) is (kind != IncidentKind.LOG_ERROR), (
        "it lasts, and is its own: but a run that is over is reported no more"
    )


def test_what_begins_after_an_incident_has_ended_is_news_at_once() -> None:
    replay = Replay()
    for at in range(0, 220, 10):
        replay.fired(at, finding(IncidentKind.COLLECTIVE_HANG, Truth.BAD if at < 200 else Truth.OK, at))
    again = replace(finding(IncidentKind.STALLED_PROGRESS, Truth.BAD, 0.0), duration_s=5.0)
    for at in range(300, 300 + int(HOLDS[IncidentKind.STALLED_PROGRESS]) + 20, 10):
        fired = replay.fired(at, replace(again, duration_s=5.0 + at - 300))
    assert fired == {IncidentKind.STALLED_PROGRESS}
