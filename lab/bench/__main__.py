"""`python -m lab.bench [part …]`: figures as JSON lines on standard output, everything else on standard error."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from lab.bench import (
    agent,
    at_scale,
    bad_nodes,
    churn,
    collectives,
    commands,
    drift,
    hostile_load,
    identity,
    kernel,
    ledger,
    logs,
    noise,
    page,
    probes,
    process_tree,
    recovery,
    report,
    save_all,
    scan,
    scheduling,
    soak,
    sources,
    steps,
    storm,
    stragglers,
)
from lab.bench.figures import Figures, say, take_standard_output

SOAK_TICK_S = 0.04
"""About what a tick of the endurance driver takes."""


def main() -> int:
    """Returns 0 if every bound has been shown to hold."""
    parts: dict[str, Callable[[Figures, argparse.Namespace], None]] = {
        "agent": _agent,
        "noise": _noise,
        "logs": _logs,
        "kernel": _kernel,
        "scan": _scan,
        "ledger": _ledger,
        "report": _report,
        "save-all": _save_all,
        "collectives": _collectives,
        "sources": _sources,
        "probe": _probe,
        "drift": _drift,
        "controller": _controller,
        "identity": _identity,
        "page": _page,
        "commands": _commands,
        "storm": _storm,
    }
    apart = {
        "soak": _soak,
        "churn": _churn,
        "hostile-load": _hostile_load,
        "recovery": _recovery,
        "steps": _steps,
        "bad-nodes": _bad_nodes,
        "stragglers": _stragglers,
    }
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"of: {' '.join(parts)} (default: all), or {' '.join(apart)}"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the measurement (default 120)")
    parser.add_argument("--interval", type=float, default=5.0, help="of the agent and its peers (default 5)")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds before it (default 30)")
    parser.add_argument("--no-peers", action="store_true", help="the agent alone")
    parser.add_argument("--pairs", type=int, default=12, help="of rounds, for the noise (default 12)")
    parser.add_argument("--quanta", type=int, default=10_000, help="of 1 ms in a round (default 10000)")
    parser.add_argument("--log-bytes", type=int, default=logs.MEASURED, help="of each kind of log (default 24 MB)")
    parser.add_argument("--ticks", type=int, default=drift.DAY_TICKS, help="of the drift (default: a day)")
    parser.add_argument("--nodes", type=int, default=10_000, help="of the controller's fleet (default 10000)")
    parser.add_argument("--jobs", type=int, default=200, help="on them, equally large (default 200)")
    parser.add_argument("--faults", type=int, default=60, help="injected while it is measured (default 60)")
    parser.add_argument("--workers", type=int, default=0, help="data loaders a rank (default 0)")
    parser.add_argument("--tls", action="store_true", help="the controller's fleet over mutual TLS")
    parser.add_argument("--load-only", action="store_true", help="no restart and no outage of the fleet")
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="of the soak, or of the churn's simulated clock (default 30)",
    )
    parser.add_argument("--hours", type=float, default=1000.0, help="of each kind of noise, for steps (default 1000)")
    parser.add_argument("--processes", type=int, default=55_000, help="of the hostile user (default 55000)")
    parser.add_argument("--cases", nargs="*", default=[], help="of recovery: parts of CASE.WAY (default: all)")
    parser.add_argument("--tries", type=int, default=bad_nodes.TRIES, help="of bad-nodes (default 20)")
    parser.add_argument("--write", action="store_true", help="recovery, bad-nodes: keep the results for the docs")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in parts | apart]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {' '.join(parts)}")
    figures = Figures(take_standard_output())
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    process_tree.sweep()
    scheduling.sweep()
    for name in options.parts or parts:
        say(f"--- {name}")
        (parts | apart)[name](figures, options)
    for name in figures.missed:
        say(f"{name} misses its bound")
    for name in figures.doubtful:
        say(f"{name}: this machine is too restless to judge it")
    return 1 if figures.missed or figures.doubtful else 0


def _stragglers(figures: Figures, options: argparse.Namespace) -> None:
    stragglers.run(figures, options.hours)


def _steps(figures: Figures, options: argparse.Namespace) -> None:
    steps.run(figures, options.hours)


def _agent(figures: Figures, options: argparse.Namespace) -> None:
    agent.run(
        figures,
        agent.Options(
            options.seconds,
            options.interval,
            options.warm_up,
            not options.no_peers,
            min(65.0, options.seconds),
        ),
    )


def _noise(figures: Figures, options: argparse.Namespace) -> None:
    noise.run(figures, noise.Options(options.pairs, options.quanta, options.interval))


def _logs(figures: Figures, options: argparse.Namespace) -> None:
    logs.run(figures, options.log_bytes)


def _scan(figures: Figures, options: argparse.Namespace) -> None:
    scan.run(figures)


def _collectives(figures: Figures, options: argparse.Namespace) -> None:
    collectives.run(figures)


def _sources(figures: Figures, options: argparse.Namespace) -> None:
    sources.run(figures)


def _ledger(figures: Figures, options: argparse.Namespace) -> None:
    ledger.run(figures)


def _report(figures: Figures, options: argparse.Namespace) -> None:
    report.run(figures)


def _save_all(figures: Figures, options: argparse.Namespace) -> None:
    save_all.run(figures)


def _kernel(figures: Figures, options: argparse.Namespace) -> None:
    kernel.run(figures)


def _probe(figures: Figures, options: argparse.Namespace) -> None:
    probes.run(figures)


def _drift(figures: Figures, options: argparse.Namespace) -> None:
    drift.run(figures, options.ticks, min(2000, max(400, options.ticks // 8)))


def _controller(figures: Figures, options: argparse.Namespace) -> None:
    at_scale.run(
        figures,
        at_scale.Options(
            nodes=options.nodes,
            jobs=options.jobs,
            workers=options.workers,
            interval_s=options.interval,
            seconds=options.seconds,
            warm_up_s=options.warm_up,
            faults=options.faults,
            tls=options.tls,
            restart=not options.load_only,
            outage=not options.load_only,
        ),
    )


def _identity(figures: Figures, options: argparse.Namespace) -> None:
    identity.measure(figures)


def _page(figures: Figures, options: argparse.Namespace) -> None:
    page.run(figures)


def _commands(figures: Figures, options: argparse.Namespace) -> None:
    commands.run(figures)


def _storm(figures: Figures, options: argparse.Namespace) -> None:
    storm.run(figures)


def _churn(figures: Figures, options: argparse.Namespace) -> None:
    churn.run(figures, options.minutes)


def _hostile_load(figures: Figures, options: argparse.Namespace) -> None:
    size = hostile_load.size_of(options.processes)
    hostile_load.run(figures, hostile_load.Options(size, options.interval, options.seconds / 2))


def _recovery(figures: Figures, options: argparse.Namespace) -> None:
    recovery.run(figures, options.cases, write=options.write)


def _bad_nodes(figures: Figures, options: argparse.Namespace) -> None:
    bad_nodes.run(figures, options.tries, options.cases, write=options.write)


def _soak(figures: Figures, options: argparse.Namespace) -> None:
    """The day of ticks takes a quarter of the time and is as long as that allows; the floods have the rest."""
    drift_s = 60 * options.minutes / 4
    drift.run(figures, max(1000, int(drift_s / SOAK_TICK_S)), 1000, "soak")
    soak.run(figures, options.minutes * 3 / 4)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
