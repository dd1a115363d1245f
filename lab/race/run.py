"""Somebody swaps names as fast as he can while the agent's children read logs and write kill switches below them.

Three attackers: another user of the same group directory, who wants the job's owner's secrets told; the job's
owner himself, who wants root's; and both with mounts that come and go. What must hold: no line of a secret is
ever read, nothing outside is created, changed or removed, and nothing in the directories of users is root's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slurm_watchdog.agent.children.become_user import Kind, become
from slurm_watchdog.agent.children.requests import Follow, LastLines, RemoveSwitch, WorkerState, WriteSwitch
from slurm_watchdog.agent.evidence import last_lines
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.logs import follow

OWNER, STRANGER = 64983, 64984
SECRETS = {
    OWNER: "iteration 66613666/ 66699999 | lm loss: 6.6613666\n",
    0: "iteration 77713777/ 77799999 | lm loss: 7.7713777\n",
}
"""In files of the job's owner, and of root: the stranger gets none of them told, the owner none of root's."""
OPEN = "iteration 7/ 999 | lm loss: 2.5\n"
FIELDS = {"by": "slurm-watchdog", "why": "a race", "incident": "1", "decision": "1"}
PLACES = ("logs", "run", "logs/train.log", "run/kill", "logs/deep", "spare")
TURN = 64
"""Swaps between two looks at the clock and the count."""


@dataclass
class Figures:
    """What was done, and what went wrong."""

    swaps: int = 0
    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class Place:
    """A directory that owner and stranger may both write to, and outside of it what nobody may reach through it."""

    def __init__(self, root: Path):
        self.root = root
        root.chmod(0o755)
        self.box, self.outside, self.roots = root / "box", root / "outside", root / "roots"
        self.trash = root / "trash"
        for directory, uid, mode in (
            (self.box, OWNER, 0o777), (self.trash, OWNER, 0o777), (self.outside, OWNER, 0o700), (self.roots, 0, 0o700),
        ):  # fmt: skip
            directory.mkdir()
            os.chown(directory, uid, uid)
            directory.chmod(mode)
        for directory, uid in ((self.outside, OWNER), (self.roots, 0)):
            for name in ("train.log", "kill", ".kill.n1.7"):
                (directory / name).write_text(SECRETS[uid])
                os.chown(directory / name, uid, uid)
                (directory / name).chmod(0o600)
        self.before = {directory: self._state(directory) for directory in (self.outside, self.roots)}

    def _state(self, directory: Path) -> list[tuple[str, int, int, int, bytes]]:
        return [
            (path.name, it.st_ino, it.st_uid, it.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in sorted(directory.iterdir())
            for it in [path.lstat()]
        ]

    def violations(self, attacker: int) -> Iterator[str]:
        """What should not be. The owner may do as he likes with what is his."""
        for directory, before in self.before.items():
            if directory.stat().st_uid != attacker and self._state(directory) != before:
                yield f"{directory.name} was changed: {[each[0] for each in self._state(directory)]}"
        for where, directories, files in (*os.walk(self.box), *os.walk(self.trash)):
            for name in directories + files:
                it = os.lstat(os.path.join(where, name))
                if it.st_uid == 0:
                    yield f"{name} in the users' directory is root's"


def swap_for_ever(place: Place, uid: int, swaps: int, pipe: int, seed: int) -> None:
    """The attacker, as `uid`: `swaps` changes, then how many there were goes down the pipe."""
    assert become(uid, Kind.FILES) is None
    choose, box, made = random.Random(seed), place.box, 0
    victims = [place.outside, place.roots]
    moves: list[Callable[[str], None]] = [
        lambda name: os.symlink(choose.choice(victims), box / name),
        lambda name: os.symlink(choose.choice(victims) / "train.log", box / name),
        lambda name: os.symlink(f"../{choose.choice(victims).name}", box / name),
        lambda name: os.mkfifo(box / name),
        lambda name: os.mkdir(box / name, 0o777),
        lambda name: os.link(choose.choice(victims) / "train.log", box / name),
        lambda name: write(box / name),
        lambda name: fill(box / name),
    ]
    while made < swaps:
        for _ in range(TURN):
            made += 1
            new, old = f"new{made % 8}", choose.choice(PLACES)
            with suppress(OSError):
                if choose.random() < 0.5:
                    (write if old.endswith((".log", "kill")) else fill)(box / new)
                else:
                    choose.choice(moves)(new)
            with suppress(OSError):
                os.rename(box / old, place.trash / f"{uid}.{made}")
            with suppress(OSError):
                os.rename(box / new, box / old)
    os.write(pipe, f"{made}\n".encode())


def write(path: Path) -> None:
    """A log, if the name is free: what stands there may be a FIFO."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
    with open(fd, "w") as file:
        file.write(OPEN)


def fill(directory: Path) -> None:
    """A directory as it should be: with a log."""
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    write(directory / "train.log")


def work_for_ever(place: Place, pipe: int) -> None:
    """What children do as the job's owner, over and over: the functions themselves, with all that they remember."""
    assert become(OWNER, Kind.FILES) is None
    done: Counter[str] = Counter()
    told: set[str] = set()
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    path, switch = str(place.box / "logs/train.log"), str(place.box / "run/kill")
    state = WorkerState()
    while not stop:
        for name, function, args in (
            (
                "looks",
                follow.follow,
                Follow([("1", path, None), ("1", switch, 0)], globs=[("1", f"{place.box}/*/train.l*")]),
            ),
            ("ends", last_lines.last_lines, LastLines([("1", path), ("2", str(place.box / "logs"))])),
            ("written", as_owner.write_kill_switch, WriteSwitch(switch, node="n1", **FIELDS)),
            ("removed", as_owner.remove_kill_switch, RemoveSwitch(switch, node="n1", **FIELDS)),
        ):  # fmt: skip
            try:
                answer = json.dumps(msgspec.to_builtins(function(args, state if name == "looks" else WorkerState())))
            except OSError:
                done[f"{name} refused"] += 1
                continue
            done[name] += 1
            done["logs read"] += "iteration 7" in answer or "2.5" in answer
            told |= {str(uid) for uid, text in SECRETS.items() if text[10:18] in answer or text[-10:-1] in answer}
        memory = state.memory(follow.FollowMemory)
        memory.expanded = {}
        if done["looks"] % 50 == 0:
            for each in memory.tails.values():
                each.close()
            memory.tails = {}
    os.write(pipe, json.dumps([done, sorted(told)]).encode())


@contextmanager
def mounts(place: Place) -> Iterator[None]:
    """Mounts over `spare`, of the owner's directories and of root's, that come and go meanwhile."""
    script = (
        'while :; do for from in "$2" "$3" "$4"; do mkdir -p "$1"; mount --bind "$from" "$1" 2>/dev/null && umount --lazy "$1"; sleep 0.02;'
        " done; done"
    )
    spare, empty = place.root / "mounts", place.root / "empty"
    spare.mkdir()
    empty.mkdir()
    process = subprocess.Popen(["sh", "-c", script, "sh", spare, place.box, place.roots, empty], start_new_session=True)
    (place.box / "logs-on-mount").symlink_to(spare)
    os.lchown(place.box / "logs-on-mount", OWNER, OWNER)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while subprocess.run(["umount", "--lazy", spare], capture_output=True, check=False).returncode == 0:
            pass


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """(pid, descriptor that ends with it) of a child that does `work(its end)`."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_fd)
            work(write_fd)
            code = 0
        finally:
            os._exit(code)
    os.close(write_fd)
    return pid, read_fd


def race(swaps: int, seed: int = 1) -> Figures:
    """`swaps` changes of names, half by the stranger and half by the owner, against the children. Needs root."""
    figures = Figures()
    began = time.monotonic()
    for attacker, share in ((STRANGER, swaps - swaps // 2), (OWNER, swaps // 2)):
        with tempfile.TemporaryDirectory(prefix="slurm-watchdog-race-") as directory:
            attack(Place(Path(directory)), attacker, share, seed, figures)
    figures.seconds = time.monotonic() - began
    return figures


def attack(place: Place, attacker: int, swaps: int, seed: int, figures: Figures) -> None:
    """One attacker against two children."""
    secrets = {str(0)} if attacker == OWNER else {str(uid) for uid in SECRETS}
    with mounts(place):
        workers = [fork(lambda pipe: work_for_ever(place, pipe)) for _ in range(2)]
        pid, pipe = fork(lambda out: swap_for_ever(place, attacker, swaps, out, seed))
        with open(pipe) as said:
            figures.swaps += int(said.read() or 0)
        os.waitpid(pid, 0)
        for worker, answers in workers:
            os.kill(worker, signal.SIGTERM)
            with open(answers) as said:
                text = said.read()
            _, status = os.waitpid(worker, 0)
            if status or not text:
                figures.violations.append(f"a child died of it: {status}")
                continue
            done, told = json.loads(text)
            figures.done.update(done)
            figures.violations += [f"a secret of uid {uid} was told" for uid in sorted(secrets & set(told))]
    figures.violations += place.violations(attacker)
