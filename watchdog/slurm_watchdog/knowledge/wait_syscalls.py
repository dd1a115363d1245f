"""What a main thread waits for, told by the system call it is in: for Python frames that say nothing, as
`with lock:` has none of its own.

A sampling of Python frames shows the function that waits and not the C function in it. Calls of which one
cannot tell what they are for (poll, select, read of whatever) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slurm_watchdog.knowledge.stack_frames import Place

PLACES_OF_CALLS: Final[Mapping[str, Place]] = {
    "futex": Place.LOCK,  # pthread_mutex, semaphores, condition variables: also a queue inside a library
    "futex_waitv": Place.LOCK,
    "semop": Place.LOCK,
    "semtimedop": Place.LOCK,
    "flock": Place.LOCK,
    "fcntl": Place.LOCK,  # of its commands only those that lock a file wait
    "nanosleep": Place.SLEEP,
    "clock_nanosleep": Place.SLEEP,
    "wait4": Place.SUBPROCESS,
    "waitid": Place.SUBPROCESS,
    "open": Place.FILESYSTEM,
    "openat": Place.FILESYSTEM,
    "stat": Place.FILESYSTEM,
    "newfstatat": Place.FILESYSTEM,
    "fstatat": Place.FILESYSTEM,
    "statx": Place.FILESYSTEM,
    "fsync": Place.FILESYSTEM,
    "fdatasync": Place.FILESYSTEM,
    "getdents64": Place.FILESYSTEM,
    "connect": Place.NETWORK,
    "accept": Place.NETWORK,
    "accept4": Place.NETWORK,
    "recvfrom": Place.NETWORK,
    "recvmsg": Place.NETWORK,
    "sendto": Place.NETWORK,
    "sendmsg": Place.NETWORK,
}
"""Name of a system call -> what it waits for."""
