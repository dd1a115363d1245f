"""The section `security` of the configuration: how nodes authenticate, and which combinations are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

from slurm_watchdog.config.types import AbsolutePath, Name, Section

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
    agent_user: Name = "slurm-watchdog-agent"
    """With munge: who runs the agents, by name or number; root is accepted, too."""
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
