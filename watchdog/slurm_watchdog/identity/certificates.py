"""When a certificate ends, read from its DER (X.690, RFC 5280): the standard library has no public way to ask.

The package cryptography would cost each agent 11 MiB. Only our own files are read: whether a certificate is to be
trusted is decided by OpenSSL.
"""

from __future__ import annotations

import base64
import binascii
import calendar
from typing import Final

from slurm_watchdog.identity.secret_files import IdentityError, read_text

BEGIN: Final = "-----BEGIN CERTIFICATE-----"
END: Final = "-----END CERTIFICATE-----"


def parse_end(text: str) -> float:
    """When the first certificate of a PEM file ends, in seconds since the epoch. Raises ValueError."""
    body = text.partition(BEGIN)[2].partition(END)[0]
    if not body.strip():
        raise ValueError("there is no certificate in it")
    try:
        return parse_der_end(base64.b64decode("".join(body.split()), validate=True))
    except (binascii.Error, IndexError) as error:
        raise ValueError(f"its certificate is damaged: {error}") from error


def parse_der_end(data: bytes) -> float:
    """When the certificate in `data` ends. Raises ValueError or IndexError if it is none."""
    ((_, whole),) = _parts(data)[:1]
    (_, signed) = _parts(whole)[0]
    fields = _parts(signed)
    if fields and fields[0][0] == 0xA0:  # the version, which version 1 leaves out
        fields = fields[1:]
    _, (tag, end) = _parts(fields[3][1])
    return _time(tag, end)


def read_end(path: str) -> float:
    """When the first certificate of a file ends, in seconds since the epoch. Raises IdentityError."""
    try:
        return parse_end(read_text(path))
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
