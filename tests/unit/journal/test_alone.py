"""One controller at a time on a journal in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_watchdog.journal.alone import Alone
from slurm_watchdog.journal.error import JournalError

HOLDER = """
import os, sys
from slurm_watchdog.journal.alone import Alone
held = Alone(sys.argv[1])
if os.fork() == 0:  # a child that outlives it, as one that hangs in the kernel would
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_second_controller_is_refused_until_the_first_has_ended_and_no_child_keeps_it_out(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'journal.sqlite'}"
    inner, outer = os.pipe()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, url], stdin=inner, stdout=subprocess.PIPE)
    os.close(inner)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(JournalError, match="Another controller has the journal"):
            Alone(url)
        holder.kill()
        holder.wait(20)
        Alone(url).close()
    finally:
        holder.kill()
        holder.stdout.close()
        os.close(outer)  # and the child ends


def test_a_journal_in_memory_is_nobody_elses() -> None:
    Alone("sqlite://").close()
