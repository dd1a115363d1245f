"""A certificate for each of thousands of nodes in seconds: one that openssl makes, with the name
changed and signed again.

openssl takes 40 ms for each, most of it for its start: seven minutes for ten thousand. All
nodes have the same key, which costs the controller what other keys would.
"""

from __future__ import annotations

import base64
import ctypes
import os
import socket
import ssl
import textwrap
from collections.abc import Iterable
from pathlib import Path

from slurm_watchdog.base import clock
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.identity.tls import make_context
from tests.builders.identity_files import issue, make_authority

SEQUENCE, BIT_STRING = 0x30, 0x03


def make(place: Path, names: Iterable[str]) -> None:
    """In `place`: an authority, a controller of this machine, and NAME.crt of each node. The names are equally long."""
    now = clock.wall()
    names = list(names)
    ca = make_authority(place / "ca", now)
    issue(ca, "client", "bench", now)
    made = issue(ca, "node", names[0], now)
    (place / "nodes").mkdir()
    os.link(made / "agent.key", place / "nodes" / "agent.key")
    whole = ssl.PEM_cert_to_DER_cert((made / "agent.crt").read_text())
    signed, algorithm = _first_two(whole)
    sign = Signer((place / "ca" / "ca.key").read_bytes())
    assert signed.count(names[0].encode()) == 2, "its common name and its DNS name"
    for name in names:
        body = signed.replace(names[0].encode(), name.encode())
        der = _element(SEQUENCE, body + algorithm + _element(BIT_STRING, b"\0" + sign(body)))
        text = "\n".join(textwrap.wrap(base64.b64encode(der).decode(), 64))
        (place / "nodes" / f"{name}.crt").write_text(
            f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"
        )


class Client:
    """The end of all agents. One context: a connection keeps the certificate that the context has when it begins."""

    def __init__(self, place: Path):
        first = next((place / "nodes").glob("*.crt"))
        self._nodes = place / "nodes"
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_verify_locations(place / "ca" / "ca.crt")
        self._context.load_cert_chain(first, self._nodes / "agent.key")

    def wrap(self, sock: socket.socket, name: str, *, shaken: bool = False) -> ssl.SSLSocket:
        """For the node called `name`; the handshake is still to come, unless it is `shaken`."""
        self._context.load_cert_chain(self._nodes / f"{name}.crt", self._nodes / "agent.key")
        return self._context.wrap_socket(sock, do_handshake_on_connect=shaken, server_hostname="localhost")


def reader(place: Path) -> ssl.SSLContext:
    """For who asks /healthz and /metrics."""
    folder = place / "ca" / "clients" / "bench"
    for end in ("crt", "key"):
        if not (folder / f"agent.{end}").exists():
            os.link(folder / f"client.{end}", folder / f"agent.{end}")
    return make_context(TlsFiles(str(folder), "agent"), server=False)


class Signer:
    """SHA-256 and the authority's key, by the OpenSSL that Python has loaded already."""

    def __init__(self, pem: bytes):
        self._lib = lib = ctypes.CDLL("libcrypto.so.3")
        for name in ("BIO_new_mem_buf", "PEM_read_bio_PrivateKey", "EVP_MD_CTX_new", "EVP_sha256"):
            getattr(lib, name).restype = ctypes.c_void_p
        bio = lib.BIO_new_mem_buf(pem, len(pem))
        self._key = lib.PEM_read_bio_PrivateKey(ctypes.c_void_p(bio), None, None, None)
        if not self._key:
            raise ValueError("the authority's key cannot be read")

    def __call__(self, data: bytes) -> bytes:
        """The signature. Raises ValueError."""
        lib, size = self._lib, ctypes.c_size_t(256)
        room = ctypes.create_string_buffer(size.value)
        context = ctypes.c_void_p(lib.EVP_MD_CTX_new())
        try:
            digest, key = ctypes.c_void_p(lib.EVP_sha256()), ctypes.c_void_p(self._key)
            if lib.EVP_DigestSignInit(context, None, digest, None, key) != 1:
                raise ValueError("EVP_DigestSignInit failed")
            if lib.EVP_DigestSign(context, room, ctypes.byref(size), data, ctypes.c_size_t(len(data))) != 1:
                raise ValueError("EVP_DigestSign failed")
        finally:
            lib.EVP_MD_CTX_free(context)
        return room.raw[: size.value]


def _first_two(certificate: bytes) -> tuple[bytes, bytes]:
    """(what is signed, the name of the algorithm) of a certificate, as they stand in it."""
    at, _ = _head(certificate, 0)
    _, end = _head(certificate, at)
    _, after = _head(certificate, end)
    return certificate[at:end], certificate[end:after]


def _head(data: bytes, at: int) -> tuple[int, int]:
    """(where the content begins, where it ends) of the element at `at` (X.690)."""
    size, start = data[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size, start = int.from_bytes(data[start : start + count], "big"), start + count
    return start, start + size


def _element(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content
