"""Which of some hosts are gone: `main` prints their nodes, one a line. A process of its own, for a resolver may hang.
Standard library only."""

from __future__ import annotations

import errno
import os
import socket
import threading

ANSWER_S = 2.0  # For a connection within one cluster.
DEADLINE_S = 3.0  # For all, which are asked side by side.
MOST = 64  # Hosts that are asked: of more that are missing at once these tell enough.
GONE = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
"""Other errors are of this host, or of its resolver, and say nothing of the other one."""


def is_gone(address: str, port: int) -> bool:
    """Whether nothing answers there; a port that is refused is an answer of the host's kernel."""
    try:
        number = str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return False
    try:
        with socket.create_connection((number, port), ANSWER_S):
            return False
    except TimeoutError:
        return True
    except OSError as error:
        return error.errno in GONE


def main(port: str, *pairs: str) -> None:
    """Prints the nodes whose hosts are gone, and ends the process."""
    gone: list[str] = []

    def ask(pair: str) -> None:
        node, _, address = pair.partition("=")
        if is_gone(address, int(port)):
            gone.append(node)

    threads = [threading.Thread(target=ask, args=(pair,), daemon=True) for pair in pairs[:MOST]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    os.write(1, "".join(f"{node}\n" for node in list(gone)).encode())
    os._exit(0)
