"""`slurm-watchdog run` in batch scripts of a real Slurm: the test gives the orders that an agent would hand over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_watchdog.agent.proc.entry import parse_stepd
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.supervisor_link import SupervisorLink
from slurm_watchdog.base import clock
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.supervisor import (
    AGENT_SOCKET,
    GRACE_S,
    HUNG_GRACE_S,
    OrderAnswer,
    RestartOrder,
    SupervisorState,
    SupervisorStatus,
    run_directory,
)
from tests.rig.cluster import Cluster
from tests.rig.rights import USER_UID

PATIENCE_S = 30.0
WAITS = "while :; do sleep 1; done"
HEARS_NOTHING = 'trap "" TERM; while :; do sleep 1; done'
"""As a rank in a collective: only SIGKILL ends it."""


class Steps(dict[int, Any]):
    """The processes of a node as far as they are slurmstepds."""

    def get(self, pid: int, default: object = None) -> Any:
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if (step := parse_stepd(title)) is not None:
                return SimpleNamespace(member=None, known=SimpleNamespace(stepd=step))
        return default


class Job:
    """A batch script with a supervisor in it, and the agent's end of its connection."""

    def __init__(self, cluster: Cluster, script: str, *options: str):
        self.cluster = cluster
        self.output = cluster.directory / "log" / f"supervised-{time.monotonic_ns()}.txt"
        place = cluster.place
        run = "import sys; from slurm_watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
        exports = "".join(f"export {name}='{value}'\n" for name, value in place.environment.items() if name != "PATH")
        text = (
            f'#!/bin/bash\n{exports}export TMPDIR=/dev/shm\nsw() {{ {place.python} -c "{run}" run "$@"; }}\n'
            f'{script}\necho "the script continues: $?"\n'
        )
        self.job_id = cluster.sbatch(text, "--no-kill", f"--output={self.output}", *options)
        cluster.wait_for_job_state(self.job_id, "RUNNING")
        self.batch_host = cluster.job(self.job_id)["BatchHost"]
        self.link: SupervisorLink | None = None

    def listen(self) -> SupervisorLink:
        """As the agent of the node does, some seconds after the start. Its job is found by the slurmstepd above it."""
        if self.link is None:
            jobs = JobsHere()
            jobs.hear([JobWatch(job_id=self.job_id, restarts=0, uid=USER_UID)])
            self.link = SupervisorLink(str(self.cluster.node_path(self.batch_host, AGENT_SOCKET)), jobs, Steps())
        return self.link

    @property
    def text(self) -> str:
        with contextlib.suppress(OSError):
            return self.output.read_text()
        return ""

    def status(self) -> SupervisorStatus | None:
        rows = list(self.listen().tick(clock.monotonic()))
        return rows[0].status if rows else None

    def until(self, holds: Callable[[SupervisorStatus], object], what: str, within_s: float = PATIENCE_S):
        end = time.monotonic() + within_s
        while True:
            status = self.status()
            if status is not None and holds(status):
                return status
            assert time.monotonic() < end, f"not in time: {what}\n{status}\n{self.text[-3000:]}"
            time.sleep(0.05)

    def runs(self) -> SupervisorStatus:
        """The first start, with its step known."""
        return self.until(lambda status: status.state is SupervisorState.RUNNING, "a step")

    def order(self, about: SupervisorStatus, *avoid: str, decision: str = "d1", grace_s: int = HUNG_GRACE_S) -> None:
        """As the controller gives it for a loop that does not turn."""
        order = RestartOrder(
            decision=decision, step_id=about.step_id, start=about.starts, avoid=avoid, grace_s=grace_s, why="it hangs"
        )
        self.listen().give(self.job_id, 0, order, clock.monotonic())

    def started_again(self, within_s: float = PATIENCE_S) -> SupervisorStatus:
        """Says how long it took since the order, and each part of it."""
        began_at = time.monotonic()
        self.until(lambda status: status.answer is not OrderAnswer.NONE, "an answer", within_s)
        taken_at = time.monotonic()
        self.until(lambda status: status.starts == 2, "the next start", within_s)
        started_at = time.monotonic()
        status = self.until(lambda status: status.answer is OrderAnswer.STARTED, "the new step", within_s)
        now = time.monotonic()
        ending_s, starting_s = started_at - taken_at, now - started_at
        print(f"order to new step: {now - began_at:.1f} s, ending {ending_s:.1f} s, starting {starting_s:.1f} s")
        return status

    def ends(self, within_s: float = PATIENCE_S) -> dict[str, str]:
        return self.cluster.wait_for_job_state(self.job_id, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), within_s)

    def lines(self, word: str) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(word)]


@pytest.fixture(scope="module")
def four(cluster_possible: None) -> Iterator[Cluster]:
    with Cluster(nodes=4) as cluster:
        yield cluster


@pytest.fixture
def start(four: Cluster) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def submit(script: str, *options: str) -> Job:
        started.append(Job(four, script, *options))
        return started[-1]

    yield submit
    for job in started:  # at once: some of these ranks hear no SIGTERM
        if job.link is not None:
            job.link.close()
        four.slurm("scancel", "--signal=KILL", "--full", job.job_id, check=False)
    four.reset()


SAYS = (
    "echo rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME in $SLURM_JOB_NODELIST start $SLURM_WATCHDOG_RESTARTS"
)


def ranks(then: str) -> str:
    """What each rank does, as words of a script."""
    return f"bash -c '{SAYS}; {then}'"


def test_a_hang_is_ended_by_an_order_and_runs_on_the_spare_within_seconds(start: Callable[..., Job]) -> None:
    job = start(f"sw --spares 1 -- srun {ranks(HEARS_NOTHING)}", "-N4", "--ntasks-per-node=1")
    first = job.runs()
    assert (first.nodes, first.spares) == (("n1", "n2", "n3"), ("n4",))
    asked_at = time.monotonic()
    job.order(first, "n2")
    again = job.started_again()
    took_s = time.monotonic() - asked_at
    print(f"order to new step: {took_s:.1f} s")
    assert (again.nodes, again.avoided, again.restarts_left) == (("n1", "n3", "n4"), ("n2",), 2)
    assert took_s < 8
    time.sleep(0.5)
    job.until(lambda status: len(job.lines("rank")) == 6, "the lines of the new ranks")
    assert sorted(job.lines("rank"))[-1] == "rank 2 of 3 on n4 in n[1,3-4] start 1"
    job.order(again, "n3", decision="d2")
    refused = job.until(lambda status: status.answer is OrderAnswer.REFUSED, "an answer")
    assert (refused.state, refused.step_id) == (SupervisorState.RUNNING, again.step_id)
    assert refused.words.startswith("no spare is left: 3 nodes are needed, and of the 4 of the job 2 may be used")
    job.order(first, decision="d3")
    job.until(lambda status: status.words == f"step {first.step_id} is over: step {again.step_id} runs", "an answer")
    assert len(job.lines("rank")) == 6


def test_a_rank_in_state_d_is_left_behind_and_the_new_step_overlaps_it(
    start: Callable[..., Job], four: Cluster
) -> None:
    writes = f"while :; do echo x >> {four.scratch}/log || exit 1; sleep 0.1; done"
    job = start(f"sw --spares 1 -- srun {ranks(writes)}", "-N4", "--ntasks-per-node=1")
    first = job.runs()
    four.freeze("n2")
    try:
        time.sleep(1)
        asked_at = time.monotonic()
        job.order(first, "n2")
        again = job.started_again()
        print(f"order to new step beside state D: {time.monotonic() - asked_at:.1f} s")
        assert again.nodes == ("n1", "n3", "n4")
        time.sleep(0.5)
        assert "rank 2 of 3 on n4 in n[1,3-4] start 1" in job.text
    finally:
        four.thaw("n2")


@pytest.mark.thorough
def test_a_node_without_power_is_left_out_and_without_no_spare_more_the_next_order_is_refused(
    start: Callable[..., Job], four: Cluster
) -> None:
    job = start(f"sw --spares 1 -- srun {ranks(WAITS)}", "-N4", "--ntasks-per-node=1")
    first = job.runs()
    four.kill_node("n2")
    asked_at = time.monotonic()
    job.order(first, "n2")
    again = job.started_again(40)
    print(f"order to new step without n2's power: {time.monotonic() - asked_at:.1f} s")
    assert again.nodes == ("n1", "n3", "n4")


@pytest.mark.thorough
def test_an_array_element_and_a_function_of_the_script_start_again(start: Callable[..., Job]) -> None:
    script = f"train() {{ srun -N $SLURM_NNODES {ranks(WAITS)}; }}\nexport -f train\nsw --spares 1 -- train"
    job = start(script, "-N2", "--ntasks-per-node=2", "--array=5")
    first = job.runs()
    assert first.nodes == ("n1",)
    job.order(first, "n1")
    assert job.started_again().nodes == ("n2",)
    time.sleep(0.5)
    assert sorted(job.lines("rank"))[-1] == "rank 1 of 2 on n2 in n2 start 1"


def test_a_step_that_its_owner_cancels_is_not_started_again(start: Callable[..., Job], four: Cluster) -> None:
    job = start(f"sw -- srun {ranks(WAITS)}", "-N2", "--ntasks-per-node=1")
    four.slurm("scancel", f"{job.job_id}.{job.runs().step_id}")
    job.until(lambda status: status.state is SupervisorState.OVER, "its end")
    job.ends()
    assert "is not started again: its step was cancelled" in job.text
    assert "the script continues: 137" in job.text


def test_a_rank_that_fails_starts_again_in_place_as_often_as_was_said(start: Callable[..., Job]) -> None:
    fails = "sleep 1; [ $SLURM_PROCID = 1 ] && exit 7; sleep 60"
    job = start(f"sw --max-restarts 1 -- srun -K {ranks(fails)}", "-N2", "--ntasks-per-node=1")
    job.ends(60)
    assert len(job.lines("rank")) == 4
    assert "all of its 1 restarts are used up" in job.text


def test_a_training_outlives_its_killed_supervisor_and_the_script_gets_its_exit_code(
    start: Callable[..., Job], four: Cluster
) -> None:
    ends = "until [ -e $0/go ]; do sleep 0.2; done; exit 9"
    job = start(f"sw --spares 1 -- srun bash -c '{SAYS}; {ends}' {four.shared}", "-N2", "--ntasks-per-node=1")
    job.runs()
    four.node_run(job.batch_host, ["pkill", "-9", "slurm-watchdog"])
    time.sleep(2)
    assert four.job(job.job_id)["JobState"] == "RUNNING"
    assert "its supervisor has died (exit code 137); the command continues" in job.text
    (four.shared / "go").touch()
    try:
        job.ends()
    finally:
        (four.shared / "go").unlink()
    assert "the script continues: 9" in job.text


def test_a_job_that_is_ended_in_the_middle_of_a_restart_starts_nothing_more(
    start: Callable[..., Job], four: Cluster
) -> None:
    """As at its time limit: SIGTERM to all of it, and SIGKILL after Slurm's KillWait."""
    job = start(f"sw --spares 1 -- srun {ranks(HEARS_NOTHING)}", "-N2", "--ntasks-per-node=1")
    job.order(job.runs(), grace_s=GRACE_S)
    job.until(lambda status: status.state is SupervisorState.ENDING, "the restart to begin")
    four.slurm("scancel", "--signal=TERM", "--full", job.job_id)
    job.until(lambda status: status.state is SupervisorState.OVER, "its end")
    four.slurm("scancel", job.job_id)
    job.ends()
    assert len(job.lines("rank")) == 1 and "asked to end" in job.text


def test_in_the_last_minute_of_a_job_and_after_scancel_nothing_starts_again(
    start: Callable[..., Job], four: Cluster
) -> None:
    late = start(f"sw -- srun {ranks('exit 7')}", "-N1", "--time=1")
    job = start(f"sw -- srun {ranks(WAITS)}", "-N1")
    job.runs()
    four.slurm("scancel", job.job_id)
    late.ends()
    job.ends()
    assert "before the end of the job's time" in late.text
    assert (len(late.lines("rank")), len(job.lines("rank"))) == (1, 1)


@pytest.mark.thorough
def test_in_the_last_minute_an_order_is_taken_where_the_job_was_given_more_time(
    start: Callable[..., Job], four: Cluster
) -> None:
    job = start(f"sw -- srun {ranks(WAITS)}", "-N1", "--time=1")
    first = job.runs()
    four.slurm("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=60")
    job.order(first)
    assert job.started_again().starts == 2


def test_a_command_that_leaves_by_our_kill_switch_waits_for_the_order(start: Callable[..., Job], four: Cluster) -> None:
    leaves = "while [ ! -e $0 ]; do sleep 0.2; done"
    directory = "/run/slurm-watchdog/jobs/$SLURM_JOB_ID.0"
    job = start(f"sw --spares 1 -- srun bash -c '{SAYS}; {leaves}' {directory}/kill", "-N2", "--ntasks-per-node=1")
    first = job.runs()
    switch = four.node_path(job.batch_host, f"{run_directory(job.job_id, 0)}/kill")
    switch.parent.mkdir()
    switch.write_text(compose_line({"by": "slurm-watchdog", "why": "w", "decision": "d0"}))
    job.until(lambda status: status.state is SupervisorState.WAITING, "the command to leave")
    switch.unlink()  # as the ladder does before its order
    job.order(first, "n1")
    assert job.started_again().nodes == ("n2",)


@pytest.mark.thorough
def test_steps_side_by_side_end_together_and_a_data_step_keeps_its_size(start: Callable[..., Job]) -> None:
    both = f"srun -N1 -n1 {ranks(WAITS)} & srun -N1 -n1 {ranks(HEARS_NOTHING)} & wait"
    job = start(f"train() {{ {both}; }}\nexport -f train\nsw --spares 1 -- train", "-N3", "--ntasks-per-node=1")
    job.runs()
    status = job.until(lambda status: len(job.lines("rank")) == 2, "two steps")
    time.sleep(1.5)
    status = job.status()
    assert status is not None
    job.order(status, "n1")
    assert job.started_again().nodes == ("n2", "n3")
    time.sleep(1)
    assert len(job.lines("rank")) == 4
    assert all("on n1" not in line for line in job.lines("rank")[2:])


def test_a_heterogeneous_job_is_refused_with_a_sentence(start: Callable[..., Job]) -> None:
    job = start("export SLURM_HET_SIZE=2\nsw -- srun hostname", "-N1")
    job.ends()
    assert "The command was not started: this is a heterogeneous job" in job.text
    assert "the script continues: 2" in job.text


@pytest.mark.thorough
def test_a_site_without_a_watchdog_is_watched_alone_on_the_nodes_of_the_start(
    start: Callable[..., Job], four: Cluster
) -> None:
    job = start(
        f"export HOME={four.shared}; sw --alone --spares 1 --no-page -- "
        f"srun {ranks('sleep 1')}", "-N3", "--ntasks-per-node=1",
    )  # fmt: skip
    job.ends(60)
    assert sorted(job.lines("rank")) == [
        "rank 0 of 2 on n1 in n[1-2] start 0",
        "rank 1 of 2 on n2 in n[1-2] start 0",
    ]


@pytest.mark.thorough
def test_a_node_whose_check_fails_is_left_out_of_the_first_start(start: Callable[..., Job]) -> None:
    check = "[ $SLURMD_NODENAME != n1 ] || { echo no cable; exit 3; }"
    job = start(f"sw --spares 1 --preflight '{check}' -- srun {ranks(WAITS)}", "-N2", "--ntasks-per-node=1")
    assert job.runs().nodes == ("n2",)
    assert "slurm-watchdog: n1 is left out: the site's check ended with 3: no cable" in job.text


@pytest.mark.thorough
def test_what_the_script_has_filled_in_is_of_the_nodes_of_the_start(start: Callable[..., Job]) -> None:
    """torchrun's line in a job of two tasks a node: one launcher a node, and a rendezvous that waits for no more."""
    check = "[ $SLURMD_NODENAME != n1 ]"
    launcher = "bash -c 'echo launcher $* on $SLURMD_NODENAME of $SLURM_NTASKS; sleep 1' torchrun"
    job = start(
        f"export MASTER_ADDR=n1.cluster.example; sw --spares 1 --preflight '{check}' -- "
        f"srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 {launcher} --nnodes=$SLURM_NNODES "
        "--rdzv-endpoint=$MASTER_ADDR:29500", "-N4", "--ntasks-per-node=2",
    )  # fmt: skip
    job.ends()
    options = "--nnodes=3 --rdzv-endpoint=n2.cluster.example:29500"
    assert sorted(job.lines("launcher")) == [f"launcher {options} on n{node} of 3" for node in (2, 3, 4)], job.text


@pytest.mark.thorough
def test_a_step_that_its_owner_cancels_is_not_started_again_alone_either_and_spares_may_stand_in_the_comment(
    start: Callable[..., Job], four: Cluster
) -> None:
    job = start(
        f"export HOME={four.shared}; sw --alone --no-page -- srun {ranks(WAITS)}",
        "-N2", "--ntasks-per-node=1", "--comment=a project; watchdog: spares=1",
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    while not job.lines("rank"):
        assert time.monotonic() < end, job.text
        time.sleep(0.1)
    steps = four.slurm("squeue", "--steps", "--noheader", f"--jobs={job.job_id}", "--format=%i").stdout.split()
    four.slurm("scancel", max(step for step in steps if step.rpartition(".")[2].isdecimal()))
    job.ends(60)
    assert len(job.lines("rank")) == 1, job.text
    assert "is not started again: its step was cancelled" in job.text


@pytest.mark.thorough
def test_of_two_side_by_side_neither_is_ended_by_an_order_and_the_one_that_is_left_is(
    start: Callable[..., Job], four: Cluster
) -> None:
    ends = f"until [ -e {four.shared}/$0 ]; do sleep 0.2; done"
    one = f"sw -- srun -N1 -n1 bash -c '{SAYS} $0; {ends}'"
    job = start(f"{one} first & {one} second & wait", "-N2", "--ntasks-per-node=1")
    status = job.until(lambda status: status.beside and len(job.lines("rank")) == 2, "both of them")
    assert (status.step_id, status.nodes) == ("", ())
    for step in ("0", "1", "2", "3"):
        job.order(SupervisorStatus(protocol=1, state=SupervisorState.RUNNING, step_id=step, starts=1), decision=step)
    job.until(lambda status: status.answer is OrderAnswer.REFUSED, "an answer")
    time.sleep(4)
    assert len(job.lines("rank")) == 2, job.text
    (four.shared / "first").touch()
    try:
        left = job.until(lambda status: not status.beside and status.step_id, "the other one to be alone")
        job.order(left, decision="d9")
        assert job.started_again().starts == 2
    finally:
        (four.shared / "second").touch()
        job.ends()
        (four.shared / "first").unlink()
        (four.shared / "second").unlink()


def test_a_restart_that_runs_on_the_node_to_leave_out_has_failed_and_says_why(start: Callable[..., Job]) -> None:
    """A login shell, or a module, puts Slurm's own directory first in PATH."""
    job = start(
        f"export REAL=$(command -v srun)\nsw --spares 1 -- bash -c '$REAL \"$@\"' x {ranks(WAITS)}",
        "-N4", "--ntasks-per-node=1",
    )  # fmt: skip
    first = job.runs()
    assert first.nodes == ("n1", "n2", "n3")
    job.order(first, "n2")
    failed = job.until(lambda status: status.answer is OrderAnswer.FAILED, "an answer")
    assert failed.words.startswith("start 2 runs on n2, too, which it was to leave out"), failed
    assert failed.avoided == () and "n2" in failed.nodes
    job.until(lambda _: failed.words in job.text, "the line, which another process writes")


@pytest.mark.thorough
def test_each_start_reads_the_here_document_of_the_script(start: Callable[..., Job]) -> None:
    job = start(f"sw -- srun bash <<'END'\n{SAYS}\n{WAITS}\nEND", "-N2", "--ntasks-per-node=1")
    first = job.runs()
    time.sleep(0.5)
    assert len(job.lines("rank")) == 2
    job.order(first)
    assert job.started_again().starts == 2
    time.sleep(0.5)
    assert len([line for line in job.lines("rank") if line.endswith("start 1")]) == 2


@pytest.mark.thorough
def test_a_signal_before_the_end_of_the_time_reaches_the_ranks_through_a_trap_of_the_script(
    start: Callable[..., Job], four: Cluster
) -> None:
    """As `#SBATCH --signal=B:USR1@60` sends it, to the script alone. `run` is below a shell here, for it is a function."""
    saves = 'trap "echo saved by $SLURM_PROCID; exit 9" USR1; while :; do sleep 0.2; done'
    job = start(
        f"trap 'kill -USR1 $(pgrep -P $!)' USR1\nsw -- srun bash -c '{SAYS}; {saves}' &\nwait; wait",
        "-N2",
        "--ntasks-per-node=1",
    )
    job.runs()
    time.sleep(0.5)
    four.slurm("scancel", "--signal=USR1", "--batch", job.job_id)
    job.ends()
    assert sorted(job.lines("saved")) == ["saved by 0", "saved by 1"], job.text
    assert len(job.lines("rank")) == 2 and "as a notice that its time is nearly over" in job.text


@pytest.mark.thorough
def test_alone_on_one_node_a_function_is_a_command_and_the_notice_of_the_end_reaches_it(
    start: Callable[..., Job], four: Cluster
) -> None:
    saves = 'trap "echo saved; exit 9" USR1; while :; do sleep 0.2; done'
    job = start(
        f"export HOME={four.shared}\ntrain() {{ srun bash -c '{SAYS}; {saves}'; }}\nexport -f train\n"
        "trap 'kill -USR1 $(pgrep -P $!)' USR1\nsw --alone --no-page -- train &\nwait; wait", "-N1",
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    while not job.lines("rank"):
        assert time.monotonic() < end, job.text
        time.sleep(0.1)
    time.sleep(1)
    four.slurm("scancel", "--signal=USR1", "--batch", job.job_id)
    job.ends(60)
    assert (len(job.lines("rank")), len(job.lines("saved"))) == (1, 1), job.text
    assert "as a notice that its time is nearly over" in job.text


@pytest.mark.thorough
def test_alone_a_lost_node_is_left_out_and_the_job_requeued_where_there_is_no_spare(
    start: Callable[..., Job], four: Cluster
) -> None:
    job = start(
        f"export HOME={four.shared}/alone-$SLURM_RESTART_COUNT; sw --alone --spares 1 --no-page -- srun {ranks(WAITS)}",
        "-N3", "--ntasks-per-node=1", "--requeue", "--open-mode=append",
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    while len(job.lines("rank")) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    four.kill_node("n2")
    end = time.monotonic() + 150
    while "rank 1 of 2 on n3 in n[1,3] start 1" not in job.text:
        assert time.monotonic() < end, job.text[-3000:]
        time.sleep(0.5)
    assert "Slurm has lost n2: it is left out" in job.text
    assert four.job(job.job_id)["JobState"] == "RUNNING"
    four.kill_node("n3")
    end = time.monotonic() + 150
    while four.job(job.job_id)["Restarts"] != "1":
        assert time.monotonic() < end, job.text[-3000:]
        time.sleep(0.5)
    assert "Slurm has lost n2, n3, and the command cannot be started again here (no spare is left" in job.text
