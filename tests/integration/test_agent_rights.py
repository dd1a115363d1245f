"""An agent with the rights of its unit and no more: what its children see and do as the users whose it is, and what
they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from slurm_watchdog.model.observations import Role
from tests import agent_place
from tests.integration.reporting_watchdog import ReportingWatchdog
from tests.integration.training_job import ended_action, submit, training
from tests.rig.cluster import Cluster
from tests.rig.rights import AGENT_UID, CAPABILITIES, Place

NOBODY = 64986
WAIT_S = 120.0

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: capabilities, processes of several users"),
]


@pytest.fixture(scope="module")
def where() -> Iterator[Place]:
    reason = agent_place.why_impossible()
    if reason is not None:
        pytest.skip(reason)
    with agent_place.place() as place:
        yield place


# What the agent's own user does: `ask` is one request, `say` prints a line of JSON.
ASKER = """
import json, os, sys, time
import msgspec
from slurm_watchdog.base import clock
from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.tasks import TASKS

table = ProcessTable()
table.look(clock.monotonic(), 20)
children = Children(TASKS, is_here=table.is_here)
kinds = {task.request.task: task.request for task in TASKS}

def ask(key, task, fields, uid=-1, deadline_s=60.0):
    answers = []
    request = msgspec.convert(fields, kinds[task])
    number = children.ask(key, request, deadline_s, clock.monotonic(), answers.append, uid)
    if number is None:
        return [None, "not started"]
    children.settle(deadline_s + 30, [number])
    return [msgspec.to_builtins(answers[0].value), answers[0].error]

def say(*what):
    print(json.dumps(what), flush=True)
"""


def said(where: Place, program: str, *words: str) -> list[Any]:
    command = where.command(AGENT_UID, CAPABILITIES, "-c", ASKER + textwrap.dedent(program), *words)
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(where.environment), cwd="/", timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def box(where: Place) -> Iterator[Path]:
    """A directory of nobody's."""
    box = where.directory / f"box-{time.monotonic_ns()}"
    box.mkdir()
    os.chown(box, NOBODY, NOBODY)
    yield box


@pytest.fixture
def somebody() -> Iterator[subprocess.Popen[bytes]]:
    """A process of nobody's: he is on this node."""
    process = subprocess.Popen(
        ["sleep", "600"], user=NOBODY, group=NOBODY, env={"SLURM_JOB_ID": "77", "SECRET": "of nobody's"}
    )
    yield process
    process.kill()
    process.wait()


def test_children_see_and_do_what_is_in_the_table_as_the_user_and_nothing_else(
    where: Place, box: Path, somebody: subprocess.Popen[bytes]
) -> None:
    (box / "train.log").write_text("iteration 3/ 9 | lm loss: 2.5\n")
    (box / "roots.log").write_text("iteration 6/ 9 | lm loss: 6.6\n")
    (box / "roots.log").chmod(0o600)
    os.chown(box / "train.log", NOBODY, NOBODY)
    lines = said(
        where,
        """
        box, pid, nobody = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        switch = {"path": f"{box}/kill", "node": "n1", "by": "slurm-watchdog", "why": "$(id)", "incident": "", "decision": ""}
        say("identify", *ask("look:n", "identify", {"pids": [pid, os.getpid(), 1]}, nobody))
        say("threads", *ask("look:n", "read_threads", {"files": [["io", pid, pid], ["call", pid, pid], ["devices", pid, pid]]}, nobody))
        follow = {"files": [["1", f"{box}/train.log", 0], ["1", f"{box}/roots.log", 0]]}
        say("follow", *ask("files:a", "follow", follow, nobody))
        say("write", *ask("files:a", "write_kill_switch", switch, nobody))
        say("made", os.path.exists(f"{box}/kill"), os.stat(f"{box}/kill").st_uid)
        say("again", *ask("files:a", "write_kill_switch", switch | {"by": "another"}, nobody))
        say("remove", *ask("files:a", "remove_kill_switch", switch, nobody))
        say("gone", os.path.exists(f"{box}/kill"))
        say("refused", *ask("look:n", "follow", follow, nobody))
        say("refused", *ask("files:a", "identify", {"pids": [pid]}, nobody))
        say("refused", *ask("g", "follow", follow, 64999))
        say("refused", *ask("h", "follow", follow, 0))
        say("own", *ask("own", "list_mounts", {}))
        """,
        str(box),
        str(somebody.pid),
        str(NOBODY),
    )
    told = {line[0]: line[1:] for line in lines}
    his, agents, roots_process = told["identify"][0]
    assert his["environ"] == {"SLURM_JOB_ID": "77"} and his["start_ticks"] > 0
    assert all(each["foreign"] and not each["environ"] for each in (agents, roots_process)), "his alone"
    looked, found = told["threads"][0]
    (_, (cpu_ticks, io_bytes, *_)), (_, (*_, devices)) = found
    assert [looked, *(at for at, _ in found)] == [3, 0, 2], "it sleeps in no call that matters"
    assert io_bytes > 0 and cpu_ticks >= 0 and isinstance(devices, list)
    mine, roots = told["follow"][0]["files"]
    assert [event["step"] for event in mine["events"] if event.get("step")] == [3]
    assert "EACCES" in roots["error"], "the owner's own rights, no more"
    assert told["write"][1] is None, told
    assert told["made"] == [True, NOBODY]
    assert "not ours" in told["again"][1]
    assert told["remove"][1] is None
    assert told["gone"] == [False]
    why = [line[2] for line in lines if line[0] == "refused"]
    assert ["is not done in a child" in each for each in why] == [True, True, False, False]
    assert why[2:] == ["not started", "uid 0 is not an ordinary user: nothing is read, written or signalled as it"]
    assert told["own"][1] is None
    assert "SECRET" not in json.dumps(lines)
    assert not list(box.rglob(".*")), "nothing is left behind"


# ------------------------------------------------------------------------------------------ on a real Slurm


@pytest.fixture
def watchdog(cluster: Cluster) -> Iterator[ReportingWatchdog]:
    with ReportingWatchdog(cluster) as watchdog:
        yield watchdog


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_agents_with_the_rights_of_their_unit_see_and_do_all_that_there_is_to_do(
    cluster: Cluster, watchdog: ReportingWatchdog
) -> None:
    job = submit(cluster, nodes=2, sbatch=("--exclude=n3",))
    training(watchdog, job)

    seen = watchdog.both(
        job,
        lambda report, ranks: (
            ranks
            and all(p.rank is not None and p.io_bytes and p.world_size for p in ranks)
            and any(row.job_id == job and row.offset for row in report.logs) == (report.node == "n1")
            and not any(row.error for row in report.logs)
            and not report.problems
        ),
        "each node to see its ranks and logs",
    )
    ranks = {p.rank for report in seen.values() for p in report.processes if p.role is Role.RANK}
    assert ranks == set(range(len(ranks)))

    cluster.freeze()
    try:
        stalled = watchdog.both(
            job,
            lambda report, ranks: any(
                p.blocked
                and p.blocked.state == "D"
                and p.blocked.mount == str(cluster.shared)
                and p.blocked.path
                and p.blocked.wchan
                for p in ranks
            ),
            "each node to tell the rank in D, its mount, file and wait channel",
        )
        assert not [each for each in stalled["n1"].hung_probes if each.probe.startswith("start:")]
    finally:
        cluster.thaw()
    watchdog.both(
        job,
        lambda report, ranks: ranks and not any(p.blocked for p in ranks),
        "a quiet report after the thaw",
    )

    done = watchdog.command("diagnose", job, "--json")
    answer = json.loads(done.stdout)
    shown = {rank for group in answer["groups"] for rank in group["ranks"]}
    assert shown == ranks, (answer, watchdog.log_tail("agent-n1"))
    assert not answer["missing"]

    asked = watchdog.command("restart", job, "--no-wait", "--reason", "a test", "--json")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    incident = next(i for i in watchdog.incidents(job) if i["kind"] == "operator_restart")
    action = ended_action(watchdog, incident["id"], timeout_s=300)
    assert action["end"]["ok"], (action, watchdog.log_tail("agent-n1"))
    operations = [r["operation"] for r in action["operations"] if r["outcome"] == "done"]
    assert {"write_kill_switch", "remove_kill_switch"} <= set(operations), operations
    assert not list(cluster.node_path("n1", KILL_SWITCH_BASE).glob("*/kill"))
