"""The stacks of one process as somebody dumped them, and what the text around them says of it: a value."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.evidence import ThreadStack
from slurm_watchdog.parse.stacks.headers import DumpHeader


class Dump(Struct, frozen=True, kw_only=True):
    """The stacks of one process, once, and what the text around them says of the process."""

    source: str = ""  # The file.
    at: int = 0  # Its place among the dumps of that file, from 0.
    header: DumpHeader = DumpHeader()
    pid: int = 0  # 0 if unknown.
    parent: int = 0
    command: str = ""
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None
