"""The `srun` that stands first in the command's PATH: it puts srun's options onto the nodes of the present start, and
becomes the real one. The standard library alone, for it runs at every call."""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
from pathlib import Path

from slurm_watchdog.supervisor.plan import Plan, file_named, from_text, hosts_in, moved
from slurm_watchdog.supervisor.srun_options import Hosts, parse, rewrite

PLAN, CALLS, LOCK, NAME = "plan", "calls", "lock", "srun"
"""In the shim's directory: the plan of the present start; a file for each call, called as its process; what calls
hold while they choose their nodes; the shim."""


def shim_text() -> str:
    """The program `srun`: this module."""
    return f'#!/bin/sh\nexec {shlex.join(own_program("shim"))} "${{0%/*}}" "$@"\n'


def own_program(module: str) -> tuple[str, ...]:
    """What runs the `main` of a module beside this one, by an interpreter that ignores its environment and finds what
    this one has found."""
    paths = dict.fromkeys([str(Path(__file__).parents[2]), *(each for each in sys.path if each.startswith("/"))])
    program = (
        f"import sys; sys.path[:0] = {list(paths)!r}; from slurm_watchdog.supervisor.{module} import main; "
        "main(*sys.argv[1:])"
    )
    return sys.executable, "-I", "-c", program


def main(directory: str, *given: str) -> None:
    """Becomes the real srun. `directory`: the shim's; `given`: srun's arguments."""
    arguments = list(given)
    try:
        plan = from_text((Path(directory) / PLAN).read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(f"slurm-watchdog: {directory}/{PLAN} cannot be read ({error}): take {directory} out of PATH")
    if os.environ.get("SLURM_JOB_ID", plan.job_id) == plan.job_id:
        try:
            arguments = _rewritten(arguments, plan, Path(directory) / CALLS)
        except OSError as error:
            sys.stderr.write(f"slurm-watchdog: srun is called as it is written: {error}\n")
    path = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if each != plan.directory]
    os.environ["PATH"] = os.pathsep.join(path)
    os.execv(plan.srun, ["srun", *arguments])  # noqa: S606 - what it was called for


def _rewritten(arguments: list[str], plan: Plan, calls: Path) -> list[str]:
    """Leaves a file for this call, with its nodes in it."""
    given = {each.name: each.value for each in parse(arguments)[0]}
    hosts = _hosts(given, plan, calls.parent)
    with (calls.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two calls side by side take different nodes
        rewritten = rewrite(arguments, plan, _busy(calls), os.environ, hosts)
        (calls / str(os.getpid())).write_text(",".join(rewritten.nodes))
    if hosts is not None and not rewritten.unmet and not given.keys() & {"nodefile", "nodelist"}:
        os.environ["SLURM_HOSTFILE"] = hosts.path
    if rewritten.unmet:
        sys.stderr.write(f"slurm-watchdog: srun is called as it is written, for {rewritten.unmet}\n")
    return list(rewritten.arguments)


def _hosts(given: dict[str, str | None], plan: Plan, directory: Path) -> Hosts | None:
    """The file of nodes of this call, for the nodes of the start; None where it has none, or it cannot be read."""
    name = file_named(given, os.environ) if plan.left_out else ""
    try:
        before = hosts_in(Path(name).read_text()) if name else None
    except (OSError, ValueError):
        return None
    if before is None:
        return None
    after, path = moved(before, plan), directory / f"hosts.{os.getpid()}"
    path.write_text("".join(f"{host}\n" for host in after))
    return Hosts(str(path), len(before), tuple(after))


def _busy(calls: Path) -> set[str]:
    """Nodes of calls that still run."""
    return {node for call in calls.iterdir() if Path(f"/proc/{call.name}").exists()
            for node in call.read_text().split(",")}  # fmt: skip
