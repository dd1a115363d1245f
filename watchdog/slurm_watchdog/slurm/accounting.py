"""What Slurm's accounting database remembers of a job, asked by sacct: also of jobs from before the controller."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.run_record import RunRecord
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.commands import Answer, Commands, first_line

OPTIONAL = ("Reason", "DerivedExitCode", "FailedNode")  # What sacct may not know (FailedNode: before 23.02).
FIELDS = (
    "JobID", "State", "ExitCode", "Start", "End", "NNodes", "NodeList", "User", "Account", "Partition", *OPTIONAL,
    "JobName",
)  # fmt: skip
"""The name comes last: it may hold the separator."""
NO_REASON = ("", "None", "Unknown")
DEADLINE_S = 20.0
MAX_WORD = 256  # Of a word of sacct's that is passed on.
NO_NODES = ("", "None assigned")  # NodeList of a job cancelled before it began, which may have a Start.
MAX_DIGITS = 12
TOGETHER_S = 10.0  # Between the beginnings of the parts of one run: a second was seen.
_EXIT = re.compile(r"\d{1,5}:\d{1,3}")
_NO_FIELD = re.compile(r'Invalid field requested: "(\w{1,40})"')  # sacct, src/sacct/options.c, of 22.05 to 26.05.


class NoAccounting(Exception):
    """Nothing could be asked: a sentence."""


async def read_accounting(commands: Commands, job_id: str) -> list[RunRecord]:
    """Every run of a job that accounting has, in their order: a requeue makes a new one. Raises NoAccounting."""
    fields: tuple[str, ...] = FIELDS
    try:
        async with timeout(DEADLINE_S):
            answer = await _ask(commands, job_id, fields)
            while answer.code != 0 and (unknown := _unknown_field(answer.stderr, fields)) is not None:
                fields = without(fields, unknown)
                answer = await _ask(commands, job_id, fields)
    except SlurmUnavailable as error:
        raise NoAccounting(str(error)) from None
    except TimeoutError:
        raise NoAccounting(f"sacct gave no answer for {DEADLINE_S:.0f} s") from None
    if answer.code != 0:
        raise NoAccounting(f"sacct failed: {first_line(answer.stderr) or 'it gave no reason'}")
    found = parse_accounting(answer.stdout, job_id, fields)
    if not found and f"\n{job_id}_" in f"\n{answer.stdout}":
        raise NoAccounting(f"{job_id} is an array: ask for one of its elements, such as {job_id}_0")
    return found


async def _ask(commands: Commands, job_id: str, fields: Sequence[str]) -> Answer:
    return await commands.run("sacct", *options_of(fields), "--jobs", job_id, SLURM_TIME_FORMAT="%s")


def options_of(fields: Sequence[str]) -> tuple[str, ...]:
    """Those with which sacct prints `fields` of each run of a job."""
    return ("--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={','.join(fields)}")


def without(fields: Sequence[str], *unknown: str) -> tuple[str, ...]:
    """The fields that are left."""
    return tuple(each for each in fields if each not in unknown)


def _unknown_field(stderr: str, fields: Sequence[str]) -> str | None:
    """The one of OPTIONAL that this release of sacct has refused."""
    match = _NO_FIELD.search(stderr)
    return match[1] if match is not None and match[1] in fields and match[1] in OPTIONAL else None


def parse_accounting(text: str, job_id: str, fields: Sequence[str] = FIELDS) -> list[RunRecord]:
    """The runs in what sacct printed, with `fields` and times in seconds since 1970, the earliest first (accounting
    numbers them in no field of all releases). Lines of other jobs, of runs that never had a node, and that make no
    sense are left out. The parts of a heterogeneous job (`7+0`, `7+1`) that began together are one run of job 7."""
    found: list[RunRecord] = []
    parts: list[set[str]] = []
    for line in text.splitlines():
        words = line.split("|", len(fields) - 1)
        row = dict(zip(fields, words, strict=False))
        if len(words) != len(fields) or job_id not in (row["JobID"], row["JobID"].partition("+")[0]):
            continue
        run = _run(row, job_id)
        if run is None:
            continue
        part = "" if row["JobID"] == job_id else row["JobID"]
        same = (
            number
            for number, other in enumerate(found)
            if part and part not in parts[number] and abs(other.began_at - run.began_at) <= TOGETHER_S
        )
        if (number := next(same, None)) is not None:
            found[number] = _both(found[number], run)
            parts[number].add(part)
        else:
            found.append(run)
            parts.append({part})
    return sorted(found, key=lambda run: run.began_at)


def _run(row: Mapping[str, str], job_id: str) -> RunRecord | None:
    began_at, ended_at = _date(row["Start"]), _date(row["End"])
    if began_at is None or (ended_at is not None and ended_at < began_at) or row["NodeList"] in NO_NODES:
        return None
    return RunRecord(
        job_id=job_id,
        restarts=0,
        began_at=began_at,
        seen_at=began_at if ended_at is None else ended_at,
        ended_at=ended_at,
        state=row["State"].split(" ")[0],
        exit_code=_exit_code(row, "ExitCode") if ended_at is not None else "",
        steps_exit_code=_exit_code(row, "DerivedExitCode") if ended_at is not None else "",
        waited_for="" if (reason := row.get("Reason", "")) in NO_REASON else reason[:MAX_WORD],
        failed_node=row.get("FailedNode", "")[:MAX_WORD],
        nodes=_whole(row["NNodes"]) or 1,
        user=row["User"],
        account=row["Account"],
        partition=row["Partition"],
        name=row["JobName"],
    )


def _exit_code(row: Mapping[str, str], name: str) -> str:
    text = row.get(name, "")
    return text if _EXIT.fullmatch(text) else ""


def _both(first: RunRecord, other: RunRecord) -> RunRecord:
    """Two parts of one run: all its nodes, until the last of them ended, and the end of the one that failed."""
    end = other if first.state == "COMPLETED" else first
    ends = [each.ended_at for each in (first, other)]
    last = None if None in ends else max(at for at in ends if at is not None)
    return replace(
        first, nodes=first.nodes + other.nodes, ended_at=last, seen_at=max(first.seen_at, other.seen_at),
        state=end.state, exit_code=end.exit_code, steps_exit_code=end.steps_exit_code,
        failed_node=end.failed_node or first.failed_node or other.failed_node,
    )  # fmt: skip


def _date(word: str) -> float | None:
    return float(number) if 0 < (number := _whole(word) or 0) < 10**11 else None


def _whole(word: str) -> int | None:
    """A number of so few digits that Python converts it (more than 4,300 raise) and JSON can hold it."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= MAX_DIGITS else None
