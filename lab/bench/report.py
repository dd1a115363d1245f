"""The report of a year of a cluster: 10,000 incidents of 5,000 jobs, a third of them ended by an action."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from lab.bench.figures import Figures, say
from slurm_watchdog.controller.health.lost_time import report_asked
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, Fence
from slurm_watchdog.model.incidents import IncidentState
from slurm_watchdog.model.run_record import RunRecord
from tests.builders.notices import DECISION, INCIDENT, RUN

INCIDENTS, JOBS, YEAR_S, NOW = 10_000, 5_000, 365 * 86400.0, 1_700_000_000.0
MAX_S = 3.0
"""What the project promises."""
KINDS = ("collective_hang", "dead_rank", "gpu_fault", "node_down", "log_error", "stalled_progress")


def run(figures: Figures) -> None:
    """All figures."""
    with tempfile.TemporaryDirectory() as directory:
        journal = Journal(f"sqlite:///{directory}/journal.sqlite")
        with journal.together():
            _fill(journal)
        journal.close()
        size = (Path(directory) / "journal.sqlite").stat().st_size / 2**20
        say(f"a journal of {size:.0f} MiB")
        dates = {"from": str(NOW - YEAR_S), "to": str(NOW)}
        for name, asked in (("year", dates), ("week", {"from": str(NOW - 7 * 86400), "to": str(NOW)})):  # fmt: skip
            began = time.monotonic()
            found = report_asked(journal.url, asked)
            took_s = time.monotonic() - began
            say(f"{name}: {found.known_jobs} jobs, {found.savings}")
            figures.add(f"report.{name}", took_s, "s", at_most=MAX_S)


def _fill(journal: Journal) -> None:
    chance = random.Random(1)
    for number in range(INCIDENTS):
        job, restart = divmod(number, INCIDENTS // JOBS)
        began_at = NOW - YEAR_S + (YEAR_S - 86400) * job / JOBS + restart * 36_000
        stuck_at, ended_at = began_at + 20_000, began_at + 20_000 + chance.randrange(600, 12_000)
        journal.run_records.save(
            RunRecord(
                job_id=str(job), restarts=restart, began_at=began_at, ended_at=ended_at, seen_at=ended_at, state="FAILED",
                uid=1000 + job % 50, user=f"u{job % 50}", account=f"a{job % 9}", partition="gpu", name=f"train-{job % 300}",
                nodes=chance.choice((1, 4, 16, 64)), gpus=8, first_step=restart * 900, last_step=restart * 900 + 1000,
                first_rise_at=began_at + 300, last_rise_at=stuck_at, step_s=19.7,
            )
        )  # fmt: skip
        incident = f"i{number:06d}"
        journal.save_incident(
            replace(
                INCIDENT, id=incident, kind=chance.choice(KINDS), state=IncidentState.RESOLVED, job_ids=(str(job),),
                runs=((str(job), restart),), opened_at=stuck_at, fired_at=stuck_at + 60, resolved_at=ended_at,
                summary=INCIDENT.summary * 8, facts=INCIDENT.facts * 8,
            )
        )  # fmt: skip
        if number % 3 == 0 and RUN.end is not None:
            decision = replace(
                DECISION, id=f"d{number:06d}", incident_id=incident, action=Action.REQUEUE, decided_at=stuck_at + 90,
                fence=Fence(job_id=str(job), restarts=restart, start_at=None),
            )  # fmt: skip
            journal.add_decision(decision)
            journal.end_action(decision.id, replace(RUN.end, ended_at=ended_at))
