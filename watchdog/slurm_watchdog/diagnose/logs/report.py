"""From what is kept of each file of a job to what is said about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.text import plural
from slurm_watchdog.diagnose.logs import progress as runs
from slurm_watchdog.diagnose.logs.case import OF_CHILDREN, SOFT, LogVerdict, Source
from slurm_watchdog.diagnose.logs.digest import HEAD_LINES, Collector, Digest
from slurm_watchdog.diagnose.logs.grouping import base_of, group, local_is_rank, named_by, rotated_parts, with_rank
from slurm_watchdog.diagnose.logs.no_error import STILL_TRAINS, notes_of
from slurm_watchdog.diagnose.logs.ranks import Ranks, read_ranks
from slurm_watchdog.diagnose.logs.silence import last_words, read_silence
from slurm_watchdog.diagnose.logs.tracebacks import FoundError, find_errors
from slurm_watchdog.diagnose.logs.unexplained_end import LAST_CHOICE
from slurm_watchdog.diagnose.logs.verdict import TOLD_TO_END, find_verdict
from slurm_watchdog.knowledge.frameworks import recognise, what_to_do
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.knowledge.other_documents import GIVE_OUTPUT, looks_like
from slurm_watchdog.knowledge.progress_patterns import Pattern
from slurm_watchdog.knowledge.remediation_hints import Hint, hints_for
from slurm_watchdog.parse.timestamps import parse_time

CONTINUED = 3
_NAMES = late_regex(
    r"['\"/]|\b(?:key|size|shape|host|node|rank|task|reason|error|file|device)\w*\b.*[:=]", re.IGNORECASE
)
"""What the further lines of a message are shown for."""
MAX_ERRORS = 400  # Of one file in the answer: the first ones, the cause, and the last.
RECORDS, RECORD_SHARE = 3, 0.02
"""So many lines, and so large a part of them, have a time, a level or a rank, as the lines of a log have."""
BLIND = ", and no progress either: whether it trains cannot be read in it."


class Settings(msgspec.Struct, frozen=True):
    """Of the detectors, and a site's own patterns of progress."""

    limits: PhaseLimits
    own: tuple[Pattern, ...] = ()


class RunReport:
    """The files of one job, and the verdict over them."""

    def __init__(
        self, sources: list[Source], ranks: Ranks, verdict: LogVerdict | None, excerpts: Sequence[LogVerdict] = ()
    ) -> None:
        self.sources, self.ranks, self.verdict = sources, ranks, verdict
        self.excerpts = [each for each in excerpts if verdict is None or each.line != verdict.line]
        """Of a text with several excerpts, what the others show."""
        unread = [why_unread(source) for source in sources] if verdict is None else [None]
        self.unread = next(iter(unread)) if all(unread) else None
        """Why nothing can be said of the run; None if something can."""
        self.notes = [notes_of(source) if verdict is None and not source.digest.excerpts else [] for source in sources]

    def rows(self) -> list[dict[str, Any]]:
        """One for each file, in the shape of `scan-log --json`."""
        return [self._row(number, source) for number, source in enumerate(self.sources)]

    def _row(self, number: int, source: Source) -> dict[str, Any]:
        progress = source.progress
        errors = self._errors(source)
        return {
            "path": source.path,
            "framework": progress.framework,
            "progress": {
                **_fields(progress, "first_step", "last_step", "total_steps", "lines", "last_line"),
                "advancing": progress.advancing and (self.verdict is None or self.verdict.name in STILL_TRAINS),
                "step_seconds_median": progress.step_seconds_median,
            },
            "phases": runs.read_phases(source.digest),
            "throughput_changes": [
                _fields(each, "step", "before_s", "after_s", "percent") for each in runs.read_changes(source.digest)
            ],
            "errors": errors,
            "errors_left_out": max(0, len(source.errors) - len(errors)) + source.digest.left_out,
            "verdict": self._verdict(number),
            "healthy": None if self.unread is not None else self.verdict is None,
            "unread": self.unread,
            "notes": self.notes[number],
            "excerpts": [{"class": e.name, "line": e.line, "summary": e.summary} for e in self.excerpts],
            "finished": progress.finished,
            "world_size": self.ranks.world,
        }

    def _verdict(self, number: int) -> dict[str, Any] | None:
        verdict = self.verdict
        if verdict is None:
            return None
        answer: dict[str, Any] = {
            "class": verdict.name,
            **_fields(verdict, "host", "rank", "line", "summary", "text"),
            "first_failing_ranks": list(verdict.first_ranks),
            "missing_ranks": list(verdict.missing),
            "followed": verdict.followed,
            "hints": [hint.as_json() for hint in self.hints()],
        }
        if len(self.sources) > 1:
            answer["path"] = self.sources[verdict.source].path
        return answer

    def hints(self) -> tuple[Hint, ...]:
        """What it usually is, and what to try next."""
        return hints_for(self.verdict.name, self.verdict.text) if self.verdict is not None else ()

    @property
    def _is_blind(self) -> bool:
        """Whether nothing in them shows progress."""
        return not any(source.progress.finished or source.progress.lines for source in self.sources)

    @property
    def summary(self) -> str:
        """What is said of the run, in one sentence."""
        if self.verdict is not None:
            return self.verdict.summary
        if self.unread is not None:
            return f"the run cannot be judged: {self.unread}"
        notes = "".join(f"; {note}" for note in dict.fromkeys(chain(*self.notes)))
        if any(source.progress.finished for source in self.sources):
            return f"{'' if notes else 'nothing wrong found; '}training was done{notes}."
        if self._is_blind:
            return f"no error found{self._ended_words()}{BLIND}"
        steps = [source.progress.last_step for source in self.sources if source.progress.last_step is not None]
        none = "it made progress, in steps of unknown number"  # of samples, or in an epoch of unknown length
        last = f"its last step is {max(steps)}" if steps else none
        return f"{'no error' if notes else 'nothing wrong'} found{self._ended_words()}{notes}; {last}."

    def _ended_words(self) -> str:
        """What ended the run from outside, such as its time limit, and in which line; empty if nothing did."""
        for _, error in self._all_errors():
            told = error["class"] == "terminated" and TOLD_TO_END.search(error["text"])
            if error["role"] == "teardown" and (told or error["class"] in log_table().from_outside):
                return f"; ended from outside (line {error['line']}): {log_table().means[error['class']]}"
        return ""

    def telling_errors(self) -> list[tuple[str, dict[str, Any]]]:
        """(path, error) of those that people are shown: the cause first."""
        errors = self._all_errors()
        if self.verdict is not None:
            return sorted((e for e in errors if e[1]["role"] != "noise"), key=lambda each: each[1]["role"] != "cause")
        if self.unread is not None:
            return errors
        # What a node can cause, and the run survived, or what is of an earlier run in the same log.
        of_nodes = log_table().node_can_cause - log_table().consequences - OF_CHILDREN - SOFT
        return [(path, error | {"role": "earlier"}) for path, error in errors if error["class"] in of_nodes]

    def what_to_try(self) -> str:
        """What makes a run readable in which nothing is wrong, as far as can be read; empty for any other."""
        is_well = self.verdict is None and self.unread is None
        return what_to_do(self.sources[0].progress.framework) if is_well and self._is_blind else ""

    def _all_errors(self) -> list[tuple[str, dict[str, Any]]]:
        return [(source.path, error) for source in self.sources for error in self._errors(source)]

    def _errors(self, source: Source) -> list[dict[str, Any]]:
        errors = sorted(source.errors, key=lambda error: error.line)
        left_out = range(MAX_ERRORS - 50, len(errors) - 50) if len(errors) > MAX_ERRORS else ()
        return [self._error(each) for at, each in enumerate(errors) if at not in left_out or each.role == "cause"]

    def _error(self, error: FoundError) -> dict[str, Any]:
        rank = self.ranks.rank_of(error.who)
        return {
            "line": error.line,
            "class": error.name,
            "role": error.role,
            "host": self.ranks.host_of(error.who, rank),
            "rank": rank,
            "text": error.text[:500],
            "more": _continued(error),
        }


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _continued(error: FoundError) -> list[str]:
    """The next lines of the same message: all where it announces them, else those that name anything."""
    announced = error.text.rstrip().endswith((":", "from", "to", "at"))
    return [text for text in error.detail[:CONTINUED] if announced or _NAMES.search(text)]


def why_unread(source: Source) -> str | None:
    """What a file looks like in which nothing of a run was recognised, as sentences; None if it is a log: nothing wrong
    in what was not understood is no good news."""
    if source.digest.facts:
        return None
    ends = {error.line for error in source.errors}
    lines = [line for line in source.digest.lines if line.raw.strip()]
    others = [line for line in lines if line.number not in ends]
    if not lines:
        return f"it is empty. {GIVE_OUTPUT}"
    if ends:
        last = f"only how the run ended is in it (line {min(ends)}). {GIVE_OUTPUT}"
        return last if len(others) < RECORDS else None
    records = sum(1 for line in lines if line.stamp is not None or line.level is not None or line.who.named)
    kind = looks_like([line.raw for line in lines], records)
    if kind is not None:
        return f"it looks like {kind.looks_like}. {kind.instead}".strip()
    head = "\n".join(line.raw for line in lines[:HEAD_LINES]).encode(errors="replace")
    if records >= max(RECORDS, RECORD_SHARE * len(lines)) or recognise(head) is not None:
        return None
    return f"no step and no error was recognised in its {plural(len(lines), 'line')}. {GIVE_OUTPUT}"


def digest_of(
    blocks: Iterable[tuple[bytes, int, Sequence[int] | None]],
    own: tuple[Pattern, ...],
    *,
    markdown: bool,
    watch: Callable[[Collector], None] = lambda _: None,
) -> Digest:
    """What is kept of one file, given as blocks: whole lines, the number of the first, of each if they are no row.
    `watch` is called after each block."""
    collector = Collector(markdown=markdown, own=own)
    for data, first_line, numbers in blocks:
        collector.add(data, first_line, numbers)
        watch(collector)
    return collector.digest()


def judge_jobs(
    digests: Mapping[str, Digest], settings: Settings, seen_at: str | None, written_at: Callable[[str], float | None]
) -> list[RunReport]:
    """One for each job whose files are among these."""
    paths = list(digests)
    jobs = [[paths[place] for place in places] for places in group(paths)]
    return [judge_job(job, [digests[p] for p in job], settings, seen_at, [written_at(p) for p in job]) for job in jobs]


def judge_job(
    paths: Sequence[str],
    digests: Sequence[Digest],
    settings: Settings,
    seen_at: str | None = None,
    written_at: Sequence[float | None] = (),
) -> RunReport:
    """What the logs of a job say together. `seen_at`: as a person wrote it; `written_at`: of each file, local time."""
    if len(digests) == 1 and digests[0].excerpts:
        return _judge_excerpts(paths[0], digests[0], settings)
    sources = []
    names = [named_by(base_of(path, paths)) for path in paths]
    ranks = read_ranks([line for digest in digests for line in digest.lines])
    together = len(paths) > 1
    as_rank = together and local_is_rank(paths, ranks.world)
    for digest, name in zip(digests, names, strict=True):
        rank, host = (name.rank, name.host) if together else (None, None)
        rank = name.local if as_rank and rank is None else rank
        if rank is not None or name.local is not None or host:
            digest.lines = with_rank(digest.lines, rank, name.local, host)
    if together:
        ranks = read_ranks([line for digest in digests for line in digest.lines])
        of_files = [name.rank for name in names if name.rank is not None]
        ranks.files = frozenset(of_files if len(of_files) == len(names) else ())
    if any(digest.ended_line is not None for digest in digests):
        seen_at = None  # nothing has hung since
    older = rotated_parts(paths)
    last_said = last_words(digests)
    for number, (path, digest, name) in enumerate(zip(paths, digests, names, strict=True)):
        progress = runs.read_progress(digest)
        written = written_at[number] if written_at and seen_at is not None else None
        at = parse_time(seen_at, digest.clock) if seen_at is not None else last_said[number]
        sources.append(
            Source(
                path,
                digest,
                progress,
                find_errors(digest.lines, digest.origin),
                read_silence(digest, progress, at, written, settings.limits)
                if not digest.pasted and path not in older
                else None,
                rank=name.local if as_rank and name.rank is None else name.rank,
                host=name.host,
                part_of=older.get(path),
            )
        )
    return RunReport(sources, ranks, find_verdict(sources, ranks))


def _judge_excerpts(path: str, digest: Digest, settings: Settings) -> RunReport:
    """Each excerpt alone, for they may be of different runs; the first that shows something counts."""
    parts = [judge_job([path], [part], settings) for part in digest.excerpts]
    found = [part.verdict for part in parts if part.verdict is not None]
    errors = [error for part in parts for error in part.sources[0].errors]
    for error in errors:
        if error.role == "cause" and found and error.line != found[0].line:
            error.role = "teardown" if error.name in LAST_CHOICE else "cascade"
    whole = Source(path, digest, runs.read_progress(digest), errors)
    return RunReport([whole], read_ranks(digest.lines), found[0] if found else None, found)
