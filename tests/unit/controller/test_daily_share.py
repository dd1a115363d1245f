"""Evidence has a total and a share of each user, a day; what is over it is said, and grows back."""

from __future__ import annotations

from slurm_watchdog.controller.evidence.store import DAY_S, EvidenceShare

MALLORY, VICTIM = 1500, 1501


def test_a_user_who_has_used_up_his_share_leaves_the_others_theirs() -> None:
    share = EvidenceShare(160)
    assert [share.acquire(MALLORY, 20, 0) is None for _ in range(4)] == [True, True, False, False]
    assert share.acquire(VICTIM, 40, 5) is None
    assert "uid 1500" in (share.acquire(MALLORY, 1, 6) or "")


def test_what_is_refused_counts_for_nothing() -> None:
    share = EvidenceShare(160)
    assert share.acquire(MALLORY, 41, 0) is not None
    assert share.acquire(MALLORY, 40, 0) is None


def test_all_users_together_have_no_more_than_the_total_until_it_has_grown_back() -> None:
    share = EvidenceShare(160)
    taken = [share.acquire(uid, 40, 1.0) is None for uid in range(6)]
    assert taken == [True, True, True, True, False, False]
    assert "evidence_per_day" in (share.acquire(9, 40, DAY_S / 8) or "")
    assert share.acquire(9, 40, 1.0 + DAY_S / 4) is None
