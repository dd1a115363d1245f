"""The stacks of one process as someone dumped them, and what the text around them says of it: a value."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.evidence import Frame, ThreadStack
from slurm_watchdog.parse.stacks.headers import DumpHeader

# Where the interpreter begins to run a program.
AT_EXIT = Frame(function="_run_exitfuncs", file="atexit")
"""Who calls an exit handler: the interpreter itself, which shows no frame of its own for it."""
ROOTS = ("<module>", "_run_module_as_main", "_shutdown")
"""Where a program's own main thread begins; all else that the interpreter calls in it, it calls when the program is
over. `threading._shutdown`, which waits for other threads then, says so by its own name."""


class Dump(Struct):
    """The stacks of one process, once, and what the text around them says of the process."""

    source: str = ""  # The file.
    at: int = 0  # Its place among the dumps of that file, from 0.
    header: DumpHeader = DumpHeader()
    pid: int = 0  # 0 if unknown.
    parent: int = 0
    command: str = ""
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None
