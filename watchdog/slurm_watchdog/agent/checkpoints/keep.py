"""Keeps one checkpoint from its trainer's retention limit: hard links beside the trainer's directory, in a child
that is the job's owner.

Whole or not at all: under another name until every file is there and they are as many bytes as the complete
checkpoint had. No link is followed, nothing is overwritten, nothing of the trainer's is touched. One is kept for a
directory: what is there already is its owner's to delete.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from slurm_watchdog.agent.checkpoints.completeness import MAX_ENTRIES
from slurm_watchdog.agent.checkpoints.files import DIRECTORY_FLAGS, MAX_DEPTH, MAX_FILES
from slurm_watchdog.agent.files.safe_open import StrangeFileError, open_directory
from slurm_watchdog.agent.workers.answer_types import KeptCheckpoint
from slurm_watchdog.agent.workers.request_types import KeepCheckpoint
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing, opened
from slurm_watchdog.knowledge.checkpoint_layouts import recognise
from slurm_watchdog.knowledge.kept_checkpoints import KEPT_SUFFIX, SHELF_TRACKERS

UNFINISHED = ".unfinished"
"""What is not whole yet; of an earlier try it is removed."""
MAX_LEFT = 4 * MAX_FILES


class _Links:
    """The links of one checkpoint, so far."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._files = self.size_bytes = 0

    def add(self, name: str, source: int, new: str, target: int, depth: int = MAX_DEPTH) -> None:
        """Links a file, or a directory with all that is in it. Raises OSError."""
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            self._add_directory(name, source, new, target, depth)
            return
        if not stat.S_ISREG(found.st_mode):
            raise StrangeFileError(None, f"{name} in it is neither a file nor a directory")
        self._files += 1
        if self._files > MAX_FILES:
            raise OSError(errno.E2BIG, f"it has more than {MAX_FILES} files")
        if clock.monotonic() > self._until:
            raise OSError(errno.ETIMEDOUT, f"{self._files} files took all the time there was")
        os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        self.size_bytes += os.stat(new, dir_fd=target, follow_symlinks=False).st_size

    def _add_directory(self, name: str, source: int, new: str, target: int, depth: int) -> None:
        if depth < 0:
            raise OSError(errno.E2BIG, f"its directories are more than {MAX_DEPTH} deep")
        with opened(name, DIRECTORY_FLAGS, source) as inner:
            os.mkdir(new, 0o700, dir_fd=target)
            with opened(new, DIRECTORY_FLAGS, target) as made, os.scandir(inner) as entries:
                for entry in entries:
                    self.add(entry.name, inner, entry.name, made, depth - 1)
                os.fchmod(made, stat.S_IMODE(os.fstat(inner).st_mode) & 0o777)


def keep_checkpoint(request: KeepCheckpoint, worker: WorkerState) -> KeptCheckpoint:
    """Where it is kept now, or was before. Raises OSError with the reason why it is not."""
    directory, name = os.path.split(request.path)
    parent, base = os.path.split(directory)
    if not base or not name:
        raise OSError(errno.EINVAL, "it lies in no directory of its own")
    shelf_name = base + KEPT_SUFFIX
    kept = os.path.join(parent, shelf_name, name)
    with closing(open_directory(directory)) as source, closing(open_directory(parent)) as above:
        with suppress(FileNotFoundError), opened(shelf_name, DIRECTORY_FLAGS, above) as shelf:
            if _is_there(name, shelf):
                _remove(UNFINISHED, shelf)
                _write_tracker(name, shelf)
                return KeptCheckpoint(path=kept)
        _check_candidate(name, source)
        with suppress(FileExistsError):
            os.mkdir(shelf_name, 0o700, dir_fd=above)
        with opened(shelf_name, DIRECTORY_FLAGS, above) as shelf:
            _check_shelf(shelf, source)
            try:
                _link_whole(request, name, source, shelf)
                _write_tracker(name, shelf)
            finally:
                _remove(UNFINISHED, shelf)
                with suppress(OSError):  # not empty
                    os.rmdir(shelf_name, dir_fd=above)
    return KeptCheckpoint(path=kept)


def _is_there(name: str, where: int) -> bool:
    try:
        os.stat(name, dir_fd=where, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _check_candidate(name: str, source: int) -> None:
    """Raises OSError for what is written over in place, or is a part of a checkpoint alone."""
    entries: dict[str, bool] = {}
    with os.scandir(source) as found:
        for entry in found:
            if len(entries) >= MAX_ENTRIES:
                raise OSError(errno.E2BIG, f"more than {MAX_ENTRIES} names are in its directory")
            if not entry.is_symlink():
                entries[entry.name] = entry.is_dir(follow_symlinks=False)
    candidate = next((each for each in recognise(entries.items()) if name in each.names), None)
    if candidate is None:
        raise OSError(errno.ENOENT, f"{name} is no checkpoint, or is gone")
    if candidate.step is None or candidate.unfinished:
        raise OSError(errno.EINVAL, f"the name {name} says no step: it may be written over, and its links with it")
    if len(candidate.names) > 1:
        raise OSError(errno.EINVAL, f"it is {len(candidate.names)} files in a directory with others")


def _check_shelf(shelf: int, source: int) -> None:
    """Makes it readable for the users that may read the trainer's directory. Raises OSError if another checkpoint is
    kept there."""
    if os.fstat(shelf).st_uid != os.geteuid():
        raise StrangeFileError(None, "the directory for what is kept is somebody else's")
    trackers = {tracker for tracker, _ in SHELF_TRACKERS.values()}
    others = [each for each in os.listdir(shelf) if each != UNFINISHED and each not in trackers]
    if others:
        raise OSError(errno.EEXIST, f"{others[0][:100]} is kept there already: delete it first")
    os.fchmod(shelf, stat.S_IMODE(os.fstat(source).st_mode) & 0o777 | 0o700)


def _link_whole(request: KeepCheckpoint, name: str, source: int, shelf: int) -> None:
    before = os.stat(name, dir_fd=source, follow_symlinks=False)
    _remove(UNFINISHED, shelf)
    links = _Links(clock.monotonic() + request.budget_s)
    links.add(name, source, UNFINISHED, shelf)
    after = os.stat(name, dir_fd=source, follow_symlinks=False)
    is_same = (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino)
    if not is_same or links.size_bytes != request.size_bytes:
        text = (
            f"it has {links.size_bytes} bytes, and had {request.size_bytes} when it was complete: it is being removed"
        )
        raise OSError(errno.ESTALE, text)
    if stat.S_ISDIR(after.st_mode):
        os.rename(UNFINISHED, name, src_dir_fd=shelf, dst_dir_fd=shelf)  # onto nothing: ENOTEMPTY
    else:
        os.link(UNFINISHED, name, src_dir_fd=shelf, dst_dir_fd=shelf, follow_symlinks=False)


def _write_tracker(name: str, shelf: int) -> None:
    """What a trainer looks for that is given the directory and no checkpoint. Raises OSError."""
    candidate = next(iter(recognise([(name, True)])), None)
    if candidate is None or candidate.layout not in SHELF_TRACKERS:
        return
    tracker, words = SHELF_TRACKERS[candidate.layout]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe holds nobody up
    mode = stat.S_IMODE(os.fstat(shelf).st_mode) & 0o666 | 0o600
    with opened(tracker, flags, shelf) as made:
        os.fchmod(made, mode)
        os.write(made, words.format(step=candidate.step, name=name).encode())


def _remove(name: str, where: int) -> None:
    """A try that came to nothing: its links, and never what they lead to. Raises OSError."""
    left = [MAX_LEFT]

    def remove(name: str, where: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOTEMPTY, "more is left of an earlier try than we make")
        try:
            with opened(name, DIRECTORY_FLAGS, where) as inner:
                os.fchmod(inner, 0o700)
                for each in os.listdir(inner):
                    remove(each, inner)
        except NotADirectoryError:
            os.unlink(name, dir_fd=where)
            return
        os.rmdir(name, dir_fd=where)

    with suppress(FileNotFoundError):
        remove(name, where)
