"""A command of an ordinary user, where the tests are root's."""

from __future__ import annotations

import os

ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000", "setpriv", "--no-new-privs")
"""User 1000 of a user namespace: no capability is left, and nothing sees root in it. For machines where the
interpreter is root's alone."""


def prefix() -> tuple[str, ...]:
    """What the command line begins with, so that it is called by an ordinary user."""
    return ORDINARY if os.geteuid() == 0 else ()
