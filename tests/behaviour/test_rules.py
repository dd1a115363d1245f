"""Rules: which one holds for which job, and what the job's owner may change of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest

from slurm_watchdog.model.incidents import IncidentKind
from tests.behaviour.cluster import EPOCH
from tests.behaviour.story import ACT, QUICK, Story

Tell = Callable[..., Story]

OVERRIDES = f"""
restart: all
expert: {{policy: {{cooldown: 0s, budget_percent: 100}}}}
except:
- {{match: {{partition: debug}}, ladder: []}}
- {{match: {{account: [chemistry, bio*]}}, restart: never}}
- {{match: {{user: bob, job_name: "eval-*", kind: collective_hang}}, restart: all, ladder: [evidence, cancel]}}
- {{match: {{user: bob}}, restart: never}}
{QUICK}
"""


@pytest.mark.parametrize(
    ("job", "verdict", "action"),
    [
        ({}, "allowed", "requeue"),
        ({"account": "chemistry"}, "observed", "requeue"),
        ({"account": "biology"}, "observed", "requeue"),
        ({"user": "bob"}, "observed", "requeue"),
        ({"user": "bob", "name": "eval-3"}, "allowed", "cancel"),
        ({"user": "bob", "name": "eval-3", "account": "chemistry"}, "observed", "cancel"),
        ({"partition": "debug"}, "allowed", "none"),
    ],
)
def test_given_exceptions_then_each_value_is_that_of_the_first_that_matches_and_has_it(
    tell: Tell, job: dict[str, str], verdict: str, action: str
) -> None:
    story = tell(OVERRIDES)
    if "partition" in job:
        story.cluster.add_nodes("d1", "d2", partition="debug")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True, **job))
    decision = story.decisions(hang)[0]
    assert (decision.verdict, decision.action) == (verdict, action)


def test_given_a_rule_for_one_kind_then_other_kinds_of_the_same_job_keep_theirs(tell: Tell) -> None:
    story = tell(OVERRIDES)
    job = story.job(hangs=True, user="bob", name="eval-3")
    dead = story.finds(IncidentKind.LINGERING_JOB, job)
    assert story.decided(dead) == ("observed", "mode")


def test_given_a_decision_then_it_names_the_rule_that_gave_it(tell: Tell) -> None:
    story = tell(OVERRIDES)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True, user="bob", name="eval-3"))
    assert story.decisions(hang)[0].rule == "except (user: bob, job_name: eval-*, kind: collective_hang)"


def test_given_a_mode_for_one_kind_then_only_that_kind_is_acted_on(tell: Tell) -> None:
    story = tell("mode: observe\npolicy: {kinds: {lingering_job: {mode: act}}}\n" + QUICK)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(hang) == ("observed", "mode")
    dead = story.finds(IncidentKind.LINGERING_JOB, job)
    assert story.decided(dead) == ("allowed", "lingering_job")


def test_given_a_rule_that_excludes_no_nodes_then_the_restart_may_use_them_again(tell: Tell) -> None:
    story = tell("mode: act\npolicy: {kinds: {collective_hang: {exclude_nodes: false}}}\n" + QUICK)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    assert job.excluded == () and story.end(hang).ok
    assert "may be used again" in story.why(hang)


# ------------------------------------------------------------------------------------------------ wishes

GRACEFUL = f"""
mode: act
policy:
  cooldown: 0s
  kinds:
    slow_node: {{ladder: [kill_switch, requeue], checkpoint_limit: 1min}}
    collective_hang: {{ladder: [evidence, sigterm, requeue], signal_limit: 20s}}
{QUICK}
"""


def test_given_a_job_with_a_kill_switch_of_its_own_then_that_file_is_written(tell: Tell) -> None:
    story = tell(GRACEFUL + "jobs: {kill_switch_prefixes: [/shared]}\n")
    job = story.job(comment="watchdog: kill_switch=/shared/run/{job_id}/stop", listens_at="/shared/run/7/stop")
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=4)
    assert story.end(slow).ok and story.end(slow).steps_lost == 0
    assert not story.cluster.started_under_switch and not story.cluster.files


def test_given_a_job_that_wants_no_signals_then_it_gets_none(tell: Tell) -> None:
    story = tell(GRACEFUL)
    job = story.job(hangs=True, comment="watchdog: ladder=requeue")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert [operation.split()[0] for operation in story.operations(hang)] == [
        "evidence",
        "requeue_hold",
        "release",
    ]


def test_given_a_job_that_wants_what_is_not_permitted_then_it_is_left_alone_and_it_says_so(
    tell: Tell,
) -> None:
    story = tell(GRACEFUL)
    job = story.job(comment="watchdog: ladder=cancel")
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    assert story.decided(slow) == ("suppressed", "opted_out")
    assert "cancel, which is not permitted" in story.why(slow)
    story.passes(minutes=3)
    assert not story.done


def test_given_a_job_that_wants_more_than_is_permitted_then_it_gets_what_is_permitted(tell: Tell) -> None:
    story = tell(GRACEFUL)
    job = story.job(hangs=True, comment="watchdog: ladder=requeue+cancel")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert [operation.split()[0] for operation in story.operations(hang)] == [
        "evidence",
        "requeue_hold",
        "release",
    ]
    assert "not permitted: cancel" in story.decisions(hang)[-1].rule


def test_given_a_job_that_wants_to_be_asked_before_it_is_requeued_then_it_is(tell: Tell) -> None:
    story = tell(GRACEFUL)
    job = story.job(comment="watchdog: ladder=sigusr1+requeue", on_usr1="save and exit")
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=3)
    assert story.done[0] == "signal 7 USR1 steps"
    assert story.end(slow).steps_lost == 0


@pytest.mark.parametrize(
    "comment",
    [
        "watchdog: of",
        "watchdog: kill_switch=stop",
        "watchdog: kill_switch=/scratch/../etc/x",
        "watchdog: kill_switch=/home/ann/.ssh/rc",
        "watchdog: ladder=reque",
        "watchdog: killswitch=/scratch/stop",
    ],
)
def test_given_a_wish_that_nobody_can_understand_then_the_job_is_left_alone_and_it_says_why(
    tell: Tell, comment: str
) -> None:
    story = tell(GRACEFUL)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True, comment=comment))
    assert story.decided(hang) == ("suppressed", "opted_out")
    assert "cannot be read" in story.why(hang)


@pytest.mark.parametrize("comment", ["my watchdog test", "", "reservation for the watchdogs", "see ticket 4: x"])
def test_given_a_comment_that_is_no_wish_then_it_changes_nothing(tell: Tell, comment: str) -> None:
    story = tell(GRACEFUL)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True, comment=comment))
    assert story.decided(hang) == ("allowed", "collective_hang")


def test_given_a_time_at_which_nothing_is_done_then_it_is_decided_when_that_is_over(tell: Tell) -> None:
    """The story begins at EPOCH; a window around it ends an hour later."""
    begin = datetime.fromtimestamp(EPOCH, tz=timezone.utc).astimezone()
    window = f"{begin - timedelta(hours=1):%H:%M}-{begin + timedelta(hours=1):%H:%M}"
    story = tell(ACT.replace("cooldown: 1min", f"cooldown: 1min, no_action: ['{window}']"))
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(hang) == ("suppressed", "hours")
    story.passes(minutes=70)
    assert story.decided(hang) == ("allowed", "collective_hang")
