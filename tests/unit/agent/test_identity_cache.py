"""Whom a hung child hangs on, and who is asked about again: with children that answer when the test says."""

from __future__ import annotations

from slurm_watchdog.agent.proc.entry import JobMember, ProcessFacts
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory, SystemCall
from slurm_watchdog.agent.proc.table import NEW_AT_ONCE, ProcessTable
from slurm_watchdog.agent.processes.identity_cache import (
    IDENTIFY,
    IDENTIFY_DISTRUSTED,
    IDENTIFY_SUSPECTS,
    MAX_AT_ONCE,
    MAX_SET_ASIDE,
    MAX_SET_ASIDE_OF_USER,
)
from slurm_watchdog.agent.workers.answer_types import ResolvedCall
from slurm_watchdog.agent.workers.request_types import IdentifyProcesses, ResolveCalls
from slurm_watchdog.model.observations import BY_CLAIM, BY_SLURM, CallTarget, Role
from tests.builders.identities import World


def test_the_first_without_an_answer_is_to_blame_and_the_rest_is_asked_about_again() -> None:
    world = World(1, 2, 3, 4)
    assert world.ask() == {IDENTIFY: [1, 2, 3, 4]}
    order = [pid for pid, _ in world.asked_about(IDENTIFY)]
    world.answer(IDENTIFY, order[0])
    world.probes.hang(IDENTIFY)
    assert world.probes.hung == {f"identify:{order[1]}"}
    assert world.ask() == {IDENTIFY: sorted(order[2:])}
    world.answer(IDENTIFY, *order[2:])
    world.probes.finish(IDENTIFY)
    assert world.ask() == {}
    known = {pid: entry.known.environ for pid, entry in world.table.entries.items()}
    assert [known[pid] is None for pid in order] == [False, True, False, False]


def test_when_the_child_comes_back_its_process_is_asked_about_once_more() -> None:
    world = World(1)
    world.ask()
    world.probes.hang(IDENTIFY)
    assert [world.ask() for _ in range(3)] == [{}, {}, {}]
    world.probes.come_back("identify:1")
    assert world.ask() == {IDENTIFY: [1]}


def test_a_process_that_is_gone_is_forgotten_and_its_number_may_be_anothers() -> None:
    world = World(1)
    world.ask()
    world.probes.hang(IDENTIFY)
    del world.table.entries[1]
    world.table.to_identify.clear()
    world.ask()
    assert world.identities.stuck == {}
    world.add(1)
    assert world.ask() == {IDENTIFY: [1]}


def test_what_stands_in_d_holds_up_nobody_and_so_many_may_hang() -> None:
    world = World(*range(1, 11), state="D")
    world.add(50)
    for _ in range(MAX_SET_ASIDE_OF_USER):
        asked = world.ask()
        assert IDENTIFY_SUSPECTS in asked
        world.probes.hang(IDENTIFY_SUSPECTS)
    assert len(world.probes.hung) == MAX_SET_ASIDE_OF_USER < MAX_SET_ASIDE
    assert world.ask() == {}
    world.answer(IDENTIFY, 50)
    world.probes.finish(IDENTIFY)
    world.add(51)
    assert world.ask() == {IDENTIFY_DISTRUSTED: [51]}, "this user's are asked about apart"
    world.add(52)
    world.give(52, 1001)
    assert world.ask() == {IDENTIFY: [52]}, "and nobody else's"
    assert ["uid 1000" in problem for problem in world.identities.problems()] == [True]


def test_one_users_thousands_of_new_processes_cost_another_none_of_his_few() -> None:
    world = World(*range(1, 3001))
    for pid in (2990, 3000):
        world.give(pid, 1001)
    asked = world.ask()[IDENTIFY]
    order = [pid for pid, _ in world.asked_about(IDENTIFY)]
    assert (len(asked), {2990, 3000} <= set(asked)) == (MAX_AT_ONCE, True)
    assert {2990, 3000} <= set(order[:4]), "users take turns within a question, too"
    (problem,) = world.identities.problems()
    assert problem.startswith("2998 new processes of uid 1000 wait")


def test_a_process_on_which_a_child_spends_its_time_is_given_up_and_its_user_asked_about_apart() -> None:
    world = World(1, 2, 3)
    world.give(3, 1001)
    world.ask()
    order = [pid for pid, _ in world.asked_about(IDENTIFY)]
    world.answer(IDENTIFY, order[0])
    world.probes.finish(IDENTIFY, "given up after 5 s of CPU time")
    bad = order[1]
    uid = world.table.entries[bad].known.uid
    assert world.identities.distrusted == {uid: bad}
    asked = world.ask()
    assert bad in asked[IDENTIFY_DISTRUSTED]


def test_the_child_that_hangs_for_somebody_else_is_set_aside_too() -> None:
    world = World(1)
    world.probes.ask(IDENTIFY, IdentifyProcesses([]), 1.0, 0.0, lambda _: None, on_part=lambda _: None)
    assert world.ask() == {}
    world.probes.hung.add(IDENTIFY)
    assert world.ask()[IDENTIFY] == [1]
    assert world.probes.hung == {"identify:logs"}


def track(syscall: str, state: str = "D") -> BlockedCallHistory:
    return BlockedCallHistory(b"line " + syscall.encode(), SystemCall(1, (3,)), state, "w", syscall, 0, 0, None, 0.0)


def test_of_a_process_with_a_locked_memory_descriptors_are_still_resolved_and_paths_are_not() -> None:
    world = World(1, 2)
    world.ask()
    first, second = (pid for pid, _ in world.asked_about(IDENTIFY))
    world.probes.hang(IDENTIFY)
    world.ask()
    world.answer(IDENTIFY, second)
    world.probes.finish(IDENTIFY)
    tracks = {
        (first, 0, first): track("write"),
        (first, 0, 99): track("openat"),
        (second, 0, second): track("openat"),
    }
    assert world.identities.resolve(tracks, 0.0, 1.0) is not None
    asked = world.probes.busy[IDENTIFY]
    assert isinstance(asked.request, ResolveCalls)
    assert [(each.pid, each.syscall) for each in asked.request.calls] == [
        (first, "write"),
        (second, "openat"),
    ]
    asked.on_part(ResolvedCall(index=1, target=CallTarget("/shared/x", "/shared")))
    target = tracks[second, 0, second].target
    assert target is not None
    assert (target.path, target.mount) == ("/shared/x", "/shared")
    world.probes.hang(IDENTIFY)  # even the mounts of the first do not come: nothing more is asked about it
    assert world.probes.hung == {f"identify:{first}", f"identify:{first}:file"}
    assert world.identities.resolve({(first, 0, first): track("fsync")}, 0.0, 1.0) is None


def test_answers_about_a_process_that_was_replaced_change_nobody() -> None:
    world = World(1)
    world.ask()
    world.table.entries[1].known = ProcessFacts(1, 999, 1, "python", 1000)
    world.answer(IDENTIFY, 1)
    assert world.table.entries[1].known.environ is None


def test_new_processes_beyond_a_ticks_are_looked_at_later_and_each_user_has_his_turn() -> None:
    world = World(1)
    crowd = set(range(1000, 1000 + 3 * NEW_AT_ONCE))
    few = {900_000, 900_001}
    owners = dict.fromkeys(crowd, 1000) | dict.fromkeys(few, 2000)
    world.table.read_owner = owners.__getitem__
    taken = set(world.table._next_new(crowd | few))
    assert few < taken and len(taken) == NEW_AT_ONCE, "the crowd is older, and does not come first"
    assert world.table.unmet == {1000: len(crowd) + 2 - NEW_AT_ONCE}
    world.table.entries[1].member = JobMember("7", "0", Role.HELPER, by=BY_SLURM)
    assert any(
        "new processes of uid 1000 (job 7) are not looked at yet" in each for each in world.identities.problems()
    )
    crowd -= taken
    while world.table.unmet:
        crowd -= set(world.table._next_new(crowd))
    assert not crowd and world.identities.problems() == []


def test_the_first_look_leaves_out_nobody() -> None:
    pids = set(range(2 * NEW_AT_ONCE))
    assert set(ProcessTable()._next_new(pids)) == pids, "who is not named looks gone"


def test_a_job_by_claim_is_not_named_as_the_culprits() -> None:
    world = World(1)
    world.table.entries[1].member = JobMember("7", "0", Role.HELPER, by=BY_CLAIM)
    assert world.table.job_of(1000) is None
