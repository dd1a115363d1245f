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
    """One child of one mount."""

    due: float
    mount: str
    place: ProbeTarget
    out: MountProbe | None = None  # What was asked of it and not answered within its deadline.
    write_again: bool = False
    """A write is out, or was until now: as soon as it is back, a write there is tried again."""


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
        self._denied &= wanted.keys()
        planned: set[str] = set()
        for mount, place in wanted.items():
            write = mount in self.write_on
            if not write and mount not in self._denied:  # a look is our own, a write the owner's, in his directory
                place = ProbeTarget(mount, -1, place.device, place.fs_type)
            due = first_due(self.node, mount, self.interval_s, now) if self.stagger else now
            key = _key(mount, place.uid)
            planned.add(key)
            state = self._states.setdefault(key, _State(due, mount, place))
            if state.out is None and not state.write_again:
                state.place = place
                if now >= state.due:
                    self._ask(state, write, now, deadline_s)
        for key, state in list(self._states.items()):
            if state.out is not None:
                self._follow(key, state, now)
            elif state.write_again:
                state.write_again = not self._ask(state, True, now, deadline_s)
            elif key not in planned:
                del self._states[key]
        rows, self._rows = self._rows, []
        return tuple(rows)

    def is_out(self, mount: str, now: float) -> bool:
        """Whether the agent's own look at a mount point was seen to stand in a call that does not return."""
        key = _key(mount, -1)
        return self.probes.hung_since(key, now) is not None and self.probes.is_stuck(key)

    def settled(self, processes: tuple[Process, ...], now: float) -> tuple[Process, ...]:
        """A page fault that may be about several filesystems is about the only one of them that is silent here."""
        return tuple(
            each
            if each.blocked is None or each.blocked.mount is not None or not each.blocked.candidates
            else replace(each, blocked=self._settled(each.blocked, now))
            for each in processes
        )

    def _settled(self, blocked: Blocked, now: float) -> Blocked:
        out = [point for point in blocked.candidates if self.is_out(point, now)]
        state = self._states.get(_key(out[0], -1)) if len(out) == 1 else None
        if state is None:
            return blocked
        return replace(blocked, mount=state.mount, device=state.place.device, fs_type=state.place.fs_type)

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
        state = self._states.get(key) or _State(now, command.mount, ProbeTarget(command.directory, uid))
        state.place = ProbeTarget(command.directory, uid, device, fs_type) if state.out is None else state.place
        since_s = self.probes.hung_since(key, now)
        if since_s is not None:
            then(self._result(command.id, state.out or _silent(state, since_s), key, since_s))
            return True
        asked = self._ask(state, True, now, deadline_s, partial(self._answer, command.id, then))
        if asked:
            self._states[key] = state
        return asked

    # -- one child a mount -------------------------------------------------------------------------------------

    def _ask(
        self, state: _State, write: bool, now: float, deadline_s: float,
        then: Callable[[Answer[MountProbe], MountProbe | None], None] | None = None,
    ) -> bool:  # fmt: skip
        """`then` is given the answer, and the row that it makes."""
        place = state.place
        kind = ProbeDirectory if write or place.uid >= 0 else ProbeMountPoint
        request = kind(directory=place.directory, mount=state.mount, write=write, node=self.node)
        # It is retired as soon as it has answered. One that comes back late has to stay until that was seen:
        # thereby it is distinguished from one that has died.
        done, key = partial(self._apply, state, write, then), _key(state.mount, place.uid)
        if self.probes.ask(key, request, deadline_s, now, done, place.uid, idle_s=IDLE_S) is None:
            return False
        if state.due <= now:
            state.due = next_due(state.due, now, self.interval_s)
        return True

    def _apply(
        self, state: _State, write: bool, then: Callable[[Answer[MountProbe], MountProbe | None], None] | None,
        answer: Answer[MountProbe],
    ) -> None:  # fmt: skip
        if answer.timed_out:  # reported by collect, with its growing time
            error = f"no answer to a {'write' if write else 'look'} in {state.place.directory}"
            row: MountProbe | None = replace(_silent(state, answer.seconds), error=error)
            state.out, state.write_again = row, write
            self._states[answer.key] = state
        else:
            self.probes.retire(answer.key)  # a child costs memory, and the next question comes in half a minute
            found = answer.value
            row = None if found is None or not found.mount else replace(found, uid=_of(state.place.uid))
            if then is None and row is not None and row.uid is None and (row.error or "").startswith(DENIED):
                self._denied.add(state.mount)  # it says nothing that the server would not say about any user
            elif row is not None:
                self._rows.append(row)
        if then is not None:
            then(answer, row)

    def _answer(
        self, command_id: str, then: Callable[[CommandResult], None], answer: Answer[MountProbe], row: MountProbe | None
    ) -> None:
        if row is None:
            error = answer.error or (answer.value.error if answer.value is not None else None)
            then(CommandResult(command_id=command_id, ok=False, error=error))
        else:
            then(self._result(command_id, row, answer.key, answer.seconds if answer.timed_out else None))

    def _result(self, command_id: str, row: MountProbe, key: str, silent_s: float | None) -> CommandResult:
        """The result of a command; `silent_s` is for how long its child has not answered."""
        if silent_s is None:
            return CommandResult(command_id=command_id, ok=True, probe=row)
        if self.probes.is_stuck(key):
            return CommandResult(command_id=command_id, ok=True, probe=replace(row, seconds=silent_s))
        error = f"no answer for {silent_s:.0f} s, and its child was not seen in a system call: unknown"
        return CommandResult(command_id=command_id, ok=False, error=error)

    def _follow(self, key: str, state: _State, now: float) -> None:
        """Adds the row of a child that has not returned, or, once, that it has. What it says when it comes back late is
        not known. If it was to write, the next call has it written once more, so that only a write that was seen to
        succeed ends an outage."""
        since_s, out = self.probes.hung_since(key, now), state.out
        if out is not None and since_s is not None and self.probes.is_stuck(key):
            self._rows.append(replace(out, seconds=since_s))
        elif out is not None and since_s is None:
            state.out, state.due = None, now  # and is asked properly at the next look
            if key in self.probes.names():
                self.probes.retire(key)
                self._rows.append(replace(out, responding=True, seconds=0.0, error=None))
            else:
                state.write_again = False  # the child has ended without an answer: no one knows


def _silent(state: _State, seconds: float) -> MountProbe:
    place = state.place
    return MountProbe(
        mount=state.mount, responding=False, seconds=seconds, device=place.device, fs_type=place.fs_type,
        uid=_of(place.uid),
    )  # fmt: skip


def _key(mount: str, uid: int) -> str:
    return f"probe:{mount}" if uid < 0 else f"probe:{mount}:{uid}"


def _of(uid: int) -> int | None:
    return uid if uid >= 0 else None
