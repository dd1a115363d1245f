"""Rules and wishes: what wins, what an owner may ask for, where a job can still be placed; and what a
configuration may not say."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.actuate.by_slurm import TARGETS, options_for
from slurm_watchdog.config.converting import options_of
from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.config.policy import Values
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.state import ladder_limits_of
from slurm_watchdog.controller.policy.owner_directives import (
    OwnerDirectives,
    directives_of,
    parse_comment,
    problem_of_path,
)
from slurm_watchdog.controller.policy.placement import jobs_behind, objection_to_excluding
from slurm_watchdog.controller.policy.rules import Rule, action_of, mode_words, permit, rule_for
from slurm_watchdog.detect.registry import KINDS, spec_of, why_ladder_unfit
from slurm_watchdog.knowledge.rungs import ENDINGS, HARMLESS, ORDER, problem_of
from slurm_watchdog.model.actions import Action, Rung
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.slurm.client import SignalTo
from tests.builders.views import slurm_job

FULL = (Rung.EVIDENCE, Rung.KILL_SWITCH, Rung.SIGUSR1, Rung.SIGTERM, Rung.REQUEUE, Rung.RESUBMIT, Rung.CANCEL)


def rules(text: str) -> Config:
    return parse_config(text)


# -------------------------------------------------------------------------------------------------- ladders


@pytest.mark.parametrize("kind", [kind for kind in KINDS if spec_of(kind).ladder])
def test_what_is_shipped_is_a_ladder_that_a_site_could_write(kind: IncidentKind) -> None:
    assert problem_of(spec_of(kind).ladder) is None
    assert why_ladder_unfit(kind, spec_of(kind).ladder) is None


@pytest.mark.parametrize(
    ("ladder", "words"),
    [
        ("requeue, requeue", "twice"),
        ("requeue, kill_switch", "must come before"),
        ("sigterm, kill_switch, requeue", "this order"),
        ("requeue, evidence", "must come before"),
        ("cancel, requeue", "must come last"),
        ("hold, requeue", "no other rung"),
    ],
)
def test_a_ladder_that_makes_no_sense_is_refused_with_its_line(ladder: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules(f"except:\n- match: {{kind: collective_hang}}\n  ladder: [{ladder}]\n")
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == ("except[0].ladder", 3)
    assert words in problem.message


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("{match: {kind: colective_hang}, restart: all}", "except[0].match.kind", "did you mean"),
        ("{match: {kind: agent_silent}, ladder: [requeue]}", "except[0].ladder", "reported only"),
        ("{match: {kind: loss_nan}, ladder: [kill_switch, requeue]}", "except[0].ladder", "damaged"),
        ("{match: {kind: gpu_clock_low}, ladder: [requeue]}", "except[0].ladder", "asked to save before"),
        ("{match: {kind: collective_hang}, ladder: [reboot]}", "except[0].ladder[0]", "must be evidence, kill_switch"),
        ("{match: {}, restart: all}", "except[0].match", "names no partition"),
        ("{restart: all}", "except[0].match", "missing"),
        ("{match: {user: a}}", "except[0].match", "nothing is different"),
        ("{match: {user: a}, ladder: [requeue]}", "except[0].match.kind", "name the kinds"),
        ("{match: {user: a, kind: orphan_gpu_process}, restart: all}", "except[0].match.kind", "job is over"),
        ("{match: {kind: slow_node}, patience: 2min}", "except[0].match", "chosen by the job alone"),
        ("{match: {user: a}, patience: 5s}", "except[0].patience", "at least 30s"),
        ("{match: {user: a}, restart: some}", "except[0].restart", "must be never, hangs or all"),
        ("{match: {user: a}, mention: '@ann'}", "except[0].mention", "must be an id"),
        ("{match: {user: a}, silence: ''}", "except[0].silence", "must not be empty"),
        ("{match: {user: a}, no_action: ['mo 22:00-07:00']}", "except[0].no_action[0]", "'mo' is not a day"),
        ("{match: {users: a}, restart: all}", "except[0].match.users", "did you mean 'user'?"),
        ("{match: {user: a}, restrat: all}", "except[0].restrat", "did you mean 'restart'?"),
    ],
)  # fmt: skip
def test_a_wrong_exception_is_refused_with_its_path_and_line(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules(f"restart: all\nexcept:\n- {text}\n")
    found = [(each.path, each.message) for each in caught.value.problems]
    assert any(where == path and words in message for where, message in found), found
    assert {each.line for each in caught.value.problems} == {3}


def test_every_word_of_a_signal_s_target_is_one_of_the_actuator() -> None:
    assert set(get_args(options_of(Values)["signal_to"].type)) == set(TARGETS)
    assert {target for target, _ in TARGETS.values()} == set(SignalTo)


# ---------------------------------------------------------------------------------------------------- rules


def test_each_value_is_taken_from_the_first_exception_that_matches_and_has_it() -> None:
    config = rules(
        "restart: all\nexpert: {policy: {attempts: 5, cooldown: 20min}}\nexcept:\n"
        "- {match: {user: ann}, cooldown: 1h, signal_limit: 5s}\n"
        "- {match: {kind: collective_hang}, cooldown: 2h, attempts: 1, checkpoint_limit: 1min}\n"
    )
    rule = rule_for(config, IncidentKind.COLLECTIVE_HANG, slurm_job(user="ann"))
    assert (rule.acts, rule.ladder) == (True, spec_of(IncidentKind.COLLECTIVE_HANG).ladder)
    assert (rule.attempts, rule.cooldown, rule.checkpoint_limit, rule.signal_limit) == (1, 3600, 60, 5)
    assert rule.source == "except (user: ann)"
    other = rule_for(config, IncidentKind.SLOW_NODE, slurm_job(user="bob"))
    assert (other.cooldown, other.attempts, other.source) == (1200, 5, "what is shipped for slow_node")


def test_a_job_that_waits_in_several_partitions_is_in_each_of_them() -> None:
    config = rules('restart: all\nexcept: [{match: {partition: "gpu*"}, restart: never}]\n')
    assert not rule_for(config, IncidentKind.COLLECTIVE_HANG, slurm_job(partition="cpu,gpu2")).acts


@pytest.mark.parametrize(("nodes", "acts"), [(("n1", "n2"), False), (("n1", "m1"), True), ((), True)])
def test_an_exception_for_nodes_holds_where_all_are_meant(nodes: tuple[str, ...], acts: bool) -> None:
    config = rules("restart: all\nexcept: [{match: {node: 'n*'}, restart: never}]\n")
    assert rule_for(config, IncidentKind.COLLECTIVE_HANG, slurm_job(nodes=nodes)).acts is acts


def test_limits_of_the_configuration_reach_the_ladder() -> None:
    limits = ladder_limits_of(
        rules("expert: {ladder: {confirm_limit: 8s}, policy: {signal_limit: 7s, exclusion_lifetime: 9s}}")
    )
    assert (limits.signal_s, limits.confirm_s, limits.exclusion_s) == (7.0, 8.0, 9.0)


@pytest.mark.parametrize(
    ("ladder", "turns", "action"),
    [
        ((), None, Action.NONE),
        ((Rung.EVIDENCE,), None, Action.NONE),
        ((Rung.EVIDENCE, Rung.REQUEUE), None, Action.REQUEUE),
        ((Rung.KILL_SWITCH, Rung.REQUEUE), None, Action.GRACEFUL_RESTART),
        ((Rung.KILL_SWITCH, Rung.REQUEUE), False, Action.REQUEUE),
        ((Rung.SIGTERM, Rung.REQUEUE), True, Action.REQUEUE),
        ((Rung.RESUBMIT, Rung.CANCEL), None, Action.RESUBMIT),
        ((Rung.CHAIN,), None, Action.LEAVE_TO_CHAIN),
        ((Rung.CANCEL,), None, Action.CANCEL),
        ((Rung.KILL_SWITCH,), True, Action.ASK_TO_SAVE),
        ((Rung.HOLD,), None, Action.HOLD),
    ],
)
def test_a_ladder_has_the_name_of_what_it_comes_to(
    ladder: tuple[Rung, ...], turns: bool | None, action: Action
) -> None:
    assert action_of(ladder, turns) is action


# --------------------------------------------------------------------------------------------------- wishes


@pytest.mark.parametrize(
    ("comment", "wish"),
    [
        ("", OwnerDirectives()),
        ("my watchdog", OwnerDirectives()),
        ("notwatchdog: off", OwnerDirectives()),
        ("watchdog: off", OwnerDirectives(source="--comment", leave_alone=True)),
        ("a b watchdog=off, please", OwnerDirectives(source="--comment", leave_alone=True, problem="'please' is neither off nor key=value")),
        ("x; watchdog: on", OwnerDirectives(source="--comment")),
        ("watchdog: kill_switch=/a/{job_id}/k,ladder=kill_switch+requeue; other: 3",
         OwnerDirectives(source="--comment", kill_switch="/a/{job_id}/k", ladder=(Rung.KILL_SWITCH, Rung.REQUEUE))),
        ("watchdog: checkpoint-dir={workdir}/c", OwnerDirectives(source="--comment", checkpoint_dir="{workdir}/c")),
        ("watchdog: stall_after=20m", OwnerDirectives(source="--comment", stall_after_s=1200.0)),
        ("watchdog: stall_after=2 h, ladder=none", OwnerDirectives(source="--comment", stall_after_s=7200.0, ladder=())),
        ("watchdog: stall_after=soon", OwnerDirectives(source="--comment", problem="stall_after: 'soon' is not a time such as 20m or 2h, at most 7d")),
        ("watchdog: stall_after=8d", OwnerDirectives(source="--comment", problem="stall_after: '8d' is not a time such as 20m or 2h, at most 7d")),
        ("watchdog: ladder=none", OwnerDirectives(source="--comment", ladder=())),
        ("watchdog: max_restarts=5,spares=1", OwnerDirectives(source="--comment")),
        ("watchdog: spares=all", OwnerDirectives(source="--comment", problem="spares: 'all' is not a number from 0 to 1000")),
    ],
)  # fmt: skip
def test_words_in_a_comment(comment: str, wish: OwnerDirectives) -> None:
    assert parse_comment(comment) == wish


def test_the_environment_says_the_same_and_the_comment_wins() -> None:
    variables = {
        "SLURM_WATCHDOG_KILL_SWITCH": "/env/k",
        "SLURM_WATCHDOG_LADDER": "requeue",
        "SLURM_WATCHDOG": "",
    }
    assert directives_of("", variables).kill_switch == "/env/k"
    both = directives_of("watchdog: kill_switch=/comment/k", variables)
    assert (both.kill_switch, both.ladder) == ("/comment/k", (Rung.REQUEUE,))
    assert directives_of("watchdog: ladder=requeue", {"SLURM_WATCHDOG": "off"}).leave_alone
    patient = directives_of("watchdog: stall_after=1h", {"SLURM_WATCHDOG_STALL_AFTER": "2h"})
    assert (patient.stall_after_s, directives_of("", {"SLURM_WATCHDOG_STALL_AFTER": "2h"}).stall_after_s) == (
        3600,
        7200,
    )


@pytest.mark.parametrize("path", ["k", "~/k", "/a/../b", "/a\n/b", "/{node}/k", "/" + "x" * 2000])
def test_a_path_that_nobody_should_follow_is_refused(path: str) -> None:
    assert problem_of_path(path)


@given(st.text(max_size=300))
def test_no_comment_breaks_anything_and_none_makes_more_happen(comment: str) -> None:
    rule = Rule(acts=True, ladder=(Rung.EVIDENCE, Rung.REQUEUE), source="r")
    after = permit(rule, directives_of(f"watchdog: {comment}"))
    assert set(after.ladder) <= {*rule.ladder, *HARMLESS}
    assert after.acts == rule.acts


@given(
    st.lists(st.sampled_from(list(Rung)), max_size=6, unique=True),
    st.lists(st.sampled_from(list(Rung)), max_size=6, unique=True),
)
def test_an_owner_s_ladder_has_no_ending_that_the_administrator_does_not_permit(
    permitted: list[Rung], wanted: list[Rung]
) -> None:
    ladder = tuple(step for step in ORDER if step in permitted)
    after = permit(Rule(acts=True, ladder=ladder, source="r"), OwnerDirectives(source="w", ladder=tuple(wanted)))
    assert set(after.ladder) & set(ENDINGS) <= set(ladder)
    assert Rung.SIGTERM not in after.ladder or Rung.SIGTERM in ladder
    assert ladder or not after.ladder


def test_a_job_whose_state_is_damaged_is_not_asked_to_save_for_its_owner_s_ladder_either() -> None:
    config = rules("except: [{match: {kind: loss_nan}, ladder: [evidence, requeue]}]")
    after = permit(rule_for(config, "loss_nan", None), directives_of("watchdog: ladder=kill_switch+requeue"))
    assert (after.ladder, after.refused) == ((Rung.EVIDENCE, Rung.REQUEUE), "")


# -------------------------------------------------------------------------------------------------- placing


def nodes(*states: str, partition: str = "gpu") -> tuple[SlurmNode, ...]:
    return tuple(
        SlurmNode(name=f"n{number}", address="", state=state, partitions=(partition,))
        for number, state in enumerate(states, 1)
    )


@pytest.mark.parametrize(
    ("states", "fits"),
    [
        (("IDLE", "IDLE", "IDLE"), True),
        (("IDLE", "IDLE"), False),
        (("IDLE", "IDLE", "DOWN"), False),
        (("IDLE", "IDLE", "IDLE+DRAIN"), False),
        (("IDLE", "IDLE", "MIXED*"), False),
        (("IDLE", "IDLE", "ALLOCATED"), True),
        (("IDLE", "IDLE", "IDLE+POWERED_DOWN"), True),
        ((), True),
    ],
)
def test_a_node_is_excluded_only_if_enough_others_are_up(states: tuple[str, ...], fits: bool) -> None:
    job = slurm_job(partition="gpu")
    assert (objection_to_excluding(job, ("n1",), nodes(*states)) is None) is fits


def test_exclusions_that_are_there_count() -> None:
    job = slurm_job(partition="gpu", excluded_nodes=("n3",))
    assert objection_to_excluding(job, ("n1",), nodes("IDLE", "IDLE", "IDLE"))


# ------------------------------------------------------------------------------------------- chain, sbatch


def test_who_waits_behind_a_job() -> None:
    job = slurm_job(job_id="100_1", array_job_id="100", name="t")
    others = [
        slurm_job(job_id="100_2", state="PENDING", array_job_id="100"),
        slurm_job(job_id="9", state="PENDING", dependency="afterany:100_1(unfulfilled)"),
        slurm_job(job_id="10", state="PENDING", dependency="afterok:100_*(unfulfilled)"),
        slurm_job(job_id="11", state="PENDING", dependency="singleton(unfulfilled)", name="t"),
        slurm_job(job_id="12", state="PENDING", dependency="afterany:1100_11(unfulfilled)"),
        slurm_job(job_id="13", state="COMPLETED", dependency="afterany:100_1"),
        slurm_job(job_id="14", state="PENDING", dependency="afterany:100_1", uid=5),
    ]
    assert {each.job_id for each in jobs_behind(job, [job, *others])} == {"100_2", "9", "10", "11"}


def test_a_script_is_submitted_again_with_what_slurm_tells_of_the_job() -> None:
    job = slurm_job(
        name="t", partition="gpu", account="a", qos="high", node_count=2, time_limit_s=3601.0, excluded_nodes=("n9",),
        comment="mine",
    )  # fmt: skip
    assert set(options_for(job, ("n1",), "mark=1")) == {
        "--hold", "--comment=mine mark=1", "--dependency=afterany:7", "--job-name=t", "--partition=gpu", "--account=a", "--qos=high",
        "--nodes=2", "--time=61", "--exclude=n9,n1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "observe"),
        ("restart: all", "act"),
        ("restart: hangs", "act on hangs"),
        ("except: [{match: {kind: collective_hang}, restart: all}]", "observe, but acts on collective_hang"),
        ("except: [{match: {kind: crash_loop}, restart: all}]", "observe"),
        ("except: [{match: {kind: crash_loop}, restart: all, ladder: [hold]}]", "observe, but acts on crash_loop"),
        ("restart: all\nexcept: [{match: {kind: rank_stopped}, restart: never}]", "act, but not on rank_stopped"),
        (
            "restart: hangs\nexcept: [{match: {kind: node_down}, restart: all}]",
            "act on hangs, but acts on node_down",
        ),
        ("except: [{match: {partition: gpu}, restart: hangs}]", "observe, but acts on some jobs (except)"),
    ],
)
def test_the_mode_in_words_says_what_may_happen(text: str, words: str) -> None:
    assert mode_words(parse_config(text)) == words
