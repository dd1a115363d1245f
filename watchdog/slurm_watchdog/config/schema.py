"""The configuration: declared once, strict, rejected whole, never silently adjusted.

The models below are the schema, the defaults and the text of `config.example.yaml`. Durations need a unit
(`5s`, `10min`, `1h30min`), sizes too (`8MiB`): a bare number is refused, because seconds and milliseconds are
easily confused. In Python every duration is seconds and every size is bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.config.agent import Agent
from slurm_watchdog.config.controller import Controller, Slurm
from slurm_watchdog.config.detectors import Detectors, Threshold
from slurm_watchdog.config.jobs import Jobs
from slurm_watchdog.config.notify import Notify
from slurm_watchdog.config.policy import Policy
from slurm_watchdog.config.security import Security
from slurm_watchdog.config.types import AbsolutePath, Mode, Name, Seconds, Section, Span, shown, split_address
from slurm_watchdog.knowledge.site_rows import SiteText


class Ladder(Section, frozen=True):
    """How long each rung of an action may take."""

    evidence_limit: Span = 90.0
    """An action waits so long for the evidence of its job, which dies with the job; then it continues
    without."""
    kill_switch_limit: Span = 60.0
    """Timeout for writing the kill switch to all nodes of the job."""
    checkpoint_limit: Span = 1800.0
    """For a complete checkpoint after the kill switch; then the restart is given up."""
    exit_limit: Seconds = 60.0
    """For a job that has saved for the kill switch to end by itself, before it is requeued anyway."""
    signal_limit: Span = 300.0
    """For a job to save or to end after a signal; then the next rung is tried."""
    step_limit: Span = 120.0
    """For one request to Slurm, retries included."""
    mount_limit: Seconds = 86400.0
    """A restart waits so long for a stalled filesystem to answer."""
    confirm_limit: Span = 7200.0
    """For the first new step after the restart."""
    set_down_after: Seconds = 0.0
    """A requeued job that cannot start because processes of its old run cannot be killed (Slurm 25.11 and
    later): the node is set DOWN after so long, if Slurm has drained it with `Kill task failed` or its agent
    shows such a process in state D for so long, no other job runs there, and the drain budget allows; 0s =
    never."""
    term_limit: Span = 30.0
    """For a process that outlived its job on a GPU to end after SIGTERM, where it may be ended at all; then
    SIGKILL."""
    kill_limit: Span = 60.0
    """… and after SIGKILL. One that is still there is said to be unkillable."""


class Knowledge(Section, frozen=True):
    """What a site knows besides the package: signatures of its own log lines, kernel lines, Xids, frames,
    progress (docs/knowledge.md)."""

    directory: str = "/etc/slurm-watchdog/knowledge.d"
    """Directory of *.conf files with rows of your own, root's and writable by nobody else; missing = none.
    `check-config` checks them, agents and controller read them at start and at reload."""


class NodeTests(Section, frozen=True):
    """What `slurm-watchdog test-nodes` runs on nodes."""

    program: AbsolutePath = ""
    """A site's own node test, in place of the one that is shipped (deploy/node-test/node_test.py)."""
    options: tuple[str, ...] = ()
    """Words that it gets, such as [--shared=/scratch, --torch=/opt/python/bin/python3]; those of the command
    line come after them."""
    floors: dict[str, float] = {}
    """Worst values that are accepted, by the name of a figure: {cpu_all: 40000, pair_out: 80, 'mount_write
    /scratch': 500}. docs/test-nodes.md has names and units."""


class Config(Section, frozen=True):
    """slurm-watchdog: everything that can be set."""

    cluster_name: Name = "cluster"
    """Shown in messages."""
    mode: Mode = "observe"
    """off: no judgement; observe: says what it would do; act: does it. It ships observing."""
    agent: Agent = Agent()
    controller: Controller = Controller()
    slurm: Slurm = Slurm()
    security: Security = Security()
    jobs: Jobs = Jobs()
    detectors: Detectors = Detectors()
    policy: Policy = Policy()
    ladder: Ladder = Ladder()
    thresholds: tuple[Threshold, ...] = ()
    """Options of detectors that are different for some jobs; the first that matches a job holds: [{match:
    {partition: debug}, detectors: {collective_hang: {floor: 2min}}}]."""
    notify: Notify = Notify()
    knowledge: Knowledge = Knowledge()
    node_tests: NodeTests = NodeTests()
    site_texts: tuple[SiteText, ...] = ()
    """The files of `knowledge.directory`, as they were read and checked with this configuration."""
    warnings: tuple[str, ...] = ()
    """A line for each removed option that the file still has: see slurm_watchdog.config.removed."""

    def problems(self) -> Iterator[str]:
        identity, url = self.security.identity(), self.agent.controller_url
        scheme = "https://" if identity == "tls" else "http://"
        if url and not url.startswith(scheme):
            yield (
                f"agent.controller_url: must begin with {scheme} because nodes prove themselves by {identity} "
                f"(security), got {shown(url)}"
            )
        page_host, _ = split_address(self.controller.page_listen)
        if page_host and page_host not in ("127.0.0.1", "::1", "localhost") and not self.security.page_token_file:
            yield (
                "security.page_token_file: required because controller.page_listen is not the loopback address "
                f"({self.controller.page_listen}); make one with: openssl rand -hex 32 > FILE"
            )
        if self.controller.report_lifetime < 2 * self.agent.interval:
            yield "controller.report_lifetime: must be at least twice agent.interval, or reports expire on the way"
        if self.controller.agent_silent_after < 2 * self.agent.interval:
            yield "controller.agent_silent_after: must be at least twice agent.interval"
        for kind, treatment in self.policy.kinds.items():
            own = getattr(getattr(self.detectors, kind, None), "mode", None)
            if own is not None and treatment.mode is not None and own != treatment.mode:
                yield f"policy.kinds.{kind}.mode: is {treatment.mode}, and detectors.{kind}.mode is {own}; remove one"

    def mode_of(self, kind: str) -> Mode:
        """The mode that holds for incidents of `kind`: its detector's own, otherwise the top-level one."""
        block = getattr(self.detectors, kind, None)
        own: Mode | None = getattr(block, "mode", None)
        return own or self.mode
