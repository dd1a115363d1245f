"""A place on this machine for one cluster: claimed with a lock, and swept when its owner has ended.

A directory is owned while somebody holds its lock, an index while somebody holds its name in this network
namespace. The kernel releases both when the owner ends, however it ends, and shows them to everyone
concerned: a lock to all who see the directory, from other PID namespaces too; the name to all who see the
same bridges, from other roots too. What the owner started holds a shared lock on the file ALIVE, so that a
sweep knows of daemons that it cannot see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

from tests.rig.commands import ClusterError, run_command, wait_until
from tests.rig.filesystems import mount_points, release_loop_devices, set_frozen, unmount
from tests.rig.process_facts import all_pids, start_time_ticks

PREFIX = "slurm-watchdog-demo"
MAX_INDEX = 250  # the third byte of the subnet
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
    raise ClusterError(f"all of /tmp/{prefix}.1 to .{MAX_INDEX} are in use; `python -m tests.rig.cluster clean`")


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
    it live in a PID namespace that we do not see. Raises ClusterError.

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


def remove_network(index: int) -> None:
    """Delete veths, bridge and network namespaces of a cluster."""
    for name in os.listdir("/sys/class/net"):
        if name == f"swd{index}" or name.startswith(f"swd{index}n"):
            run_command(["ip", "link", "delete", name], check=False)
    for path in Path("/run/netns").glob(f"swd{index}-*"):
        run_command(["ip", "netns", "delete", path.name], check=False)
