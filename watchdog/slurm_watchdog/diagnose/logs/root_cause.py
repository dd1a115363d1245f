"""What a run died of, from its error lines: cause before cascade, and who said it first. Pure.

One rank fails; the others say so in hundreds of lines (connections lost, collectives timed out), the launcher and Slurm sum it
up. The first line in time that does not follow from something else is the cause; a line that only announces one (`Traceback`)
stands for the line that says what it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.shortened import SAID, shortened
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.launcher_exits import CLASSES, KILLS, Ending, ending_of, together
from slurm_watchdog.knowledge.log_signatures import (
    AFTER_SIGTERM,
    CONSEQUENCES,
    FELT,
    FROM_OUTSIDE,
    HEADERS,
    WORDS,
)
from slurm_watchdog.knowledge.ray_train import died_of
from slurm_watchdog.model.cluster_view import JobView, LoggedError, PastRun
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Event
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.parse.training_log.line import split_prefix

Seats = Mapping[int, tuple[str, int]]
"""Rank -> (node, pid)."""

STEP_SLACK_S = 2.0
"""A step that is logged so soon after an error may have been made before it, by the ranks that had not noticed yet."""
RAYS_WORD = "ray_actor_died"
NAMED_BY_SLURM = frozenset({"task_exit", "segmentation_fault", "bus_error", "oom_kill"})
"""Rows that match srun's line about a task that ended."""
FEW_SILENT = 0.25
"""Those that say nothing in a cascade are named if they are at most this share of the ranks."""

_TASK = re.compile(r"srun: error: (?P<node>[A-Za-z0-9][\w.-]*): task (?P<rank>\d+): (?P<what>.+)")
"""Slurm's own word of one task that ended; of several at once it writes `tasks 2-3`, and nobody is named."""
_LABEL = re.compile(r"\s*\d{1,5}: ")
_EXIT, _TERM = "Exited with exit code", "Terminated"
"""Slurm's words of a task that left with an error, and of one that srun ended because another had."""
_RAISED_BY_LAUNCHER = re.compile(r"ChildFailedError|CalledProcessError|Process(?:Exited|Raised)Exception")
"""The last line of a launcher's own traceback, which it prints when a worker has failed."""
_SLURMS_HOW = (
    ("Killed", "was killed (SIGKILL)"), ("Segmentation fault", "died of SIGSEGV"), ("Bus error", "died of SIGBUS"),
    ("Aborted", "died of SIGABRT"), ("Out Of Memory", "was killed: out of memory"), ("Illegal instruction", "died of SIGILL"),
)  # fmt: skip
_CODE = re.compile(r"Exited with exit code (\d+)")


class Cause(Struct, frozen=True, kw_only=True):
    """What the lines come to."""

    error: LoggedError
    """The line that says most of the first failure, with node and rank where they are known."""
    pattern: str
    only_consequence: bool = False
    """No line says why; this is the first that says that something is wrong."""
    alike: int = 0
    """Ranks that said the same, the first one included; 0: no line names its rank."""
    followed: int = 0
    """Further lines, of consequences or of later failures."""
    silent_ranks: tuple[int, ...] = ()
    """In a cascade of timeouts: the few ranks that said nothing."""
    from_outside: bool = False
    """Somebody ended the run, and nothing had gone wrong before."""
    how: str = ""
    """`was killed (SIGKILL)`, `exited with code 1`: where a launcher or Slurm has told it, and the process itself said nothing."""

    @property
    def words(self) -> str:
        return WORDS.get(self.pattern, self.pattern)


def locate(event: Event, node: str, at: float, job: SlurmJob, seats: Seats) -> LoggedError:
    """The line with whoever said it. `node` is where it was read: that is where it was said only if the job has no
    other node, or if it is not the one that reads the job's common log."""
    text, who = split_prefix(event.line)
    rank = event.rank if event.rank is not None else who.get("rank")
    if _is_a_module(event.line, who.get("host"), job):
        rank = None
    task = _TASK.match(text)
    where = who.get("host") if who.get("host") in job.nodes else None
    if task is not None and (task["node"] in job.nodes or not job.nodes):
        where, rank = task["node"], _rank_of_task(int(task["rank"]), task["node"], seats)
    elif event.pattern == "launcher" and (ending := ending_of(text)) is not None:
        host = ending.host if ending.host in job.nodes else None
        where, rank = host, _rank_of_ending(ending, job, seats)
    elif event.pattern == RAYS_WORD:
        rank = _rank_of_rays_worker(text, job, seats)
    seat = seats.get(rank) if rank is not None else None
    if seat is not None:
        where = where or seat[0]
    if where is None and (job.nodes == (node,) or (job.batch_host not in (None, node) and node in job.nodes)):
        where = node
    return LoggedError(
        at=at,
        line=event.line,
        pattern=event.pattern or "",
        node=where,
        rank=rank,
        pid=seat[1] if seat is not None and seat[0] == where else None,
    )


def _rank_of_task(task: int, node: str, seats: Seats) -> int | None:
    """The rank that a task is. Where each task is a launcher of several ranks its number is none, and its node another one. Of a run
    that died before any of its ranks was seen only Slurm's word is known; a launcher that speaks takes it back, see below."""
    if not seats:
        return task
    seat = seats.get(task)
    return task if seat is not None and seat[0].partition(".")[0] == node.partition(".")[0] else None


def _rank_of_ending(ending: Ending, job: SlurmJob, seats: Seats) -> int | None:
    """The rank that a launcher saw end: by its own word, by the process id (None where two nodes have that number), or by the local
    rank where there is one node."""
    if ending.rank is not None:
        return ending.rank
    ranks = [
        rank
        for rank, (node, pid) in seats.items()
        if pid == ending.pid and ending.host in (None, node, node.partition(".")[0])
    ]
    if ending.pid is not None and ranks:
        return ranks[0] if len(ranks) == 1 else None
    known = not seats or ending.local in seats
    return ending.local if len(job.nodes) == 1 and known else None


def _rank_of_rays_worker(text: str, job: SlurmJob, seats: Seats) -> int | None:
    """The rank whose process Ray says has died: of a job on one node, for Ray names others by their addresses."""
    died = died_of(text)
    if died is None or len(job.nodes) != 1:
        return None
    return next((rank for rank, (_, pid) in seats.items() if pid == died[0]), None)


def _is_a_module(line: str, host: str | None, job: SlurmJob) -> bool:
    """Whether a name and a number in brackets are none of the job's nodes and its rank: loggers put a module and its line there."""
    if host is None or not job.nodes or not line.lstrip().startswith(f"[{host}:"):
        return False
    return host.partition(".")[0] not in {node.partition(".")[0] for node in job.nodes}


def running(job: JobView, now: float) -> PastRun:
    """The present run of a job in the shape of one that is over."""
    seats = {r.process.rank: (r.node, r.process.pid) for r in job.ranks if r.process.rank is not None}
    progress = job.progress
    steps = [c.step for c in job.checkpoints_on_disk if c.step is not None]
    steps += [job.checkpoint.step] if job.checkpoint is not None else []
    last_step = progress.step if progress is not None and progress.step_known else None
    return PastRun(
        restarts=job.job.restarts,
        began_at=now - job.run_age_s,
        ended_at=now,
        steps_seen=0 if progress is None else progress.steps_seen - 1,
        first_step=None if progress is None else progress.first_step,
        last_step=last_step,
        total_steps=None if progress is None else progress.total_steps,
        rose_at=None if progress is None or progress.rose_age_s is None else now - progress.rose_age_s,
        step_s=None if progress is None else progress.step_s,
        checkpoint_step=max((s for s in steps if last_step is None or s <= last_step), default=None),
        state=job.job.state,
        log_read=progress is not None or bool(job.errors),
        touched_at=None if job.touched_age_s is None else now - job.touched_age_s,
        errors=tuple(locate(e.event, e.node, now - e.age_s, job.job, seats) for e in job.errors),
        error_ranks=job.error_ranks,
        ranks=len(job.ranks),
    )


def find_cause(run: PastRun) -> Cause | None:
    """What went wrong since the last step of `run`; None if no error was logged since. What came after an action of ours is its echo."""
    lines = [e for e in run.errors if run.rose_at is None or e.at > run.rose_at - STEP_SLACK_S]
    lines = [e for e in lines if run.touched_at is None or e.at < run.touched_at]
    lines.sort(key=lambda e: e.at)  # stable: what was read at once stays in its order
    if any(e.pattern == "launcher" and not e.line.startswith("srun:") for e in run.errors):
        lines = [e if _is_a_workers(e) else _without_its_task(e) for e in lines]
    if not lines:
        return None
    ended = next((place for place, e in enumerate(lines) if e.pattern in FROM_OUTSIDE), len(lines))
    before = lines[:ended]
    death = _death(before)
    own = _own_headers(before)
    causes = [e for place, e in enumerate(before) if _is_a_cause(e, place, before, own)]
    if death is not None and death.signal == 9 and all(e.pattern in AFTER_SIGTERM for e in causes):
        return _of_death(run, lines, death)  # who is killed says nothing: it was another one who raised that
    if causes:
        first = next((e for e in causes if e.pattern not in HEADERS), causes[0])
        return _cause(run, lines, _placed(first, before, frozenset()))
    timed_out = [e for e in before if e.pattern == "nccl_watchdog"]
    if death is not None and death.signal is not None and (not timed_out or death.at < timed_out[0].at):
        return _of_death(run, lines, death)
    first = next(iter(timed_out or [e for e in before if e.pattern not in HEADERS]), lines[0])
    if first.pattern == "terminated":  # the launcher ends the others, and then says whom it saw fail
        first = next((e for e in before if e.pattern == "launcher" and ending_of(_text(e))), first)
    lost = _lost_by_ray(before) if first.pattern in FELT | {RAYS_WORD} else None
    if lost is not None:
        first = lost
    elif first.pattern not in NAMED_BY_SLURM:
        # Who says that he lost the others, or was ended, is not the one who did it.
        nobody = replace(first, node=None, rank=None, pid=None)
        first = _placed(nobody, before, _victims(run, before))
    return replace(
        _cause(run, lines, first),
        only_consequence=True,
        from_outside=ended < len(lines) and not timed_out,
        silent_ranks=_silent(run) if timed_out else (),
        how=_how(first, before),
    )


class _Death(Struct, frozen=True, kw_only=True):
    """The one process of which launchers say that it died of a signal which nobody sends in order, or left with a code."""

    at: float
    error: LoggedError
    """The first line about it."""
    words: str
    signal: int | None


def _death(lines: Sequence[LoggedError]) -> _Death | None:
    """None where launchers tell of no such process, or of several."""
    told = [(e, ending) for e in lines if e.pattern == "launcher" and (ending := ending_of(_text(e)))]
    known = [replace(ending, rank=e.rank, local=None) if _names(ending) else ending for e, ending in told]
    died = [each for each in together(known) if each.signal in KILLS]
    if not died or len({each.rank for each in died}) > 1:
        return None
    first = next(e for e, ending in told if e.rank == died[0].rank or not _names(ending))
    return _Death(at=first.at, error=first, words=died[0].words, signal=died[0].signal)


def _names(ending: Ending) -> bool:
    return ending.rank is not None or ending.local is not None or ending.pid is not None


def _text(error: LoggedError) -> str:
    return split_prefix(error.line)[0]


def _of_death(run: PastRun, lines: Sequence[LoggedError], death: _Death) -> Cause:
    cause = _cause(run, lines, death.error)
    return replace(cause, pattern=CLASSES.get(death.signal or 0, cause.pattern), alike=0, how=death.words)


def _how(first: LoggedError, lines: Sequence[LoggedError]) -> str:
    """How the process ended of which only a launcher or Slurm speaks; empty where that line is about something else."""
    if first.pattern in NAMED_BY_SLURM:
        what = (task["what"] if (task := _TASK.match(_text(first))) is not None else "").partition(" (")[0]
        code = _CODE.search(what)
        slurms = next((how for word, how in _SLURMS_HOW if word in what), "")
        return f"exited with code {code[1]}" if code else slurms
    if first.pattern != "launcher":
        return ""
    told = together(ending for e in lines if e.pattern == "launcher" and (ending := ending_of(_text(e))))
    return told[0].words if told and told[0].code is not None else ""


def _is_a_cause(error: LoggedError, place: int, lines: Sequence[LoggedError], own: frozenset[int]) -> bool:
    if error.pattern in CONSEQUENCES or place in own or _is_explained(error, lines):
        return False
    if _is_a_victims(error, lines) or _follows_a_death(error, place, lines):
        return False
    told = any(e.pattern == "terminated" for e in lines[:place])
    return not (told and error.pattern in AFTER_SIGTERM)


def _is_a_victims(error: LoggedError, lines: Sequence[LoggedError]) -> bool:
    """Whether a header of which no line says what it announces is of a rank that says itself that it lost another one. A header may be
    read before its last line, and may come behind it, too: Ray holds a line back for seconds that another process wrote as well."""
    if error.pattern not in HEADERS or error.rank is None:
        return False
    after = lines[next(place for place, e in enumerate(lines) if e is error) + 1 :]
    complete = any(e.rank == error.rank and e.pattern not in HEADERS for e in after)
    return not complete and error.rank in _felt(lines)


def _follows_a_death(error: LoggedError, place: int, lines: Sequence[LoggedError]) -> bool:
    """Whether it is what any process says that is ended or loses a peer, after Ray's word that another rank's process had died."""
    died = _lost_by_ray(lines[:place]) if error.pattern in AFTER_SIGTERM else None
    return died is not None and died.rank != error.rank


def _own_headers(lines: Sequence[LoggedError]) -> frozenset[int]:
    """Places of `Traceback` that a launcher wrote of itself: the next line of the same stream is the last one of that traceback."""
    found: set[int] = set()
    for place, error in enumerate(lines):
        said = next((e for e in lines[place + 1 :] if e.rank == error.rank), None)
        if error.pattern == "traceback" and said is not None and said.pattern == "launcher":
            found.update({place} if _RAISED_BY_LAUNCHER.search(said.line) else ())
    return frozenset(found)


def how_they_ended(job: JobView, ranks: Sequence[int | None], now: float) -> str:
    """`was killed (SIGKILL)`, `exited with code 1`, as a launcher or Slurm has told it of the one rank; else `ended`."""
    cause = find_cause(running(job, now)) if job.errors and len(ranks) == 1 else None
    known = cause is not None and cause.how and ranks[0] is not None and cause.error.rank == ranks[0]
    return cause.how if cause is not None and known else "ended"


def said_before_it_ended(job: JobView, rank: int | None, now: float) -> str:
    """The line by which this rank itself said why it ends, in a form for a sentence; empty where none of its own is known to be the cause."""
    cause = find_cause(running(job, now)) if job.errors and rank is not None else None
    if (
        cause is None
        or cause.how
        or cause.only_consequence
        or cause.error.rank != rank
        or cause.pattern in HEADERS
    ):
        return ""
    return shortened(split_prefix(cause.error.line)[0], SAID).rstrip(".:")


def _is_explained(error: LoggedError, lines: Sequence[LoggedError]) -> bool:
    """Whether a header announces what only follows from another's failure: its rank says so next."""
    if error.pattern not in HEADERS:
        return False
    place = next(place for place, e in enumerate(lines) if e is error)
    said = next((e for e in lines[place + 1 :] if e.rank == error.rank and e.pattern not in HEADERS), None)
    if said is None:
        return False
    if said.pattern == "launcher" and error.rank is None:
        # Ranks put their number before what they say: what has none is the launcher's own traceback.
        return any(e.rank is not None and e.pattern in HEADERS | FELT for e in lines)
    return said.pattern in FELT | {"interrupted"}


def _is_a_workers(error: LoggedError) -> bool:
    """Whether the rank stands there because a launcher named its process."""
    ending = ending_of(_text(error)) if error.pattern == "launcher" and error.rank is not None else None
    return ending is not None and _names(ending)


def _without_its_task(error: LoggedError) -> LoggedError:
    """Slurm's tasks are launchers here: which rank it was they do not tell, and a launcher that leaves says nothing about its node. Nor
    is what `srun --label` puts before a line a rank."""
    label = _LABEL.match(error.line)
    if label is not None:
        own = split_prefix(error.line[label.end() :])[1].get("rank")
        return (
            error if own is not None and own == error.rank else replace(error, node=None, rank=None, pid=None)
        )
    task = _TASK.match(split_prefix(error.line)[0])
    if task is None:
        return error
    if task["what"].startswith((_EXIT, _TERM)):
        return replace(error, node=None, rank=None, pid=None)
    return replace(error, rank=None, pid=None)


def _victims(run: PastRun, lines: Sequence[LoggedError]) -> frozenset[int]:
    """Ranks that said themselves that they lost somebody."""
    said = [ranks for pattern, ranks in run.error_ranks if pattern in FELT]
    return _felt(lines).union(*said)


def _felt(lines: Sequence[LoggedError]) -> frozenset[int]:
    """The same of lines alone; what Ray says of a rank is no word of that rank."""
    return frozenset(e.rank for e in lines if e.rank is not None and e.pattern in FELT - {RAYS_WORD})


def _placed(error: LoggedError, lines: Sequence[LoggedError], victims: frozenset[int]) -> LoggedError:
    """The line, with the task that Slurm says ended first if it does not say itself whose it is: or the worker that a launcher saw die
    of a signal. One of the `victims` that left with an error is not who they lost."""
    if error.rank is not None:
        return error
    died = _died(lines)
    if died is not None:
        return replace(error, node=died.node, rank=died.rank, pid=died.pid)
    for other in lines:
        same_node = error.node is None or error.node == other.node
        task = _TASK.match(split_prefix(other.line)[0])
        if other.pattern not in NAMED_BY_SLURM or not same_node or task is None or other.node is None:
            continue
        what = task["what"]
        follows = what.startswith(_TERM) or (what.startswith(_EXIT) and other.rank in victims)
        if not follows:
            return replace(error, node=other.node, rank=other.rank, pid=other.pid)
    return error


def _died(lines: Sequence[LoggedError]) -> LoggedError | None:
    """A launcher's word of the one worker that died of a signal; None where there is none, or several are told of."""
    death = _death(lines)
    return (
        death.error
        if death is not None and death.signal is not None and death.error.rank is not None
        else None
    )


def _lost_by_ray(lines: Sequence[LoggedError]) -> LoggedError | None:
    """Ray's word of the one rank whose process died while the others lived; None where it says that of several, or of none."""
    told = [e for e in lines if e.pattern == RAYS_WORD and e.rank is not None]
    alone = len({e.rank for e in told}) == 1 and told[0].rank not in _felt(lines)
    return told[0] if alone else None


def _cause(run: PastRun, lines: Sequence[LoggedError], first: LoggedError) -> Cause:
    ranks = dict(run.error_ranks).get(first.pattern, ())
    named = {e.rank for e in lines if e.pattern == first.pattern and e.rank is not None}
    alike = len(named | set(ranks)) if first.rank is not None else 0
    return Cause(error=first, pattern=first.pattern, alike=alike, followed=len(lines) - 1)


def _silent(run: PastRun) -> tuple[int, ...]:
    """The ranks that did not say that their collective timed out, if nearly all others did."""
    said = set(dict(run.error_ranks).get("nccl_watchdog", ()))
    silent = sorted(set(range(run.ranks)) - said)
    few = max(1, int(FEW_SILENT * run.ranks))
    known = said <= set(range(run.ranks))
    return tuple(silent) if known and len(said) >= 2 and 0 < len(silent) <= few else ()


def culprit_of(cause: Cause) -> Culprit | None:
    """Who is named: the first to fail. None where the line does not tell whose it is."""
    error = cause.error
    if error.node is None and error.rank is None:
        return None
    return Culprit(
        node=error.node, rank=error.rank, pid=error.pid, reason=f"{cause.words}: {shortened(error.line, 200)}"
    )


def work_lost(run: PastRun) -> tuple[str, ...]:
    """What it cost, a sentence: steps since the newest complete checkpoint, and their time; nothing if no step is known."""
    if run.last_step is None:
        return ()
    if run.checkpoint_step is None:
        began = "" if run.first_step is None else f", which began at step {run.first_step}"
        return (f"last step {run.last_step}; no complete checkpoint of this run was seen{began}",)
    steps = run.last_step - run.checkpoint_step
    took = "" if run.step_s is None else f", about {_duration(steps * run.step_s)} of work"
    return (
        f"last step {run.last_step}, last complete checkpoint at step {run.checkpoint_step}: {steps} steps lost{took}",
    )


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
