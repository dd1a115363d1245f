"""The sections `controller` and `slurm` of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from slurm_watchdog.config.types import Bytes, Seconds, Section, Span, address_problems


class Controller(Section):
    """The daemon on the management node."""

    listen: str = Field("127.0.0.1:9765", description="Address for agents, /metrics and /healthz.")
    page_listen: str = Field(
        "127.0.0.1:9767",
        description="Address of the page for browsers (from elsewhere: ssh -L 9767:127.0.0.1:9767 HOST); empty = none.",
    )
    user_listen: str = Field(
        "",
        description="Address at which users on other machines ask about their own jobs, such as 10.0.0.1:9768; empty = "
        "none. They prove themselves by MUNGE, in every security.mode: slurm-watchdog --socket munge://HOST:9768.",
    )
    socket: str = Field(
        "/run/slurm-watchdog/controller.sock",
        description="Local socket for `slurm-watchdog status`, `restart`, `pause` and the other commands.",
    )
    socket_group: str = Field(
        "slurm-watchdog-users",
        description="The group whose members may use the commands; empty = the controller's own. Whose "
        "evidence they see: security.operators.",
    )
    state_directory: str = Field("/var/lib/slurm-watchdog", description="Directory of the journal: on a local disk.")
    journal_url: str = Field("", description="SQLAlchemy address of the journal; empty = SQLite in `state_directory`.")
    tick: Span = Field(1.0, description="Time between two judgements.")
    report_lifetime: Span = Field(30.0, description="Reports older than this are kept for the record and never judged.")
    agent_silent_after: Span = Field(
        40.0, description="After this time without a report, what a node's processes do counts as unknown."
    )
    max_reports_per_s: float = Field(
        1000.0,
        description="Reports a second of all agents together. Where there are more nodes than this times "
        "`agent.interval`, agents are asked to report less often, every 10 s at most, and so they are where a core is "
        "full all the same. A rank's end and answers to the controller come at once in any case.",
        gt=0.0,
    )
    resolve_after: Seconds = Field(10.0, description="A condition has to be gone this long before its incident closes.")
    warm_up: Seconds = Field(
        60.0, description="For this time after it has started or was stalled, the controller only observes."
    )
    evidence_spread: Span = Field(
        5.0,
        description="When an incident fires, the stacks of every rank of its job are dumped three times "
        "over this time, to tell stuck from busy; once or twice where dumps of the verdict show that already. "
        "Nothing is stopped for it.",
    )
    evidence_keep: Span = Field(
        2592000.0,
        description="Evidence (stacks, sockets, last lines) is kept in the journal this long; incidents and "
        "decisions stay.",
    )
    evidence_per_day: Bytes = Field(
        2 * 1024**3,
        description="At most this much evidence is kept of one day, packed; beyond it incidents are judged "
        "and reported without keeping their evidence. Times `evidence_keep`, this bounds the journal.",
    )
    evidence_per_user: Bytes = Field(512 * 1024**2, description="… and at most this much of the jobs of one user.")

    def problems(self) -> Iterator[str]:
        if self.journal_url and "://" not in self.journal_url:
            wanted = "must be an SQLAlchemy URL, such as postgresql+psycopg://watchdog@db1/watchdog, or empty"
            yield f"controller.journal_url: {wanted}"  # not what it is: a password may be in it
        yield from address_problems(self.listen, "controller.listen")
        if self.page_listen:
            yield from address_problems(self.page_listen, "controller.page_listen")
        if self.user_listen:
            yield from address_problems(self.user_listen, "controller.user_listen")


class Slurm(Section):
    """How the controller talks to Slurm."""

    client: Literal["auto", "pyslurm", "command_line"] = Field(
        "auto",
        description="Who lists jobs and nodes: pyslurm, which must be of the site's Slurm release and runs "
        "in a process of its own, or squeue and sinfo. auto = pyslurm where it is installed and starts. "
        "Changes always go by Slurm's commands.",
    )
    pyslurm_python: str = Field(
        "",
        description="The interpreter that has pyslurm, such as /usr/bin/python3; empty = the watchdog's own.",
    )
    bin_directory: str = Field("", description="Where squeue and scontrol are; empty = PATH.")
    token_file: str = Field(
        "",
        description="File that holds the token SLURM_JWT, read for each command, so that it can be renewed; "
        "empty = the environment's, if there is one.",
    )
    slurmd_port: int = Field(
        6818,
        description="SlurmdPort of slurm.conf: where a node is asked whether its machine is still there.",
        ge=1,
        le=65535,
    )
    poll_interval: Span = Field(10.0, description="Time between two listings of jobs and nodes.")
    deadline: Span = Field(20.0, description="An answer that takes longer counts as unknown, never as empty.")
