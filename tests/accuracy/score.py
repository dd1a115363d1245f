"""Was it found, was the right one named, how soon, and what else was said?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurm_watchdog.model.incidents import Incident
from tests.accuracy.scene import Expect, Scene


@dataclass(frozen=True)
class Score:
    """One run of one case."""

    case: str
    seed: int
    nodes: int
    way: str
    """`direct` or `replay`."""
    found: bool
    culprit: bool | None
    """None: nobody is to be named, or nothing was found."""
    seconds: float | None
    """From the fault to the first right verdict."""
    bound_s: float
    false: tuple[str, ...]
    """Incidents that the right one does not explain: kind, time, sentence."""
    failures: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    """Every incident that fired, for people."""

    @property
    def in_time(self) -> bool:
        return self.seconds is not None and self.seconds <= self.bound_s

    @property
    def perfect(self) -> bool:
        return self.found and self.culprit is not False and self.in_time and not self.false and not self.failures

    def command(self) -> str:
        return f"python -m tests.accuracy --case {self.case} --seed {self.seed} --nodes {self.nodes} --way {self.way}"


def fired(incidents: Iterable[Incident]) -> list[Incident]:
    return sorted((i for i in incidents if i.fired_at is not None), key=lambda i: (i.fired_at or 0.0, i.id))


def right_ones(expect: Expect, incidents: Iterable[Incident]) -> list[Incident]:
    """Those of an expected kind that stand for themselves, or that another right one explains."""
    known = {i.id: i for i in incidents}
    return [
        i
        for i in fired(known.values())
        if i.kind in expect.kinds
        and (i.inhibited_by is None or _kind(known, i.inhibited_by) in (*expect.kinds, *expect.also))
    ]


def _kind(known: dict[str, Incident], incident_id: str) -> str:
    return str(known[incident_id].kind) if incident_id in known else incident_id.rpartition(":")[2]


def score(
    case: str,
    seed: int,
    nodes: int,
    way: str,
    scene: Scene,
    incidents: list[Incident],
    failures: list[str],
    late_s: float = 0.0,
) -> Score:
    """Compares what was said with what was to be said. A report that came `late_s` too late is no fault of
    the judgement."""
    expect, fault_at = scene.expect, scene.fault_at
    known = {i.id: i for i in incidents}
    after = [i for i in fired(incidents) if fault_at is not None and (i.fired_at or 0.0) >= fault_at]
    right = right_ones(expect, after)
    first = right[0] if right else None
    seconds = None if first is None or fault_at is None or first.fired_at is None else first.fired_at - fault_at
    good = (*expect.kinds, *expect.also)
    false = tuple(
        f"{i.kind} at {i.fired_at:.0f} s: {i.summary}"
        for i in fired(incidents)
        if (i not in after or i.kind not in good) and not (i.inhibited_by and _kind(known, i.inhibited_by) in good)
    )
    culprit = None if not right else any(names(expect, i) for i in right)
    return Score(
        case=case,
        seed=seed,
        nodes=nodes,
        way=way,
        found=bool(right),
        culprit=culprit,
        seconds=seconds,
        bound_s=scene.within() + late_s,
        false=false,
        failures=tuple(failures),
        said=tuple(_told(i, known) for i in fired(incidents)),
    )


def _told(incident: Incident, known: dict[str, Incident]) -> str:
    explained = f" (explained by {_kind(known, incident.inhibited_by)})" if incident.inhibited_by else ""
    who = ", ".join(f"{c.node} rank {c.rank} {c.gpu_uuid or ''}" for c in incident.culprits[:4])
    return f"{incident.fired_at:.0f} s {incident.kind}{explained}: {incident.summary} [{who}]"


def names(expect: Expect, incident: Incident) -> bool:
    """Whether the incident names whom it should, and nobody else."""
    culprits = incident.culprits[:1] if expect.first_only else incident.culprits
    if expect.nobody and culprits:
        return False
    if expect.exclude_nobody and incident.exclude_nodes:
        return False
    if expect.nodes is not None and {c.node for c in culprits} != expect.nodes:
        return False
    if expect.ranks is not None and {c.rank for c in culprits} != expect.ranks:
        return False
    if expect.gpu is not None and {c.gpu_uuid for c in culprits} != {expect.gpu}:
        return False
    return expect.mount is None or expect.mount in incident.mounts or expect.mount in {c.mount for c in culprits}
