"""What children do in directories of users: probe a mount, write and remove a kill switch. Runs as the job's owner."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from itertools import islice

import msgspec

from slurm_watchdog.agent.children.requests import (
    KillSwitch,
    ProbeDirectory,
    WorkerState,
    WriteSwitch,
)
from slurm_watchdog.agent.files.safe_open import open_directory
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing, describe, opened
from slurm_watchdog.base.mounts import mount_of, read_mounts
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.observations import MountProbe

BLOCK = b"slurm-watchdog probe\n".ljust(4096, b"\0")
NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
DEAD = frozenset({errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH})
"""Errors with which a client says that its server does not answer. All others are an answer, ESTALE and EIO too."""
OUR_OWN = frozenset({
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EINTR, errno.EAGAIN, errno.EFBIG,
})  # fmt: skip
"""Errors that this process makes itself: its user may set limits for it (prlimit(2)). They say nothing about
the filesystem."""
AT_FDCWD, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS = -100, 0x2000, 0x7FF  # linux/fcntl.h, linux/stat.h
STATX_BYTES = 256
MAX_CONTENT = 64 * 1024
LEFT_S = 60.0  # A file of our own that is older, under a name for the moment, is of a child that was killed.
MAX_LISTED = 4096  # Entries of a user's directory, which may have a million, among which those are looked for.
_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def probe_mount(request: ProbeDirectory, worker: WorkerState) -> MountProbe:
    """Asks a filesystem's server about a directory; with `write` writes one block there, syncs it, reads it back.
    Leaves nothing behind when it answers. Nothing is asked where the directory lies on another mount here, or on one
    that is not probed (mounts.NOT_PROBED): the answer then names no mount. Raises OSError with an error of this
    process's own."""
    directory, began = request.directory, clock.monotonic()
    mount = mount_of(directory, read_mounts())
    if mount is None or mount.point != request.mount:
        where = mount.point if mount else "nothing"
        return _elsewhere(f"{directory} is on {where} here, not on {request.mount}")
    if mount.fs_type == "autofs":
        return _elsewhere(f"nothing is mounted on {mount.point} now (autofs)")
    error, responding, wrote = None, True, False
    try:
        if not _lies_on(directory, mount.point):
            return _elsewhere(f"{directory} leads to another filesystem than {mount.point}")
        _ask_server(directory)
        if request.write:
            _write_block(directory, request.node)
            wrote = True
    except OSError as problem:
        if problem.errno in OUR_OWN:
            raise
        error, responding = describe(problem), problem.errno not in DEAD
    return MountProbe(
        mount=mount.point,
        responding=responding,
        seconds=clock.monotonic() - began,
        error=error,
        device=mount.device,
        fs_type=mount.fs_type,
        wrote=wrote,
    )


def _elsewhere(error: str) -> MountProbe:
    return MountProbe(mount="", responding=False, seconds=0.0, error=error)


def _lies_on(directory: str, point: str) -> bool:
    """Whether what this name leads to lies on the mount at `point`. True where the kernel does not say."""
    with opened(directory, os.O_PATH | os.O_DIRECTORY) as fd, open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        number = next((line.split()[1] for line in file if line.startswith("mnt_id:")), None)
    found = [mount.point for mount in read_mounts() if str(mount.number) == number]
    return not found or found == [point]


def _ask_server(directory: str) -> None:
    """Three questions that a client may not answer from its memory, and that cost the server a round trip each.

    statfs is never cached by NFS, FUSE and CephFS, and by Lustre for a second; statx with AT_STATX_FORCE_SYNC
    has the attributes fetched again (NFS, FUSE, CephFS, SMB), where a plain stat is content with those of a
    minute ago; opening a directory is a request of its own for FUSE and Lustre, and makes NFS look whether it
    still is the same. Nothing is listed: there may be a million entries.
    """
    os.statvfs(directory)
    _statx_now(directory)
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _statx_now(path: str) -> None:
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)  # glibc 2.28, musl 1.2.5
    if statx is None:
        return
    found = ctypes.create_string_buffer(STATX_BYTES)
    if statx(AT_FDCWD, os.fsencode(path), AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, found) != 0:
        problem = ctypes.get_errno()
        if problem != errno.ENOSYS:
            raise OSError(problem, os.strerror(problem), path)


def _write_block(directory: str, node: str) -> None:
    name = None
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as where:
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=where)
        except OSError as problem:
            if problem.errno not in NO_TMPFILE:
                raise
            name = f".slurm-watchdog-probe.{node}.{os.getpid()}"
            fd = os.open(name, _NEW_FILE | os.O_RDWR, 0o600, dir_fd=where)
        try:
            os.write(fd, BLOCK)
            os.fsync(fd)
            if os.pread(fd, len(BLOCK), 0) != BLOCK:
                raise OSError(errno.EIO, "what was read back differs from what was written")
        finally:
            os.close(fd)
            if name is not None:
                os.unlink(name, dir_fd=where)


def write_kill_switch(request: WriteSwitch, worker: WorkerState) -> None:
    """Creates `path` with the line composed of `by`, `why`, `incident`, `decision`, whole, in time, or not at all. It
    is fine if it is there already. Raises OSError, FileExistsError if another switch is there."""
    directory, name = os.path.split(request.path)
    data = compose_line(msgspec.structs.asdict(request)).encode()
    with closing(open_directory(directory)) as where:
        prefix = f".{name}.{request.node}."
        temporary = f"{prefix}{os.urandom(8).hex()}"  # in a directory of others no one can have it before us
        _create(temporary, where, data)
        try:
            _forget_left(prefix, temporary, where)
            _check_time(request)
            os.link(temporary, name, src_dir_fd=where, dst_dir_fd=where, follow_symlinks=False)
        except FileExistsError:
            if _content(name, where) != data:
                raise FileExistsError(errno.EEXIST, "a kill switch that is not ours is there", request.path) from None
            return
        except (PermissionError, NotImplementedError):  # no hard links on this filesystem
            _create(name, where, data)
        finally:
            _forget(temporary, where)
        try:
            _check_time(request)
        except TimeoutError:
            _forget(name, where)
            raise


def _check_time(request: WriteSwitch) -> None:
    """On a filesystem that has hung, the job may have ended by now, and the next one would find the switch."""
    if request.until_s is not None and clock.monotonic() > request.until_s:
        raise TimeoutError(errno.ETIMEDOUT, "it took too long, and is not wanted any more", request.path)


def _create(name: str, where: int, data: bytes) -> None:
    with opened(name, _NEW_FILE | os.O_WRONLY, where, 0o644) as fd:
        try:
            os.fchmod(fd, 0o644)  # whatever the umask: in the default place the job is another user than its writer
            os.write(fd, data)
            os.fsync(fd)
        except OSError:
            _forget(name, where)
            raise


def _forget_left(prefix: str, ours: str, where: int) -> None:
    """Removes what children that were killed have left under such names: this user's files, older than `ours`."""
    with suppress(OSError), os.scandir(where) as entries:
        new = os.stat(ours, dir_fd=where)  # by the filesystem's own clock
        for name in (each.name for each in islice(entries, MAX_LISTED) if each.name.startswith(prefix)):
            old = os.stat(name, dir_fd=where, follow_symlinks=False)
            if stat.S_ISREG(old.st_mode) and old.st_uid == new.st_uid and new.st_mtime - old.st_mtime > LEFT_S:
                _forget(name, where)


def remove_kill_switch(request: KillSwitch, worker: WorkerState) -> None:
    """Removes `path` if it says the same `by`, `why`, `incident`, `decision`; fine if there is nothing, or another one.
    Raises OSError. Afterwards our switch is gone. Another one in its place belongs to its writer, who wants the job to
    end."""
    directory, name = os.path.split(request.path)
    data = compose_line(msgspec.structs.asdict(request)).encode()
    # NotADirectoryError: also for a link; we wrote below a directory.
    with suppress(FileNotFoundError, NotADirectoryError), closing(open_directory(directory)) as where:
        if _content(name, where) == data:
            _forget(name, where)


def _content(name: str, where: int) -> bytes | None:
    """What the file holds; None if it is no file at all, but a link, a socket or a directory: not ours."""
    with opened(name, os.O_PATH | os.O_NOFOLLOW, where) as found:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return None
        with opened(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK) as fd:
            return os.read(fd, MAX_CONTENT)


def _forget(name: str, where: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=where)
