"""Latency, bandwidth and clock difference between two nodes, over TCP of our own. Standard library only.

One node listens, the other connects; a token that only the two have comes first. Each direction is measured with
several streams at once, for a time and not for an amount: what a slow link still carries then is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

from slurm_watchdog.base import clock
from slurm_watchdog.nodetest.probes import state
from slurm_watchdog.nodetest.probes.repeat import figure

FIRST_PORT, PORTS = 20_000, 8_000
"""Below the ports that Linux hands out by itself (ip_local_port_range, from 32768); the token chooses among them."""
TRIES = 5
"""Ports that are tried one after the other, where some are taken."""
MEET_S = 20.0
"""For the other node to begin: Slurm starts both tasks within seconds of each other."""
QUIET_S = 10.0
"""Without a byte from the other node: it hangs."""
STREAMS = 4
"""Connections at once: one of Python's threads fills 20 to 40 Gb/s, four fill what a link of 100 Gb/s has."""
PIECE = 1 << 20
ROUNDS = 100
"""Exchanges of one byte in a repetition of the latency."""
LEAST = 3
SLICES, LEAST_SLICE_S = 4, 0.1
"""Of a direction: each is a repetition of its bandwidth."""
RATES = struct.Struct(f"!{SLICES}d")
CUT = struct.pack("ii", 1, 0)
"""SO_LINGER (socket(7)): to close drops what is under way, and tells the other node at once."""
IPERF_S = 2
TIME = struct.Struct("!d")


def measure_pair(asked: dict[str, Any]) -> dict[str, Any]:
    """`asked` has token, listens, address (of the listener), interface, seconds. Only the one that connects has
    figures: `pair_latency` in µs, `pair_out` and `pair_in` in Gb/s, and as a fact `clock_ahead_s`: how far the
    listener's clock is ahead of its own. Raises OSError."""
    before = state.counters()
    token = asked["token"].encode()
    with _listen(asked, token) if asked["listens"] else _connect(asked["address"], token) as control:
        control.settimeout(QUIET_S)
        found = _answer(control, asked, token) if asked["listens"] else _measure(control, asked, token)
        interface = state.interface_of(control.getsockname()[0])
    found["facts"]["interface"] = asked.get("interface") or interface
    found["facts"]["counters"] = state.risen(before, state.counters())
    return found


def _ports(token: bytes) -> range:
    first = FIRST_PORT + int(hmac.new(token, b"port", "sha256").hexdigest()[:8], 16) % PORTS
    return range(first, first + TRIES)


def _listening(address: str, ports: range) -> socket.socket:
    for port in ports:
        endpoint = socket.socket()
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            endpoint.bind((address, port))
            endpoint.listen(STREAMS + 1)
            return endpoint
        except OSError:
            endpoint.close()
    raise OSError(f"none of the ports {ports.start} to {ports.stop - 1} is free")


def _accept(endpoint: socket.socket, token: bytes, until: float) -> socket.socket:
    """The first connection that begins with the token."""
    while (left := until - clock.monotonic()) > 0:
        endpoint.settimeout(left)
        connection, _ = endpoint.accept()
        connection.settimeout(QUIET_S)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(_receive(connection, len(token)), token):
                connection.sendall(b"+")
                return connection
        connection.close()
    raise OSError("the other node did not connect")


def _listen(asked: dict[str, Any], token: bytes) -> socket.socket:
    with _listening("", _ports(token)) as endpoint:
        return _accept(endpoint, token, clock.monotonic() + MEET_S)


def _connect(address: str, token: bytes) -> socket.socket:
    """A connection to the process that answers with the token; the other node may not listen yet."""
    until, why = clock.monotonic() + MEET_S, "it does not answer"
    pause = threading.Event()
    while clock.monotonic() < until:
        for port in _ports(token):
            try:
                return _greet((address, port), token)
            except OSError as error:
                why = str(error)
        pause.wait(0.1)
    raise OSError(f"no connection to {address}: {why}")


def _greet(address: tuple[str, int], token: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=3.0)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(QUIET_S)
        connection.sendall(token)
        if _receive(connection, 1) != b"+":
            raise OSError("something else listens there")
    except OSError:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise OSError("the other node closed the connection")
        parts += part
    return parts


# -- the node that listens: it does what the other one orders, a letter each: p ping, t time, s it sends over new
# connections, r it receives over them, i iperf3, q the end


def _answer(control: socket.socket, asked: dict[str, Any], token: bytes) -> dict[str, Any]:
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server: subprocess.Popen[bytes] | None = None
    try:
        while (order := control.recv(1)) not in (b"", b"q"):
            if order == b"p":
                control.sendall(b"p")
            elif order == b"t":
                control.sendall(TIME.pack(clock.wall()))
            elif order in (b"s", b"r"):
                seconds = TIME.unpack(_receive(control, TIME.size))[0]
                streams = _offer(control, asked.get("interface") or "", token)
                if order == b"s":
                    with sending(streams, seconds) as threads:
                        for each in threads:
                            each.join(seconds + QUIET_S)
                else:
                    control.sendall(RATES.pack(*arriving(streams, seconds)))
            elif order == b"i":
                server = _iperf_server()
                control.sendall(b"y" if server else b"n")
    finally:
        if server is not None:
            server.kill()
            server.wait()
    return {"figures": {}, "facts": {}}


def _offer(control: socket.socket, interface: str, token: bytes) -> list[socket.socket]:
    """Listens for the data connections at the interface that the site names, else where the control connection is."""
    address = state.address_of(interface) if interface else control.getsockname()[0]
    with _listening(address, range(1)) as endpoint:
        control.sendall(f"{address} {endpoint.getsockname()[1]}".ljust(64).encode())
        return [_accept(endpoint, token, clock.monotonic() + QUIET_S) for _ in range(STREAMS)]


# -- the node that connects


def _measure(control: socket.socket, asked: dict[str, Any], token: bytes) -> dict[str, Any]:
    seconds = asked["seconds"]
    ahead_s, within_s = _ask_time(control)
    found, address = {"pair_latency": figure(_ping(control, seconds / 2))}, ""
    for name, order in (("pair_out", b"r"), ("pair_in", b"s")):
        control.sendall(order + TIME.pack(seconds))
        address, port = _receive(control, 64).decode().split()
        streams = [_greet((address, int(port)), token) for _ in range(STREAMS)]
        if order == b"s":
            rates = arriving(streams, seconds)
        else:
            with sending(streams, seconds):
                control.settimeout(seconds + QUIET_S)
                rates = list(RATES.unpack(_receive(control, RATES.size)))
        found[name] = figure(rates, upper=True)
    if asked.get("iperf3") and shutil.which("iperf3"):
        control.sendall(b"i")
        if _receive(control, 1) == b"y" and (rate := _iperf_client(address)) is not None:
            found["pair_iperf3"] = [rate, 0.0, 1, False]
    control.sendall(b"q")
    return {"figures": found, "facts": {"clock_ahead_s": ahead_s, "clock_within_s": within_s, "address": address}}


def _ask_time(control: socket.socket) -> tuple[float, float]:
    """(how far the other clock is ahead, and within what: half of the quickest exchange), in seconds."""
    best = (float("inf"), 0.0)
    for _ in range(10):
        began, wall = clock.monotonic(), clock.wall()
        control.sendall(b"t")
        there = TIME.unpack(_receive(control, TIME.size))[0]
        took = clock.monotonic() - began
        best = min(best, (took, there - (wall + took / 2)))
    return best[1], best[0] / 2


def _ping(control: socket.socket, seconds: float) -> list[float]:
    """µs of a byte there and back: the tenth percentile of each repetition. What a link adds, every exchange has; a
    wait for the CPU, some have."""
    found: list[float] = []
    until = clock.monotonic() + seconds
    while len(found) < LEAST or clock.monotonic() < until:
        times = []
        for _ in range(ROUNDS):
            began = clock.monotonic()
            control.sendall(b"p")
            control.recv(1)
            times.append((clock.monotonic() - began) * 1e6)
            if clock.monotonic() > until:
                break
        found.append(sorted(times)[len(times) // 10])
    return found


def arriving(streams: list[socket.socket], seconds: float) -> list[float]:
    """Gb/s that arrive by all streams together, of each slice of the time."""
    moved = [0] * len(streams)

    def receive(at: int) -> None:
        piece = bytearray(PIECE)
        while size := streams[at].recv_into(piece):
            moved[at] += size

    rates, pause = [], threading.Event()
    with _at_work(receive, streams, seconds):
        began, before = clock.monotonic(), 0
        for _ in range(SLICES):
            pause.wait(max(LEAST_SLICE_S, seconds / SLICES))
            now, arrived = clock.monotonic(), sum(moved)
            rates.append(max(1, arrived - before) * 8 / (now - began) / 1e9)
            began, before = now, arrived
    return rates


def sending(streams: list[socket.socket], seconds: float) -> contextlib.AbstractContextManager[list[threading.Thread]]:
    """Sends by all streams within the block, at most until the other node closes them."""
    piece = bytes(PIECE)

    def send(at: int) -> None:
        while True:
            streams[at].sendall(piece)

    return _at_work(send, streams, seconds)


@contextlib.contextmanager
def _at_work(
    work: Callable[[int], None], streams: list[socket.socket], seconds: float
) -> Iterator[list[threading.Thread]]:
    """A thread for each stream within the block; then the streams are cut."""

    def until_cut(at: int) -> None:
        with contextlib.suppress(OSError):
            work(at)

    threads = [threading.Thread(target=until_cut, args=(at,), daemon=True) for at in range(len(streams))]
    try:
        for stream, thread in zip(streams, threads):  # noqa: B905 - strict= is of Python 3.10
            stream.settimeout(seconds + QUIET_S)
            thread.start()
        yield threads
    finally:
        for stream, thread in zip(streams, threads):  # noqa: B905
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CUT)
                stream.shutdown(socket.SHUT_RDWR)
            thread.join(QUIET_S)
            stream.close()


def _iperf_server() -> subprocess.Popen[bytes] | None:
    program = shutil.which("iperf3")
    if program is None:
        return None
    return subprocess.Popen([program, "-s", "-1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _iperf_client(address: str) -> float | None:
    """Gb/s that iperf3 reports; None: it failed."""
    pause = threading.Event()
    pause.wait(0.5)  # its server binds its port
    command = ["iperf3", "-c", address, "-J", "-t", str(IPERF_S), "-P", str(STREAMS)]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=IPERF_S + QUIET_S, env=os.environ)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_iperf3(done.stdout.decode(errors="replace"))


def parse_iperf3(text: str) -> float | None:
    """Given what `iperf3 -J` prints: Gb/s that arrived; None: it is no result."""
    try:
        rate = float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 1e9
    except (ValueError, KeyError, TypeError):
        return None
    return rate if rate > 0 else None
