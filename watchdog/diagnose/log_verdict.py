"""What a run died of, from its logs alone: cause, cascade, teardown and noise told apart, and who is named. Pure.

The first error in time that does not follow from another one is the cause, if no progress was made after it. What ranks say of
each other is never a cause; the launcher and Slurm only sum up. Whoever lost the others is not the one who did it: there nobody
is named but the ranks that are missing from the cascade.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from watchdog.diagnose.collectives import Suspects, suspects_of
from watchdog.diagnose.log_digest import Digest
from watchdog.diagnose.log_errors import STEP_SLACK_S
from watchdog.diagnose.log_lines import Line, classify
from watchdog.diagnose.log_progress import NoNumber, Progress, Silence
from watchdog.diagnose.log_ranks import Failure, Ranks
from watchdog.diagnose.tracebacks import Error
from watchdog.knowledge.log_signatures import CONSEQUENCES, FELT, FROM_OUTSIDE, HEADERS, WORDS

ENOUGH_RISES = 2
"""So many new steps after an error, and it was no matter. One may have been made before it, by the ranks that had not noticed."""
LATE_RISES = 5
"""An error that was followed by so few steps and then by a cascade may have been its cause after all: its thread had died."""
QUIET_LINES = 12
"""Ordinary lines after an error in its stream, and nothing that ends the run: it goes on."""
LAST_LINES = 15
LONG_AFTER = 200
"""Lines between an error and the word that training is done, if it is to be of an earlier try."""
ALIKE_SHARE = 0.5
"""Where so many ranks say the same, nobody is named: it is the program, its input or what all share."""
SOFT = frozenset(
    {"python_exception", "permission", "network", "missing_file", "import_error", "config_error", "dataset_error", "shape_mismatch",
     "dtype_device", "too_many_files", "loss_nan", "checkpoint_mismatch", "checkpoint_corrupt", "assertion", "io_error", "cuda_unavailable",
     "xla_error", "port_in_use", "nccl_interface", "read_only", "stale_file_handle", "host_oom", "shared_memory", "traceback", "abort"}
)  # fmt: skip
"""Programs say so, too, of what they can do without: such a line alone, in the middle of a log, ends no run."""
AFTER_SIGTERM = frozenset(
    {
        "python_exception",
        "dataloader_worker",
        "abort",
        "segmentation_fault",
        "import_error",
        "traceback",
        "glibc_abort",
        "assertion",
    }
)
"""What processes say that are ended while they work."""
FIRST_HAND = frozenset({"gpu_ecc", "gpu_lost", "oom_kill", "disk_full", "quota", "cuda_oom", "node_failure"})
"""What no lost peer brings about."""
AFTER_END = AFTER_SIGTERM | {"permission", "network", "loss_nan"}
"""What is said in passing when training is done."""
TIMED_OUT = ("nccl_watchdog", "collective_timeout", "barrier_timeout", "collective_desync", "heartbeat_lost")
LAST_CHOICE = ("launcher", "task_exit", "killed", "mpi_abort", "terminated", "ray_actor_died")
SIGNAL_NAMES = {
    -9: "killed",
    -11: "segmentation_fault",
    -7: "bus_error",
    -4: "illegal_instruction",
    -8: "floating_point_trap",
}
"""Exit codes of signals that nobody sends to end a run in order; 6 and 15 are how it is ended after another's failure."""
NOBODYS = frozenset({"duplicate_gpu", "nccl_interface", "config_error"})
"""Settings: whoever notices first is no more to blame than the others."""
GPU_NAMES = frozenset({"cuda_error", "cuda_oom", "gpu_ecc", "gpu_lost", "device_assert"})
_NODE_FAILURE = re.compile(r"Node failure on ([\w.-]+)")
_OWN_NODE = re.compile(r"\bnode: (?P<host>[\w.-]+)\b")
_JOB_ENDED = re.compile(r"\*\*\* JOB\b|DUE TO")
_TOLD_TO_END = re.compile(r"death signal|got signal: (?:1|2|10|12|15)\b")
_SLURM_WHAT = {
    "segmentation_fault": ("Segmentation fault",), "bus_error": ("Bus error",), "oom_kill": ("Out Of Memory",), "illegal_instruction": ("Illegal",),
}  # fmt: skip


@dataclass
class Source:
    """One file of a job, with what was read in it."""

    path: str
    digest: Digest
    progress: Progress
    errors: list[Error]
    silence: Silence | None = None
    no_number: NoNumber | None = None
    roles: dict[int, str] = field(default_factory=dict)
    """Of each error's place its role."""


@dataclass(frozen=True)
class Verdict:
    name: str
    line: int | None
    source: int
    summary: str
    host: str | None = None
    rank: int | None = None
    text: str = ""
    first_ranks: tuple[int, ...] = ()
    followed: int = 0
    missing: tuple[int, ...] = ()


@dataclass
class _Case:
    """All errors of a job in their order, and what was made of them."""

    sources: Sequence[Source]
    ranks: Ranks
    errors: list[Error]
    role: dict[int, str] = field(default_factory=dict)
    """By id of the error."""
    timed: bool = True
    """Whether the errors of different files can be put in order."""


def judge(sources: Sequence[Source], ranks: Ranks) -> Verdict | None:
    """The verdict over the files of one job; None if nothing is wrong. Sets the roles of each source's errors."""
    case = _ordered(sources, ranks)
    for error in case.errors:
        _place_in_table(error, ranks)
    verdict = _of_errors(case) or _of_numbers(case)
    for source in sources:
        source.roles = {place: case.role.get(id(error), "noise") for place, error in enumerate(source.errors)}
    return verdict


def _ordered(sources: Sequence[Source], ranks: Ranks) -> _Case:
    errors = []
    for number, source in enumerate(sources):
        for error in source.errors:
            error.source = number
            errors.append(error)
    speaking = {error.source for error in errors}
    clocks = {sources[number].digest.clock for number in speaking}
    timed = len(speaking) <= 1 or (len(clocks) == 1 and None not in clocks and "clock" not in clocks)
    if timed:
        errors.sort(
            key=lambda e: (
                e.segment,
                e.at if e.at is not None else float("-inf"),
                e.source,
                e.began or e.line,
            )
        )
    else:
        errors.sort(key=lambda e: (e.source, e.line))
    return _Case(sources, ranks, errors, timed=timed)


# ------------------------------------------------------------------------------------------ which errors count


def _of_errors(case: _Case) -> Verdict | None:
    errors = case.errors
    alive = [error for error in errors if not _is_noise(error, case)]
    for error in errors:
        case.role[id(error)] = "noise"
    for error in alive:
        case.role[id(error)] = "teardown" if _is_teardown(error) else "cascade"
    if not alive:
        return None
    if alive[0].segment != alive[-1].segment:
        # Excerpts of several incidents: the first that shows one counts.
        for segment in sorted({error.segment for error in alive}):
            verdict = _of_one(case, [error for error in alive if error.segment == segment])
            if verdict is not None:
                return verdict
        return None
    return _of_one(case, alive)


def _of_one(case: _Case, alive: list[Error]) -> Verdict | None:
    ended = next((place for place, error in enumerate(alive) if _ends_from_outside(error)), len(alive))
    before, after = alive[:ended], alive[ended:]
    if after and _TOLD_TO_END.search(after[0].text):
        # Who was told to end may have been told so because of this.
        before = before + [error for error in after if _is_root(error) and error.name not in AFTER_SIGTERM]
    roots = [error for error in before if _is_root(error) and not error.chained]
    firm = [error for error in roots if not error.weak] or roots
    deaths = _deaths(alive)
    fatal = [error for error in firm if _is_fatal(error, case, deaths) and not _came_of_it(error, alive)]
    if fatal:
        return _of_cause(case, fatal, alive)
    if after:
        for error in after:
            case.role[id(error)] = "teardown"
    late = _late_cause(case) if any(error.name in TIMED_OUT for error in before) else None
    if late is not None:
        return _of_cause(case, [late], alive)
    told = [error for error in before if not _is_root(error) or error in firm]
    return _of_consequences(case, told, ended < len(alive))


def _is_root(error: Error) -> bool:
    return error.name not in CONSEQUENCES


def _is_teardown(error: Error) -> bool:
    return error.name in FROM_OUTSIDE or error.name in LAST_CHOICE


def _ends_from_outside(error: Error) -> bool:
    """Whether somebody ended the run here. srun also says that a step is aborted when one of its tasks has failed."""
    if error.name in ("cancelled", "terminated"):
        return bool(_JOB_ENDED.search(error.raw_text) or _TOLD_TO_END.search(error.text))
    return error.name in FROM_OUTSIDE


def _is_noise(error: Error, case: _Case) -> bool:
    if error.ignored:
        return True
    source = case.sources[error.source]
    rises = _rises_after(error, case)
    if rises >= ENOUGH_RISES or (rises and any(s.progress.finished for s in case.sources)):
        return True
    if error.goes_on and _is_root(error):
        return True
    finished = source.progress.finished_line
    if finished is not None and finished > error.line + (0 if not _is_root(error) else LONG_AFTER):
        return True  # an earlier try: the log goes on to the end of training
    if (
        finished is not None
        and error.line > finished
        and (not _is_root(error) or (error.name in AFTER_END and not error.traceback))
    ):
        return True
    if len(case.sources) > 1 and any(s.progress.finished for s in case.sources) and not error.traceback:
        return True
    return _goes_on_quietly(error, source)


def _rises_after(error: Error, case: _Case) -> int:
    """How many new steps were logged after an error: by time where both have one, else by their lines in the same file."""
    most = 0
    for number, source in enumerate(case.sources):
        rises = source.progress.rises
        if error.own_time and error.at is not None and rises and all(at is not None for _, at in rises[-3:]):
            count = sum(1 for _, at in rises if at is not None and at > error.at + STEP_SLACK_S)
            if number != error.source and not case.timed:
                count = 0
        elif number == error.source:
            count = len(rises) - bisect_right([line for line, _ in rises], error.line)
        else:
            count = 0
        if source.digest.segments is not None:
            segments = source.digest.segments
            count = sum(1 for line, _ in rises if line > error.line and segments.get(line) == error.segment)
        most = max(most, count)
    return most


def _goes_on_quietly(error: Error, source: Source) -> bool:
    """Whether its stream says many ordinary things after an error of the soft kind, and nothing ends the run."""
    if error.name not in SOFT or any(not _is_root(each) for each in source.errors if each.line > error.line):
        return False
    later = [
        line
        for line in source.digest.lines
        if line.number > error.line and line.who == error.who and line.text.strip()
    ]
    ordinary = [line for line in later if line.stamp is not None or line.level == "info"]
    return len(ordinary) >= QUIET_LINES and not any(each.line > error.line for each in source.errors)


def _deaths(alive: Sequence[Error]) -> list[Error]:
    """The lines that say that something died, or that others felt it."""
    return [error for error in alive if not _is_root(error)]


def _is_fatal(error: Error, case: _Case, deaths: Sequence[Error]) -> bool:
    """Whether an error ended its rank: an uncaught exception, something that no process survives, or one with a death after it."""
    if error.weak and not deaths:
        return False
    if error.traceback or error.name not in SOFT or deaths:
        return True
    lines = case.sources[error.source].digest.lines
    last = lines[-1].number if lines else error.line
    return last - error.line <= LAST_LINES


def _came_of_it(error: Error, alive: Sequence[Error]) -> bool:
    """Whether an error came of a cascade: later in time than the first timeout, or what a rank says that had lost the others before."""
    if error.name in FIRST_HAND:
        return False
    for other in alive:
        if other is error or other.weak or other.name not in FELT:
            continue
        timed = other.name in TIMED_OUT and other.own_time and error.own_time
        if timed and other.at is not None and error.at is not None and error.at > other.at + 1:
            return True
        same = other.who == error.who and error.who.named and other.source == error.source
        if same and other.line < error.line and error.name in AFTER_SIGTERM | {"cuda_error"}:
            return True
    return False


def _late_cause(case: _Case) -> Error | None:
    """An error that was survived by few steps, before a cascade."""
    found = [
        error
        for error in case.errors
        if _is_root(error) and error.name not in HEADERS and not error.ignored and not error.goes_on and not error.weak
        and not error.chained and error.traceback and ENOUGH_RISES <= _rises_after(error, case) <= LATE_RISES
    ]  # fmt: skip
    return found[0] if found else None


# ------------------------------------------------------------------------------------------ the verdict


def _of_cause(case: _Case, roots: list[Error], alive: Sequence[Error]) -> Verdict:
    first = next((error for error in roots if error.name not in HEADERS), roots[0])
    name = _refined(first)
    rank, host = _who(first, case)
    alike = [error for error in roots if _refined(error) == name]
    ranks = sorted({r for error in alike if (r := case.ranks.rank_of(error.who)) is not None})
    unordered = not case.timed and len({error.source for error in alike}) > 1
    if rank is None and not unordered:
        rank, host = _placed(first, name, case, host)
    everybody = _is_everybody(ranks, alike, case)
    sources = {error.source for error in roots}
    if rank is None and name in GPU_NAMES:
        rank = _who_felt_it(first, alive, case)
    if name == "node_failure":
        rank, host = None, _failed_node(case)
    if name in NOBODYS:
        rank = host = None
    elif unordered or everybody or (not case.timed and len(sources) > 1):
        hosts = {case.ranks.host_of(error.who, case.ranks.rank_of(error.who)) for error in alike}
        rank, host = None, hosts.pop() if len(hosts) == 1 else None
    case.role[id(first)] = "cause"
    followed = len(alive) - 1
    who = _words_of(rank, host)
    said = f"{who} failed first" if who else "the first error of the run is"
    more = f", and {len(ranks) - 1} more ranks alike" if len(ranks) > 1 and rank is not None else ""
    if everybody and len(ranks) > 1:
        said, more = f"{len(ranks)} ranks failed alike", ""
    after = f"; {followed} more lines of errors followed" if followed else ""
    summary = f"{WORDS.get(name, name)}: {said}{more}{_after_step(case, first)} (line {first.line}): {first.text[:200]}{after}"
    return Verdict(
        name, first.line, first.source, _sentence(summary), host, rank, first.text,
        tuple(ranks), followed,
    )  # fmt: skip


def _who_felt_it(first: Error, alive: Sequence[Error], case: _Case) -> int | None:
    """The rank whose process NCCL spoke for: the only one to which NCCL's call failed with an error of CUDA."""
    said = {
        case.ranks.rank_of(error.who)
        for error in alive
        if error.name == "nccl_error" and re.search(r"unhandled cuda error", error.text, re.IGNORECASE)
    }
    return said.pop() if len(said) == 1 and "NCCL" in first.raw_text else None


def _failed_node(case: _Case) -> str | None:
    nodes = {match[1] for error in case.errors if (match := _NODE_FAILURE.search(error.raw_text))}
    return nodes.pop() if len(nodes) == 1 else None


def _refined(error: Error) -> str:
    """The row that says most: the lines after a bare exception may tell what it was."""
    if error.name not in ("python_exception", "abort", "traceback", "xla_error"):
        return error.name
    for text in error.detail:
        name = classify(text)
        if (
            name is not None
            and name not in CONSEQUENCES
            and name not in HEADERS
            and name != "python_exception"
        ):
            return name
    return error.name


def _who(error: Error, case: _Case) -> tuple[int | None, str | None]:
    rank = case.ranks.rank_of(error.who)
    host = case.ranks.host_of(error.who, rank)
    own = _OWN_NODE.search(error.text) if host is None and rank is not None else None
    return rank, own["host"] if own is not None else host


def _is_everybody(ranks: Sequence[int], alike: Sequence[Error], case: _Case) -> bool:
    """Whether so many failed alike that none of them is the one."""
    if len(ranks) < 2:
        locals_ = {(error.who.local, error.who.host) for error in alike}
        return len(locals_) >= 3
    world = case.ranks.world or len(case.ranks.seen) or len(ranks)
    return len(ranks) >= max(3, ALIKE_SHARE * world) or len(ranks) >= world > 1


def _place_in_table(error: Error, ranks: Ranks) -> None:
    """An error that stands in torchrun's table of failures is that row's."""
    if error.who.rank is not None:
        return
    for row in ranks.failures:
        if row.line < error.line < row.end and row.rank is not None:
            error.who = type(error.who)(rank=row.rank, local=row.local, host=row.host)
            return


def _placed(error: Error, name: str, case: _Case, host: str | None) -> tuple[int | None, str | None]:
    """(rank, host) of a line that does not say whose it is, from what the launcher or Slurm says of who ended first."""
    ranks = case.ranks
    segments = case.sources[error.source].digest.segments
    if segments is not None:
        # Another excerpt tells of another incident.
        ranks = replace(
            ranks,
            failures=[row for row in ranks.failures if segments.get(row.line) == error.segment],
            tasks=[task for task in ranks.tasks if segments.get(task.line) == error.segment],
        )
    row = _first_failure(ranks.failures, name)
    if row is not None and (host is None or row.host is None or host.split(".")[0] == row.host.split(".")[0]):
        return row.rank, host or row.host
    task = _task_of(error, name, ranks)
    if task is not None and (host is None or host == task[1]):
        return task
    return None, host


def _first_failure(failures: Sequence[Failure], name: str) -> Failure | None:
    """The row of torchrun's tables that an error without a name belongs to, if it can be only one.

    Workers that the launcher ended, or that aborted because a peer was lost, are other rows; a launcher may list such a one first.
    """
    codes = {code for code, signal in SIGNAL_NAMES.items() if signal == name} or {1, 2}
    if name in ("oom_kill", "killed"):
        codes = {-9}
    if name in ("abort", "cuda_error", "glibc_abort", "device_assert", "gpu_ecc"):
        codes = {1, -6}
    rows = [row for row in failures if row.code in codes]
    if len(rows) == 1:
        return rows[0]
    roots = [row for row in rows if row.root]
    if len(roots) != 1 or roots[0].stamp is None:
        return None
    others = [row.stamp.seconds for row in rows if row is not roots[0] and row.stamp is not None]
    return roots[0] if others and min(others) - roots[0].stamp.seconds >= 1 else None


def _task_of(error: Error, name: str, ranks: Ranks) -> tuple[int | None, str | None] | None:
    """Slurm's word of the one task that ended so; of several nobody knows which was first."""
    match = re.search(
        r"srun: error: (?P<host>[A-Za-z0-9][\w.-]*): tasks? (?P<tasks>[\d,-]+): ", error.raw_text
    )
    if match:
        single = match["tasks"].isdecimal()
        return (int(match["tasks"]) if single and ranks.tasks_are_ranks else None), match["host"]
    words = _SLURM_WHAT.get(name, ())
    tasks = [t for t in ranks.tasks if any(word in t.what for word in words)] if words else []
    tasks = tasks or [t for t in ranks.tasks if "Exited with exit code" in t.what]
    if len(tasks) != 1:
        return None
    return (tasks[0].task if ranks.tasks_are_ranks else None), tasks[0].host


def _of_consequences(case: _Case, told: list[Error], from_outside: bool) -> Verdict | None:
    """No line says why. What is known: who is missing from the cascade, or whom the launcher saw die by a signal."""
    timeouts = [error for error in told if error.name in TIMED_OUT]
    felt = [
        error for error in told if error.name in FELT and error.name not in LAST_CHOICE and not error.weak
    ]
    if from_outside and not timeouts:
        return None
    row = _killed_first(case.ranks.failures)
    if row is not None and not timeouts:
        return _of_row(case, row, told)
    if timeouts:
        return _of_timeouts(case, timeouts, told)
    if any(task.signal for task in case.ranks.tasks):
        return _of_tasks(case, told)
    if felt:
        return _unexplained(case, felt[0], told)
    last = [error for error in told if error.name not in FROM_OUTSIDE and error.name != "terminated"]
    if not last:
        return None
    failed = [row for row in case.ranks.failures if row.root and row.code not in (None, -15, -6, 0)]
    if failed and len({row.rank for row in failed}) == 1:
        return _of_row(case, failed[0], told)
    return _of_ends(case, last, told)


def _of_timeouts(case: _Case, timeouts: list[Error], told: Sequence[Error]) -> Verdict:
    by_place = {place: case.ranks.rank_of(error.who) for place, error in enumerate(timeouts)}
    for place, error in enumerate(timeouts):
        if by_place[place] is None and error.group_rank is not None and _group_is_all(timeouts):
            by_place[place] = error.group_rank
    suspects = suspects_of(timeouts, by_place, case.ranks.seen, case.ranks.world)
    said = sorted({rank for rank in by_place.values() if rank is not None})
    first = timeouts[0]
    name = (
        "collective_mismatch"
        if suspects is not None and "another collective" in suspects.reason
        else first.name
    )
    case.role[id(first)] = "cascade"
    rank = suspects.ranks[0] if suspects is not None and len(suspects.ranks) == 1 else None
    host = case.ranks.rank_hosts.get(rank) if rank is not None else None
    waited = f"{len(said)} ranks said so" if len(said) > 1 else "no line says why"
    summary = f"{WORDS[name]}{_after_step(case)} (line {first.line}): {waited}, {_suspected(suspects)}"
    return Verdict(
        name, first.line, first.source, _sentence(summary), host, rank, first.text,
        first_ranks=(), followed=len(told) - 1, missing=suspects.ranks if suspects is not None else (),
    )  # fmt: skip


def _suspected(suspects: Suspects | None) -> str:
    if suspects is None:
        return "and nothing tells whom they waited for; look for an earlier error elsewhere, or for stacks of all ranks"
    names = ", ".join(str(rank) for rank in suspects.ranks[:8])
    return f"rank{'s' if len(suspects.ranks) > 1 else ''} {names} {suspects.reason}"


def _group_is_all(timeouts: Sequence[Error]) -> bool:
    """Whether the ranks that ProcessGroupNCCL writes are those of the group of all: each says it of itself, once a number."""
    named = [e for e in timeouts if e.who.rank is not None and e.group_rank is not None]
    if named:
        return all(e.who.rank == e.group_rank for e in named)
    return any("default_pg" in e.raw_text for e in timeouts) and all(
        "default_pg" in e.raw_text or "[PG" not in e.raw_text for e in timeouts
    )


def _killed_first(failures: Sequence[Failure]) -> Failure | None:
    """The worker that died of a signal which nobody sends in order, as torchrun's table has it."""
    rows = [row for row in failures if row.code in SIGNAL_NAMES]
    roots = [row for row in rows if row.root]
    if any(row.root for row in failures):
        # The launcher kills who does not end by itself: such rows are none.
        return roots[0] if len({row.rank for row in roots}) == 1 else None
    return rows[0] if len(rows) == 1 else None


def _of_row(case: _Case, row: Failure, told: Sequence[Error]) -> Verdict:
    name = SIGNAL_NAMES.get(row.code or 0, "launcher")
    who = _words_of(row.rank, row.host) or "a worker"
    how = f"signal {-(row.code or 0)}" if (row.code or 0) < 0 else f"exit code {row.code}"
    for error in told:
        if abs(error.line - row.line) <= 8:
            case.role[id(error)] = "cause"
            break
    summary = f"{WORDS[name]}: {who} ended with {how}{_after_step(case)} (line {row.line}), and its own words are not in the log"
    source = next((e.source for e in told if abs(e.line - row.line) <= 400), 0)
    return Verdict(
        name, row.line, source, _sentence(summary), row.host, row.rank, how, followed=max(0, len(told) - 1)
    )


def _of_tasks(case: _Case, told: Sequence[Error]) -> Verdict | None:
    """Slurm saw tasks die of a signal: those are first, whatever the others felt."""
    died = [task for task in case.ranks.tasks if task.signal]
    first = died[0]
    aborted = next((e.line for e in case.errors if e.name == "cancelled"), None)
    if aborted is not None and first.line > aborted:
        return None  # srun's own kill
    alone = len([task for task in died if aborted is None or task.line < aborted]) == 1
    rank = first.task if alone and case.ranks.tasks_are_ranks else None
    host = (
        first.host
        if len({task.host for task in died if aborted is None or task.line < aborted}) == 1
        else None
    )
    source = 0
    for error in told:
        if error.line == first.line:
            case.role[id(error)], source = "cause", error.source
    name = first.signal or "killed"
    who = _words_of(rank, host)
    summary = f"{WORDS[name]}{f' ({who})' if who else ''}{_after_step(case)} (line {first.line}): Slurm says {first.what}; its own words are not in the log"
    return Verdict(
        name, first.line, source, _sentence(summary), host, rank, first.what, followed=max(0, len(told) - 1)
    )


def _of_ends(case: _Case, last: list[Error], told: Sequence[Error]) -> Verdict:
    """Only the launcher or Slurm says that something ended."""
    first = last[0]
    ranks = case.ranks
    codes = {code for _, code in ranks.exits}
    name = SIGNAL_NAMES[codes.pop()] if len(codes) == 1 and codes <= set(SIGNAL_NAMES) else first.name
    task = _task_of(first, name, ranks) if "srun: error" in first.raw_text and len(ranks.tasks) == 1 else None
    rank, host = task if task is not None else (None, None)
    case.role[id(first)] = "cause"
    who = _words_of(rank, host)
    summary = f"{WORDS[name]}{f' ({who})' if who else ''}{_after_step(case)} (line {first.line}): {first.text[:200]}; its own words are not in the log"
    return Verdict(
        name, first.line, first.source, _sentence(summary), host, rank, first.text, followed=len(told) - 1
    )


def _unexplained(case: _Case, first: Error, told: Sequence[Error]) -> Verdict:
    summary = (
        f"{WORDS[first.name]}{_after_step(case)} (line {first.line}): {first.text[:200]}; that follows from something else, "
        "and no line says from what"
    )
    return Verdict(
        first.name,
        first.line,
        first.source,
        _sentence(summary),
        None,
        None,
        first.text,
        followed=len(told) - 1,
    )


def _of_numbers(case: _Case) -> Verdict | None:
    """Nothing failed: does it hang, or does it train on what is no number?"""
    sources = case.sources
    if any(source.progress.finished for source in sources):
        return _of_loss(case)
    silent = [(number, source.silence) for number, source in enumerate(sources) if source.silence is not None]
    talking = [source for source in sources if source.progress.rises and source.silence is None]
    if silent and not talking:
        # Of several files the one with the progress knows best.
        number, silence = max(silent, key=lambda each: len(sources[each[0]].progress.rises))
        assert silence is not None
        step = sources[number].progress.last_step
        after = f"after step {step}" if step is not None else "before its first step was logged"
        phase = f" (the log says {silence.phase})" if silence.phase else ""
        summary = (
            f"hang: no progress for {_duration(silence.silent_s)} {after}{phase}, line {silence.line}; "
            f"{_duration(silence.limit_s)} would be normal ({silence.reason})"
        )
        return Verdict("hang", silence.line, number, _sentence(summary))
    return _of_loss(case)


def _of_loss(case: _Case) -> Verdict | None:
    for number, source in enumerate(case.sources):
        bad = source.no_number
        if bad is not None:
            step = f"step {bad.step}" if bad.step is not None else f"line {bad.line}"
            summary = f"the loss is no number any more since {step} (line {bad.line}), {bad.times} times in a row up to the end"
            return Verdict("loss_nan", bad.line, number, _sentence(summary))
    return None


# ------------------------------------------------------------------------------------------ words


def _after_step(case: _Case, error: Error | None = None) -> str:
    """After which step; of an error the last one that was logged before it in its excerpt."""
    step = max((s.progress.last_step for s in case.sources if s.progress.last_step is not None), default=None)
    segments = case.sources[error.source].digest.segments if error is not None else None
    if error is not None and segments is not None:
        steps = case.sources[error.source].digest.facts
        before = [f.fact.step for f in steps if segments.get(f.line) == error.segment and f.line < error.line]
        step = next((each for each in reversed(before) if each is not None), None)
    return f", after step {step}" if step is not None else ""


def _words_of(rank: int | None, host: str | None) -> str:
    if rank is None:
        return f"host {host}" if host is not None else ""
    return f"rank {rank}" + (f" on {host}" if host is not None else "")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def with_rank(lines: Sequence[Line], rank: int | None, local: int | None, host: str | None) -> list[Line]:
    """The lines of a file whose name says whose they are; a line that says so itself knows better."""
    filled = []
    for line in lines:
        who = line.who
        if who.rank is None and who.local is None and who.number is None:
            who = msgspec.structs.replace(who, rank=rank, local=local, host=who.host or host)
        elif who.host is None and host is not None:
            who = msgspec.structs.replace(who, host=host)
        filled.append(line if who is line.who else msgspec.structs.replace(line, who=who))
    return filled
