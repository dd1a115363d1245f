"""The list of detectors, and what is derived from it: a new one is a row of a `*_rules` module, or a module
and a line in `SPECS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurm_watchdog.detect import (
    collective_hang,
    crash_loop,
    device_rules,
    disk_full,
    filesystem_stall,
    gpu_fault,
    host_fault,
    job_rules,
    lingering_job,
    log_error,
    memory_kill,
    node_rules,
    orphan_gpu_process,
    rank_rules,
    slow_job,
    stalled_progress,
    straggler,
    wedged_teardown,
)
from slurm_watchdog.detect.rule import rows_of
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.knowledge.rungs import ENDINGS, GENTLE
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity

SPECS: tuple[DetectorSpec, ...] = (
    filesystem_stall.OUTAGE,
    filesystem_stall.SPEC,
    *rows_of(node_rules),
    gpu_fault.SPEC,
    host_fault.SPEC,
    *rows_of(device_rules),
    orphan_gpu_process.SPEC,
    disk_full.SPEC,
    crash_loop.SPEC,
    crash_loop.CHAIN_BROKEN,
    memory_kill.SPEC,
    log_error.SPEC,
    lingering_job.DEAD_RANK,
    *rows_of(rank_rules),
    slow_job.SLOW_NODE,
    straggler.SPEC,
    slow_job.SPEC,
    lingering_job.SPEC,
    collective_hang.SPEC,
    wedged_teardown.SPEC,
    stalled_progress.SPEC,
    *rows_of(job_rules),
)
"""Every detector, causes before their consequences."""

REQUEST = DetectorSpec(
    kind=IncidentKind.OPERATOR_RESTART,
    detect=list,
    subject=Subject.JOB,
    severity=Severity.INFO,
    sentence="A restart was asked for",
    ladder=(Rung.KILL_SWITCH, Rung.RESTART_STEP, Rung.REQUEUE),
)
"""What an operator asks for travels as an incident, too; nothing detects it."""

_BY_KIND = {spec.kind: spec for spec in (*SPECS, REQUEST)}
KINDS: tuple[str, ...] = tuple(_BY_KIND)  # Every kind of incident.
MAY_ACT: tuple[str, ...] = tuple(sorted(kind for kind, spec in _BY_KIND.items() if spec.may_act))
"""Kinds whose evidence can be good enough to act on."""

Settings = Mapping[type[Any], Any]  # Settings class of a detector -> its values.


def findings_of(spec: DetectorSpec, view: ClusterView, settings: Settings) -> list[Finding]:
    """What one detector says of a view. Raises what the detector raises."""
    return spec.detect(view, *(settings[each] for each in spec.arguments))


def spec_of(kind: str) -> DetectorSpec:
    """What is declared about a kind. One of another release, which a journal may have, explains nothing, and
    nothing is done about it."""
    return _BY_KIND.get(kind) or replace(REQUEST, kind=kind, sentence=kind, ladder=())


_CAUSES: Mapping[str, frozenset[str]] = {
    spec.kind: frozenset(spec.explained_by) | {other.kind for other in SPECS if spec.kind in other.explains}
    for spec in SPECS
}


def causes_of(kind: str) -> frozenset[str]:
    """Which kinds of incident explain a kind away, if they concern the same job."""
    return _CAUSES.get(kind, frozenset())


def why_ladder_unfit(kind: str, ladder: tuple[Rung, ...]) -> str | None:
    """Why a ladder does not answer this kind, a sentence; None if it may."""
    spec = spec_of(kind)
    if not spec.may_act:
        why = spec.why_no_action or "its evidence is never good enough to act on"
        return f"{kind} is reported only: {why}; kinds with a ladder: {', '.join(MAY_ACT)}"
    asks = any(rung in GENTLE for rung in ladder)
    if spec.asks and not asks and any(rung in ENDINGS for rung in ladder):
        return f"{kind} is about a job that makes steps: it is asked to save before it is ended, by {', '.join(GENTLE)}"
    if spec.asks is False and asks:
        return f"{kind}: what the job would save now is damaged, so it is not asked to; such as [evidence, requeue]"
    of_a_process = spec.subject is Subject.PROCESS
    wrong = [step for step in ladder if (step is Rung.END_PROCESS) != of_a_process]
    if not wrong:
        return None
    if of_a_process:
        fits = f"its ladder is [{Rung.END_PROCESS}] or [], not {', '.join(wrong)}"
        return f"{kind} is about a process whose job is over: {fits}"
    kinds = ", ".join(sorted(spec.kind for spec in SPECS if spec.subject is Subject.PROCESS))
    only = f"{Rung.END_PROCESS} ends a process whose job is over, and answers {kinds} alone"
    return f"{only}: {kind} is about jobs that run"
