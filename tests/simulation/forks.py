"""Crash points by the thousand: what they share is run once, and each of them is a fork of the process at the
point where they part.

A fork is the whole simulation with its controller in the middle of a write. SQLite may not be carried across
a fork: the journal is closed before it, and each fork continues with a copy of the file.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.simulation.crash_points import POINTS, branch_of, crash_point, world_of
from tests.simulation.sim import Simulation, simulation

T = TypeVar("T")


class Parted(KeyboardInterrupt):
    """The process that all are forks of has done its part. Through asyncio goes nothing else at once."""


def by_story(numbers: Sequence[int]) -> list[list[int]]:
    """The crash points of each story."""
    found: dict[int, list[int]] = {}
    for number in numbers:
        found.setdefault(number // POINTS, []).append(number)
    return list(found.values())


def run_story(numbers: Sequence[int], option: str, tell: Callable[[Simulation, int], T]) -> list[T]:
    """What `tell(simulation, number)` says of each of these numbers (crash points, or cycles) of one story,
    after its run.

    Raises RuntimeError if a fork ended without a word; what ended it stands on standard error.
    """
    said: list[bytes] = []
    fork: list[tuple[int, int]] = []
    """In a fork: its number, and the pipe for what it has to say."""

    def part(sim: Simulation) -> None:
        assert sim.life is not None
        sim.let_go()
        gc.collect()
        gc.freeze()
        for number in numbers:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                fork.append((number, write))
                gc.disable()
                asyncio._set_running_loop(sim.life.loop)  # it is kept with the number of the process
                _go_on_with_a_copy(sim, number)
                return branch_of(number, option).take(sim)
            os.close(write)
            with open(read, "rb") as pipe:
                said.append(pipe.read())
            os.waitpid(pid, 0)
        gc.unfreeze()
        raise Parted

    recipe, script = crash_point(numbers[0], option, part)
    with simulation(recipe, script, world_of(option)) as sim:
        try:
            sim.run()
            if not fork:  # nothing was ever written: they are all alike
                return [tell(sim, number) for number in numbers]
            with open(fork[0][1], "wb") as file:
                pickle.dump(tell(sim, fork[0][0]), file)
        except Parted:
            pass
        except BaseException:
            if not fork:
                raise
            traceback.print_exc()
        finally:
            if fork:
                shutil.rmtree(sim.directory, ignore_errors=True)
                sys.stderr.flush()
                os._exit(0)
    if not all(said):
        raise RuntimeError(
            f"crash points {[n for n, s in zip(numbers, said, strict=True) if not s]} ended without a word"
        )
    return [pickle.loads(each) for each in said]


def _go_on_with_a_copy(sim: Simulation, number: int) -> None:
    """The journal's file, for this fork alone."""
    before, sim.directory = sim.directory, Path(f"{sim.directory}-{number}")
    shutil.copytree(before, sim.directory)
    sim.go_on_at(sim.url.replace(str(before), str(sim.directory)))
