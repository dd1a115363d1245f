"""The configuration: declared once, strict, rejected whole, never silently adjusted.

The models below are the schema, the defaults and the text of `config.example.yaml`. Durations need a unit
(`5s`, `10min`, `1h30min`), sizes too (`8MiB`): a bare number is refused, because seconds and milliseconds are
easily confused. In Python every duration is seconds and every size is bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from slurm_watchdog.config.agent import Agent, Security
from slurm_watchdog.config.controller import Controller, Jobs, Slurm
from slurm_watchdog.config.detectors import Detectors
from slurm_watchdog.config.notify import Notify
from slurm_watchdog.config.policy import Exceptions, Policy
from slurm_watchdog.config.types import (
    AbsolutePath,
    Count,
    Name,
    Patience,
    Restart,
    Seconds,
    Section,
    Span,
    Urls,
    key,
    shown,
    split_address,
)
from slurm_watchdog.knowledge.site_rows import SiteText
from slurm_watchdog.model.incidents import IncidentKind

HANGS: Final = frozenset(
    {
        IncidentKind.COLLECTIVE_HANG,
        IncidentKind.STALLED_PROGRESS,
        IncidentKind.RANK_STOPPED,
        IncidentKind.DRIVER_STALL,
        IncidentKind.WEDGED_TEARDOWN,
        IncidentKind.DEAD_RANK,
        IncidentKind.LINGERING_JOB,
    }
)
"""Kinds that mean that a job hangs, or has lost a rank and cannot end: what `restart: hangs` acts on."""


class Ladder(Section, frozen=True):
    """How long each rung of an action may take."""

    exit_limit: Seconds = 60.0
    """For a job that has saved for the kill switch to end on its own, before it is requeued anyway."""
    step_limit: Span = 120.0
    """For one request to Slurm, retries included."""
    confirm_limit: Span = 7200.0
    """For the first new step after the restart."""
    set_down_after: Seconds = 0.0
    """A node with an unkillable process of a requeued job is set DOWN after so long (docs/limits.md); 0s = never."""


class Knowledge(Section, frozen=True):
    """What a site knows besides the package (docs/knowledge.md)."""

    directory: str = "/etc/slurm-watchdog/knowledge.d"
    """Directory of *.conf files with rows of your own, writable by root alone; missing = none."""


class NodeTests(Section, frozen=True):
    """What `slurm-watchdog test-nodes` runs on nodes."""

    program: AbsolutePath = ""
    """A site's own node test, in place of deploy/node-test/node_test.py."""
    options: tuple[str, ...] = ()
    """Words that it gets, such as [--shared=/scratch]; those of the command line come after them."""
    floors: dict[str, float] = {}
    """Worst values that are accepted (docs/test-nodes.md): {cpu_all: 40000, 'mount_write /scratch': 500}."""


class Expert(Section, frozen=True):
    """All else; what is shipped is right for most sites."""

    agent: Agent = Agent()
    controller: Controller = Controller()
    slurm: Slurm = Slurm()
    security: Security = Security()
    jobs: Jobs = Jobs()
    policy: Policy = Policy()
    ladder: Ladder = Ladder()
    knowledge: Knowledge = Knowledge()
    node_tests: NodeTests = NodeTests()


class Config(Expert, frozen=True):
    """slurm-watchdog: what people set. In the file, the sections of Expert are below the key `expert`."""

    NO_OPTIONS = (*Expert.__struct_fields__, "site_texts", "warnings")

    cluster_name: Name = "cluster"
    """Shown in messages."""
    controller_urls: Annotated[Urls, key("controller")] = ()
    """The controller's address, for agents, such as http://mgmt1:9765; a list where several share one PostgreSQL."""
    restart: Restart = "never"
    """never: says what it would do; hangs: restarts jobs that hang or have lost a rank; all: acts wherever a
    ladder is."""
    restarts_per_hour: Count = 4
    """Actions on the whole cluster; at most half of them on jobs of one user, where others run any."""
    patience: Patience = 60.0
    """No job counts as hanging sooner than this after its last step, unless the hang is proven; other limits follow."""
    exceptions: Annotated[Exceptions, key("except")] = ()
    """What is different for some jobs, kinds and nodes: [{match: {partition: debug}, restart: never}]
    (docs/acting.md)."""
    notify: Notify = Notify()
    detectors: Detectors = Detectors()
    site_texts: tuple[SiteText, ...] = ()
    """The files of `knowledge.directory`, as they were read and checked with this configuration."""
    warnings: tuple[str, ...] = ()
    """A line for each option that was moved or removed and that the file still has."""

    def contradictions(self) -> Iterator[str]:
        """What is wrong across its sections: `key: sentence` each."""
        identity = self.security.identity()
        scheme = "https://" if identity == "tls" else "http://"
        for url in self.controller_urls:
            if not url.startswith(scheme):
                yield (
                    f"controller: must begin with {scheme} because nodes prove themselves by {identity} "
                    f"(expert.security), got {shown(url)}"
                )
        page_host, _ = split_address(self.controller.page_listen)
        if page_host and page_host not in ("127.0.0.1", "::1", "localhost") and not self.security.page_token_file:
            yield (
                "expert.security.page_token_file: required because expert.controller.page_listen is not the loopback "
                f"address ({self.controller.page_listen}); make one with: openssl rand -hex 32 > FILE"
            )
        interval = "expert.agent.interval"
        if self.controller.agent_silent_after < 2 * self.agent.interval:
            yield f"expert.controller.agent_silent_after: must be at least twice {interval}"

    def acts_on(self, kind: str, restart: Restart | None = None) -> bool:
        """Whether something is done about incidents of `kind`, by `restart` or by the general one."""
        restart = restart or self.restart
        return restart == "all" or (restart == "hangs" and kind in HANGS)

    @property
    def mode(self) -> str:
        """Whether anything is done by itself: `observe` or `act`."""
        return "observe" if self.restart == "never" else "act"

    @property
    def report_lifetime_s(self) -> float:
        """Older reports are kept for the record and never judged: before what they say of a node counts as unknown."""
        return max(0.75 * self.controller.agent_silent_after, 2 * self.agent.interval)
