"""One run as detectors see it: frozen, with ages in place of moments. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct, picked
from slurm_watchdog.base.ticking import Ticking, plain
from slurm_watchdog.controller.state.nodes import Nodes
from slurm_watchdog.controller.state.progress_clock import main_clock, read_progress
from slurm_watchdog.controller.state.run import Run
from slurm_watchdog.controller.state.training_steps import training_steps
from slurm_watchdog.controller.state.wait_tally import row_view
from slurm_watchdog.knowledge.frameworks import title_of
from slurm_watchdog.model.cluster_view import (
    Announced,
    Checkpoint,
    ErrorLine,
    JobView,
    LogView,
    ProcessView,
    Progress,
    RankGpu,
    StackSnapshot,
    StillRow,
)
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import SupervisorStatus


class Moment(NamedTuple):
    """One moment, of which each kind of age is counted from an own number (slurm_watchdog.base.ticking)."""

    now: float
    step_now: float  # For ages that each step moves,
    log_now: float  # and each reading of a log.


def job_view(
    run: Run,
    job: SlurmJob,
    moment: Moment,
    nodes: Nodes,
    silent_nodes: tuple[str, ...],
    *,
    supervisor: SupervisorStatus | None = None,
    without_ranks: frozenset[str] = frozenset(),
) -> JobView:
    """One run as it is at this moment; `job` has the nodes on which its ranks are, `silent_nodes` are those of them
    that have not reported lately."""
    now, _, log_now = moment
    clock = main_clock(run.clocks)
    step_times, losses = ((), ()) if clock is None else clock.series()
    said = run.phase(now)
    return picked(
        JobView,
        run,
        *("step_id", "collectives", "motion", "past"),
        job=job,
        run_age_s=now - max(run.began_at, run.grace_from),
        processes=process_views(run, now, nodes),
        progress=progress_view(run, moment),
        phase=said.phase if said else None,
        announced=None if said is None else picked(Announced, said.event, age_s=now - said.at),
        log=log_view(run, log_now),
        checkpoint=Checkpoint(step=run.checkpoint[0], age_s=now - run.checkpoint[1]) if run.checkpoint else None,
        snapshots=snapshot_views(run, now),
        own_words=tuple(replace(each, age_s=each.age_s + now - run.own_words[0]) for each in run.own_words[1]),
        row=None if run.row is None else row_view(run.row, now),
        errors=tuple(ErrorLine(node=node, age_s=now - at, event=event) for node, at, event in run.errors.lines),
        error_ranks=run.errors.ranks_by_pattern(),
        silent_nodes=silent_nodes,
        without_ranks=without_ranks,
        gpus=_rank_gpus(run, job.nodes, nodes),
        step_times=step_times,
        step_history=() if clock is None else clock.history.blocks(),
        losses=losses,
        checkpoints_on_disk=nodes.checkpoints_of(run.job.process_id, job.nodes),
        earlier_checkpoints=tuple(run.complete_on_disk.values()),
        growing_age_s=None if run.growing_at is None else now - run.growing_at,
        saving_age_s=None if run.saving_at is None else now - run.saving_at,
        checkpoint_intervals_s=tuple(run.checkpoint_intervals_s),
        steady=tuple(run.steady.values()) if run.snapshots else (),
        saved_age_s=None if run.saved_at == float("-inf") else now - run.saved_at,
        save_intervals_s=tuple(run.save_intervals_s),
        touched_age_s=None if run.touched_at is None else now - run.touched_at,
        unlisted=sum(run.unlisted.values()),
        supervised=supervisor is not None and supervisor.step_id == run.step_id and supervisor.restarts_left > 0,
        supervisor=supervisor,
        waits=run.waits.blocks(),
        wait_dumps=run.waits.dumps(),
    )


_AGES = {
    JobView: "run_age_s growing_age_s saving_age_s saved_age_s touched_age_s "
    "progress announced log checkpoint snapshots own_words errors row",
    Progress: "age_s last_increase_age_s ungranted_age_s read_age_s phase_age_s",
    LogView: "grew_age_s",
    StillRow: "snapshots",
}


def later(view: JobView, by_s: float) -> JobView:
    """A view that was made of a ticking `now`, as it is so much later if nothing has come, in plain numbers; the ages
    of its processes stay as they were."""
    known = view.__dict__ | {"ranks": view.ranks, "gpu_uuids": view.gpu_uuids}
    found: JobView = _later(view, by_s)
    # What was worked out of it once holds for all moments; what `by_identity` remembers is of its own.
    found.__dict__.update({name: each for name, each in known.items() if hasattr(JobView, name)})
    return found


def _later(value: Any, by_s: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_later(each, by_s) for each in value) if value else value
    if not isinstance(value, Struct):
        return plain(value) + by_s if type(value) is Ticking else value
    names = _AGES.get(type(value), "age_s").split()
    return replace(value, **{name: _later(getattr(value, name), by_s) for name in names})


def progress_view(run: Run, moment: Moment) -> Progress | None:
    """Its progress clock."""
    now, step_now, log_now = moment
    said = run.phase(now)
    phase = None if said is None else (said.phase, said.at)
    found = read_progress(run.clocks, phase, run.grace_from, step_now, run.saved_at)
    if found is None:
        return None
    if said is not None:
        found = replace(found, phase_age_s=now - said.at)
    read_at = [
        at
        for (_, path), (log, at) in run.logs.items()
        if path == found.source and log.error is None and not log.lag_bytes
    ]
    return replace(found, read_age_s=max(0.0, log_now - max(read_at))) if read_at else found


WORKS_S = 6.0  # A process that was at work within this time is at work while its node says that all is as it was.
LAST_BUSY_S = 26.0  # The same of the use of a core, which is averaged over 20 to 25 s (slurm_watchdog.agent.sums).
FELL_QUIET_S = 45.0  # From then on it is a class, and that it ends is reported at once (QUIET_S of agent.frames).


def process_views(run: Run, now: float, nodes: Nodes) -> tuple[ProcessView, ...]:
    """All processes but ranks of side steps, in the order of their keys."""
    processes = run.processes
    _, steps = training_steps(processes, run.steps)
    if not steps & run.steps:  # a side step: see follow_training
        steps = run.steps or steps
    if not run.order:
        run.order = tuple(sorted(processes))
    found, ages = list[ProcessView](), dict[float, float]()

    def age(at: float) -> float:
        # The ranks of a node were seen at the same moment: their views hold the same number.
        found = ages.get(at)
        if found is None:
            found = ages[at] = now - at
        return found

    node, held_at, held_s, seen_at, last_at, seen_s = "", 0.0, 0.0, 0.0, math.nan, 0.0
    for key in run.order:
        process, at, gone_at = processes[key]
        if process.role is Role.RANK and process.step_id not in steps:
            continue
        if key[0] != node:
            node, last_at = key[0], math.nan
            held_at, held_s = nodes.held(node)
        if at != last_at:
            last_at, seen_at = at, at + held_s if at == held_at else at
            seen_s = age(seen_at)
        worked_s, quiet_s, waited_s = process.worked_age_s, process.quiet_s, process.storage_age_s
        if worked_s is not None:
            if worked_s >= WORKS_S and seen_at > at:
                worked_s = None  # what it has done since, no class tells
            else:
                worked_s = age(seen_at - worked_s) if worked_s else seen_s
        if quiet_s is not None:
            if quiet_s < LAST_BUSY_S:
                quiet_s = age(seen_at - quiet_s)
            else:
                quiet_s = None if quiet_s < FELL_QUIET_S and seen_at > at else age(at - quiet_s)
        waited_s = None if waited_s is None else age(at - waited_s)
        gone_s = None if gone_at is None else age(gone_at)
        found.append(
            ProcessView(
                node=node, process=process, seen_age_s=seen_s, gone_s=gone_s, storage_age_s=waited_s,
                worked_age_s=worked_s, quiet_s=quiet_s,
            )
        )  # fmt: skip
    return tuple(found)


def log_view(run: Run, now: float) -> LogView | None:
    """What is known of its logs."""
    grew = [now - at + log.growth_age_s for log, at in run.logs.values() if log.growth_age_s is not None]
    if not grew:
        return None
    whole = all(
        log.error is None and log.growth_age_s is not None and not log.lag_bytes and not log.skipped_bytes
        for log, _ in run.logs.values()
    )
    named = Counter(log.framework for log, _ in run.logs.values() if title_of(log.framework))
    framework = named.most_common(1)[0][0] if named else None
    return LogView(grew_age_s=min(grew), whole=whole and not run.logs_missed, framework=framework)


def snapshot_views(run: Run, now: float) -> tuple[StackSnapshot, ...]:
    """The dumps since the last step, oldest first."""
    return tuple(
        StackSnapshot(age_s=now - at, stacks=stacks, silent_nodes=silent) for at, stacks, silent in run.snapshots
    )


def _rank_gpus(run: Run, names: tuple[str, ...], nodes: Nodes) -> tuple[RankGpu, ...]:
    """The GPUs of the ranks that live, as the lists of processes have them."""
    found: list[RankGpu] = []
    for name in names:
        node = nodes.view(name)
        if node is None or not node.gpus:
            continue
        known = run.gpus_on.get(name)
        if known is None or known[0] is not node:  # its processes change with the whole reports that renew its view
            known = run.gpus_on[name] = (node, tuple(_rank_gpus_on(run, node)))
        found += known[1]
    found.sort(key=_place)
    return tuple(found)


def _place(of: RankGpu) -> tuple[int, int]:
    return of.rank, of.view.gpu.index


def _rank_gpus_on(run: Run, node: NodeView) -> Iterator[RankGpu]:
    by_uuid = {view.gpu.uuid: view for view in node.gpus}
    for key in run.on_node.get(node.name, ()):
        uuids, (process, _, gone_at) = run.computes_on.get(key, ()), run.processes[key]
        if gone_at is not None or process.role is not Role.RANK or process.rank is None:
            continue
        for uuid in uuids:
            if uuid in by_uuid:
                yield RankGpu(rank=process.rank, pid=process.pid, view=by_uuid[uuid])
