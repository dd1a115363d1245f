"""The engine of threshold detectors. A row (`Rule`) is the declaration of its kind, with a signal, a duration and a
sentence; the engine makes findings of what the signal saw. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.diagnose.culprit_words import and_more
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Culprit, Finding


class Sign(Struct, kw_only=False):
    """One thing that is wrong with a subject."""

    who: Culprit | None = None
    fact: str = ""
    lasts_s: float | None = None  # How long it has lasted; None: not known, and no matter.


class Seen(Struct, kw_only=False):
    """What is wrong with one subject: BAD with a sign that lasts, UNKNOWN with others only."""

    signs: tuple[Sign, ...]  # The first is in the sentence.
    words: Mapping[str, object] = {}  # For `says`.
    fields: Mapping[str, Any] = {}  # Further ones of the finding.


Answer = Seen | str | None  # A sentence where all is well; None: not known.
About = tuple[str, tuple[str, ...], Answer]  # Subject, jobs that it is about, what was seen of it.


@dataclass(frozen=True, kw_only=True)
class Rule(DetectorSpec):
    """A row. `signal` is asked about each running job (view, job, settings) and gives its Answer or, for another
    subject, about the whole view, and gives what each answer is about."""

    detect: Callable[..., list[Finding]] = field(init=False)
    signal: Callable[..., Any]
    applies: Callable[[ClusterView, JobView], bool] = lambda *_: True  # Whether anything is said of a job at all.
    for_s: float = 0.0  # A sign that has not lasted for so long is no evidence yet.
    says: str  # The sentence. `first` is the first culprit, `more` says how many more, `job` which job.
    named: int | None = None  # Culprits that are named, at most.
    facts: int = 8  # Of so many signs the facts are given.

    def __post_init__(self) -> None:
        """A row is a detector like any other."""
        object.__setattr__(self, "detect", self._of_jobs if self.subject is Subject.JOB else self._of_others)

    def _of_jobs(self, view: ClusterView, *settings: Any) -> list[Finding]:
        return [
            self._finding(f"job:{job.job.job_id}", (job.job.job_id,), self.signal(view, job, *settings))
            for job in view.jobs
            if self.applies(view, job)
        ]

    def _of_others(self, view: ClusterView, *settings: Any) -> list[Finding]:
        return [self._finding(*each) for each in self.signal(view, *settings)]

    def _finding(self, subject: str, jobs: tuple[str, ...], seen: Answer) -> Finding:
        finding = self.about(subject, *jobs)
        if seen is None or isinstance(seen, str):
            return finding if seen is None else finding.ok(seen)
        long = [each for each in seen.signs if each.lasts_s is None or each.lasts_s >= self.for_s]
        if not long:
            return finding
        culprits = tuple(each.who for each in long if each.who is not None)
        given = {
            "culprits": culprits[: self.named],
            "facts": tuple(each.fact for each in long[: self.facts] if each.fact),
            "duration_s": max((each.lasts_s for each in long if each.lasts_s is not None), default=0.0),
            **seen.fields,
        }
        words = {"job": ", ".join(jobs), "more": and_more(len(long)), **seen.words}
        return finding.bad(self.says.format(first=culprits[0] if culprits else None, **words), **given)


def lasting(signs: Iterable[Sign]) -> tuple[Sign, ...]:
    """The signs, those that have lasted longest first."""
    return tuple(sorted(signs, key=lambda each: each.lasts_s or 0.0, reverse=True))


def rows_of(module: ModuleType) -> list[Rule]:
    """The rows of a module, in their order there."""
    return [each for each in vars(module).values() if isinstance(each, Rule)]
