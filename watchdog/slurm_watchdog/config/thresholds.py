"""The section `thresholds` of the configuration: options of detectors that are different for some jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, ValidationError

from slurm_watchdog.config.detectors import Detectors
from slurm_watchdog.config.job_match import Match
from slurm_watchdog.config.jobs import floor_problems
from slurm_watchdog.config.types import Seconds, Section
from slurm_watchdog.detect import registry
from slurm_watchdog.detect.registry import SPECS
from slurm_watchdog.detect.spec import Subject, options_of

OF_JOBS = {str(spec.kind): spec for spec in SPECS if spec.subject is Subject.JOB}


class Threshold(Section):
    """Options of detectors for some jobs. Of several that match a job the first one holds, alone."""

    match: Match = Field(description="Which jobs.")
    detectors: dict[str, dict[str, Any]] = Field(
        {},
        description="Options in place of those of `detectors`, such as {collective_hang: {floor: 2min}}.",
    )
    stall_after_floor: Seconds | None = Field(None, description="In place of `jobs.stall_after_floor`.")

    def problems(self) -> Iterator[str]:
        yield from floor_problems(self.stall_after_floor or 0.0, "stall_after_floor")
        if not self.detectors and self.stall_after_floor is None:
            yield "detectors: changes nothing; give options of detectors, or stall_after_floor"
        for kind, options in self.detectors.items():
            if kind not in OF_JOBS:
                yield f"detectors.{kind[:60]}: judges no single job; known: {', '.join(OF_JOBS)}"
                continue
            known = options_of(OF_JOBS[kind].settings)
            for name in options:
                if name not in known:
                    yield f"detectors.{kind}.{name[:60]}: is no option that a job may have; known: {', '.join(known)}"
            try:
                self._block(Detectors(), kind)
            except ValidationError as error:
                for each in error.errors():
                    at = ".".join(map(str, each["loc"]))
                    if at in known:
                        yield f"detectors.{kind}.{at}: {each['msg'].removeprefix('Value error, ')}"

    def _block(self, detectors: Detectors, kind: str) -> Section:
        block: Section = getattr(detectors, kind)
        return type(block).model_validate(block.model_dump() | self.detectors[kind])

    def settings(self, detectors: Detectors) -> registry.Settings:
        """The values of every detector for these jobs."""
        changed = {kind: self._block(detectors, kind) for kind in self.detectors}
        return detectors.model_copy(update=changed).settings()
