"""The back end of a supervisor in a job of Slurm's: it starts the command on nodes of the allocation, looks at these
before, and ends what it has started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from slurm_watchdog.knowledge.trainer_options import directories_in
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE, parse_line
from slurm_watchdog.model.supervisor import run_directory
from slurm_watchdog.slurm.node_names import ParseError, expand_nodes
from slurm_watchdog.supervisor import placement as placing
from slurm_watchdog.supervisor.endings import TAIL_BYTES
from slurm_watchdog.supervisor.given_input import GivenInput
from slurm_watchdog.supervisor.job_questions import JobQuestions
from slurm_watchdog.supervisor.look import side_by_side
from slurm_watchdog.supervisor.parent import ENDING_SIGNALS, SharedPid
from slurm_watchdog.supervisor.placement import Allocation
from slurm_watchdog.supervisor.preflight import LOOK_MARK, look_s, parse_look, suspects
from slurm_watchdog.supervisor.srun import CALLS, NAME, PLAN, Plan, own_program, program

FILE_S = 2.0  # For a file on someone's filesystem.
NAMES_S = 2.0  # A resolver that hangs holds up a start by no more.

Streams = tuple[int, int | None, int | None, Callable[[], None] | None]


def addresses(
    node: str, *, here: bool, resolve: Callable[..., Iterable[Any]] = socket.getaddrinfo, deadline_s: float = NAMES_S
) -> frozenset[str]:
    """IP addresses by which others reach a node; `here`: those of all networks of this host. Waits `deadline_s` seconds
    at most: a name that is not resolved by then has none."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(str(answer[4][0]) for answer in resolve(node, None, type=socket.SOCK_STREAM))

    side_by_side([(node, ask)], deadline_s)
    if here:
        networks = [each for network in psutil.net_if_addrs().values() for each in network]
        found += [each.address for each in networks if each.family in (socket.AF_INET, socket.AF_INET6)]
    known = [ip_address(text.partition("%")[0]) for text in found]
    return frozenset(str(each) for each in known if not each.is_loopback and not each.is_link_local)


_STEP = re.compile(r"^StepId=\S+?\.(\d{1,10})\s(.*)\bSrunHost:Pid=([^\s:]+):(\d{1,10})", re.MULTILINE)
_NODES = re.compile(r"\bNodeList=(\S+)")  # Before the name of the step, which may be anything.


class Step(NamedTuple):
    """A step, and the srun that started it."""

    number: str
    host: str  # Without its domain.
    pid: int
    nodes: tuple[str, ...] = ()  # Where it runs; nothing where Slurm does not say.


def parse_steps(text: str) -> Iterator[Step]:
    """The numbered steps; those of the batch script and of Slurm itself are left out."""
    for number, facts, host, pid in _STEP.findall(text):
        listed, nodes = _NODES.search(facts), tuple[str, ...]()
        with contextlib.suppress(ParseError):
            nodes = expand_nodes(listed[1]) if listed is not None else ()
        yield Step(number, host.partition(".")[0], int(pid), nodes)


_OF_JOB = "CONF|CLUSTER|JWT|JOBID|JOB_ID|JOB_PARTITION|RESTART_COUNT|GPUS_ON_NODE|ARRAY_|SUBMIT_|WATCHDOG"
OPTION_OF_SRUN = re.compile(rf"(?!SLURM_({_OF_JOB}))(SLURMD?|SRUN)_")
"""Begins a variable of which srun takes an option (srun(1), INPUT ENVIRONMENT VARIABLES; later releases add to them),
and none that leads to the job's allocation."""
SHELL = ("/bin/sh", "-c", 'exec "$@"', "slurm-watchdog run")
"""A program on a filesystem that hangs holds up this shell, and not us."""
RESUME_FROM = "SLURM_WATCHDOG_RESUME_FROM"  # Names to the command the last checkpoint from before a bad loss.


ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Launcher:
    """One command of a job, for as long as `run` runs."""

    def __init__(
        self, command: Sequence[str], allocation: Allocation, environ: Mapping[str, str], *, check: str = "",
        checkpoints: Sequence[str] = (), has_steps: bool = True,
    ):  # fmt: skip
        """`check`: the site's command that is run on each node before a start. `checkpoints`: directories besides
        those that the command's words name. Without an srun in PATH, or `has_steps`, the command is started as it is,
        and no node is looked at. Raises OSError if there is no place for our srun."""
        directory = run_directory(allocation.job_id, allocation.restarts)
        self._switch = environ.get("SLURM_WATCHDOG_KILL_SWITCH") or f"{directory}/kill"
        self.has_steps = has_steps
        self._command, self._allocation, self._environ = tuple(command), allocation, dict(environ)
        self._first: frozenset[str] | None = None  # IP addresses of its first node; None: not asked.
        self.ask = JobQuestions(allocation.job_id, environ)
        self.helpers = self.ask.helpers
        self._srun = shutil.which("srun", path=environ.get("PATH")) if has_steps else None
        self._directory = _make_shim(environ) if self._srun is not None else None
        here = os.getcwd()
        places = (here, *checkpoints, *directories_in(self._command, here))
        self._question = json.dumps({"mark": LOOK_MARK, "directories": list(dict.fromkeys(places)), "command": check})
        self.steps: tuple[str, ...] = ()  # Of the present start, oldest first.
        self.step_nodes: frozenset[str] = frozenset()  # Of those steps, as far as Slurm says.
        self._resolved: set[int] = set()
        self.pid: int | None = None  # Of the present start; None: none was begun.
        self.has_finished = False  # It has ended well, by itself, which is perhaps not handled yet.
        self.running = SharedPid()  # The same for whoever waits for it if we die; 0: it does not run.
        self.input = GivenInput()

    def close(self) -> None:
        """Takes our srun away."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # ------------------------------------------------------------------------------------ start

    def command_line(self, placement: placing.Placement) -> tuple[str, ...]:
        """What is executed on these nodes."""
        words = placing.arguments(self._command, self._allocation, placement, self._first or ())
        # A function of the script's is in a variable that a plain sh does not pass on.
        return (*SHELL, *words) if self.has_steps and words[0] != "bash" else words

    async def environment(self, placement: placing.Placement, starts: int) -> dict[str, str]:
        """The command's, and the plan of its srun; `starts`: how often it was started before."""
        nodes = self._allocation.nodes
        if self._first is None and placement.nodes[0] != nodes[0]:
            self._first = await asyncio.to_thread(addresses, nodes[0], here=self._allocation.batch_host == nodes[0])
        changed = placing.environment(self._allocation, placement, self._environ, self._first or ())
        changed["SLURM_WATCHDOG_RESTARTS"] = str(starts)
        if self._directory is None or self._srun is None:
            return self._environ | changed
        listed = await self._list_steps() if starts else ()
        # A step of an earlier start may still be there, also where Slurm does not say.
        overlap = listed is None or any(step.number in self.steps for step in listed)
        plan = Plan(
            job_id=self._allocation.job_id, srun=self._srun, directory=str(self._directory),
            nodes=placement.nodes, left_out=placement.left_out,
            tasks=placing.task_count(self._allocation, placement.nodes),
            all_tasks=placing.task_count(self._allocation, self._allocation.nodes), overlap=overlap,
            all_gpus=placing.gpu_count(self._allocation, self._allocation.nodes),
        )  # fmt: skip
        for call in (self._directory / CALLS).iterdir():
            call.unlink(missing_ok=True)
        temporary = self._directory / f"{PLAN}.new"
        temporary.write_text(json.dumps(plan._asdict()))
        temporary.replace(self._directory / PLAN)
        path = f"{self._directory}{os.pathsep}{self._environ.get('PATH', os.defpath)}"
        return self._environ | changed | {"PATH": path}

    async def start(
        self, placement: placing.Placement, starts: int, resume_from: str, *, ordered: bool = False
    ) -> asyncio.subprocess.Process:
        """Starts the command with our own output, and the input that we were given; `resume_from`: see RESUME_FROM.
        An `ordered` start is no longer told to leave. Raises OSError."""
        if ordered and await self.is_switched():
            await self.ask.run("rm", "-f", "--", self._switch, deadline_s=FILE_S)
        environ = await self.environment(placement, starts)
        environ |= {RESUME_FROM: resume_from} if resume_from else {}
        with self.streams(starts) as (given, lines, errors, before):
            process = await self.ask.spawn(
                *self.command_line(placement), helps=False, stdin=given, stdout=lines, stderr=errors, env=environ,
                preexec_fn=before,
            )  # fmt: skip
        self.pid = self.running.value = process.pid
        self.has_finished = False
        self.steps, self.step_nodes, self._resolved = (), frozenset(), set()
        return process

    @contextlib.contextmanager
    def streams(self, starts: int) -> Iterator[Streams]:
        """What a start has for its input, output and error, and what its process does before it is executed."""
        yield self.input.of_start(starts), None, None, None

    def begun_ticks(self) -> int:
        """When that process began, in clock ticks since boot; 0: not known."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            return int(stat.rpartition(")")[2].split()[19])  # proc(5): starttime, behind a name that may hold spaces
        except (OSError, ValueError, IndexError):
            return 0

    # ------------------------------------------------------------------------------------ end

    def ended(self, process: asyncio.subprocess.Process, *, expected: bool) -> None:
        """This start has ended; `expected`: by us, or by a person."""
        if self.running.value == process.pid:
            self.running.value = 0

    async def is_switched(self) -> bool:
        """Whether the kill switch is there, and ours: the command was told to end, and an order follows. The agent's
        own file is read at once, on a machine under load, too: a command that has left by it would be taken for one
        that has ended well. Elsewhere it may lie on any filesystem."""
        if self._switch.startswith(f"{KILL_SWITCH_BASE}/"):
            return is_our_switch(self._switch)
        answer = await self.ask.run("head", "-c", "4096", "--", self._switch, deadline_s=FILE_S)
        return answer.code == 0 and parse_line(answer.output) is not None

    async def tail(self) -> str:
        """The end of the log in which srun says who ended a step, where our standard error is a file."""
        path = os.readlink("/proc/self/fd/2") if stat.S_ISREG(os.fstat(2).st_mode) else ""
        return (await self.ask.run("tail", "-c", str(TAIL_BYTES), "--", path, deadline_s=FILE_S)).output if path else ""

    # ------------------------------------------------------------------------------------ steps

    def waiting_calls(self) -> frozenset[int]:
        """Processes that our srun has become, and of which no step is known yet."""
        if self._directory is None:
            return frozenset()
        with contextlib.suppress(OSError):
            calls = {int(name) for name in os.listdir(self._directory / CALLS) if name.isdecimal()}
            return frozenset(pid for pid in calls - self._resolved if os.path.exists(f"/proc/{pid}"))
        return frozenset()

    async def find_steps(self) -> tuple[str, ...] | None:
        """Asks Slurm for the steps of the present start: all that it has had. None: Slurm does not answer."""
        listed = await self._list_steps()
        if listed is None:
            return None
        pids, here = {*self.waiting_calls(), *(each.pid for each in self.processes())}, socket.gethostname()
        if mine := [each for each in listed if each.pid in pids and each.host == here.partition(".")[0]]:
            self._resolved |= {step.pid for step in mine}
            self.steps = tuple(sorted({*self.steps, *(step.number for step in mine)}, key=int))
            self.step_nodes = self.step_nodes.union(*(step.nodes for step in mine))
        return self.steps

    async def _list_steps(self) -> tuple[Step, ...] | None:
        answer = await self.ask.run("scontrol", "--oneliner", "show", "step", self._allocation.job_id)
        # With no step at all scontrol ends with 1, or says so, by release.
        return None if answer.code is None else tuple(parse_steps(answer.output))

    async def signal_steps(self, name: str, steps: Sequence[str]) -> None:
        """Sends a signal to all tasks of these steps; one that is over is none of our business."""
        if steps:
            targets = [f"{self._allocation.job_id}.{step}" for step in steps]
            await self.ask.run("scancel", f"--signal={name}", *targets)

    # ------------------------------------------------------------------------------------ processes

    def processes(self) -> list[psutil.Process]:
        """All living processes of the command on this host: those below this one, which is their subreaper, without
        `helpers` and what these have started; a parent is before its children. Reads all of /proc."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            parents = {os.getpid()}
            # A child is listed behind its parent.
            for each in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if each.pid not in self.helpers and each.ppid() in parents and each.status() not in ENDED:
                        found[each.pid] = each
                        parents.add(each.pid)
        return list(found.values())

    def signal_tree(self, name: str) -> None:
        """Sends a signal to all of them. A stopped process gets none before SIGCONT."""
        send(self.processes(), signal.Signals[f"SIG{name}"], signal.SIGCONT)

    async def forward(self, number: int, steps: Sequence[str]) -> None:
        """Hands a signal on: one that ends to all processes, another as `receivers` says."""
        everyone = self.processes()
        if number in ENDING_SIGNALS:
            send(everyone, number, signal.SIGCONT)
        else:
            send(receivers(everyone, self.pid, number), number)

    def reap(self) -> None:
        """Takes the end of one orphan that fell to us, if no child that is waited for has ended."""
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and not self.ask.starting and ended.si_pid not in {*self.helpers, self.pid}:
                os.waitpid(ended.si_pid, os.WNOHANG)

    # ------------------------------------------------------------------------------------ look

    async def lost(self, nodes: Sequence[str]) -> frozenset[str]:
        """Those that Slurm has taken out of the job, as one that is down leaves it under --no-kill."""
        present = await self.ask.nodes() if self._srun is not None else frozenset[str]()
        return frozenset(node for node in nodes if present and node not in present)

    async def look(self, nodes: Sequence[str], spares: int) -> tuple[dict[str, str], frozenset[str]]:
        """(node to what is wrong there; nodes that are `lost`). Nothing where no one answers. `spares`: nodes that the
        start does without. Takes a little more than look_s() at most."""
        if self._srun is None:
            return {}, frozenset()
        gone = await self.lost(nodes)
        here = [node for node in nodes if node not in gone]
        left_out = [node for node in self._allocation.nodes if node not in here]
        # Both numbers are given: a range of nodes without a number of tasks ends the slurmctld of 22.05.
        argv = [
            self._srun, "--overlap", "--no-kill", f"--nodes={len(here)}", f"--ntasks={len(here)}",
            "--job-name=slurm-watchdog-look", "--quiet", "--input=none", "--kill-on-bad-exit=0", "--wait=0",
            *([f"--exclude={','.join(left_out)}"] if left_out else ()),
            *own_program("look"), self._question,
        ]  # fmt: skip
        answer = await self.ask.run(*argv, deadline_s=look_s(len(here)), environ=look_environment(self._environ))
        looks = [look for line in answer.output.splitlines() if (look := parse_look(line)) is not None]
        return suspects(here, looks, spares=max(0, spares - len(gone))), gone


def look_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What our own step gets: no number of GPUs, label, or file for the output of the command's steps."""
    return {name: value for name, value in environ.items() if not OPTION_OF_SRUN.match(name)}


def send(processes: Iterable[psutil.Process], *numbers: int) -> None:
    """Sends signals to each of these; one that is gone gets none."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for number in numbers:
                process.send_signal(number)


def receivers(everyone: Sequence[psutil.Process], main: int | None, number: int) -> list[psutil.Process]:
    """Who gets a signal that does not ask for the end: process `main` of the command where it takes it (mpirun, a
    script with a trap), else the sruns, which hand it to their tasks, else what `main` has started and takes it, where
    `main` does not ignore it; else `main`."""
    own = [each for each in everyone if each.pid == main]
    if own and takes(own[0].pid, number):
        return own
    sruns, below = [], []
    for each in everyone:
        with contextlib.suppress(psutil.Error):
            sruns += [each] if each.name() == NAME else []
            below += [each] if each.ppid() == main and takes(each.pid, number) else []
    ignores = any(takes(each.pid, number, "Ign") for each in own)
    return sruns or ([] if ignores else below) or own


def takes(pid: int, number: int, how: str = "Cgt|Blk") -> bool:
    """Whether a process has a handler for a signal, or blocks it, as who waits for it by sigwait or signalfd; or what
    else `how` says (proc(5): SigCgt, SigBlk, SigIgn)."""
    try:
        masks = re.findall(rf"^Sig(?:{how}):\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def is_our_switch(path: str) -> bool:
    """Whether a kill switch of ours lies there, in memory."""
    try:
        return parse_line(Path(path).read_text(errors="replace")) is not None
    except OSError:
        return False


def _make_shim(environ: Mapping[str, str]) -> Path:
    """A directory of our own with our srun in it, where programs may be executed. Raises OSError."""
    # The first is memory, which always answers.
    home = os.path.join(environ.get("HOME", "/"), ".cache")
    for candidate in ("/dev/shm", "/tmp", environ.get("TMPDIR", ""), environ.get("XDG_RUNTIME_DIR", ""), home):
        with contextlib.suppress(OSError):
            directory = Path(tempfile.mkdtemp(prefix="slurm-watchdog-run-", dir=candidate or "/nonexistent"))
            (directory / CALLS).mkdir()
            shim = directory / NAME
            shim.write_text(program())
            shim.chmod(0o700)
            if os.access(shim, os.X_OK):  # no: mounted with noexec
                return directory
            shutil.rmtree(directory, ignore_errors=True)
    raise OSError("no directory was found in which programs may be executed: set TMPDIR")
