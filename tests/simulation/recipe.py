"""What one seed means: the size of the cluster, the weather of its Slurm and network, and how often what goes wrong."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from tests.simulation.agents import SWITCH_PREFIXES, Network
from tests.simulation.slurm import Weather

SHARED_SWITCH = "/gpfs/switches/{user}.{job_id}"
RUN_SWITCH = "/run/slurm-watchdog/jobs/{job_id}.{restarts}/kill"
NODE_SWITCH = "/run/site/switch-of-{job_id}"
"""On each node, and where the next run looks for its own."""

OF_SPEED = ("slow_job", "slow_node", "loss_spike", "loss_nan", "gpu_clock_low")
CRASHES = 0.5
"""Share of the seeds in which the controller is killed often, at writes to its journal as well as anywhere else."""


PACES = ((10.0, 5.0), (20.0, 10.0), (30.0, 15.0), (30.0, 30.0), (60.0, 30.0), (60.0, 60.0))
"""Seconds between two reports of an agent and between two looks of the controller: the slower, the more hours
in a minute."""


@dataclass
class Rates:
    """How often, in an hour of the simulated cluster."""

    faults: float = 3.0
    people: float = 1.0
    """Somebody cancels, requeues, holds or releases a job."""
    operator: float = 0.7
    """Somebody asks for a graceful restart."""
    pauses: float = 0.2
    kills: float = 0.5
    """The controller dies."""
    stops: float = 0.3
    """The controller is stopped for a minute."""
    agents: float = 1.0
    """An agent dies and comes back."""
    cuts: float = 0.5
    """Nodes are cut off."""
    clocks: float = 0.1
    slurm_away: float = 0.2
    journal_full: float = 0.1
    node_down: float = 0.1


@dataclass
class Recipe:
    """Everything about one run. Durations are seconds."""

    seed: int
    hours: float = 4.0
    calm_s: float = 3600.0
    """At the end nothing goes wrong any more: everything that was begun has to come to its end."""
    nodes: int = 8
    jobs: int = 4
    interval_s: float = 10.0
    tick_s: float = 5.0
    mode: str = "act"
    kill_switch: str = RUN_SWITCH
    budget: int = 4
    cooldown_s: float = 900.0
    step_s: tuple[float, ...] = (10.0, 15.0, 20.0)
    sizes: tuple[int, ...] = (1, 1, 1, 2, 3)
    """Nodes, and so ranks, of a job."""
    totals: tuple[int, ...] = (300, 100_000, 100_000, 100_000)
    """Steps that a job makes, if nothing is done to it."""
    kill_at_writes: float = 0.0
    """Chance that a write of the journal is the controller's last deed, before or after it is on disk."""
    rates: Rates = field(default_factory=Rates)
    weather: Weather = field(default_factory=Weather)
    network: Network = field(default_factory=Network)
    all_detectors: bool = False
    """Also those that nothing is done about and that take half of the time: of speed, clocks and losses."""
    fault_kinds: tuple[str, ...] = ("hang", "hang_of_everybody", "stopped", "storage", "dead_rank")
    heals: float = 0.25
    """Share of faults that go away by themselves."""
    restart_after_s: tuple[float, float] = (1.0, 90.0)
    """How long the controller is away after it died."""
    kinds: dict[str, dict[str, object]] = field(default_factory=dict)
    """What is done about a kind of incident, in the place of what is shipped: `policy.kinds`."""
    settled_s: float | None = None
    """Not until the end of the hours, only until everything that was begun has been over for so long."""

    @property
    def until_s(self) -> float:
        return self.hours * 3600.0

    def config(self) -> Config:
        return parse_config(
            json.dumps(
                {
                    "cluster_name": "simulated",
                    "mode": self.mode,
                    "agent": {"interval": f"{self.interval_s:g}s"},
                    "controller": {
                        "tick": f"{self.tick_s:g}s",
                        "journal_url": "sqlite://",
                        "agent_silent_after": f"{max(45.0, 3 * self.interval_s):g}s",
                    },
                    "slurm": {"poll_interval": f"{max(10.0, self.interval_s):g}s"},
                    "jobs": {"kill_switch": self.kill_switch, "kill_switch_prefixes": list(SWITCH_PREFIXES)},
                    "policy": {
                        "budget": self.budget,
                        "cooldown": f"{self.cooldown_s:g}s",
                        "budget_percent": 100,
                        "kinds": self.kinds,
                        "max_drained_nodes": 2,
                        "drained_percent": 50,
                    },
                    "detectors": {
                        "collective_hang": {"startup_grace": "900s"},
                        **({} if self.all_detectors else {name: {"mode": "off"} for name in OF_SPEED}),
                    },
                    "ladder": {
                        "checkpoint_limit": "300s",
                        "exit_limit": "30s",
                        "confirm_limit": "900s",
                    },
                }
            )
        )


def recipe_of(seed: int) -> Recipe:
    """Most seeds are a cluster on a bad day; some are a calm one, so that what is rare meets what is usual."""
    rng = random.Random(f"recipe {seed}")
    interval_s, tick_s = rng.choice(PACES)
    jobs = rng.choice((4, 5, 7, 12))
    recipe = Recipe(
        seed,
        nodes=3 + int(1.6 * jobs),
        jobs=jobs,
        interval_s=interval_s,
        tick_s=tick_s,
        mode="act" if rng.random() < 0.93 else "observe",
        kill_switch=rng.choice((RUN_SWITCH, SHARED_SWITCH)),
        budget=rng.choice((2, 4, 8)),
        cooldown_s=rng.choice((120.0, 900.0)),
    )
    recipe.all_detectors = rng.random() < 0.15
    rates = recipe.rates
    if rng.random() < 0.15:
        recipe.rates = Rates(0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
        return recipe
    for name in vars(rates):
        setattr(rates, name, getattr(rates, name) * rng.choice((0.0, 1.0, 1.0, 3.0)))
    rates.faults = max(1.5, rates.faults)
    if rng.random() < CRASHES:
        rates.kills = 3.0
        recipe.kill_at_writes = rng.choice((0.01, 0.05))
        recipe.restart_after_s = (0.5, 20.0)
    if rng.random() < 0.6:
        recipe.weather = Weather(lost=0.05, done_and_lost=0.06, done_late=0.02, refused=0.02)
    if rng.random() < 0.6:
        recipe.network = Network(lost=0.02, late=0.01, twice=0.01)
    return recipe
