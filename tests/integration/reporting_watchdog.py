"""A watchdog on a cluster whose agents write their reports into files, for tests that look at both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.report import Report
from tests.builders.report_json import report_of
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog


class ReportingWatchdog(Watchdog):
    """A watchdog whose agents write their reports down."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, mode="observe", settings={"agent": {"metrics_directory": ""}}, nodes=("n1", "n2"))

    def start_agent(self, node: str, *words: str, stdout: IO[bytes] | None = None) -> None:
        with self._reports(node).open("ab") as reports:
            super().start_agent(node, "--json", *words, stdout=reports)

    def _reports(self, node: str) -> Path:
        return self.directory / f"reports-{node}.jsonl"

    def last(self, node: str) -> Report:
        return report_of(self._reports(node).read_bytes().split(b"\n")[:-1][-1])

    def both(self, job: str, condition: Callable[[Report, list[Process]], object], what: str) -> dict[str, Report]:
        """A report of each node that is as it should be, as to the report and the job's ranks in it."""
        found: dict[str, Report] = {}

        def holds() -> bool:
            for node in self.nodes:
                report = self.last(node)
                if condition(report, [p for p in report.processes if p.job_id == job and p.role is Role.RANK]):
                    found[node] = report
            return len(found) == len(self.nodes)

        self.wait_for(holds, 300, what)
        return found
