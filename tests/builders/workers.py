"""A pool of workers that do what a test asks: echo, hang, fail, spin."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import WorkerState
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.base import clock
from tests.builders.requests import plain, plain_request


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
    for each in args:
        worker.send_part(each)
        time.sleep(each)
    return "all"


def spin(args: Any, worker: WorkerState) -> None:
    while True:
        pass


def babble(args: Any, worker: WorkerState) -> None:
    while True:
        worker.send_part("x" * 60_000)


FUNCTIONS = {each.__name__: plain(each) for each in (echo, hang, fail, die, large, tell, spin, babble)}


class Asker:
    def __init__(self, max_workers: int = 3) -> None:
        self.probes = WorkerPool(FUNCTIONS, max_workers)
        self.answers: list[Answer] = []
        self.parts: list[Any] = []

    def ask(self, key: str, function: str, args: Any = None, deadline_s: float = 5.0, uid: int = -1) -> int | None:
        return self.probes.ask(
            key,
            plain_request(function, args),
            deadline_s,
            clock.monotonic(),
            self.answers.append,
            uid,
            on_part=self.parts.append,
        )

    def hang(self, key: str, seconds: float = 60.0) -> None:
        """Leaves the worker of `key` hung, once it has begun."""
        if self.probes.is_free(key):
            self.answer(key, "echo")
        request = self.ask(key, "hang", seconds, deadline_s=0.01)
        assert request is not None
        time.sleep(0.02)
        self.probes.poll(clock.monotonic())
        assert self.probes.hung_since(key, clock.monotonic()) is not None

    def answer(self, key: str, function: str, args: Any = None, uid: int = -1) -> Answer:
        request = self.ask(key, function, args, uid=uid)
        assert request is not None
        self.probes.settle(10, [request])
        return self.answers[-1]


def everything_of(uid: int) -> list[tuple[str, int]]:
    """A child of every kind that works for a user, on more mounts than there are places."""
    return [(f"{kind}:/m{n}:{uid}", uid) for n in range(40) for kind in ("files", "probe", "checkpoints", "evidence")]
