"""What is known of the cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slurm_watchdog.base.capped import LeftOut
    from slurm_watchdog.controller.state.agents import Agents
    from slurm_watchdog.controller.state.nodes import Nodes
    from slurm_watchdog.model.cluster_view import FilesystemView, JobView
    from slurm_watchdog.model.slurm import SlurmJob, SlurmNode


class Cluster(Protocol):
    """Jobs and nodes, as decisions need them."""

    @property
    def jobs(self) -> Mapping[str, SlurmJob]: ...

    @property
    def nodes(self) -> Nodes: ...

    @property
    def slurm_nodes(self) -> tuple[SlurmNode, ...]: ...

    def job_view(self, job_id: str, now: float) -> JobView | None: ...

    def known_nodes(self) -> Collection[str]: ...

    def reporting_nodes(self, now: float) -> Collection[str]: ...

    def owner_of(self, job_id: str) -> int | None: ...

    def variables_of(self, job: SlurmJob) -> dict[str, str]: ...


class ObservedCluster(Protocol):
    """Jobs, agents and filesystems, as collections of evidence need them."""

    @property
    def jobs(self) -> Mapping[str, SlurmJob]: ...

    @property
    def agents(self) -> Agents: ...

    @property
    def left_out(self) -> LeftOut: ...

    def job_view(self, job_id: str, now: float) -> JobView | None: ...

    def filesystem_views(self, now: float) -> tuple[FilesystemView, ...]: ...


class ListedCluster(Protocol):
    """Jobs and nodes, as commands need them."""

    @property
    def jobs(self) -> Mapping[str, SlurmJob]: ...

    @property
    def node_addresses(self) -> Collection[str]: ...

    @property
    def left_out(self) -> LeftOut: ...

    def job_view(self, job_id: str, now: float) -> JobView | None: ...

    def apply_job(self, job: SlurmJob, now: float, wall: float | None = None) -> None: ...


class JobReader(Protocol):
    """Reads one job from Slurm. Raises SlurmUnavailable, SlurmRefused."""

    async def read_job(self, job_id: str) -> SlurmJob | None: ...
