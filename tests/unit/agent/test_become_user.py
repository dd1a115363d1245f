"""Who is an ordinary user, and what is left of a child's rights once it has become one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_watchdog.agent.children.become_user import LEAST_UID, parse_min_uid
from tests import agent_place
from tests.rig.rights import AGENT_UID, CAPABILITIES, CHECKOUT, as_user


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("", 1000),
        ("# UID_MIN 5\nUID_MIN\t\t\t 1000\nSYS_UID_MIN 100\n", 1000),
        ("UID_MIN 500\n", 500),
        ("UID_MIN 0\n", 1000),
        (f"UID_MIN {LEAST_UID - 1}\n", 1000),
        ("UID_MIN many\nUID_MIN 2000", 2000),
    ],
)
def test_ordinary_users_begin_where_the_machine_says(text: str, first: int) -> None:
    assert parse_min_uid(text) == first


PROGRAM = """
import os
from slurm_watchdog.agent.children.become_user import Kind, become, capabilities, may_become_others
assert may_become_others() and os.geteuid() != 0
print(become(64983, Kind.FILES), os.getresuid() == (64983,) * 3, os.getresgid() == (64983,) * 3, capabilities(), may_become_others())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print({name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")})
for attempt in (lambda: os.setresuid(0, 0, 0), lambda: open("/etc/shadow"), lambda: os.chown("/", 0, 0)):
    try:
        attempt()
        print("done")
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(agent_place.why_impossible() is not None, reason="needs root and setpriv")
def test_a_child_of_the_agent_that_became_a_user_has_none_of_its_rights_left() -> None:
    # DAC_READ_SEARCH among them: the interpreter may lie where only root may look.
    program = f"import sys; sys.path.insert(0, {str(CHECKOUT / 'watchdog')!r})\n" + PROGRAM
    command = [sys.executable, "-c", program]
    words = as_user(AGENT_UID, (*CAPABILITIES, "dac_read_search"), command)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd="/", check=False)
    assert done.stdout.splitlines() == [
        "None True True 0 False",
        "{'CapInh': 0, 'CapPrm': 0, 'CapEff': 0, 'CapAmb': 0}",
        "PermissionError",
        "PermissionError",
        "PermissionError",
    ], done.stderr
