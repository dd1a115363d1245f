"""Filesystems of the rig: an ext4 on a loop device, frozen and released."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from tests.rig.commands import ClusterError, run_command, wait_until

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h


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
            raise ClusterError(f"cannot {'freeze' if frozen else 'thaw'} {mount_point}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def unmount(point: Path) -> None:
    """Unmount, from sight at least: what still has a file open there keeps the rest until it closes it."""
    if not wait_until(lambda: run_command(["umount", point], check=False).returncode == 0, timeout_s=1.5):
        run_command(["umount", "--lazy", point], check=False)


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


def make_filesystem(image: Path, size_mb: int, mount_point: Path) -> None:
    """A new ext4 in a sparse file, mounted through a loop device that frees itself when it is unmounted."""
    with image.open("wb") as file:
        file.truncate(size_mb * 1024 * 1024)
    run_command(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", image])
    mount_point.mkdir(parents=True, exist_ok=True)
    run_command(["mount", "-o", "loop", image, mount_point])
    mount_point.chmod(0o1777)
