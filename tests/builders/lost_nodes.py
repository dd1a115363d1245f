"""Nodes that Slurm has lost, or whose agent is silent."""

from __future__ import annotations

from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.node_view import NodeView, SlurmNodeView
from tests.builders.views import job, slurm_job

NOW = 1000.0


def cluster(silent: int, of: int, states: dict[str, str] | None = None, jobs_on: tuple[str, ...] = ()) -> ClusterView:
    """Nodes n0, n1, …, the first `silent` of which have said nothing for 60 s."""
    names = [f"n{number}" for number in range(of)]
    heard = {name: NOW - (60.0 if number < silent else 2.0) for number, name in enumerate(names)}
    words = dict.fromkeys(names, "ALLOCATED") | (states or {})
    return ClusterView(
        now=NOW,
        nodes=tuple(NodeView(name=name, reported_at=at) for name, at in heard.items()),
        heard_at=heard,
        slurm_nodes=tuple(SlurmNodeView(name=name, state=state) for name, state in words.items() if state),
        silent_nodes=tuple(names[:silent]),
        reporting_nodes=tuple(names[silent:]),
        jobs=tuple(job(job=slurm_job(nodes=(name,))) for name in jobs_on),
        slurm_age_s=1.0,
    )
