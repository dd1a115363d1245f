"""Large documents of the journal as text: compressed, in letters that every database keeps."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Final

SMALL_BYTES: Final = 4096
"""What is smaller stays readable."""
MARK: Final = "zlib:"
"""No JSON document begins so."""
LEVEL: Final = 3
"""A node's three dumps of 8 ranks: 2 MiB become some 100 kB in 15 ms."""
MAX_BYTES: Final = 64 << 20


def pack(document: bytes) -> str:
    """The JSON `document` as the journal keeps it."""
    if len(document) < SMALL_BYTES:
        return document.decode()
    return MARK + base64.b64encode(zlib.compress(document, LEVEL)).decode()


def unpack(text: str) -> bytes:
    """The JSON document that `pack` was given. Raises ValueError for what is damaged."""
    if not text.startswith(MARK):
        return text.encode()
    try:
        packed = base64.b64decode(text[len(MARK) :], validate=True)
        unpacker = zlib.decompressobj()
        document = unpacker.decompress(packed, MAX_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"a packed document is damaged: {error}") from error
    if not unpacker.eof:
        raise ValueError("a packed document is cut short")
    return document
