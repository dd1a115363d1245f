"""Lines of /proc as the kernel writes them, and what makes a thread count as blocked."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from slurm_watchdog.agent.children.become_user import CAP_SYS_PTRACE, parse_capabilities
from slurm_watchdog.agent.children.requests import ReadTitles
from slurm_watchdog.agent.proc.blocked_calls import MIN_AT_ONCE, ROUND_TICKS, BlockedThreads
from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts, Stat, Status, parse_last_pid, parse_stat, parse_status
from slurm_watchdog.agent.proc.files import is_the_kernels, parse_runnable_s
from slurm_watchdog.agent.proc.system_call import (
    SeenCall,
    SystemCall,
    is_storage,
    is_waiting_for_storage,
    parse_finished_calls,
    parse_io_bytes,
    parse_switches,
    parse_syscall,
    see_call,
)
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.identify import parse_environ
from slurm_watchdog.agent.processes.open_mounts import parse_fd_flags
from slurm_watchdog.base.mounts import Mount, mount_of, parse_mountinfo
from slurm_watchdog.knowledge.syscalls import (
    AARCH64,
    FD_ARGUMENT,
    IDLE_CALLS,
    PATH_ARGUMENT,
    X86_64,
    idle_numbers,
    name_of,
)
from tests.builders.requests import answer_to

STAT = b"12174 (tmux: ) (x) R) D 11998 11998 8853 0 -1 4194304 98 0 0 0 7 5 0 0 20 0 1 0 218270 3133440 380 18446744073709551615 0 0 0\n"
IO = b"rchar: 100\nwchar: 20\nsyscr: 3\nsyscw: 4\nread_bytes: 0\nwrite_bytes: 0\ncancelled_write_bytes: 0\n"
STATUS = b"Name:\tcat\nState:\tD (disk sleep)\nNSpid:\t700\t7\nVmSize:\t 12 kB\nUid:\t1000\t1001\t1000\t1000\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t3\n"
WRITE = b"1 0x3 0x7f6ee25d8000 0x20 0x0 0xffffffff 0x0 0x7ffd4569ac88 0x7f6ee27542ad\n"


def test_stat_with_brackets_in_the_name() -> None:
    assert parse_stat(STAT) == Stat("tmux: ) (x) R", "D", 11998, 4194304, 12, 218270, 1)


def test_a_truncated_stat_is_refused() -> None:
    with pytest.raises(ValueError, match="not a line of stat"):
        parse_stat(b"1 (x) R 1")


def test_figures_of_io_and_status() -> None:
    assert parse_io_bytes(IO) == 120
    assert parse_finished_calls(IO) == 7
    assert parse_switches(STATUS) == 17
    assert parse_switches(STATUS, b"non") == 3
    assert parse_status(STATUS) == Status(
        "D", (1000, 1001, 1000, 1000), has_memory=True, container_pid=7, comm="cat", switches=20
    )


def test_how_long_a_main_thread_has_run_or_was_ready_to() -> None:
    assert parse_runnable_s(b"1961303219 3552453 412\n") == pytest.approx(1.964855672)
    for text in (b"", b"7", b"a b c"):
        with pytest.raises(ValueError):
            parse_runnable_s(text)


def test_a_kernel_thread_has_no_memory_and_a_process_of_this_namespace_no_other_number() -> None:
    text = b"Name:\tkworker/0:1\nState:\tI (idle)\nPid:\t42\nNSpid:\t42\nUid:\t0\t0\t0\t0\n"
    assert parse_status(text) == Status("I", (0, 0, 0, 0), comm="kworker/0:1")
    assert parse_status(b"") == Status("")


def test_who_may_look_into_every_process() -> None:
    assert parse_capabilities(b"Name:\tx\nCapEff:\t000001fffeffffff\n") >> CAP_SYS_PTRACE & 1
    assert not parse_capabilities(b"CapEff:\t000001fffef7ffff\n") >> CAP_SYS_PTRACE & 1
    assert not parse_capabilities(b"CapEff:\t0000000000000000\n")
    assert not parse_capabilities(b"")


def test_the_pid_given_out_last() -> None:
    assert parse_last_pid(b"0.83 1.10 1.39 2/204 31337\n") == 31337
    assert parse_last_pid(b"0.83 1.10 1.39\n") == 0


def test_a_mount_point_with_odd_letters_makes_no_line_of_its_own() -> None:
    point = "/home/a\x0c\x85\u2028b"
    (mount,) = parse_mountinfo(f"36 35 98:0 / {point} rw - fuse.sshfs host: rw\n")
    assert mount == Mount(point, "fuse.sshfs", "host:")


def as_user(uid: int, do: Callable[[], Any]) -> Any:
    """What `do` gives in a process of this user's."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresuid(uid, uid, uid)
        os.write(writer, json.dumps(do()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        answer = json.load(file)
    os.waitpid(child, 0)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: processes of two users")
def test_only_roots_slurmstepd_is_believed_and_by_anybody() -> None:
    program = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'slurmstepd'); print(flush=True); time.sleep(60)"
    argv = ["slurmstepd: [4.0]", "-S", "-c", program]
    forged, real = (
        subprocess.Popen(argv, executable="/usr/bin/python3", stdout=subprocess.PIPE, user=each)
        for each in (65534, None)
    )
    try:
        for process in (forged, real):
            assert process.stdout is not None
            process.stdout.readline()
        request = ReadTitles([forged.pid, real.pid])
        titles = as_user(64998, lambda: [each.title for each in answer_to(request)])
        assert titles == ["", "slurmstepd: [4.0]"]
    finally:
        for process in (forged, real):
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("name", sorted(IDLE_CALLS))
def test_an_idle_call_has_a_number_somewhere_and_concerns_no_file(name: str) -> None:
    assert name in X86_64.values() or name in AARCH64.values()
    assert name not in FD_ARGUMENT
    assert name not in PATH_ARGUMENT
    assert b"202" in idle_numbers("x86_64")  # futex


def test_a_line_of_syscall() -> None:
    call = parse_syscall(WRITE)
    assert call is not None
    assert (call.number, call.args[0]) == (1, 3)
    assert parse_syscall(b"running\n") is None
    assert parse_syscall(b"-1 0x7ffd 0x7f6e\n") == SystemCall(-1, (0x7FFD, 0x7F6E))


@pytest.mark.parametrize(
    ("table", "number", "name"),
    [
        (X86_64, 0, "read"), (X86_64, 1, "write"), (X86_64, 2, "open"), (X86_64, 74, "fsync"), (X86_64, 257, "openat"),
        (X86_64, 262, "newfstatat"), (X86_64, 332, "statx"), (X86_64, 439, "faccessat2"),
        (AARCH64, 63, "read"), (AARCH64, 64, "write"), (AARCH64, 56, "openat"), (AARCH64, 82, "fsync"), (AARCH64, 291, "statx"),
        (AARCH64, 79, "fstatat"), (AARCH64, 276, "renameat2"), (AARCH64, 439, "faccessat2"),
    ],
)  # fmt: skip
def test_numbers_of_system_calls(table: dict[int, str], number: int, name: str) -> None:
    assert table[number] == name


def test_an_unknown_call_keeps_its_number() -> None:
    assert name_of(9999, "x86_64") == "9999"
    assert name_of(1, "riscv64") == "1"


MOUNTINFO = (
    "21 1 8:1 / / rw - ext4 /dev/root rw\n"
    "30 21 7:0 / /shared rw,relatime shared:5 - ext4 /dev/loop0 rw\n"
    "31 21 0:50 /sub /mnt/a\\040b rw - nfs4 server:/export\\011x rw,vers=4.2\n"
    "32 30 0:51 / /shared/deep rw - lustre 10.0.0.1@o2ib:/fs rw\n"
    "33 21 0:52 / /shared rw - tmpfs tmpfs rw\n"
    "broken\n"
)


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/etc/passwd", Mount("/", "ext4", "/dev/root")),
        ("/shared/deep/x.log", Mount("/shared/deep", "lustre", "10.0.0.1@o2ib:/fs")),
        ("/mnt/a b/c", Mount("/mnt/a b", "nfs4", "server:/export\tx")),
        ("/shared/x", Mount("/shared", "tmpfs", "tmpfs")),
        ("/shared2/x", Mount("/", "ext4", "/dev/root")),
        ("/shared", Mount("/shared", "tmpfs", "tmpfs")),
    ],
)
def test_the_mount_of_a_path_is_the_longest_and_last(path: str, mount: Mount) -> None:
    assert mount_of(path, parse_mountinfo(MOUNTINFO)) == mount


def test_of_the_environment_only_what_is_needed_is_kept() -> None:
    data = b"RANK=3\0SECRET=x\0RANK=4\0SLURM_JOB_ID=7\0broken\0"
    assert parse_environ(data) == {"RANK": "3", "SLURM_JOB_ID": "7"}


def test_flags_of_a_descriptor_are_octal() -> None:
    flags = parse_fd_flags(b"pos:\t0\nflags:\t0102001\nmnt_id:\t30\n")
    assert flags & os.O_APPEND
    assert flags & os.O_WRONLY


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/shared/x.log", True), ("/shared/x (deleted)", True), ("pipe:[1]", False), ("socket:[1]", False),
        ("anon_inode:[eventpoll]", False), ("/dev/nvidia0", False), ("/dev/shm/x", False), ("/memfd:x (deleted)", False),
        ("/proc/1/stat", False), (None, False),
    ],
)  # fmt: skip
def test_what_is_a_file_on_a_filesystem(path: str | None, expected: bool) -> None:
    assert is_storage(path) is expected


@pytest.mark.parametrize(
    ("state", "syscall", "wchan", "path", "expected"),
    [
        ("D", "write", "percpu_rwsem_wait", "/shared/x.log", True),
        ("D", None, "folio_wait_bit_common", None, True),
        ("S", "write", "request_wait_answer", "/fuse/x.log", True),
        ("S", "read", "pipe_read", "/shared/fifo", False),
        ("S", "openat", "wait_for_partner", None, False),
        ("S", "flock", "locks_lock_inode_wait", "/shared/lock", False),
        ("S", "fcntl", "posix_lock_inode_wait", "/shared/lock", False),
        ("D", "flock", "rpc_wait_bit_killable", "/shared/lock", True),
        ("S", "read", "wait_woken", "/dev/pts/0", False),
        ("S", "read", "unix_stream_read_generic", "socket:[5]", False),
        ("S", "openat", "request_wait_answer", None, True),
        ("S", "futex", "futex_do_wait", None, False),
    ],
)
def test_who_may_wait_for_a_filesystem(
    state: str, syscall: str | None, wchan: str, path: str | None, expected: bool
) -> None:
    assert is_waiting_for_storage(SeenCall("", state, wchan, syscall, path)) is expected


class Thread:
    """A thread as /proc shows it, for a reader that reads nothing else."""

    def __init__(self) -> None:
        self.state, self.line, self.switches, self.calls, self.cpu_ticks = "D", WRITE, 5, 7, 100

    def read(self, name: str) -> bytes:
        stat = f"{os.getpid()} (x) {self.state} 1 1 1 0 -1 0 0 0 0 0 {self.cpu_ticks} 0 0 0 20 0 1 0 7 0 0\n"
        return {
            "stat": stat.encode(),
            "syscall": self.line,
            "wchan": b"percpu_rwsem_wait",
            "status": f"Name:\tx\nvoluntary_ctxt_switches:\t{self.switches}\n".encode(),
            "io": f"syscr: {self.calls}\nsyscw: 0\n".encode(),
        }[name]

    def see(self, is_main: bool = True) -> SeenCall | None:
        return see_call(self.read, lambda number: None, is_main, "x86_64")


class Looks:
    """Looks at one thread of this process (which has the main thread's number), a second apart."""

    def __init__(self) -> None:
        self.thread = Thread()
        self.threads = BlockedThreads()
        self.now = 100.0

    def look(self) -> float | None:
        """One look; how long the thread counts as blocked, None if it does not."""
        self.now += 1
        asked = self.threads.wanted([(7, 7, 1)], [(7, 7)], ())
        self.threads.take(asked, {(7, 7): self.thread.see()}, self.now)
        found = self.threads.blocked()
        return self.now - next(iter(found.values())).first_at if found else None


def test_the_same_call_in_two_looks_counts_from_the_first() -> None:
    looks = Looks()
    assert [looks.look() for _ in range(4)] == [None, 1.0, 2.0, 3.0]


def test_a_healthy_process_that_flickers_in_d_is_never_blocked() -> None:
    looks = Looks()
    for _ in range(10):
        looks.thread.switches += 3
        looks.thread.calls += 1
        assert looks.look() is None


def test_a_wait_that_wakes_up_by_a_timer_is_still_the_same_call() -> None:
    looks = Looks()
    looks.look()
    for _ in range(3):
        looks.thread.switches += 5
        assert looks.look() is not None


def test_a_call_that_computes_is_not_blocked() -> None:
    looks = Looks()
    for _ in range(5):
        looks.thread.switches += 5
        looks.thread.cpu_ticks += 30
        assert looks.look() is None


def test_another_call_begins_anew() -> None:
    looks = Looks()
    assert [looks.look(), looks.look()] == [None, 1.0]
    looks.thread.line = WRITE.replace(b"0x20", b"0x21")
    assert [looks.look(), looks.look()] == [None, 1.0]


def test_leaving_the_call_ends_it() -> None:
    looks = Looks()
    assert [looks.look(), looks.look()] == [None, 1.0]
    looks.thread.state = "R"
    assert looks.look() is None
    assert not looks.threads.tracks


FUTEX = b"202 0x7f 0x80 0x0 0x0 0x0 0x0 0x7ffd 0x7f6e\n"


class Crowd:
    """Processes with many threads, all in a futex but those in `stuck`; counts who is looked at."""

    def __init__(self, processes: dict[int, int]) -> None:
        self.processes = processes
        self.stuck: set[int] = set()
        self.threads = BlockedThreads(self.list_threads)
        self.now = 0.0

    def list_threads(self, pid: int) -> list[int]:
        return list(range(pid, pid + self.processes[pid]))

    def see(self, pid: int, thread: int) -> SeenCall | None:
        looked = Thread()
        if thread not in self.stuck:
            looked.state, looked.line = "S", FUTEX
        return looked.see(is_main=pid == thread)

    def tick(self, causes: frozenset[int] = frozenset()) -> list[int]:
        """The threads that were looked at in one tick."""
        self.now += 5.0
        processes = [(pid, 7, count) for pid, count in self.processes.items()]
        mains = [(pid, 7) for pid in self.processes]
        asked = self.threads.wanted(processes, mains, {(pid, 7) for pid in causes})
        self.threads.take(asked, {(pid, thread): self.see(pid, thread) for pid, _, thread in asked}, self.now)
        return [thread for _, _, thread in asked]

    def blocked(self) -> set[int]:
        return {thread for _, _, thread in self.threads.blocked()}


def test_every_thread_has_its_turn_once_a_round_and_no_tick_has_to_look_at_all() -> None:
    crowd = Crowd({1000 * rank: 64 for rank in range(1, 9)})
    ticks = [crowd.tick() for _ in range(ROUND_TICKS + 1)]
    seen = {thread for tick in ticks for thread in tick}
    assert len(seen) == 512
    assert max(len(tick) for tick in ticks) <= 8 + 504 // ROUND_TICKS + 1
    assert all({1000 * rank for rank in range(1, 9)} <= set(tick) for tick in ticks)


def test_a_few_threads_are_all_looked_at_in_every_tick_and_none_twice() -> None:
    crowd = Crowd({1000: 4, 2000: 2, 3000: 1})
    assert sorted(crowd.tick()) == [1000, 1001, 1002, 1003, 2000, 2001, 3000]
    assert sorted(crowd.tick()) == [1000, 1001, 1002, 1003, 2000, 2001, 3000]
    assert MIN_AT_ONCE > 7


def test_a_stuck_thread_is_found_within_a_round_and_then_followed_in_every_tick() -> None:
    crowd = Crowd({1000 * rank: 64 for rank in range(1, 9)})
    crowd.tick()
    crowd.stuck = {5033}
    for _ in range(ROUND_TICKS + 2):
        crowd.tick()
    assert crowd.blocked() == {5033}
    assert all(5033 in crowd.tick() for _ in range(3))
    crowd.stuck = set()
    crowd.tick()
    assert crowd.blocked() == set()


def test_all_threads_of_a_process_with_a_cause_are_looked_at_at_once() -> None:
    crowd = Crowd({1000 * rank: 64 for rank in range(1, 9)})
    crowd.tick()
    assert set(range(4000, 4064)) <= set(crowd.tick(frozenset({4000})))
    crowd.stuck = {2000, 2040}  # the main thread is blocked: its first sighting is the cause
    crowd.tick()
    crowd.tick()
    crowd.tick()
    assert crowd.blocked() == {2000, 2040}


def test_processes_that_end_or_change_between_ticks_end_no_round() -> None:
    crowd = Crowd({1000 * rank: 64 for rank in range(1, 9)})
    crowd.tick()
    del crowd.processes[8000]
    del crowd.processes[7000]
    crowd.processes[9000] = 64
    seen = {thread for _ in range(2 * ROUND_TICKS) for thread in crowd.tick()}
    assert len(seen) == 7 * 64


def test_a_file_that_somebody_put_over_one_of_proc_is_not_the_kernels(tmp_path: Path) -> None:
    assert is_the_kernels("/proc/loadavg")
    (tmp_path / "loadavg").touch()
    assert not is_the_kernels(str(tmp_path / "loadavg"))
    assert not is_the_kernels("/proc/nonsense")


def test_children_of_the_agents_own_are_known_and_not_asked_about() -> None:
    with subprocess.Popen(["sleep", "99"]) as child:
        try:
            own, others = ProcessTable(ours=frozenset({child.pid})), ProcessTable()
            for table in (own, others):
                table.look(0.0, 20)
                assert child.pid in table.entries
                table.entries[child.pid].stat = structs.replace(
                    table.entries[child.pid].stat, comm="what it was before exec"
                )
                table.look(5.0, 20)
            assert child.pid not in own.to_identify
            assert child.pid in others.to_identify
            assert os.getpid() in own.to_identify
        finally:
            child.kill()


def aged(looks: Sequence[tuple[str, int]]) -> float:
    """How long the last state has lasted by what looks 5 s apart have found: (state, switches)."""
    known = ProcessFacts(os.getpid(), 70, 1, "python", 1000)
    entry = Entry(known, Stat("python", "R", 1, 0, 50, 70))
    table, now = ProcessTable(entries={os.getpid(): entry}), 0.0
    for state, switches in looks:
        now += 5.0
        table._see(entry, Status(state, (1000,) * 4, True, comm="python", ppid=1, switches=switches), now, 20)
    return now - entry.state_since


def test_a_process_in_d_that_was_switched_to_between_looks_has_not_been_there_since_the_first() -> None:
    assert aged([("D", 10), ("D", 10), ("D", 10)]) == 10.0
    assert aged([("D", 10), ("D", 14), ("D", 19)]) == 0.0
    assert aged([("D", 10), ("D", 14), ("D", 14)]) == 5.0
    assert aged([("D", 10), ("S", 12), ("D", 13), ("D", 13)]) == 5.0


def test_a_main_thread_that_a_debugger_holds_is_held_while_other_threads_compute_and_not_while_it_is_traced() -> None:
    assert aged([("t", 10), ("t", 10), ("t", 10)]) == 10.0
    assert aged([("t", 10), ("t", 14), ("t", 19)]) == 0.0, "strace lets it run"
    assert aged([("t", 10), ("D", 10), ("t", 10)]) == 0.0
