"""What is to be said about one job: the values. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.outliers import Difference, RankFacts
from slurm_watchdog.diagnose.stacks.vote import VoteGroup
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import StackSnapshot
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import LockWait
from slurm_watchdog.model.incidents import Culprit


class FilesystemVerdict(Struct):
    """One filesystem on which processes of the job wait."""

    mount: str
    scope: str  # `outage`, `one_node`, `one_file`, `lock` or `unknown`.
    summary: str
    blocked: tuple[Culprit, ...] = ()
    answering: tuple[str, ...] = ()
    unanswering: tuple[str, ...] = ()


class Diagnosis(Struct):
    """What is to be said about one job."""

    job_id: str
    is_hang: bool | None  # None: nothing can be said.
    kind: str  # Name of what is wrong, as detectors have it; `progressing`, `busy` or `unknown` otherwise.
    summary: str
    lacks: str = ""  # Why no rank is identified, in a few words.
    culprits: tuple[Culprit, ...] = ()
    ranks: int = 0
    groups: tuple[VoteGroup, ...] = ()
    undumped: tuple[Culprit, ...] = ()  # Ranks without a stack, each with the reason.
    missing: tuple[int, ...] = ()  # Ranks of which nothing came at all.
    differences: tuple[Difference, ...] = ()
    filesystems: tuple[FilesystemVerdict, ...] = ()
    stack_class: str = ""
    """What those who keep the others waiting do, in the words of `group-stacks`: dataloader, lock, filesystem."""
    hints: tuple[Hint, ...] = ()  # What it usually is, and what to try: never the verdict.


class JobEvidence(Struct):
    """What was collected of one job."""

    snapshots: tuple[StackSnapshot, ...] = ()  # Oldest first.
    facts: tuple[RankFacts, ...] = ()  # Of each rank, for comparing them.
    settings: Mapping[str, Mapping[str, str]] = {}  # Node -> name -> value.
    locks: Mapping[tuple[str, int], LockWait] = {}  # (node, pid) -> the file lock that the process waits for.
    collectives: tuple[RecordSet, ...] = ()  # What ranks recorded of their collectives, since the last step.
    silent: Mapping[str, str] = {}  # Nodes that gave no evidence, with the reason.
