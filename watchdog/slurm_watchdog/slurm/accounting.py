"""What Slurm's accounting database remembers of a job, asked by sacct: also of jobs from before the controller."""

from __future__ import annotations

import asyncio
from typing import Final

from slurm_watchdog.model.run_record import RunRecord
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.commands import Commands, first_line

FIELDS: Final = ("JobID", "State", "Start", "End", "NNodes", "User", "Account", "Partition", "JobName")
"""The name comes last: it may hold the separator."""
DEADLINE_S: Final = 20.0


class NoAccounting(Exception):
    """Nothing could be asked: a sentence."""


async def read_accounting(commands: Commands, job_id: str) -> list[RunRecord]:
    """Every run of a job that accounting has, in their order: a requeue makes a new one. Raises NoAccounting."""
    options = ["--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={','.join(FIELDS)}"]
    try:
        async with asyncio.timeout(DEADLINE_S):
            answer = await commands.run("sacct", *options, "--jobs", job_id, SLURM_TIME_FORMAT="%s")
    except SlurmUnavailable as error:
        raise NoAccounting(str(error)) from None
    except TimeoutError:
        raise NoAccounting(f"sacct gave no answer for {DEADLINE_S:.0f} s") from None
    if answer.code != 0:
        raise NoAccounting(f"sacct failed: {first_line(answer.stderr) or 'it gave no reason'}")
    return parse_accounting(answer.stdout, job_id)


def parse_accounting(text: str, job_id: str) -> list[RunRecord]:
    """The runs in what sacct printed, with `FIELDS` and times in seconds since 1970, the earliest first (accounting
    numbers them in no field of all releases). Lines of other jobs, of runs that never began, and that make no sense
    are left out."""
    found = []
    for line in text.splitlines():
        words = line.split("|", len(FIELDS) - 1)
        row = dict(zip(FIELDS, words, strict=False))
        began_at, ended_at = _date(row.get("Start")), _date(row.get("End"))
        if len(words) != len(FIELDS) or row["JobID"] != job_id or began_at is None:
            continue
        if ended_at is not None and ended_at < began_at:
            continue
        found.append(
            RunRecord(
                job_id=job_id,
                restarts=0,
                began_at=began_at,
                seen_at=began_at if ended_at is None else ended_at,
                ended_at=ended_at,
                state=row["State"].split(" ")[0],
                nodes=int(row["NNodes"]) if row["NNodes"].isascii() and row["NNodes"].isdecimal() else 1,
                user=row["User"],
                account=row["Account"],
                partition=row["Partition"],
                name=row["JobName"],
            )
        )
    return sorted(found, key=lambda run: run.began_at)


def _date(word: str | None) -> float | None:
    return float(word) if word is not None and word.isascii() and word.isdecimal() and 0 < int(word) < 10**11 else None
