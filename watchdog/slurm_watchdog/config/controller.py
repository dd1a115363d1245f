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
    """Address of the page for browsers; empty = none."""
    user_listen: AddressOrNone = ""
    """Address at which users on other machines ask about their jobs, with MUNGE, such as 10.0.0.1:9768; empty =
    none."""
    socket: str = "/run/slurm-watchdog/controller.sock"
    """Local socket of the commands."""
    socket_group: str = "slurm-watchdog-users"
    """The group whose members may use the commands; empty = the controller's own."""
    state_directory: str = "/var/lib/slurm-watchdog"
    """Directory of the journal: on a local disk."""
    journal_url: str = ""
    """SQLAlchemy address of the journal; empty = SQLite in `state_directory`."""
    tick: Span = 1.0
    """Time between two judgements."""
    agent_silent_after: Span = 40.0
    """After this time without a report, what a node's processes do counts as unknown."""
    warm_up: Seconds = 60.0
    """For this time after a start or a stall the controller only observes."""
    evidence_keep: Span = 2592000.0
    """Stacks, sockets and last lines are kept this long; incidents and decisions stay."""
    evidence_per_day: Bytes = 2 * 1024**3
    """At most this much evidence is kept of one day; what is more is judged and not kept."""

    def problems(self) -> Iterator[str]:
        if self.journal_url and "://" not in self.journal_url:
            wanted = "must be an SQLAlchemy URL, such as postgresql+psycopg://watchdog@db1/watchdog, or empty"
            yield f"journal_url: {wanted}"  # not what it is: a password may be in it


class Slurm(Section, frozen=True):
    """How the controller talks to Slurm."""

    client: Literal["auto", "pyslurm", "command_line"] = "auto"
    """Who lists jobs and nodes: pyslurm, or squeue and sinfo; auto = pyslurm where it is installed and starts."""
    pyslurm_python: str = ""
    """The interpreter that has pyslurm, such as /usr/bin/python3; empty = the watchdog's own."""
    bin_directory: str = ""
    """Where squeue and scontrol are; empty = PATH."""
    token_file: str = ""
    """File with the token SLURM_JWT, read for each command; empty = the environment's."""
    slurmd_port: Annotated[int, Meta(ge=1, le=65535)] = 6818
    """SlurmdPort of slurm.conf: where a node is asked whether its machine is still there."""
    poll_interval: Span = 10.0
    """Time between two listings of jobs and nodes."""
    deadline: Span = 20.0
    """An answer that takes longer counts as unknown, never as empty."""
