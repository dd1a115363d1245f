"""One process as it was last seen, and what is used of /proc/PID/stat and status. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from slurm_watchdog.knowledge.launchers import step_of_group
from slurm_watchdog.model.observations import Role

_STEPD = re.compile(r"slurmstepd: \[(\d+)(?:\+\d+)?(?:\.([0-9a-z]+))?")


@dataclass(frozen=True)
class JobStep:
    """Job and step ("0", "batch", …), as a control group or slurmstepd names them."""

    job_id: str
    step_id: str | None = None


@dataclass(frozen=True)
class ProcessFacts:
    """What is known of one process for telling where it belongs. `environ` None: not read yet, or not readable."""

    pid: int
    start_ticks: int
    ppid: int
    comm: str
    uid: int  # Its real user.
    cgroup: JobStep | None = None
    environ: Mapping[str, str] | None = None
    exe: str = ""  # File name of its program: `bash` for a script that the kernel lists under the script's own name.
    stepd: JobStep | None = None  # Of a slurmstepd only: the step it looks after.
    denied: bool = False  # Its environment may not be read (another user namespace): its parent's counts.
    own_pid: int | None = None  # Its number in its own PID namespace, where that is another one than the agent's.
    cwd: str = ""  # Working directory of what may hold a rank, when it was identified.
    checkpoint_directories: tuple[str, ...] = ()  # Those that its command line names.
    settings: tuple[tuple[str, str], ...] = ()
    """Of what may hold a rank: the variables that decide how it computes and communicates, for evidence
    alone, secrets masked."""
    foreign: bool = False  # Not an ordinary user's through and through: nothing of it is read, and it is no rank.
    collective_timeout: tuple[float, bool] | None = None
    """Seconds after which its collectives are given up, and whether that is only assumed; see
    knowledge.trainer_options."""


@dataclass(frozen=True)
class JobMember:
    """Where a process belongs."""

    job_id: str
    step_id: str | None
    role: Role
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    left_over: bool = False  # It belongs to an earlier run of the job, which was requeued to this node meanwhile.
    by: str = ""  # How that is known: BY_SLURM, or BY_CLAIM.
    launcher: bool = False  # It has started ranks: it never is one, also when they are gone.


Key = tuple[int, int]  # (pid, start ticks): unique until a reboot.


def parse_cgroup(text: str) -> JobStep | None:
    """Job and step in the text of /proc/PID/cgroup, version 1 or 2; None outside of jobs."""
    groups = (step_of_group(line.split(":", 2)[-1]) for line in text.splitlines() if "/job_" in line)
    places = [JobStep(*group) for group in groups if group is not None]
    return next((place for place in places if place.step_id), places[0] if places else None)


def parse_stepd(cmdline: str) -> JobStep | None:
    """The step that a slurmstepd names in its title: `slurmstepd: [4.0]`, `slurmstepd: [4.batch]`."""
    match = _STEPD.match(cmdline)
    return JobStep(match[1], match[2]) if match else None


def as_slurm_job(environ: dict[str, str]) -> dict[str, str]:
    """What `slurm-watchdog run` has started outside of Slurm is its job, said in Slurm's words."""
    own = environ.get("SLURM_WATCHDOG_JOB_ID", "")
    if own and environ.get("SLURM_JOB_ID", own) == own:
        environ |= {"SLURM_JOB_ID": own, "SLURM_RESTART_COUNT": environ.get("SLURM_WATCHDOG_RESTARTS", "0")}
    return environ


def number_of(environ: Mapping[str, str] | None, name: str) -> int | None:
    text = (environ or {}).get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def restarts_of(process: ProcessFacts) -> int | None:
    """The run that its environment was made for; None where there is none."""
    environ = process.environ or {}
    return (number_of(environ, "SLURM_RESTART_COUNT") or 0) if "SLURM_JOB_ID" in environ else None


KERNEL_THREAD = 0x00200000  # PF_KTHREAD, linux/sched.h
HANGS = frozenset("DTt")
LASTING_STATES = HANGS | frozenset("ZX")  # Letters of stat that mean something only if they last (Process.state_age_s).


class Stat(msgspec.Struct, frozen=True, gc=False):
    """What is used of /proc/PID/stat (see proc(5))."""

    comm: str
    state: str
    ppid: int
    flags: int
    cpu_ticks: int
    start_ticks: int
    threads: int = 1


class Status(msgspec.Struct, frozen=True, gc=False):
    """What is used of /proc/PID/status. It takes no lock that a process could hold."""

    state: str
    uids: tuple[int, ...] = ()  # Real, effective, saved and file-system user; empty where they are missing.
    has_memory: bool = False  # Kernel threads and zombies have none.
    container_pid: int | None = None  # Its number in its own PID namespace, where that lies below ours.
    comm: str = ""
    ppid: int = 0
    threads: int = 1
    switches: int = -1  # How often its main thread gave up a CPU, or lost it; -1 where that is not said.

    @property
    def real_uid(self) -> int:
        return self.uids[0] if self.uids else -1


def parse_stat(text: bytes) -> Stat:
    """The fields of /proc/PID/stat. The name in it may hold brackets and newlines. Raises ValueError."""
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
    name = _line_of(text, b"\nName:\t").replace(b"\\n", b"\n").replace(b"\\\\", b"\\")
    state, numbers = _line_of(text, b"\nState:").split(), _line_of(text, b"\nNSpid:").split()
    ways = [_line_of(text, b"\n%bvoluntary_ctxt_switches:" % kind) for kind in (b"", b"non")]
    return Status(
        state=state[0].decode() if state else "",
        uids=parse_uids(text),
        has_memory=b"\nVmSize:" in text,
        container_pid=int(numbers[-1]) if len(numbers) > 1 else None,
        comm=name.decode(errors="replace"),
        ppid=int(_line_of(text, b"\nPPid:") or 0),
        threads=int(_line_of(text, b"\nThreads:") or 1),
        switches=sum(map(int, ways)) if all(ways) else -1,
    )


def parse_uids(status: bytes) -> tuple[int, ...]:
    """Real, effective, saved and file-system user in the text of /proc/PID/status; empty where they are missing."""
    return tuple(map(int, _line_of(status, b"\nUid:").split()[:4]))


def _line_of(text: bytes, name: bytes) -> bytes:
    """What stands in the line that begins with `name`. Of the sixty lines of a process a few are read."""
    begin = text.find(name)
    if begin < 0:
        return b""
    begin += len(name)
    end = text.find(b"\n", begin)
    return text[begin : end if end >= 0 else len(text)]


def parse_last_pid(loadavg: bytes) -> int:
    """The pid given out last, in /proc/loadavg; 0 where it does not say."""
    words = loadavg.split()
    return int(words[4]) if len(words) == 5 and words[4].isdigit() else 0


@dataclass
class Entry:
    """One process that was seen: what is known for good, and what it was like in the last tick."""

    known: ProcessFacts
    stat: Stat
    ticks: int = 0
    identified: int = 0
    member: JobMember | None = None
    state_since: float = 0.0  # Since when every look has found this state; meant for LASTING_STATES.
    io_bytes: int | None = None
    switches: int | None = None
    runnable_s: float | None = None
    crowd: bool = False  # One of too many members of a job: looked at in turn (slurm_watchdog.agent.processes.reader).
    place: int | None = None  # An open descriptor of its /proc/PID: without it another process may have its number.
    seen_switches: int = -1  # Status.switches at the last look.

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
