"""The controller's end of agents' streams, by MUNGE, for servers of tests: its door with what the test answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slurm_watchdog.controller.ingest.endpoint import AgentCredentials
from slurm_watchdog.identity.munge_library import MungeLibrary
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from tests.builders.identity_door import Port, listening
from tests.munged import Munged


def credentials(munged: Munged, agents: frozenset[int] = frozenset()) -> AgentCredentials:
    """What agents prove themselves by. `agents`: whose credentials are taken, besides our own user's."""
    own = os.geteuid()
    return AgentCredentials(own, agents | {own}, MungeLibrary(munged.socket))


@contextmanager
def serving(
    munged: Munged, take: Callable[[Report], Reply], agents: frozenset[int] = frozenset(), **options: Any
) -> Iterator[Port]:
    """The port while the block runs; `take` is handed each report, and returns what is answered."""
    with listening(identity=credentials(munged, agents), take=take, **options) as port:
        yield port
