"""The sections `agent` and `security` of the configuration: the daemon on every node, and how nodes authenticate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from slurm_watchdog.config.types import AbsolutePath, Name, Seconds, Section, Span, template


class Agent(Section, frozen=True):
    """The daemon on every compute node."""

    node_name: str = "auto"
    """Slurm's name of this node; auto = SLURMD_NODENAME, otherwise the short host name."""
    interval: Span = 5.0
    """Time between two reports."""
    metrics_directory: AbsolutePath = "/run/slurm-watchdog-agent/metrics"
    """Where the agent writes its metrics for node_exporter's textfile collector: below /run, where no disk can
    hang the agent; empty = nowhere."""
    give_up_after: Seconds = 0.0
    """An agent whose controller has not answered for so long ends; 0s = never."""
    probe_deadline: Span = 10.0
    """A child that has not answered by then is reported as hung, gets no new requests and is not replaced."""
    state_directory: AbsolutePath = "/run/slurm-watchdog-agent"
    """Where an agent that ends leaves what the next one has to know: below /run, as its metrics; empty = nowhere."""
    kernel_log: AbsolutePath = "/dev/kmsg"
    """The kernel's log, read for hardware, filesystem and memory faults; empty = not read."""
    mount_probe_interval: Span = 60.0
    """Time between two probes of each filesystem that a job on this node uses."""
    mount_probe_write: tuple[str, ...] = ()
    """Mount points on which the probe also writes a small file, as the owner of a job that runs there, such as
    [/scratch]."""
    checkpoint_interval: Span = 30.0
    """Time between two looks at a job's checkpoint directories."""
    orphan_grace: Seconds = 60.0
    """Time that processes of a job that is over get to let go of their GPUs before they are reported."""
    log_patterns: tuple[Annotated[str, template("job_id", "user", "workdir", "node")], ...] = ()
    """Further logs of a job: paths with {job_id} {user} {node} {workdir} and * ? [abc], such as
    '{workdir}/logs/*.out'."""

    def problems(self) -> Iterator[str]:
        for index, mount in enumerate(self.mount_probe_write):
            if not mount.startswith("/"):
                yield f"mount_probe_write[{index}]: must be a mount point such as /scratch, got {mount!r}"


COMMANDS: Final = ("pause", "restart", "silence", "mend")
OF_NO_ACCOUNT: Final = ("pause", "mend")
"""Commands that are about no job of an account."""
PROXY_HEADER: Final = re.compile(r"(?i)(x|remote)-[a-z0-9-]{1,60}")
"""No header that browsers send of their own."""

Identity = Literal["tls", "munge"]
"""What services can be set to; `slurm-watchdog run` has a socket of its own: see slurm_watchdog.identity.transport."""


class Security(Section, frozen=True):
    """Who may speak to the controller, and which controller agents obey."""

    mode: Literal["auto", "tls", "munge"] = "auto"
    """How nodes and controller prove who they are: tls, munge or auto (docs/authentication.md); the same on all
    machines."""
    tls_directory: AbsolutePath = ""
    """Directory of ca.crt, agent.crt, agent.key, controller.crt and controller.key; they are read again when
    they change."""
    certificate_domain: str = ""
    """Removed from names in nodes' certificates before they are compared with Slurm's, such as cluster.example.org."""
    controller_user: Name = "slurm-watchdog"
    """With munge: who runs the controller, by name or number, the same on all machines."""
    agent_user: Name = "slurm-watchdog-courier"
    """With munge: who runs the agents' couriers, by name or number; root is accepted, too."""
    munge_socket: str = ""
    """Socket of munged, where it is not the usual one (AuthInfo=socket= of slurm.conf)."""
    page_token_file: str = ""
    """A file with the page's password, readable by the controller alone; required beyond the loopback address."""
    page_proxy_header: str = ""
    """The header in which the site's proxy names the user that has logged in, such as X-Remote-User; empty = no
    proxy."""
    page_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses or networks from which `page_proxy_header` is believed."""
    operators: tuple[str, ...] = ()
    """Who may see the evidence of every job, beside root and the controller's user: names, and `group:NAME`."""
    may: dict[str, tuple[str, ...]] = {}
    """Who else may pause, restart, silence or mend: {restart: [ann, 'group:ops', slurm:operator,
    slurm:coordinator]}."""
    check_node_address: bool = True
    """Accept a node's report only from the address that Slurm has for that node."""

    def asks_slurm(self) -> bool:
        """Whether someone may something for what he is in Slurm's accounting."""
        return any(name.startswith("slurm:") for names in self.may.values() for name in names)

    def problems(self) -> Iterator[str]:
        from ipaddress import ip_network  # only here: the agent does without it

        if self.page_proxy_header and not self.page_token_file:
            yield "page_proxy_header: needs a password of the page (security.page_token_file)"
        if self.page_proxy_header and not PROXY_HEADER.fullmatch(self.page_proxy_header):
            yield "page_proxy_header: a name that begins with X- or Remote-, such as X-Remote-User"
        for each in self.page_proxies:
            try:
                ip_network(each, strict=False)
            except ValueError:
                yield f"page_proxies: {each[:60]!r} is neither an address nor a network"
        for command, names in self.may.items():
            if command not in COMMANDS:
                yield f"may.{command[:60]}: is not a command with a right; known: {', '.join(COMMANDS)}"
            for name in names:
                if name.startswith("slurm:") and name not in ("slurm:operator", "slurm:coordinator"):
                    yield f"may.{command}: {name[:60]!r} is not one of slurm:operator, slurm:coordinator"
                if not name or (name == "slurm:coordinator" and command in OF_NO_ACCOUNT):
                    yield f"may.{command}: {name!r} is for what concerns jobs of an account"
        if self.mode == "tls" and not self.tls_directory:
            yield "tls_directory: required by security.mode: tls; see docs/authentication.md"
        if self.identity() == "munge" and not self.check_node_address:
            yield (
                "check_node_address: must be true with security.mode: munge, which proves the user; "
                "the address proves the node"
            )

    def identity(self) -> Identity:
        """How nodes prove who they are, `auto` resolved."""
        if self.mode != "auto":
            return self.mode
        return "tls" if self.tls_directory else "munge"
