"""An agent without any right and its helper: what it sees, what the helper refuses, and that neither takes
the other with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from slurm_watchdog.model.observations import Role
from tests import helper_process
from tests.helper_process import AGENT_UID, HelperProcess, Place
from tests.integration.reporting_watchdog import ReportingWatchdog
from tests.integration.training_job import ended_action, submit, training
from tests.rig.cluster import Cluster

NOBODY, STRANGER = 64986, 64985
WAIT_S = 120.0

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a helper with capabilities, processes of several users"),
]


@pytest.fixture(scope="module")
def where() -> Iterator[Place]:
    reason = helper_process.why_impossible()
    if reason is not None:
        pytest.skip(reason)
    with helper_process.place() as place:
        yield place


@pytest.fixture(scope="module")
def helper(where: Place) -> Iterator[HelperProcess]:
    with helper_process.helper(where) as helper:
        yield helper


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    return pytest.fail(f"not within {WAIT_S:g} s: {what}")


# What the agent's own user does with the helper: `ask` is one request, `say` prints a line of JSON.
ASKER = """
import json, os, sys, time, types
from typing import Any
from slurm_watchdog.base import clock
from slurm_watchdog.agent.context import OWN_TASKS
from slurm_watchdog.agent.workers.spawner import HelperLink, is_usable
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import Request
from slurm_watchdog.agent.helper.requests import TASKS, Dispatch

assert is_usable(sys.argv[1])
link = HelperLink(sys.argv[1])
probes = WorkerPool(Dispatch(OWN_TASKS, True, print), helper=link, helped=[*TASKS, "sleep", "name_users"])

def raw(task, fields):
    # A request of this name, whether there is such a task or not, with any fields.
    body = {"task": task, "part": Any, "__annotations__": dict.fromkeys(fields, Any)}
    return types.new_class(task, (Request[Any],), {"frozen": True}, lambda space: space.update(body))(**fields)

def ask(key, task, fields, uid=-1, deadline_s=60.0):
    answers, parts = [], []
    number = probes.ask(
        key, raw(task, fields), deadline_s, clock.monotonic(), answers.append, uid, on_part=parts.append
    )
    if number is None:
        return [None, "; ".join(probes.problems())]
    probes.settle(deadline_s + 30, [number])
    return [answers[0].value or parts or None, answers[0].error, answers[0].timed_out]

def say(*what):
    print(json.dumps(what), flush=True)
"""


def asker(helper: HelperProcess, program: str, *words: str) -> subprocess.Popen[str]:
    command = helper.place.command(AGENT_UID, (), "-c", ASKER + textwrap.dedent(program), str(helper.socket), *words)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=dict(helper.place.environment), cwd="/", **pipes)  # type: ignore[call-overload, no-any-return]


def said(helper: HelperProcess, program: str, *words: str) -> list[Any]:
    process = asker(helper, program, *words)
    out, _ = process.communicate(timeout=2 * WAIT_S)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


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


def test_the_helper_does_what_is_in_its_list_and_refuses_all_else(
    helper: HelperProcess, box: Path, somebody: subprocess.Popen[bytes]
) -> None:
    (box / "train.log").write_text("iteration 3/ 9 | lm loss: 2.5\n")
    (box / "roots.log").write_text("iteration 6/ 9 | lm loss: 6.6\n")
    (box / "roots.log").chmod(0o600)
    os.chown(box / "train.log", NOBODY, NOBODY)
    before = helper.said.count("refused:")
    lines = said(
        helper,
        """
        box, pid, nobody = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        switch = {"path": f"{box}/kill", "node": "n1", "by": "slurm-watchdog", "why": "$(id)", "incident": "", "decision": ""}
        say("identify", *ask("identify", "identify", {"processes": [[pid, None]]}))
        say("calls", *ask("look", "read_threads", {"files": [["io", pid, pid], ["call", pid, pid], ["devices", pid, pid]]}))
        follow = {"files": [["1", f"{box}/train.log", 0], ["1", f"{box}/roots.log", 0]]}
        say("follow", *ask("files:a", "follow", follow, nobody))
        say("write", *ask("files:a", "write_kill_switch", switch, nobody))
        say("made", os.path.exists(f"{box}/kill"), os.stat(f"{box}/kill").st_uid)
        say("again", *ask("files:a", "write_kill_switch", switch | {"by": "another"}, nobody))
        say("remove", *ask("files:a", "remove_kill_switch", switch, nobody))
        say("gone", os.path.exists(f"{box}/kill"))
        say("refused", *ask("a", "sleep", {"seconds": 1}))
        say("refused", *ask("b", "name_users", {"uids": [0]}))
        say("refused", *ask("c", "follow", follow))
        say("refused", *ask("d", "identify", {"processes": [[pid, None]]}, nobody))
        say("refused", *ask("e", "write_kill_switch", switch | {"path": f"{box}/.ssh/rc"}, nobody))
        say("refused", *ask("f", "last_kernel_lines", {"path": "/etc/shadow"}))
        say("refused", *ask("g", "follow", follow, 64999))
        say("refused", *ask("h", "follow", follow, 0))
        link.sock.send(b"[1,2,3]")
        say("lives", *ask("identify", "identify", {"processes": [[pid, None]]}))
        """,
        str(box),
        str(somebody.pid),
        str(NOBODY),
    )
    told = {line[0]: line[1:] for line in lines}
    ((_, error, _),) = [told["identify"]]
    assert error is None
    until(lambda: helper.said.count("refused:") >= before + 8, "every refusal in the log")
    io, call, devices = told["calls"][0]
    assert io["io"].startswith("rchar:")
    assert len(call["call"][0].split()) >= 3, "the system call it sleeps in"
    assert devices["devices"][0] >= 3
    mine, roots = told["follow"][0]["files"]
    assert [event["step"] for event in mine["events"] if event.get("step")] == [3]
    assert "EACCES" in roots["error"], "the owner's own rights, no more"
    assert told["write"][1] is None, told
    assert told["made"] == [True, NOBODY]
    assert "not ours" in told["again"][1]
    assert told["remove"][1] is None
    assert told["gone"] == [False]
    for line in lines:
        if line[0] == "refused":
            assert line[1] is None and ("refuses" in line[2] or "ordinary user" in line[2]), line
    assert told["lives"][1] is None
    assert "SECRET" not in json.dumps(lines)
    assert "has no process on this node" in helper.said
    assert not list(box.rglob(".*")), "nothing is left behind"


def test_nobody_but_the_agent_is_served(helper: HelperProcess) -> None:
    os.chmod(helper.socket, 0o666)  # as if the group were too wide: the user is asked for as well
    program = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(60); s.connect(sys.argv[1]);"
        "print(repr(s.recv(100)))"
    )
    command = helper.place.command(STRANGER, (), "-c", program, str(helper.socket))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, env=dict(helper.place.environment), cwd="/"
    )
    assert done.stdout.strip() == "b''", done.stderr
    until(lambda: f"a connection of uid {STRANGER}" in helper.said, "the refusal in the log")
    os.chmod(helper.socket, 0o660)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:  # root is nobody special here
        sock.settimeout(60)
        sock.connect(str(helper.socket))
        assert sock.recv(100) == b""


def test_a_helper_that_is_killed_or_stopped_holds_nobody_up_and_is_found_again(helper: HelperProcess) -> None:
    process = asker(
        helper,
        """
        me = os.getpid()
        say("first", ask("identify", "identify", {"processes": [[me, None]]})[1])
        for line in sys.stdin:
            began = time.monotonic()
            value, error, *timed_out = ask(line.strip() or "identify", "identify", {"processes": [[me, None]]}, deadline_s=1.0)
            say(time.monotonic() - began < 30, value is not None or error is None, error, timed_out, probes.problems(),
                [each.probe for each in probes.hung(clock.monotonic())])
        """,
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(key: str = "") -> list[Any]:
        process.stdin.write(f"{key}\n")
        process.stdin.flush()
        found: list[Any] = json.loads(process.stdout.readline())
        return found

    try:
        assert json.loads(process.stdout.readline()) == ["first", None]
        helper.process.kill()
        helper.process.wait()
        until(lambda: "helper:" in " ".join(ask()[4]), "the loss to be reported as a problem")
        assert ask()[0], "it answers, that there is no helper"
        helper.start_again()
        until(lambda: ask()[1] and not ask()[4], "the new helper serves")

        os.kill(helper.process.pid, signal.SIGSTOP)
        _, _, error, timed_out, _, hung = ask("files:/x")
        assert "was not started within" in error, "no filesystem is blamed for it"
        assert timed_out == [False]
        assert hung == ["start:files:/x"]
        os.kill(helper.process.pid, signal.SIGCONT)
        until(lambda: not ask()[5], "the child that came late is free")
    finally:
        process.stdin.close()
        process.wait(WAIT_S)
    assert process.returncode == 0


# ------------------------------------------------------------------------------------------ on a real Slurm


@pytest.fixture
def powerless(cluster: Cluster) -> Iterator[ReportingWatchdog]:
    with ReportingWatchdog(cluster) as watchdog:
        yield watchdog


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_agents_without_rights_and_their_helpers_see_and_do_all_that_there_is_to_do(
    cluster: Cluster, powerless: ReportingWatchdog
) -> None:
    watchdog = powerless
    agent = watchdog.agents["n1"].pid
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
    assert shown == ranks, (answer, watchdog.log_tail("helper-n1"))
    assert not answer["missing"]

    watchdog.helpers["n1"].kill()
    watchdog.helpers["n1"].wait(30)
    sequence = watchdog.last("n1").sequence
    watchdog.wait_for(
        lambda: watchdog.last("n1").sequence > sequence + 2, 300, "the agent to report without its helper"
    )
    assert any("helper" in problem for problem in watchdog.last("n1").problems)
    watchdog.start_helper("n1")
    watchdog.wait_for(lambda: not watchdog.last("n1").problems, 300, "the helper to be found again")
    assert watchdog.agents["n1"].pid == agent
    assert watchdog.agents["n1"].poll() is None

    asked = watchdog.command("restart", job, "--no-wait", "--reason", "a test", "--json")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    incident = next(i for i in watchdog.incidents(job) if i["kind"] == "operator_restart")
    action = ended_action(watchdog, incident["id"], timeout_s=300)
    assert action["end"]["ok"], (action, watchdog.log_tail("helper-n1"))
    operations = [r["operation"] for r in action["operations"] if r["outcome"] == "done"]
    assert {"write_kill_switch", "remove_kill_switch"} <= set(operations), operations
    assert not list(cluster.node_path("n1", KILL_SWITCH_BASE).glob("*/kill"))
