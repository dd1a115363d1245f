"""Types of configuration values: durations, sizes, addresses, sections; strict.

Durations need a unit (`5s`, `10min`, `1h30min`), sizes too (`8MiB`): a bare number is ambiguous. In Python
every duration is seconds and every size is bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)")
MAX_DURATION_S = 36_500 * 86400.0
"""A century: dates are computed with it."""
MAX_SIZE = 1 << 60
"""An EiB."""


def parse_duration(value: object) -> float:
    """Seconds of a duration such as `5s`, `250ms`, `1h30min`. Raises ValueError for anything else."""
    text = value.strip() if isinstance(value, str) else ""
    parts = _DURATION_PART.findall(text.replace(" ", ""))
    if not parts or "".join(n + u for n, u in parts) != text.replace(" ", ""):
        raise ValueError(
            f"a duration needs a number and a unit ({', '.join(_DURATION_UNITS_S)}), such as 5s or 10min; "
            f"got {shown(value)}"
        )
    seconds = sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in parts)
    if seconds > MAX_DURATION_S:
        raise ValueError(f"a duration is {format_duration(MAX_DURATION_S)} at most; got {shown(value)}")
    return seconds


def parse_size(value: object) -> int:
    """Bytes of a size such as `8MiB`. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f"a size needs a number and a unit ({', '.join(_SIZE_UNITS)}), such as 8MiB; got {shown(value)}"
        )
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if size > MAX_SIZE:
        raise ValueError(f"a size is {format_size(MAX_SIZE)} at most; got {shown(value)}")
    return int(size)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back as `seconds`."""
    for unit in ("d", "h", "min", "s"):
        if seconds >= _DURATION_UNITS_S[unit] and seconds % _DURATION_UNITS_S[unit] == 0:
            return f"{_number(seconds / _DURATION_UNITS_S[unit])}{unit}"
    return f"{_number(seconds * 1000)}ms" if 0 < seconds < 1 else f"{_number(seconds)}s"


def _number(value: float) -> str:
    """Plain decimals, never an exponent."""
    return str(int(value)) if value == int(value) else f"{value:.9f}".rstrip("0")


def format_size(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _SIZE_UNITS[unit] and size % _SIZE_UNITS[unit] == 0:
            return f"{size // _SIZE_UNITS[unit]}{unit}"
    return f"{size}B"


def shown(value: object) -> str:
    """What was given, as a sentence names it."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number with thousands of digits"


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; ("", 0) if it is none."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return "", 0
    return host.strip("[]"), int(port)


def is_url(text: str) -> bool:
    """Whether it is an address of a host, http:// or https://, whose port exists."""
    from urllib.parse import urlsplit  # only here: the agent does without it

    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that none has, half of an IPv6 address
        return False


def _mention(text: str) -> None:
    if text and not re.fullmatch(r"[UWS][A-Z0-9]{2,20}|here|channel", text):
        raise ValueError(f"must be an id (U…, W…, S…), here or channel, got {shown(text)}")


def _address(text: str) -> None:
    if split_address(text) == ("", 0):
        raise ValueError(f"must be HOST:PORT such as 127.0.0.1:9765, got {shown(text)}")


def _address_or_none(text: str) -> None:
    if text:
        _address(text)


def _path(text: str) -> None:
    if "://" in text:  # which may be a secret
        raise ValueError("must be the name of a file that holds the address, and this is an address")
    if text and not text.startswith("/"):
        raise ValueError(f"must be an absolute path such as /etc/slurm-watchdog/secret, got {shown(text)}")


def _urls(texts: tuple[str, ...]) -> None:
    for text in texts:
        if not is_url(text):
            wanted = "must begin with http:// or https:// and name a host and its port, such as http://mgmt1:9765"
            raise ValueError(f"{wanted}; got {shown(text)}")


def _link(text: str) -> None:
    if text and not (re.fullmatch(r"https?://[^\s<>|]{1,500}", text) and is_url(text)):
        raise ValueError(f"must be an address that begins with http:// or https://, got {shown(text)}")


def template_problems(template: str, *allowed: str) -> Iterator[str]:
    """What is wrong with a path that has placeholders."""
    if not template.startswith(("/", "{workdir}")):
        yield f"must be an absolute path or begin with {{workdir}}, got {shown(template)}"
    for name in re.findall(r"\{([^}]*)\}", template):
        if name not in allowed:
            known = " ".join("{" + each + "}" for each in sorted(allowed))
            yield f"unknown placeholder {{{name[:60]}}}; known: {known}"


def template(*allowed: str) -> Meta:
    """A path with these placeholders."""

    def check(text: str) -> None:
        for problem in template_problems(text, *allowed):
            raise ValueError(problem)

    return checked(check)


def key(name: str) -> Meta:
    """An option that has this name in the file."""
    return Meta(extra={"key": name})


def checked(check: Callable[[Any], None]) -> Meta:
    """A value that `check` takes; it raises ValueError with the sentence."""
    return Meta(extra={"check": check})


Seconds = Annotated[float, Meta(extra={"read": parse_duration, "write": format_duration})]
Span = Annotated[Seconds, Meta(gt=0)]
"""A duration that cannot be nothing: a clock that ticks every 0 s, or a limit that everybody is beyond."""
Bytes = Annotated[int, Meta(extra={"read": parse_size, "write": format_size})]
Percent = Annotated[float, Meta(ge=0, le=100)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
Name = Annotated[str, Meta(min_length=1)]
Globs = Annotated[tuple[Name, ...], Meta(extra={"read": _one_or_more})]
Restart = Literal["never", "hangs", "all"]
Patience = Annotated[Span, Meta(ge=30.0)]
"""Ranks are asked for their stacks from half of a limit on, twice, and agents report every 5 s."""
Mention = Annotated[str, checked(_mention)]
Urls = Annotated[tuple[str, ...], Meta(extra={"read": lambda value: _one_or_more(value or [])}), checked(_urls)]
Address = Annotated[str, checked(_address)]
AddressOrNone = Annotated[str, checked(_address_or_none)]
AbsolutePath = Annotated[str, checked(_path)]
Link = Annotated[str, checked(_link)]
JobPath = Annotated[str, template("job_id", "user", "workdir")]


class Section(Struct, frozen=True, kw_only=True):
    """A block of the file: unknown keys are errors, values are not coerced, nothing changes after loading. The
    docstring below an option is its text in config.example.yaml and docs/options.md."""

    def problems(self) -> Iterable[str]:
        """What is wrong across its options: `key: sentence` each."""
        return ()
