"""Commands that are refused, whoever sends them: the controller is believed only as far as what it asks makes
sense here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from slurm_watchdog.agent.children.children import MAX_CHILDREN, Children
from slurm_watchdog.agent.children.requests import KillSwitch, RemoveSwitch, WorkerState, WriteSwitch
from slurm_watchdog.agent.commands import Commands, OwnSwitches
from slurm_watchdog.agent.delivery.replies import MAX_COMMANDS
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.files.mount_probing import MountProber
from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.agent.tasks import TASKS
from slurm_watchdog.base import clock
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from slurm_watchdog.model.protocol import (
    CollectEvidence,
    Command,
    CommandResult,
    EndProcess,
    GiveOrder,
    JobWatch,
    ProbeMount,
    ProcessEnd,
    RemoveKillSwitch,
    WriteKillSwitch,
)
from slurm_watchdog.model.report import ProcessSection
from slurm_watchdog.model.supervisor import RestartOrder
from tests.builders.agent_context import context_of
from tests.builders.views import process

RUN = f"{KILL_SWITCH_BASE}/7.2"
CONTENT = '{"by": "slurm-watchdog"}\n'
WATCH = JobWatch(job_id="7", restarts=2, uid=4711)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Commands]:
    """An agent of root's, on a node where job 7 of user 4711 runs for the third time. Nothing here needs
    root: all is refused. A parameter is how many children it may have."""
    probes = Children(TASKS, getattr(request, "param", MAX_CHILDREN))
    logs = JobLogs(UserLooks(probes, ProcessTable()), (), "n1", (), become_owner=True)
    logs.here.hear([WATCH])
    mounts = MountProber(probes, "n1", 60.0, frozenset(), stagger=False)
    yield Commands(context_of(probes, logs, mounts=mounts))
    probes.close()


def refusals(here: Commands, *asked: Command) -> list[CommandResult]:
    here.accept(asked, clock.monotonic())
    results = here.take_results()
    assert not any(result.ok for result in results)
    return list(results)


def write(number: int = 0, **changes: object) -> WriteKillSwitch:
    fields = {"job_id": "7", "restarts": 2, "path": f"{RUN}/kill", "uid": 4711, "content": CONTENT} | changes
    return WriteKillSwitch(id=f"w{number}", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"path": f"{RUN}/../../etc/kill"}, "has no detours"),
        ({"path": "/run//x/kill"}, "has no detours"),
        ({"path": "run/x/kill"}, "absolute path"),
        ({"path": f"{RUN}/kill/"}, "has no detours"),
        ({"path": "/run/x\0/kill"}, "absolute path"),
        ({"path": "/run/" + "x" * 5000}, "absolute path"),
        ({"path": "/home/u/.ssh/rc"}, "neither in a directory of"),
        ({"job_id": "8"}, "job 8 is not known on n1"),
        ({"uid": 0}, "uid 0 is not an ordinary user"),
        ({"uid": -1}, "-1 is not an ordinary user"),
        ({"uid": 4712}, "job 7 does not belong to uid 4712"),
        ({"uid": 2**32 - 1}, "is not an ordinary user"),
        ({"restarts": 1}, "job 7 is in run 2 on n1, the command is about run 1"),
        ({"content": ""}, "who wrote it"),
        ({"content": '{"by": "x", "shell": "id"}'}, "who wrote it"),
        ({"content": "x" * 65536}, "says in one line of JSON who wrote it"),
    ],
)
def test_a_kill_switch_that_makes_no_sense_is_not_written(
    here: Commands, changes: dict[str, object], reason: str
) -> None:
    (result,) = refusals(here, write(**changes))
    assert reason in (result.error or "")


def test_an_owner_that_slurm_did_not_name_is_never_root(here: Commands) -> None:
    here.logs.here.hear([JobWatch(job_id="7", restarts=2, uid=-1, log_paths=("/etc/hostname",))])
    (result,) = refusals(here, write(uid=-1))
    assert "-1 is not an ordinary user" in (result.error or "")
    rows, _, _ = here.logs.collect(clock.monotonic(), (), {}, 5.0)
    assert rows == ()


@pytest.mark.parametrize("put", ["link", "fifo", "empty"])
def test_without_words_of_ours_nothing_is_removed(here: Commands, tmp_path: Path, put: str) -> None:
    path = tmp_path / "kill"
    if put == "link":
        path.symlink_to("/etc/hostname")
    elif put == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
    refusals(here, RemoveKillSwitch(id="r", job_id="7", path=str(path), uid=os.getuid(), content=""))
    as_owner.remove_kill_switch(KillSwitch(str(path), "n1", by="", why="", incident="", decision=""), WorkerState())
    assert os.path.lexists(path), "only a file that holds exactly our line goes"


@pytest.mark.parametrize(
    ("mount", "directory", "uid"),
    [
        ("relative", "/x", 1),
        ("/x", "../..", 1),
        ("/" + "x" * 70_000, "/x", 1),
        ("/x\0", "/x", 1),
        ("/x", "/x", -1),
        ("/x", "/x", 0),
    ],
)
def test_a_probe_of_what_is_no_place_is_refused(here: Commands, mount: str, directory: str, uid: int) -> None:
    (result,) = refusals(here, ProbeMount(id="p", mount=mount, directory=directory, uid=uid))
    assert "not a file name here" in (result.error or "") or "not an ordinary user" in (result.error or "")
    assert here.children.names() == []


@pytest.mark.parametrize("here", [0], indirect=True, ids=["no child can be started"])
def test_a_flood_of_commands_is_bounded_and_each_is_answered(here: Commands) -> None:
    here.switch_prefixes = ("/scratch",)
    asked = [
        RemoveKillSwitch(id=str(number), job_id="7", path="/scratch/7/kill", uid=4711, content=CONTENT)
        for number in range(MAX_COMMANDS + 3)
    ]
    results = refusals(here, *asked)
    assert [result.command_id for result in results] == [str(MAX_COMMANDS + at) for at in range(3)]
    assert "wait already" in (results[0].error or "")


def switch(kind: type[KillSwitch], path: Path, why: str = "a hang") -> KillSwitch:
    return kind(str(path), "n1", by="slurm-watchdog", why=why, incident="i", decision="d")


def test_a_switch_in_the_default_place_is_a_file_that_its_job_can_read_in_a_directory_for_each_run(
    tmp_path: Path,
) -> None:
    switches, path = OwnSwitches(str(tmp_path)), tmp_path / "7.2" / "kill"
    before = os.umask(0o077)
    try:
        assert switches.do(switch(WriteSwitch, path)) is None
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    assert "not ours" in (switches.do(switch(WriteSwitch, path, "another reason")) or "")
    assert switches.do(switch(RemoveSwitch, path)) is None
    assert not path.exists()


def test_what_is_left_of_runs_that_are_over_goes_and_of_a_job_that_is_not_known_yet_nothing(tmp_path: Path) -> None:
    switches = OwnSwitches(str(tmp_path))
    for name in ("7.1", "7.2", "8.0", "9.0", "x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kill").write_text(CONTENT)
    (tmp_path / "6.0").symlink_to(tmp_path / "x")
    (tmp_path / "agent").touch()
    switches.clear([WATCH], frozenset({"7", "9"}))
    assert sorted(os.listdir(tmp_path)) == ["6.0", "7.2", "9.0", "agent", "x"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"uid": 4712}, "job 7 does not belong to uid 4712"), ({"restarts": 1}, "is in run 2"), ({"job_id": "8"}, "job 8 is not known")],
)  # fmt: skip
def test_an_order_to_another_users_job_or_another_run_is_handed_to_no_one(
    here: Commands, changes: dict[str, Any], reason: str
) -> None:
    order = RestartOrder(decision="d", step_id="0", start=1)
    given = GiveOrder(id="o", **({"job_id": "7", "restarts": 2, "uid": 4711, "order": order} | changes))
    (result,) = refusals(here, given)
    assert reason in (result.error or "")


def ending(number: int, **changes: object) -> EndProcess:
    fields = {
        "pid": os.getpid(), "start_ticks": 1, "uid": 4711, "comm": "x", "boot_id": "now", "job_id": "7", "minors": (0,), "how": "kill",
    } | changes  # fmt: skip
    return EndProcess(id=f"e{number}", **fields)  # type: ignore[arg-type]


def test_no_process_is_ended_while_the_agent_objects_and_each_command_is_done_once(here: Commands) -> None:
    asked: list[str] = []

    def objection(command: EndProcess, *known: object) -> str:
        asked.append(command.id)
        return "Slurm has job 7 here"

    here.context.orphan_gpu_processes.objection = objection  # type: ignore[method-assign]
    commands = (ending(1), ending(2, how="term"), ending(1))
    here.accept(commands, clock.monotonic())
    here.accept(commands, clock.monotonic())
    results = here.take_results()
    assert asked == ["e1", "e2"]
    assert [each.process for each in results] == [ProcessEnd(refusal="Slurm has job 7 here")] * 2
    assert here.children.names() == []


def test_a_process_of_another_boot_has_ended_and_one_that_came_too_late_is_not_touched(
    here: Commands,
) -> None:
    here.accept((ending(1, boot_id="before"), ending(2, expires_s=-1.0)), clock.monotonic())
    gone, late = here.take_results()
    assert (gone.ok, gone.process) == (True, ProcessEnd(gone=True))
    assert (late.ok, late.process) == (False, None)
    assert "expired" in (late.error or "")
    assert here.children.names() == []


def test_an_agent_that_was_not_told_which_jobs_run_ends_no_process() -> None:
    why = OrphanGpuProcesses(cast("Children", None), 60.0, lambda threads: []).objection(
        ending(1), {}, frozenset(), None
    )
    assert why == "which jobs run here is not known"


class LateMounts(MountProber):
    """Answers when the test says so."""

    then: Callable[[CommandResult], None]

    def command(self, *args: Any) -> bool:
        self.then = args[5]
        return True


def test_an_answer_that_comes_after_the_results_were_taken_is_among_the_next_ones(here: Commands) -> None:
    mounts = LateMounts(here.children, "n1", 60.0, frozenset(), stagger=False)
    here = Commands(context_of(here.children, here.logs, mounts=mounts))
    here.accept((ProbeMount(id="p", mount="/shared", directory="/shared", uid=4711),), clock.monotonic())
    assert here.take_results() == ()
    answer = CommandResult(command_id="p", ok=True)
    mounts.then(answer)
    assert here.take_results() == (answer,)


def test_evidence_that_fails_is_answered_and_holds_up_no_other_command(here: Commands) -> None:
    """Whatever it failed on may belong to one user: those of the others go on, and the agent's loop, too."""

    def fails(pid: int, start_ticks: int) -> None:
        raise UnicodeEncodeError("utf-8", "\udce9", 0, 1, "odd")

    here.context.processes.details_of = fails  # type: ignore[method-assign, assignment]
    here.sections.put(ProcessSection(processes=(process(),)))
    asked = CollectEvidence(id="c", job_id="7", restarts=2, expires_s=40.0)
    failed, refused = refusals(here, asked, write(1, uid=0))
    assert (failed.command_id, "UnicodeEncodeError" in (failed.error or "")) == ("c", True)
    assert refused.command_id == "w1"
    here.advance(clock.monotonic())
    assert here.under_way == []
