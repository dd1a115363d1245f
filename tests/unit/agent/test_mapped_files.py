"""A page fault names no file: what the mappings of its process tell, and what they do not."""

from __future__ import annotations

from slurm_watchdog.agent.proc.blocked_calls import BlockedThreads
from slurm_watchdog.agent.proc.system_call import see_call
from slurm_watchdog.agent.processes.open_mounts import fault_target, parse_maps
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.model.observations import CallTarget

MAPS = """\
555555554000-555555556000 r--p 00000000 08:01 131                        /usr/bin/python3.11
555555556000-555555559000 r-xp 00002000 08:01 131                        /usr/bin/python3.11
7fcdb5800000-7fcdb9800000 r--s 00000000 00:27 2                          /data/set one/shard.bin
7fcdb9800000-7fcdb9900000 rw-p 00000000 00:00 0
7fcdb9900000-7fcdb9a00000 rw-s 00000000 00:05 9                          /dev/nvidia0
7fcdb9a00000-7fcdb9b00000 rw-s 00000000 00:01 7                          /dev/shm/torch_1 (deleted)
7fcdba1d0000-7fcdba1f0000 r-xp 00000000 08:01 140                        /usr/lib/libc.so.6
7ffc26000000-7ffc26100000 rw-p 00000000 00:00 0                          [stack]
"""  # captured on Linux 6.18 (python 3.11, mmap of a FUSE file), names replaced
ROOT, DATA, SOFT = (
    Mount("/", "ext4", "/dev/sda1"),
    Mount("/data", "nfs4", "nas:/d"),
    Mount("/soft", "lustre", "m@o:/s"),
)


def test_parse_maps_gives_files_of_filesystems_and_which_of_them_are_programs() -> None:
    assert parse_maps(MAPS) == {
        "/usr/bin/python3.11": True, "/data/set one/shard.bin": False, "/usr/lib/libc.so.6": True,
    }  # fmt: skip


def test_fault_target_names_the_one_filesystem_with_a_server_and_its_one_file_of_data() -> None:
    found = fault_target(parse_maps(MAPS).items(), [ROOT, DATA, SOFT])
    assert found == CallTarget("/data/set one/shard.bin", "/data", "nfs4", "nas:/d")


def test_fault_target_names_no_file_where_several_could_be_meant() -> None:
    files = {"/data/a.bin": False, "/data/b.bin": False, "/usr/lib/libc.so.6": True}
    found = fault_target(files.items(), [ROOT, DATA])
    assert (found.path, found.mount) == (None, "/data")


def test_fault_target_names_candidates_where_files_of_two_filesystems_are_mapped() -> None:
    files = {"/data/a.bin": False, "/soft/lib/libtorch.so": True, "/usr/lib/libc.so.6": True}
    found = fault_target(files.items(), [ROOT, DATA, SOFT])
    assert found == CallTarget(candidates=("/data", "/soft"))


def test_fault_target_falls_back_to_the_local_disk_and_knows_nothing_without_a_file() -> None:
    assert fault_target({"/usr/x": True}.items(), [ROOT, DATA]).mount == "/"
    assert fault_target({}.items(), [ROOT, DATA]) == CallTarget()


def look(state: str, syscall: bytes, wchan: bytes) -> list[str | None]:
    """What is followed of a main thread that was seen three times like this."""
    files = {
        "stat": b"7 (python) %s 1 1 1 0 -1 0 0 0 0 0 5 5 0 0 20 0 1 0 1 0 0" % state.encode(), "syscall": syscall, "wchan": wchan,
        "status": b"Name:\tpython\nvoluntary_ctxt_switches:\t16\n", "io": b"rchar: 1\nsyscr: 1\nsyscw: 1\n",
    }  # fmt: skip
    threads = BlockedThreads()
    for at in (0.0, 5.0, 10.0):
        asked = threads.wanted([(7, 1, 1)], [(7, 1)], ())
        threads.take(asked, {(7, 7): see_call(files.__getitem__, lambda number: None, True, "x86_64")}, at)
    return [track.seen.syscall for track in threads.blocked().values()]


FAULT = b"-1 0x7ffc260b8a50 0x7fcdba1de7ab\n"


def test_a_thread_outside_of_any_call_that_waits_for_a_file_is_in_a_page_fault_in_s_as_in_d() -> None:
    assert look("S", FAULT, b"request_wait_answer") == ["page fault"]
    assert look("D", FAULT, b"folio_wait_bit_common") == ["page fault"]
    assert look("D", b"45 0x5 0x7f00 0x10 0x0 0x0 0x0 0x7ffc 0x7fcd\n", b"rpc_wait_bit_killable") == ["page fault"]


def test_a_thread_that_waits_for_something_else_outside_of_a_call_is_followed_only_in_d() -> None:
    assert look("S", FAULT, b"userfaultfd_wait") == []
    assert look("S", b"running\n", b"0") == []
    assert look("D", FAULT, b"rwsem_down_read_slowpath") == [None]
