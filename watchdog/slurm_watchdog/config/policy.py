"""The section `policy` of the configuration: limits, a block per kind of incident, overrides for some jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from slurm_watchdog.base.hours import parse_hours
from slurm_watchdog.config.job_match import Match
from slurm_watchdog.config.types import Count, Mode, Percent, Seconds, Section, Span
from slurm_watchdog.detect.registry import KINDS, spec_of, why_ladder_unfit
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.knowledge.rungs import problem_of
from slurm_watchdog.model.actions import Rung


def _rung(value: Any) -> Any:
    if isinstance(value, str) and value in set(Rung):
        return Rung(value)
    raise ValueError(f"no rung of a ladder; known: {', '.join(Rung)}")


Rungs = list[Annotated[Rung, BeforeValidator(_rung), PlainSerializer(str)]]


def _hours(value: str) -> str:
    parse_hours(value)
    return value


Hours = list[Annotated[str, AfterValidator(_hours)]]


class Treatment(Section):
    """What is done about a kind of incident. Whatever is left out stays as it was."""

    mode: Mode | None = Field(None, description="off: reported only; observe; act.")
    ladder: Rungs | None = Field(
        None,
        description="What is tried, in this order, each if the ones before did not do: evidence, "
        "kill_switch, sigusr1, sigterm, then ways to end the run: requeue, resubmit, chain, cancel. [] = "
        "nothing. hold goes alone, and so does end_process, of orphan_gpu_process.",
    )
    exclude_nodes: bool | None = Field(
        None, description="Whether the restart avoids the nodes that the evidence blames."
    )
    drain: bool | None = Field(
        None,
        description="Whether those nodes are drained, too; for orphan_gpu_process, whether a node is on "
        "which one cannot be killed.",
    )
    signal_to: Literal["steps", "batch", "all"] | None = Field(
        None, description="Who gets a signal: the tasks, the batch shell, or all."
    )
    lose_work: bool | None = Field(
        None,
        description="Whether a job that turns may be ended although it did not save when it was asked to.",
    )
    cooldown: Seconds | None = Field(None, description="In place of `policy.cooldown`, for decisions about this kind.")
    attempts: Count | None = Field(None, description="In place of `policy.attempts`.")
    no_action: Hours | None = Field(None, description="In place of `policy.no_action`; [] = at any time.")
    kill_switch_limit: Span | None = Field(None, description="In place of `ladder.kill_switch_limit`.")
    checkpoint_limit: Span | None = Field(None, description="In place of `ladder.checkpoint_limit`.")
    signal_limit: Span | None = Field(None, description="In place of `ladder.signal_limit`.")
    exit_limit: Seconds | None = Field(None, description="In place of `ladder.exit_limit`.")

    @model_validator(mode="after")
    def _ladder(self) -> Treatment:
        problem = problem_of(tuple(self.ladder)) if self.ladder is not None else None
        if problem is not None:
            raise ValueError(f"ladder {problem}")
        return self


class Override(Treatment):
    """What is different for some jobs. Of several that match a job the first one holds, alone."""

    match: Match = Field(description="Which jobs.")
    kinds: list[str] = Field([], description="For these kinds of incident only; empty = for all.")


class Policy(Section):
    """What may be done, and how often. Each limit can only take an action away."""

    cooldown: Seconds = Field(900.0, description="Time between two actions on the same job.")
    no_action: Hours = Field(
        [],
        description="Times at which nothing is done by itself, by this machine's time zone, such as ['22:00-07:00', "
        "'sat,sun 00:00-24:00']: all is reported, and what still fires afterwards is decided then.",
    )
    attempts: Count = Field(3, description="Actions on one job before a person has to look.")
    budget: Count = Field(
        4,
        description="Actions on the whole cluster within `budget_window`; half of them at most on jobs of "
        "one user, where others run any.",
    )
    budget_percent: Percent = Field(
        20.0,
        description="… and never more than this share of the running jobs (at least one: where one job has the "
        "whole cluster, one action an hour, unless `budget_window` is shorter).",
    )
    budget_window: Span = Field(3600.0, description="The window of the two budgets.")
    storm_jobs: Count = Field(
        3,
        description="Jobs of so many users in trouble of the same kind at once: it is the fabric or the "
        "storage. No action. So many jobs of one user: none on his.",
    )
    storm_nodes_percent: Percent = Field(20.0, description="More silent nodes than this, and more than one: no action.")
    storm_cooldown: Seconds = Field(120.0, description="… nor for so long after a storm: much recovers by itself.")
    max_excluded_nodes: Count = Field(8, description="Never exclude more nodes than this from one job.")
    exclusion_lifetime: Span = Field(
        604800.0,
        description="Exclusions that the watchdog added are dropped after this time, from a job that waits "
        "or when it is requeued.",
    )
    max_drained_nodes: Count = Field(
        2, description="No node is drained where so many are drained or down already, for any reason, …"
    )
    drained_percent: Percent = Field(5.0, description="… or this share of all nodes.")
    drain_reason: str = Field(
        "slurm-watchdog:", min_length=1, max_length=40, description="Begins the reason of our drains."
    )
    drain_lifetime: Seconds = Field(
        0.0,
        description="Our own drains are taken back after this time, if nobody has touched them since; 0s = never.",
    )
    suspects: Literal["ignore", "prefer", "exclude"] = Field(
        "ignore",
        description="Whether a restart avoids nodes that are suspect (detectors.suspect_node): prefer, where enough "
        "others are free now; exclude, where enough others are there.",
    )
    quarantine: bool = Field(
        False,
        description="Whether suspect nodes are drained (in mode act, within max_drained_nodes and drained_percent), "
        "and given back when an operator's test passes or they are mended.",
    )
    quarantine_test: bool = Field(
        False,
        description="Whether the controller itself tests a node in quarantine once no job runs there (test-nodes, by "
        "its own user), and by the result gives it back, or keeps it.",
    )
    quarantine_test_again: Span = Field(
        86400.0, description="Time before a node that failed its test, or could not be judged, is tested again."
    )
    renamed_nodes: dict[str, str] = Field(
        {}, description="Nodes that have another name now, {old: new}: what is remembered of the one is the other's."
    )
    kinds: dict[str, Treatment] = Field(
        {},
        description="A block for each kind of incident, such as {collective_hang: {mode: act, ladder: "
        "[evidence, sigterm, requeue, cancel], cooldown: 1h}}. docs/acting.md has all keys.",
    )
    overrides: list[Override] = Field(
        [],
        description="What is different for some jobs; the first that matches a job holds: [{match: "
        "{partition: debug, job_name: 'test-*'}, mode: observe}].",
    )

    def problems(self) -> Iterator[str]:
        if self.quarantine_test and not self.quarantine:
            yield "policy.quarantine_test: needs policy.quarantine: true, or there is nothing to be tested"
        for kind, treatment in self.kinds.items():
            where = f"policy.kinds.{kind}"
            yield from _kind_problems(kind, where)
            if kind in KINDS and treatment.ladder and (why := why_ladder_unfit(kind, tuple(treatment.ladder))):
                yield f"{where}.ladder: {why}"
        for index, override in enumerate(self.overrides):
            where = f"policy.overrides[{index}]"
            for kind in override.kinds:
                yield from _kind_problems(kind, f"{where}.kinds")
                if kind in KINDS and override.ladder and (why := why_ladder_unfit(kind, tuple(override.ladder))):
                    yield f"{where}.ladder: {why}"
                elif spec_of(kind).subject is Subject.PROCESS:
                    yield (
                        f"{where}.kinds: {kind} is about a process whose job is over, and an override "
                        "matches jobs: write it to policy.kinds"
                    )
            if override.ladder and not override.kinds:
                yield f"{where}.kinds: name the kinds that this ladder answers; one for all of them cannot be right"


def _kind_problems(kind: str, where: str) -> Iterator[str]:
    from difflib import get_close_matches

    if kind not in KINDS:
        close = get_close_matches(kind, KINDS, n=1)
        known = f"; did you mean {str(close[0])!r}?" if close else f"; known: {', '.join(KINDS)}"
        yield f"{where}: {kind[:60]!r} is no kind of incident{known}"
