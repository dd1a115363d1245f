"""The configuration of the detectors: one block each, from what a detector declares (detect/spec.py)."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import Field, create_model

from slurm_watchdog.config.types import Mode, Seconds, Section
from slurm_watchdog.detect import registry
from slurm_watchdog.detect.spec import DetectorSpec, options_of

S = TypeVar("S")


class Detector(Section):
    """What every detector has."""

    mode: Mode | None = Field(None, description="Overrides the top-level mode for this detector.")
    hold: Seconds = Field(0.0, description="Time the verdict has to stand before it fires.")


def block_of(spec: DetectorSpec) -> type[Detector]:
    """The block of one detector: `mode`, `hold`, and its own options with their texts and bounds."""
    types = get_type_hints(spec.settings)
    own: dict[str, Any] = {}
    if spec.hold_s:
        own["hold"] = (Seconds, Field(spec.hold_s, description=Detector.model_fields["hold"].description))
    for name, option in options_of(spec.settings).items():
        bounds = Field(ge=option.ge, gt=option.gt, le=option.le)
        kind: Any = Seconds if option.is_duration else types[name]
        own[name] = (Annotated[kind, bounds], Field(getattr(spec.settings, name), description=option.text))
    doc = inspect.cleandoc(spec.settings.__doc__ or "")
    return create_model(spec.settings.__name__, __base__=Detector, __doc__=doc, **own)


_BLOCKS = {str(spec.kind): block_of(spec) for spec in registry.SPECS}
_FIELDS: dict[str, Any] = {kind: (block, block()) for kind, block in _BLOCKS.items()}
_Blocks: Any = create_model("_Blocks", __base__=Section, **_FIELDS)


class Detectors(_Blocks):
    """One block a detector."""

    def of(self, settings: type[S]) -> S:
        """The values of one settings class."""
        (kind,) = (spec.kind for spec in registry.SPECS if spec.settings is settings)
        block = getattr(self, kind)
        return settings(**{name: getattr(block, name) for name in options_of(settings)})

    def holds_s(self) -> dict[str, float]:
        """How long the condition of each kind has to last before it is reported, in seconds."""
        return {spec.kind: getattr(self, spec.kind).hold for spec in registry.SPECS}

    def settings(self) -> registry.Settings:
        """The values of every detector."""
        return {spec.settings: self.of(spec.settings) for spec in registry.SPECS}
