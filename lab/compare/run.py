"""One fault, and all peers at once: each has a training of its own, and the same thing befalls it."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.compare.changes import apply, lines_changed
from lab.compare.peers import Peer
from lab.live.again import next_run
from lab.live.stage import ENVIRONMENT, START_S, TRAINER, Job, Stage
from tests.rig.cluster import Cluster
from tests.rig.commands import ClusterError, as_user
from tests.rig.rights import USER, USER_UID, ensure_user

NODES = 3
FEW_STEPS = 26
"""Before it is broken: a checkpoint has been written, and a peer that learns limits has learnt them."""
SCRATCH = Path("/dev/shm/compare")
"""Of the launchers, a directory a node: their sockets have names that are the same on all nodes."""
LOOK_EVERY_S = 0.2
STATE_EVERY_S = 5.0
STEP_S = 0.5
SLOW_S = 110.0
"""Of an evaluation or a checkpoint that is healthy."""
AFTER_SLOW_S = 30.0


@dataclass(frozen=True)
class Scene:
    """What befalls a training: `break_it` does it to all of them, and returns when it was done for each."""

    name: str
    words: str
    break_it: Callable[[list[Job]], list[float]]
    patience_s: float
    ranks: tuple[int, ...] = ()
    """To blame. With neither these nor a node nothing is, and what is restarted was healthy."""
    node: str = ""
    """To blame."""
    options: tuple[str, ...] = ()
    together: bool = True
    """All peers at the same moment. False where all of them restart at once and would take each other's processor."""
    spare: bool = False
    """Whether there is a node more in the allocation, and the loss of one does not end it (`--no-kill`)."""
    mend: Callable[[Cluster], None] = lambda cluster: None

    def shorter(self, seconds: float) -> Scene:
        """The same, watched for so long at most."""
        return replace(self, patience_s=min(seconds, self.patience_s))


@dataclass
class Outcome:
    """Of one peer in one scene."""

    peer: str
    scene: str
    verdict_s: float | None = None
    said: str = ""
    """The line with the verdict."""
    right_rank: bool | None = None
    """None: there was no verdict, or nothing to blame."""
    first_step_s: float | None = None
    steps_lost: int | None = None
    starts: int = 0
    job_state: str = ""
    """At the end."""
    watched_s: float = 0.0
    last_words: str = ""
    """Of the job's log, where no run has trained again."""
    problem: str = ""
    """Why there is no figure."""


def tell(text: str) -> None:
    """Progress, for people."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} compare: {text}\n")
    sys.stderr.flush()


def why_not(peer: Peer, python: Path) -> str:
    """The error with which a peer cannot be imported here by a job's user; empty if it can."""
    if not peer.probe:
        return ""
    ensure_user(USER, USER_UID)
    for path in peer.directories:
        Path(path).mkdir(exist_ok=True)
        Path(path).chmod(0o1777)
    done = subprocess.run(
        [*as_user(USER), python, "-W", "ignore", "-c", f"import {peer.probe}"],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=300,
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def release(peer: Peer, python: Path) -> str:
    """The installed release of a peer; empty if it has none."""
    if not peer.distribution:
        return ""
    paths = [str(each) for each in python.parents[1].glob("lib/python*/site-packages")]
    found = [each.version for each in metadata.distributions(name=peer.distribution, path=paths)]
    return found[0] if found else ""


def changed(peer: Peer) -> int:
    """Lines that a training has to change for a peer."""
    return lines_changed(peer.changes) + peer.also_changed


class Beside:
    """The script that looks at a log's age, as people write it, outside of the job."""

    def __init__(self, job: Job, limit_s: float) -> None:
        self.job, self.limit_s = job, limit_s
        self.said = ""
        self.at: float | None = None

    def look(self) -> None:
        """Restarts the job once its log has not grown for so long."""
        age_s = time.time() - self.job.output.stat().st_mtime
        if self.at is None and age_s > self.limit_s:
            self.at, self.said = time.time(), f"the log of job {self.job.job_id} is {age_s:.0f} s old: requeued"
            self.job.stage.cluster.slurm("scontrol", "requeue", self.job.job_id, check=False)


def start(stage: Stage, peer: Peer, scene: Scene) -> Job:
    """Submits the training of a peer."""
    room = stage.room(f"{scene.name}-{peer.name}")
    trainer = room.place / "train.py"
    trainer.write_text(apply(TRAINER.read_text(), peer.changes))
    trainer.chmod(0o644)
    options = [each.format(scratch=stage.cluster.scratch) for each in scene.options]
    words = " ".join((room.words(trainer), f"--step-seconds {STEP_S}", *options, *peer.options))
    nodes = NODES + scene.spare
    filled: dict[str, Any] = {
        "python": stage.python, "trainer": words, "nodes": nodes,
        "nnodes": f"{NODES}:{nodes}" if scene.spare else str(NODES),
    }  # fmt: skip
    no_kill = "--no-kill" if scene.spare else ""
    own = f"{SCRATCH}/$SLURM_JOB_ID-$SLURM_NODEID"
    script = (
        f"#!/bin/bash\n#SBATCH --requeue --open-mode=append {no_kill}\n"
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1) '
        f"MASTER_PORT={room.port} {ENVIRONMENT}\n{peer.before.format(**filled)}"
        f"srun {no_kill} --label --ntasks-per-node=1 bash -c '"
        f"mkdir -p {own} && export TMPDIR={own} && {_with_own(peer.directories, peer.command.format(**filled))}'\n"
    )
    return stage.start(room, script, f"-N{nodes}", "--ntasks-per-node=1")


def _with_own(directories: tuple[str, ...], command: str) -> str:
    """A shell command that sees its own TMPDIR at these paths."""
    if not directories:
        return command
    binds = " && ".join(
        f"mkdir -p $TMPDIR/{number} && mount --bind $TMPDIR/{number} {path}" for number, path in enumerate(directories)
    )
    return f'unshare --user --map-root-user --mount bash -c "{binds} && {command}"'


def play(stage: Stage, scene: Scene, peers: tuple[Peer, ...], done: Callable[[Outcome], None]) -> None:
    """Starts the trainings of all peers, breaks them, and watches each until it trains again, or nothing is to be
    expected any more."""
    SCRATCH.mkdir(exist_ok=True)
    SCRATCH.chmod(0o1777)
    jobs = {peer.name: start(stage, peer, scene) for peer in peers}
    trains = {}
    for peer in peers:
        job = jobs[peer.name]
        try:
            stage.until(lambda job=job: len(job.steps()) >= FEW_STEPS or _over(job), START_S, f"steps of {peer.name}")
        except ClusterError:
            pass
        if len(job.steps()) >= FEW_STEPS:
            trains[peer.name] = job
        else:
            done(Outcome(peer.name, scene.name, problem=f"did not train within {START_S:g} s: {_last_words(job)}"))
            job.end()
    try:
        marks = {name: len(job.text()) for name, job in trains.items()}
        blamed = {name: _blamed(scene, job) for name, job in trains.items()}
        at = dict(zip(trains, scene.break_it(list(trains.values())), strict=True))
        with ThreadPoolExecutor(max(1, len(trains))) as pool:
            for outcome in pool.map(
                lambda peer: watch(scene, peer, trains[peer.name], at[peer.name], marks[peer.name], blamed[peer.name]),
                [peer for peer in peers if peer.name in trains],
            ):
                done(outcome)
    finally:
        scene.mend(stage.cluster)
        for job in jobs.values():
            job.end()
        shutil.rmtree(SCRATCH, ignore_errors=True)


def watch(scene: Scene, peer: Peer, job: Job, at: float, mark: int, blamed: set[str]) -> Outcome:
    """Follows one training until its next run makes a step, it is over, or patience is at its end. `blamed` are the nodes
    of the ranks to blame: the next run may number them otherwise."""
    outcome = Outcome(peer.name, scene.name)
    state_at = time.time()
    beside = Beside(job, peer.log_age_s) if peer.log_age_s is not None else None
    while (now := time.time()) < at + scene.patience_s:
        text = job.text()
        if beside is not None:
            beside.look()
            if beside.at is not None and outcome.verdict_s is None:
                outcome.verdict_s, outcome.said = beside.at - at, beside.said
        elif outcome.verdict_s is None and (line := _line(peer.line_of_verdict(), text, mark)):
            outcome.verdict_s, outcome.said = now - at, line
        again = next_run(text, mark)
        if again is not None:
            outcome.first_step_s, outcome.steps_lost, outcome.starts = now - at, again.steps_lost, again.starts
            break
        if now > state_at + STATE_EVERY_S:
            state_at = now
            if _over(job):
                break
        time.sleep(LOOK_EVERY_S)
    outcome.watched_s = time.time() - at
    outcome.job_state = _state(job)
    if outcome.verdict_s is not None and blamed:
        outcome.right_rank = _named(job, outcome.said) == blamed
    if outcome.first_step_s is None:
        outcome.last_words = _last_words(job)
    tell(
        f"{scene.name} {peer.name}: verdict {outcome.verdict_s and round(outcome.verdict_s, 1)} s, right rank "
        f"{outcome.right_rank}, first new step {outcome.first_step_s and round(outcome.first_step_s, 1)} s, "
        f"lost {outcome.steps_lost}, {outcome.job_state}: {outcome.said[:160]} {outcome.last_words}"
    )
    return outcome


def _line(pattern: re.Pattern[str], text: str, mark: int) -> str:
    found = pattern.search(text, mark)
    if found is None:
        return ""
    begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[begin : end if end >= 0 else len(text)].strip()


def _blamed(scene: Scene, job: Job) -> set[str]:
    return {scene.node} if scene.node else {str(job.rank(rank)["node"]) for rank in scene.ranks}


def _named(job: Job, line: str) -> set[str]:
    """The nodes that a verdict names, and with one rank a node so the ranks: those whose names it says, else that of the
    launcher from which it comes (`srun --label`)."""
    said = {node for node in job.stage.cluster.nodes if re.search(rf"\b{node}\b", line)}
    label = re.match(r"(\d+): ", line)
    return said or ({_nodes(job)[int(label[1])]} if label else set())


def _nodes(job: Job) -> list[str]:
    """In the order of the launchers' numbers."""
    cluster = job.stage.cluster
    return cluster.slurm("scontrol", "show", "hostnames", cluster.job(job.job_id)["NodeList"]).stdout.split()


def _over(job: Job) -> bool:
    return _state(job) not in {"PENDING", "RUNNING", "COMPLETING"}


def _state(job: Job) -> str:
    with contextlib.suppress(ClusterError, KeyError):
        return job.stage.cluster.job(job.job_id)["JobState"]
    return "?"


def _last_words(job: Job) -> str:
    """Its last errors, or its last lines."""
    lines = [line for line in job.text().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return " / ".join(line[:200] for line in (errors or lines)[-3:])
