"""The sections `controller` and `slurm` of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from slurm_watchdog.config.types import Address, AddressOrNone, Bytes, Seconds, Section, Span


class Controller(Section, frozen=True):
    """The daemon on the management node."""

    listen: Address = "127.0.0.1:9765"
    """Address for agents, /metrics and /healthz."""
    page_listen: AddressOrNone = "127.0.0.1:9767"
    """Address of the page for browsers (from elsewhere: ssh -L 9767:127.0.0.1:9767 HOST); empty = none."""
    user_listen: AddressOrNone = ""
    """Address at which users on other machines ask about their own jobs, such as 10.0.0.1:9768; empty = none.
    They prove themselves by MUNGE, in every security.mode: slurm-watchdog --socket munge://HOST:9768."""
    socket: str = "/run/slurm-watchdog/controller.sock"
    """Local socket for `slurm-watchdog status`, `restart`, `pause` and the other commands."""
    socket_group: str = "slurm-watchdog-users"
    """The group whose members may use the commands; empty = the controller's own. Whose evidence they see:
    security.operators."""
    state_directory: str = "/var/lib/slurm-watchdog"
    """Directory of the journal: on a local disk."""
    journal_url: str = ""
    """SQLAlchemy address of the journal; empty = SQLite in `state_directory`."""
    tick: Span = 1.0
    """Time between two judgements."""
    agent_silent_after: Span = 40.0
    """After this time without a report, what a node's processes do counts as unknown."""
    warm_up: Seconds = 60.0
    """For this time after it has started or was stalled, the controller only observes."""
    evidence_keep: Span = 2592000.0
    """Evidence (stacks, sockets, last lines) is kept in the journal this long; incidents and decisions stay."""
    evidence_per_day: Bytes = 2 * 1024**3
    """At most this much evidence is kept of one day, packed; beyond it incidents are judged and reported
    without keeping their evidence. Times `evidence_keep`, this bounds the journal."""

    def problems(self) -> Iterator[str]:
        if self.journal_url and "://" not in self.journal_url:
            wanted = "must be an SQLAlchemy URL, such as postgresql+psycopg://watchdog@db1/watchdog, or empty"
            yield f"journal_url: {wanted}"  # not what it is: a password may be in it


class Slurm(Section, frozen=True):
    """How the controller talks to Slurm."""

    client: Literal["auto", "pyslurm", "command_line"] = "auto"
    """Who lists jobs and nodes: pyslurm, which must be of the site's Slurm release and runs in a separate
    process, or squeue and sinfo. auto = pyslurm where it is installed and starts. Changes always go by Slurm's
    commands."""
    pyslurm_python: str = ""
    """The interpreter that has pyslurm, such as /usr/bin/python3; empty = the watchdog's own."""
    bin_directory: str = ""
    """Where squeue and scontrol are; empty = PATH."""
    token_file: str = ""
    """File that holds the token SLURM_JWT, read for each command, so that it can be renewed; empty = the
    environment's, if there is one."""
    slurmd_port: Annotated[int, Meta(ge=1, le=65535)] = 6818
    """SlurmdPort of slurm.conf: where a node is asked whether its machine is still there."""
    poll_interval: Span = 10.0
    """Time between two listings of jobs and nodes."""
    deadline: Span = 20.0
    """An answer that takes longer counts as unknown, never as empty."""
