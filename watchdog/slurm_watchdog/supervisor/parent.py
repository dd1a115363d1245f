"""The process that the batch script waits for. Its child supervises the command; where that dies, by a signal or by an
error of ours, the command becomes a child of this one, which waits for it: the job continues without supervision."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from slurm_watchdog.base.process_setup import set_name
from slurm_watchdog.supervisor.endings import exit_code

NAME = "swd run-parent"  # Of its own, so that `pkill -9 slurm-watchdog` leaves it to wait for the command.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (*ENDING_SIGNALS, *OTHER_SIGNALS)  # That are handed on.
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SharedPid: TypeAlias = ctypes.c_int64
"""The process of the command, in memory that parent and child share; 0: it does not run, or no one waits for it."""


def in_child(supervise: Callable[[SharedPid], int]) -> int:
    """Calls `supervise` in a child, where the signals are blocked until it takes them, and returns there
    what it returns. In the parent it returns the exit code of the child, or that of the command if it outlived that.
    Whatever is raised is raised in the child alone. Raises OSError in the parent where no process can be started."""
    become_subreaper()
    command = SharedPid.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = os.fork()
    if child == 0:
        become_subreaper()  # prctl(2): not inherited
        return supervise(command)
    set_name(NAME)
    return _wait(child, command)


def become_subreaper() -> None:
    """What its descendants leave behind becomes a child of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _wait(child: int, command: SharedPid) -> int:
    target = child

    def hand_on(number: int, _: object) -> None:
        with suppress(OSError):  # it has ended
            if target == child:
                os.kill(child, number)
            else:
                os.killpg(target, number)  # it is a session of its own: Launcher.start

    for number in SIGNALS:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = _code_of(child)
    with suppress(ChildProcessError):  # it has ended meanwhile
        if pid := command.value:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            target = pid
            say(
                f"slurm-watchdog run: its supervisor has died (exit code {code}); the command continues, and nothing "
                f"starts it again in this allocation\n"
            )
            code = _code_of(pid)
    return code


def _code_of(pid: int) -> int:
    """Waits for the end of a child, and takes that of all others. Raises ChildProcessError where there is none such."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return exit_code(os.waitstatus_to_exitcode(status))


def say(text: str) -> None:
    """On standard error, by a process of its own: it may be a file that does not answer."""
    if os.fork() == 0:
        try:
            os.write(2, text.encode())
        finally:
            os._exit(0)
