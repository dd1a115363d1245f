"""Secrets of users in whole values: every text of a report, a finding, an answer is masked at the edge where
the value passes. Pure.

Which fields hold text is read from the types, so that a new field is masked without anybody's thinking of it;
NAMES lists those that are no text: identifiers, letters and words of ours, which are compared and of which
there are thousands in each report.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache, lru_cache
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from slurm_watchdog.base.python310 import is_class
from slurm_watchdog.base.redact import mask_line, mask_lines
from slurm_watchdog.model.evidence import NodeEvidence, ProcessStack, RankEvidence, SocketState, ThreadState
from slurm_watchdog.model.incidents import Culprit, Finding, GpuProcess, MountProbeRequest, StackRequest
from slurm_watchdog.model.observations import (
    Blocked,
    Checkpoint,
    Event,
    Gpu,
    GpuHolder,
    LogFile,
    MigInstance,
    MountProbe,
    NodeEvent,
    Process,
)
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import JobDirectives, Report

UNMASKED_FIELDS: Final[Mapping[type, frozenset[str]]] = {
    cls: frozenset(fields.split())
    for cls, fields in (
        (Report, "node boot_id agent_id agent_version wishes"),
        (Process, "job_id comm state step_id"),
        (Blocked, "state wchan syscall fs_type mount"),
        (LogFile, "job_id"),
        (Event, "job_id pattern phase line"),
        (NodeEvent, "source name line gpu_uuid pci_bus_id mount"),
        (MountProbe, "mount fs_type"),
        (Gpu, "uuid pci_bus_id name throttle mig"),
        (MigInstance, "uuid"),
        (Checkpoint, "job_id layout"),
        (GpuHolder, "comm state job_id user gpu_uuids"),
        (JobDirectives, "job_id variables"),
        (CommandResult, "command_id"),
        (ProcessStack, "node job_id state wchan syscall"),
        (NodeEvidence, "node job_id"),
        (RankEvidence, "comm state"),
        (ThreadState, "comm state wchan syscall"),
        (SocketState, "state local peer"),
        (Finding, "subject job_ids exclude_nodes mounts processes wanted"),
        (Culprit, "node gpu_uuid mount"),
        (GpuProcess, "node boot_id user comm job_id gpu_uuids"),
        (MountProbeRequest, "mount directory nodes"),
        (StackRequest, "job_id"),
    )
}
"""No text of users, or too short to hold a secret (`comm` has 15 characters); lines of events and of the
kernel are masked where they are cut. Directives (`wishes`) and mounts are used as they are, and masked where
they become words."""
REMEMBERED = 8192  # Texts whose masked form is known: frames, paths and sentences come again in every report.
MAX_REMEMBERED = 1000  # Characters of such a text.

V = TypeVar("V")


@lru_cache(REMEMBERED)
def _remembered(text: str) -> str:
    return mask_line(text)


def mask_words(text: str) -> str:
    """`text` masked; quick for one that was seen before."""
    if len(text) <= MAX_REMEMBERED:
        return _remembered(text)
    return mask_line(text)


def masked(value: V) -> V:
    """`value` (struct, tuple, list, dictionary, text) with every text masked; the same object without secrets."""
    result: Any = _masked(value)
    return result  # type: ignore[no-any-return]


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Enum) else mask_words(value)
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in text_fields(type(value)):
            before = getattr(value, name)
            if before:
                after = _masked(before)
                if after is not before:
                    changed[name] = after
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple | list):
        return _masked_row(value)
    if isinstance(value, dict):
        return {_masked(key): _masked(each) for key, each in value.items()}
    return value


def _masked_row(value: Any) -> Any:
    if len(value) > 1 and all(type(each) is str for each in value):
        after = [mask_words(each) for each in value] if not _has_key(value) else mask_lines(value)
    else:
        after = [_masked(each) for each in value]
    if all(one is two for one, two in zip(after, value, strict=True)):
        return value
    return type(value)(after) if isinstance(value, list) else tuple(after)


def _has_key(lines: Any) -> bool:
    return any("PRIVATE KEY" in line for line in lines)


@cache
def text_fields(cls: type) -> tuple[str, ...]:
    """The fields of a struct that may hold text, in values of their own too, without the NAMES."""
    hints, names = get_type_hints(cls), UNMASKED_FIELDS.get(cls, frozenset())
    return tuple(name for name, hint in hints.items() if name not in names and holds_text(hint))


def holds_text(hint: Any) -> bool:
    """Whether a value of this type may hold text."""
    if is_class(hint):
        if issubclass(hint, Enum):
            return False
        return issubclass(hint, str) or (issubclass(hint, msgspec.Struct) and bool(text_fields(hint)))
    return any(holds_text(each) for each in get_args(hint))
