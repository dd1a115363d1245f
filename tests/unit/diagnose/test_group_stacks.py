"""The verdict on stacks that somebody sent: what is a hang, who is named, and above all who is not."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.cli.main import main
from slurm_watchdog.diagnose.stacks.case import Options
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment, assign_ranks
from slurm_watchdog.diagnose.stacks.verdict import StackVerdict, diagnose_dumps
from slurm_watchdog.parse.stacks.headers import Dump
from slurm_watchdog.parse.stacks.text import parse_stacks
from tests.builders.stacks import (
    BACKWARD,
    BARRIER,
    BROADCAST,
    C10D,
    COMPILE,
    DESTROY,
    DEVICE,
    EVALUATE,
    FORWARD,
    IMPORT,
    INIT,
    LOADER,
    LOCK,
    LOG,
    PDB,
    RECV,
    REDUCE,
    SAVE,
    STAT,
    TAIL,
    UPLOAD,
    dumps_of,
    text_of,
)


def verdict(*places: Sequence[str] | None, since: float | None = None, step: float | None = None, ranks: int | None = None) -> StackVerdict:  # fmt: skip
    return diagnose_dumps(dumps_of(places), Options(ranks=ranks, since_last_step_s=since, typical_step_s=step))


def said(found: StackVerdict) -> tuple[bool, str, list[int | None]]:
    return found.is_hang, found.cls, [each.rank for each in found.culprits]


HOUR = 3600.0


@pytest.mark.parametrize(
    ("odd", "cls"),
    [(LOADER, "dataloader"), (STAT, "filesystem"), (LOCK, "lock"), (PDB, "debugger"), (DESTROY, "teardown")],
)
def test_all_wait_in_a_collective_but_one_in_a_place_that_does_not_end_one_snapshot_proves_it(
    odd: Sequence[str], cls: str
) -> None:
    assert said(verdict(REDUCE, REDUCE, odd, REDUCE, REDUCE)) == (True, cls, [2])


@pytest.mark.parametrize("odd", [FORWARD, SAVE, UPLOAD, LOG, COMPILE, EVALUATE, DEVICE, BACKWARD])
def test_group_stacks_of_a_wait_that_ends_by_itself_name_no_culprit_without_a_clock(
    odd: Sequence[str],
) -> None:
    found = verdict(BARRIER, BARRIER, odd, BARRIER, BARRIER)
    assert (found.is_hang, found.culprits) == (False, ())
    assert [each.rank for each in found.odd] == [2]


@pytest.mark.parametrize(
    ("odd", "since", "is_hang"),
    [
        (FORWARD, 30, False), (FORWARD, 301, True), (LOADER, 59, False), (PDB, 59, False), (LOG, 400, True),
        (SAVE, 1200, False), (SAVE, 2 * HOUR, True), (UPLOAD, 1200, False), (UPLOAD, 2 * HOUR, True), (COMPILE, 1850, False),
        (COMPILE, 2 * HOUR, True), (EVALUATE, 700, False), (EVALUATE, 2 * HOUR, True), (IMPORT, 1850, False),
    ],
)  # fmt: skip
def test_the_time_since_the_last_step_decides_and_some_places_have_more_of_it(
    odd: Sequence[str], since: float, is_hang: bool
) -> None:
    found = verdict(odd, BARRIER, BARRIER, BARRIER, since=since, step=100.0 if since != 59 else 5.0)
    assert (found.is_hang, [each.rank for each in found.culprits]) == (is_hang, [0] if is_hang else [])


def test_the_stuck_ones_may_be_the_majority() -> None:
    places = (LOADER, REDUCE, LOADER, LOADER, LOADER, REDUCE, LOADER, LOADER)
    assert said(verdict(*places, since=HOUR, step=3)) == (True, "dataloader", [0, 2, 3, 4, 6, 7])
    assert said(verdict(*places)) == (False, "dataloader", [])
    mixed = (LOADER, REDUCE, FORWARD, SAVE, FORWARD, REDUCE, FORWARD, LOADER)
    assert verdict(*mixed, since=HOUR, step=3).culprits == ()


def test_all_in_the_same_collective_names_nobody() -> None:
    assert said(verdict(REDUCE, REDUCE, REDUCE, REDUCE, since=HOUR, step=3)) == (True, "collective", [])
    assert said(verdict(REDUCE, REDUCE, REDUCE, REDUCE)) == (False, "collective", [])


def test_one_rank_in_another_collective_is_a_mismatch_but_groups_of_ranks_are_not() -> None:
    assert said(verdict(REDUCE, REDUCE, BROADCAST, REDUCE, since=HOUR, step=3)) == (
        True,
        "collective_mismatch",
        [2],
    )
    assert verdict(REDUCE, REDUCE, BROADCAST, BROADCAST, since=HOUR, step=3).culprits == ()
    assert verdict(RECV, REDUCE, REDUCE, REDUCE, since=HOUR, step=3).culprits == ()


def test_stages_of_a_pipeline_that_wait_for_each_other_are_not_odd() -> None:
    assert verdict(RECV, RECV, REDUCE, REDUCE, RECV, RECV, REDUCE, REDUCE).odd == ()


def test_a_rank_that_alone_could_not_be_dumped_is_suspect_while_all_others_wait() -> None:
    failed = (
        "=== rank 2 ===\nProcess 9: python\nError: Failed to suspend process\nReason: EPERM: Operation not permitted\n"
    )
    others = "".join(text_of(rank, BARRIER) for rank in (0, 1, 3))
    found = diagnose_dumps(parse_stacks(others + failed))
    assert said(found) == (True, "undumpable", [2])
    assert "suspect" in found.culprits[0].reason
    two = diagnose_dumps(parse_stacks(others + failed + failed.replace("rank 2", "rank 4").replace("9", "8")))
    assert two.culprits == ()
    working = diagnose_dumps(parse_stacks(failed + "".join(text_of(rank, FORWARD) for rank in (0, 1, 3))))
    assert (working.is_hang, working.culprits) == (False, ())


def test_a_rank_that_alone_is_missing_is_suspect_and_several_are_only_told() -> None:
    assert said(verdict(REDUCE, None, REDUCE, REDUCE, ranks=4)) == (True, "missing_rank", [1])
    several = verdict(REDUCE, None, REDUCE, REDUCE, None, ranks=5)
    assert (several.missing, several.culprits) == ((1, 4), ())


def test_the_node_with_one_dump_less_than_the_others_is_suspect() -> None:
    text = "".join(
        f"=== node{node} ===\n" + "".join(text_of(0, BARRIER, pid=node * 1000 + i).partition("\n")[2] for i in range(2 if node == 4 else 3))
        for node in range(2, 6)
    )  # fmt: skip
    found = diagnose_dumps(parse_stacks(text), Options(ranks=12))
    assert [(each.node, each.rank) for each in found.culprits] == [("node4", None)]


def test_start_up_is_no_hang_and_the_missing_are_named_as_missing() -> None:
    found = verdict(INIT, INIT, IMPORT, None, ranks=4)
    assert (found.is_hang, found.culprits, found.missing) == (False, (), (3,))
    assert said(verdict(INIT, INIT, None, INIT, ranks=4)) == (False, "rendezvous", [])
    assert said(verdict(COMPILE, COMPILE, COMPILE, COMPILE, since=1200, step=1)) == (False, "compilation", [])
    assert said(verdict(EVALUATE, EVALUATE, REDUCE, EVALUATE)) == (False, "evaluation", [])


def test_ranks_that_train_are_well() -> None:
    for places in (
        (FORWARD, BACKWARD, REDUCE, FORWARD),
        (FORWARD,) * 4,
        (BACKWARD,) * 4,
        (FORWARD, LOADER, SAVE, REDUCE),
    ):
        found = verdict(*places)
        assert (found.is_hang, found.culprits) == (False, ())


def test_teardown_of_all_names_nobody_and_of_one_that_one() -> None:
    assert said(verdict(DESTROY, DESTROY, DESTROY, DESTROY)) == (True, "teardown", [])
    assert said(verdict(DESTROY, DESTROY, LOCK, DESTROY)) == (True, "teardown", [2])


def test_the_name_of_a_tool_is_no_host() -> None:
    dumps = (
        "".join(text_of(rank, REDUCE) for rank in range(3))
        + "=== rank 3 ===\npy-spy: Error: No such process (os error 3)\n"
    )
    found = diagnose_dumps(parse_stacks(dumps), Options(ranks=4))
    assert [(each.rank, each.node) for each in found.culprits] == [(3, "")]


def test_group_stacks_of_a_gpu_wait_inside_a_collective_are_a_wait_for_peers() -> None:
    within = ("synchronize (torch/cuda/__init__.py:892)", *REDUCE)
    assert said(verdict(REDUCE, within, REDUCE, REDUCE, since=HOUR, step=2)) == (True, "collective", [])
    assert said(verdict(REDUCE, DEVICE, REDUCE, REDUCE, since=HOUR, step=2)) == (True, "device_wait", [1])


def test_group_stacks_of_a_rank_that_reads_a_programs_output_are_a_wait_for_that_program() -> None:
    reads = (
        "select (selectors.py:415)", "_communicate (subprocess.py:2115)", "communicate (subprocess.py:1209)",
        "check_output (subprocess.py:466)", "git_hash (utils/vcs.py:9)", *TAIL,
    )  # fmt: skip
    assert said(verdict(REDUCE, reads, REDUCE, REDUCE, since=HOUR, step=2)) == (True, "subprocess", [1])


def test_group_stacks_of_a_rank_that_uploads_while_others_end_name_it_after_the_limit() -> None:
    assert said(verdict(DESTROY, DESTROY, UPLOAD, DESTROY)) == (True, "teardown", [])
    assert said(verdict(DESTROY, DESTROY, UPLOAD, DESTROY, since=600, step=2)) == (True, "teardown", [])
    assert said(verdict(DESTROY, DESTROY, UPLOAD, DESTROY, since=HOUR, step=2)) == (True, "teardown", [2])


def test_with_ddp_the_others_wait_in_the_backward_pass_which_only_time_can_tell() -> None:
    assert said(verdict(BACKWARD, BACKWARD, LOADER, BACKWARD, since=HOUR, step=2)) == (
        True,
        "dataloader",
        [2],
    )
    assert verdict(BACKWARD, BACKWARD, LOADER, BACKWARD).culprits == ()
    assert said(verdict(DEVICE, DEVICE, LOADER, DEVICE, since=HOUR, step=2)) == (True, "dataloader", [2])


def test_the_thread_that_runs_the_backward_pass_tells_where_its_rank_waits() -> None:
    gather = (
        f"Thread 4079 (active)\n    all_gather_into_tensor ({C10D}:2709)\n    backward "
        "(torch/autograd/function.py:289)\n"
    )
    text = "".join(text_of(rank, BACKWARD) + gather for rank in range(3)) + text_of(3, LOADER)
    assert said(diagnose_dumps(parse_stacks(text))) == (True, "dataloader", [3])


def test_two_dumps_that_are_alike_prove_it_and_two_that_differ_disprove_it() -> None:
    first = "".join(text_of(rank, FORWARD if rank == 2 else REDUCE) for rank in range(4))
    moved = "".join(text_of(rank, BACKWARD if rank == 2 else REDUCE) for rank in range(4))
    assert said(diagnose_dumps(parse_stacks(first + first))) == (True, "working", [2])
    found = diagnose_dumps(parse_stacks(first + moved))
    assert (found.is_hang, found.culprits) == (False, ())
    assert diagnose_dumps(parse_stacks(first + first)).ranks == 4


def test_workers_and_launchers_are_left_out_and_one_that_hangs_is_told_with_its_rank() -> None:
    launcher = (
        'Process 1: torchrun train.py\nThread 1 (idle): "MainThread"\n    _monitor_workers '
        "(torch/distributed/elastic/agent/server/local_elastic_agent.py:3)\n"
    )
    worker = (
        "Process 50000: python -u pretrain.py\nParent Process 40002: python\nThread 50000 (idle): "
        '"MainThread"\n    read (lustre_reader.py:8)\n    _worker_loop '
        "(torch/utils/data/_utils/worker.py:300)\n"
    )
    text = "".join(text_of(r, LOADER if r == 2 else REDUCE) for r in range(4)) + worker + launcher
    found = diagnose_dumps(parse_stacks(text))
    assert (said(found), found.ranks) == ((True, "dataloader", [2]), 4)
    assert dict(found.others) == {"a data loader's worker": 1, "a launcher": 1}
    assert "its worker 50000 is in a call to a file system" in found.culprits[0].reason


def test_a_logger_that_waits_for_its_lock_waits_for_a_lock() -> None:
    logger = (
        "acquire (logging/__init__.py:927)",
        "handle (logging/__init__.py:1026)",
        "info (logging/__init__.py:1539)",
        *TAIL,
    )
    assert said(verdict(REDUCE, REDUCE, logger, REDUCE, since=HOUR, step=5)) == (True, "lock", [2])


def test_group_stacks_name_the_holder_of_the_interpreters_lock() -> None:
    holder = 'Thread 77 (active+gil): "feeder"\n    pack (native_pack.py:3)\n'
    idle = (f"step ({'model.py'}:3)", *TAIL)
    text = "".join(text_of(r, REDUCE) for r in range(3)) + text_of(3, idle) + holder
    found = diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR))
    assert said(found) == (True, "gil", [3])
    assert "thread feeder, in pack" in found.culprits[0].reason


PLACES = (REDUCE, BARRIER, RECV, LOADER, FORWARD, SAVE, LOCK, PDB, DESTROY, COMPILE, INIT, UPLOAD, BACKWARD, DEVICE, STAT)  # fmt: skip
SINCE = st.sampled_from([None, 1.0, 400.0, HOUR, 9 * HOUR])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PLACES), min_size=1, max_size=9), SINCE, st.randoms())
def test_the_order_in_which_stacks_are_given_changes_nothing(
    places: list[Sequence[str]], since: float | None, rng: random.Random
) -> None:
    dumps = dumps_of(places)
    mixed = list(dumps)
    rng.shuffle(mixed)
    options = Options(since_last_step_s=since, typical_step_s=5.0)
    assert diagnose_dumps(dumps, options) == diagnose_dumps(mixed, options)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([REDUCE, BARRIER, RECV]), st.lists(st.sampled_from(PLACES), max_size=3), SINCE)
def test_one_more_rank_in_the_place_of_the_majority_never_adds_a_culprit(
    common: Sequence[str], others: list[Sequence[str]], since: float | None
) -> None:
    places = [common] * 5 + others
    options = Options(since_last_step_s=since, typical_step_s=5.0)
    before = {each.rank for each in diagnose_dumps(dumps_of(places), options).culprits}
    after = {each.rank for each in diagnose_dumps(dumps_of([*places, common]), options).culprits}
    assert after <= before


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PLACES), min_size=1, max_size=9))
def test_a_moment_after_a_step_nothing_is_a_hang(places: list[Sequence[str]]) -> None:
    found = verdict(*places, since=2.0, step=30.0)
    assert (found.is_hang, found.culprits) == (False, ())


EVALUATION = """# 3 May: stuck at evaluation

Node 11:

3 in:

```
Thread 1001 (active): "MainThread"
Thread 1002 (active): "MainThread"
Thread 1003 (active): "MainThread"
    broadcast (torch/distributed/distributed_c10d.py:1180)
    _bcast_pipe_scalar (deepspeed/runtime/pipe/engine.py:530)
    eval_batch (deepspeed/runtime/pipe/engine.py:440)
    <module> (pretrain.py:249)
```

1 in:

```
Thread 1004 (idle): "MainThread"
    wait (threading.py:306)
    get (queue.py:179)
    _try_get_data (torch/utils/data/dataloader.py:1000)
    _next_batch (deepspeed/runtime/pipe/engine.py:620)
    eval_batch (deepspeed/runtime/pipe/engine.py:440)
    <module> (pretrain.py:249)
```

Node 12

4 in:
```
Thread 2001 (active): "MainThread"
Thread 2002 (active): "MainThread"
Thread 2003 (active): "MainThread"
Thread 2004 (active): "MainThread"
    recv (torch/distributed/distributed_c10d.py:1000)
    recv (deepspeed/runtime/pipe/p2p.py:80)
    <module> (pretrain.py:249)
```
so the last one of the first node (train.py:3) is the odd one
"""

FROZEN = """All that answered stood here, e.g.:
```
Thread 3004 (active): "MainThread"
    barrier (torch/distributed/distributed_c10d.py:2700)
    wait_for_everyone (accelerate/utils/other.py:80)
```
so I went there
```
ssh gpu-06
pgrep -P $(pgrep -o accelerate) | xargs -I {} py-spy dump --pid {} > trace-gpu-06-2.out
Error: Failed to suspend process
Reason: EPERM: Operation not permitted
```
| 0  N/A  N/A  3000  C  python  22374MiB |
```
py-spy dump --pid 3000
Process 3000: ...
Error: Failed to suspend process
Reason: EPERM: Operation not permitted
```
"""


def test_a_report_in_prose_with_groups_by_node() -> None:
    found = diagnose_dumps(parse_stacks(EVALUATION))
    assert [(each.node, each.pid) for each in found.culprits] == [("Node 11", 1004)]
    assert (found.is_hang, found.cls, found.ranks) == (True, "dataloader", 8)
    assert sorted(len(group.members) for group in found.groups) == [1, 3, 4]


def test_a_report_in_prose_where_one_process_could_not_be_dumped() -> None:
    found = diagnose_dumps(parse_stacks(FROZEN))
    assert [(each.node, each.pid) for each in found.culprits] == [("gpu-06", 3000)]
    assert (found.is_hang, found.cls) == (True, "undumpable")


# ------------------------------------------------------------------------------------- the command


def run(*arguments: str, stdin: str | None = None) -> tuple[int, Any]:
    result = CliRunner().invoke(main, ["group-stacks", *arguments, "--json"], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else result.output


def test_a_folder_with_a_file_for_each_rank_some_packed(tmp_path: Path) -> None:
    for rank in range(4):
        text = text_of(rank, LOADER if rank == 3 else REDUCE).partition("\n")[2].encode()
        if rank == 1:
            (tmp_path / "rank_1.txt.gz").write_bytes(gzip.compress(text)[:-4])
        else:
            (tmp_path / f"rank_{rank}.txt").write_bytes(text)
    code, found = run(str(tmp_path), "--ranks", "4")
    assert (code, found["is_hang"], [c["rank"] for c in found["culprits"]]) == (1, True, [3])
    assert sorted(tuple(group["ranks"]) for group in found["groups"]) == [(0, 1, 2), (3,)]
    assert set(found) >= {"ranks", "missing", "groups", "is_hang", "class", "culprits", "summary"}


def test_a_file_of_a_rank_without_a_stack_is_a_rank_that_could_not_be_dumped(tmp_path: Path) -> None:
    for rank in range(4):
        text = "" if rank == 2 else text_of(rank, BARRIER).partition("\n")[2]
        (tmp_path / f"rank_{rank}.txt").write_text(text)
    code, found = run(str(tmp_path))
    assert (code, found["class"], [c["rank"] for c in found["culprits"]]) == (1, "undumpable", [2])
    assert found["undumped"][0]["reason"] == "its file is empty"


def test_files_of_nodes_with_equal_pids_are_different_ranks(tmp_path: Path) -> None:
    for node in ("n1", "n2"):
        text = "".join(text_of(0, REDUCE, pid=pid).partition("\n")[2] for pid in (10, 11))
        (tmp_path / f"trace-{node}.out").write_text(text)
    _, found = run(str(tmp_path))
    assert (found["ranks"], found["groups"][0]["hosts"]) == (4, ["n1", "n2"])


@pytest.mark.parametrize(
    ("name", "host"),
    [("hang2.txt", None), ("py312-run7.out", None), ("trace-jean07.out", "jean07"), ("gpu07.txt", "gpu07")],
)
def test_the_only_file_is_named_for_the_occasion_unless_its_name_is_a_nodes(
    tmp_path: Path, name: str, host: str | None
) -> None:
    text = "".join(text_of(rank, LOADER if rank == 2 else REDUCE) for rank in range(4))
    (tmp_path / name).write_text(text)
    _, found = run(str(tmp_path / name), "--since-last-step", "4000")
    assert [(c["rank"], c["host"]) for c in found["culprits"]] == [(2, host)]


def test_stacks_as_pytorch_prints_them_are_read() -> None:
    def recorded(frames: Sequence[str]) -> str:
        split = [frame.rstrip(")").split(" (") for frame in frames]
        return "".join(f"  #{at} {name} from /opt/{file}\n" for at, (name, file) in enumerate(split))

    text = "".join(f"Rank {rank}:\n{recorded(LOADER if rank == 1 else REDUCE)}" for rank in range(4))
    _, found = run("-", "--since-last-step", "4000", stdin=text)
    assert [c["rank"] for c in found["culprits"]] == [1]


def test_a_bundle_of_an_incident_is_read_from_its_archive(tmp_path: Path) -> None:
    """As `explain --bundle` writes it: later dumps have only the threads that changed."""

    def thread(pid: int, frames: Sequence[str]) -> dict[str, Any]:
        split = [frame.rstrip(")").split(" (") for frame in frames]
        listed = [
            {"function": name, "file": file.rpartition(":")[0], "line": int(file.rpartition(":")[2])}
            for name, file in split
        ]
        return {"thread_id": pid, "name": "MainThread", "active": False, "frames": listed}

    archive = tmp_path / "incident.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for rank in range(4):
            frames = FORWARD if rank == 1 else REDUCE
            first = {"age_s": 20.0, "threads": [thread(70 + rank, frames)], "unchanged": []}
            later = {"age_s": 1.0, "threads": [], "unchanged": [70 + rank]}
            evidence = {
                "rank": rank,
                "role": "rank",
                "pid": 70 + rank,
                "comm": "python",
                "dumps": [first, later],
            }
            text = text_of(rank, frames, pid=70 + rank).partition("\n")[2]
            answer = {"groups": [{"frames": ["all_reduce (x.py)"], "ranks": [9]}]}
            for name, content in (
                ("stacks.txt", text),
                ("evidence.json", json.dumps(evidence)),
                ("diagnosis.json", json.dumps(answer)),
            ):
                info = tarfile.TarInfo(f"n1/rank-{rank}/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content.encode()))
    code, found = run(str(archive))
    assert (code, found["ranks"], [(c["rank"], c["host"]) for c in found["culprits"]]) == (1, 4, [(1, "n1")])


def test_codes_of_the_command(tmp_path: Path) -> None:
    well = "".join(text_of(rank, FORWARD) for rank in range(4))
    assert run("-", stdin=well)[0] == 0
    assert run("-", stdin="no stack at all\n")[0] == 2
    assert run(str(tmp_path / "not-there"))[0] == 2


def test_a_person_reads_one_sentence_then_groups_then_what_to_do() -> None:
    text = "".join(text_of(r, LOADER if r == 2 else REDUCE, host="n1") for r in range(8))
    output = CliRunner().invoke(main, ["group-stacks", "-"], input=text).output
    lines = output.splitlines()
    assert lines[0].startswith("Rank 2 (pid 40002 on n1) waits for its data loader, in _try_get_data")
    assert lines[0].endswith("and 7 ranks wait in all_reduce.")
    assert "0-1,3-7" in output
    assert "What to do next" in output


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_in_a_file_crash_nothing(data: bytes) -> None:
    result = CliRunner().invoke(main, ["group-stacks", "-"], input=data)
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_heading_behind_the_prefix_of_its_host_says_whose_stack_follows() -> None:
    text = "".join(
        f"n{rank // 2}: {line}\n"
        for rank, place in enumerate((REDUCE, REDUCE, LOADER, REDUCE))
        for line in text_of(rank, place).replace("===", "###").splitlines()
    )
    found = diagnose_dumps(parse_stacks(text), Options(since_last_step_s=HOUR))
    assert [(each.rank, each.node) for each in found.culprits] == [(2, "n1")]


# ------------------------------------------------------------------------------------------ who normally looks alike

P2P = ("recv_forward (megatron/core/pipeline_parallel/p2p_communication.py:420)", *TAIL)
MEGATRON = "python pretrain_gpt.py --tensor-model-parallel-size {} --pipeline-model-parallel-size {}"


def with_command(places: Sequence[Sequence[str]], command: str) -> list[Dump]:
    text = "".join(text_of(r, frames).replace("python -u pretrain.py", command) for r, frames in enumerate(places))
    return parse_stacks(text)


LATE = Options(since_last_step_s=HOUR, typical_step_s=5.0)


def test_a_rank_that_left_its_tensor_parallel_group_is_named_only_if_the_groups_are_known() -> None:
    places = [P2P] * 4 + [REDUCE] * 4 + [P2P] * 4 + [BROADCAST] * 4
    places[6] = P2P  # its three peers are in all_reduce
    assert diagnose_dumps(dumps_of(places), LATE).culprits == ()
    found = diagnose_dumps(with_command(places, MEGATRON.format(4, 2)), LATE)
    assert said(found) == (True, "collective_mismatch", [6])
    assert "than the 3 others of its tensor-parallel group (all_reduce)" in found.summary
    assert diagnose_dumps(with_command(places, MEGATRON.format(4, 2)), Options()).culprits == ()
    assert diagnose_dumps(with_command(places, MEGATRON.format(2, 2)), LATE).culprits == ()


def test_the_pipeline_that_has_not_finished_is_told_and_nobody_is_named() -> None:
    places = [P2P if rank % 4 == 2 else REDUCE for rank in range(16)]  # four stages, four copies
    before, found = (
        diagnose_dumps(dumps_of(places), LATE),
        diagnose_dumps(with_command(places, MEGATRON.format(1, 4)), LATE),
    )
    assert "Ranks 2, 6, 10, 14" not in before.summary
    assert said(found) == (True, "pipeline", [])
    assert "Ranks 2, 6, 10, 14 of it wait for each other" in found.summary
    places[3] = P2P  # of another copy: then it is no single one
    assert "Ranks 2" not in diagnose_dumps(with_command(places, MEGATRON.format(1, 4)), LATE).summary


@given(st.lists(st.sampled_from([P2P, REDUCE, BROADCAST, BARRIER]), min_size=8, max_size=8), st.sampled_from([(2, 2), (4, 2), (8, 1), (1, 2)]))  # fmt: skip
def test_whoever_is_named_by_topology_is_alone_among_peers_that_agree(
    places: list[Sequence[str]], sizes: tuple[int, int]
) -> None:
    found = diagnose_dumps(with_command(places, MEGATRON.format(*sizes)), LATE)
    for culprit in found.culprits:
        peers = [
            p for r, p in enumerate(places) if r // sizes[0] == (culprit.rank or 0) // sizes[0] and r != culprit.rank
        ]
        alone = len([p for p in places if p is places[culprit.rank or 0]]) == 1
        assert alone or (len({id(p) for p in peers}) == 1 and peers[0] is not places[culprit.rank or 0])


def test_a_topology_that_does_not_fit_is_told_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("".join(text_of(r, REDUCE) for r in range(6)))
    result = CliRunner().invoke(main, ["group-stacks", "--topology", "tp=4", str(tmp_path / "all.txt")])
    assert "--topology tp=4 was not used" in result.stderr
    assert CliRunner().invoke(main, ["group-stacks", "--topology", "tp=2,pp=3", str(tmp_path / "all.txt")]).stderr == ""


def test_the_command_line_that_stands_in_json_names_the_rank() -> None:
    def threads(rank: int, frames: Sequence[str]) -> str:
        told = [{"name": f.split(" (")[0], "filename": f.split(" (")[1].rpartition(":")[0], "line": 1} for f in frames]
        about = {"pid": 900 + rank, "command_line": f"python train.py --rank={rank} --world-size 4"}
        return json.dumps([{"pid": 900 + rank, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 900 + rank, "frames": told, "process_info": about}])  # fmt: skip

    text = "\n".join(threads(r, LOADER if r == 2 else REDUCE) for r in range(4))
    assert [each.rank for each in diagnose_dumps(parse_stacks(text), LATE).culprits] == [2]


def test_labels_that_srun_makes_equally_wide_are_read() -> None:
    lines = [
        f"{rank:2d}: {line}\n"
        for rank in range(12)
        for line in text_of(rank, LOADER if rank == 3 else REDUCE).split("\n")[1:]
    ]
    found = diagnose_dumps(parse_stacks("".join(lines)), LATE)
    assert (found.ranks, [each.rank for each in found.culprits]) == (12, [3])


GENERATE = (
    "forward (model.py:20)",
    "generate (transformers/generation/utils.py:2200)",
    "log_samples (train.py:99)",
    *TAIL,
)


@pytest.mark.parametrize(("since", "is_hang"), [(300.0, False), (1700.0, False), (HOUR, True)])
def test_the_first_rank_may_generate_samples_while_the_others_wait(since: float, is_hang: bool) -> None:
    assert verdict(GENERATE, BARRIER, BARRIER, BARRIER, since=since, step=12.0).is_hang is is_hang


@pytest.mark.parametrize(
    "heading", ["--- Rang {} ---", "Knoten n1, Rang {}:", "=== ランク {} ===", "Узел n1, ранг {}:"]
)
def test_a_heading_in_another_language_names_the_rank(heading: str) -> None:
    places = (REDUCE, REDUCE, LOADER, REDUCE)
    text = "".join(heading.format(r) + "\n" + text_of(r, frames).split("\n", 1)[1] for r, frames in enumerate(places))
    assert [each.rank for each in diagnose_dumps(parse_stacks(text), LATE).culprits] == [2]


def test_the_only_file_is_named_for_what_was_seen_and_neither_a_rank_nor_a_host(tmp_path: Path) -> None:
    path = tmp_path / "hang2_rank0_writes_5min.txt"
    path.write_text("".join(text_of(r, LOADER if r == 2 else REDUCE).split("\n", 1)[1] for r in range(4)))
    (dump, *_) = assign_ranks(parse_stacks(path.read_text(), path.name)).ranks
    assert (dump.rank, dump.host) == (None, "")


WAITS = """\
Timeout (0:10:00)!
Thread {other} (most recent call first):
  File "threading.py", line 331 in wait
  File "threading.py", line 1002 in _bootstrap

Thread {main} (most recent call first):
{frames}  File "/home/u/train.py", line {line} in step
  File "/home/u/train.py", line 90 in <module>

"""
"""As faulthandler.dump_traceback_later(repeat=True) writes it: no pid, no rank, threads by their addresses."""


def repeated(*places: tuple[int, int], frames: str = "") -> RankAssignment:
    """Dumps of main threads at these addresses, in these lines."""
    texts = (WAITS.format(other=hex(main + 0x1000), main=hex(main), line=line, frames=frames) for main, line in places)
    return assign_ranks(parse_stacks("".join(texts), "log.txt"))


def test_repeated_dumps_of_faulthandler_are_one_process_and_the_last_one_counts() -> None:
    (one,) = repeated((0x7FD61B222B80, 10), (0x7FD61B222B80, 20), (0x7FD61B222B80, 20)).ranks
    assert [each.threads[-1].frames[0].line for each in one.dumps] == [10, 20, 20]
    two = repeated((0x7FD61B222B80, 10), (0x7F0000222B80, 10), (0x7FD61B222B80, 10), (0x7F0000222B80, 10)).ranks
    assert [len(each.dumps) for each in two] == [2, 2]


def test_forked_ranks_whose_main_threads_have_one_address_stay_several_processes() -> None:
    forked = '  File "multiprocessing/process.py", line 314 in _bootstrap\n'
    assert len(repeated((0x7FD61B222B80, 10), (0x7FD61B222B80, 20), frames=forked).ranks) == 2


SAVE_BARRIER = (BARRIER[0], "save_checkpoint (ckpt.py:40)", *TAIL)
COPIES = ("copytree (shutil.py:593)", "mirror (store.py:9)", *TAIL)
STARTED = ("_wait (subprocess.py:2053)", "wait (subprocess.py:1264)", "mirror (store.py:9)", *TAIL)


@pytest.mark.parametrize("odd", [COPIES, STARTED])
def test_who_copies_or_starts_something_while_the_others_wait_in_a_save_may_be_saving(odd: Sequence[str]) -> None:
    places = (SAVE_BARRIER, odd, SAVE_BARRIER, SAVE_BARRIER)
    assert verdict(*places).culprits == ()
    assert verdict(*places, since=300.0, step=5.0).culprits == ()
    assert said(verdict(*places, since=2 * HOUR, step=5.0))[2] == [1]


def test_who_waits_for_its_loader_while_the_others_wait_in_a_save_is_named_at_once() -> None:
    assert said(verdict(SAVE_BARRIER, LOADER, SAVE_BARRIER, SAVE_BARRIER, since=300.0, step=5.0))[2] == [1]


@pytest.mark.parametrize(
    "inner",
    ["full_tensor (torch/distributed/tensor/_api.py:570)", "wait (/env/site-packages/ring_flash_attn/utils.py:150)"],
)
def test_who_waits_in_a_tensor_of_several_ranks_or_a_ring_of_attention_waits_for_its_peers(inner: str) -> None:
    waits = (inner, *TAIL)
    assert verdict(REDUCE, waits, REDUCE, REDUCE, waits, waits, since=HOUR).culprits == ()
    assert said(verdict(waits, waits, LOADER, waits, since=HOUR))[2] == [2]


def eu_stack(pid: int, *functions: str) -> str:
    frames = "".join(f"#{at}  0x00007f1b2c0a1{at:03} {name}\n" for at, name in enumerate(functions))
    other = "#0  0x00007f1b2c0a1117 pthread_cond_timedwait@@GLIBC_2.3.2\n#1  0x00007f1b2c0a1118 clone3\n"
    return f"PID {pid} - process\nTID {pid}:\n{frames}TID {pid + 1}:\n{other}"


@pytest.mark.parametrize("tail", ["", " - /usr/lib64/libc.so.6", "\n    ../sysdeps/unix/sysv/linux/read.c:26:10"])
def test_eu_stack_is_read(tail: str) -> None:
    waits, reads = (
        ("clock_gettime", "cuStreamSynchronize", "main"),
        (f"__libc_read{tail}", "_io_FileIO_readinto", "main"),
    )
    texts = [f"=== rank {rank} ===\n{eu_stack(700 + 10 * rank, *(reads if rank == 2 else waits))}" for rank in range(4)]
    found = diagnose_dumps(parse_stacks("".join(texts)), LATE)
    assert [(each.rank, each.pid) for each in found.culprits] == [(2, 720)]


def test_folders_named_for_the_occasion_are_no_nodes() -> None:
    texts = [(f"sample_{at}/rank_{r}.txt", text_of(r, LOADER if r == 2 else REDUCE)) for at in (1, 2) for r in range(4)]
    dumps = [dump for name, text in texts for dump in parse_stacks(text, name)]
    assert [(each.node, each.rank) for each in diagnose_dumps(dumps).culprits] == [(None, 2)]


def test_the_only_rank_that_is_not_in_the_backward_pass_is_shown_and_convicted_of_nothing() -> None:
    found = verdict(*[BACKWARD] * 6, UPLOAD, BACKWARD)
    assert not found.is_hang
    assert found.culprits == ()
    assert [each.rank for each in found.odd] == [6]
    assert found.summary.startswith("No hang is proven: 7 ranks are in the backward pass")
    for mixed in ([*[BACKWARD] * 6, FORWARD, UPLOAD], [BACKWARD, BACKWARD, UPLOAD], [BACKWARD] * 8):
        assert verdict(*mixed).odd == ()


def test_as_many_ranks_outside_a_collective_as_in_it_are_not_called_more() -> None:
    found = verdict(REDUCE, LOADER)
    assert found.summary.startswith("No rank differs: as many ranks are outside the collective as wait in it.")
