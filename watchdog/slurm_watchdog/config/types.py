"""Types of configuration values: durations, sizes, addresses, sections; strict.

Durations need a unit (`5s`, `10min`, `1h30min`), sizes too (`8MiB`): a bare number is ambiguous. In Python
every duration is seconds and every size is bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from slurm_watchdog.identity.secret_files import CREDENTIALS

if TYPE_CHECKING:
    from typing_extensions import Self

_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)")
MAX_DURATION_S = 36_500 * 86400.0
"""A century: dates are computed with it."""
MAX_SIZE = 1 << 60
"""An EiB."""
MAX_COUNT = 10**9


def parse_duration(value: object) -> float:
    """Seconds of a duration such as `5s`, `250ms`, `1h30min`. Raises ValueError for anything else."""
    text = value.strip() if isinstance(value, str) else ""
    parts = _DURATION_PART.findall(text.replace(" ", ""))
    if not parts or "".join(n + u for n, u in parts) != text.replace(" ", ""):
        raise ValueError(
            f"a duration needs a number and a unit ({', '.join(_DURATION_UNITS_S)}), such as 5s or 10min; got {value!r}"
        )
    seconds = sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in parts)
    if seconds > MAX_DURATION_S:
        raise ValueError(f"a duration is {format_duration(MAX_DURATION_S)} at most; got {value!r:.60}")
    return seconds


def parse_size(value: object) -> int:
    """Bytes of a size such as `8MiB`. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"a size needs a number and a unit ({', '.join(_SIZE_UNITS)}), such as 8MiB; got {value!r}")
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if size > MAX_SIZE:
        raise ValueError(f"a size is {format_size(MAX_SIZE)} at most; got {value!r:.60}")
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


Seconds = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
Span = Annotated[Seconds, Field(gt=0)]
"""A duration that cannot be nothing: a clock that ticks every 0 s, or a limit that everybody is beyond."""
Bytes = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size)]
Percent = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def read_off(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


Mode = Annotated[Literal["off", "observe", "act"], BeforeValidator(read_off)]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; ("", 0) if it is none."""
    host, separator, port = address.rpartition(":")
    if (
        not separator
        or not host
        or not (port.isascii() and port.isdigit() and len(port) <= 5)
        or not 0 < int(port) < 65536
    ):
        return "", 0
    return host.strip("[]"), int(port)


def is_url(text: str) -> bool:
    """Whether it is an address of a host, http:// or https://, whose port exists."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that none has, half of an IPv6 address
        return False


def address_problems(address: str, where: str) -> Iterator[str]:
    if split_address(address) == ("", 0):
        yield f"{where}: must be HOST:PORT such as 127.0.0.1:9765, got {address!r}"


def file_problems(file: str, where: str) -> Iterator[str]:
    """What is wrong with the name of a file that holds a secret; an empty name is fine."""
    if "://" in file:
        yield f"{where}: must be the name of a file that holds the address, and this is an address"
    elif file and not file.startswith(("/", CREDENTIALS)):
        yield f"{where}: must be an absolute path such as /etc/slurm-watchdog/secret, got {file!r}"


def refuse(problems: Iterable[str]) -> None:
    """Each a key and a sentence about it: `_explain` takes them apart again."""
    found = "\n".join(problems)
    if found:
        raise ValueError(found)


def template_problems(template: str, allowed: set[str], where: str) -> Iterator[str]:
    if not template.startswith(("/", "{workdir}")):
        yield f"{where}: must be an absolute path or begin with {{workdir}}, got {template!r}"
    for name in re.findall(r"\{([^}]*)\}", template):
        if name not in allowed:
            known = " ".join("{" + each + "}" for each in sorted(allowed))
            yield f"{where}: unknown placeholder {{{name}}}; known: {known}"


class Section(BaseModel):
    """A block of the file: unknown keys are errors, values are not coerced, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False, allow_inf_nan=False)

    def problems(self) -> Iterable[str]:
        """What is wrong across its options: a key and a sentence each."""
        return ()

    @model_validator(mode="after")
    def _checks(self) -> Self:
        refuse(self.problems())
        return self
