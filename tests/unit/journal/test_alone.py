"""One controller at a time on a journal in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.lease import Alone

HOLDER = """
import os, sys
from slurm_watchdog.journal.lease import Alone
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give a file away")
def test_a_journal_and_its_lock_that_root_makes_belong_to_the_owner_of_their_directory(tmp_path: Path) -> None:
    os.chown(tmp_path, 64998, 64997)
    url = f"sqlite:///{tmp_path / 'journal.sqlite'}"
    Alone(url).close()
    Journal(url).close()
    for made in tmp_path.iterdir():
        there = made.stat()
        assert (there.st_uid, there.st_gid, there.st_mode & 0o777) == (64998, 64997, 0o600), made


def test_a_lock_is_not_made_at_the_end_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        Alone(f"sqlite:///{tmp_path / 'journal.sqlite'}")
    assert not (tmp_path / "elsewhere").exists()
