"""Who is probed when, and what a mount's answers, delays and returns look like in the report. The children
are fakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from slurm_watchdog.agent.children.look import STOPPED
from slurm_watchdog.agent.files.mount_probing import MAX_MOUNTS, MountProber, ProbeTarget, first_due, wanted_mounts
from slurm_watchdog.base.mounts import MAX_OF_USERS, NOT_PROBED, Mount, parse_mountinfo
from slurm_watchdog.model.observations import MountProbe
from slurm_watchdog.model.protocol import CommandResult, ProbeMount
from tests.builders.fake_children import FINE, FakeChildren

MOUNT = "/scratch"
KEY = f"probe:{MOUNT}"
WANTED = {MOUNT: ProbeTarget("/scratch/job", 1000, "srv:/x", "nfs4")}


@dataclass
class Watch:
    """A collector with its children and a clock."""

    children: FakeChildren
    collector: MountProber
    now: float = 1000.0

    def look(self, after_s: float = 5.0, wanted: dict[str, ProbeTarget] = WANTED) -> tuple[MountProbe, ...]:
        self.now += after_s
        return self.collector.collect(self.now, 10.0, wanted)

    def command(self, mount: str = MOUNT) -> list[CommandResult]:
        results: list[CommandResult] = []
        command = ProbeMount(id="c", mount=mount, directory=f"{mount}/d", uid=7)
        self.collector.command(command, self.now, 10.0, 7, "srv:/x", results.append)
        return results


def make(write_on: frozenset[str] = frozenset(), stagger: bool = False) -> Watch:
    children = FakeChildren()
    return Watch(children, MountProber(cast("Any", children), "n1", 30.0, write_on, stagger))


def test_a_mount_is_looked_at_on_its_grid_and_its_child_is_gone_as_soon_as_it_has_answered() -> None:
    watch = make()
    assert watch.look() == ()
    watch.children.answer()
    assert watch.children.alive == set()
    (row,) = watch.look()
    assert row == MountProbe(mount=MOUNT, responding=True, seconds=0.01, device="srv:/x", fs_type="nfs4", wrote=False)
    assert [watch.look() for _ in range(4)] == [()] * 4
    assert len(watch.children.asked) == 1
    watch.look()
    assert [(each["at"], each["uid"], each["directory"]) for each in watch.children.asked] == [
        (1005.0, -1, MOUNT),
        (1035.0, -1, MOUNT),
    ]


@pytest.mark.parametrize("write", [False, True])
def test_only_where_it_is_configured_something_is_written(write: bool) -> None:
    watch = make(frozenset({MOUNT} if write else {"/other"}))
    watch.look()
    assert watch.children.asked[0]["write"] is write
    watch.children.answer({**FINE, "wrote": write})
    assert [row.wrote for row in watch.look()] == [write]


def test_a_mount_point_may_be_configured_with_a_slash_at_its_end() -> None:
    watch = make(frozenset({f"{MOUNT}/"}))
    watch.look()
    assert watch.children.asked[0]["write"] is True
    assert list(wanted_mounts([("/x", 1)], TABLE, make(frozenset({"/"})).collector.write_on)) == ["/"]


def test_an_error_is_an_answer() -> None:
    watch = make()
    watch.look()
    watch.children.answer({**FINE, "error": "EIO: Input/output error"})
    assert [(row.responding, row.error) for row in watch.look()] == [(True, "EIO: Input/output error")]


def test_where_our_own_user_may_not_look_the_owner_of_a_job_is_asked_and_his_word_is_his_own() -> None:
    watch = make()
    watch.look()
    watch.children.answer({**FINE, "error": "EACCES: Permission denied"})
    assert watch.look(30.0) == ()
    assert (watch.children.asked[1]["uid"], watch.children.asked[1]["directory"]) == (1000, "/scratch/job")
    watch.children.answer()
    assert [(row.responding, row.uid) for row in watch.look()] == [(True, 1000)]


@pytest.mark.parametrize("write", [False, True])
def test_a_child_that_hangs_in_no_call_says_nothing_about_its_mount(write: bool) -> None:
    watch = make(frozenset({MOUNT} if write else ()))
    watch.look()
    key = next(iter(watch.children.busy))
    watch.children.somewhere.add(key)
    watch.children.time_out(watch.now + 10)
    assert watch.look() == ()
    watch.children.somewhere.clear()
    assert [row.responding for row in watch.look()] == [False]


def test_a_child_that_was_stopped_says_nothing_and_is_asked_again() -> None:
    watch = make()
    watch.look()
    watch.children.answer(None, STOPPED)
    assert watch.look() == ()
    watch.look(30.0)
    assert len(watch.children.asked) == 2


def test_a_command_whose_child_was_stopped_or_hangs_in_no_call_fails_with_the_reason() -> None:
    watch = make()
    results = watch.command()
    watch.children.answer(None, STOPPED)
    assert [(result.ok, result.error) for result in results] == [(False, STOPPED)]
    results = watch.command()
    watch.children.somewhere.add(next(iter(watch.children.busy)))
    watch.children.time_out(watch.now + 10)
    assert [(result.ok, result.probe) for result in results] == [(False, None)]
    assert [result.ok for result in watch.command()] == [False]


def test_a_filesystem_that_a_user_serves_is_never_looked_at() -> None:
    line = "36 35 0:44 / /home/m/mnt rw,nosuid - fuse.evil evil rw,user_id=1500,group_id=1500"
    system = "37 35 0:45 / /shared rw - fuse.sshfs srv:/ rw,user_id=0,group_id=0,allow_other"
    table = parse_mountinfo(f"{line}\n{system}\n")
    assert [(mount.owner, mount.number) for mount in table] == [(1500, 36), (None, 37)]
    places = [("/home/m/mnt/x", 1500), ("/shared/x", 1500)]
    assert list(wanted_mounts(places, table, {"/home/m/mnt"})) == ["/shared"]


def test_of_a_users_thousands_of_mounts_a_bounded_number_is_kept_and_of_others_all() -> None:
    lines = [f"{n} 35 0:44 / /m{n} rw - fuse.x x rw,user_id=1500" for n in range(5000)]
    table = parse_mountinfo("\n".join([*lines, "9999 35 0:45 / /shared rw - nfs4 srv:/ rw"]))
    assert (len(table), table[-1].point) == (MAX_OF_USERS + 1, "/shared")


@pytest.mark.parametrize(
    "answer", [(None, "the child ended"), ({"mounted": False, "error": "it lies on / here"}, None)]
)
def test_a_child_that_failed_or_found_another_mount_says_nothing_about_this_one(answer: Any) -> None:
    watch = make()
    watch.look()
    watch.children.answer(*answer)
    assert watch.look() == ()


def test_a_mount_that_stays_stuck_has_one_child_and_a_growing_time_and_its_return_is_told_once() -> None:
    watch = make()
    watch.look()
    watch.children.time_out(watch.now + 10)
    rows = [watch.look(10.0)[0] for _ in range(10)]
    assert [row.seconds for row in rows] == [10.0 * (n + 1) for n in range(10)]
    assert {row.responding for row in rows} == {False}
    assert rows[0].error == "no answer to a look in /scratch"
    assert len(watch.children.asked) == 1
    watch.children.answer()  # its words come too late and are dropped
    (row,) = watch.look()
    assert (row.responding, row.error, row.seconds) == (True, None, 0.0)
    assert watch.look(1.0) == ()
    assert len(watch.children.asked) == 2, "and it is asked anew at once"


def test_a_stuck_child_that_was_killed_is_no_mount_that_answers() -> None:
    watch = make()
    watch.look()
    watch.children.time_out(watch.now)
    assert len(watch.look()) == 1
    watch.children.die()
    assert watch.look() == ()
    watch.look(1.0)
    assert len(watch.children.asked) == 2


def test_a_stuck_write_whose_child_was_killed_is_not_written_again_for_nobody() -> None:
    watch = make()
    watch.command()
    watch.children.time_out(watch.now)
    watch.children.die()
    assert [watch.look(5.0, {}) for _ in range(3)] == [()] * 3
    assert len(watch.children.asked) == 1


def test_a_stuck_mount_is_told_of_even_when_no_job_uses_it_any_more() -> None:
    watch = make()
    watch.look()
    watch.children.time_out(watch.now)
    assert [row.responding for row in watch.look(5.0, {})] == [False]
    watch.children.answer()
    assert [row.responding for row in watch.look(5.0, {})] == [True]
    assert watch.look(5.0, {}) == ()


def test_a_mount_that_is_not_used_any_more_is_not_asked_any_more() -> None:
    watch = make()
    watch.look()
    watch.children.answer()
    for _ in range(20):
        watch.look(5.0, {})
    assert len(watch.children.asked) == 1


def test_an_answer_that_comes_when_no_job_uses_the_mount_any_more_is_still_told() -> None:
    watch = make()
    watch.look()
    watch.look(5.0, {})
    watch.children.time_out(watch.now + 5)
    assert [row.responding for row in watch.look(5.0, {})] == [False]


def test_a_command_writes_as_its_own_user_and_its_answer_is_a_row_too() -> None:
    watch = make()
    results = watch.command()
    assert (watch.children.asked[0]["write"], watch.children.asked[0]["uid"]) == (True, 7)
    watch.children.answer({**FINE, "wrote": True})
    (result,) = results
    assert result.ok
    assert result.probe is not None
    assert (result.probe.responding, result.probe.wrote) == (True, True)
    assert watch.look(5.0, {}) == (result.probe,)


def test_a_command_about_a_mount_that_is_stuck_is_answered_at_once_and_starts_nothing() -> None:
    watch = make()
    watch.look()
    watch.children.time_out(watch.now)
    watch.now += 50
    (result,) = watch.command()
    assert result.ok
    assert result.probe is not None
    assert (result.probe.responding, result.probe.seconds) == (False, 50.0)
    assert len(watch.children.asked) == 1


def test_a_command_waits_for_the_child_of_its_user() -> None:
    watch = make()
    watch.look()
    command = ProbeMount(id="c", mount=MOUNT, directory=f"{MOUNT}/d", uid=7)
    assert watch.collector.command(command, watch.now, 10.0, 7, None, lambda result: None)
    assert not watch.collector.command(command, watch.now, 10.0, 7, None, lambda result: None)
    watch.children.answer()
    assert watch.collector.command(command, watch.now, 10.0, 7, None, lambda result: None)


def test_a_command_about_a_mount_that_is_not_here_fails_with_the_reason() -> None:
    watch = make()
    results = watch.command("/nowhere")
    watch.children.answer({"mounted": False, "error": "it lies on / here"}, key="probe:/nowhere:7")
    assert [(result.ok, result.error) for result in results] == [(False, "it lies on / here")]
    assert watch.look(5.0, {}) == ()


def test_a_command_that_times_out_is_a_row_in_every_report_until_the_mount_answers() -> None:
    watch = make()
    results = watch.command()
    watch.children.time_out(watch.now + 10)
    assert [result.probe and result.probe.error for result in results] == ["no answer to a write in /scratch/d"]
    assert [watch.look(5.0, {})[0].seconds for _ in range(3)] == [5.0, 10.0, 15.0]
    watch.children.answer()
    assert [row.responding for row in watch.look(5.0, {})] == [True]


def test_a_write_that_came_back_late_is_tried_again_once_so_that_the_end_is_seen() -> None:
    watch = make()
    watch.command()
    watch.children.time_out(watch.now + 10)
    watch.look(20.0, {})
    watch.children.answer()
    assert [(row.responding, row.wrote) for row in watch.look(5.0, {})] == [(True, False)]
    assert watch.look(5.0, {}) == ()
    assert [each["write"] for each in watch.children.asked] == [True, True]
    assert watch.children.asked[1]["directory"] == "/scratch/d"
    watch.children.answer({**FINE, "wrote": True})
    assert [(row.responding, row.wrote) for row in watch.look(5.0, {})] == [(True, True)]
    assert [watch.look(60.0, {}) for _ in range(3)] == [()] * 3
    assert len(watch.children.asked) == 2


def test_a_write_that_hangs_again_is_out_again() -> None:
    watch = make(frozenset({MOUNT}))
    watch.look()
    for _ in range(3):
        watch.children.time_out(watch.now)
        assert [row.responding for row in watch.look()] == [False]
        watch.children.answer()
        assert [row.responding for row in watch.look()] == [True]
        watch.look()
    assert len(watch.children.asked) == 4


def test_a_cluster_does_not_ask_all_at_once() -> None:
    delays = sorted(first_due(f"n{number}", MOUNT, 30.0, 0.0) for number in range(48))
    assert delays[0] >= 0
    assert delays[-1] < 30
    for tenth in range(10):
        assert any(3 * tenth <= delay < 3 * tenth + 3 for delay in delays), f"nobody in tenth {tenth}"
    assert first_due("n1", MOUNT, 30.0, 0.0) == first_due("n1", MOUNT, 30.0, 0.0)
    assert first_due("n1", MOUNT, 30.0, 0.0) != first_due("n1", "/home", 30.0, 0.0)


def test_a_staggered_mount_is_asked_once_within_each_interval() -> None:
    watch = make(stagger=True)
    for _ in range(24):
        watch.look()
        if watch.children.busy:
            watch.children.answer()
    assert len(watch.children.asked) == 4
    assert {round(each["at"] - watch.children.asked[0]["at"]) % 30 for each in watch.children.asked} == {0}


def test_after_a_long_pause_a_mount_is_asked_once() -> None:
    watch = make()
    watch.look()
    watch.children.answer()
    watch.look(86400.0)
    watch.children.answer()
    watch.look(1.0)
    assert len(watch.children.asked) == 2


TABLE = (
    Mount("/", "ext4", "/dev/vda"),
    Mount("/scratch", "lustre", "mgs:/s"),
    Mount("/scratch/inner", "nfs4", "srv:/i"),
    Mount("/dev/shm", "tmpfs", "tmpfs"),
    Mount("/auto", "autofs", "auto.home"),
    Mount("/auto/me", "nfs4", "srv:/me"),
)


def test_the_first_directory_on_each_mount_is_where_it_is_asked() -> None:
    places = [
        ("/scratch/a", 1),
        ("/scratch/b", 2),
        ("/scratch/inner/c", 3),
        ("/auto/me/d", 4),
        ("relative", 5),
    ]
    assert wanted_mounts(places, TABLE) == {
        "/scratch": ProbeTarget("/scratch/a", 1, "mgs:/s", "lustre"),
        "/scratch/inner": ProbeTarget("/scratch/inner/c", 3, "srv:/i", "nfs4"),
        "/auto/me": ProbeTarget("/auto/me/d", 4, "srv:/me", "nfs4"),
    }


def test_what_nobody_serves_what_would_be_mounted_and_the_root_are_not_probed() -> None:
    places = [("/dev/shm/x", 1), ("/auto/you", 1), ("/home/x", 1), ("/", 1)]
    assert wanted_mounts(places, TABLE) == {}


def test_what_is_configured_to_be_written_to_is_probed_whatever_it_is_but_never_mounted_for_it() -> None:
    places = [("/dev/shm/x", 1), ("/auto/you", 1), ("/home/x", 1)]
    assert list(wanted_mounts(places, TABLE, ("/dev/shm", "/", "/auto"))) == ["/dev/shm", "/"]


@pytest.mark.parametrize("fs_type", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "ext4", "xfs"])
def test_filesystems_that_can_fail_are_probed(fs_type: str) -> None:
    assert fs_type not in NOT_PROBED


def test_no_more_than_so_many_mounts_are_probed() -> None:
    mounts = [Mount(f"/m{number}", "nfs4", "srv:/x") for number in range(100)]
    assert len(wanted_mounts([(f"/m{number}/d", 1) for number in range(100)], mounts)) == MAX_MOUNTS
