"""`python -m lab.compare` (`make compare`): peers and the same faults on a real Slurm with its shipped times. A line of
JSON an outcome on standard output; `--write` keeps them for docs/evaluation.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from lab.bench.figures import take_standard_output
from lab.compare.peers import Peer, named
from lab.compare.run import Outcome, changed, play, release, tell, why_not
from lab.compare.scenes import SCENES
from lab.live.stage import Stage, why_not_for_jobs
from tests.rig.cluster import Cluster
from tests.rig.commands import ClusterError, commit
from tests.rig.debian_packages import why_impossible

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parents[2] / "lab/results/compare.json"
CPUS = 64
"""That a node declares: all peers train at the same time, and mostly sleep."""


def main() -> int:
    """Returns 0 if everything that could be tried gave an outcome, 2 where nothing could be tried."""
    parser = argparse.ArgumentParser(prog="make compare", description=__doc__)
    parser.add_argument("scenes", nargs="*", metavar="scene", help=f"of: {' '.join(each.name for each in SCENES)}")
    parser.add_argument("--peers", nargs="*", default=[], help="parts of names of peers (default: all)")
    parser.add_argument("--patience", type=float, default=None, help="seconds that a fault is waited for, at most")
    parser.add_argument("--write", action="store_true", help=f"keep the outcomes in {RESULTS.name}")
    options = parser.parse_args()
    python = Path(os.environ.get("COMPARE_PYTHON") or CHECKOUT / ".venv-compare" / "bin" / "python")
    reason = why_impossible() or (None if python.exists() else f"no {python}: make compare makes it")
    reason = reason or why_not_for_jobs(str(python))
    if reason is not None:
        tell(f"skipped: {reason}")
        return 2
    out = take_standard_output()
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        out.write(json.dumps(asdict(outcome)) + "\n")
        out.flush()

    peers = named(options.peers)
    problems = {peer.name: why_not(peer, python) for peer in peers}
    for scene in SCENES:
        if options.scenes and scene.name not in options.scenes:
            continue
        if options.patience is not None:
            scene = scene.shorter(options.patience)
        for peer in peers:
            if problems[peer.name]:
                done(Outcome(peer.name, scene.name, problem=problems[peer.name]))
        tell(f"--- {scene.words}")
        there = tuple(peer for peer in peers if not problems[peer.name])
        with Cluster(nodes=4, cpus=CPUS, shipped_times=True) as cluster:
            stage = Stage(cluster, None, str(python))
            for group in [there] if scene.together else [(peer,) for peer in there]:
                try:
                    play(stage, scene, group, done)
                except ClusterError as error:
                    tell(f"{scene.name} broke down: {error}")
    if options.write:
        _keep(outcomes, peers, python)
    return 0


def _keep(outcomes: list[Outcome], peers: tuple[Peer, ...], python: Path) -> None:
    """Writes the outcomes; those of scenes and peers that were not tried now stay as they were kept."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"peers": {}, "outcomes": []}
    rows = {(row["scene"], row["peer"]): row for row in kept["outcomes"]}
    rows |= {(each.scene, each.peer): asdict(each) for each in outcomes}
    about = {
        peer.name: {
            "what": peer.what, "distribution": peer.distribution, "release": release(peer, python),
            "lines_changed": changed(peer), "remark": peer.remark,
        }
        for peer in peers
    }  # fmt: skip
    results = {
        "date": datetime.now(timezone.utc).date().isoformat(), "commit": commit(), "scenes": {scene.name: scene.words for scene in SCENES},
        "peers": kept["peers"] | about, "outcomes": list(rows.values()),
    }  # fmt: skip
    text = json.dumps(results, indent=1)
    for place in (python.parents[2], CHECKOUT):  # what peers say names paths of this machine
        text = text.replace(str(place), ".")
    RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
