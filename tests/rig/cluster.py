#!/usr/bin/env python3
"""A real Slurm cluster on one machine, for the demo and for the integration tests.

    with Cluster(nodes=3) as cluster:
        job = cluster.sbatch("#!/bin/sh\\nsrun -N3 hostname\\n", "-N3")
        cluster.wait_for_job_state(job, "COMPLETED")

What is real: munged, slurmctld, one slurmd a node, and the faults. Every node has its own network, mount, UTS and
PID namespace, so it has its own /proc, host name, mounts, /run and link. A link can be cut, a node can die at once, and
a filesystem can stop answering so that its writers stand in state D, on all nodes or on one.

Everything lies below ONE directory, /tmp/slurm-watchdog-demo.INDEX. Its owner holds a lock (flock) on it for as long as
it lives, and a name of its network namespace for the index: see "who owns what".

    owner.json, alive     process id of the owner, for people; a file that everything it started holds locked
    slurm.conf, hosts     configuration; hosts is what the nodes see as /etc/hosts
    munge/ state/ log/    munge's key and socket, slurmctld's state, all log files
    nodes/nX/             slurmd's spool directory
    images/*.ext4         the filesystems below, each on a loop device
    shared/               the "parallel filesystem": same path on the host and on every node; freeze(), thaw()
    scratch/              on each node that node's own filesystem; freeze(node=...), thaw(node=...)
    local/nX/             where the host sees the scratch/ of node nX

Outside of it there are, named after the index: a bridge `swdINDEX` with 10.77.INDEX.1, a veth `swdINDEXnX`
and a network
namespace `swdINDEX-nX` a node (10.77.INDEX.(10+X)), and loop devices. All of it goes on leaving the `with` block, also
by an exception, Ctrl-C or SIGTERM, and also while something is frozen. After a `kill -9` of the owner,
`sweep()` removes
it: it runs before every new cluster, and manually as `python -m tests.rig.cluster clean`.

It needs root, Linux namespaces and loop devices, and the packages in PACKAGES. Standard library only.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fnmatch
import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from tests.rig import accounting as accounting_database
from tests.rig.cluster_claim import PREFIX, Claim, claim_directory, remove, sweep
from tests.rig.cluster_layout import Layout, make_network, write_configuration
from tests.rig.commands import ClusterError, as_user, run_command, search_path, tail, wait_until
from tests.rig.debian_packages import ensure_packages, why_impossible
from tests.rig.filesystems import empty, make_filesystem, set_frozen
from tests.rig.node_process import NodeProcess
from tests.rig.patience import Patience
from tests.rig.process_facts import children, signals_held, start_time_ticks
from tests.rig.rights import AGENT_UID, USER, USER_UID, Place, bind_parts, ensure_user, furnish

# --- leftovers --------------------------------------------------------------------------------------------------------


# --- processes on a node ----------------------------------------------------------------------------------------------


# --- the cluster ------------------------------------------------------------------------------------------------------


class Cluster:
    """A running Slurm cluster; see the top of this file. Not to be shared between threads while starting or stopping.

    nodes: how many; they are named n1, n2, ...     cpus, gpus: what each one declares to have (gpus: at most 8)
    prefix: of the directory below /tmp             options: further or other settings of slurm.conf
    say: called with a line on what is being done   shared_mb: size of the shared filesystem (a sparse file)
    shipped_times: Slurm's own times, not those of the rig, which are short
    accounting: with a database, which tests/rig/accounting.py starts
    """

    def __init__(
        self,
        nodes: int = 3,
        prefix: str = PREFIX,
        *,
        cpus: int = 4,
        gpus: int = 0,
        options: Mapping[str, str] | None = None,
        shared_mb: int = 512,
        shipped_times: bool = False,
        accounting: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._prefix, self._cpus, self._gpus, self._options = prefix, cpus, gpus, dict(options or {})
        self._shared_mb, self._shipped_times, self._accounting, self._say = shared_mb, shipped_times, accounting, say
        self._place: Place | None = None
        self._processes: dict[str, subprocess.Popen] = {}  # "munged", "slurmctld", and each node's namespaces
        self._inits: dict[str, int] = {}  # node -> its PID 1 as the host numbers it
        self._layout: Layout | None = None
        self._claim: Claim | None = None
        self._dying: list[subprocess.Popen] = []  # killed nodes of which something waits for a frozen filesystem
        self._old_sigterm: Any = None  # the handler to put back; None: we set none

    # -- life

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> Cluster:
        """Bring everything up and wait until all nodes are idle. Leaves nothing behind if it raises."""
        if (reason := why_impossible()) is not None:
            raise ClusterError(reason)
        sweep(self._prefix)
        atexit.register(self.stop)
        self._exit_on_sigterm()
        try:
            self._build()
        except BaseException:
            self.stop()
            raise
        return self

    def _build(self) -> None:
        self._claim = claim = claim_directory(self._prefix)
        directory = claim.directory
        self._layout = layout = Layout(directory, claim.index, self.nodes)
        self._say(f"cluster of {len(self.nodes)} nodes in {directory}")
        for name in ("munge", "state", "log", "images", "local", "scratch", "shared", "nodes"):
            (directory / name).mkdir()
        options = {
            **(accounting_database.settings(directory, claim.index) if self._accounting else {}),
            **self._options,
        }
        write_configuration(layout, self._cpus, self._gpus, options, shipped_times=self._shipped_times)
        make_filesystem(directory / "images/shared.ext4", self._shared_mb, self.shared)
        for node in self.nodes:
            (directory / "nodes" / node / "spool").mkdir(parents=True)
            make_filesystem(directory / f"images/{node}.ext4", 16, directory / "local" / node)
        make_network(layout)
        self._furnish()
        self._start_munged()
        if self._accounting:
            accounting_database.start(directory, claim.index, self._spawn, self.env)
        self.start_controller(wait=False)
        for node in self.nodes:
            self._boot(node)
        self._say("waiting for the nodes")
        for node in self.nodes:
            self.wait_for_node_state(node, "IDLE", timeout_s=60)

    def stop(self) -> None:
        """Take everything down and remove it. May be called again. Signals that arrive meanwhile are kept for later."""
        if self._claim is None:
            self._restore_sigterm()
            return
        with signals_held():
            remove(self._claim.directory, self._claim.index, owned=True)
            for name in ("slurmdbd", "mariadbd"):  # see accounting.DIES_WITH_US
                if name in self._processes:
                    self._processes[name].kill()
            for process in [*self._processes.values(), *self._dying]:
                process.wait(timeout=10)
            self._processes.clear()
            self._dying.clear()
            self._inits.clear()
            self._claim.release()
            self._claim = self._layout = None
        atexit.unregister(self.stop)
        self._restore_sigterm()

    def _exit_on_sigterm(self) -> None:
        """SIGTERM would end Python without leaving the `with` block; let it unwind, unless somebody handles it."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def _restore_sigterm(self) -> None:
        if self._old_sigterm is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None

    def reset(self, timeout_s: float = 60) -> None:
        """Back to how it was after start(): all faults undone, all nodes up and idle, no job, no file of a test."""
        for node in (None, *self.nodes):
            self.thaw(node)
        if "slurmctld" not in self._processes:
            self.start_controller()
        for node in self.nodes:
            self.join(node)
            if node not in self._inits:
                self._boot(node)
        # Whole arrays: of the elements that have not started squeue prints the first ones only.
        jobs = sorted({job["job_id"].partition("_")[0] for job in self.squeue()})
        if jobs:
            self.slurm("scancel", *jobs, check=False)
        if not wait_until(lambda: not self.squeue(), timeout_s, 0.2):
            raise ClusterError(f"jobs do not end within {timeout_s:g} s: {self.squeue()}\n{self.log_tail()}")
        for name in re.findall(r"ReservationName=(\S+)", self.slurm("scontrol", "show", "reservation").stdout):
            self.slurm("scontrol", "delete", f"reservation={name}")
        for node in self.nodes:
            if "DRAIN" in self.node(node)["State"]:
                self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
            self.wait_for_node_state(node, "IDLE", timeout_s)
            empty(self.node_local(node))
            empty(self.node_path(node, KILL_SWITCH_BASE))
        empty(self.shared)

    # -- what and where

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise ClusterError("this cluster is not running; use it inside `with Cluster() as cluster:`")
        return self._layout

    @property
    def _claimed(self) -> Claim:
        assert self._claim is not None, "layout is there, so is what it was made of"
        return self._claim

    @property
    def directory(self) -> Path:
        """The private directory with everything in it."""
        return self.layout.directory

    @property
    def shared(self) -> Path:
        """The shared filesystem: writable by everybody, at this path on the host and on every node."""
        return self.directory / "shared"

    @property
    def scratch(self) -> Path:
        """A path at which each node has a filesystem of its own; on the host there is nothing."""
        return self.directory / "scratch"

    @property
    def controller_address(self) -> str:
        """The host's address as the nodes reach it."""
        return self.layout.controller_address

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands reach this cluster, on the host and on the nodes."""
        base = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH_", "SRUN_"))}
        return base | {"PATH": search_path(), "SLURM_CONF": f"{self.directory}/slurm.conf"}

    def node_local(self, node: str) -> Path:
        """The scratch filesystem of one node, as the host sees it. On the node it is `scratch`."""
        return self.directory / "local" / self._known(node)

    def node_path(self, node: str, path: str | Path) -> Path:
        """A file on a running node (its /run for example) as a path on the host."""
        return Path(f"/proc/{self.init_pid(node)}/root") / str(path).lstrip("/")

    def init_pid(self, node: str) -> int:
        """PID 1 of a node as the host numbers it. Raises ClusterError if the node is down."""
        pid = self._inits.get(self._known(node))
        if pid is None or start_time_ticks(pid) is None:
            raise ClusterError(f"node {node} is down; start_node({node!r}) brings it back\n{self.log_tail(node)}")
        return pid

    def log_tail(self, *names: str) -> str:
        """The last lines of the controller's log and of those of the nodes named."""
        log = self.directory / "log"
        pairs = [(log / "slurmctld.log", log / "slurmctld.out")]
        pairs += [(log / f"slurmd-{name}.log", log / f"{name}.out") for name in names]
        return "\n".join(tail(path if path.exists() else before) for path, before in pairs)

    def _known(self, node: str) -> str:
        if node not in self.nodes:
            raise ClusterError(f"no node {node!r}; there are {', '.join(self.nodes)}")
        return node

    def _furnish(self) -> None:
        """Binds interpreter, packages and checkout below a path that is open to all, before nodes take the
        mounts over."""
        ensure_user(USER, USER_UID)
        (self.directory / "log").chmod(0o1777)  # what jobs print
        directory = self.directory / "place"
        directory.mkdir(mode=0o755)
        self._place = furnish(directory)
        bind_parts(directory)

    @property
    def place(self) -> Place:
        """Where anybody may run our code, on the host and on every node."""
        assert self._place is not None
        return self._place

    # -- daemons

    def _spawn(self, name: str, argv: Sequence[str]) -> subprocess.Popen:
        """Start a daemon in a session of its own, so that Ctrl-C reaches us and not it."""
        with (self.directory / "log" / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, cwd="/", env=self.env, pass_fds=[self._claimed.alive],
            )  # fmt: skip
        return self._processes[name]

    def _start_munged(self) -> None:
        munge = self.directory / "munge"
        owner = pwd.getpwnam("munge")
        key = munge / "key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        for path in (munge, key):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        process = self._spawn("munged", [*as_user("munge"), "munged", "--foreground", "--force", *options])
        ready = wait_until(lambda: (munge / "socket").exists() or process.poll() is not None, 10, 0.02)
        if not ready or process.poll() is not None:
            logs = tail(munge / "log") + "\n" + tail(self.directory / "log/munged.out")
            raise ClusterError(f"munged did not start\n{logs}")

    def start_controller(self, wait: bool = True) -> None:
        """Start slurmctld, also again after stop_controller(); `wait` until it answers."""
        process = self._spawn("slurmctld", ["slurmctld", "-D", "-f", f"{self.directory}/slurm.conf"])
        if wait and not wait_until(lambda: self._controller_answers() or process.poll() is not None, 30, 0.1):
            raise ClusterError(f"slurmctld does not answer\n{self.log_tail()}")
        if process.poll() is not None:
            raise ClusterError(f"slurmctld ended with exit code {process.returncode}\n{self.log_tail()}")

    def _controller_answers(self) -> bool:
        return self.slurm("scontrol", "ping", check=False).returncode == 0

    def stop_controller(self) -> None:
        """End slurmctld, as an administrator would; jobs go on. start_controller() brings it back."""
        process = self._processes.pop("slurmctld")
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)

    # -- nodes

    def _boot(self, node: str) -> None:
        argv = [
            "nsenter",
            f"--net=/run/netns/{self.layout.network_namespace(node)}",
            "unshare",
            "--mount",
            "--uts",
        ]
        argv += ["--pid", "--fork", "--kill-child", "--mount-proc", "bash", f"{self.directory}/node-init"]
        outer = self._spawn(node, [*argv, node, str(self.directory), f"/tmp/{self._prefix}", str(AGENT_UID)])
        if not wait_until(lambda: children(outer.pid) or outer.poll() is not None, 10, 0.005) or outer.poll():
            raise ClusterError(f"node {node} did not start\n{self.log_tail(node)}")
        self._inits[node] = children(outer.pid)[0]

    def kill_node(self, node: str) -> None:
        """The node dies at once, as by a power cut: first its link, then every process on it.

        A process that waits for a frozen filesystem really goes when that is thawed.
        """
        pid = self.init_pid(node)
        self.cut(node)
        os.kill(pid, signal.SIGKILL)
        del self._inits[node]
        process = self._processes.pop(node)
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._dying.append(process)

    def start_node(self, node: str, timeout_s: float = 60) -> None:
        """Boot a node that was killed and wait until Slurm has it back."""
        if self._known(node) in self._inits:
            raise ClusterError(f"node {node} is already running")
        before = self.node(node).get("SlurmdStartTime")
        self.join(node)
        self._boot(node)
        if not wait_until(lambda: self.node(node).get("SlurmdStartTime") != before, timeout_s, 0.2):
            raise ClusterError(f"node {node} did not register within {timeout_s:g} s\n{self.log_tail(node)}")
        self.wait_for_node_state(node, ("IDLE", "ALLOCATED", "MIXED"), timeout_s)

    def cut(self, node: str) -> None:
        """Pull the node's cable. It runs on, and knows nobody."""
        run_command(["ip", "link", "set", self.layout.link(self._known(node)), "down"])

    def join(self, node: str) -> None:
        """Put the node's cable back."""
        run_command(["ip", "link", "set", self.layout.link(self._known(node)), "up"])

    def node_popen(self, node: str, argv: Sequence[str | Path], *, user: str | None = None, **options) -> NodeProcess:
        """Start a process on a node (its /proc, mounts, host name, network); the options are those of Popen.

        It starts in `cwd` as the node sees it (default: ours) and dies with the Popen, whichever way that is killed;
        terminate() and send_signal() reach the process itself.
        """
        options.setdefault("env", self.env)
        directory = str(options.pop("cwd", None) or os.getcwd())
        door = ["nsenter", f"--target={self.init_pid(node)}", "--net", "--mount", "--uts", "--pid", "--"]
        inside = ["env", f"--chdir={directory}", *as_user(user, "--pdeathsig=KILL"), "--", *map(str, argv)]
        return NodeProcess([*door, *inside], **options)

    def node_run(
        self, node: str, argv: Sequence[str | Path], timeout_s: float = 30, *, check: bool = True, **options
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end; returns exit code and text. Raises ClusterError, also on a timeout."""
        where = f"on {node}: {shlex.join(map(str, argv))}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        text = pipes.pop("input", None)
        if text is not None:
            pipes["stdin"] = subprocess.PIPE
        process = self.node_popen(node, argv, **pipes)
        try:
            output, errors = process.communicate(text, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"no answer within {timeout_s:g} s {where}") from error
        finally:
            if process.poll() is None:
                process.kill()  # the pipes are not read to their end: what is in state D holds them open
                process.wait(timeout=5)
        if check and process.returncode != 0:
            raise ClusterError(f"exit code {process.returncode} {where}\n{(errors or output or '').strip()}")
        return subprocess.CompletedProcess(list(argv), process.returncode, output, errors)

    # -- filesystems

    def freeze(self, node: str | None = None) -> None:
        """The shared filesystem, or a node's scratch, stops answering to writes. May be repeated."""
        set_frozen(self.shared if node is None else self.node_local(node), True)

    def thaw(self, node: str | None = None) -> None:
        """It answers again. May be repeated."""
        set_frozen(self.shared if node is None else self.node_local(node), False)

    # -- Slurm

    def slurm(
        self, *argv: str | Path, timeout_s: float = 30, check: bool = True, user: str | None = None, **options
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command on the host; returns exit code and text. Raises ClusterError unless `check` is False."""
        options.setdefault("env", self.env)
        try:
            return run_command(argv, timeout_s=timeout_s, check=check, user=user, **options)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.log_tail()}") from error

    def sbatch(self, script: str, *options: str, user: str | None = None) -> str:
        """Submit the text of a job script as an ordinary user; returns the job id. The job starts in `shared`."""
        environment, user = self.env, user or USER
        if user != "root":
            entry = pwd.getpwnam(user)
            environment |= {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user}
        done = self.slurm(
            "sbatch",
            "--parsable",
            f"--chdir={self.shared}",
            *options,
            user=user,
            input=script,
            env=environment,
            cwd="/",
        )
        return done.stdout.strip().partition(";")[0]

    def squeue(self) -> list[dict[str, str]]:
        """The queue, one dict a job: job_id, name, state, node_list, reason, user."""
        names = ("job_id", "name", "state", "node_list", "reason", "user")
        lines = self.slurm("squeue", "--all", "--noheader", "--format=%i|%j|%T|%N|%r|%u").stdout.splitlines()
        return [dict(zip(names, line.split("|"), strict=True)) for line in lines]

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return parse_fields(self.slurm("scontrol", "--oneliner", "show", "job", str(job_id)).stdout)

    def node(self, node: str) -> dict[str, str]:
        """The fields of `scontrol show node`."""
        return parse_fields(self.slurm("scontrol", "--oneliner", "show", "node", self._known(node)).stdout)

    def wait_for_job_state(self, job_id: str, state: str | Collection[str], timeout_s: float = 30) -> dict[str, str]:
        """Wait until the job is in (one of) these states; returns its fields. Raises ClusterError if it is late."""
        return self._wait_for(f"job {job_id}", lambda: self.job(job_id), "JobState", state, timeout_s)

    def wait_for_node_state(self, node: str, state: str | Collection[str], timeout_s: float = 60) -> dict[str, str]:
        """Wait until the node is in (one of) these states, shell patterns as IDLE or DOWN*; returns its fields."""
        return self._wait_for(f"node {node}", lambda: self.node(node), "State", state, timeout_s, node)

    def _wait_for(
        self,
        what: str,
        read: Callable[[], dict[str, str]],
        field: str,
        state: str | Collection[str],
        timeout_s: float,
        *logs: str,
    ) -> dict[str, str]:
        wanted = (state,) if isinstance(state, str) else tuple(state)
        patience = Patience(timeout_s)
        fields: dict[str, str] = {}
        last = "nothing"
        while patience.lasts():
            try:
                fields = read()
            except ClusterError as error:  # slurmctld may be on its way
                last = str(error)
            else:
                last = f"{fields[field]}, reason {fields.get('Reason', 'none')}"
                if any(fnmatch.fnmatchcase(fields[field], pattern) for pattern in wanted):
                    return fields
            time.sleep(0.1)
        raise ClusterError(
            f"{what} is not {' or '.join(wanted)} after {timeout_s:g} s, but {last}\n{self.log_tail(*logs)}"
        )


def parse_fields(text: str) -> dict[str, str]:
    """`Key=value Key=value ...` as scontrol prints it; a value may hold blanks and `=`."""
    pairs = re.split(r"\s+(?=[A-Z][A-Za-z_/:]*=)", text.strip())
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


# --- command line -----------------------------------------------------------------------------------------------------


def main() -> int:
    """`up` keeps a cluster until Ctrl-C, `clean` removes what dead owners left."""
    parser = argparse.ArgumentParser(prog="python -m tests.rig.cluster", description="a Slurm cluster on this machine")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster, print its environment, stay until Ctrl-C")
    up.add_argument("--nodes", type=int, default=3)
    up.add_argument("--gpus", type=int, default=0, help="GPUs that each node declares (no real ones)")
    commands.add_parser("clean", help="remove clusters of which the owner is dead")
    arguments = parser.parse_args()
    try:
        if arguments.command == "clean":
            removed = sweep()
            print("\n".join(f"removed {path}" for path in removed) or "nothing to remove")
            return 0
        return stay_up(arguments.nodes, arguments.gpus)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 2


def stay_up(nodes: int, gpus: int) -> int:
    """Start a cluster, print how to use it from a shell, and wait for Ctrl-C."""
    ensure_packages()
    with Cluster(nodes, gpus=gpus, say=lambda line: print(f"# {line}", flush=True)) as cluster:
        print(f"export SLURM_CONF={cluster.directory}/slurm.conf")
        print(f"export SLURM_WATCHDOG_DEMO_SHARED={cluster.shared}")
        for node in cluster.nodes:
            print(f"# a shell on {node}: nsenter -t {cluster.init_pid(node)} -n -m -u -p")
        print("# Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
