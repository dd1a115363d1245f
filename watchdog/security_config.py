"""The section `security` of the configuration: how nodes prove who they are, and what of it can't be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from watchdog.config_types import Section
from watchdog.identity.files import CREDENTIALS

LOOPBACK = ("127.0.0.1", "::1", "localhost")

Identity = Literal["tls", "munge", "token", "none"]


class Security(Section):
    """Who may speak to the controller."""

    mode: Literal["auto", "tls", "munge", "token", "none"] = Field(
        "auto",
        description="How nodes prove who they are; the same on all machines. tls: each node has a certificate (slurm-watchdog ca). "
        "munge: by the MUNGE that Slurm has, with nothing to set up. token: a secret that all share. none: not at all. auto = tls where "
        "tls_directory is set, else token where token_file is, else none, and that on the loopback address only.",
    )
    token_file: str = Field(
        "",
        description="A file, readable by root and the watchdog only, with a secret that agents and controller share. "
        "Required, by mode auto, unless the controller listens on the loopback address or tls_directory is set.",
    )
    tls_directory: str = Field(
        "",
        description="Where ca.crt lies, with agent.crt and agent.key on a node, controller.crt and controller.key on the management "
        "node, such as /etc/slurm-watchdog/tls. They are read again when they change. agent.controller_url then begins with https://.",
    )
    certificate_domain: str = Field(
        "",
        description="Cut off the names in nodes' certificates before they are compared with Slurm's names, such as cluster.example.org: "
        "for certificates of a site's own authority.",
    )
    controller_user: str = Field(
        "slurm-watchdog",
        min_length=1,
        description="With munge: who runs the controller, by name or number. Nobody else can read what agents prove themselves with. "
        "The number has to be the same on all machines.",
    )
    agent_user: str = Field(
        "slurm-watchdog-agent",
        min_length=1,
        description="With munge: who runs the agents, by name or number; root's are taken, too.",
    )
    munge_socket: str = Field(
        "", description="Socket of munged, where it is not the usual one (AuthInfo=socket= of slurm.conf)."
    )
    page_token_file: str = Field(
        "",
        description="A file with the password of the controller's page (any user name), readable by the controller alone. Without it the "
        "page has to stay on the loopback address and shows what everybody may see: the map, jobs, and that there are incidents.",
    )
    operators: list[str] = Field(
        [],
        description="Who may see the evidence of every job (log lines, frames, paths, variables), beside root and the controller's "
        "user: names of users, and `group:NAME`. Others see it of their own jobs; of other jobs they are told what happened, and where.",
    )
    check_node_address: bool = Field(
        True, description="Accept a node's report only from the address that Slurm has for that node."
    )

    def identity(self) -> Identity:
        """How nodes prove who they are, `auto` resolved."""
        if self.mode != "auto":
            return self.mode
        return "tls" if self.tls_directory else "token" if self.token_file else "none"


def problems_of(security: Security, listen_host: str, listen: str, url: str | None) -> list[str]:
    """What can't be, a key and a sentence each. `url` is agent.controller_url where the file names one."""
    problems = []
    mode, away = security.identity(), bool(listen_host) and listen_host not in LOOPBACK
    if away and security.mode == "auto" and mode == "none":
        problems.append(
            f"security.token_file: required because controller.listen is not the loopback address ({listen}); make one with: "
            "openssl rand -hex 32 > FILE; better, set security.mode: munge, or security.tls_directory"
        )
    if security.tls_directory and not security.tls_directory.startswith(("/", CREDENTIALS)):
        problems.append(f"security.tls_directory: must be an absolute path, got {security.tls_directory!r}")
    if mode == "tls" and not security.tls_directory:
        problems.append(
            "security.tls_directory: required by security.mode: tls; see slurm-watchdog ca --help"
        )
    if mode == "tls" and url is not None and not url.startswith("https://"):
        problems.append(
            f"agent.controller_url: must begin with https:// because of security.mode: tls, got {url!r}"
        )
    if mode == "token" and not security.token_file:
        problems.append("security.token_file: required by security.mode: token; openssl rand -hex 32 > FILE")
    if mode == "munge" and url is not None and not url.startswith("http://"):
        problems.append(
            f"agent.controller_url: must begin with http:// because of security.mode: munge, got {url!r}"
        )
    if mode == "munge" and not security.check_node_address:
        problems.append(
            "security.check_node_address: must be true with security.mode: munge, which proves the user; the address proves the node"
        )
    if mode in ("none", "munge") and security.token_file:
        problems.append(
            f"security.token_file: nobody asks for it with security.mode: {mode}; remove one of them"
        )
    return problems
