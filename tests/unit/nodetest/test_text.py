"""One sentence, one table, one exit code."""

from __future__ import annotations

import pytest

from slurm_watchdog.cli.test_nodes_text import document, exit_code, print_report, summary
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.conduct import Report
from slurm_watchdog.nodetest.judge import Verdict, judge_nodes
from slurm_watchdog.nodetest.results import Fault
from slurm_watchdog.nodetest.select import Chosen
from tests.builders.measured_nodes import node, nodes

WELL = Chosen()


def report(*verdicts: Verdict) -> Report:
    return Report(began_at=0.0, ended_at=90.0, verdicts=verdicts)


def of(truth: Truth) -> Verdict:
    return Verdict(node="n2", truth=truth, unsure=("busy",) if truth is Truth.UNKNOWN else ())


@pytest.mark.parametrize(
    ("truth", "left", "code", "words"),
    [
        (Truth.OK, {}, 0, "All 2 nodes are well, tested in 90 s."),
        (Truth.UNKNOWN, {}, 3, "No node is known to be bad, of 2 nodes in 90 s; not judged: n2."),
        (Truth.OK, {"n3": "drained"}, 3, "No node is known to be bad, of 3 nodes in 90 s; not judged: n3."),
        (Truth.BAD, {"n3": "drained"}, 1, "n2 is bad, of 3 nodes tested in 90 s: half."),
    ],
)
def test_the_sentence_and_the_exit_code_follow_from_the_worst(
    truth: Truth, left: dict[str, str], code: int, words: str
) -> None:
    second = (
        Verdict(node="n2", truth=truth, faults=(Fault(place="cpu", what="half"),)) if truth is Truth.BAD else of(truth)
    )
    found, chosen = report(Verdict(node="n1", truth=Truth.OK), second), Chosen(left=left)
    assert (summary(found, chosen), exit_code(found, chosen)) == (words, code)


def test_the_bad_node_is_the_tables_first_row_and_the_document_has_every_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured = nodes(5, node("n3", figures={"cpu_all": 30000.0}))
    found = Report(began_at=0.0, ended_at=9.0, verdicts=tuple(judge_nodes(measured, {}, {})), nodes=tuple(measured))
    print_report(found, WELL)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["node", "verdict"]
    assert lines[2].startswith("n3    bad      2,000 MB/s     30,000 MB/s")
    row = next(each for each in document(found, WELL)["nodes"] if each["node"] == "n3")
    assert (row["verdict"], row["places"], row["figures"]["cpu_all"]) == ("bad", ["cpu"], 30000.0)
