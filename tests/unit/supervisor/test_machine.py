"""What the supervisor does next, told as days in its life: the clock is a parameter."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.model.supervisor import (
    BATCH_STEP,
    GRACE_S,
    HUNG_GRACE_S,
    OrderAnswer,
    RestartOrder,
    SupervisorState,
)
from slurm_watchdog.supervisor import machine
from slurm_watchdog.supervisor.machine import Event, event, first, is_about_time, next_state, with_end
from slurm_watchdog.supervisor.placement import Allocation, NoSpare
from slurm_watchdog.supervisor.state import (
    Action,
    Begin,
    Forward,
    Look,
    Phase,
    Requeue,
    Say,
    Settings,
    SignalSteps,
    SignalTree,
    status_of,
)  # fmt: skip

NODES = ("n1", "n2", "n3", "n4")
TERM = 15


class Day:
    """One supervisor and its clock; `did` is what its last event led to, lines for people left out."""

    def __init__(
        self, count: int = 3, max_restarts: int = 3, end_at: float | None = None, nodes: tuple[str, ...] = NODES,
        least: int | None = None,
    ) -> None:  # fmt: skip
        allocation = Allocation(job_id="7", nodes=nodes, batch_host=nodes[0], end_at=end_at)
        self.now = 0.0
        self.said: list[str] = []
        self.old_steps: tuple[str, ...] = ()
        settings = Settings(
            allocation=allocation, count=count, least=count if least is None else least, max_restarts=max_restarts
        )
        self.run, actions = first(settings, self.now)
        self.did = self._keep(actions)

    def _keep(self, actions: tuple[Action, ...]) -> list[Action]:
        self.said += [each.text for each in actions if isinstance(each, Say)]
        return [each for each in actions if not isinstance(each, Say)]

    def on(self, happened: Event, after_s: float = 0.0) -> list[Action]:
        self.now += after_s
        self.old_steps = self.run.steps
        self.run, actions = next_state(self.run, happened, self.now, self.now)
        self.did = self._keep(actions)
        return self.did

    def runs(self, step: str = "0") -> Day:
        self.on(event(machine.looked, {}))
        self.on(event(machine.steps_seen, (step,)))
        assert self.run.phase is Phase.RUNNING
        return self

    def order(
        self, step: str = "0", avoid: tuple[str, ...] = (), *, decision: str = "d1", start: int | None = None,
        grace_s: int = GRACE_S, age_s: float = 0.0, resume_from: str = "",
    ) -> list[Action]:  # fmt: skip
        start = self.run.starts if start is None else start
        order = RestartOrder(
            decision=decision, step_id=step, start=start, avoid=avoid, grace_s=grace_s, why="it hangs",
            resume_from=resume_from,
        )  # fmt: skip
        return self.on(event(machine.ordered, order, self.now - age_s))

    def ends(self, code: int, *, switched: bool = False, stopped: str = "") -> list[Action]:
        return self.on(event(machine.ended, start=self.run.starts, code=code, switched=switched, stopped=stopped))

    @property
    def started_on(self) -> tuple[str, ...]:
        """Of the start that was the last thing done; what was left of the one before is killed first."""
        *left, begin = self.did
        assert left == ([SignalSteps("KILL", self.old_steps), SignalTree("KILL")] if self.run.starts > 1 else [])
        assert isinstance(begin, Begin)
        return begin.placement.nodes


def test_first_start_looks_at_all_nodes_and_uses_the_first_ones() -> None:
    day = Day()
    assert day.did == [Look(NODES)]
    day.on(event(machine.looked, {}))
    assert day.started_on == ("n1", "n2", "n3")
    assert status_of(day.run, 9).state is SupervisorState.STARTING
    day.on(event(machine.steps_seen, ("0",)))
    status = status_of(day.run, 9)
    assert (status.state, status.step_id, status.spares, status.restarts_left) == ("running", "0", ("n4",), 3)


def test_first_start_leaves_a_bad_node_out_and_uses_it_where_there_is_no_spare() -> None:
    day = Day()
    day.on(event(machine.looked, {"n1": "its GPU 3 is gone"}))
    assert day.started_on == ("n2", "n3", "n4")
    assert day.said == ["n1 is left out: its GPU 3 is gone"]
    all_nodes = Day(count=4)
    all_nodes.on(event(machine.looked, {"n1": "its GPU 3 is gone"}))
    assert all_nodes.started_on == NODES
    assert all_nodes.said == ["n1 is used all the same, for no spare is left: its GPU 3 is gone"]


def test_a_look_that_never_ends_delays_a_start_by_its_limit_alone() -> None:
    day = Day()
    assert day.on(machine.tick, 7.9) == []
    day.on(machine.tick, 0.2)
    assert day.started_on == ("n1", "n2", "n3")


def test_too_few_nodes_for_a_start_are_refused_before_it() -> None:
    with pytest.raises(NoSpare):
        Day(count=5)


def test_an_order_ends_the_steps_looks_meanwhile_and_starts_without_the_avoided_node() -> None:
    day = Day().runs()
    day.on(event(machine.steps_seen, ("0", "1")))
    assert day.order("1", ("n2",)) == [SignalSteps("TERM", ("0", "1")), Look(("n1", "n3", "n4"))]
    assert status_of(day.run, 9).answer is OrderAnswer.TAKEN
    day.on(event(machine.looked, {}), 1)
    assert day.did == [], "the old step still runs"
    day.ends(143)
    assert day.started_on == ("n1", "n3", "n4")
    day.on(event(machine.steps_seen, ("2",)))
    status = status_of(day.run, 9)
    assert (status.order, status.answer, status.step_id, status.avoided) == ("d1", "started", "2", ("n2",))
    assert (status.restarts_left, status.spares) == (2, ())


GOOD = "/d/run/checkpoint-500"


def test_a_checkpoint_of_an_order_is_resumed_from_until_an_order_names_none() -> None:
    day = Day(max_restarts=9).runs("0")

    def named_to_next(code: int = 143) -> str:
        day.on(event(machine.looked, {}))
        day.ends(code)
        if day.run.phase is Phase.PAUSING:
            day.on(machine.tick, 15)
            day.on(event(machine.looked, {}))
        (begin,) = (each for each in day.did if isinstance(each, Begin))
        day.on(event(machine.steps_seen, (str(day.run.starts),)))
        return begin.resume_from

    assert status_of(day.run, 9).takes_resume and status_of(day.run, 9).resumed_from == ""
    day.order("0", resume_from=GOOD)
    assert f"from {GOOD}" in day.said[-1]
    assert named_to_next() == GOOD and status_of(day.run, 9).resumed_from == GOOD
    assert named_to_next(code=1) == GOOD, "a command that fails has perhaps made none of its own"
    day.order("3", decision="d2")
    assert named_to_next() == "" and status_of(day.run, 9).resumed_from == ""


def test_a_step_that_hears_no_term_is_killed_and_one_in_state_d_is_left_behind() -> None:
    day = Day().runs()
    day.order(avoid=("n2",))
    day.on(event(machine.looked, {}), 1)
    assert day.on(machine.tick, 3.9) == []
    assert day.on(machine.tick, 0.2) == [SignalSteps("KILL", ("0",)), SignalTree("TERM")]
    assert day.on(machine.tick, 1) == [SignalSteps("KILL", ("0",)), SignalTree("KILL")]
    assert day.on(machine.tick, 3) == []
    day.on(machine.tick, 1)
    assert day.started_on == ("n1", "n3", "n4")
    assert day.on(event(machine.ended, start=1, code=137)) == [], "the end of the earlier start changes nothing"
    assert day.run.phase is Phase.RUNNING


def test_an_order_for_a_loop_that_does_not_turn_leaves_a_second_before_it_kills() -> None:
    day = Day().runs()
    day.order(grace_s=HUNG_GRACE_S)
    assert day.on(machine.tick, 0.9) == []
    assert day.on(machine.tick, 0.2) == [SignalSteps("KILL", ("0",)), SignalTree("TERM")]
    assert day.on(machine.tick, 1) == [SignalSteps("KILL", ("0",)), SignalTree("KILL")]


def test_an_order_that_is_read_too_late_is_refused_for_its_action_has_ended() -> None:
    day = Day().runs()
    day.on(machine.tick, 100)
    assert day.order(age_s=60.1) == []
    assert (day.run.answer, day.run.words) == ("refused", "the order is older than 60 s")
    assert day.order(age_s=59.9, decision="d2") != []


def test_a_look_that_outlasts_the_ending_is_waited_for_until_its_limit() -> None:
    day = Day().runs()
    day.order(avoid=("n2",))
    day.on(machine.tick, 1)
    assert day.ends(143) == []
    assert (day.run.phase, day.run.looked) == (Phase.LOOKING, False)
    day.on(machine.tick, 7.5)
    assert day.started_on == ("n1", "n3", "n4")


@pytest.mark.parametrize(
    ("step", "avoid", "why"),
    [
        ("3", (), "step 3 is over: step 0 runs"),
        ("0", ("n1", "n2"), "no spare is left: 3 nodes are needed, and of the 4 of the job 2 may be used"),
    ],
)
def test_an_order_that_cannot_be_carried_out_ends_nothing(step: str, avoid: tuple[str, ...], why: str) -> None:
    day = Day().runs()
    assert day.order(step, avoid) == []
    status = status_of(day.run, 9)
    assert (status.state, status.answer, status.words, status.avoided) == ("running", "refused", why, ())


def test_an_order_is_carried_out_once() -> None:
    day = Day().runs()
    day.order()
    assert day.order() == []
    day.ends(143)
    day.on(event(machine.looked, {}))
    day.on(event(machine.steps_seen, ("1",)))
    assert day.order("1") == [], "the same decision"
    assert day.order("0", decision="d2") == []
    assert day.run.words == "step 0 is over: step 1 runs"


def test_an_order_after_the_last_restart_near_the_end_of_the_time_or_while_ending_is_refused() -> None:
    used = Day(max_restarts=0).runs()
    assert used.order() == []
    assert used.run.words == "all of its 0 restarts are used up"
    late = Day(end_at=100.0).runs()
    late.now = 31.0
    assert late.order() == [], "the command would be ended, and the last minute begin meanwhile"
    assert late.run.words == "it is 69 s before the end of the job's time"
    ending = Day().runs()
    ending.order()
    assert ending.order(decision="d2") == []
    assert ending.run.answer is OrderAnswer.REFUSED


IN_BATCH = event(machine.steps_seen, (BATCH_STEP,))


def test_a_command_in_the_batch_script_is_ended_by_its_processes_and_known_again_at_once() -> None:
    day = Day(count=1, nodes=("n1",)).runs(BATCH_STEP)
    assert status_of(day.run, 9).step_id == "batch"
    assert day.order(BATCH_STEP) == [SignalTree("TERM"), Look(("n1",))]
    day.on(event(machine.looked, {"n1": "its clock is off"}))
    assert day.on(machine.tick, 5) == [SignalTree("KILL")]
    day.ends(137)
    assert day.did == [SignalTree("KILL"), Begin(day.run.placement, in_batch=True)]
    day.run = replace(day.run, begun_ticks=4711)
    day.on(IN_BATCH)
    status = status_of(day.run, 9)
    assert (status.answer, status.step_id, status.starts, status.begun_ticks) == ("started", "batch", 2, 4711)
    assert status.words == "the command runs again as the batch step"


def test_an_order_about_an_earlier_start_is_refused_although_the_batch_step_has_the_same_id() -> None:
    day = Day(count=1, nodes=("n1",)).runs(BATCH_STEP)
    day.ends(1)
    day.on(machine.tick, 16)
    day.on(event(machine.looked, {}))
    day.on(IN_BATCH)
    assert day.order(BATCH_STEP, start=1) == []
    assert (day.run.answer, day.run.words) == ("refused", "start 1 of the command is over: start 2 runs")


def test_a_command_in_the_batch_script_cannot_leave_its_node() -> None:
    day = Day(count=1, nodes=("n1", "n2")).runs(BATCH_STEP)
    assert day.order(BATCH_STEP, ("n1",)) == []
    assert day.run.words == "the command runs in the batch script, which cannot leave n1"
    day.ends(1)
    day.on(machine.tick, 16)
    day.on(event(machine.looked, {"n1": "its clock is off"}))
    assert day.run.placement.nodes == ("n1",)


def test_the_end_of_the_jobs_time_is_asked_for_again_only_where_it_decides_and_what_slurm_says_then_holds() -> None:
    day = Day(end_at=100.0).runs()
    order = event(machine.ordered, RestartOrder(decision="d1", step_id="0", start=1), 41.0)
    failed = event(machine.ended, start=1, code=9)
    assert not is_about_time(day.run, failed, 39.0, 39.0)
    assert is_about_time(day.run, failed, 41.0, 41.0)
    assert is_about_time(day.run, order, 41.0, 41.0)
    assert not is_about_time(day.run, event(machine.ended, start=1, code=0), 41.0, 41.0)
    assert not is_about_time(day.run, machine.tick, 41.0, 41.0)
    day.run, day.now = with_end(day.run, 3600.0), 41.0
    assert day.order() == [SignalSteps("TERM", ("0",)), Look(NODES)]
    assert with_end(day.run, None).settings.allocation.end_at == 3600.0


def test_a_step_that_comes_late_takes_the_place_of_the_batch_step_and_several_nodes_never_have_it() -> None:
    day = Day(count=1, nodes=("n1",)).runs(BATCH_STEP)
    day.on(event(machine.steps_seen, ("4",)))
    day.on(IN_BATCH)
    assert status_of(day.run, 9).step_id == "4"
    wide = Day()
    wide.on(event(machine.looked, {}))
    wide.on(IN_BATCH)
    assert status_of(wide.run, 9).step_id == ""


def test_nodes_that_are_not_of_the_job_are_avoided_by_themselves() -> None:
    day = Day().runs()
    day.order(avoid=("x9",))
    assert status_of(day.run, 9).avoided == ()


def test_a_command_that_ends_well_is_over() -> None:
    day = Day().runs()
    day.ends(0)
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, 0)


@pytest.mark.parametrize(
    ("by_itself", "switched", "over"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_an_order_that_was_taken_after_the_command_had_ended_well_starts_nothing(
    by_itself: bool, switched: bool, over: bool
) -> None:
    day = Day().runs()
    day.order()
    day.on(event(machine.ended, 1, 0, switched=switched, by_itself=by_itself))
    assert (day.run.phase is Phase.OVER) == over
    assert day.run.answer is (OrderAnswer.REFUSED if over else OrderAnswer.TAKEN)
    day.on(event(machine.looked, {}))
    assert day.run.starts == (1 if over else 2)


def test_a_command_that_fails_starts_again_after_its_last_words_were_judged_and_so_often() -> None:
    day = Day(max_restarts=1).runs()
    assert day.ends(7) == [SignalSteps("TERM", ("0",)), SignalTree("TERM")], "what the command left behind"
    assert day.on(machine.tick, 14.9) == []
    assert day.on(machine.tick, 0.2) == [Look(NODES)]
    day.on(event(machine.looked, {}))
    assert day.started_on == ("n1", "n2", "n3")
    day.ends(7)
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, 7)
    assert "all of its 1 restarts are used up" in day.run.words


def test_an_order_for_a_command_that_has_failed_names_the_node_to_leave_out() -> None:
    day = Day().runs()
    day.ends(1)
    assert day.order(avoid=("n3",)) == [Look(("n1", "n2", "n4"))]
    day.on(event(machine.looked, {}))
    assert day.started_on == ("n1", "n2", "n4")


@pytest.mark.parametrize(("code", "stopped"), [(137, "its step was cancelled"), (130, "")])
def test_a_command_that_somebody_stopped_is_not_started_again(code: int, stopped: str) -> None:
    day = Day().runs()
    day.ends(code, stopped=stopped)
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, code)


@pytest.mark.parametrize("code", [143, 137, 1])
def test_a_rank_that_failed_under_kill_on_bad_exit_is_a_failure(code: int) -> None:
    """srun ends with 143 then, for the others are terminated."""
    day = Day().runs()
    day.ends(code)
    assert day.run.phase is Phase.PAUSING


def test_nothing_starts_again_in_the_last_minute_of_the_job() -> None:
    day = Day(end_at=100.0).runs()
    day.now = 30.0
    day.ends(1)
    day.on(machine.tick, 16)
    day.on(event(machine.looked, {}))
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, 1)


def test_a_command_that_saved_by_our_kill_switch_waits_for_its_order() -> None:
    day = Day().runs()
    day.ends(0, switched=True)
    assert status_of(day.run, 9).state is SupervisorState.WAITING
    day.on(event(machine.switch_seen, True), 5)
    assert day.order(avoid=("n1",)) == [Look(("n2", "n3", "n4"))]


@pytest.mark.parametrize(("switch", "seconds"), [(True, 120.0), (False, 30.0)])
def test_without_an_order_it_ends_with_the_commands_code(switch: bool, seconds: float) -> None:
    day = Day().runs()
    day.ends(3, switched=True)
    day.on(event(machine.switch_seen, switch))
    day.on(machine.tick, seconds - 1)
    assert day.run.phase is Phase.WAITING
    day.on(event(machine.switch_seen, switch))
    day.on(machine.tick, 1.1)
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, 3)


def test_a_signal_is_handed_on_and_after_sigterm_to_the_steps_nothing_starts_again() -> None:
    day = Day().runs()
    assert day.on(event(machine.asked, 10, False)) == [Forward(10)]
    assert day.on(event(machine.asked, TERM, True)) == [SignalSteps("TERM", ("0",))]
    assert day.order() == []
    day.ends(1)
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, 1)


def test_who_asks_twice_or_before_a_step_is_known_reaches_the_command_itself() -> None:
    day = Day().runs()
    day.on(event(machine.asked, TERM, True))
    assert day.on(event(machine.asked, TERM, True)) == [Forward(TERM)]
    early = Day()
    early.on(event(machine.looked, {}))
    assert early.on(event(machine.asked, TERM, True)) == [Forward(TERM)]


def test_a_command_that_does_not_end_when_it_is_asked_to_is_killed_as_slurm_would() -> None:
    day = Day().runs()
    day.on(event(machine.asked, TERM, True))
    assert day.on(machine.tick, 29) == []
    assert day.on(machine.tick, 1) == [SignalSteps("KILL", ("0",)), SignalTree("TERM")]
    assert day.on(machine.tick, 5) == [SignalSteps("KILL", ("0",)), SignalTree("KILL")]
    assert day.on(machine.tick, 5) == []


def test_sigterm_while_nothing_runs_ends_it_and_while_a_step_ends_it_is_the_last() -> None:
    pausing = Day().runs()
    pausing.ends(9)
    pausing.on(event(machine.asked, TERM, True))
    assert (pausing.run.phase, pausing.run.exit_code) == (Phase.OVER, 9)
    ending = Day().runs()
    ending.order()
    ending.on(event(machine.asked, TERM, True))
    ending.on(event(machine.looked, {}))
    ending.ends(137)
    assert (ending.run.phase, status_of(ending.run, 9).answer) == (Phase.OVER, OrderAnswer.FAILED)


def test_a_command_that_cannot_be_started_again_fails_its_order() -> None:
    day = Day().runs()
    day.order()
    day.on(event(machine.looked, {}))
    day.ends(143)
    day.on(event(machine.not_begun, "no such file"))
    assert (day.run.phase, day.run.exit_code, day.run.answer) == (Phase.OVER, 127, OrderAnswer.FAILED)


def test_an_order_to_a_run_before_this_one_in_the_same_script_is_nobodys() -> None:
    day = Day(count=1, nodes=("n1",)).runs(BATCH_STEP)
    assert day.on(machine.tick, 5) == []
    assert day.order(BATCH_STEP, age_s=6) == []
    assert (day.run.answer, day.run.answered) == ("", ""), (
        "it is not answered either: its action is about another command"
    )
    assert day.order(BATCH_STEP, age_s=4) == [], "the same decision"
    assert day.order(BATCH_STEP, decision="d2", age_s=4) != []


def test_of_two_runs_side_by_side_neither_takes_an_order_nor_says_where_its_command_is() -> None:
    day = Day().runs()
    day.on(event(machine.beside, 77))
    status = status_of(day.run, 9)
    assert (status.beside, status.step_id, status.nodes, status.spares, status.begun_ticks) == (77, "", (), (), 0)
    assert day.order() == []
    assert (day.run.answer, day.run.words) == (
        "refused", "another `slurm-watchdog run` of this job is under way (process 77)",
    )  # fmt: skip
    day.on(event(machine.beside, 78))
    assert len([line for line in day.said if "side by side" in line or "under way (process 77): until" in line]) == 1
    day.ends(7)
    assert day.run.phase is Phase.PAUSING, "a command that fails is started again"
    day.on(event(machine.beside, 0))
    assert status_of(day.run, 9).nodes == ("n1", "n2", "n3")


def test_a_new_step_on_the_node_that_it_was_to_leave_fails_the_order_and_the_status_names_that_node() -> None:
    day = Day().runs()
    day.order(avoid=("n2",))
    day.on(event(machine.looked, {}))
    day.ends(143)
    day.on(event(machine.steps_seen, ("1",), ("n1", "n2", "n3")))
    status = status_of(day.run, 9)
    assert (status.answer, status.nodes, status.avoided) == ("failed", ("n1", "n2", "n3", "n4"), ())
    assert day.said[-1].startswith("start 2 runs on n2, too, which it was to leave out: an srun of it was not called")
    assert day.run.phase is Phase.RUNNING
    day.on(event(machine.steps_seen, ("1",), ("n1", "n2", "n3")))
    assert len([line for line in day.said if "too, which" in line]) == 1


def test_a_step_on_a_spare_is_said_and_a_restart_for_another_node_counts() -> None:
    day = Day()
    day.on(event(machine.looked, {}))
    day.on(event(machine.steps_seen, ("0",), NODES))
    assert status_of(day.run, 9).spares == ()
    assert "start 1 runs on n4, too" in day.said[-1]
    day.order(avoid=("n2",))
    day.on(event(machine.looked, {}))
    day.ends(143)
    day.on(event(machine.steps_seen, ("1",), ("n1", "n3", "n4")))
    assert status_of(day.run, 9).answer is OrderAnswer.STARTED


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exit code 1;"), (128, "exit code 128;"), (139, "(signal 11)"), (255, "exit code 255;")]
)
def test_only_an_exit_code_of_a_signal_is_called_one(code: int, words: str) -> None:
    day = Day().runs()
    day.ends(code)
    assert words in day.said[-1]


def test_a_command_that_ends_after_a_notice_leaves_the_rest_to_the_script() -> None:
    """`#SBATCH --signal=B:USR1@300`: it saves, ends with a code, and the script requeues the job."""
    told = Day().runs()
    assert told.on(event(machine.asked, 10, ends=False)) == [Forward(10)]
    told.now += 599
    assert told.ends(99) == []
    assert told.run.phase is Phase.OVER and told.run.exit_code == 99
    assert told.said[-1].endswith(
        "SIGUSR1 or SIGUSR2 was passed to it 599 s before, as a notice that its time is nearly over is"
    )
    long_ago = Day().runs()
    long_ago.on(event(machine.asked, 10, ends=False))
    long_ago.now += 601
    long_ago.ends(99)
    assert long_ago.run.phase is Phase.PAUSING
    assert long_ago.on(event(machine.asked, 10, ends=False)) == [], "nothing runs"
    long_ago.on(machine.tick, 16)
    long_ago.on(event(machine.looked, {}))
    long_ago.ends(1)
    assert long_ago.run.phase is Phase.PAUSING, "an earlier start was told"


def test_a_node_that_slurm_has_lost_is_left_out_of_the_start_after_the_failure() -> None:
    day = Day().runs()
    day.ends(1)
    day.on(machine.tick, 15)
    day.on(event(machine.looked, {}, {"n2"}))
    assert day.started_on == ("n1", "n3", "n4")
    day.on(event(machine.steps_seen, ("1",)))
    status = status_of(day.run, 9)
    assert (status.restarts_left, status.avoided) == (2, ("n2",))


def test_a_lost_node_without_which_the_command_cannot_run_is_a_requeue_or_the_end_of_the_job() -> None:
    day = Day(count=4).runs()
    day.ends(143)
    day.on(machine.tick, 15)
    assert day.on(event(machine.looked, {}, {"n2"})) == [Requeue()]
    assert "Slurm has lost n2, and the command cannot be started again here (no spare is left" in day.said[-1]
    assert day.on(machine.tick, 15) == [Look(("n1", "n3", "n4"))], "Slurm did not answer"
    assert day.on(event(machine.looked, {})) == [Requeue()]
    assert len([line for line in day.said if "cannot be started again here" in line]) == 1
    assert day.on(machine.not_requeued) == []
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, 143)


@pytest.mark.parametrize(("max_restarts", "end_at"), [(0, None), (3, 50.0)])
def test_a_failure_after_the_last_restart_is_a_requeue_where_slurm_has_lost_its_node(
    max_restarts: int, end_at: float | None
) -> None:
    def failed(*lost: str, stopped: str = "") -> Day:
        day = Day(max_restarts=max_restarts, end_at=end_at).runs()
        day.on(event(machine.taken_out, lost))
        day.ends(1, stopped=stopped)
        return day

    day = failed("n2")
    assert day.did == [Requeue()]
    assert "Slurm has lost n2, and the command cannot be started again here (" in day.said[-1]
    day.on(machine.tick, 15)
    assert day.on(event(machine.looked, {})) == [Requeue()], "Slurm did not answer"
    day.on(machine.not_requeued)
    assert (day.run.phase, day.run.exit_code) == (Phase.OVER, 1)
    assert failed().run.phase is failed("n4").run.phase is Phase.OVER, "no node of the command's"
    assert failed("n2", stopped="its step was cancelled").run.phase is Phase.OVER


def test_a_command_that_can_run_on_fewer_nodes_does_so_where_no_spare_is_left() -> None:
    day = Day(count=4, least=2).runs()
    day.ends(143)
    day.on(machine.tick, 15)
    day.on(event(machine.looked, {}, {"n2"}))
    assert day.started_on == ("n1", "n3", "n4")
