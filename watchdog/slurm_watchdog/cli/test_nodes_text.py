"""What `test-nodes` shows: progress while it runs, then one sentence, one table, one document."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import click
import msgspec

from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, EXIT_UNKNOWN
from slurm_watchdog.cli.terminal import clean, count, duration, fold_nodes, sentence, table
from slurm_watchdog.knowledge.node_figures import KINDS
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.comparison import figures_of, worst
from slurm_watchdog.nodetest.conduct import Report
from slurm_watchdog.nodetest.jobs import Ended
from slurm_watchdog.nodetest.judge import Verdict, shown
from slurm_watchdog.nodetest.plan import NodeJob
from slurm_watchdog.nodetest.results import Line, Measured
from slurm_watchdog.nodetest.select import Chosen

WORDS = {Truth.BAD: "bad", Truth.OK: "well", Truth.UNKNOWN: "unknown"}
STYLES = {Truth.BAD: "bold red", Truth.OK: "", Truth.UNKNOWN: "magenta"}


class Shown:
    """Progress on standard error: one line that is rewritten on a terminal, a line for each job elsewhere."""

    def __init__(self) -> None:
        self._what, self._jobs, self._done = "", 0, 0
        self._live = sys.stderr.isatty()
        self._now: dict[str, str] = {}

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def part(self, what: str, jobs: int) -> None:
        self._what, self._jobs, self._done = what, jobs, 0
        self._print(f"{what}: {count(jobs, 'job')}")

    def heard(self, job: NodeJob, line: Line) -> None:
        """A phase of a job has begun or ended."""
        if self._live and line.state == "begun":
            self._now[" ".join(job.nodes)] = line.phase
            running = ", ".join(f"{node} {phase}" for node, phase in list(self._now.items())[:4])
            self._rewrite(f"{self._what} {self._done + 1} of {self._jobs}: {running}")

    def ended(self, job: Ended) -> None:
        self._done += 1
        name = " ".join(job.nodes)
        self._now.pop(name, None)
        self._print(f"{self._what} {self._done} of {self._jobs}: {name} {job.why or 'measured'}")

    def _print(self, text: str) -> None:
        if self._live:
            self._rewrite(text)
        else:
            click.echo(clean(text), err=True)

    def _rewrite(self, text: str) -> None:
        click.echo(f"\r\x1b[K{clean(text)[:110]}", err=True, nl=False)

    def _clear(self) -> None:
        if self._live:
            click.echo("\r\x1b[K", err=True, nl=False)


def exit_code(report: Report, chosen: Chosen) -> int:
    """1: a node is named; 3: one was not judged; 0: all are well."""
    truths = {each.truth for each in report.verdicts}
    if Truth.BAD in truths:
        return EXIT_FOUND
    return EXIT_UNKNOWN if Truth.UNKNOWN in truths or chosen.left else EXIT_FINE


def summary(report: Report, chosen: Chosen) -> str:
    """One sentence."""
    bad = [each for each in report.verdicts if each.truth is Truth.BAD]
    unknown = [each.node for each in report.verdicts if each.truth is Truth.UNKNOWN] + list(chosen.left)
    all_nodes = count(len(report.verdicts) + len(chosen.left), "node")
    took = duration(report.ended_at - report.began_at)
    if len(bad) == 1:
        return f"{bad[0].node} is bad, of {all_nodes} tested in {took}: {bad[0].reasons[0]}."
    if bad:
        return f"{fold_nodes([each.node for each in bad])} are bad, of {all_nodes} tested in {took}."
    if unknown:
        return f"No node is known to be bad, of {all_nodes} in {took}; not judged: {fold_nodes(unknown)}."
    return f"All {all_nodes} are well, tested in {took}."


def print_report(report: Report, chosen: Chosen) -> None:
    """Sentence and table, and what is wrong between nodes where nobody is named."""
    sentence(summary(report, chosen))
    columns = [(name, kind.column) for name, kind in KINDS.items() if kind.column]
    tested = [each.node for each in report.verdicts]
    names = [(name, column) for name, column in columns if any(figures_of(report, node, name) for node in tested)]
    rows, styles = [], []
    for each in sorted(report.verdicts, key=lambda each: (each.truth is not Truth.BAD, each.truth is Truth.OK)):
        figures = [_cell(name, figures_of(report, each.node, name)) for name, _ in names]
        rows.append([each.node, WORDS[each.truth], *figures, "; ".join(each.reasons) or "-"])
        styles.append(STYLES[each.truth])
    for node, why in chosen.left.items():
        rows.append([node, WORDS[Truth.UNKNOWN], *("-" for _ in names), f"not tested: {why}"])
        styles.append(STYLES[Truth.UNKNOWN])
    headings = ["node", "verdict", *(column for _, column in names), "why"]
    table(
        headings, rows, styles, wanted=[0, 1, len(headings) - 1, *range(2, len(headings) - 1)], wraps=len(headings) - 1
    )
    for pair in report.slow_pairs:
        if not pair.culprit:
            sentence(f"Between {pair.nodes[0]} and {pair.nodes[1]}: {'; '.join(pair.reasons)}.")


def _cell(name: str, values: list[float]) -> str:
    """The worst of them."""
    return shown(worst(name, values), KINDS[name]) if values else "-"


def document(report: Report, chosen: Chosen) -> dict[str, Any]:
    """All of it, for `--json`."""
    by_name = {each.name: each for each in report.nodes}
    return {
        "sentence": summary(report, chosen),
        "began_at": report.began_at,
        "ended_at": report.ended_at,
        "nodes": [_node(each, by_name.get(each.node)) for each in report.verdicts],
        "not_tested": dict(chosen.left),
        "pairs": [{"nodes": each.name.split(" "), **_plain(each)} for each in report.pairs],
        "slow_pairs": msgspec.to_builtins(report.slow_pairs),
        "jobs": [dict(each) for each in report.jobs],
        "units": {name: kind.unit for name, kind in KINDS.items()},
    }


def _node(verdict: Verdict, found: Measured | None) -> Mapping[str, Any]:
    return {
        "node": verdict.node, "verdict": verdict.truth.value, "reasons": verdict.reasons, "peers": verdict.peers,
        "places": [each.place for each in verdict.faults],
        **(_plain(found) if found else {}),
    }  # fmt: skip


def _plain(found: Measured) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(found)
    plain.pop("name", None)
    return plain
