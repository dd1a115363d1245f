"""What may be done, and how often (`expert.policy`), and what is different for some jobs, kinds of incidents and nodes
(`except`): one struct of values, one type of match, one matcher."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.structs import fields

from slurm_watchdog.base.hours import parse_hours
from slurm_watchdog.config.converting import did_you_mean
from slurm_watchdog.config.detectors import OptionsOfJobs
from slurm_watchdog.config.types import (
    Count,
    Globs,
    Mention,
    Patience,
    Percent,
    Restart,
    Seconds,
    Section,
    Span,
    checked,
)
from slurm_watchdog.detect import registry
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.knowledge.rungs import problem_of
from slurm_watchdog.model.actions import Rung

LEAST_FLOOR_S: Final = 30.0
"""As of Patience: two dumps of stacks have to fit in."""


class OfJob(Protocol):
    """What of a job may be matched."""

    @property
    def partition(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def name(self) -> str: ...


class Match(Section, frozen=True):
    """Globs (*, ?, [abc]), one or a list; what is left out matches everything, and all that is given has to match."""

    partition: Globs = ()
    """Of the job."""
    account: Globs = ()
    """Of the job."""
    user: Globs = ()
    """The job's owner."""
    job_name: Globs = ()
    """As in --job-name."""
    kind: Globs = ()
    """Kinds of incidents (docs/detectors.md)."""
    node: Globs = ()
    """All nodes that the incident names, or that the job has."""

    def problems(self) -> Iterator[str]:
        if not any(getattr(self, name) for name in self.__struct_fields__):
            yield ": names no partition, account, user, job_name, kind or node: for everything use the option itself"
        for kind in self.kind:
            if not any(fnmatchcase(known, kind) for known in registry.KINDS):
                yield f"kind: {kind[:60]!r} is not a kind of incident{did_you_mean(kind, registry.KINDS)}"

    @property
    def of_jobs(self) -> bool:
        """Whether it names jobs."""
        return bool(self.partition or self.account or self.user or self.job_name)

    @property
    def words(self) -> str:
        """`except` with what it matches, for people."""
        given = ((name, " or ".join(getattr(self, name))) for name in self.__struct_fields__)
        return f"except ({', '.join(f'{name}: {globs}' for name, globs in given if globs)})"

    def kinds(self) -> list[str]:
        """The kinds that it names."""
        return [kind for kind in registry.KINDS if any(fnmatchcase(kind, glob) for glob in self.kind)]

    def matches(self, job: OfJob | None, kind: str = "", nodes: Collection[str] = ()) -> bool:
        """Whether it is meant; None: there is no job."""
        if self.of_jobs and job is None:
            return False
        pairs = [(self.kind, [kind])] if self.kind else []
        if job is not None:  # one that waits may name several partitions
            pairs += [(self.partition, job.partition.split(",")), (self.account, [job.account])]
            pairs += [(self.user, [job.user]), (self.job_name, [job.name])]
        fits = all(not globs or any(fnmatchcase(v, glob) for glob in globs for v in values) for globs, values in pairs)
        in_nodes = all(any(fnmatchcase(node, glob) for glob in self.node) for node in nodes)
        return fits and (not self.node or (bool(nodes) and in_nodes))


class Values(Section, frozen=True):
    """What is done about an incident of a job, and how often."""

    exclude_nodes: bool = True
    """Whether the restart avoids the nodes that the evidence blames."""
    drain: bool = False
    """Whether those nodes are drained, too; of orphan_gpu_process, a node on which one cannot be killed."""
    signal_to: Literal["steps", "batch", "all"] = "steps"
    """Who gets a signal: the tasks, the batch shell, or all."""
    lose_work: bool = False
    """Whether a job that makes steps may be ended although it did not save when it was asked to."""
    cooldown: Seconds = 900.0
    """Time between two actions on the same job."""
    attempts: Count = 3
    """Actions on one job before a person has to look."""
    no_action: tuple[Annotated[str, checked(parse_hours)], ...] = ()
    """Times without automatic actions, of this machine's time zone, such as ['22:00-07:00', 'sat,sun 00:00-24:00']."""
    checkpoint_limit: Span = 1800.0
    """For a complete checkpoint after the kill switch; then the restart is given up."""
    signal_limit: Span = 300.0
    """For a job to save or to end after a signal; then the next rung is tried."""
    stall_after_floor: Seconds = 0.0
    """Down to this an owner's `stall_after` may make the watchdog less patient; 0s = not at all."""

    def problems(self) -> Iterator[str]:
        floor_s: Any = self.stall_after_floor
        if floor_s is not UNSET and 0 < floor_s < LEAST_FLOOR_S:
            least = f"0s or at least {LEAST_FLOOR_S:.0f}s"
            yield f"stall_after_floor: {least}, got {floor_s:g}s: two dumps of stacks have to fit in"


class Policy(Values, frozen=True):
    """What may be done, and how often. Each limit can only take an action away."""

    budget_percent: Percent = 20.0
    """Actions within `budget_window` on at most this share of the running jobs, and at least one."""
    budget_window: Span = 3600.0
    """The window of this budget and of restarts_per_hour."""
    storm_jobs: Count = 3
    """No action while so many users have the same problem, and none on jobs of a user with so many of them."""
    storm_cooldown: Seconds = 120.0
    """Wait this long after a storm before acting again."""
    max_excluded_nodes: Count = 8
    """Never exclude more nodes than this from one job."""
    exclusion_lifetime: Span = 604800.0
    """Exclusions of ours are dropped after this time, from a job that waits or is requeued."""
    max_drained_nodes: Count = 2
    """No node is drained where so many are drained or down already, for any reason, …"""
    drained_percent: Percent = 5.0
    """… or this share of all nodes."""
    drain_lifetime: Seconds = 0.0
    """Our own drains are taken back after this time, if they are unchanged since; 0s = never."""
    suspects: Literal["ignore", "prefer", "exclude"] = "ignore"
    """Whether a restart avoids suspect nodes: ignore, prefer (where others are free) or exclude."""
    quarantine: bool = False
    """Whether suspect nodes are drained, and returned when an operator's test passes or they are repaired."""
    quarantine_test: bool = False
    """Whether the controller tests a node in quarantine itself, and returns or keeps it by the result."""
    quarantine_test_again: Span = 86400.0
    """Time before a node that failed its test, or could not be judged, is tested again."""
    renamed_nodes: dict[str, str] = {}
    """Nodes that have another name now, {old: new}: what is remembered of the one is the other's."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.quarantine_test and not self.quarantine:
            yield "quarantine_test: needs policy.quarantine: true, or there is nothing to be tested"


if TYPE_CHECKING:
    _SomeValues = Values
else:
    _SomeValues = defstruct(
        "_SomeValues",
        [(each.name, each.type | UnsetType, UNSET) for each in fields(Values)],
        bases=(Section,),
        namespace={"problems": Values.problems},
        frozen=True,
        kw_only=True,
    )


class Except(_SomeValues, frozen=True, kw_only=True):
    """What is different where it matches. Of several that match, each value is taken from the first that has it."""

    match: Match
    """Which jobs, kinds and nodes."""
    restart: Restart | UnsetType = UNSET
    """never, hangs or all, in place of the general one."""
    ladder: tuple[Rung, ...] | UnsetType = UNSET
    """What is tried, in this order (docs/acting.md), such as [evidence, sigterm, requeue]; [] = nothing."""
    patience: Patience | UnsetType = UNSET
    """No such job counts as hanging sooner than this after its last step."""
    detectors: OptionsOfJobs | UnsetType = UNSET
    """Options in place of those of `detectors`, such as {collective_hang: {busy_limit: 1h}}."""
    mention: Mention | UnsetType = UNSET
    """Who is mentioned in Slack; '' = no one."""
    silence: Annotated[str, Meta(min_length=1, max_length=200)] | UnsetType = UNSET
    """Why people are not notified: no messages and no alerts; all else continues."""

    def given(self) -> dict[str, Any]:
        """The values that it has."""
        found = {name: getattr(self, name) for name in self.__struct_fields__ if name != "match"}
        return {name: value for name, value in found.items() if value is not UNSET}

    def settings(self, found: registry.Settings) -> registry.Settings:
        """The values of every detector, with its own in place of `found`."""
        if self.detectors is UNSET:
            return found
        return {
            **found,
            **{
                spec.settings: replace(found[spec.settings], **own)
                for spec in registry.SPECS
                if spec.settings and spec.subject is Subject.JOB and (own := self.detectors.given(spec.kind))
            },
        }

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        given, kinds = self.given(), self.match.kinds()
        if not given:
            yield "match: nothing is different; give values, such as restart: never"
        if given.keys() & {"detectors", "patience", "stall_after_floor"} and (self.match.kind or self.match.node):
            yield "match: limits are chosen by the job alone; take kind and node out"
        if self.ladder is not UNSET:
            if problem := problem_of(self.ladder):
                yield f"ladder: {problem}"
            if self.ladder and not kinds:
                yield "match.kind: name the kinds that this ladder answers; one for all of them cannot be right"
            fits = [why for kind in kinds if self.ladder and (why := registry.why_ladder_unfit(kind, self.ladder))]
            yield from (f"ladder: {why}" for why in fits)
        over = [kind for kind in kinds if registry.spec_of(kind).subject is Subject.PROCESS]
        if over and self.match.of_jobs:
            yield f"match.kind: {over[0]} is about a process whose job is over: match it by kind alone"


Exceptions = tuple[Except, ...]


def values_for(
    exceptions: Exceptions, job: OfJob | None, kind: str = "", nodes: Collection[str] = ()
) -> tuple[dict[str, Any], str]:
    """What is different there, each value of the first exception that matches and has it; and the words of the first
    that has anything about what is done."""
    found, source = dict[str, Any](), ""
    for each in reversed(exceptions):
        if each.match.matches(job, kind, nodes):
            own = each.given()
            source = each.match.words if own.keys() & RULES else source
            found |= own
    return found, source


RULES: Final = frozenset({"restart", "ladder", *Values.__struct_fields__})
"""Values that are about what is done."""
