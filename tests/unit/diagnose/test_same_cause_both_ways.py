"""The same failed run gives the same cause and culprit with `scan-log` on its whole log and live, from the
lines that agents report: through trace, state, detectors and correlation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from slurm_watchdog.config.schema import Config
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.log_error import detect
from slurm_watchdog.diagnose.logs.root_cause import Cause, find_cause
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Incident, IncidentKind, Severity, Truth
from slurm_watchdog.replay.player import Outcome, Player
from tests.builders.failed_logs import SPEAKERS, VERDICTS, Expected
from tests.builders.told import Told

CASES = {name: (text, expected) for name, text, expected in (*VERDICTS, *SPEAKERS)}
SLURM_SAYS_S, WAITED_S = 11.0, 30

FEWER_LINES = "agents report the lines that look like an error, and what decides it here is another line"
NO_RANK_SEEN = "no rank of the run was seen, and Slurm does not name the task: a number in front may be anything's"
OTHER_DETECTOR = "a loss that is NaN is what loss_nan watches"
LESS_IS_KNOWN: dict[str, str] = {
    **dict.fromkeys(
        (
            "a lookup that failed is no cause", "the table tells the rank of a local rank", "the table alone: killed",
            "the table alone: SIGSEGV", "a row that aborted is a victim", "a destructor", "the noise of the end",
            "NCCL's word for a call of CUDA in its own process", "Paddle's container", "Ray: which rank the killed process was",
            "Ray: two hosts have the same pid", "a result that is no number", "what gloo's transport says is a "
                "consequence",
            "of recorded errors the one of the root cause", "a victim of the same host", "a victim of the same local rank on another node", "the table of another node lists its "
                "victim",
            "the output of a rank, as Composer's launcher prints it", "several files in one", "what Horovod waits for",
            "what shells and drivers miss at the start, and one step", "exceptions of a type that was survived before, in code that a model wrote",
            "Horovod's word for an exception elsewhere", "ranks of a group that can only be all",
            "what another rank said", "an exception from another rank", "the first at a barrier that others missed",
            "what was read from flight recorders", "a daemon that mpirun lost", "one below the other is not one after "
                "the other",
        ),
        FEWER_LINES,
    ),
    **dict.fromkeys(
        (
            "srun --label", "some fail alike: the first", "a large number after a host, in every line of "
                "a traceback", "the numbers of tasks",
            "a rank in the words of an exception with a dotted name", "a rank that several say they lost",
            "a rank that the first rank says it lost", "a host of a large job", "labels of equal width",
        ),
        NO_RANK_SEEN,
    ),
    **{name: OTHER_DETECTOR for name, (_, expected) in CASES.items() if expected == ("loss_nan", None, None)},
}  # fmt: skip
"""Cases of which a live incident knows less, and why. It may then name nobody, and never another one."""


def trace_of(text: str, nodes: tuple[str, ...], ranks: int = 0) -> Iterator[dict[str, object]]:
    """A run that writes `text`, a line a second, and fails: its log is read on the first node. The first `ranks` ranks
    were seen there before."""
    yield {
        "t": 0.0, "kind": "job", "job_id": "7", "state": "RUNNING", "nodes": nodes, "restarts": 0, "name": "m", "user": "u",
        "batch_host": nodes[0],
    }  # fmt: skip
    for rank in range(ranks):
        yield {
            "t": 0.5, "kind": "proc", "node": nodes[0], "job_id": "7", "rank": rank, "pid": 4710 + rank, "start": 10.0 + rank,
            "state": "S", "cpu_s": 100.0,
        }  # fmt: skip
    at = 0
    for at, line in enumerate(text.splitlines(), 1):
        yield {
            "t": at,
            "kind": "log",
            "node": nodes[0],
            "job_id": "7",
            "stream": "train.log",
            "line": line,
        }
        if at % 20 == 1:
            yield from ({"t": at, "kind": "report", "node": node} for node in nodes)
    yield from ({"t": at + 10, "kind": "report", "node": node} for node in nodes)
    yield {"t": at + SLURM_SAYS_S, "kind": "job", "job_id": "7", "state": "FAILED"}
    for later in range(5, WAITED_S + 1, 5):
        yield from ({"t": at + SLURM_SAYS_S + later, "kind": "report", "node": node} for node in nodes)


def played(text: str, nodes: tuple[str, ...], ranks: int = 0) -> tuple[ClusterView, Outcome]:
    """(what the controller behind the whole run sees, and what it found)."""
    with Player(Config()) as player:
        for entry in Told().entries(trace_of(text, nodes, ranks)):
            player.take(entry)
        return player.controller.judge.view, player.outcome()


def live(text: str, nodes: tuple[str, ...], ranks: int = 0) -> tuple[Cause | None, list[Incident]]:
    """(the cause that was found, the incidents that were opened about errors in the log)."""
    view, outcome = played(text, nodes, ranks)
    runs = [ended.run for ended in view.ended if ended.run is not None]
    told = [incident for incident in outcome.incidents if incident.kind == IncidentKind.LOG_ERROR]
    return (find_cause(runs[0]) if runs else None), told


def named(cause: Cause | None) -> Expected:
    """What a cause says, in the shape of a verdict of `scan-log`; a run that somebody ended from outside has none."""
    if cause is None or cause.from_outside:
        return None
    if len(cause.suspects) == 1:
        return cause.pattern, cause.suspects[0].rank, cause.suspects[0].node
    return cause.pattern, cause.rank, cause.node


def nodes_of(text: str, expected: Expected) -> tuple[str, ...]:
    host = expected[2] if expected is not None else None
    return tuple(dict.fromkeys([*([host] if host else []), *re.findall(r"\bn\d+\b", text), "n1", "n2"]))


@pytest.mark.parametrize("name", CASES)
def test_cause_and_culprit_are_the_same_live_and_in_the_whole_log(name: str) -> None:
    text, expected = CASES[name]
    cause, incidents = live(text, nodes_of(text, expected))
    found = named(cause)
    if name in LESS_IS_KNOWN:
        assert found != expected, f"it is the same now: take it out of the list ({LESS_IS_KNOWN[name]})"
        rank, host = expected[1:] if expected is not None else (None, None)
        assert found is None or (found[1] in (rank, None) and found[2] in (host, None))
    else:
        assert found == expected
    accused = {(culprit.rank, culprit.node) for incident in incidents for culprit in incident.culprits}
    assert not accused or (found is not None and accused == {found[1:]})


ENDINGS = [
    pytest.param(case, id=case["name"])
    for case in yaml.safe_load((Path(__file__).parents[2] / "captures/field/endings.yaml").read_text())
]


@pytest.mark.parametrize("case", ENDINGS)
@pytest.mark.parametrize("seen", [0, 4])
def test_how_a_rank_ended_is_in_the_incident(case: dict[str, Any], seen: int) -> None:
    """`seen`: so many ranks were known before, with their processes, all on the first node."""
    nodes = nodes_of(case["log"], None)
    _, incidents = live(case["log"], nodes, seen)
    accused = {(culprit.rank, culprit.node) for incident in incidents for culprit in incident.culprits}
    ranks = {*case.get("ranks", [None]), *case.get("live_ranks", [])}
    hosts = {*case.get("hosts", [None]), *case.get("live_hosts", []), *([nodes[0]] if seen else [])}
    assert {rank for rank, _ in accused} <= {*ranks, None} and {node for _, node in accused} <= hosts | {None}
    if not case["incident"]:
        assert not accused or "live_ranks" in case
    elif None not in ranks and ranks <= set(range(seen or 9)):
        assert {rank for rank, _ in accused} == ranks, [incident.summary for incident in incidents]
    else:
        assert incidents
    for words in [case["live"]] if "live" in case else []:
        assert any(words in incident.summary for incident in incidents), [incident.summary for incident in incidents]


def test_lines_of_errors_are_not_counted_as_ranks() -> None:
    again = (
        'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nRuntimeError: operator is missing\n'
    )
    _, incidents = live(again * 6, ("n1",), ranks=2)
    (summary,) = {incident.summary for incident in incidents}
    assert "ranks" not in summary


@pytest.mark.parametrize("case", ENDINGS)
def test_what_run_starts_again_by_itself_is_told_as_what_it_does_not(case: dict[str, Any]) -> None:
    view, _ = played(case["log"], nodes_of(case["log"], None))
    again = "its command ended with exit code 1, restarting (1 of 3)"
    started = tuple(replace(each, job=replace(each.job, starts_again=again)) for each in view.ended)
    for last, next_one in zip(
        *(detect(replace(view, ended=ended), CollectiveHang()) for ended in (view.ended, started)),
        strict=True,
    ):
        if last.truth is Truth.BAD:
            assert (next_one.truth, next_one.severity) == (Truth.BAD, Severity.WARNING)
            assert next_one.culprits == last.culprits
            assert next_one.summary.partition("; ")[2] == last.summary.partition("; ")[2]
