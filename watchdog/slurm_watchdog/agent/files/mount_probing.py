"""The filesystems that jobs use: each is asked every so often, by one disposable child of its own, whether it answers.

The look on the grid is the agent's own user's, at the mount point itself, in the child `probe:MOUNT`: no user has a
hand in it. What has to be a user (a write, or a look where no one else may go) is done by `probe:MOUNT:UID`, and its
word is that user's alone (MountProbe.uid). A child ends as soon as it has answered; one that does not come back is
left. Only one that was seen to stand in a call that does not return says that the mount does not answer; one that was
stopped, killed or starved says nothing. Mounts are the node's own: a path that exists only in the mount namespace of a
container (`Blocked.mount` may be such a one) is not known here, and the answer then says where it lies instead.

Probing says nothing about what it did not touch: a frozen filesystem answers a look, only a write (`wrote`) shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from slurm_watchdog.agent.children.children import IDLE_S, Answer, Children
from slurm_watchdog.agent.children.requests import ProbeDirectory, ProbeMountPoint
from slurm_watchdog.base.loop import next_due, share_of
from slurm_watchdog.base.mounts import NOT_PROBED, Mount, mount_of
from slurm_watchdog.model.observations import Blocked, MountProbe, Process
from slurm_watchdog.model.protocol import CommandResult, ProbeMount

DENIED = "EACCES"
MAX_MOUNTS = 16  # Of a node that are probed; jobs have been seen to use five (home, scratch, projects, software, disk).


@dataclass(frozen=True)
class ProbeTarget:
    """Where on a mount to ask, and as which user."""

    directory: str
    uid: int = -1  # -1: the agent's own user.
    device: str | None = None
    fs_type: str | None = None


def wanted_mounts(
    places: Iterable[tuple[str, int]], mounts: Iterable[Mount], always: Collection[str] = ()
) -> dict[str, ProbeTarget]:
    """What to probe: of the directories that jobs use, as (path, uid), the first on each mount, by mount point. Left
    out is what has no server that could fail (NOT_PROBED), and `/`: the agent itself lies there, and would not be there
    to tell; unless the mount point is in `always`, as those are that are to be written to. An autofs that has nothing
    mounted is left out in any case, and what an ordinary user serves (FUSE). At most MAX_MOUNTS."""
    table = tuple(mounts)
    wanted: dict[str, ProbeTarget] = {}
    for path, uid in places:
        mount = mount_of(path, table) if path.startswith("/") else None
        if mount is None or mount.point in wanted or mount.fs_type == "autofs" or mount.owner is not None:
            continue
        if mount.point not in always and (mount.point == "/" or mount.fs_type in NOT_PROBED):
            continue
        if len(wanted) == MAX_MOUNTS:
            break
        wanted[mount.point] = ProbeTarget(path, uid, mount.device, mount.fs_type)
    return wanted


def first_due(node: str, mount: str, interval_s: float, now: float) -> float:
    """When a mount is probed first: spread over the interval, so that a cluster does not ask all at once."""
    return now + interval_s * share_of(f"{node} {mount}")


@dataclass
class _State:
    """One child of one mount. `out` is what was asked of the child that has not answered within its deadline."""

    due: float
    mount: str
    wanted: ProbeTarget
    out: MountProbe | None = None
    writing: ProbeTarget | None = None
    """Where it was to write that is out, or was out until now: as soon as it is back, a write there is tried again."""


@dataclass
class MountProber:
    """Who is probed when, and what came of it. With `stagger` off (`--once`) a new mount is probed at once."""

    probes: Children
    node: str
    interval_s: float
    write_on: frozenset[str] = frozenset()
    stagger: bool = True
    _states: dict[str, _State] = field(default_factory=dict)
    _rows: list[MountProbe] = field(default_factory=list)
    _denied: set[str] = field(default_factory=set)  # Where the agent's own user may not look.

    def __post_init__(self) -> None:
        self.write_on = frozenset(map(os.path.normpath, self.write_on))  # as the kernel names mount points

    def collect(self, now: float, deadline_s: float, wanted: Mapping[str, ProbeTarget]) -> tuple[MountProbe, ...]:
        """Asks where it is time to, and returns the answers since the last call and a row for each that is overdue.
        Never waits: what is asked in this call is answered in a later one. `wanted` is by mount point."""
        planned = {mount: self._as_whom(mount, place) for mount, place in wanted.items()}
        for mount, place in planned.items():
            due = first_due(self.node, mount, self.interval_s, now) if self.stagger else now
            state = self._states.setdefault(_key(mount, place.uid), _State(due, mount, place))
            state.wanted = place
            if now >= state.due and state.out is None and state.writing is None:
                self._ask(mount, place, mount in self.write_on, now, deadline_s, self._apply_periodic)
        for state in list(self._states.values()):
            if state.writing is not None and state.out is None:
                place = state.writing
                if self._ask(state.mount, place, True, now, deadline_s, self._apply_periodic):
                    state.writing = None
        overdue = [row for key in list(self._states) if (row := self._overdue(key, now)) is not None]
        keys = {_key(mount, place.uid) for mount, place in planned.items()}
        for key in [
            key
            for key, state in self._states.items()
            if key not in keys and state.out is None and state.writing is None
        ]:
            del self._states[key]
        self._denied &= wanted.keys()
        rows, self._rows = self._rows, []
        return (*rows, *overdue)

    def is_out(self, mount: str, now: float) -> bool:
        """Whether the agent's own look at a mount point was seen to stand in a call that does not return."""
        key = _key(mount, -1)
        return self.probes.hung_since(key, now) is not None and self.probes.is_stuck(key)

    def settled(self, processes: tuple[Process, ...], now: float) -> tuple[Process, ...]:
        """A page fault that may be about several filesystems is about the only one of them that is silent here."""
        return tuple(
            each
            if each.blocked is None or each.blocked.mount is not None or not each.blocked.candidates
            else self._settle(each, each.blocked, now)
            for each in processes
        )

    def _settle(self, process: Process, blocked: Blocked, now: float) -> Process:
        out = [point for point in blocked.candidates if self.is_out(point, now)]
        state = self._states.get(_key(out[0], -1)) if len(out) == 1 else None
        if state is None:
            return process
        place = state.wanted
        found = replace(blocked, mount=state.mount, device=place.device, fs_type=place.fs_type)
        return replace(process, blocked=found)

    def _as_whom(self, mount: str, place: ProbeTarget) -> ProbeTarget:
        """A look is our own, at the mount point, where we may; a write is the owner's, in a directory of his."""
        if mount in self.write_on or mount in self._denied:
            return place
        return ProbeTarget(mount, -1, place.device, place.fs_type)

    def command(
        self, command: ProbeMount, now: float, deadline_s: float, uid: int, device: str | None,
        then: Callable[[CommandResult], None], fs_type: str | None = None,
    ) -> bool:  # fmt: skip
        """Writes and reads back on the command's mount, as `uid`. False: the child is busy, try again. `then` gets the
        result, which is ok if the mount's state is known, and that includes: it does not answer. A mount that is stuck
        already is not asked again."""
        if self.is_out(command.mount, now):
            uid = -1  # it is known already, and by no one's child
        key = _key(command.mount, uid)
        state = self._states.get(key)
        since_s = self.probes.hung_since(key, now)
        if since_s is not None and not self.probes.is_stuck(key):
            then(CommandResult(command_id=command.id, ok=False, error=_not_known(since_s)))
            return True
        if since_s is not None:
            out = state.out if state is not None else None
            row = out or MountProbe(mount=command.mount, responding=False, seconds=since_s, device=device, uid=_of(uid))
            row = replace(row, seconds=since_s)
            then(CommandResult(command_id=command.id, ok=True, probe=row))
            return True
        place = ProbeTarget(command.directory, uid, device, fs_type)
        take = partial(self._apply_command, command.id, then)
        return self._ask(command.mount, place, True, now, deadline_s, take)

    # -- one child a mount -------------------------------------------------------------------------------------

    def _ask(
        self, mount: str, place: ProbeTarget, write: bool, now: float, deadline_s: float,
        then: Callable[[str, ProbeTarget, bool, Answer[MountProbe]], None],
    ) -> bool:  # fmt: skip
        kind = ProbeDirectory if write or place.uid >= 0 else ProbeMountPoint
        request = kind(directory=place.directory, mount=mount, write=write, node=self.node)
        # It is retired as soon as it has answered. One that comes back late has to stay until that was seen:
        # thereby it is distinguished from one that has died.
        key = _key(mount, place.uid)
        done = partial(then, mount, place, write)
        asked = self.probes.ask(key, request, deadline_s, now, done, place.uid, idle_s=IDLE_S)
        if asked is None:
            return False
        state = self._states.setdefault(key, _State(now, mount, place))
        if state.due <= now:
            state.due = next_due(state.due, now, self.interval_s)
        return True

    def _apply_periodic(self, mount: str, place: ProbeTarget, write: bool, answer: Answer[MountProbe]) -> None:
        row = self._row(mount, place, write, answer)
        if row is not None and place.uid < 0 and (row.error or "").startswith(DENIED):
            self._denied.add(mount)  # it says nothing that the server would not say about any user
        elif row is not None and not answer.timed_out:
            self._rows.append(row)  # one that is out is reported by collect, with its growing time

    def _apply_command(
        self, command_id: str, then: Callable[[CommandResult], None], mount: str, place: ProbeTarget, write: bool,
        answer: Answer[MountProbe],
    ) -> None:  # fmt: skip
        row = self._row(mount, place, write, answer)
        if row is None:
            error = answer.error or (answer.value.error if answer.value is not None else None)
            then(CommandResult(command_id=command_id, ok=False, error=error))
            return
        if answer.timed_out and not self.probes.is_stuck(answer.key):
            then(CommandResult(command_id=command_id, ok=False, error=_not_known(answer.seconds)))
            return
        if not answer.timed_out:
            self._rows.append(row)
        then(CommandResult(command_id=command_id, ok=True, probe=row))

    def _row(self, mount: str, place: ProbeTarget, write: bool, answer: Answer[MountProbe]) -> MountProbe | None:
        """What the answer says about the mount; None if nothing: the child failed, or the mount is another one here."""
        if answer.timed_out:
            what = "write" if write else "look"
            row = MountProbe(
                mount=mount,
                responding=False,
                seconds=answer.seconds,
                error=f"no answer to a {what} in {place.directory}",
                device=place.device,
                fs_type=place.fs_type,
                uid=_of(place.uid),
            )
            state = self._states.setdefault(answer.key, _State(0.0, mount, place))
            state.out, state.writing = row, place if write else None
            return row
        self.probes.retire(answer.key)  # a child costs memory, and the next question comes in half a minute
        found = answer.value
        return None if found is None or not found.mount else replace(found, uid=_of(place.uid))

    def _overdue(self, key: str, now: float) -> MountProbe | None:
        """The row of a child that has not returned, or, once, that it has; None if there is none to tell of. What it
        says when it comes back late is not known. If it was to write, the next call has it written once more, so that
        only a write that was seen to succeed ends an outage."""
        state = self._states[key]
        if state.out is None:
            return None
        since_s = self.probes.hung_since(key, now)
        if since_s is not None and not self.probes.is_stuck(key):
            return None
        if since_s is not None:
            return replace(state.out, seconds=since_s)
        out, state.out, state.due = state.out, None, now  # and is asked properly at the next look
        if key not in self.probes.names():
            state.writing = None
            return None  # the child has ended without an answer: no one knows
        self.probes.retire(key)
        return replace(out, responding=True, seconds=0.0, error=None)


def _key(mount: str, uid: int) -> str:
    return f"probe:{mount}" if uid < 0 else f"probe:{mount}:{uid}"


def _of(uid: int) -> int | None:
    return uid if uid >= 0 else None


def _not_known(seconds: float) -> str:
    return f"no answer for {seconds:.0f} s, and its child was not seen in a system call: unknown"
