"""One process as it was last seen, and what is used of /proc/PID/stat and status. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_watchdog.agent.proc.process_facts import JobMember, Key, ProcessFacts

KERNEL_THREAD = 0x00200000  # PF_KTHREAD, linux/sched.h
HANGS = frozenset("DTt")
LASTING_STATES = HANGS | frozenset("ZX")
"""Letters of stat that mean something only if they last (model.Process.state_age_s)."""


@dataclass(frozen=True)
class Stat:
    """What is used of /proc/PID/stat (see proc(5))."""

    comm: str
    state: str
    ppid: int
    flags: int
    cpu_ticks: int
    start_ticks: int
    threads: int = 1


@dataclass(frozen=True)
class Status:
    """What is used of /proc/PID/status."""

    state: str
    uid: int = -1  # The effective one; -1 where it is missing.
    real_uid: int = -1
    has_memory: bool = False  # Kernel threads and zombies have none.
    container_pid: int | None = None  # Its number in its own PID namespace, where that lies below ours.


def parse_stat(text: bytes) -> Stat:
    """The fields of /proc/PID/stat. The name in it may hold anything, brackets and newlines included. Raises
    ValueError."""
    begin, end = text.index(b"("), text.rindex(b")")
    fields = text[end + 2 :].split(b" ", 20)
    try:
        return Stat(
            text[begin + 1 : end].decode(errors="replace"), fields[0].decode(), int(fields[1]), int(fields[6]),
            int(fields[11]) + int(fields[12]), int(fields[19]), int(fields[17]),
        )  # fmt: skip
    except IndexError as error:
        raise ValueError(f"not a line of stat: {text[:80]!r}") from error


def parse_status(text: bytes) -> Status:
    """The fields of /proc/PID/status. The kernel escapes newlines in the name there, so that it can't add lines."""
    text = b"\n" + text
    state, uids, numbers = (_words_of(text, name) for name in (b"\nState:", b"\nUid:", b"\nNSpid:"))
    return Status(
        state=state[0].decode() if state else "",
        uid=int(uids[1]) if len(uids) > 1 else -1,
        real_uid=int(uids[0]) if uids else -1,
        has_memory=b"\nVmSize:" in text,
        container_pid=int(numbers[-1]) if len(numbers) > 1 else None,
    )


def _words_of(text: bytes, name: bytes) -> list[bytes]:
    """What stands in the line that begins with `name`. Of the sixty lines of each new process three are read."""
    begin = text.find(name)
    if begin < 0:
        return []
    begin += len(name)
    end = text.find(b"\n", begin)
    return text[begin : end if end >= 0 else len(text)].split()


def parse_last_pid(loadavg: bytes) -> int:
    """The pid given out last, in /proc/loadavg; 0 where it does not say."""
    words = loadavg.split()
    return int(words[4]) if len(words) == 5 and words[4].isdigit() else 0


NEVER_SWITCHED_TO = frozenset("Dt")
"""States in which a thread is not switched to: those of a rank's main thread are counted in every tick."""


@dataclass
class Entry:
    """One process that was seen: what is known for good, and what it was like in the last tick."""

    known: ProcessFacts
    stat: Stat
    container_pid: int | None = None
    ticks: int = 0
    identified: int = 0
    member: JobMember | None = None
    state_since: float = 0.0  # Since when every look has found this state; meant for LASTING_STATES.
    io_bytes: int | None = None
    switches: int | None = None
    runnable_s: float | None = None
    crowd: bool = False  # One of too many members of a job: looked at in turn (slurm_watchdog.agent.processes.reader).
    _held: tuple[str, int] | None = None
    """State and switches when it was last seen in one of NEVER_SWITCHED_TO; None if the last look found another one."""

    def note_switches(self, now: float) -> None:
        """Who sleeps in D, or is held by a debugger, is not switched to: one that was, between two looks, is in that
        state again and not still."""
        state = self.stat.state
        if state not in NEVER_SWITCHED_TO:
            self._held = None
        elif self.switches is not None:
            if self._held is not None and self._held != (state, self.switches):
                self.state_since = now
            self._held = (state, self.switches)

    @property
    def key(self) -> Key:
        return (self.known.pid, self.known.start_ticks)

    @property
    def has_living_thread(self) -> bool:
        """Whether a thread of it is left. A process that was killed is a zombie as soon as its main thread has
        ended, also while another thread sleeps in a driver and cannot end; stat counts both then (proc(5),
        num_threads; seen with Linux 6.18)."""
        return self.stat.state not in ("Z", "X") or self.stat.threads > 1

    @property
    def is_kernel_thread(self) -> bool:
        return bool(self.stat.flags & KERNEL_THREAD)
