"""The child process of the pyslurm client, played by small programs: it hangs, dies, lies, and never starts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout, wait_for
from slurm_watchdog.slurm import pyslurm_child
from slurm_watchdog.slurm.backoff import Backoff
from slurm_watchdog.slurm.child_process import PyslurmProcess, WorkerGone
from slurm_watchdog.slurm.client import Refusal, SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.pyslurm_client import FallbackListings, PyslurmListings
from slurm_watchdog.slurm.request_guard import Requests

FRAMES = """
import json, os, sys, time
def send(value):
    data = json.dumps(value).encode()
    sys.stdout.buffer.write(b"%d\\n" % len(data) + data); sys.stdout.flush()
def receive():
    return json.loads(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))
"""
ECHO = "send({'pyslurm': '1'})\nwhile True: send({'rows': [os.getpid(), receive()]})\n"


def worker(tmp_path: Path, body: str, **limits: int) -> PyslurmProcess:
    path = tmp_path / "child.py"
    path.write_text(FRAMES + body)
    return PyslurmProcess([sys.executable, "-I", str(path)], {"PATH": os.environ["PATH"]}, **limits)


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def within() -> Any:
        async with timeout(60):
            return await body()

    return asyncio.run(within())


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_requests_are_answered_one_by_one_by_one_process(tmp_path: Path) -> None:
    child = worker(tmp_path, ECHO)

    async def ask() -> list[Any]:
        answers = await asyncio.gather(*(child.ask({"n": n}) for n in range(5)))
        await child.close()
        return answers

    answers = run(ask)
    assert [answer["rows"][1] for answer in answers] == [{"n": n} for n in range(5)]
    (pid,) = {answer["rows"][0] for answer in answers}
    assert not alive(pid)


def test_a_request_that_hangs_ends_with_its_process_at_the_deadline_and_the_next_one_is_answered(
    tmp_path: Path,
) -> None:
    child = worker(
        tmp_path,
        "send({'pyslurm': '1'})\n"
        "receive(); send({'rows': 'well'}); receive()\n"
        "open(sys.argv[0] + '.hung', 'w').write(str(os.getpid())); time.sleep(600)\n",
    )
    requests = Requests(1.0, lambda call, outcome: None)

    async def ask() -> Any:
        assert await child.ask({}) == {"rows": "well"}
        with pytest.raises(SlurmUnavailable, match="no answer within 1 s"):
            await requests.carry_out("read_view", lambda: child.ask({}))
        answer = await Requests(30.0, lambda call, outcome: None).carry_out("read_view", lambda: child.ask({}))
        await child.close()
        return answer

    assert run(ask) == {"rows": "well"}
    assert not alive(int((tmp_path / "child.py.hung").read_text()))


def test_cancelling_a_queued_request_leaves_the_one_before_it_running(tmp_path: Path) -> None:
    child = worker(
        tmp_path,
        "send({'pyslurm': '1'})\nreceive(); time.sleep(2); send({'rows': 'late'})\ntime.sleep(600)\n",
    )

    async def ask() -> Any:
        first = asyncio.ensure_future(child.ask({}))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await wait_for(child.ask({}), 0.2)
        answer = await first
        await child.close()
        return answer

    assert run(ask) == {"rows": "late"}


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit(3)",
        "sys.stderr.write('fatal: no slurm.conf\\n'); sys.exit(1)",
        "send({'failed': 'no module named pyslurm'})",
        "sys.stdout.write('surprise\\n'); sys.stdout.flush(); time.sleep(600)",
        "sys.stdout.write('99999999999\\n'); sys.stdout.flush(); time.sleep(600)",
        "send(5)",
    ],
)
def test_a_process_that_does_not_start_is_gone_and_is_tried_ever_more_rarely(tmp_path: Path, body: str) -> None:
    child = worker(tmp_path, body)

    async def ask() -> list[str]:
        said = []
        for _ in range(3):
            with pytest.raises(WorkerGone) as caught:
                await child.ask({})
            said.append(caught.value.reason)
        return said

    said = run(ask)
    assert "the next try is in" in said[2]
    if "fatal" in body:
        assert "no slurm.conf" in said[0]
    if "named" in body:
        assert "no module named pyslurm" in said[0]


def test_an_interpreter_that_is_not_there_is_said(tmp_path: Path) -> None:
    child = PyslurmProcess([str(tmp_path / "python")], {})
    with pytest.raises(WorkerGone, match="can't be started"):
        run(lambda: child.ask({}))


def test_a_process_that_dies_while_it_is_asked_leaves_the_answer_open_and_is_started_again(
    tmp_path: Path,
) -> None:
    child = worker(
        tmp_path,
        "send({'pyslurm': '1'})\nreceive()\n"
        "if not os.path.exists(sys.argv[0] + '.died'):\n"
        "    open(sys.argv[0] + '.died', 'w'); sys.stderr.write('Killed\\n'); sys.exit(1)\n"
        "send({'rows': 'again'})\ntime.sleep(600)\n",
    )

    async def ask() -> Any:
        with pytest.raises(SlurmUnavailable) as caught:
            await child.ask({})
        assert not isinstance(caught.value, WorkerGone)
        answer = await child.ask({})
        await child.close()
        return answer

    assert run(ask) == {"rows": "again"}


def test_half_an_answer_is_none(tmp_path: Path) -> None:
    child = worker(tmp_path, "send({'pyslurm': '1'})\nreceive(); sys.stdout.write('100\\n{\"rows\": [1,')\n")
    with pytest.raises(SlurmUnavailable, match="ended while it was asked"):
        run(lambda: child.ask({}))


def test_a_process_is_replaced_after_many_requests(tmp_path: Path) -> None:
    child = worker(tmp_path, ECHO, max_requests=3)

    async def ask() -> list[int]:
        pids = [(await child.ask({}))["rows"][0] for _ in range(7)]
        await child.close()
        return pids

    pids = run(ask)
    assert len(set(pids)) == 3
    assert pids[0] == pids[2] != pids[3] == pids[5] != pids[6]


# ------------------------------------------------------------------------------------------------- the child itself

PYSLURM = '''
"""A stand-in for the package: the same names, and what a test says that Slurm has."""
import json, os
__version__ = "22.5.3"
class RPCError(Exception): pass
class Thing:
    def __init__(self, values): self.__dict__.update(values)
    def __getattr__(self, name):
        if name == "comment": b"caf\\xe9".decode("utf-8")
        raise AttributeError(name)
def world(): return json.load(open(os.environ["WORLD"]))
class Job(Thing):
    @staticmethod
    def load(number):
        for values in world()["jobs"]:
            if values["id"] == number: return Job(values)
        raise RPCError("Invalid job id specified")
class Jobs:
    @staticmethod
    def load():
        print("noise of the library")
        if world().get("away"): raise RPCError("Unable to contact slurm controller (connect failure)")
        return {values["id"]: Job(values) for values in world()["jobs"]}
class Nodes:
    @staticmethod
    def load(): return {values["name"]: Thing(values) for values in world()["nodes"]}
'''


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., PyslurmListings]:
    """Listings of a made-up Slurm, asked by the real child with a made-up pyslurm."""
    (tmp_path / "pyslurm.py").write_text(PYSLURM)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nshift; exec {sys.executable} -c "import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); '
        'runpy.run_path(sys.argv[1], run_name=\'__main__\')" "$@"\n'
    )
    python.chmod(0o755)

    def make(**what: Any) -> PyslurmListings:
        (tmp_path / "world.json").write_text(json.dumps(what))
        environ = {"PATH": os.environ["PATH"], "WORLD": str(tmp_path / "world.json")}
        return PyslurmListings(str(python), environ)

    return make


def job_values(**values: Any) -> dict[str, Any]:
    empty = dict.fromkeys((*pyslurm_child.JOB_ATTRIBUTES, *pyslurm_child.JOB_TEXTS))
    given = {
        "id": 5,
        "state": "RUNNING",
        "user_id": 0,
        "requeue_count": 0,
        "is_batch_job": True,
        "is_requeueable": True,
    }
    return {**empty, **given, **values}


def test_the_child_gives_all_jobs_and_nodes_and_what_the_library_prints_is_no_answer(
    world: Callable[..., PyslurmListings],
) -> None:
    node = dict.fromkeys((*pyslurm_child.NODE_ATTRIBUTES, *pyslurm_child.NODE_TEXTS))
    listings = world(
        jobs=[job_values(name="a\nb"), job_values(id=6, array_id=6, array_tasks_waiting="2-4")],
        nodes=[node | {"name": "n1", "state": "IDLE+DRAIN", "reason": "x", "reason_time": 5, "reason_user": "root"}],
    )

    async def ask() -> Any:
        view = await listings.view()
        one, array, none = await listings.job("5"), await listings.job("6_[2-4]"), await listings.job("77")
        node, no_node = await listings.node("n1"), await listings.node("n2")
        await listings.close()
        return view, one, array, none, node, no_node

    view, one, _array, none, node_read, no_node = run(ask)
    assert [(job.job_id, job.name) for job in view.jobs] == [("5", "a\nb"), ("6_[2-4]", "")]
    assert view.jobs[0] == one
    assert none is None
    assert view.nodes == (node_read,)
    assert (node_read.state, node_read.reason, node_read.reason_at) == ("IDLE+DRAIN", "x", 5.0)
    assert no_node is None


def test_a_text_that_is_no_unicode_hides_no_job(world: Callable[..., PyslurmListings]) -> None:
    values = job_values()
    del values["comment"]

    async def ask(listings: PyslurmListings) -> Any:
        view = await listings.view()
        await listings.close()
        return view

    view = run(lambda: ask(world(jobs=[values, job_values(id=6)], nodes=[])))
    assert [(job.job_id, job.comment) for job in view.jobs] == [("5", "caf\ufffd"), ("6", "")]


def test_an_attribute_that_is_missing_is_unknown_and_no_empty_answer(
    world: Callable[..., PyslurmListings],
) -> None:
    values = job_values()
    del values["state"]
    with pytest.raises(SlurmUnavailable, match="AttributeError"):
        run(world(jobs=[values], nodes=[]).view)


def test_a_controller_that_is_away_is_unavailable(world: Callable[..., PyslurmListings]) -> None:
    first = world(away=True, jobs=[], nodes=[])
    with pytest.raises(SlurmUnavailable, match="Unable to contact"):
        run(FallbackListings(first, Away()).view)


def test_a_client_that_never_once_answered_is_not_believed_where_the_commands_answer(
    world: Callable[..., PyslurmListings],
) -> None:
    """pyslurm of another release than slurmctld: `Zero Bytes were transmitted or received`, whatever is asked."""
    listings = FallbackListings(world(away=True, jobs=[], nodes=[]), Fixed())
    assert run(listings.view) == "the commands' answer"
    (note,) = listings.notes()
    assert "is pyslurm built for the release of slurmctld?" in note


def test_one_that_has_answered_is_at_fault_only_after_some_failures() -> None:
    first = Failing()
    listings = FallbackListings(first, Fixed())
    assert run(listings.view) == "pyslurm's answer"
    first.fails = True
    for _ in range(2):
        with pytest.raises(SlurmUnavailable, match="Zero Bytes"):
            run(listings.view)
    assert run(listings.view) == "the commands' answer"
    assert listings.notes()
    first.fails = False
    assert run(listings.view) == "pyslurm's answer"
    assert listings.notes() == ()


def test_an_array_as_a_whole_is_not_one_job(world: Callable[..., PyslurmListings]) -> None:
    jobs = [job_values(id=7, array_id=5, array_task_id=1), job_values(id=5, array_id=5, array_task_id=2)]
    listings = world(jobs=jobs, nodes=[])

    async def ask() -> Any:
        element = await listings.job("5_1")
        with pytest.raises(SlurmRefused, match="does not name one job") as caught:
            await listings.job("5")
        await listings.close()
        return element, caught.value.kind

    element, kind = run(ask)
    assert (element.job_id, element.raw_id) == ("5_1", "7")
    assert kind is Refusal.NOT_ASKED


class Never:
    """Listings that nobody may ask."""

    async def view(self) -> Any:
        raise AssertionError

    job = node = view


class Away(Never):
    """Listings of a Slurm that does not answer."""

    async def view(self) -> Any:
        raise SlurmUnavailable("squeue: Unable to contact slurm controller")


class Failing(Never):
    """Listings that answer or not."""

    fails = False

    async def view(self) -> Any:
        if self.fails:
            raise SlurmUnavailable("pyslurm: Zero Bytes were transmitted or received")
        return "pyslurm's answer"


class Fixed(Never):
    """Listings that always say the same."""

    async def view(self) -> Any:
        return "the commands' answer"


def test_where_pyslurm_can_not_be_started_the_commands_are_asked(tmp_path: Path) -> None:
    gone = PyslurmListings(str(tmp_path / "no-python"), {})
    assert run(FallbackListings(gone, Fixed()).view) == "the commands' answer"


# ------------------------------------------------------------------------------------------------- pauses


def test_pauses_grow_up_to_the_longest_and_end_with_the_first_success() -> None:
    backoff = Backoff(first_s=2.0, most_s=10.0)
    waits = []
    for _ in range(6):
        backoff.failed(100.0)
        waits.append(backoff.wait_s(100.0))
    assert waits == [0.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.wait_s(109.0) == 1.0
    assert backoff.wait_s(120.0) == 0.0
    backoff.succeeded()
    assert backoff.wait_s(100.0) == 0.0


def test_requests_to_a_slurm_that_does_not_answer_pause_until_it_answers_anything() -> None:
    now = [1000.0]
    asked, outcomes = [], []
    requests = Requests(5.0, lambda call, outcome: outcomes.append(outcome))

    async def fails() -> None:
        asked.append(now[0])
        raise SlurmUnavailable("away")

    async def works() -> str:
        return "here"

    async def story() -> None:
        for _ in range(10):
            with pytest.raises(SlurmUnavailable, match="away"):
                await requests.carry_out_repeated("read_view", fails)
            now[0] += 1.0
        assert asked == [1000.0, 1001.0, 1003.0, 1007.0]
        assert outcomes == ["unavailable"] * 4
        assert await requests.carry_out("read_job", works) == "here"
        assert await requests.carry_out_repeated("read_view", works) == "here"

    with clock.simulated(lambda: now[0], lambda: now[0]):
        asyncio.run(story())
