"""pyslurm in its process, played by small programs: it hangs, dies, lies, and never starts; and the pauses between
requests that fail."""

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
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.slurm import pyslurm_child
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.commands import Commands
from slurm_watchdog.slurm.pyslurm_client import Gone, PyslurmListings, is_importable
from slurm_watchdog.slurm.request_guard import Backoff, Requests


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def within() -> Any:
        async with timeout(60):
            return await body()

    return asyncio.run(within())


class Listings(PyslurmListings):
    """By pyslurm; the commands' answer is `commands`, or Slurm answers neither."""

    commands: Any = None

    def __init__(self, python: str, environ: dict[str, str], *, alone: bool = True) -> None:
        super().__init__(Commands("", environ), python, environ, alone=alone)

    async def by_commands(self) -> Any:
        if self.commands is None:
            raise SlurmUnavailable("squeue: Unable to contact slurm controller")
        return self.commands


def interpreter(tmp_path: Path, body: str) -> PyslurmListings:
    """Listings by an interpreter that does `body`, whatever it is given."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{body}\n")
    python.chmod(0o755)
    return Listings(str(python), {"PATH": os.environ["PATH"], "T": str(tmp_path)})


def test_a_request_that_hangs_ends_with_its_process_at_the_deadline(tmp_path: Path) -> None:
    listings = interpreter(tmp_path, 'echo $$ > "$T/pid"; exec sleep 600')
    requests = Requests(1.0, lambda call, outcome: None)
    with pytest.raises(SlurmUnavailable, match="no answer within 1 s"):
        run(lambda: requests.carry_out("read_view", listings.view))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exit 3", "exit code 3: it printed nothing"),
        ("echo noise >&2; echo 'fatal: no slurm.conf' >&2; exit 1", "no slurm.conf"),
        ("echo '{\"jobs\": [1,'; kill -9 $$", "exit code -9"),
    ],
)
def test_a_process_that_does_not_answer_is_gone(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(Gone, match=said):
        run(interpreter(tmp_path, body).view)


@pytest.mark.parametrize("body", ["echo surprise", "echo 5", 'echo \'{"jobs": [1], "nodes": []}\'', "true"])
def test_an_answer_that_is_none_is_no_empty_listing(tmp_path: Path, body: str) -> None:
    with pytest.raises(SlurmUnavailable, match="gave no listing"):
        run(interpreter(tmp_path, body).view)


def test_an_interpreter_that_is_not_there_is_said_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(Gone, match=r"cannot be started.*slurm.pyslurm_python"):
        run(Listings(str(tmp_path / "python"), {}).view)


@pytest.mark.skipif(is_importable(), reason="our interpreter has pyslurm")
def test_a_program_without_pyslurm_says_so() -> None:
    with pytest.raises(Gone, match="pyslurm cannot be imported"):
        run(Listings(sys.executable, {}).view)


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
class Job(Thing): pass
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
        f'#!/bin/bash\nshift; exec {sys.executable} -c "import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); del sys.argv[0]; '
        'runpy.run_path(sys.argv[0], run_name=\'__main__\')" "$@"\n'
    )
    python.chmod(0o755)

    def make(*, alone: bool = True, **what: Any) -> PyslurmListings:
        (tmp_path / "world.json").write_text(json.dumps(what))
        environ = {"PATH": os.environ["PATH"], "WORLD": str(tmp_path / "world.json")}
        return Listings(str(python), environ, alone=alone)

    return make


def job_values(**values: Any) -> dict[str, Any]:
    empty = dict.fromkeys(pyslurm_child.JOB.values())
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
    node = dict.fromkeys(pyslurm_child.NODE.values())
    listings = world(
        jobs=[job_values(name="a\nb"), job_values(id=6, array_id=6, array_tasks_waiting="2-4")],
        nodes=[node | {"name": "n1", "state": "IDLE+DRAIN", "reason": "x", "reason_time": 5, "reason_user": "root"}],
    )

    view = run(listings.view)
    assert [(job.job_id, job.name) for job in view.jobs] == [("5", "a\nb"), ("6_[2-4]", "")]
    (read,) = view.nodes
    assert (read.name, read.state, read.reason, read.reason_at) == ("n1", "IDLE+DRAIN", "x", 5.0)


def test_a_text_that_is_no_unicode_hides_no_job(world: Callable[..., PyslurmListings]) -> None:
    values = job_values()
    del values["comment"]

    view = run(world(jobs=[values, job_values(id=6)], nodes=[]).view)
    assert [(job.job_id, job.comment) for job in view.jobs] == [("5", "caf\ufffd"), ("6", "")]


def test_an_attribute_that_is_missing_is_unknown_and_no_empty_answer(
    world: Callable[..., PyslurmListings],
) -> None:
    values = job_values()
    del values["state"]
    with pytest.raises(SlurmUnavailable, match="AttributeError"):
        run(world(jobs=[values], nodes=[]).view)


def test_a_controller_that_is_away_is_unavailable(world: Callable[..., PyslurmListings]) -> None:
    with pytest.raises(SlurmUnavailable, match="Unable to contact"):
        run(world(alone=False, away=True, jobs=[], nodes=[]).view)


def test_a_client_that_never_once_answered_is_not_believed_where_the_commands_answer(
    world: Callable[..., Listings],
) -> None:
    """pyslurm of another release than slurmctld: `Zero Bytes were transmitted or received`, whatever is asked."""
    listings = world(alone=False, away=True, jobs=[], nodes=[])
    listings.commands = "the commands' answer"
    assert run(listings.view) == "the commands' answer"
    assert "is pyslurm built for the release of slurmctld?" in listings.note


def test_one_that_has_answered_is_at_fault_only_after_some_failures() -> None:
    listings = Failing("python", {}, alone=False)
    listings.commands = "the commands' answer"
    assert run(listings.view) == "pyslurm's answer"
    listings.fails = True
    for _ in range(2):
        with pytest.raises(SlurmUnavailable, match="Zero Bytes"):
            run(listings.view)
    assert run(listings.view) == "the commands' answer"
    assert listings.note
    listings.fails = False
    assert run(listings.view) == "pyslurm's answer"
    assert listings.note == ""


class Failing(Listings):
    """Listings that answer or not."""

    fails = False

    async def by_pyslurm(self) -> Any:
        if self.fails:
            raise SlurmUnavailable("pyslurm: Zero Bytes were transmitted or received")
        return "pyslurm's answer"


def test_where_pyslurm_can_not_be_started_the_commands_are_asked(tmp_path: Path) -> None:
    listings = Listings(str(tmp_path / "no-python"), {}, alone=False)
    listings.commands = "the commands' answer"
    assert run(listings.view) == "the commands' answer"


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
