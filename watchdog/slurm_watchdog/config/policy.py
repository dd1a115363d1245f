"""The section `policy` of the configuration: limits, a block per kind of incident, overrides for some jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from slurm_watchdog.base.hours import parse_hours
from slurm_watchdog.config.converting import did_you_mean
from slurm_watchdog.config.jobs import Match
from slurm_watchdog.config.types import Count, Mode, Percent, Seconds, Section, Span, checked
from slurm_watchdog.detect.registry import KINDS, spec_of, why_ladder_unfit
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.knowledge.rungs import problem_of
from slurm_watchdog.model.actions import Rung

Hours = tuple[Annotated[str, checked(parse_hours)], ...]


class Treatment(Section, frozen=True):
    """What is done about a kind of incident. Whatever is left out stays as it was."""

    mode: Mode | None = None
    """off: reported only; observe; act."""
    ladder: tuple[Rung, ...] | None = None
    """What is tried, in this order, each if the ones before did not do: evidence, kill_switch, sigusr1,
    sigterm, then ways to end the run: requeue, resubmit, chain, cancel. [] = nothing. hold goes alone, and so
    does end_process, of orphan_gpu_process."""
    exclude_nodes: bool | None = None
    """Whether the restart avoids the nodes that the evidence blames."""
    drain: bool | None = None
    """Whether those nodes are drained, too; for orphan_gpu_process, whether a node is on which one cannot be
    killed."""
    signal_to: Literal["steps", "batch", "all"] | None = None
    """Who gets a signal: the tasks, the batch shell, or all."""
    lose_work: bool | None = None
    """Whether a job that turns may be ended although it did not save when it was asked to."""
    cooldown: Seconds | None = None
    """In place of `policy.cooldown`, for decisions about this kind."""
    attempts: Count | None = None
    """In place of `policy.attempts`."""
    no_action: Hours | None = None
    """In place of `policy.no_action`; [] = at any time."""
    checkpoint_limit: Span | None = None
    """In place of `ladder.checkpoint_limit`."""
    signal_limit: Span | None = None
    """In place of `ladder.signal_limit`."""

    def problems(self) -> Iterator[str]:
        if self.ladder is not None and (problem := problem_of(self.ladder)):
            yield f"ladder: {problem}"


class Override(Treatment, frozen=True, kw_only=True):
    """What is different for some jobs. Of several that match a job the first one holds, alone."""

    match: Match
    """Which jobs."""
    kinds: tuple[str, ...] = ()
    """For these kinds of incident only; empty = for all."""


class Policy(Section, frozen=True):
    """What may be done, and how often. Each limit can only take an action away."""

    cooldown: Seconds = 900.0
    """Time between two actions on the same job."""
    no_action: Hours = ()
    """Times without automatic actions, in this machine's time zone, such as ['22:00-07:00', 'sat,sun
    00:00-24:00']: all is reported, and what still fires afterwards is decided then."""
    attempts: Count = 3
    """Actions on one job before a person has to look."""
    budget_percent: Percent = 20.0
    """Actions within `budget_window` on never more than this share of the running jobs (at least one: where one
    job has the whole cluster, one action an hour, unless `budget_window` is shorter)."""
    budget_window: Span = 3600.0
    """The window of this budget and of restarts_per_hour."""
    storm_jobs: Count = 3
    """Take no action while jobs of this many users have the same problem at once: the fabric or the storage is at
    fault. While this many jobs of one user have it: none on the jobs of that user."""
    storm_cooldown: Seconds = 120.0
    """Wait this long after a storm before acting again."""
    max_excluded_nodes: Count = 8
    """Never exclude more nodes than this from one job."""
    exclusion_lifetime: Span = 604800.0
    """Exclusions that the watchdog added are dropped after this time, from a job that waits or when it is
    requeued."""
    max_drained_nodes: Count = 2
    """No node is drained where so many are drained or down already, for any reason, …"""
    drained_percent: Percent = 5.0
    """… or this share of all nodes."""
    drain_lifetime: Seconds = 0.0
    """Our own drains are taken back after this time, if they are unchanged since; 0s = never."""
    suspects: Literal["ignore", "prefer", "exclude"] = "ignore"
    """Whether a restart avoids nodes that are suspect (detectors.suspect_node): prefer, where enough others are
    free now; exclude, where enough others are there."""
    quarantine: bool = False
    """Whether suspect nodes are drained (in mode act, within max_drained_nodes and drained_percent), and
    returned to service when an operator's test passes or they are repaired."""
    quarantine_test: bool = False
    """Whether the controller itself tests a node in quarantine once no job runs there (test-nodes, by its own
    user), and returns it to service or keeps it by the result."""
    quarantine_test_again: Span = 86400.0
    """Time before a node that failed its test, or could not be judged, is tested again."""
    renamed_nodes: dict[str, str] = {}
    """Nodes that have another name now, {old: new}: what is remembered of the one is the other's."""
    kinds: dict[str, Treatment] = {}
    """A block for each kind of incident, such as {collective_hang: {mode: act, ladder: [evidence, sigterm,
    requeue, cancel], cooldown: 1h}}. docs/acting.md has all keys."""
    overrides: tuple[Override, ...] = ()
    """What is different for some jobs; the first that matches a job holds: [{match: {partition: debug,
    job_name: 'test-*'}, mode: observe}]."""

    def problems(self) -> Iterator[str]:
        if self.quarantine_test and not self.quarantine:
            yield "quarantine_test: needs policy.quarantine: true, or there is nothing to be tested"
        for kind, treatment in self.kinds.items():
            where = f"kinds.{kind}"
            yield from _kind_problems(kind, where)
            if kind in KINDS and treatment.ladder and (why := why_ladder_unfit(kind, treatment.ladder)):
                yield f"{where}.ladder: {why}"
        for index, override in enumerate(self.overrides):
            where = f"overrides[{index}]"
            for kind in override.kinds:
                yield from _kind_problems(kind, f"{where}.kinds")
                if kind in KINDS and override.ladder and (why := why_ladder_unfit(kind, override.ladder)):
                    yield f"{where}.ladder: {why}"
                elif spec_of(kind).subject is Subject.PROCESS:
                    yield (
                        f"{where}.kinds: {kind} is about a process whose job is over, and an override "
                        "matches jobs: write it to policy.kinds"
                    )
            if override.ladder and not override.kinds:
                yield f"{where}.kinds: name the kinds that this ladder answers; one for all of them cannot be right"


def _kind_problems(kind: str, where: str) -> Iterator[str]:
    if kind not in KINDS:
        yield f"{where}: {kind[:60]!r} is not a kind of incident{did_you_mean(kind, KINDS)}"
