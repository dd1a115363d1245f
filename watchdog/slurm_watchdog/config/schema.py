"""The configuration: declared once, strict, rejected whole, never silently adjusted.

The models below are the schema, the defaults and the text of `config.example.yaml`. Durations need a unit
(`5s`, `10min`, `1h30min`), sizes too (`8MiB`): a bare number is refused, because nobody can tell seconds
from milliseconds at 3 a.m. In Python every duration is seconds and every size is bytes.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, model_validator

from slurm_watchdog.config.detectors import Detectors
from slurm_watchdog.config.notify import Notify
from slurm_watchdog.config.policy import Policy
from slurm_watchdog.config.security import LOOPBACK, Security, problems_of
from slurm_watchdog.config.types import (
    Bytes,
    Mode,
    Seconds,
    Section,
    Span,
    check_template,
    refuse,
    split_address,
)
from slurm_watchdog.knowledge.site_rows import SiteText
from slurm_watchdog.model.kill_switch import problem_of_path, problem_of_prefix
from slurm_watchdog.parse.training_log.site_patterns import MAX_PATTERNS, problem_of


class Agent(Section):
    """The daemon on every compute node."""

    controller_url: str = Field(
        "",
        description="Where reports go: the controller's `listen` address, such as http://mgmt1:9765, https:// with certificates. Required "
        "on nodes: an agent without it does not start.",
    )
    node_name: str = Field(
        "auto",
        description="Slurm's name of this node; auto = SLURMD_NODENAME, otherwise the short host name.",
    )
    interval: Span = Field(5.0, description="Time between two reports.")
    metrics_listen: str = Field(
        "127.0.0.1:9766",
        description="Address of the agent's /metrics for Prometheus: the node's own, to be scraped from elsewhere; empty = none.",
    )
    spool_bytes: Bytes = Field(
        8 * 1024**2, description="Reports kept in memory while the controller is away."
    )
    spool_age: Span = Field(
        600.0, description="Reports older than this are dropped from the spool, and counted."
    )
    give_up_after: Seconds = Field(
        0.0,
        description="An agent whose controller has not answered for so long ends; 0s = never, as a service should. Agents of "
        "`slurm-watchdog attach` have 10min.",
    )
    probe_deadline: Span = Field(
        10.0,
        description="A child that has not answered by then is reported as hung; it gets no new requests and is not replaced.",
    )
    state_directory: str = Field(
        "/var/lib/slurm-watchdog-agent",
        description="Where the agent remembers how far it has read the kernel's log: on a local disk; empty = nowhere. Not the "
        "controller's directory, for a node may run both.",
    )
    kernel_log: str = Field(
        "/dev/kmsg",
        description="The kernel's log, read for GPU, filesystem, memory and network faults; empty = not read.",
    )
    helper_socket: str = Field(
        "/run/slurm-watchdog-helper/socket",
        description="Where the helper listens that does what takes rights, for an agent that has none. Not used by root, nor where "
        "there is none or this user may not write to it; empty = never.",
    )
    core_debugger: bool = Field(
        False,
        description="Has gdb read the frames out of a job's core file, as the job's owner. gdb then is a program of that user outside "
        "of the job's limits, and the user can take it over (ptrace, /proc/PID/mem). The helper needs --core-debugger as well.",
    )
    mount_probe_interval: Span = Field(
        60.0, description="Time between two probes of each filesystem that a job on this node uses."
    )
    mount_probe_write: list[str] = Field(
        [],
        description="Mount points on which the probe also writes and reads back a small file, in a directory and as the owner of "
        "a job that runs there, such as [/scratch]. Without it, it only looks, which a frozen filesystem still answers.",
    )
    checkpoint_interval: Span = Field(
        30.0, description="Time between two looks at the checkpoint directories of a job (by its batch host)."
    )
    orphan_grace: Seconds = Field(
        60.0,
        description="Time a job's processes get after its end to let go of their GPUs before they are reported.",
    )
    log_patterns: list[str] = Field(
        [],
        description="Further logs of a job to follow, besides what Slurm and its processes name: "
        "paths with {job_id} {user} {node} {workdir}; * ? and [abc] stand for names, such as {workdir}/logs/rank*.out.",
    )

    @model_validator(mode="after")
    def _checks(self) -> Agent:
        problems: list[str] = []
        if self.controller_url and urlsplit(self.controller_url).scheme not in ("http", "https"):
            problems.append(
                f"agent.controller_url: must begin with http:// or https://, got {self.controller_url!r}"
            )
        if self.metrics_listen:
            split_address(self.metrics_listen, problems, "agent.metrics_listen")
        places = {
            "state_directory": self.state_directory,
            "kernel_log": self.kernel_log,
            "helper_socket": self.helper_socket,
        }
        for name, path in places.items():
            if path and not path.startswith("/"):
                problems.append(f"agent.{name}: must be an absolute path or empty, got {path!r}")
        for index, mount in enumerate(self.mount_probe_write):
            if not mount.startswith("/"):
                problems.append(
                    f"agent.mount_probe_write[{index}]: must be a mount point such as /scratch, got {mount!r}"
                )
        for index, template in enumerate(self.log_patterns):
            check_template(
                template, {"job_id", "user", "workdir", "node"}, f"agent.log_patterns[{index}]", problems
            )
        refuse(problems)
        return self


class Controller(Section):
    """The daemon on the management node."""

    listen: str = Field("127.0.0.1:9765", description="Address for agents, /metrics and /healthz.")
    page_listen: str = Field(
        "127.0.0.1:9767",
        description="Address of the read-only page for browsers (from elsewhere: ssh -L 9767:127.0.0.1:9767 HOST); empty = none.",
    )
    socket: str = Field(
        "/run/slurm-watchdog/controller.sock",
        description="Local socket for `slurm-watchdog status`, `restart`, `pause` and the other commands.",
    )
    socket_group: str = Field(
        "slurm-watchdog-users",
        description="The group of those who may use the commands; empty = the controller's own. Whose evidence they see: security.operators.",
    )
    state_directory: str = Field(
        "/var/lib/slurm-watchdog", description="The journal lies here: on a local disk."
    )
    journal_url: str = Field(
        "", description="SQLAlchemy address of the journal; empty = SQLite in `state_directory`."
    )
    tick: Span = Field(1.0, description="Time between two judgements.")
    report_lifetime: Span = Field(
        30.0, description="Reports older than this are kept for the record and never judged."
    )
    agent_silent_after: Span = Field(
        40.0, description="After this time without a report, what a node's processes do counts as unknown."
    )
    resolve_after: Seconds = Field(
        10.0, description="A condition has to be gone this long before its incident closes."
    )
    warm_up: Seconds = Field(
        60.0, description="After its start, or its own pause, the controller only looks on."
    )
    evidence_spread: Span = Field(
        20.0,
        description="When an incident fires, the stacks of every rank of its job are dumped three times over this time, to tell "
        "stuck from busy. Nothing is stopped for it.",
    )
    evidence_keep: Span = Field(
        2592000.0,
        description="Evidence (stacks, sockets, last lines) is kept in the journal this long; incidents and decisions stay.",
    )
    evidence_per_day: Bytes = Field(
        2 * 1024**3,
        description="No more evidence than this is kept of one day, packed; beyond it incidents are judged and told, and the evidence is "
        "not kept. Times `evidence_keep`, this bounds the journal.",
    )
    evidence_per_user: Bytes = Field(512 * 1024**2, description="… and no more of the jobs of one user.")

    @model_validator(mode="after")
    def _checks(self) -> Controller:
        problems: list[str] = []
        split_address(self.listen, problems, "controller.listen")
        if self.page_listen:
            split_address(self.page_listen, problems, "controller.page_listen")
        refuse(problems)
        return self


class Slurm(Section):
    """How the controller talks to Slurm."""

    client: Literal["auto", "pyslurm", "command_line"] = Field(
        "auto",
        description="Who lists jobs and nodes: pyslurm, which must be of the site's Slurm release and runs in a process of "
        "its own, or squeue and sinfo. auto = pyslurm where it is installed and starts. Changes always go by Slurm's commands.",
    )
    pyslurm_python: str = Field(
        "",
        description="The interpreter that has pyslurm, such as /usr/bin/python3; empty = the watchdog's own.",
    )
    bin_directory: str = Field("", description="Where squeue and scontrol are; empty = PATH.")
    token_file: str = Field(
        "",
        description="File that holds the token SLURM_JWT, read for each command, so that it can be renewed; empty = the environment's, if there is one.",
    )
    poll_interval: Span = Field(10.0, description="Time between two listings of jobs and nodes.")
    deadline: Span = Field(20.0, description="An answer that takes longer counts as unknown, never as empty.")


class Jobs(Section):
    """Which jobs are watched, and what is known about them."""

    partitions: list[str] = Field([], description="Watch jobs of these partitions only; empty = all.")
    kill_switch: str = Field(
        "/run/slurm-watchdog/jobs/{job_id}.{restarts}/kill",
        description="File that the trainer looks for at every step. {job_id} {restarts} {user} {workdir}; written on "
        "every node of the job, as its owner. {job_id} is SLURM_JOB_ID, of an array element its own.",
    )
    kill_switch_prefixes: list[str] = Field(
        [],
        description="Directories on shared filesystems, such as /scratch, below which a kill switch may lie as well: `kill_switch`, or "
        "what a job's owner names (Megatron's --kill-switch-path). The node's helper takes them from this file too, if it is root's.",
    )
    checkpoint_trackers: list[str] = Field(
        [],
        description="Files that hold the step of the newest complete checkpoint, such as "
        "'{workdir}/checkpoints/latest_checkpointed_iteration.txt'. Log lines that announce a checkpoint are read anyway.",
    )
    checkpoint_directories: list[str] = Field(
        [],
        description="Where jobs keep their checkpoints, such as '{workdir}/checkpoints': Megatron, DeepSpeed, PyTorch DCP, "
        "Hugging Face and Lightning layouts are recognised. Directories that a trainer's command line names are found anyway.",
    )
    progress_patterns: list[str] = Field(
        [],
        description="Regular expressions for log lines of your own trainers, tried before those that are built in: 'it (?P<step>[0-9]+)/"
        "(?P<total>[0-9]+) L=(?P<loss>[0-9.]+) t=(?P<step_seconds>[0-9.]+)s'. Groups: step (or tokens), total, loss, step_seconds. They "
        "see a line's first 300 characters; one that may take very long on some line is refused.",
    )
    progress_files: list[str] = Field(
        [],
        description="Files that a trainer's loop itself writes to as it turns, for jobs whose log tells no step: a heartbeat file "
        "('{workdir}/heartbeat'), a TensorBoard directory ('{workdir}/runs'), a checkpoint that grows. That one is changed counts "
        "as progress. Never name a file that anything else may write, such as the log.",
    )
    opt_out_comment: str = Field(
        "watchdog=off", description="A job with these words in its --comment is watched and never touched."
    )

    @model_validator(mode="after")
    def _checks(self) -> Jobs:
        problems: list[str] = []
        check_template(
            self.kill_switch, {"job_id", "restarts", "user", "workdir"}, "jobs.kill_switch", problems
        )
        if "{job_id}" not in self.kill_switch:
            problems.append(
                "jobs.kill_switch: must contain {job_id}, or one job's switch would end another job"
            )
        for index, prefix in enumerate(self.kill_switch_prefixes):
            if (problem := problem_of_prefix(prefix, hidden=True)) is not None:
                problems.append(f"jobs.kill_switch_prefixes[{index}]: {problem}")
        if not problems and (problem := _misplaced(self.kill_switch, self.kill_switch_prefixes)):
            problems.append(f"jobs.kill_switch: {problem}")
        for index, template in enumerate(self.checkpoint_trackers):
            check_template(
                template, {"job_id", "user", "workdir"}, f"jobs.checkpoint_trackers[{index}]", problems
            )
        for index, template in enumerate(self.checkpoint_directories):
            check_template(
                template, {"job_id", "user", "workdir"}, f"jobs.checkpoint_directories[{index}]", problems
            )
        for index, template in enumerate(self.progress_files):
            check_template(template, {"job_id", "user", "workdir"}, f"jobs.progress_files[{index}]", problems)
        if len(self.progress_patterns) > MAX_PATTERNS:
            problems.append(f"jobs.progress_patterns: more than {MAX_PATTERNS} patterns")
        for index, pattern in enumerate(self.progress_patterns):
            problem = problem_of(pattern)
            if problem is not None:
                problems.append(f"jobs.progress_patterns[{index}]: {pattern[:80]!r} {problem}")
        refuse(problems)
        return self


def _misplaced(template: str, prefixes: list[str]) -> str | None:
    """Why no run's switch could lie where the template says; where a job works is only known when it runs."""
    workdir = f"{prefixes[0].rstrip('/')}/x" if prefixes else "/home/ann"
    values = {"job_id": "1", "restarts": "0", "user": "ann", "workdir": workdir}
    return problem_of_path(template.format_map(values), prefixes)


class Ladder(Section):
    """How long each rung of an action may take."""

    evidence_limit: Span = Field(
        90.0,
        description="An action waits so long for the evidence of its job, which dies with the job; then it continues without.",
    )
    kill_switch_limit: Span = Field(60.0, description="For all nodes of the job to have the kill switch.")
    checkpoint_limit: Span = Field(
        1800.0, description="For a complete checkpoint after the kill switch; then the restart is given up."
    )
    exit_limit: Seconds = Field(
        60.0,
        description="For a job that has saved for the kill switch to end by itself, before it is requeued anyway.",
    )
    signal_limit: Span = Field(
        300.0, description="For a job to save or to end after a signal; then the next rung is tried."
    )
    end_limit: Span = Field(
        300.0, description="For Slurm to end a job that was cancelled, before it is submitted again."
    )
    step_limit: Span = Field(120.0, description="For one request to Slurm, retries included.")
    mount_limit: Seconds = Field(
        86400.0, description="A restart waits so long for a stalled filesystem to answer."
    )
    confirm_limit: Span = Field(7200.0, description="For the first new step after the restart.")
    set_down_after: Seconds = Field(
        0.0,
        description="A requeued job that cannot start because processes of its old run cannot be killed (Slurm 25.11 and later): the node is set DOWN "
        "after so long, if Slurm has drained it with `Kill task failed` or its agent shows such a process in state D for so long, no other "
        "job runs there, and the drain budget allows; 0s = never.",
    )
    term_limit: Span = Field(
        30.0,
        description="For a process that outlived its job on a GPU to end after SIGTERM, where it may be ended at all; then SIGKILL.",
    )
    kill_limit: Span = Field(
        60.0, description="… and after SIGKILL. One that is still there is said to be unkillable."
    )


class Knowledge(Section):
    """What a site knows besides the package: signatures of its own log lines, kernel lines, Xids, frames,
    progress (docs/knowledge.md)."""

    directory: str = Field(
        "/etc/slurm-watchdog/knowledge.d",
        description="Directory of *.conf files with rows of your own, root's and writable by nobody else; missing = none. `check-config` "
        "checks them, agents and controller read them at start and at reload.",
    )


class Config(Section):
    """slurm-watchdog: everything that can be set."""

    cluster_name: str = Field("cluster", min_length=1, description="Shown in messages.")
    mode: Mode = Field(
        "observe",
        description="off: no judgement; observe: says what it would do; act: does it. It ships observing.",
    )
    agent: Agent = Agent()
    controller: Controller = Controller()
    slurm: Slurm = Slurm()
    security: Security = Security()
    jobs: Jobs = Jobs()
    detectors: Detectors = Detectors()
    policy: Policy = Policy()
    ladder: Ladder = Ladder()
    notify: Notify = Notify()
    knowledge: Knowledge = Knowledge()
    _site_texts: tuple[SiteText, ...] = PrivateAttr(())

    @property
    def site_texts(self) -> tuple[SiteText, ...]:
        """The files of `knowledge.directory`, as they were read and checked with this configuration."""
        return self._site_texts

    def with_site_texts(self, texts: tuple[SiteText, ...]) -> Config:
        """The same configuration with these files."""
        config = self.model_copy()
        config._site_texts = texts
        return config

    @model_validator(mode="after")
    def _checks_across_fields(self) -> Config:
        problems: list[str] = []
        problems += problems_of(self.security, self.agent.controller_url)
        page_host = (
            split_address(self.controller.page_listen, [], "controller.page_listen")[0]
            if self.controller.page_listen
            else ""
        )
        if page_host and page_host not in LOOPBACK and not self.security.page_token_file:
            problems.append(
                "security.page_token_file: required because controller.page_listen is not the loopback address "
                f"({self.controller.page_listen}); make one with: openssl rand -hex 32 > FILE"
            )
        if self.controller.report_lifetime < 2 * self.agent.interval:
            problems.append(
                "controller.report_lifetime: must be at least twice agent.interval, or reports expire on the way"
            )
        if self.controller.agent_silent_after < 2 * self.agent.interval:
            problems.append("controller.agent_silent_after: must be at least twice agent.interval")
        for kind, treatment in self.policy.kinds.items():
            own = getattr(getattr(self.detectors, kind, None), "mode", None)
            if own is not None and treatment.mode is not None and own != treatment.mode:
                problems.append(
                    f"policy.kinds.{kind}.mode: is {treatment.mode}, and detectors.{kind}.mode is {own}; remove one"
                )
        refuse(problems)
        return self

    def mode_of(self, kind: str) -> Mode:
        """The mode that holds for incidents of `kind`: its detector's own, otherwise the top-level one."""
        block = getattr(self.detectors, kind, None)
        own: Mode | None = getattr(block, "mode", None)
        return own or self.mode


# ------------------------------------------------------------------------------------------------- loading


# ------------------------------------------------------------------------------------------------- example
