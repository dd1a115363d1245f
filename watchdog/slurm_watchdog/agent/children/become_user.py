"""Turning a child into another user, for good and with nothing left of what it could do before that it does not need;
and whose a process is: what is not one ordinary user's, through and through, is not looked into.

An agent with a few capabilities would keep them through the change of its user: so they are given up by name, and the
kernel is asked afterwards. A set-user-id program, or one whose rights were changed under way, is another's: its users
differ, or the owner of its /proc/PID.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import struct
from collections.abc import Iterable
from enum import Enum

from slurm_watchdog.agent.proc.entry import parse_uids
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.base.descriptors import describe

CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
CAP_SETUID = 7  # linux/capability.h
CAP_SYS_PTRACE = 19
CAP_LAST = 63  # More than any kernel has: dropping one that it does not know is refused, which is fine.
PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 8, 24, 38, 47  # linux/prctl.h
PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
LEAST_UID = 100  # Below are the users that every Linux has from the start (LSB: 0 to 99 are given by the distribution).
MAX_UID = 2**32 - 2  # The last number means `no one in particular` to the kernel (setresuid(2)).
NOBODY = frozenset({65534, 65535})
"""`no one`, as which servers and squashed NFS clients run, and what systemd never gives to a user
(systemd.io, Users, Groups, UIDs)."""


def parse_min_uid(text: str) -> int:
    """UID_MIN in the text of /etc/login.defs (login.defs(5)); 1000 where that says nothing sensible."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["UID_MIN"] and len(words) > 1 and words[1].isdecimal() and int(words[1]) >= LEAST_UID:
            return int(words[1])
    return 1000


def read_min_uid() -> int:
    """The first number of an ordinary user on this machine. Those below are the system's."""
    try:
        with open("/etc/login.defs", encoding="utf-8", errors="replace") as file:
            return parse_min_uid(file.read(1 << 16))
    except OSError:
        return parse_min_uid("")


def capabilities() -> int:
    """The effective capabilities of this process, a bit each; 0 where they cannot be read."""
    try:
        with open("/proc/self/status", "rb") as file:
            return parse_capabilities(file.read())
    except (OSError, ValueError):
        return 0


def parse_capabilities(status: bytes) -> int:
    """CapEff in the text of /proc/PID/status, 0 where it is missing. Raises ValueError."""
    lines = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    return int(lines.get(b"CapEff", b"0"), 16)


NEEDED = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": CAP_SETUID, "CAP_SYS_PTRACE": CAP_SYS_PTRACE, "CAP_SYSLOG": 34}
"""What an agent needs to see and serve all users of its node (linux/capability.h): its children become them, read what
their processes do, and are ended; it reads the kernel's log. No child keeps more of it than CAP_SYS_PTRACE."""


def why_too_mighty() -> str | None:
    """What this process has beyond what an agent needs, the beginning of a sentence; None if nothing."""
    if os.geteuid() == 0 or os.getuid() == 0:
        return "this process is root's"
    more = capabilities() & ~sum(1 << bit for bit in NEEDED.values())
    return f"this process has more capabilities than {', '.join(NEEDED)} ({more:#x})" if more else None


class Kind(Enum):
    """What a child may do."""

    OWN = "the agent itself"  # Stays the agent's user, without any capability: devices, tables of the kernel.
    PROCESSES = "processes of a user"  # Is the user, may look into all that is his (CAP_SYS_PTRACE); opens no file.
    FILES = "files of a user"  # Is the user.


def may_become_others() -> bool:
    """Whether this process can turn its children into other users."""
    return bool(capabilities() >> CAP_SETUID & 1)


def read_overflow_uids() -> frozenset[int]:
    """What the kernel shows for users that it cannot name (proc(5)), such as another namespace's."""
    found = set()
    for name in ("kernel/overflowuid", "fs/overflowuid"):
        try:
            with open(f"/proc/sys/{name}", encoding="ascii") as file:
                found.add(int(file.read()))
        except (OSError, ValueError):
            continue
    return frozenset(found)


def parse_subordinates(text: str) -> tuple[range, ...]:
    """The numbers that users may give to processes of theirs, in the text of /etc/subuid (subuid(5))."""
    rows = (line.split(":") for line in text.splitlines())
    return tuple(
        range(int(row[1]), int(row[1]) + int(row[2]))
        for row in rows
        if len(row) == 3 and row[1].isdecimal() and row[2].isdecimal()
    )


def read_subordinates() -> tuple[range, ...]:
    """Those of this machine. One user would be as many as he has of them, each with children of his own."""
    try:
        with open("/etc/subuid", encoding="utf-8", errors="replace") as file:
            return parse_subordinates(file.read(1 << 20))
    except OSError:
        return ()


MIN_UID = read_min_uid()
SUBORDINATES = read_subordinates()
_LIBC = ctypes.CDLL(None, use_errno=True)
NO_USERS = NOBODY | read_overflow_uids()


_alone: list[int] = []  # The user of an agent that serves no one else; see serve_alone.


def serve_alone(uid: int) -> None:
    """From now on this process, and every child forked after this, reads, writes and signals as `uid` and as no one
    else: an agent of one person's own (`slurm-watchdog run`, `attach`). Root may be that person, in a container that
    has no other user: what is root's own is no more than root has already, and no one else's claim counts."""
    _alone[:] = [uid]


def refusal_as(uid: int) -> str | None:
    """Why nothing is read, written or signalled as `uid`; None for an ordinary user. The one place that says."""
    if _alone:
        return None if uid in _alone else f"this watchdog serves uid {_alone[0]} alone, and uid {uid} is another user"
    if MIN_UID <= uid <= MAX_UID and uid not in NO_USERS and not any(uid in each for each in SUBORDINATES):
        return None
    return f"uid {uid} is not an ordinary user: nothing is read, written or signalled as it"


def refusal_to_become(uid: int) -> str | None:
    """Why no child of this process becomes `uid`; None if one can."""
    if not may_become_others() and uid == os.geteuid():
        return None
    if (refusal := refusal_as(uid)) is not None or _alone:
        return refusal
    if may_become_others():
        return None
    return f"the agent runs as uid {os.geteuid()} and cannot read or write as uid {uid}"


def become(uid: int, kind: Kind) -> str | None:
    """Turns this process into user `uid` (-1: it stays who it is) for good, with no more capabilities than a child of
    this kind needs; returns why it can't, None if it did. An agent that serves one person alone keeps what it has."""
    if uid >= 0 and (refusal := refusal_to_become(uid)) is not None:
        return refusal
    if _alone or not may_become_others():
        return None
    kept = CAP_SYS_PTRACE if kind is Kind.PROCESSES and uid >= 0 else None
    expected = capabilities() & (0 if kept is None else 1 << kept)
    try:
        if uid >= 0:
            _change_user(uid)
        limit_capabilities(expected)
    except OSError as error:
        return f"cannot become uid {uid}: {describe(error)}"
    if (uid >= 0 and 0 in os.getresuid()) or capabilities() != expected:
        return f"cannot become uid {uid}: the kernel left it other rights"
    return None


def _change_user(uid: int) -> None:
    try:
        entry = pwd.getpwuid(uid)
        gid, groups = entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:
        gid, groups = uid, [uid]
    _LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def keep_capabilities(kept: Iterable[int]) -> None:
    """Of what this process may do, at most `kept` is left, here and in the programs that it becomes by exec, for good:
    in the permitted, inheritable and ambient sets, in the bounding set where the kernel lets us (CAP_SETPCAP), and no
    program gives more back. Raises OSError."""
    limit_capabilities(sum(1 << each for each in kept) & capabilities())


def limit_capabilities(mask: int) -> None:
    """The same, given as a bit each, of those that are permitted. Raises OSError."""
    _LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for each in range(CAP_LAST):
        if not mask >> each & 1:
            _LIBC.prctl(PR_CAPBSET_DROP, each, 0, 0, 0)
    _LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _set_capabilities(mask)
    for each in range(CAP_LAST):
        if mask >> each & 1:
            _LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, each, 0, 0)


def _set_capabilities(mask: int) -> None:
    """Effective, permitted and inheritable ones; ambient ones go with them. Raises OSError."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION_3, 0))
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("=6I", low, low, low, high, high, high)
    if _LIBC.capset(header, ctypes.create_string_buffer(data, 24)) != 0:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem))


def refusal_to_look(uids: tuple[int, ...], shown_uid: int, own: int) -> str | None:
    """Why a process with these users is not looked into as `own`; None if it is his through and through. `shown_uid` is
    the owner of its /proc/PID/stat: root where it may not be dumped."""
    if not uids:
        return "whose process it is cannot be read"
    if {*uids, shown_uid} != {uids[0]}:
        shown = "/".join(str(uid) for uid in dict.fromkeys((*uids, shown_uid)))
        return f"it is a set-user-id program, or may not be looked into (uid {shown})"
    return None if uids[0] == own else f"it is uid {uids[0]}'s, not uid {own}'s"


def read_refusal(pid: int, own: int) -> str | None:
    """Why a living process is not looked into as `own`, None if it may be. Never blocks: the owner of `stat`, which is
    not read, says whether it may be dumped; that of the directory is its user in any case (task_dump_owner,
    fs/proc/base.c). Raises OSError if it has ended."""
    uids = parse_uids(read_file(f"/proc/{pid}/status"))
    return refusal_to_look(uids, os.stat(f"/proc/{pid}/stat").st_uid, own)


def check_process(pid: int, own: int) -> None:
    """Raises PermissionError with the reason if it is not to be looked into, another OSError if it is gone."""
    if (refusal := read_refusal(pid, own)) is not None:
        raise PermissionError(errno.EPERM, f"process {pid}: {refusal}")
