"""Which jobs a part of the configuration holds for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from slurm_watchdog.config.types import Section
from slurm_watchdog.model.job_match import JobMatch


def _globs(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Globs = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_globs)]


class Match(Section):
    """Which jobs: names or globs (*, ?, [abc]), one or a list; what is left out matches every job."""

    partition: Globs = Field([], description="Of Slurm.")
    account: Globs = Field([], description="Of Slurm.")
    user: Globs = Field([], description="Its owner's name.")
    job_name: Globs = Field([], description="As in --job-name.")

    @model_validator(mode="after")
    def _something(self) -> Match:
        if not (self.partition or self.account or self.user or self.job_name):
            raise ValueError("names no partition, account, user or job_name: for all jobs use the option itself")
        return self

    def value(self) -> JobMatch:
        """For those who know no configuration."""
        return JobMatch(**{name: tuple(globs) for name, globs in self})
