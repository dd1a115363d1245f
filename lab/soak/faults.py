"""What goes wrong: each fault begins, and says how long it lasts and how it is mended. A new one is a
function and a line in FAULTS."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from lab.soak.stage import Stage
from tests.rig.stack import PORT

Mend = Callable[[], object]
Lasting = tuple[float, Mend] | None
"""Seconds, and what ends it. None: nothing is to be mended, or it could not begin now."""
Fault = Callable[[Stage], Lasting]


def _hurt(stage: Stage, name: str, content: str = "") -> None:
    turning = stage.turning()
    if turning:
        job_id = stage.rng.choice(turning)
        ranks = int(stage.job(job_id)["NumTasks"]) if stage.rng.random() < 0.5 else 2
        stage.hurt(job_id, f"{name}.rank{stage.rng.randrange(max(1, min(2, ranks)))}", content)


def hang(stage: Stage) -> Lasting:
    """A rank waits for its data indefinitely, the others for it."""
    return _hurt(stage, stage.rng.choice(("dataloader_hang", "lock")))


def stop_rank(stage: Stage) -> Lasting:
    """SIGSTOP."""
    return _hurt(stage, "die", "signal=19")


def kill_rank(stage: Stage) -> Lasting:
    """kill -9; the others wait for it."""
    return _hurt(stage, "die", "signal=9")


def ask_restart(stage: Stage) -> Lasting:
    """An operator wants a healthy job elsewhere, by kill switch."""
    turning = stage.turning()
    if turning and stage.controller_lives and not stage.paused:
        exclude = (stage.rng.choice(stage.cluster.nodes),) if stage.rng.random() < 0.3 else ()
        stage.ask_restart(stage.rng.choice(turning), exclude)
    return None


def freeze(stage: Stage) -> Lasting:
    """The shared filesystem stops answering, everywhere."""
    if stage.frozen:
        return None
    stage.frozen = True
    stage.note("frozen")
    stage.cluster.freeze()

    def thaw() -> None:
        stage.cluster.thaw()
        stage.frozen = False
        stage.note("thawed")

    return stage.rng.uniform(5, 30), thaw


def kill_agent(stage: Stage) -> Lasting:
    alive = [node for node in stage.watchdog.nodes if node in stage.watchdog.agents]
    if len(alive) < len(stage.watchdog.nodes):
        return None
    node = stage.rng.choice(alive)
    stage.note("agent killed", detail=node)
    stage.watchdog.stop_agent(node, 9)

    def start() -> None:
        stage.watchdog.start_agent(node)
        stage.note("agent started", detail=node)

    return stage.rng.choice((0.5, 5.0, 25.0)), start


def kill_controller(stage: Stage) -> Lasting:
    if not stage.controller_lives:
        return None
    stage.kill_controller()
    return stage.rng.choice((0.2, 2.0, 10.0)), stage.start_controller


def pause_controller(stage: Stage) -> Lasting:
    """SIGSTOP, and SIGCONT a while later."""
    if not stage.controller_lives or stage.paused:
        return None
    stage.pause_controller()
    return stage.rng.choice((3.0, 20.0, 60.0)), stage.continue_controller


def cut(stage: Stage) -> Lasting:
    """Half of the nodes are out of reach, for less than Slurm takes to give them up."""
    nodes = stage.rng.sample(stage.cluster.nodes, len(stage.cluster.nodes) // 2)
    stage.note("cut", detail=",".join(nodes))
    for node in nodes:
        stage.cluster.cut(node)

    def join() -> None:
        for node in nodes:
            stage.cluster.join(node)
        stage.note("joined", detail=",".join(nodes))

    return stage.rng.uniform(2, 9), join


def stop_slurm(stage: Stage) -> Lasting:
    if stage.slurm_away:
        return None
    stage.slurm_away = True
    stage.note("slurm stopped")
    stage.cluster.stop_controller()

    def start() -> None:
        stage.cluster.start_controller()
        stage.slurm_away = False
        stage.note("slurm started")

    return stage.rng.choice((3.0, 15.0, 45.0)), start


def fill_disk(stage: Stage) -> Lasting:
    """The disk under the journal is full."""
    filler = stage.state / "filler"
    if filler.exists():
        return None
    stage.note("disk full")
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 65536)

    def empty() -> None:
        filler.unlink(missing_ok=True)
        stage.note("disk has room")

    return stage.rng.uniform(3, 20), empty


GARBAGE = (
    b"\x00\xff" * 5000,
    b"GET / HTTP/9.9\r\n" + b"x: y\r\n" * 20000,
    b"POST /v1/report HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{",
    b"POST /v1/report HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]" * 50,
    b"\x00\x00\x00\x05hello" * 50,
    b"\x00\xff\xff\xff" + b"h" * 5000,
    b"",
)


def garbage(stage: Stage) -> Lasting:
    """A flood of it at the door; some of the connections stay open, half a request in."""
    stage.note("garbage")
    address = (stage.cluster.controller_address, PORT)
    kept: list[socket.socket] = []
    for _ in range(300):
        try:
            connection = socket.create_connection(address, timeout=1)
            connection.settimeout(1)
            connection.sendall(stage.rng.choice(GARBAGE))
        except OSError:
            continue
        if len(kept) < 100:
            kept.append(connection)
        else:
            connection.close()

    def close() -> None:
        for each in kept:
            each.close()

    return 15.0, close


def weather(stage: Stage) -> Lasting:
    """The next requests that change something meet with whatever it may be."""
    stage.tools.weather(stage.rng, 6, 0.7)
    return 40.0, lambda: stage.tools.fates([])


def person(stage: Stage) -> Lasting:
    """Somebody requeues, holds or cancels a job."""
    turning = stage.turning()
    if turning and not stage.slurm_away:
        job_id, what = stage.rng.choice(turning), stage.rng.choice(("requeue", "requeuehold", "scancel"))
        stage.note(f"person {what}", job_id, int(stage.job(job_id).get("Restarts", -1)))
        words = ("scancel", job_id) if what == "scancel" else ("scontrol", what, job_id)
        stage.cluster.slurm(*words, check=False)
    return None


FAULTS: dict[str, tuple[Fault, float]] = {
    "hang": (hang, 3.0),
    "stop_rank": (stop_rank, 2.0),
    "kill_rank": (kill_rank, 2.0),
    "ask_restart": (ask_restart, 3.0),
    "freeze": (freeze, 1.0),
    "kill_agent": (kill_agent, 1.0),
    "kill_controller": (kill_controller, 3.0),
    "pause_controller": (pause_controller, 0.7),
    "cut": (cut, 0.7),
    "stop_slurm": (stop_slurm, 1.0),
    "fill_disk": (fill_disk, 1.0),
    "garbage": (garbage, 0.7),
    "weather": (weather, 3.0),
    "person": (person, 0.5),
}
"""Name -> the fault, and how often it is drawn beside the others."""
