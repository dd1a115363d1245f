"""Every case of `tests/cases`: what its detector says of the picture."""

from __future__ import annotations

import pytest

from tests.builders.rule_cases import Case, cases, kinds


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{kind}-{n}") for kind in kinds() for n, case in enumerate(cases(kind))]
)
def test_case_is_judged_as_its_file_has_it(case: Case) -> None:
    found = case.findings()
    if case.truth is None:
        assert not found
        return
    (first,) = found
    assert first.truth is case.truth, first
    assert case.says in first.summary
    assert all(any(words in fact for fact in first.facts) for words in case.facts), first.facts
    if case.culprits is not None:
        named = [
            {name: getattr(c, name) for name in wanted} for c, wanted in zip(first.culprits, case.culprits, strict=True)
        ]
        assert named == list(case.culprits)
    assert case.severity in (None, first.severity)
    assert case.acts in (None, first.actionable)
    assert case.lasts_s in (None, first.duration_s)
