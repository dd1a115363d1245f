"""Evidence of one job on one node: what is read, what is masked, what is said of that which cannot be had."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.children.requests import FindFiles
from slurm_watchdog.agent.evidence import found_files, last_lines, node_settings
from slurm_watchdog.agent.evidence.collection import Collection, bounded, join_dumps
from slurm_watchdog.agent.evidence.process_state import parse_kernel_stack, parse_locks, parse_tcp
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.proc.entry import ProcessFacts
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.identify import choose, parse_settings
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.agent.tasks import TASKS
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.base.mounts import read_mounts
from slurm_watchdog.base.redact import MASK, mask_line
from slurm_watchdog.model.evidence import (
    FoundFile,
    Frame,
    NodeEvidence,
    ProcessStack,
    RankEvidence,
    StackDump,
    ThreadStack,
)
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.protocol import CollectEvidence
from tests.builders.agent_context import context_of
from tests.builders.readers import serving
from tests.builders.sending import link_to

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0B014D0A:7148 0C014D0A:D431 01 00000000:00010000 00:00000000 00000000  1000        0 90211 1 0000000000000000 20 4 30 10 -1
   1: 0B014D0A:9C40 0D014D0A:1F90 02 00000001:00000000 01:00000190 00000005  1000        0 90212 2 0000000000000000 800 0 0 1 7
   2: 00000000:7148 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 90213 1 0000000000000000 100 0 0 10 0
"""
"""Made on a little-endian machine: a connection with 64 KiB that nobody reads, one that is not answered, a listener."""


def test_connections_have_peers_queues_and_retransmits() -> None:
    table = parse_tcp(TCP)
    assert (table[90211].state, table[90211].local, table[90211].peer) == (
        "ESTABLISHED", "10.77.1.11:29000", "10.77.1.12:54321",
    )  # fmt: skip
    assert table[90211].receive_queue_bytes == 65536
    assert (table[90212].state, table[90212].retransmits, table[90212].send_queue_bytes) == ("SYN_SENT", 5, 1)
    assert table[90213].state == "LISTEN"


def test_a_v6_socket_that_carries_v4_is_named_by_its_v4_address() -> None:
    line = "   0: 0000000000000000FFFF00000B014D0A:1F90 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 7 1 0\n"
    assert parse_tcp("header\n" + line)[7].local == "10.77.1.11:8080"


@pytest.mark.parametrize(
    "text", ["", "header\n", "header\n garbage of some kind\n", "header\n 0: XY:1 0:0 01 a b c d e f g\n"]
)
def test_what_is_no_table_of_connections_has_none(text: str) -> None:
    assert parse_tcp(text) == {}


def test_who_waits_for_a_file_lock_and_who_holds_it() -> None:
    text = (
        "1: FLOCK  ADVISORY  WRITE 4711 08:02:1310 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 4712 08:02:1310 0 EOF\n"
        "2: POSIX  ADVISORY  READ 9 00:19:77 0 EOF\n"
    )
    assert parse_locks(text) == [(4712, "FLOCK WRITE", "08:02:1310", 4711)]


def test_a_kernel_stack_is_its_functions() -> None:
    text = "[<0>] percpu_rwsem_wait+0x10f/0x140\n[<0>] vfs_write+0x2ac/0x3d0\n[<0>] ksys_write+0x6f/0xf0\n"
    assert parse_kernel_stack(text) == ("percpu_rwsem_wait", "vfs_write", "ksys_write")


def test_only_variables_of_the_allow_list_are_kept() -> None:
    data = b"NCCL_SOCKET_IFNAME=eth0\0HOME=/home/u\0AWS_SECRET_ACCESS_KEY=abc\0WANDB_API_KEY=0123\0OMP_NUM_THREADS=8\0"
    assert parse_settings(data) == {"NCCL_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("NCCL_NET_PLUGIN", "none", "none"),
        ("TORCH_HUB_TOKEN", "hf_abcdefghijkl", MASK),
        ("TORCH_SOMETHING", "postgres://u:pw@db/x", MASK),
        ("NCCL_AUTH_FILE", "/etc/x", MASK),
        ("TORCH_EXTRA", "Zk3vQ9xB7LmP2sT8wR4yN6uH1jD5gF0a", MASK),
        ("CUDA_VISIBLE_DEVICES", "GPU-8a3f1c22-77aa-4b1e-9c1d-0123456789ab", "GPU-8a3f1c22-77aa-4b1e-9c1d-0123456789ab"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("TORCH_EXTENSIONS_DIR", "/scratch/shared/extensions/of/the/whole/team", "/scratch/shared/extensions/of/the/whole/team"),
        ("NCCL_TOPO_FILE", "/etc/nccl/ndv4-topology-with-a-long-name.xml", "/etc/nccl/ndv4-topology-with-a-long-name.xml"),
    ],
)  # fmt: skip
def test_secrets_in_variables_are_masked(name: str, value: str, kept: str) -> None:
    assert choose({name: value}) == {name: kept}


def test_secrets_in_lines_are_masked_and_the_rest_stays() -> None:
    line = "loading https://me:hunter22@host/x with api_key=abcd1234 at step 7"
    masked = mask_line(line)
    assert "hunter22" not in masked
    assert "abcd1234" not in masked
    assert "step 7" in masked
    plain = "[2026-03-01 10:00:00] iteration 500/ 10000 | loss 2.31 | /scratch/run/model_optim_rng.pt"
    assert mask_line(plain) == plain


@pytest.mark.parametrize(
    ("pattern", "uses_pid", "expected"),
    [
        ("core\n", True, [("/w", "core"), ("/w", "core.*")]),
        ("core\n", False, [("/w", "core")]),
        ("core.%e.%p\n", True, [("/w", "core.*.*")]),
        ("/var/crash/core-%h-%p", False, [("/var/crash", "core-*-*")]),
        ("|/usr/lib/systemd/systemd-coredump %P %u", True, [(found_files.SYSTEMD_PLACE, "core.*")]),
        ("|/opt/site/handler %P", True, []),
        ("/var/%u/core", True, []),
        ("", True, []),
    ],
)
def test_where_core_files_may_lie(pattern: str, uses_pid: bool, expected: list[tuple[str, str]]) -> None:
    assert found_files.places(pattern, ["/w"], uses_pid) == expected


def test_a_core_file_is_found_only_if_it_is_one_of_the_owner_and_not_older_than_the_job(
    tmp_path: Path,
) -> None:
    elf = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x04\x00" + b"\0" * 50
    (tmp_path / "core.1").write_bytes(elf)
    (tmp_path / "core.2").write_bytes(b"an ordinary file called core")
    (tmp_path / "core.3").write_bytes(elf)
    os.utime(tmp_path / "core.3", (1, 1))
    (tmp_path / "core.4").symlink_to(tmp_path / "core.1")
    args = finding(places=[(str(tmp_path), "core.*"), ("/does/not/exist", "core")])
    assert [each.path for each in found_files.find_cores(args)] == [str(tmp_path / "core.1")]
    assert found_files.find_cores(msgspec.structs.replace(args, uid=os.getuid() + 1)) == []


def finding(**fields: Any) -> FindFiles:
    """What is looked for of this user's."""
    some = {
        "files": [],
        "uid": os.getuid(),
        "max_bytes": 1 << 20,
        "places": [],
        "max_age_s": 60.0,
    }
    return FindFiles(**some | fields)


DUMP = Path(__file__).parents[2] / "captures" / "flight_recorder" / "missing" / "trace_0"


def test_a_flight_recorder_dump_is_read_and_sent_and_one_that_would_run_something_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(DUMP.read_bytes())
    (tmp_path / "trace_1").symlink_to(tmp_path / "trace_0")
    (tmp_path / "trace_2").write_bytes(b"cos\nsystem\n(S'touch %a'\ntR." % str(tmp_path / "ran"))
    args = finding(files=[(f"{tmp_path}/trace_{rank}", rank, 60.0) for rank in range(4)])
    found, hostile = found_files.read_flight_recorders(args)
    assert (found.rank, zlib.decompress(found.content or b"")) == (0, DUMP.read_bytes())
    assert found.record is not None
    assert found.record.communicators[0].waits[0].name == "all_reduce"
    assert (hostile.record, "names os.system" in (hostile.error or "")) == (None, True)
    assert not (tmp_path / "ran").exists()
    too_large, _ = found_files.read_flight_recorders(msgspec.structs.replace(args, max_bytes=10))
    assert (too_large.content, too_large.record) == (None, found.record)
    assert "stays where it is" in (too_large.error or "")
    assert found_files.read_flight_recorders(msgspec.structs.replace(args, uid=os.getuid() + 1)) == []


ERROR_FILE = (Path(__file__).parents[2] / "captures" / "own_words" / "exception.json").read_bytes()


def test_a_dump_from_a_clock_that_is_ahead_is_kept_for_people_and_tells_nothing_of_this_hang(tmp_path: Path) -> None:
    dump = tmp_path / "trace_0"
    dump.write_bytes(DUMP.read_bytes())
    for ahead_s, tells in ((0.5, True), (600.0, False)):
        os.utime(dump, (time.time() + ahead_s, time.time() + ahead_s))
        (found,) = found_files.read_flight_recorders(finding(files=[(str(dump), 0, 60.0)]))
        assert (found.record is not None, found.error is None, found.age_s) == (tells, tells, 0.0)
        assert found.content is not None


def test_what_ranks_wrote_of_their_ends_is_read_of_their_owner_alone(tmp_path: Path) -> None:
    for rank, body in enumerate((ERROR_FILE, b"", b"", ERROR_FILE)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "error.json").write_bytes(body)
    (tmp_path / "1" / "stderr.log").write_bytes(b"step 5\nFatal Python error: Segmentation fault\n")
    (tmp_path / "2" / "stderr.log").symlink_to(tmp_path / "1" / "stderr.log")
    os.utime(tmp_path / "3" / "error.json", (4e9, 4e9))
    asked = finding(error_files=[(f"{tmp_path}/{rank}/error.json", rank) for rank in range(5)])
    found = found_files.read_error_files(asked)
    assert [(each.rank, each.said) for each in found] == [
        (0, "ValueError: bad shard 17 (train.py:9 in step)"),
        (1, "Fatal Python error: Segmentation fault"),
    ]
    assert all(each.kind == "own_words" and 0 <= each.age_s < 60 for each in found)
    assert found_files.read_error_files(msgspec.structs.replace(asked, uid=os.getuid() + 1)) == []


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to become the job's owner")
def test_a_node_without_ranks_still_says_what_they_wrote() -> None:
    probes = Children(TASKS)
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        path = Path(place) / "error.json"
        path.write_bytes(ERROR_FILE)
        os.chmod(place, 0o755)
        os.chown(path, 1500, 1500)
        evidence = collect(probes, dumps=1, own_words={str(path): 5}, uid=1500)
    probes.close()
    assert [(each.rank, each.said) for each in evidence.files] == [(5, "ValueError: bad shard 17 (train.py:9 in step)")]


def test_a_rank_with_a_pipe_is_asked_for_a_new_dump_and_it_is_waited_for(tmp_path: Path) -> None:
    dump, pipe = tmp_path / "trace_0", tmp_path / "ask_0.pipe"
    dump.write_bytes(b"old")
    os.utime(dump, (1e9, 1e9))
    os.mkfifo(pipe)
    args = finding(files=[(str(dump), 0, 1e10)], pipes=[(str(pipe), 0)])
    (old,) = found_files.read_flight_recorders(args)
    assert old.record is None  # nobody reads from the pipe: it is not waited for, and not filled

    with open(pipe, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as asked:

        def monitor() -> None:
            select.select([asked], [], [], 30.0)
            dump.write_bytes(DUMP.read_bytes())

        threading.Thread(target=monitor, daemon=True).start()
        (fresh,) = found_files.read_flight_recorders(args)
    assert fresh.record is not None
    assert fresh.age_s < 60.0


def test_the_pipe_of_a_rank_is_the_one_that_its_environment_names() -> None:
    environ = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/ask_"}
    assert found_files.pipe_of(environ, 3) == "/tmp/ask_3.pipe"
    assert found_files.pipe_of(environ, None) is None
    assert found_files.pipe_of({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "ask_"}, 3) is None


def test_where_a_rank_writes_its_flight_recorder_dump() -> None:
    assert found_files.prefixes({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/d/x_"}) == ["/d/x_"]
    assert found_files.prefixes({"TORCH_FR_DUMP_TEMP_FILE": "/a_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/b_"}) == ["/a_"]
    assert found_files.prefixes({}) == ["/tmp/nccl_trace_rank_", "~/.cache/torch/comm_lib_trace_rank_"]


def test_the_end_of_a_log_is_shown_as_a_terminal_would() -> None:
    data = b"half a line\nstep 1\r\nbar 10%\rbar 20%\nerror: \xff token=verysecret\n\n"
    assert last_lines.clean_end(data, whole=False) == ["step 1", "bar 20%", f"error: \ufffd token={MASK}"]


def test_records_of_the_kernel_are_kept_unless_they_are_mere_information() -> None:
    assert (
        last_lines.parse_record(b"3,77,1500000,-;task python blocked\n SUBSYSTEM=x")
        == "[    1.500000] task python blocked"
    )
    assert last_lines.parse_record(b"6,78,1500000,-;eth0: link up") is None
    assert last_lines.parse_record(b"nonsense") is None


def test_the_driver_of_either_kernel_module() -> None:
    text = "NVRM version: NVIDIA UNIX {}  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
    for module in ("x86_64 Kernel Module", "Open Kernel Module for x86_64"):
        assert re.findall(node_settings.DRIVER, text.format(module)) == ["550.54.15"]


# ---------------------------------------------------------------------------------------- dumps and bounds


def stack(*frames: str, cpu_s: float = 0.0, error: str | None = None) -> ProcessStack:
    threads = tuple(
        ThreadStack(
            thread_id=at,
            name="MainThread" if at == 7 else "x",
            active=False,
            frames=(Frame(function=name, file="a.py"),),
        )
        for at, name in enumerate(frames, start=7)
    )
    return ProcessStack(
        node="n1",
        pid=7,
        start_ticks=1,
        job_id="4",
        role=Role.RANK,
        rank=0,
        threads=threads,
        cpu_s=cpu_s,
        error=error,
    )


def test_a_later_dump_holds_only_what_moved() -> None:
    first, second, third = join_dumps([(0.0, stack("a", "b")), (10.0, stack("a", "c")), (20.0, None)])
    assert len(first.threads) == 2
    assert ([t.thread_id for t in second.threads], second.unchanged) == ([8], (7,))
    assert third.error == "it was not dumped"


def test_too_much_is_cut_step_by_step_and_said() -> None:
    thread = ThreadStack(
        thread_id=9,
        name="x",
        active=False,
        frames=tuple(Frame(function="f" * 50, file="a") for _ in range(100)),
    )
    main = ThreadStack(thread_id=7, name="MainThread", active=True, frames=(Frame(function="train", file="a"),))
    dump = StackDump(after_s=0.0, threads=(*[thread] * 60, main))
    rank = RankEvidence(pid=7, start_ticks=1, role=Role.RANK, rank=0, dumps=(dump,))
    whole = NodeEvidence(node="n1", job_id="4", ranks=(rank,))
    cut = bounded(whole, limit=60_000)
    assert len(msgspec.json.encode(cut)) <= 60_000
    assert cut.ranks[0].dumps[0].threads[0] == main
    assert "only the first threads" in cut.problems[-1]
    assert bounded(whole) is whole


def test_a_file_name_that_is_no_utf8_keeps_no_evidence_from_being_sent() -> None:
    core = FoundFile(kind="core", path=os.fsdecode(b"/data/caf\xe9/core.7"), size_bytes=9, age_s=1.0, content=b"\xff\0")
    (file,) = bounded(NodeEvidence(node="n1", job_id="4", files=(core,))).files
    assert (file.path, file.content) == ("/data/caf?/core.7", b"\xff\0")


# ---------------------------------------------------------------------------------------- real processes


@pytest.fixture
def probes() -> Iterator[Children]:
    with serving(os.getuid()):
        made = Children(TASKS)
        yield made
        made.close()


def collect(
    probes: Children, *processes: Process, known: ProcessFacts | None = None, dumps: int = 2, ras: bool = False,
    only_ras: bool = False, own_words: Mapping[str, int | None] | None = None, uid: int = -1,
) -> NodeEvidence:  # fmt: skip
    logs = JobLogs(UserLooks(probes, ProcessTable()), read_mounts(), "n1", (), become_owner=False)
    context = context_of(probes, logs, courier=link_to([]))
    context.processes.details_of = lambda pid, start: known
    context.processes.error_files_of = lambda job: own_words or {}
    command = CollectEvidence(
        id="c", job_id="4", restarts=0, expires_s=40.0, dumps=dumps, apart_s=0.2, ras=ras, only_ras=only_ras
    )
    collection = Collection(command, context, uid, clock.monotonic(), processes)
    while (answer := collection.advance(clock.monotonic())) is None:
        due_at = collection.due_at()
        woken = wait_readable(
            [context.courier.fileno(), *probes.filenos()], min(due_at, clock.monotonic() + 10.0) - clock.monotonic()
        )
        assert woken or clock.monotonic() >= due_at, "nothing would have woken the agent for it"
        probes.poll(clock.monotonic())
        context.courier.receive()
    return answer


def rank_process(pid: int, rank: int = 0) -> Process:
    start = read_stat(pid).start_ticks
    return Process(
        pid=pid,
        start_ticks=start,
        job_id="4",
        role=Role.RANK,
        comm="python",
        state="S",
        uid=os.getuid(),
        rank=rank,
    )


PROGRAM = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.send(b"unread")
accepted, _ = server.accept()
print("ready", flush=True)
def stuck_here(): time.sleep(600)
stuck_here()
"""


def test_a_rank_is_read_whole_and_is_not_stopped(probes: Children) -> None:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    known = ProcessFacts(child.pid, 0, 1, "python", os.getuid(), settings=(("NCCL_DEBUG", "INFO"),))
    try:
        evidence = collect(probes, rank_process(child.pid), known=known)
        state = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    finally:
        child.kill()
        child.communicate()
    (rank,) = evidence.ranks
    assert state == "S"
    assert rank.error is None, rank.error
    assert [len(dump.threads) for dump in rank.dumps] == [1, 0]
    assert rank.dumps[0].threads[0].frames[0].function == "stuck_here"
    assert rank.environment == (("NCCL_DEBUG", "INFO"),)
    assert any(each.receive_queue_bytes == 6 for each in rank.sockets)
    assert rank.threads[0].syscall in ("clock_nanosleep", "select", "pselect6")
    assert dict(rank.status)["Threads"] == "1"
    assert "kernel" in dict(evidence.settings)


RAS = """
import pathlib, socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
for line in connection.makefile():
    text = pathlib.Path(sys.argv[1]).read_text() if "STATUS" in line else "SERVER PROTOCOL 2\\n" if "PROTOCOL" in line else "OK\\n"
    connection.sendall(text.encode())
    if "STATUS" in line:
        connection.close()
        break
input()
"""


@pytest.mark.parametrize(("asked", "alone"), [(True, False), (True, True), (False, False)])
def test_the_ras_of_a_job_is_asked_where_its_environment_says_and_only_if_that_is_wanted(
    probes: Children, asked: bool, alone: bool
) -> None:
    answer = Path(__file__).parents[2] / "captures" / "ras" / "2.28.json"
    child = subprocess.Popen(
        [sys.executable, "-c", RAS, str(answer)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    settings = (("NCCL_RAS_ADDR", f"localhost:{child.stdout.readline().strip()}"),)
    known = ProcessFacts(child.pid, 0, 1, "python", os.getuid(), settings=settings)
    try:
        evidence = collect(probes, rank_process(child.pid), known=known, dumps=1, ras=asked, only_ras=alone)
    finally:
        child.kill()
        child.communicate()
    assert not any("RAS" in problem for problem in evidence.problems), evidence.problems
    assert (None if evidence.ras is None else evidence.ras.release) == ("2.28.9+cuda12.8" if asked else None)
    assert [bool(each.dumps) for each in evidence.ranks] == [not alone]
    assert not any("RAS" in problem for problem in evidence.problems)


def test_a_rank_that_cannot_be_dumped_is_a_row_with_the_reason(probes: Children) -> None:
    child = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    gone = rank_process(os.getpid(), rank=1)
    try:
        ended = msgspec.structs.replace(gone, pid=dead.pid, start_ticks=1)
        evidence = collect(probes, rank_process(child.pid), ended, dumps=1)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        dead.wait()
    by_rank = {each.rank: each for each in evidence.ranks}
    assert "py-spy" in (by_rank[0].error or "")
    assert by_rank[0].threads[0].syscall in ("clock_nanosleep", "nanosleep")
    assert "ended" in (by_rank[1].error or "")
