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
import dataclasses
import errno
import fcntl
import fnmatch
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from tests.rig.rights import HELPER_UID, USER, USER_UID, Place, bind_parts, ensure_user, furnish

PACKAGES = {  # Debian package -> commands that it brings
    "slurm-wlm": ("slurmctld", "slurmd", "sbatch", "scontrol"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "e2fsprogs": ("mkfs.ext4",),
    "util-linux": ("nsenter", "unshare", "setpriv", "mount"),
}
PREFIX = "slurm-watchdog-demo"
MAX_INDEX = 250  # the third byte of the subnet
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h

# What PID 1 of a node does. Being a shell it reaps what loses its parent, which slurmd as PID 1 would not do.
NODE_INIT = r"""
set -eu
node=$1 dir=$2 family=$3
echo "$node" >/proc/sys/kernel/hostname
umount --recursive --lazy /run/netns || true  # else this node would keep other nodes' networks alive
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/slurm-watchdog/jobs /run/slurm-watchdog-helper
mount -t tmpfs -o size=4M,nr_inodes=4k,mode=755,nosuid,nodev,noexec tmpfs /run/slurm-watchdog/jobs
chown "$4" /run/slurm-watchdog/jobs /run/slurm-watchdog-helper
mount --bind "$dir/hosts" /etc/hosts
mount --bind "$dir/local/$node" "$dir/scratch"
# A copy of a mount in here would keep it alive after its owner, another cluster or node, is gone.
mapfile -t mounts </proc/mounts # at once: the kernel's list moves while we unmount
for line in "${mounts[@]}"; do
    read -r _ point _ <<<"$line"
    case $point in
        "$dir/shared" | "$dir/scratch" | "$dir/place/"*) ;;
        "$family".*) umount "$point" || true ;;
    esac
done
slurmd -D -N "$node" &
while true; do wait || true; sleep 1; done
"""


class ClusterError(Exception):
    """Something about the cluster did not work. The text says what, where, and what to do next."""


# --- small tools ------------------------------------------------------------------------------------------------------


def search_path() -> str:
    """PATH with the directories of the administrator's commands, which a user's PATH lacks."""
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float = 30,
    check: bool = True,
    user: str | None = None,
    **options,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end, as `user` if given, and return its exit code and text. Raises ClusterError."""
    command = [*as_user(user), *map(str, argv)]
    shown = shlex.join(command)
    options.setdefault("env", os.environ | {"PATH": search_path()})
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, **options
        )
    except FileNotFoundError as error:
        raise ClusterError(f"cannot run {shown}: {error}; call ensure_packages() first") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"no answer within {timeout_s:g} s from: {shown}") from error
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "it printed nothing"
        raise ClusterError(f"exit code {done.returncode} from: {shown}\n{said}")
    return done


def as_user(user: str | None, *more: str) -> list[str]:
    """The words to put before a command so that it runs as `user` (None: as we are); `more` are setpriv options."""
    if user is None:
        return ["setpriv", *more] if more else []
    entry = pwd.getpwnam(user)
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups", *more]


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log file with its name above, or a remark that there is none."""
    try:
        text = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return f"--- {path}: {error.strerror}"
    return "\n".join([f"--- last lines of {path}", *text])


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on, None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def start_time_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its pid, its identity. None if it is gone or a zombie."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def all_pids() -> list[int]:
    """Every process id that this /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """The children of the main thread of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def mount_points(below: Path, filesystem: str | None = None) -> list[Path]:
    """What is mounted below a directory in our mount namespace (of one kind only), the latest mount first."""
    fields = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    points = [Path(field[1]) for field in fields if filesystem in (None, field[2])]
    return [point for point in reversed(points) if point.is_relative_to(below)]


def empty(directory: Path) -> None:
    """Remove all that is in a directory, but for what mkfs puts there.

    None of it may be a mount point of another namespace: removing its directory takes the mount off there.
    """
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name != "lost+found":
                shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def set_frozen(mount_point: Path, frozen: bool) -> None:
    """Stop or release all writing to the filesystem mounted there. It may already be so."""
    descriptor = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, FIFREEZE if frozen else FITHAW, 0)
    except OSError as error:
        if error.errno != (errno.EBUSY if frozen else errno.EINVAL):  # what the kernel says if it already is
            raise ClusterError(
                f"cannot {'freeze' if frozen else 'thaw'} {mount_point}: {error.strerror}"
            ) from error
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], object], timeout_s: float, interval_s: float = 0.05) -> bool:
    """Ask again and again until `condition()` is true; False if it was not within `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(interval_s)
    return True


# --- may a cluster be made here? --------------------------------------------------------------------------------------


def missing_packages() -> list[str]:
    """Debian packages of PACKAGES of which a command is not there."""
    path = search_path()
    return [
        name for name, commands in PACKAGES.items() if not all(shutil.which(c, path=path) for c in commands)
    ]


def ensure_packages(timeout_s: float = 300) -> None:
    """Install what is missing with apt-get, saying so. Raises ClusterError with the command to type if that fails."""
    missing = missing_packages()
    if not missing:
        return
    by_hand = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        raise ClusterError(f"missing: {', '.join(missing)}; as root: {by_hand}")
    if shutil.which("apt-get") is None:
        raise ClusterError(
            f"missing: {', '.join(missing)}, and there is no apt-get here; install them by other means"
        )
    print(f"installing {', '.join(missing)} (at most {timeout_s:g} s) ...", file=sys.stderr, flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *missing]):
        try:
            run_command(command, timeout_s=timeout_s, env=environment)
        except ClusterError as error:
            raise ClusterError(f"{error}\ncould not install packages; try by hand: {by_hand}") from error


def why_impossible() -> str | None:
    """Why no cluster can be made on this machine, with what to do about it; None if one can."""
    if os.geteuid() != 0:
        return "a cluster needs root (namespaces, mounts, freezing a filesystem); run this as root"
    if missing := missing_packages():
        return f"not installed: {', '.join(missing)}; apt-get install --no-install-recommends {' '.join(missing)}"
    probe = "mount -t tmpfs none /mnt && ip link add swdprobe type veth peer name swdprobe1"
    try:
        run_command(
            ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", probe]
        )
    except ClusterError as error:
        return f"namespaces do not work here (in a container? it must be privileged): {error}"
    if not Path("/dev/loop-control").exists():
        return "no loop devices: /dev/loop-control is not there; modprobe loop, or run a privileged container"
    return None


# --- who owns what ----------------------------------------------------------------------------------------------------
#
# A directory is owned while somebody holds its lock, an index while somebody holds its name in this network
# namespace. The
# kernel releases both when the owner ends, however it ends, and shows them to everyone concerned: a lock to
# all who see the
# directory, from other PID namespaces too; the name to all who see the same bridges, from other roots too.
# What the owner
# started holds a shared lock on the file ALIVE, so that a sweep knows of daemons that it cannot see.

ALIVE = "alive"


def lock_directory(directory: Path) -> int | None:
    """The descriptor that holds the lock of this directory; None if somebody else holds it, or it is no directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), directory.lstat()):  # not one that was removed meanwhile
            return descriptor
    os.close(descriptor)
    return None


def daemons_live(directory: Path) -> bool:
    """Does anything that the owner started live, be it where we cannot see it? The caller has locked the directory."""
    with contextlib.suppress(FileNotFoundError), (directory / ALIVE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def hold_index(index: int) -> socket.socket | None:
    """The socket that holds this index in our network namespace; None if a living cluster has it."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0swd{index}")
    except OSError as error:
        name.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return name


def index_is_in_use(index: int) -> bool:
    """Does anything of this index exist here, such as what a dead cluster left?"""
    return (
        f"{index:02X}4D0A" in Path("/proc/net/route").read_text()  # 10.77.INDEX, little endian
        or Path(f"/sys/class/net/swd{index}").exists()
        or any(Path("/run/netns").glob(f"swd{index}-*"))
    )


@dataclasses.dataclass(frozen=True)
class Claim:
    """A directory and its index, ours until release() or our end."""

    directory: Path
    index: int
    lock: int
    name: socket.socket
    alive: int
    """Handed to every daemon: see ALIVE."""

    def release(self) -> None:
        """Give both back; the directory has been removed before."""
        for descriptor in (self.lock, self.alive):
            os.close(descriptor)
        self.name.close()


def claim_directory(prefix: str) -> Claim:
    """Make a directory of a free index, locked from its first moment. Raises ClusterError if all are taken."""
    new = Path(tempfile.mkdtemp(prefix=f"{prefix}.new-", dir="/tmp"))
    lock = lock_directory(new)
    assert lock is not None, f"nobody else knows {new}"
    new.chmod(0o755)
    (new / "owner.json").write_text(json.dumps({"pid": os.getpid()}))
    alive = os.open(new / ALIVE, os.O_RDONLY | os.O_CREAT, 0o644)
    fcntl.flock(alive, fcntl.LOCK_SH)
    for index in range(1, MAX_INDEX + 1):
        name = hold_index(index)
        if name is None:
            continue
        directory = Path(f"/tmp/{prefix}.{index}")
        if not index_is_in_use(index):
            with contextlib.suppress(OSError):  # something of that name is there, in use or not
                new.rename(directory)
                return Claim(directory, index, lock, name, alive)
        name.close()
    shutil.rmtree(new)
    os.close(alive)
    os.close(lock)
    raise ClusterError(
        f"all of /tmp/{prefix}.1 to .{MAX_INDEX} are in use; `python -m tests.rig.cluster clean`"
    )


# --- leftovers --------------------------------------------------------------------------------------------------------


def sweep(prefix: str = PREFIX) -> list[Path]:
    """Remove the clusters that nobody owns any more; returns their directories."""
    removed = []
    for directory in Path("/tmp").glob(f"{prefix}.*"):
        number = directory.name.rpartition(".")[2]
        if number.isdigit() and (lock := lock_directory(directory)) is not None:
            try:
                if remove(directory, int(number)):
                    removed.append(directory)
            finally:
                os.close(lock)
    return removed


def remove(directory: Path, index: int, owned: bool = False) -> bool:
    """Take a cluster down, which the caller has locked. May be repeated. False, and it stays, if daemons of
    it live in a PID
    namespace that we do not see. Raises ClusterError.

    `owned`: the caller holds the index, too. Otherwise links and namespaces of the index are only touched if no living
    cluster has it; one that has it took it because the dead one had none.

    The order matters: first thaw, for what waits on a frozen filesystem cannot be killed; then kill, for what runs
    keeps mounts busy; then unmount, which gives the loop devices back.
    """
    name = None
    if not owned:
        end = time.monotonic() + 2  # who looks for a free index holds each one for a moment
        while (name := hold_index(index)) is None and time.monotonic() < end:
            time.sleep(0.05)
    try:
        for point in mount_points(directory, "ext4"):
            set_frozen(point, False)
        kill_all(directory, index if owned or name else None)
        if not owned and not wait_until(lambda: not daemons_live(directory), 2):
            return False
        for point in mount_points(directory):
            unmount(point)
        if owned or name:
            remove_network(index)
        release_loop_devices(directory)
        shutil.rmtree(directory)
        return True
    finally:
        if name:
            name.close()


def processes_of(directory: Path, index: int | None) -> list[int]:
    """The daemons of a cluster on the host, and all that runs in the network namespaces of this index (None:
    no such)."""
    spaces = set()
    for path in Path("/run/netns").glob(f"swd{index}-*"):
        with contextlib.suppress(OSError):
            spaces.add((path.stat().st_dev, path.stat().st_ino))
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):
            space = os.stat(f"/proc/{pid}/ns/net")
            if (space.st_dev, space.st_ino) in spaces or is_daemon_of(pid, directory):
                found.append(pid)
    return found


def is_daemon_of(pid: int, directory: Path) -> bool:
    """Is this munged or slurmctld started for this very directory, and not for one of that name below another root?

    The command line of others might block: it is not read.
    """
    if not Path(f"/proc/{pid}/comm").read_text().startswith(("munged", "slurm")):
        return False
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    mine = (f"{directory}/slurm.conf", f"{directory}/munge/socket")
    return any(word.endswith(mine) for word in words) and os.path.samestat(
        os.stat(f"/proc/{pid}/root{directory}"), directory.stat()
    )


def kill_all(directory: Path, index: int | None, timeout_s: float = 10) -> None:
    """SIGKILL every process of the cluster and wait until none is left. Raises ClusterError naming those that stay."""

    def all_gone() -> bool:
        living = [pid for pid in processes_of(directory, index) if start_time_ticks(pid) is not None]
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    if not wait_until(all_gone, timeout_s):
        stay = [f"{pid} ({Path(f'/proc/{pid}/wchan').read_text()})" for pid in processes_of(directory, index)]
        raise ClusterError(
            f"processes of {directory} cannot be killed: {', '.join(stay)}; thaw what they wait for, then run "
            "`python -m tests.rig.cluster clean`"
        )


def unmount(point: Path) -> None:
    """Unmount, from sight at least: what still has a file open there keeps the rest until it closes it."""
    if not wait_until(lambda: run_command(["umount", point], check=False).returncode == 0, timeout_s=1.5):
        run_command(["umount", "--lazy", point], check=False)


def remove_network(index: int) -> None:
    """Delete veths, bridge and network namespaces of a cluster."""
    for name in os.listdir("/sys/class/net"):
        if name == f"swd{index}" or name.startswith(f"swd{index}n"):
            run_command(["ip", "link", "delete", name], check=False)
    for path in Path("/run/netns").glob(f"swd{index}-*"):
        run_command(["ip", "netns", "delete", path.name], check=False)


def loop_devices(directory: Path) -> list[str]:
    """Loop devices backed by a file below the directory, as /dev/loopN."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith(f"{directory}/"):
                found.append(f"/dev/{path.parts[3]}")
    return found


def release_loop_devices(directory: Path) -> None:
    """Wait until the loop devices are free: the mount namespace of a dead node goes a moment after its processes."""
    if not wait_until(lambda: not loop_devices(directory), timeout_s=3):
        for device in loop_devices(directory):
            run_command(["losetup", "--detach", device], check=False)


# --- processes on a node ----------------------------------------------------------------------------------------------


class NodeProcess(subprocess.Popen):
    """A process inside a node. The pid of the Popen is the door (nsenter); signals go to the process behind it."""

    @property
    def inner_pid(self) -> int | None:
        """The process itself, as the host numbers it; None while it is being started and after it has ended."""
        return next(iter(children(self.pid)), None) if self.returncode is None else None

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process in the node. kill() ends the door as well, even if the process cannot die."""
        inner = self.inner_pid
        if inner is None:
            super().send_signal(sig)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner, sig)
        if sig == signal.SIGCONT:  # the door stops with its process
            super().send_signal(sig)
        if sig == signal.SIGKILL and not wait_until(lambda: self.poll() is not None, 0.5, 0.005):
            super().send_signal(sig)  # normally the door collects its process and ends by the same signal


# --- the cluster ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names and numbers of one cluster; all follow from its directory and index."""

    directory: Path
    index: int
    nodes: tuple[str, ...]

    @property
    def bridge(self) -> str:
        return f"swd{self.index}"

    @property
    def controller_address(self) -> str:
        return f"10.77.{self.index}.1"

    def address(self, node: str) -> str:
        return f"10.77.{self.index}.{11 + self.nodes.index(node)}"

    def network_namespace(self, node: str) -> str:
        return f"{self.bridge}-{node}"

    def link(self, node: str) -> str:
        """The host's end of the node's cable."""
        return f"{self.bridge}{node}"


def slurm_settings(layout: Layout, cpus: int, gpus: int) -> dict[str, str]:
    """The global part of slurm.conf, tuned so that things happen in seconds."""
    d = layout.directory
    settings = {
        "ClusterName": f"demo{layout.index}",
        "SlurmctldHost": f"{socket.gethostname().partition('.')[0]}({layout.controller_address})",
        "SlurmctldPort": str(16000 + layout.index),  # own port: several controllers on one host
        "SlurmdPort": "6818",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={d}/munge/socket,cred_expire=5",  # a requeued job waits for this long, 120 s by default
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": f"{d}/state",
        "SlurmdSpoolDir": f"{d}/nodes/%n/spool",
        "SlurmctldPidFile": f"{d}/state/slurmctld.pid",
        "SlurmdPidFile": f"{d}/nodes/%n/slurmd.pid",
        "SlurmctldLogFile": f"{d}/log/slurmctld.log",
        "SlurmdLogFile": f"{d}/log/slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none",
        "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0",
        "SlurmdParameters": "config_overrides",  # believe CPUs= below, not the machine
        "ReturnToService": "2",
        "KillWait": "3",
        "UnkillableStepTimeout": "20",
        "MinJobAge": "300",
        "JobRequeue": "1",
        "SlurmctldTimeout": "15",
        "SlurmdTimeout": "15",
    }
    return settings | ({"GresTypes": "gpu"} if gpus else {})


def write_configuration(layout: Layout, cpus: int, gpus: int, options: Mapping[str, str]) -> None:
    """Write slurm.conf, cgroup.conf, gres.conf and the nodes' /etc/hosts."""
    d, nodes = layout.directory, layout.nodes
    lines = [f"{key}={value}" for key, value in (slurm_settings(layout, cpus, gpus) | dict(options)).items()]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    for node in nodes:
        lines.append(f"NodeName={node} NodeHostname={node} NodeAddr={layout.address(node)} CPUs={cpus}{gres}")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (d / "slurm.conf").write_text("\n".join(lines) + "\n")
    (d / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    if gpus:  # any device file will do, nobody opens it
        (d / "gres.conf").write_text(f"NodeName={','.join(nodes)} Name=gpu File=/dev/loop[0-{gpus - 1}]\n")
    hosts = ["127.0.0.1 localhost", f"{layout.controller_address} {socket.gethostname()} controller"]
    hosts += [f"{layout.address(node)} {node}" for node in nodes]
    (d / "hosts").write_text("\n".join(hosts) + "\n")
    (d / "node-init").write_text(NODE_INIT)


def make_filesystem(image: Path, size_mb: int, mount_point: Path) -> None:
    """A new ext4 in a sparse file, mounted through a loop device that frees itself when it is unmounted."""
    with image.open("wb") as file:
        file.truncate(size_mb * 1024 * 1024)
    run_command(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", image])
    mount_point.mkdir(parents=True, exist_ok=True)
    run_command(["mount", "-o", "loop", image, mount_point])
    mount_point.chmod(0o1777)


def make_network(layout: Layout) -> None:
    """A bridge with the controller's address, and a network namespace with a cable to it for each node."""
    host = [
        f"link add {layout.bridge} type bridge",
        f"addr add {layout.controller_address}/24 dev {layout.bridge}",
    ]
    host.append(f"link set {layout.bridge} up")
    for node in layout.nodes:
        space, link = layout.network_namespace(node), layout.link(node)
        run_command(["ip", "netns", "add", space])
        host.append(f"link add {link} type veth peer name eth0 netns {space}")
        host.append(f"link set {link} master {layout.bridge} up")
    run_command(["ip", "-batch", "-"], input="\n".join(host) + "\n")
    for node in layout.nodes:
        inside = f"link set lo up\naddr add {layout.address(node)}/24 dev eth0\nlink set eth0 up\n"
        inside += f"route add default via {layout.controller_address}\n"
        run_command(["ip", "-netns", layout.network_namespace(node), "-batch", "-"], input=inside)


class Cluster:
    """A running Slurm cluster; see the top of this file. Not to be shared between threads while starting or stopping.

    nodes: how many; they are named n1, n2, ...     cpus, gpus: what each one declares to have (gpus: at most 8)
    prefix: of the directory below /tmp             options: further or other settings of slurm.conf
    say: called with a line on what is being done   shared_mb: size of the shared filesystem (a sparse file)
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
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._prefix, self._cpus, self._gpus, self._options = prefix, cpus, gpus, dict(options or {})
        self._shared_mb, self._say = shared_mb, say
        self._place: Place | None = None
        self._processes: dict[str, subprocess.Popen] = {}  # "munged", "slurmctld", and each node's namespaces
        self._inits: dict[str, int] = {}  # node -> its PID 1 as the host numbers it
        self._layout: Layout | None = None
        self._claim: Claim | None = None
        self._dying: list[
            subprocess.Popen
        ] = []  # killed nodes of which something waits for a frozen filesystem
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
        write_configuration(layout, self._cpus, self._gpus, self._options)
        make_filesystem(directory / "images/shared.ext4", self._shared_mb, self.shared)
        for node in self.nodes:
            (directory / "nodes" / node / "spool").mkdir(parents=True)
            make_filesystem(directory / f"images/{node}.ext4", 16, directory / "local" / node)
        make_network(layout)
        self._furnish()
        self._start_munged()
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
        base = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM", "SBATCH_", "SRUN_"))
        }
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
            raise ClusterError(
                f"node {node} is down; start_node({node!r}) brings it back\n{self.log_tail(node)}"
            )
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
        outer = self._spawn(node, [*argv, node, str(self.directory), f"/tmp/{self._prefix}", str(HELPER_UID)])
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

    def node_popen(
        self, node: str, argv: Sequence[str | Path], *, user: str | None = None, **options
    ) -> NodeProcess:
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

    def wait_for_job_state(
        self, job_id: str, state: str | Collection[str], timeout_s: float = 30
    ) -> dict[str, str]:
        """Wait until the job is in (one of) these states; returns its fields. Raises ClusterError if it is late."""
        return self._wait_for(f"job {job_id}", lambda: self.job(job_id), "JobState", state, timeout_s)

    def wait_for_node_state(
        self, node: str, state: str | Collection[str], timeout_s: float = 60
    ) -> dict[str, str]:
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
        end = time.monotonic() + timeout_s
        fields: dict[str, str] = {}
        last = "nothing"
        while time.monotonic() < end:
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


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Keep SIGINT and SIGTERM until the end of the block, so that a second Ctrl-C does not stop the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in old:
            signal.signal(number, lambda got, _: arrived.append(got))
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for first in arrived[:1]:
            os.kill(os.getpid(), first)


# --- command line -----------------------------------------------------------------------------------------------------


def main() -> int:
    """`up` keeps a cluster until Ctrl-C, `clean` removes what dead owners left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.rig.cluster", description="a Slurm cluster on this machine"
    )
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
