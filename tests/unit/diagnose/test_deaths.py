"""How a process died, in launchers' words: the same material gives the same class and rank live (line by
line, as agents report it) and with `scan-log`, and nobody is accused who only ended after another one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.lingering_job import dead_rank
from slurm_watchdog.detect.log_error import detect
from slurm_watchdog.diagnose.logs.digest import Collector
from slurm_watchdog.diagnose.logs.report import judge_job
from slurm_watchdog.diagnose.logs.root_cause import (
    Cause,
    find_cause,
    how_they_ended,
    last_error_before_end,
    logged_error,
)
from slurm_watchdog.knowledge.launcher_exits import ending_of
from slurm_watchdog.model.cluster_view import ErrorLine, JobView
from slurm_watchdog.model.evidence import OwnWords
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.past_runs import PastRun, RankLocation
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.text import kept_line
from tests.builders.failed_logs import DEFAULTS
from tests.builders.views import cluster, job, progress, seen, slurm_job

PIDS = {0: 4710, 1: 4711, 2: 4712, 3: 4713}


def live(text: str, nodes: tuple[str, ...] = ("n1",), known: bool = True) -> Cause | None:
    """What the controller makes of the lines that agents report. `known`: the ranks had been seen before they died."""
    return find_cause(past_of(text, nodes, known))


def past_of(text: str, nodes: tuple[str, ...] = ("n1",), known: bool = True) -> PastRun:
    seats = tuple(RankLocation(rank, nodes[rank * len(nodes) // 4], pid) for rank, pid in PIDS.items()) if known else ()
    errors = []
    for number, line in enumerate(text.splitlines()):
        fact = parse_line(line)
        if fact is not None and fact.kind is EventKind.ERROR:
            event = Event(
                kind=EventKind.ERROR, job_id="7", age_s=0.0, source="log", line=kept_line(line), pattern=fact.pattern, rank=fact.rank
            )  # fmt: skip
            errors.append(logged_error(event, nodes[0], 100.0 + number / 1000))
    return PastRun(
        restarts=0,
        began_at=0.0,
        ended_at=9_990.0,
        steps_seen=9,
        last_step=9,
        rose_at=90.0,
        errors=tuple(errors),
        ranks=4,
        log_read=True,
        nodes=nodes,
        batch_host=nodes[0],
        seats=seats,
    )


def offline(text: str) -> tuple[str, int | None] | None:
    collector = Collector()
    collector.add(text.encode(), 1)
    verdict = judge_job(["train.log"], [collector.digest()], DEFAULTS, None).verdict
    return None if verdict is None else (verdict.name, verdict.rank)


def torchrun(code: int, signal: str, pid: int = 4711, rank: int = 1) -> str:
    """What torchrun 2.13 prints of a worker that ended, in its order: the others are ended, the failure, its
    own traceback, the table."""
    said = (
        f"Signal {-code} ({signal}) received by PID {pid}"
        if code < 0
        else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    )
    return f"""W1122 06:41:07.811000 4700 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 4710 closing signal SIGTERM
E1122 06:41:07.925000 4700 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of binary: /opt/venv/bin/python
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 313, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_06:41:07
  host      : n1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : {said}
============================================================
"""


VICTIM_OF_TERM = """Traceback (most recent call last):
  File "/opt/train.py", line 60, in main
    for batch in loader:
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/signal_handling.py", line 73, in handler
    _error_if_any_worker_fails()
RuntimeError: DataLoader worker (pid 4790) is killed by signal: Terminated.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/opt/train.py", line 90, in <module>
    main()
RuntimeError: DataLoader worker (pid(s) 4790) exited unexpectedly
"""
"""Rank 0, whom the launcher ended: Lightning's loader."""

OPEN_MPI_4 = """--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun noticed that process rank 1 with PID 4711 on node n1 exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_5 = """--------------------------------------------------------------------------
prterun noticed that process rank 3 with PID 4713 on node n1 exited on
signal 11 (Segmentation fault).
--------------------------------------------------------------------------
"""
OPEN_MPI_CODE = """--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[61507,1],2]
  Exit code:    3
--------------------------------------------------------------------------
"""
INTEL_MPI = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 1 PID 4711 RUNNING AT n1
=   KILLED BY SIGNAL: 9 (Killed)
===================================================================================
"""
MPICH = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4712 RUNNING AT n1
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
PALS = """x1000c0s0b0n0.hsn.example: rank 2 died from signal 9
x1000c0s0b0n0.hsn.example: rank 0 died from signal 15
x1000c0s0b0n0.hsn.example: rank 1 died from signal 15
"""
COMPOSER = """ERROR:composer.cli.launcher:Rank 1 crashed with exit code -9.
Waiting up to 30 seconds for all training processes to terminate. Press Ctrl-C to exit immediately.
Global rank 0 (PID 4710) exited with code -15
Global rank 1 (PID 4711) exited with code -9
"""
GLOO_VICTIM = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/opt/train.py", line 71, in <module>
[rank0]:     main()
[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:41234
"""

DEATHS: dict[str, tuple[str, str, int | None, str]] = {
    "torchrun": (torchrun(-9, "SIGKILL"), "killed", 1, "was killed (SIGKILL)"),
    "torchrun, a victim's loader ended by SIGTERM before it": (VICTIM_OF_TERM + torchrun(-9, "SIGKILL"), "killed", 1, "was killed (SIGKILL)"),
    "torchrun, a victim that lost its peer": (GLOO_VICTIM + torchrun(-9, "SIGKILL"), "killed", 1, "was killed (SIGKILL)"),
    "torchrun, a segmentation fault": (torchrun(-11, "SIGSEGV", 4713, 3), "segmentation_fault", 3, "died of SIGSEGV"),
    "Open MPI 4": (OPEN_MPI_4, "killed", 1, "was killed (SIGKILL)"),
    "Open MPI 5, wrapped": (OPEN_MPI_5, "segmentation_fault", 3, "died of SIGSEGV"),
    "Intel MPI": (INTEL_MPI, "killed", 1, "was killed (SIGKILL)"),
    "PALS": (PALS, "killed", 2, "was killed (SIGKILL)"),
    "Composer": (COMPOSER, "killed", 1, "was killed (SIGKILL)"),
}  # fmt: skip


@pytest.mark.parametrize("text", [pytest.param(each, id=name) for name, each in DEATHS.items()])
def test_a_death_is_the_same_live_and_in_the_whole_log(text: tuple[str, str, int | None, str]) -> None:
    log, name, rank, how = text
    assert offline(log) == (name, rank)
    for known in (True, False):
        cause = live(log, known=known)
        assert cause is not None and (cause.pattern, cause.rank, cause.how) == (name, rank, how), known
        assert not cause.only_consequence


def test_mpich_names_a_process_whose_rank_only_the_agents_know() -> None:
    cause = live(MPICH)
    assert cause is not None and (cause.pattern, cause.rank) == ("killed", 2)
    assert offline(MPICH) == ("killed", None)
    unseen = live(MPICH, known=False)
    assert unseen is not None and (unseen.pattern, unseen.rank) == ("killed", None)


CODES = {"torchrun": torchrun(1, ""), "Open MPI": OPEN_MPI_CODE}


@pytest.mark.parametrize("log", CODES.values(), ids=CODES)
def test_an_exit_code_is_said_and_is_no_cause(log: str) -> None:
    cause = live(log)
    assert cause is not None and cause.only_consequence
    assert cause.how.startswith("exited with code ")


ECHOES = {
    "a loader's worker, ended with its rank": VICTIM_OF_TERM,
    "Lightning's handler": "[rank: 0] Received SIGTERM: 15\n[rank0]: Traceback (most recent call "
        "last):\n[rank0]: lightning.pytorch.utilities.exceptions.SIGTERMException\n",
    "torchrun was told to end": "W1122 06:41:07.811000 4700 "
        "torch/distributed/elastic/agent/server/api.py:725] Received 15 death signal, shutting down "
        "workers\n"
    "W1122 06:41:07.812000 4700 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process "
    "4710 closing signal SIGTERM\n"
    "Traceback (most recent call last):\n  File \"/opt/venv/bin/torchrun\", line 8, in <module>\n    sys.exit(main())\n"
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4700 got signal: 15\n",
}  # fmt: skip


@pytest.mark.parametrize("log", ECHOES.values(), ids=ECHOES)
def test_a_rank_ended_while_it_works_names_no_culprit(log: str) -> None:
    cause = live(log)
    assert cause is None or (cause.only_consequence and cause.rank is None), cause


GUESSED = {
    "Ray's list in the same line": "(raylet) A worker died or was killed while executing a task by an "
        "unexpected system error. Worker PID: 4711 Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due "
        "to high memory usage.",
    "Ray's list in a line of its own": "Some common causes include: (1) the process was killed by the "
        "OOM killer due to high memory usage (oom-kill), (2) ray stop --force was called",
    "a list line by line": "  (1) the process was killed: Out of memory: Killed process 4711",
    "a tracker's advice": "Possible reasons: CUDA out of memory, Segmentation fault, a full disk (No "
        "space left on device)",
}  # fmt: skip


@pytest.mark.parametrize("line", GUESSED.values(), ids=GUESSED)
def test_a_list_of_what_may_have_happened_is_no_cause(line: str) -> None:
    fact = parse_line(line)
    assert fact is None or fact.pattern == "ray_actor_died"


def test_the_words_before_a_guess_count() -> None:
    fact = parse_line("RuntimeError: No space left on device. Possible causes: a full quota")
    assert fact is not None and fact.pattern == "disk_full"


@pytest.mark.parametrize(
    "line",
    ["step 12: rank 3 of the matrix", "Exit code: see below", "the signal 9 (Killed) is sent by hand", "rank: 3 (local_rank: 3)", "process 3 started"],
)  # fmt: skip
def test_a_line_that_only_looks_like_it_is_no_ending(line: str) -> None:
    assert ending_of(line) is None


def test_lines_after_we_ended_a_run_are_no_cause_and_earlier_ones_were_reported() -> None:
    raised = "[rank1]: RuntimeError: bad sample in shard 17\n"
    (error,) = past_of(raised).errors
    assert find_cause(replace(past_of(raised), touched_at=error.at - 1.0)) is None
    assert find_cause(replace(past_of(raised), touched_at=error.at + 1.0)) is not None
    ours = replace(past_of(raised + VICTIM_OF_TERM), restarts=0, touched_at=error.at + 0.0005)
    after = job(job=slurm_job(restarts=1), past=(ours,))
    assert [f.truth for f in detect(cluster(after), CollectiveHang()) if f.subject == "run:7.0"] == [Truth.OK]
    alone = replace(ours, touched_at=None)
    told = detect(cluster(job(job=slurm_job(restarts=1), past=(alone,))), CollectiveHang())
    assert [f.truth for f in told if f.subject == "run:7.0"] == [Truth.BAD]


def test_a_worker_that_was_killed_is_reported_of_a_run_that_was_followed_by_another() -> None:
    (finding,) = [
        f
        for f in detect(cluster(job(job=slurm_job(restarts=1), past=(past_of(COMPOSER),))), CollectiveHang())
        if f.subject == "run:7.0"
    ]  # fmt: skip
    assert finding.truth is Truth.BAD
    assert "rank 1 on n1 was killed (SIGKILL), as the kernel does for memory" in finding.summary


@pytest.mark.parametrize(
    "line",
    [
        '    raise RuntimeError("CUDA out of memory")',
        "    assert size, 'No space left on device'",
        '        message = f"Permission denied: {path}"',
        '  File "/opt/Permission denied.py", line 3, in main',
        '[rank1]:     raise FileNotFoundError("No such file or directory")',
    ],
)
def test_a_source_line_in_a_traceback_is_no_error(line: str) -> None:
    fact = parse_line(line)
    assert fact is None or fact.kind is not EventKind.ERROR


def test_how_a_rank_ended_is_said_of_that_rank() -> None:
    run = past_of(OPEN_MPI_4)
    (line,) = {error.line for error in run.errors if "process rank 1" in error.line}
    event = Event(kind=EventKind.ERROR, job_id="7", age_s=0.0, source="log", line=line, pattern="launcher")
    seats = tuple(seen(rank, gone_s=3.0 if rank == 1 else None, node="n1") for rank in range(4))
    dead = job(
        job=slurm_job(nodes=("n1",)),
        errors=(ErrorLine(node="n1", age_s=3.0, event=event),),
        processes=seats,
        progress=None,
    )
    assert how_they_ended(dead, [1], 10_000.0) == "was killed (SIGKILL)"
    assert how_they_ended(dead, [2], 10_000.0) == "ended"
    assert how_they_ended(dead, [1, 2], 10_000.0) == "ended", "it is said of one of them"
    assert last_error_before_end(dead, dead.ranks[1], 10_000.0) == "", "a launcher's line is none of its own"


def own_words(rank: int | None, line: str, pattern: str = "python_exception") -> ErrorLine:
    event = Event(kind=EventKind.ERROR, job_id="7", age_s=0.0, source="log", line=line, pattern=pattern, rank=rank)
    return ErrorLine(node="n1", age_s=4.0, event=event)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (
            [own_words(1, "[rank1]: ValueError: bad sample in shard 17.")],
            "ValueError: bad sample in shard 17",
        ),
        ([own_words(2, "[rank2]: ValueError: bad sample")], ""),  # another one's
        ([own_words(None, "ValueError: bad sample")], ""),  # nobody knows whose
        ([own_words(1, "[rank1]: Traceback (most recent call last):", "traceback")], ""),
        ([], ""),
    ],
)
def test_the_dead_ranks_own_exception_is_in_the_sentence_and_no_other_line(errors: list[ErrorLine], said: str) -> None:
    seats = tuple(seen(rank, gone_s=200.0 if rank == 1 else None, node="n1") for rank in range(4))
    dead = job(
        job=slurm_job(nodes=("n1",)),
        errors=tuple(errors),
        processes=seats,
        progress=progress(210.0, total_steps=900),
    )
    assert last_error_before_end(dead, dead.ranks[1], 10_000.0) == said
    (finding,) = dead_rank(cluster(dead))
    assert finding.truth is Truth.BAD
    assert finding.summary.endswith(f"3 of 4 are left. It logged before: {said}." if said else "3 of 4 are left.")


WROTE = "ValueError: bad shard 17 (train.py:31 in step)"


LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.0.7]:4411"


def ending(*wrote: tuple[int, float], said: str = WROTE) -> JobView:
    """Eight ranks on two nodes of which these wrote something so long ago, in that order; 1, 2 and 7 are gone."""
    return job(
        job=slurm_job(nodes=("n1", "n2")),
        processes=tuple(
            seen(rank, gone_s={1: 70.0, 2: 70.0, 7: 64.0}.get(rank), node=f"n{1 + rank // 6}") for rank in range(12)
        ),
        progress=progress(90.0, total_steps=900),
        own_words=tuple(OwnWords(node=f"n{1 + rank // 6}", rank=rank, age_s=age_s, text=said) for rank, age_s in wrote),
    )


@pytest.mark.parametrize(
    ("view", "named", "says"),
    [
        (ending((2, 74.0)), [2], True),
        (ending((2, 74.0), (1, 71.0)), [2], True),
        (ending((2, 72.0), (1, 71.0)), [1, 2, 7], True),
        (ending((2, 900.0)), [1, 2, 7], False),
        (ending((5, 74.0)), [1, 2, 7], False),
        (ending((7, 74.0)), [1, 2, 7], False),
        (ending((2, 74.0), said=LOST), [1, 2, 7], False),
        (ending(), [1, 2, 7], False),
    ],
    ids=["one", "first", "at_once", "old", "alive", "others_before", "consequence", "none"],
)
def test_of_several_dead_ranks_the_one_that_wrote_why_before_all_others_is_named(
    view: JobView, named: list[int], says: bool
) -> None:
    (finding,) = dead_rank(cluster(view))
    assert finding.truth is Truth.BAD
    assert [each.rank for each in finding.culprits] == named
    if len(named) == 1:
        assert f"It logged before: {WROTE}." in finding.summary
    assert f"rank 2 on n1 wrote {view.own_words[0].age_s:.0f} s ago: {WROTE}" in finding.facts if says else True
