"""A filesystem in user space with one directory and one file of noughts in it (`data.bin`), which can stop to
answer: `kill -STOP` it, as a dead server would.

Speaks the kernel's protocol on /dev/fuse (linux/fuse.h), with nothing but the standard library. Attributes may be kept
for an hour, as network filesystems do it in the small: while the server is silent, a plain stat is still answered.
Run as root: `python fuse_server.py MOUNT_POINT [UID]`, the user as whom it is served. It prints a line when
it is mounted, and ends when it is unmounted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys

HEADER = struct.Struct("=IIQQIIIHH")  # fuse_in_header
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS = 1, 2, 3, 14, 15, 17
RELEASE, FLUSH, INIT, OPENDIR, READDIR = 18, 25, 26, 27, 28
RELEASEDIR, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET = 29, 34, 36, 38, 42
WITHOUT_ANSWER = {FORGET, INTERRUPT, BATCH_FORGET, DESTROY}
KEPT_S = 3600
ATTRIBUTES = struct.pack("=QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
DATA, DATA_BYTES, FILE = b"data.bin", 64 << 20, 2
ATTRIBUTES_OF_FILE = struct.pack(
    "=QQQQQQIIIIIIIIII",
    FILE, DATA_BYTES, DATA_BYTES // 512, 0, 0, 0, 0, 0, 0, stat.S_IFREG | 0o644, 1, 0, 0, 0, 4096, 0,
)  # fmt: skip
READ_IN = struct.Struct("=QQI")
ANSWERS = {
    INIT: struct.pack("=IIIIHHIIHHI28x", 7, 31, 65536, 0, 16, 12, 65536, 1, 0, 0, 0),
    GETATTR: struct.pack("=QII", KEPT_S, 0, 0) + ATTRIBUTES,
    OPEN: struct.pack("=QII", 2, 0, 0),
    RELEASE: b"",
    FLUSH: b"",
    STATFS: struct.pack("=QQQQQIIII24x", 1000, 500, 500, 100, 50, 4096, 255, 4096, 0),
    OPENDIR: struct.pack("=QII", 1, 0, 0),
    READDIR: b"",
    RELEASEDIR: b"",
    ACCESS: b"",
}


def mount(point: str, uid: int = 0) -> int:
    """Mounts at `point`; returns the descriptor that the kernel's questions come from."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id={uid},group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"silent-server", point.encode(), b"fuse.silent", 0, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), point)
    return fd


def answer(operation: int, node: int, words: bytes) -> bytes | None:
    """What is said to one question; None: it is not known, or not there."""
    if operation == LOOKUP and words.rstrip(b"\0") == DATA:
        return struct.pack("=QQQQII", FILE, 0, KEPT_S, KEPT_S, 0, 0) + ATTRIBUTES_OF_FILE
    if operation == GETATTR and node == FILE:
        return struct.pack("=QII", KEPT_S, 0, 0) + ATTRIBUTES_OF_FILE
    if operation == READ:
        _, offset, size = READ_IN.unpack_from(words)
        return bytes(max(0, min(size, DATA_BYTES - offset)))
    return ANSWERS.get(operation)


def serve(fd: int) -> None:
    """Answers until the filesystem is unmounted."""
    while True:
        try:
            question = os.read(fd, 1 << 18)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            raise
        _, operation, unique, node, *_ = HEADER.unpack_from(question)
        if operation in WITHOUT_ANSWER:
            continue
        body = answer(operation, node, question[HEADER.size :])
        problem = 0 if body is not None else -(errno.ENOENT if operation == LOOKUP else errno.ENOSYS)
        body = body or b""
        os.write(fd, struct.pack("=IiQ", 16 + len(body), problem, unique) + body)


if __name__ == "__main__":
    descriptor = mount(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    serve(descriptor)
