"""What goes wrong in a simulated run, drawn by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.cluster import SimJob

if TYPE_CHECKING:
    from tests.simulation.sim import Simulation


def storm(sim: Simulation) -> None:
    """Puts on the timeline what the recipe's rates say, as long as things may go wrong."""
    rng, rates, timeline = sim.rng, sim.recipe.rates, sim.timeline

    def often(rate: float, what: Callable[[], None]) -> None:
        if rate <= 0:
            return

        def again() -> None:
            if sim.stormy:
                what()
                timeline.after(rng.expovariate(rate / 3600.0), again)

        timeline.after(rng.expovariate(rate / 3600.0), again)

    def some_job() -> SimJob:
        return rng.choice(list(sim.cluster.sim_jobs.values())[-2 * sim.recipe.jobs :])

    def some_node() -> str:
        return rng.choice(sim.cluster.nodes).name

    def fault() -> None:
        heals = rng.uniform(20, 1200) if rng.random() < sim.recipe.heals else None
        running = [job for job in sim.cluster.sim_jobs.values() if job.state == "RUNNING"]
        if running:
            sim.begin_fault(rng.choice(running), rng.choice(sim.recipe.fault_kinds), heals)

    def cut() -> None:
        share = rng.choice((0.0, 0.0, 0.3, 0.5, 1.0))
        names = {some_node()} | {node.name for node in sim.cluster.nodes if rng.random() < share}
        sim.cut(frozenset(names), rng.choice((20.0, 90.0, 600.0, 1800.0)))

    def away() -> None:
        sim.recipe.weather.away = True
        sim.cluster.deed("fault", "slurmctld away")

        def back() -> None:
            sim.recipe.weather.away = False
            sim.cluster.deed("fault", "slurmctld back")

        timeline.after(rng.choice((30.0, 300.0, 1800.0)), back)

    def full() -> None:
        sim.journal_full = True
        sim.cluster.deed("fault", "journal full")
        timeline.after(rng.uniform(5, 600), empty)

    def empty() -> None:
        sim.journal_full = False
        sim.cluster.deed("fault", "journal has room")

    def pause() -> None:
        sim.pause()
        timeline.after(rng.uniform(60, 1800), sim.unpause)

    def renew() -> None:
        live = [job for job in sim.cluster.sim_jobs.values() if job.over_at is None]
        if len(live) < sim.recipe.jobs:
            sim.submit()

    often(rates.faults, fault)
    often(
        rates.people,
        lambda: sim.people(rng.choice(("cancel", "requeue", "hold", "release", "release")), some_job()),
    )
    often(rates.operator, lambda: sim.ask_restart(some_job()))
    often(rates.pauses, pause)
    often(rates.kills, lambda: sim.kill(rng.randrange(200)))
    often(rates.stops, lambda: sim.stop(rng.choice((10.0, 60.0, 300.0))))
    often(rates.agents, lambda: sim.restart_agent(some_node(), rng.choice((1.0, 30.0, 300.0))))
    often(rates.cuts, cut)
    often(rates.clocks, lambda: sim.move_clock(rng.choice((3600.0, -3600.0, 30.0))))
    often(rates.slurm_away, away)
    often(rates.journal_full, full)
    often(rates.node_down, lambda: sim.node_fails(some_node(), rng.uniform(300, 1800)))
    often(6.0, renew)
