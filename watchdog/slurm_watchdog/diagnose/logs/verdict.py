"""What a run died of, from its logs alone: cause, cascade, teardown and noise told apart, and who is named. Pure.

The first error in time that does not follow from another one is the cause, if no progress was made after it.
What ranks say of each other is never a cause; the launcher and Slurm only sum up. A rank that lost the others is
not the one who did it: there no rank is identified but the ranks that are missing from the cascade.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.text import listed, plural, shortened
from slurm_watchdog.diagnose.logs import attribution as whose
from slurm_watchdog.diagnose.logs import case as cases
from slurm_watchdog.diagnose.logs.case import SOFT, LogCase, LogVerdict, Source, is_root
from slurm_watchdog.diagnose.logs.collective_timeouts import odd_ranks
from slurm_watchdog.diagnose.logs.line import Who, classify
from slurm_watchdog.diagnose.logs.no_error import of_numbers
from slurm_watchdog.diagnose.logs.ranks import Ranks
from slurm_watchdog.diagnose.logs.tracebacks import GAP_LINES, FoundError
from slurm_watchdog.diagnose.logs.unexplained_end import LAST_CHOICE, OWN_CUDA, TIMED_OUT, of_consequences
from slurm_watchdog.knowledge.log_signatures import UTILITY, log_table

LATE_RISES = 5
"""An error with so few steps and then a cascade after it may have been its cause after all: its thread had died."""
LAST_LINES = 15
FIRST_HAND = frozenset({"gpu_ecc", "gpu_lost", "oom_kill", "disk_full", "quota", "cuda_oom", "node_failure"})
"""What no lost peer brings about."""
NOBODYS = frozenset({"duplicate_gpu", "nccl_interface", "config_error", "message_size"})
"""Settings, and what two ends do not agree in: the rank that notices first is no more to blame than the others."""
_WHY_NOT_WRITTEN = frozenset({"disk_full", "quota", "io_error", "stale_file_handle", "read_only", "permission"})
_SAYS_MORE = {
    "infiniband": late_regex(r"catastrophic error|DEVICE_FATAL", re.IGNORECASE),
    "not_started": (_REASON_OF_CONTAINER := late_regex(r"\bpyxis:\s{2,}")),
}
"""Of several lines of one library the special one: an adapter's own fault before the calls that fail for it, the
reason of a container before the word that it did not start."""
_UNREACHED = late_regex(
    r"Got completion from peer (?P<peer>[\w.:-]+?)(?:<\d+>)? with (?:error |status=(?:IBV_WC_\w+\()?)1[23]\b"
)
"""Retries exceeded: the one who says so waited for the other end."""
_WORKER_KILLED = late_regex(r"DataLoader worker .* is killed by signal: Killed")
_NO_MORE_WORDS = late_regex(r"MemoryError:?\s*$")  # PaddlePaddle raises it of a GPU's memory, too, and says so below.
_JOB_ENDED = late_regex(r"\*\*\* JOB\b|DUE TO")
TOLD_TO_END = late_regex(r"death signal|got signal: (?:1|2|10|12|15)\b")


def find_verdict(sources: Sequence[Source], ranks: Ranks) -> LogVerdict | None:
    """The verdict over the files of one job; None if nothing is wrong. Sets the roles of their errors."""
    case = ordered_case(sources, ranks)
    return judge_errors(case) or of_numbers(case)


def judge_errors(case: LogCase) -> LogVerdict | None:
    """What the errors of a case come to; None if none of them ended the run, or someone ended it. Sets their roles."""
    for error in case.errors:
        whose.place_in_table(error, case.ranks)
    return _of_errors(case)


def ordered_case(sources: Sequence[Source], ranks: Ranks) -> LogCase:
    """The errors of the files of one job in the order of time, where that is known."""
    errors = []
    for number, source in enumerate(sources):
        for error in source.errors:
            error.source = number
            errors.append(error)
    speaking = {error.source for error in errors}
    clocks = {sources[number].digest.clock for number in speaking}
    timed = len(speaking) <= 1 or (len(clocks) == 1 and None not in clocks and "clock" not in clocks)
    if timed:
        errors.sort(key=lambda e: (e.at if e.at is not None else float("-inf"), e.source, e.began or e.line))
    else:
        errors.sort(key=lambda e: (e.source, e.line))
    return LogCase(sources, ranks, errors, timed=timed)


# ------------------------------------------------------------------------------------------ which errors count


def _of_errors(case: LogCase) -> LogVerdict | None:
    alive = [error for error in case.errors if not cases.was_survived(error, case)]
    if cases.is_usual(alive, case):
        alive = []
    for error in alive:
        is_teardown = error.name in log_table().from_outside or error.name in LAST_CHOICE
        error.role = "teardown" if is_teardown else "cascade"
    if not alive:
        return None
    ended = next((place for place, error in enumerate(alive) if _ends_from_outside(error)), len(alive))
    before, after = alive[:ended], alive[ended:]
    if after and TOLD_TO_END.search(after[0].text):
        # Who was told to end may have been told so because of this.
        before = before + [error for error in after if is_root(error) and error.name not in log_table().after_sigterm]
    roots = [error for error in before if is_root(error) and not error.chained]
    deaths = [error for error in alive if not is_root(error) and not error.weak]  # of something, or others felt them
    firm = [error for error in roots if not error.weak]
    firm = firm or [e for e in roots if not _another_ended(e, case.ranks) and not _is_of_a_script(e, deaths)]
    cascade = _cascade(alive, case)
    ending = [error for error in firm if _is_fatal(error, case, deaths)]
    fatal = [error for error in ending if not cascade.has_brought(error, case.ranks)]
    if fatal and not _are_cut_off(fatal, alive):
        return _of_cause(case, fatal, alive)
    for error in after:
        error.role = "teardown"
    late = _late_cause(case) if any(error.name in TIMED_OUT for error in before) else None
    if late is not None:
        return _of_cause(case, [late], alive)
    kept = {id(error) for error in ending}
    felt = [error for error in before if not is_root(error) or id(error) in kept]
    return of_consequences(case, felt, after[0] if after else None)


def _another_ended(error: FoundError, ranks: Ranks) -> bool:
    """Whether a launcher saw another rank end first, by itself: what this one said in passing was not it."""
    ended = {row.rank for row in ranks.failures if row.root and row.rank is not None and (row.code or 0) > 0}
    rank = ranks.rank_of(error.who)
    return bool(ended) and rank is not None and rank not in ended


def _is_of_a_script(error: FoundError, deaths: Sequence[FoundError]) -> bool:
    """Whether a command of the script said it, and ranks ran after it: they felt each other, or one was seen to die."""
    return UTILITY.match(error.text) is not None and any(
        death.name in log_table().felt or death.name == "launcher" for death in deaths
    )


def _are_cut_off(fatal: Sequence[FoundError], alive: Sequence[FoundError]) -> bool:
    """Whether a log ends within tracebacks that may be those of victims: ranks had lost others before these began."""
    if any(error.name not in log_table().headers for error in fatal):
        return False
    began = min(error.line for error in fatal)
    return any(e.name in log_table().felt and not e.weak and e.line < began and e.who != fatal[0].who for e in alive)


def _ends_from_outside(error: FoundError) -> bool:
    """Whether someone ended the run here. srun also says that a step is aborted when one of its tasks has failed."""
    if error.name in ("cancelled", "terminated"):
        return bool(_JOB_ENDED.search(error.raw_text) or TOLD_TO_END.search(error.text))
    return error.name in log_table().from_outside


def _is_fatal(error: FoundError, case: LogCase, deaths: Sequence[FoundError]) -> bool:
    """Whether an error ended its rank: uncaught, of a kind that no process survives, or with a death after it."""
    if error.weak and not deaths:
        return False
    if error.traceback or error.name not in SOFT or deaths:
        return True
    if cases.rises_after(error, case):
        return False
    lines = case.sources[error.source].digest.lines
    last = lines[-1].number if lines else error.line
    return last - error.line <= LAST_LINES


class _Cascade(msgspec.Struct, frozen=True):
    """Where and when ranks first felt that they had lost the others."""

    timed_out_at: float | None
    line_of: Mapping[tuple[int, Who], int]  # Of each file and stream.
    terminated: Mapping[int, int]  # Of each file the line of a launcher that ends its processes.
    dead_rank: int | None  # Of which Ray says that its process has died,
    dead_line: int | None  # and where.
    first_to_fail: int | None
    """The rank that ended first by a launcher's tables: of what the launcher did after that nothing came of it."""

    def has_brought(self, error: FoundError, ranks: Ranks) -> bool:
        """Whether an error came of it: later than the first timeout, or of a rank that had lost the others before."""
        if error.name in FIRST_HAND:
            return False
        if error.name in log_table().after_sigterm and self._was_ended_before(error, ranks):
            return True
        if (
            self.timed_out_at is not None
            and error.own_time
            and error.at is not None
            and error.at > self.timed_out_at + 1
        ):
            return True
        line = self.line_of.get((error.source, error.who))
        after = line is not None and line < error.line and error.name in log_table().after_sigterm | {"cuda_error"}
        return after and ranks.is_one_process(error.who)

    def _was_ended_before(self, error: FoundError, ranks: Ranks) -> bool:
        """Whether a launcher had ended processes, or another rank had died, before one that was ended said it."""
        rank = ranks.rank_of(error.who)
        if rank is not None and rank == self.first_to_fail:
            return False
        ended = self.terminated.get(error.source)
        if ended is not None and ended < error.line:
            return True
        dead = self.dead_rank
        return dead is not None and dead != rank and self.dead_line is not None and self.dead_line < error.line


def _cascade(alive: Sequence[FoundError], case: LogCase) -> _Cascade:
    felt = [e for e in alive if not e.weak and e.name in log_table().felt and not OWN_CUDA.search(e.text)]
    times = [e.at for e in felt if e.name in TIMED_OUT and e.own_time and e.at is not None]
    line_of: dict[tuple[int, Who], int] = {}
    for error in felt:
        key = (error.source, error.who)
        line_of[key] = min(error.line, line_of.get(key, error.line))
    terminated: dict[int, int] = {}
    for error in alive:
        if error.name == "terminated":
            terminated.setdefault(error.source, error.line)
    dead, _ = whose.rank_of_dead_process(case)
    died = next((error.line for error in alive if error.name == "ray_actor_died"), None)
    return _Cascade(min(times, default=None), line_of, terminated, dead, died, _first_to_fail(alive, case.ranks))


def _first_to_fail(alive: Sequence[FoundError], ranks: Ranks) -> int | None:
    """The rank of the only root cause in torchrun's tables that exited with its own error, and none was earlier."""
    own = {ranks.rank_of(e.who) for e in alive if is_root(e) and not e.chained and e.name not in log_table().headers}
    roots = [row for row in ranks.failures if row.root]
    mine = [row for row in roots if row.rank is not None and row.rank in own and (row.code or 0) > 0]
    if len(mine) != 1 or (first := mine[0].at) is None:
        return None
    earlier = any(row.at is None or row.at < first for row in roots)
    return None if earlier else mine[0].rank


def _late_cause(case: LogCase) -> FoundError | None:
    """An error that was survived by few steps, before a cascade."""
    for error in case.errors:
        passing = error.ignored or error.retried or error.weak or error.chained or not error.traceback
        if passing or not is_root(error) or error.name in log_table().headers:
            continue
        if cases.ENOUGH_RISES <= cases.rises_after(error, case) <= LATE_RISES:
            return error
    return None


def _of_cause(case: LogCase, roots: list[FoundError], alive: Sequence[FoundError]) -> LogVerdict:
    first = _first_said(roots, alive, case)
    name = _refined(first)
    rank, host = whose.speaker_of(first, case)
    alike = [error for error in roots if _refined(error) == name and _says_more(error) == _says_more(first)]
    there = None
    ranks = sorted(
        {r for error in alike if (r := case.ranks.rank_of(error.who)) is not None} | case.said.get(name, frozenset())
    )
    unordered = not case.timed and len({error.source for error in alike}) > 1
    if rank is None and not unordered and not whose.is_launch_of_several(first, alike):
        rank, host = whose.locate_errors(first, name, case, host)
    everybody = whose.is_everybody(ranks, alike, case)
    if name in log_table().headers and len(ranks) > 1:
        rank = host = None  # no one knows what each of them says next
    if name == "dataloader_worker" and _WORKER_KILLED.search(first.text):
        name = next((error.name for error in alive if error.name == "oom_kill"), name)  # Slurm says who killed it
    sources = {error.source for error in roots}
    if rank is None:
        rank = _rank_by_others(name, first, roots, alive, case)
    if rank is None and name in ("oom_kill", "ray_actor_died"):
        dead, where = whose.rank_of_dead_process(case)
        rank, host = (dead, host or where) if host is None or where in (None, host) else (rank, host)
    if name == "node_failure":
        rank, host = None, whose.failed_node(case)
    odd = odd_ranks(alike) if name == "collective_mismatch" else None
    if odd is not None:
        rank = odd.ranks[0] if len(odd.ranks) == 1 else None
        host = case.ranks.host_of(Who(), rank) if rank is not None else None
        ranks = list(odd.ranks)
    elif name in NOBODYS:
        rank = host = None
    elif unordered or everybody or (not case.timed and len(sources) > 1):
        hosts = {case.ranks.host_of(error.who, case.ranks.rank_of(error.who)) for error in alike}
        there = hosts.pop() if len(hosts) == 1 else None
        of_program = everybody and name not in log_table().node_can_cause  # it is the same on any node
        rank, host = None, (None if of_program else there) or (whose.node_of_all(case) if everybody else None)
    elif host is None and rank is None and name == "oom_kill":
        host = whose.node_of_workers(first)
    peers = sorted({match["peer"] for error in alike if (match := _UNREACHED.search(error.text))})
    tellers = {case.ranks.host_of(error.who, case.ranks.rank_of(error.who)) for error in alike} - {None}
    first.role = "cause"
    followed = len(alive) - 1
    who = cases.rank_words(rank, host)
    said = f"{who} failed first" if who else "the first error of the run is"
    more = f", and {plural(len(ranks) - 1, 'more rank')} alike" if len(ranks) > 1 and rank is not None else ""
    if odd is not None:
        said, more = "nothing shows which of them was wrong", ""
        said = f"{listed(odd.ranks, 'rank')} {odd.reason}" if odd.ranks else said
    elif everybody and len(ranks) > 1:
        said, more = f"{len(ranks)} ranks{f', all on {host or there},' if host or there else ''} failed alike", ""
    elif who and peers:
        said = f"{who} did not reach {', '.join(peers)}; the cause is either end or the network between"
    elif len(peers) == 1 and len(tellers) > 1:
        host = peers[0]
        said = f"{len(tellers)} hosts did not reach {host}; it may be at fault, or what leads to it"
    after = f"; {plural(followed, 'more line')} of errors followed" if followed else ""
    summary = (
        f"{log_table().means.get(name, name)}: {said}{more}{cases.after_step(case, first)} (line "
        f"{first.line}): {shortened(cases.said_whole(first), 200)}{after}"
    )
    return LogVerdict(
        name,
        first.line,
        first.source,
        cases.sentence(summary),
        host,
        rank,
        cases.said_whole(first),
        tuple(ranks),
        followed=followed,
        missing=odd.ranks if odd is not None else (),
    )


def _rank_by_others(
    name: str, first: FoundError, roots: Sequence[FoundError], alive: Sequence[FoundError], case: LogCase
) -> int | None:
    rank = whose.who_felt_it(first, alive, case) if name in whose.GPU_NAMES else None
    return whose.rank_beside(first, roots, case) if rank is None and not first.who.named else rank


def _says_more(error: FoundError) -> bool:
    return error.name in _SAYS_MORE and _SAYS_MORE[error.name].search(error.text) is not None


def _first_said(roots: Sequence[FoundError], alive: Sequence[FoundError], case: LogCase) -> FoundError:
    """The error that was first; where the same process says of it what it was, that line."""
    first = next((error for error in roots if error.name not in log_table().headers), roots[0])
    if first.name in _SAYS_MORE:
        first = next((e for e in roots if e.name == first.name and _says_more(e)), first)
    if first.name == "not_started":
        first = whose.reason_of_launch(first, roots)
        below = (e for e in alive if _REASON_OF_CONTAINER.search(e.raw_text) and 0 < e.line - first.line <= LAST_LINES)
        first = next((e for e in below if e.name in _WHY_NOT_WRITTEN), first)
    if first.name == "checkpoint_write":
        first = next((e for e in alive if e.who == first.who and e.name in _WHY_NOT_WRITTEN), first)
    if first.name == "dataloader_worker":
        first = _by_thread(first, case)
    if first.name == "host_oom" and _NO_MORE_WORDS.match(first.text):
        near = [e for e in alive if e.who == first.who and 0 < e.line - first.line <= GAP_LINES]
        first = next((e for e in near if e.name == "cuda_oom"), first)
    return first


def _by_thread(first: FoundError, case: LogCase) -> FoundError:
    """What the thread that pins memory said before its loader missed it: a thread's error alone ends nothing."""
    said = [
        error
        for error in case.errors
        if error.who == first.who and error.source == first.source and error.weak and error.traceback
        and 0 < first.line - error.line <= cases.LONG_AFTER
        and error.name not in log_table().consequences | log_table().headers | {"python_exception"}
    ]  # fmt: skip
    return said[-1] if said and "thread exited unexpectedly" in first.text else first


def _refined(error: FoundError) -> str:
    """The row that says most: the lines after a bare exception may tell what it was."""
    if error.name not in ("python_exception", "abort", "traceback", "xla_error"):
        return error.name
    for text in error.detail:
        name = classify(text)
        if (
            name is not None
            and name not in log_table().consequences
            and name not in log_table().headers
            and name != "python_exception"
        ):
            return name
    return error.name
