"""The terminal of `run`, passed on to its command: a pty in place of each of 0, 1 and 2 that is a terminal here, with
its size, its keys and its Ctrl-Z. What the command prints there goes to a file as other output does, so a terminal that
takes nothing delays nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import termios

KEYS = 1024  # Bytes that are read at once: less than a line that a terminal keeps (4,096).
FOREGROUND_S = 0.5  # Between two looks whether this process may read the terminal: a shell's `fg` says nothing.
LFLAG, IFLAG, OFLAG, CC = 3, 0, 1, 6  # Places in what tcgetattr gives.


class Terminal:
    """One event loop owns it."""

    def __init__(self) -> None:
        """Nothing is changed before the first start."""
        self.fds = tuple(fd for fd in (0, 1, 2) if os.isatty(fd))
        self._real = next((fd for fd in (1, 2, 0) if fd in self.fds), -1)
        self._saved = termios.tcgetattr(self._real) if self.fds else []
        self._master, self._into, self._engaged = -1, -1, False
        self._watching: asyncio.Task[None] | None = None

    def begin(self, into: int) -> int:
        """A new pty: the end that the command gets as its own terminal, to be closed here once it runs. `into`: what is
        printed there is written to this descriptor, of which a copy is kept."""
        self._end_master()
        self._master, slave = os.openpty()
        self._into = os.dup(into)
        os.set_blocking(self._master, False)
        with contextlib.suppress(termios.error):
            settings = termios.tcgetattr(slave)
            settings[:4] = self._saved[:4]
            settings[CC] = self._saved[CC]
            settings[OFLAG] &= ~termios.OPOST  # the real one turns a line feed into what it needs
            termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.take_size()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._master, self._printed)
        loop.add_signal_handler(signal.SIGWINCH, self.take_size)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        # A background process that writes to its terminal, or reads it, is stopped without these.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        if self._watching is None:
            self._watching = loop.create_task(self._watch())
        return slave

    @staticmethod
    def in_child(slave: int) -> None:
        """In the command's process, a new session, before it is executed: the pty becomes its terminal."""
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        signal.signal(signal.SIGTTIN, signal.SIG_DFL)

    def group(self) -> int | None:
        """The process group to which a terminal would send its signals; None: there is none."""
        with contextlib.suppress(OSError):
            if self._master >= 0:
                return os.tcgetpgrp(self._master) or None
        return None

    def take_size(self) -> None:
        """The pty becomes as large as the terminal, and the kernel tells the command."""
        with contextlib.suppress(OSError):
            if self._master >= 0:
                size = fcntl.ioctl(self._real, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """The terminal is as it was."""
        if self._watching is not None:
            self._watching.cancel()
        self._disengage()
        self._end_master()

    # ------------------------------------------------------------------------------------ output

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

    def drain(self) -> None:
        """Takes what the command has printed last."""
        while self._master >= 0 and self._printed():
            pass

    def _end_master(self) -> None:
        if self._master >= 0:
            self.drain()
            self._disengage()
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)
            os.close(self._into)
            self._master = -1

    # ------------------------------------------------------------------------------------ keys

    async def _watch(self) -> None:
        while True:
            if self._is_foreground() and self._master >= 0:
                self._engage()
            else:
                self._disengage()
            await asyncio.sleep(FOREGROUND_S)

    def _is_foreground(self) -> bool:
        try:
            return 0 in self.fds and os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False

    def _engage(self) -> None:
        """Keys go to the command one by one; Ctrl-C, Ctrl-\\ and Ctrl-Z remain signals to this process."""
        if self._engaged:
            return
        with contextlib.suppress(termios.error):
            settings = termios.tcgetattr(0)
            self._saved = [*settings[:CC], list(settings[CC])]
            settings[LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
            settings[IFLAG] &= ~termios.ICRNL
            settings[CC][termios.VMIN], settings[CC][termios.VTIME] = 1, 0
            termios.tcsetattr(0, termios.TCSADRAIN, settings)
            self._engaged = True
            asyncio.get_running_loop().add_reader(0, self._typed)

    def _disengage(self) -> None:
        if self._engaged:
            self._engaged = False
            asyncio.get_running_loop().remove_reader(0)
            if self._is_foreground():  # else it is as the shell has made it since
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(0, termios.TCSADRAIN, self._saved)

    def _typed(self) -> None:
        try:
            data = os.read(0, KEYS) if self._is_foreground() else b""
        except OSError:
            data = b""
        if not data:  # hung up, or in the background: what is typed is not ours
            self._engaged = False
            asyncio.get_running_loop().remove_reader(0)
            return
        with contextlib.suppress(OSError):  # a command that reads nothing has room for a line
            os.write(self._master, data)

    def _stop(self) -> None:
        """Ctrl-Z stops the command and this process, as it stops any job of a shell; `fg` and `bg` continue both."""
        self._disengage()
        group = self.group()
        if group is not None:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGSTOP)  # SIGTSTP stops no group without a shell of its own
        os.kill(os.getpid(), signal.SIGSTOP)
        if group is not None:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGCONT)
        self.take_size()
