"""A pool of workers that do what a test asks: echo, hang, fail, spin."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from slurm_watchdog.agent.children.become_user import Kind
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import WorkerState
from slurm_watchdog.base import clock
from tests.builders.requests import plain, plain_request

SUFFIXES = ((Kind.OWN, ""), (Kind.FILES, "_files"), (Kind.PROCESSES, "_processes"))


@dataclass
class Count:
    asked: int = 0


def echo(args: Any, worker: WorkerState) -> Any:
    count = worker.memory(Count)
    count.asked += 1
    return [args, count.asked, os.getpid(), os.getuid()]


def hang(args: Any, worker: WorkerState) -> None:
    time.sleep(args)


def fail(args: Any, worker: WorkerState) -> None:
    raise OSError(13, "Permission denied", "/x")


def die(args: Any, worker: WorkerState) -> None:
    os._exit(1)


def large(args: Any, worker: WorkerState) -> str:
    return "x" * args


def tell(args: Any, worker: WorkerState) -> str:
    for each in worker.each(args):
        time.sleep(each)
    return "all"


def spin(args: Any, worker: WorkerState) -> None:
    while True:
        pass


def leave(args: Any, worker: WorkerState) -> int:
    """As a dump of stacks does with a program that does not end."""
    child = subprocess.Popen(["sleep", str(args)])
    worker.left.append(child.pid)
    return child.pid


FUNCTIONS = (echo, hang, fail, die, large, tell, spin, leave)
TASKS = tuple(plain(each, kind, f"{each.__name__}{suffix}") for each in FUNCTIONS for kind, suffix in SUFFIXES)


class Asker:
    def __init__(self, max_workers: int = 3) -> None:
        self.children = Children(TASKS, max_workers)
        self.answers: list[Answer] = []

    def ask(self, key: str, function: str, args: Any = None, deadline_s: float = 5.0, uid: int = -1) -> int | None:
        """As a user: in a child for his files where the key says so, else for his processes."""
        suffix = "" if uid < 0 else "_files" if key.startswith(("files", "probe")) else "_processes"
        request = plain_request(f"{function}{suffix}", args)
        return self.children.ask(key, request, deadline_s, clock.monotonic(), self.answers.append, uid)

    def hang(self, key: str, seconds: float = 60.0) -> None:
        """Leaves the worker of `key` hung, once it has begun."""
        if self.children.is_free(key):
            self.answer(key, "echo")
        request = self.ask(key, "hang", seconds, deadline_s=0.01)
        assert request is not None
        time.sleep(0.02)
        self.children.poll(clock.monotonic())
        assert self.children.hung_since(key, clock.monotonic()) is not None

    def answer(self, key: str, function: str, args: Any = None, uid: int = -1) -> Answer:
        request = self.ask(key, function, args, uid=uid)
        assert request is not None
        self.children.settle(10, [request])
        return self.answers[-1]


def everything_of(uid: int) -> list[tuple[str, int]]:
    """A child of every kind that works for a user, on more mounts than there are places."""
    return [(f"{kind}:/m{n}:{uid}", uid) for n in range(40) for kind in ("files", "probe", "look", "stacks")]
