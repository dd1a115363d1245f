"""What a rank left in a file about its own end: torchelastic's error file, and what Python's faulthandler wrote. Pure;
nothing that such a file holds is executed.

torchelastic (torch/distributed/elastic/multiprocessing/errors) names the file to each rank in TORCHELASTIC_ERROR_FILE,
and writes JSON into it: `{"message": {"message": "ValueError: …", "extraInfo": {"py_callstack": …}}}`, or
`{"message": "…"}` where a signal ended the rank.
"""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.base.text import one_line

MAX_BYTES = 1 << 20  # A traceback has some KiB.
MAX_CHARS = 300
_FRAME = late_regex(r'^[ \t]*File "([^"\n]{1,500})", line (\d{1,9}),? in ([^\n]{1,200})$', re.MULTILINE)
_FATAL = late_regex(r"^Fatal Python error: ([^\n]{1,300})$", re.MULTILINE)
_CURRENT = late_regex(r"^Current thread 0x[0-9a-f]{1,16}[^\n]{0,100}most recent call first\):$", re.MULTILINE)


class _Extra(msgspec.Struct):
    py_callstack: str | None = None


class _Message(msgspec.Struct):
    message: str
    extra: _Extra | None = msgspec.field(default=None, name="extraInfo")


class _ErrorFile(msgspec.Struct):
    message: _Message | str


_decoder = msgspec.json.Decoder(_ErrorFile)


def parse_error_file(data: bytes) -> str:
    """Given torchelastic's error file: `ValueError: … (train.py:31 in step)`. Raises ValueError where it is none."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        message = _decoder.decode(data).message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not an error file of torchelastic: {error}") from None
    if isinstance(message, str):
        return _words(message, None)
    callstack = (None if message.extra is None else message.extra.py_callstack) or ""
    frames = _FRAME.findall(callstack)
    return _words(message.message, frames[-1] if frames else None)


def parse_fatal_error(data: bytes) -> str | None:
    """Given the end of what a rank wrote to its standard error: `Fatal Python error: Segmentation fault (train.py:31 in
    step)` of the last one that faulthandler wrote; None where there is none."""
    text = data.decode(errors="replace")
    last = next(reversed(list(_FATAL.finditer(text))), None)
    if last is None:
        return None
    current = _CURRENT.search(text, last.end())
    if current is None:
        return _words(last[0], None)
    its = text[current.end() :].partition("\n\n")[0]  # other threads follow, and it may have no frame of Python
    return _words(last[0], next(iter(_FRAME.findall(its)), None))


def _words(text: str, frame: tuple[str, str, str] | None) -> str:
    lines = text.strip().splitlines()
    said = one_line(mask_cut(lines[0], MAX_CHARS), MAX_CHARS) if lines else "no reason is given"
    if frame is None:
        return said
    file, line, function = frame
    return f"{said} ({one_line(file.rpartition('/')[2], 100)}:{line} in {one_line(function, 100)})"
