"""The section `detectors` of the configuration: a block for each detector, from what it declares (detect/spec.py)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.structs import asdict

from slurm_watchdog.config.types import Seconds, Section, format_duration, parse_duration
from slurm_watchdog.detect import registry
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.knowledge.limits import options_of

S = TypeVar("S")


class Detector(Section, frozen=True):
    """What every detector has."""

    enabled: bool = True
    """Whether it judges anything."""


def _own_options(settings: type[Any] | None) -> dict[str, Any]:
    """Name -> type, of a detector's own options."""
    if settings is None:
        return {}
    types = get_type_hints(settings)
    return {
        name: Annotated[Seconds if own.is_duration else types[name], Meta(**own.bounds)]
        for name, own in options_of(settings).items()
    }


def _struct(name: str, base: type[Section], fields: dict[str, tuple[Any, Any]], **more: Any) -> Any:
    listed = [(field, kind, default) for field, (kind, default) in fields.items()]
    return defstruct(name, listed, bases=(base,), namespace=more, frozen=True, kw_only=True)


_BLOCKS = {
    str(spec.kind): _struct(
        spec.settings.__name__,
        Detector,
        {name: (kind, getattr(spec.settings, name)) for name, kind in _own_options(spec.settings).items()},
        __doc__=inspect.cleandoc(spec.settings.__doc__ or ""),
    )
    if spec.settings
    else Detector
    for spec in registry.SPECS
}
_OF_JOBS = {
    str(spec.kind): _struct(
        f"{spec.kind}_of_jobs",
        Section,
        {name: (kind | UnsetType, UNSET) for name, kind in _own_options(spec.settings).items()},
        UNKNOWN="is not an option that a job may have",
    )
    for spec in registry.SPECS
    if spec.subject is Subject.JOB
}
if TYPE_CHECKING:
    _Blocks = Section
    _OfJobsBase = Section
else:
    _Blocks = _struct("_Blocks", Section, {kind: (block, block()) for kind, block in _BLOCKS.items()})
    _OfJobsBase = _struct(
        "_OfJobsBase",
        Section,
        {kind: (block, block()) for kind, block in _OF_JOBS.items()},
        UNKNOWN="judges no single job",
    )


class OptionsOfJobs(_OfJobsBase, frozen=True):
    """Options of detectors that some jobs may have otherwise."""

    def given(self, kind: str) -> dict[str, Any]:
        """Those of one detector."""
        return {name: value for name, value in asdict(getattr(self, kind)).items() if value is not UNSET}


class Detectors(_Blocks, frozen=True):
    """Limits of single causes; each kind also has `enabled`."""

    def is_enabled(self, kind: str) -> bool:
        """Whether its detector judges; of what no detector finds, always."""
        return getattr(getattr(self, kind, None), "enabled", True)

    def of(self, settings: type[S]) -> S:
        """The values of one settings class."""
        (kind,) = (spec.kind for spec in registry.SPECS if spec.settings is settings)
        block = getattr(self, kind)
        return settings(**{name: getattr(block, name) for name in options_of(settings)})

    def settings(self) -> registry.Settings:
        """The values of every detector."""
        return {spec.settings: self.of(spec.settings) for spec in registry.SPECS if spec.settings}


FOLLOW: Final = {
    "collective_hang": ("floor", "stepless_limit", "busy_limit"),
    "stalled_progress": ("busy_limit", "still_limit"),
}
"""Limits of silence that follow `patience`; a proof needs as long as ever."""
ONLY_LONGER: Final = {
    "collective_hang": ("startup_grace", "evaluation_floor", "checkpoint_floor"),
    "stalled_progress": ("start_limit",),
}
"""Of these an impatient site, which thinks of steps, does not think."""


def with_patience(patience: object, own: dict[str, Any], general: dict[str, Any]) -> None:
    """Puts the limits that follow `patience` into a file's block `detectors`, `own`, unless it or the one that holds
    for all jobs has them."""
    try:
        times = parse_duration(patience) / Detectors().of(CollectiveHang).floor
    except ValueError:
        return  # an error by itself
    for table in (FOLLOW, ONLY_LONGER if times > 1 else {}):
        for kind, names in table.items():
            block, elsewhere = own.setdefault(kind, {}), general.get(kind, {})
            for name in names:
                given = name in elsewhere and name != "floor"
                if isinstance(block, dict) and not given:
                    shipped_s = getattr(getattr(Detectors(), kind), name)
                    block.setdefault(name, format_duration(shipped_s * times))
