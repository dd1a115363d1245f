"""Filesystems in trouble: who is blocked on which, and what nodes answered about them.

A filesystem is taken up when a process blocks on it, or when an earlier controller left an incident about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.syscalls import LOCAL_TYPES
from slurm_watchdog.model.cluster_view import FilesystemView, MountAnswer, ProcessView
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.observations import MountProbe, Process

KEPT_WELL_S = 3600.0  # A filesystem that troubles no one any more is remembered this long.
MAX_OF_NODE, MAX_OF_USER = 64, 16  # Filesystems that a node's processes, and one user's there, wait for (FUSE).
MAX_USERS_ASKED = 8  # As so many users one node is asked about one filesystem; detectors want PROBED_USERS.


@dataclass
class _Filesystem:
    mount: str
    device: str | None
    boot_id: str | None  # Of the only kernel that has it, for a local disk; None for a filesystem that nodes share.
    nodes: set[str] = field(default_factory=set)
    answers: dict[tuple[str, int | None], tuple[MountProbe, float, bool]] = field(default_factory=dict)
    """Node and the user that asked -> newest probe, when it came, and whether it is about this very filesystem."""
    last_blocked_at: float = 0.0
    found_by: tuple[str, int] = ("", -1)  # (node, user) of the process that was blocked on it first.


class Filesystems:
    """All of them, by their key. One loop owns it."""

    def __init__(self, left_out: LeftOut) -> None:
        self._known, self._left_out = dict[str, _Filesystem](), left_out

    def note_blocked(self, node: str, boot_id: str, process: Process, made_at: float) -> None:
        """A process of a job waits on `node`; without a mount in what blocks it, nothing is taken up."""
        call = process.blocked
        if call is None or call.mount is None:
            return
        key = filesystem_key(call.mount, call.device, call.fs_type, boot_id)
        owner = boot_id if is_local(call.device, call.fs_type) else None
        filesystem = self._known.get(key)
        if filesystem is None:
            found_by = (node, process.uid)
            others = [each.found_by for each in self._known.values() if each.found_by[0] == node]
            if len(others) >= MAX_OF_NODE or others.count(found_by) >= MAX_OF_USER:
                self._left_out.note("filesystems", node, uid=process.uid)
                return
            filesystem = _Filesystem(mount=call.mount, device=call.device, boot_id=owner, found_by=found_by)
            self._known[key] = filesystem
        filesystem.nodes.add(node)
        filesystem.last_blocked_at = made_at

    def apply_probe(self, node: str, boot_id: str, probe: MountProbe, now: float) -> None:
        """The answer of a node about a mount; counts for every troubled filesystem mounted there. That a mere look was
        answered proves nothing: a frozen filesystem answers it, too."""
        if probe.responding and not probe.wrote and probe.error is None:
            for filesystem in self._known.values():
                before = filesystem.answers.get((node, probe.uid))
                if filesystem.mount == probe.mount and before is not None and not before[0].responding:
                    del filesystem.answers[node, probe.uid]  # the child that hung is back: neither out, nor an answer
            return
        for filesystem in self._known.values():
            if filesystem.mount == probe.mount:
                same_device = probe.device is None or filesystem.device in (None, probe.device)
                same = same_device and filesystem.boot_id in (None, boot_id)
                filesystem.answers[node, probe.uid] = (probe, now, same)
                mine = [each for each in filesystem.answers if each[0] == node]
                if len(mine) > MAX_USERS_ASKED:
                    del filesystem.answers[min(mine, key=lambda each: filesystem.answers[each][1])]

    def views(self, blocked: Iterable[tuple[ProcessView, str]], now: float) -> Iterable[FilesystemView]:
        """All of them, with those of `blocked` (processes and the boot ids of their nodes) that wait on each."""
        here: dict[str, list[ProcessView]] = {}
        for view, boot_id in blocked:
            call = view.process.blocked
            assert call is not None and call.mount is not None
            key = filesystem_key(call.mount, call.device, call.fs_type, boot_id)
            here.setdefault(key, []).append(view)
        for key, filesystem in list(self._known.items()):
            waiting = here.get(key, [])
            hung = any(not probe.responding and same for probe, _, same in filesystem.answers.values())
            if not waiting and not hung and now - filesystem.last_blocked_at > KEPT_WELL_S:
                del self._known[key]
                continue
            yield FilesystemView(
                key=key,
                mount=filesystem.mount,
                blocked=tuple(waiting),
                known_nodes=tuple(sorted(filesystem.nodes)),
                answers=tuple(
                    (node, picked(MountAnswer, probe, age_s=now - at, same_filesystem=same, uid=uid))
                    for (node, uid), (probe, at, same) in sorted(
                        filesystem.answers.items(), key=lambda each: (each[0][0], each[0][1] or -1)
                    )
                ),
            )

    def remember(self, incidents: Iterable[Incident], now: float) -> None:
        """Takes up the filesystems of incidents that an earlier controller left open: they are looked at again."""
        for incident in incidents:
            if incident.subject.startswith("mount:") and incident.mounts:
                key = incident.subject.removeprefix("mount:")
                known = _Filesystem(
                    mount=incident.mounts[0],
                    device=None,
                    boot_id=None,
                    nodes={culprit.node for culprit in incident.culprits if culprit.node},
                    last_blocked_at=now,
                )
                self._known.setdefault(key, known)

    def end(self, subject: str) -> None:
        """The filesystem of `mount:…` is well again: what was answered about it is no evidence for the next time."""
        filesystem = self._known.get(subject.removeprefix("mount:"))
        if filesystem is not None:
            filesystem.nodes.clear()
            filesystem.answers.clear()


def is_local(device: str | None, fs_type: str | None) -> bool:
    """Whether a mount is a disk of its node; GPFS has a device under /dev, too, and is none."""
    if fs_type is not None:
        return fs_type in LOCAL_TYPES
    return device is not None and device.startswith("/dev/")


def filesystem_key(mount: str, device: str | None, fs_type: str | None, boot_id: str) -> str:
    """Names a filesystem so that two nodes share the name only if they share the filesystem. A server's export is the
    same everywhere; a block device (`/dev/sda1`) is the same only under the same kernel."""
    if device is None:
        return mount
    return f"{mount} ({device} of {boot_id[:8]})" if is_local(device, fs_type) else f"{mount} ({device})"
