"""What `slurm-watchdog run` leaves as it is: standard output, error and input of its command, terminal or not, and what
Ctrl-C does."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.ordinary import prefix
from tests.rig.stack import COMMAND

PATIENCE_S = 60.0
SAYS = "import os, sys; print('tty', [os.isatty(fd) for fd in (0, 1, 2)], flush=True); "
SIZE = "print('size', tuple(os.get_terminal_size()), flush=True); "
READS = "print('read', input('name? '), flush=True); "
WAITS = """
import signal, time
try:
    print('waits', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print('saved, after an interrupt', flush=True)
    raise
"""


class Session:
    """A `run` whose 0, 1 and 2 are a terminal of its own, but for those in `files`."""

    def __init__(
        self,
        place: Path,
        *command: str,
        files: Sequence[int] = (),
        size: tuple[int, int] = (33, 77),
        shell: bool = False,
    ) -> None:
        place.chmod(0o777)
        self.place, self.seen = place, ""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.before = termios.tcgetattr(slave)
        streams = [slave, slave, slave]
        for fd in files:
            streams[fd] = os.open("/dev/null", os.O_RDONLY) if fd == 0 else os.open(place / f"{fd}.txt", 0o1101, 0o644)
        words = ["run", "--no-page", "--directory", str(place / "run"), "--", *command]
        own = ("setsid", "--ctty") if 0 not in files else ("setsid",)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "-i"] if shell else [*own, *prefix(), str(COMMAND), *words],
            stdin=streams[0], stdout=streams[1], stderr=streams[2], cwd=place, env={**os.environ, "HOME": str(place), "PS1": "$ "},
        )  # fmt: skip
        self.slave = slave

    def types(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, words: str) -> None:
        """Until the terminal has shown this."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.seen:
            assert time.monotonic() < end, f"{words!r} is not in {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65_536).decode(errors="replace")

    def ends(self) -> int:
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None or select.select([self.master], [], [], 0.1)[0]:
            assert time.monotonic() < end, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65_536).decode(errors="replace")
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path("/tmp") or parent.stat().st_uid != os.getuid():
            break
        parent.chmod(parent.stat().st_mode | 0o011)
    yield tmp_path


def python(*lines: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "".join(lines))


def run_apart(place: Path, *command: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    place.chmod(0o777)
    words = [*prefix(), str(COMMAND), "run", "--no-page", "--directory", str(place / "run"), "--", *command]
    return subprocess.run(
        words, input=given, capture_output=True, check=False, timeout=PATIENCE_S, cwd=place,
        env={**os.environ, "HOME": str(place)},
    )  # fmt: skip


def test_output_and_errors_stay_apart(place: Path) -> None:
    script = "print('out', flush=True); print('err', file=sys.stderr); print('read', sys.stdin.read())"
    done = run_apart(place, *python(SAYS, script), given=b"given")
    assert (done.returncode, done.stdout) == (0, b"tty [False, False, False]\nout\nread given\n")
    assert b"err\n" in done.stderr
    assert (place / "run" / "errors.log").read_text() == "err\n"


@pytest.mark.parametrize("files", [(), (2,), (1,), (0,), (1, 2)])
def test_what_is_a_terminal_is_one_for_the_command_too(place: Path, files: tuple[int, ...]) -> None:
    session = Session(
        place, *python(SAYS, SIZE if 1 not in files else "", "print('err', file=sys.stderr)"), files=files
    )
    try:
        assert session.ends() == 0
        shown = {fd: (place / f"{fd}.txt").read_text() if fd in files else session.seen for fd in (1, 2)}
        assert f"tty {[fd not in files for fd in (0, 1, 2)]}" in shown[1]
        assert 1 in files or "size (77, 33)" in shown[1]
        assert re.search(r"^err\r?$", shown[2], re.MULTILINE)
        assert 2 not in files or not re.search(r"^err\r?$", session.seen, re.MULTILINE)
        assert termios.tcgetattr(session.slave) == session.before
    finally:
        session.close()


def test_keys_reach_the_command_and_a_new_size_and_ctrl_c_once(place: Path) -> None:
    session = Session(place, *python(SAYS, READS, READS, SIZE, WAITS))
    try:
        session.until("name? ")
        session.types("Ada\r")
        session.until("read Ada")
        fcntl.ioctl(session.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 99, 0, 0))
        time.sleep(0.5)
        session.types("Grace\n")
        session.until("size (99, 20)")
        session.until("waits")
        session.types("\x03")
        assert session.ends() == 128 + signal.SIGINT
        assert session.seen.count("saved, after an interrupt") == 1
        assert "was interrupted by you" in session.seen
        assert "started again" not in session.seen
        assert termios.tcgetattr(session.slave) == session.before
        assert b"\r" not in (place / "run" / "output.log").read_bytes()
    finally:
        session.close()


@pytest.mark.parametrize(
    ("number", "script", "code"),
    [
        (signal.SIGINT, "sleep 60", 130),
        (signal.SIGINT, "trap 'echo saved; exit 0' INT; while :; do sleep 0.1; done", 0),
        (signal.SIGINT, "trap 'exit 1' INT; while :; do sleep 0.1; done", 130),
        (signal.SIGTERM, "sleep 60", 143),
        (signal.SIGTERM, "trap 'exit 5' TERM; while :; do sleep 0.1; done", 5),
    ],
)
def test_a_signal_is_the_commands_and_so_is_its_answer(place: Path, number: int, script: str, code: int) -> None:
    place.chmod(0o777)
    words = [*prefix(), str(COMMAND), "run", "--no-page", "--directory", str(place / "run"), "--", "sh", "-c"]
    with (place / "err").open("wb") as errors:
        process = subprocess.Popen(
            [*words, f"echo ready; {script}"], stdout=subprocess.PIPE, stderr=errors, cwd=place,
            env={**os.environ, "HOME": str(place)},
        )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == code
    said = (place / "err").read_text()
    assert ("was interrupted by you" in said) == (number == signal.SIGINT)


@pytest.mark.thorough
def test_ctrl_z_stops_it_and_fg_and_bg_continue_it(place: Path) -> None:
    (place / "ticks.py").write_text(
        "import sys, threading, time\n"
        "threading.Thread(target=lambda: [print('got', line, flush=True) for line in sys.stdin], daemon=True).start()\n"
        "while True:\n    print('tick', flush=True)\n    time.sleep(0.2)\n"
    )
    session = Session(place, "true", shell=True)
    try:
        session.until("$ ")
        words = (*prefix(), str(COMMAND), "run", "--no-page", "--directory", str(place / "run"), "--", sys.executable)
        session.types(f"{' '.join(words)} {place}/ticks.py\n")
        session.until("tick\r\ntick\r\ntick")

        def ticks() -> int:
            before, end = session.seen.count("tick"), time.monotonic() + 3
            while time.monotonic() < end:
                if select.select([session.master], [], [], 0.2)[0]:
                    session.seen += os.read(session.master, 65_536).decode(errors="replace")
            return session.seen.count("tick") - before

        session.types("\x1a")
        session.until("Stopped")
        ticks()
        assert ticks() == 0
        session.types("bg\n")
        assert ticks() > 5
        session.types("echo $((40 + 2)) is read by the shell\n")
        session.until("42 is read by the shell")
        assert "got" not in session.seen, "it was typed to the shell"
        session.types("fg\n")
        ticks()
        session.types("to the command\n")
        session.until("got to the command")
        session.types("\x03")
        session.until("was interrupted by you")
    finally:
        session.close()
