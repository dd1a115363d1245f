"""Who ended a step, from what Slurm wrote into the job's log; lines of 22.05.8 and of 26.05's source."""

from __future__ import annotations

import pytest

from slurm_watchdog.supervisor.endings import stopped_by
from slurm_watchdog.supervisor.launcher import Step, parse_steps

CANCELLED = "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-23T13:05:01 ***\n"
SCANCEL = (
    CANCELLED
    + "srun: Job step aborted: Waiting up to 5 seconds for job step to finish.\nsrun: error: n1: task 0: Killed\n"
)
BAD_EXIT = (
    "srun: error: n2: task 1: Exited with exit code 7\nsrun: launch/slurm: _step_signal: Terminating StepId=1.7\n"
    + CANCELLED
    + "srun: error: n1: task 0: Terminated\nsrun: Force Terminated StepId=1.7\n"
)


ABORT = (
    "--------------------------------------------------------------------------\n"
    "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 7.\n" + SCANCEL
)
"""Under --mpi=pmix, which kills the step as scancel does."""


def labelled(tail: str) -> str:
    return "".join(line if line.startswith("srun: ") else f" 0: {line}" for line in tail.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("tail", "who"),
    [
        (ABORT, ""),
        (labelled(ABORT), ""),
        (labelled(CANCELLED), "its step was cancelled"),
        ("[n1:77] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n" + SCANCEL, ""),
        ("Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(comm=0x84000000, 7)\n" + SCANCEL, ""),
        ("In: PMI_Abort(7, application called MPI_Abort(MPI_COMM_WORLD, 7) - process 1)\n" + SCANCEL, ""),
        ("this script handles MPI_ABORT was invoked\n" + SCANCEL, "its step was cancelled"),
        (ABORT.replace(" ***\n", " DUE TO TIME LIMIT ***\n"), "its time was over"),
        ("ORDER 7 CANCELLED AT 12:00\nValueError: x\nsrun: error: n2: task 1: Exited with exit code 1\n", ""),
        ("the log of yesterday: srun: Job step aborted: and so on\n", ""),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-23T13:05:01 ***\n", "its step was cancelled"),
        (SCANCEL, "its step was cancelled"),
        (BAD_EXIT, ""),
        (BAD_EXIT.replace("launch/slurm: _step_signal: ", "").replace("Z ***", "DUE TO TASK FAILURE ***"), ""),
        ("srun: error: n2: task 1: Killed\n", ""),
        (CANCELLED.replace(" ***\n", " DUE TO TIME LIMIT ***\n"), "its time was over"),
        (CANCELLED.replace(" ***\n", " DUE TO PREEMPTION ***\n"), "it was preempted"),
        (SCANCEL + "srun: error: Node failure on n2\n", ""),
        ("srun: forcing job termination\n", "its srun was ended"),
        ("", ""),
        (SCANCEL + "slurm-watchdog: start 2 on n[1-2]\nValueError: x\n", ""),
        (BAD_EXIT + "slurm-watchdog: start 2 on n[1-2]\n" + SCANCEL, "its step was cancelled"),
    ],
)
def test_who_ended_a_step(tail: str, who: str) -> None:
    assert stopped_by(tail) == who


LISTED = """\
StepId=1.batch UserId=60983 StartTime=2026-11-23T13:25:46 TimeLimit=UNLIMITED State=RUNNING Partition=main NodeList=n1 Nodes=1 CPUs=0 Tasks=1 Name=batch Network=(null) TRES=(null) ResvPorts=(null) CPUFreqReq=Default SrunHost:Pid=(null):0
StepId=1.12 UserId=60983 StartTime=2026-11-23T13:25:47 TimeLimit=UNLIMITED State=RUNNING Partition=main NodeList=n[1-3] Nodes=3 CPUs=3 Tasks=3 Name=sleep Network=(null) TRES=cpu=3,mem=0,node=3 ResvPorts=(null) CPUFreqReq=Default Dist=Cyclic SrunHost:Pid=n1:80
StepId=7_2.3 UserId=60983 State=RUNNING Name=StepId=1.99 Tasks=3 SrunHost:Pid=n2:81
"""


def test_steps_are_those_with_a_number_and_the_commands_are_those_of_its_sruns() -> None:
    steps = tuple(parse_steps(LISTED))
    assert steps == (Step("12", "n1", 80, ("n1", "n2", "n3")), Step("3", "n2", 81))
    assert [step.nodes for step in parse_steps(LISTED.replace("n[1-3]", "(null)"))] == [(), ()]
    assert tuple(parse_steps("No job steps in the system\n")) == ()
