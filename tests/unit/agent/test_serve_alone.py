"""An agent of one person's own acts as that person and as nobody else, be it root in a container that has no
other user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_watchdog.agent.children import become_user


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = list(become_user._alone)
    yield
    become_user._alone[:] = before


def test_agent_of_a_site_refuses_root_and_system_accounts() -> None:
    become_user._alone[:] = []
    assert become_user.refusal_as(0) is not None and become_user.refusal_as(65534) is not None
    assert become_user.refusal_as(become_user.MIN_UID) is None


@pytest.mark.parametrize("own", [0, 1500])
def test_personal_agent_serves_its_own_user_and_refuses_every_other_one(own: int) -> None:
    become_user.serve_alone(own)
    assert become_user.refusal_as(own) is None
    for other in {0, 1, 999, 1500, 1501, 65534} - {own}:
        assert "alone" in (become_user.refusal_as(other) or "")
