"""What a certificate says about itself, read from its DER (X.690, RFC 5280): the standard library has no
public way to ask.

The package cryptography would cost each agent 11 MiB. Only the time it is good for and its names are read,
and only of our own files: whether it is to be trusted is OpenSSL's business.
"""

from __future__ import annotations

import base64
import binascii
import calendar
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from slurm_watchdog.identity.secret_files import IdentityError, read_text

BEGIN: Final = "-----BEGIN CERTIFICATE-----"
END: Final = "-----END CERTIFICATE-----"
WARN_S: Final = 30 * 86400.0
"""A certificate that expires within this time is reported: time enough for a change window."""
SUBJECT_ALT_NAME: Final = bytes((0x55, 0x1D, 0x11))
"""2.5.29.17, RFC 5280 section 4.2.1.6."""


@dataclass(frozen=True)
class Certificate:
    """One certificate; times are seconds since the epoch."""

    not_before: float
    not_after: float
    names: tuple[str, ...]
    """Its DNS names."""
    addresses: tuple[str, ...] = ()
    """Its IP addresses."""
    serial: str = ""
    """Hexadecimal, of the authority that signed it."""


def parse_pem(text: str) -> Certificate:
    """The first certificate of a PEM file. Raises ValueError."""
    body = text.partition(BEGIN)[2].partition(END)[0]
    if not body.strip():
        raise ValueError("there is no certificate in it")
    try:
        return parse_der(base64.b64decode("".join(body.split()), validate=True))
    except (binascii.Error, IndexError) as error:
        raise ValueError(f"its certificate is damaged: {error}") from error


def parse_der(data: bytes) -> Certificate:
    """The certificate in `data`. Raises ValueError or IndexError if it is none."""
    ((_, whole),) = _parts(data)[:1]
    (_, signed) = _parts(whole)[0]
    fields = _parts(signed)
    if fields and fields[0][0] == 0xA0:  # the version, which version 1 leaves out
        fields = fields[1:]
    times = [_time(tag, value) for tag, value in _parts(fields[3][1])]
    if len(times) != 2:
        raise ValueError("it has no time to be good for")
    extensions = next((value for tag, value in fields if tag == 0xA3), b"")
    names = _alternatives(extensions)
    dns = tuple(value.decode("ascii", "replace") for tag, value in names if tag == 0x82)
    addresses = tuple(str(ip_address(value)) for tag, value in names if tag == 0x87)
    return Certificate(times[0], times[1], dns, addresses, fields[0][1].hex().upper())


def read_certificate(path: str) -> Certificate:
    """The first certificate of a file. Raises IdentityError."""
    try:
        return parse_pem(read_text(path))
    except ValueError as error:
        raise IdentityError(f"{path} is no certificate: {error}") from error


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    """(tag, content) of the elements that follow each other in `data`."""
    found, at = [], 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            if not 0 < count <= 4:
                raise ValueError("a length that no certificate has")
            size, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + size > len(data):
            raise ValueError("it is cut off")
        found.append((tag, data[at : at + size]))
        at += size
    return found


def _time(tag: int, value: bytes) -> float:
    """UTCTime (YYMMDDHHMMSSZ, 1950 to 2049) or GeneralizedTime (YYYYMMDDHHMMSSZ), RFC 5280 section 4.1.2.5."""
    text = value.decode("ascii")
    if tag == 0x17:
        text = ("19" if text[:2] >= "50" else "20") + text
    digits = text.removesuffix("Z")
    if len(digits) != 14 or not digits.isdigit():
        raise ValueError(f"a time that no certificate has: {text[:40]!r}")
    parts = [int(digits[:4]), *(int(digits[at : at + 2]) for at in range(4, 14, 2))]
    return float(calendar.timegm((*parts, 0, 0, 0)))


def _alternatives(extensions: bytes) -> list[tuple[int, bytes]]:
    """(tag, value) of the subject's alternative names."""
    for _, extension in _parts(_parts(extensions)[0][1]) if extensions else ():
        inner = _parts(extension)
        if inner[0][1] == SUBJECT_ALT_NAME:
            return _parts(_parts(inner[-1][1])[0][1])
    return []
