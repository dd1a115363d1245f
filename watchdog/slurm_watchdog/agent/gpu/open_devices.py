"""Who has a GPU open, by the links in /proc/PID/fd. They are read through a thread that lives: of a process
whose main thread has ended, another one still has the descriptors."""

from __future__ import annotations

import os
import re

from slurm_watchdog.agent.proc.files import read_links

DEVICES = "/dev/nvidia"
"""What the name of a GPU's device begins with; its number follows. nvidiactl, nvidia-uvm and nvidia-caps are no GPU."""


def links_of(pid: int, thread: int) -> tuple[int, list[str]]:
    """How many files are open, and the names of those that could be read. Raises OSError."""
    return read_links(f"/proc/{pid}/task/{thread}/fd")


def other_thread(pid: int) -> int:
    """A thread of the process that is not its main one; the main one where there is no other. Raises OSError."""
    return next((int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid), pid)


def gpu_pattern(devices: str = DEVICES) -> re.Pattern[str]:
    """For the link of a GPU's device, its number in group 1; the file may have been removed since."""
    return re.compile(re.escape(devices) + r"(\d+)(?: \(deleted\))?")
