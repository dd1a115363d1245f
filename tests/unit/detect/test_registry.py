"""What detectors declare about themselves fits together."""

from __future__ import annotations

import dataclasses

import pytest

from slurm_watchdog.detect.registry import KINDS, SPECS, causes_of, spec_of
from slurm_watchdog.detect.spec import DetectorSpec
from slurm_watchdog.knowledge.limits import options_of
from slurm_watchdog.model.incidents import IncidentKind


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_spec_of_the_registry_is_a_row_or_names_its_module_and_what_exists(spec: DetectorSpec) -> None:
    assert spec.doc or spec.detect.__module__ == f"slurm_watchdog.detect.{spec.kind}"
    assert set(spec.arguments) <= {each.settings for each in SPECS}
    assert {*spec.explained_by, *spec.explains} <= set(KINDS) - {spec.kind}
    assert set(spec.not_delayed_by) <= causes_of(spec.kind)
    assert not (spec.ladder and spec.why_no_action), "it is acted on"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_texts_of_the_registry_are_words_for_people(spec: DetectorSpec) -> None:
    assert spec.sentence[0].isupper() and not spec.sentence.endswith(".")
    for option in (options_of(spec.settings) if spec.settings else {}).values():
        assert option.text[0] in "…" or option.text[0].isupper(), option.text
    hint = spec.hint
    assert hint is None or all(each.endswith((".", "?")) and len(each) < 420 for each in (hint.usually, hint.try_next))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.settings], ids=lambda spec: spec.kind)
def test_options_of_the_registry_cannot_be_changed(spec: DetectorSpec) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.settings().anything = 1


def test_kind_of_another_release_delays_explains_and_answers_nothing() -> None:
    found = spec_of("moon_phase")
    assert (found.ladder, found.job_state, found.wants_evidence, causes_of("moon_phase")) == (
        (),
        "",
        False,
        frozenset(),
    )
    assert found.sentence == "moon_phase"


def test_every_name_of_a_kind_is_one_of_the_registry() -> None:
    assert set(IncidentKind) <= set(KINDS)
