"""Where the interpreter begins to run a program, as frames show it: a value for agents and for files of dumps. Pure."""

from __future__ import annotations

from slurm_watchdog.model.evidence import Frame

AT_EXIT = Frame(function="_run_exitfuncs", file="atexit")
"""Who calls an exit handler: the interpreter itself, which shows no frame of its own for it."""
ROOTS = ("<module>", "_run_module_as_main", "_shutdown")
"""Where a program's own main thread begins; all else that the interpreter calls in it, it calls when the program is
over. `threading._shutdown`, which waits for other threads then, says so by its own name."""
