"""What a hang is a consequence of: hardware that broke under its job shortly before. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.incidents import HARDWARE_FAULTS, Finding, Truth

BEFORE_S: Final = 60.0
"""A fault so soon before the last step that was seen may be the cause of the next not coming: data that was read ahead
lasts for some steps."""


def with_hardware_cause(findings: Sequence[Finding]) -> list[Finding]:
    """The findings; those of a job that makes no steps name the fault of its nodes' hardware that came before."""
    broken = [each for each in findings if each.kind in HARDWARE_FAULTS and each.truth is Truth.BAD and each.job_ids]
    return [_with_cause(each, broken) if broken and _stands(each) else each for each in findings]


def _stands(finding: Finding) -> bool:
    return finding.truth is Truth.BAD and spec_of(finding.kind).stops_steps


def _with_cause(finding: Finding, broken: Sequence[Finding]) -> Finding:
    """`duration_s` of both is counted from now: of the hang since its last step."""
    causes = [
        each
        for each in broken
        if not set(each.job_ids).isdisjoint(finding.job_ids) and each.duration_s <= finding.duration_s + BEFORE_S
    ]
    if not causes:
        return finding
    first = max(causes, key=lambda each: each.duration_s)
    after_s = finding.duration_s - first.duration_s
    when = f"{abs(after_s):.0f} s {'after' if after_s >= 0 else 'before'} the last step"
    words = first.summary.removesuffix(".")
    if first.culprits:
        words = f"{first.culprits[0].reason} on {first.culprits[0].node}"
    return replace(
        finding,
        summary=f"{finding.summary.removesuffix('.')}; probable cause: {words}, {when}.",
        facts=(first.summary, *finding.facts),
    )
