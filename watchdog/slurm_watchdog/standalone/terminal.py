"""The terminal of `run`, passed on to its command, which reads the keys itself. What it prints goes to a file as other
output does, by a pty of the terminal's size: a terminal that takes nothing delays nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import termios
from collections.abc import Callable

OFLAG = 1  # Place in what tcgetattr gives.


class Terminal:
    """One event loop owns it."""

    def __init__(self, group: Callable[[], int | None]) -> None:
        """Nothing is changed before the first start. `group`: the command's process group; None: it does not run."""
        self.fds = tuple(fd for fd in (0, 1, 2) if os.isatty(fd))
        self._real = next((fd for fd in (1, 2, 0) if fd in self.fds), -1)
        self._saved = termios.tcgetattr(self._real) if self.fds else []
        self._master, self._into, self._group = -1, -1, group

    def is_read(self) -> bool:
        """Whether the command may read it: a shell reads it while this process is in the background."""
        with contextlib.suppress(OSError):
            return 0 in self.fds and os.tcgetpgrp(0) == os.getpgrp()
        return 0 in self.fds

    def begin(self, into: int) -> int:
        """A new pty: the end that the command prints to, to be closed here once it runs. `into`: what is printed there
        is written to this descriptor, of which a copy is kept."""
        self._end_master()
        self._master, slave = os.openpty()
        self._into = os.dup(into)
        os.set_blocking(self._master, False)
        with contextlib.suppress(termios.error):
            settings = [*self._saved]
            settings[OFLAG] &= ~termios.OPOST  # the real one turns a line feed into what it needs
            termios.tcsetattr(slave, termios.TCSANOW, settings)
        self._take_size()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._master, self._printed)
        loop.add_signal_handler(signal.SIGWINCH, self._resized)
        return slave

    def follow(self) -> None:
        """Ctrl-Z stops the command and this process; neither is stopped for what it prints in the background."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTSTP, self._stop)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    @staticmethod
    def in_child() -> None:
        """In the command's process, before it is executed."""
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)

    def close(self) -> None:
        """The terminal is as it was."""
        self._end_master()
        if self.fds:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._real, termios.TCSADRAIN, self._saved)

    def drain(self) -> None:
        """Takes what the command has printed last."""
        while self._master >= 0 and self._printed():
            pass

    def _printed(self) -> bool:
        try:
            data = os.read(self._master, 65_536)
        except BlockingIOError:
            return False
        except OSError:  # EIO: no one has its other end any more
            data = b""
        if data:
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._into, data) :]
            return True
        asyncio.get_running_loop().remove_reader(self._master)
        return False

    def _end_master(self) -> None:
        if self._master >= 0:
            self.drain()
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)
            os.close(self._into)
            self._master = -1

    def _take_size(self) -> None:
        with contextlib.suppress(OSError):
            if self._master >= 0:
                size = fcntl.ioctl(self._real, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def _resized(self) -> None:
        self._take_size()
        self._signal(signal.SIGWINCH)

    def _stop(self) -> None:
        """As it stops any job of a shell; `fg` and `bg` continue both."""
        self._signal(signal.SIGSTOP)  # SIGTSTP stops no group without a shell of its own
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal(signal.SIGCONT)
        self._take_size()

    def _signal(self, number: int) -> None:
        if group := self._group():
            with contextlib.suppress(OSError):
                os.killpg(group, number)
