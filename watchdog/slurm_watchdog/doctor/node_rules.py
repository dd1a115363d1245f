"""What a node, or the management node, lacks. Pure: facts in, advice out. None in a fact: it could not be seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.doctor.finding import Advice, Level, Rule

NETWORK_FILESYSTEMS = frozenset({
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "panfs", "orangefs", "pvfs2",
    "afs", "9p", "fuse.sshfs",
    "glusterfs", "fuse.glusterfs", "fuse.juicefs", "daosfs", "fuse.daos", "vastnfs", "quobyte", "fuse.ceph",
    "fuse.s3fs", "fuse.gcsfuse",
})  # fmt: skip
"""A state directory there hangs with the file system that is watched."""
MIN_FREE_BYTES = 256 << 20
CERTIFICATE_DAYS = 30
CLOCK_OFFSET_S = 10.0
"""Beyond what a slow answer explains: the controller says its time in whole seconds."""
MUNGE_LIFE_S = 300.0
"""A credential's life in a munged that was not told otherwise."""
PTRACE_NOBODY, PTRACE_ADMIN = 3, 2
"""/proc/sys/kernel/yama/ptrace_scope: https://docs.kernel.org/admin-guide/LSM/Yama.html"""


class NodeFacts(Struct, frozen=True, kw_only=True):
    """What was read on this node."""

    node: str = ""
    service: str = "agent"
    """`agent` on a compute node, `controller` on the management node."""
    root: bool = True
    """Whether the one who looked is root, or may trace any process."""
    unit_state: str | None = None
    """Of its systemd unit: active, inactive, failed; None without systemd."""
    first_start: bool = False
    """The service is installed, and was neither started nor enabled yet: what a start makes is not missing."""
    py_spy: str | None = None
    """Its version."""
    ptrace_scope: int | None = None
    """None: the kernel has no Yama, and does not restrict."""
    hidepid: bool = False
    """/proc is mounted so that users don't see each other's processes."""
    kernel_log: str | None = None
    """Why it can't be read; None: it can."""
    gpu_devices: int = 0
    nvml: str | None = None
    """Why NVML does not answer; None: it does, or there are no GPUs."""
    nvml_gpus: int | None = None
    has_munge: bool = True
    munge_works: bool | None = None
    state_directory: str = ""
    state_filesystem: str | None = None
    state_problem: str | None = None
    """Why it can't be written."""
    state_free_bytes: int | None = None
    slurm_commands: bool = True
    node_known: bool | None = None
    """Whether Slurm has a node of this name."""
    controller_url: str | None = None
    """As configured; empty: not set; None: not read."""
    controller_problem: str | None = None
    """Why the controller does not answer; None: it does, or it was not asked."""
    standby_problem: str | None = None
    """The first of the other controllers that does not answer, and why."""
    helper_problem: str | None = None
    """Why the agent's helper can't be reached; None: it can, or is not wanted."""
    identity: str = "munge"
    """How nodes and controller prove who they are: `tls` or `munge`."""
    certificate: str = ""
    """Path of the service's own certificate, where there should be one."""
    certificate_problem: str | None = None
    """Why it, its key or the authority's can't be used."""
    certificate_days: int | None = None
    """Days until it, or the authority's, ends."""
    clock_offset_s: float | None = None
    """This node's clock minus the controller's."""
    open_secret: str | None = None
    """A file of `notify` with a secret that others may read, and its mode."""


RENEW = "copy a new certificate and its key to security.tls_directory (docs/authentication.md has openssl lines)"


def _rows(f: NodeFacts) -> tuple[tuple[object, Advice], ...]:
    """(whether it holds here, what it says)."""
    agent, offset_s, scope = f.service == "agent", f.clock_offset_s or 0.0, f.ptrace_scope or 0
    state_level = Level.WARNING if agent else Level.CRITICAL
    clock_level = Level.CRITICAL if f.identity == "munge" and abs(offset_s) > MUNGE_LIFE_S else Level.WARNING
    days = f.certificate_days if f.certificate_problem is None else None
    cannot_trace = agent and (scope >= PTRACE_NOBODY or (scope == PTRACE_ADMIN and not f.root))
    return (
        (f.first_start, Advice("service", Level.HINT, f"The {f.service} is installed, and was not started yet.",
          f"slurm-watchdog-{f.service}.service is {f.unit_state} and not enabled",
          f"systemctl enable --now slurm-watchdog-{f.service}")),
        (not f.first_start and f.unit_state not in (None, "active", "activating"), Advice("service", Level.CRITICAL,
          f"The {f.service} does not run here: nothing is watched.",
          f"slurm-watchdog-{f.service}.service is {f.unit_state}",
          f"systemctl enable --now slurm-watchdog-{f.service}")),
        (agent and not f.first_start and f.helper_problem is not None, Advice("helper", Level.CRITICAL,
          "The agent's helper can't be reached: without it the agent, which has no rights, sees no stacks, no logs and "
          "no descriptors of users.", f"{f.helper_problem}", "systemctl enable --now slurm-watchdog-helper.socket")),
        (agent and f.controller_url == "", Advice("controller", Level.HINT if f.first_start else Level.CRITICAL,
          "The agent is not told where its controller is, and does not start: this node is not watched.",
          "agent.controller_url is not set",
          "agent: {controller_url: http://MANAGEMENT_NODE:9765}  # https:// with certificates")),
        (f.controller_problem is not None, Advice("controller", Level.CRITICAL,
          "The controller can't be reached from here: this node is not watched.",
          f"{f.controller_url}: {f.controller_problem}",
          "agent: {controller_url: …}; check the firewall, and that controller.listen is not 127.0.0.1")),
        (f.standby_problem is not None, Advice("standby", Level.WARNING,
          "A further controller can't be reached from here: while it is the active one, this node is not watched.",
          f"{f.standby_problem}", "agent: {standby_urls: […]}; check the firewall, and that it runs")),
        (f.certificate_problem is not None, Advice("certificate", Level.CRITICAL,
          f"The {f.service} can't prove who it is: agents and controller refuse each other.",
          f"{f.certificate_problem}", RENEW)),
        (days is not None and days < 0, Advice("certificate_end", Level.CRITICAL,
          "The certificate has ended: agents and controller refuse each other.",
          f"{f.certificate}, {-(days or 0)} days ago", RENEW)),
        (days is not None and 0 <= days < CERTIFICATE_DAYS, Advice("certificate_end", Level.WARNING,
          "The certificate ends soon: then agents and controller refuse each other.",
          f"{f.certificate}, in {days} days", RENEW)),
        (f.open_secret is not None, Advice("open_secret", Level.WARNING,
          "Others than the controller's user can read or change a secret of the notifications, and write in its name.",
          f"{f.open_secret}", "chmod 600 FILE; then change the secret, which others may know")),
        (abs(offset_s) > CLOCK_OFFSET_S, Advice("clock_offset", clock_level,
          "The clock here and the controller's differ: dates of this node's log lines are wrong, and MUNGE refuses at "
          "5 minutes.", f"{abs(offset_s):.0f} s "
          f"{'ahead of' if offset_s > 0 else 'behind'} the controller's",
          "systemctl enable --now chronyd  # or systemd-timesyncd, on both")),
        (agent and f.gpu_devices and f.nvml is not None, Advice("nvml", Level.CRITICAL,
          "There are GPUs and NVML does not answer: no clock, no fault, no process of a GPU is seen.",
          f"{f.gpu_devices} devices in /dev; {f.nvml}", "nvidia-smi; dmesg | grep NVRM")),
        (agent and f.nvml is None and f.nvml_gpus is not None and f.nvml_gpus < f.gpu_devices,
          Advice("nvml", Level.CRITICAL,
          "A GPU is there and NVML does not list it: it may have fallen off the bus.",
          f"{f.gpu_devices} devices in /dev, {f.nvml_gpus} by NVML", "dmesg | grep -i xid; lspci -d 10de:")),
        (f.state_directory and not f.first_start and f.state_problem is not None, Advice("state_directory", state_level,
          f"The {f.service} can't keep its state.", f"{f.state_directory}: {f.state_problem}",
          f"install -d -m 750 {f.state_directory}  # owned by the service's user")),
        (f.state_directory and f.state_filesystem in NETWORK_FILESYSTEMS, Advice("state_local", state_level,
          "The state lies on a network file system: it hangs when that hangs, just when it is needed.",
          f"{f.state_directory} is on {f.state_filesystem}",
          f"{f.service}: {{state_directory: a directory on a local disk}}")),
        (f.state_directory and f.state_free_bytes is not None and f.state_free_bytes < MIN_FREE_BYTES,
          Advice("state_space", state_level,
          "The disk of the state is nearly full: nothing can be written down, so nothing will be done.",
          f"{(f.state_free_bytes or 0) >> 20} MiB free at {f.state_directory}", "make room there")),
        (not f.slurm_commands, Advice("slurm_commands", Level.HINT if agent else Level.CRITICAL,
          "Slurm's commands are not there.", "scontrol is not on PATH", "slurm: {bin_directory: where they are}")),
        (agent and f.node_known is False, Advice("node_name", Level.CRITICAL,
          "Slurm has no node of this name: reports of this agent are refused.", f"scontrol show node {f.node}",
          "agent: {node_name: as Slurm has it}  # or SLURMD_NODENAME")),
        (not f.has_munge and f.identity == "munge", Advice("munge", Level.CRITICAL,
          "There is no MUNGE here, and the configuration wants it: agents and controller refuse each other.",
          "security.mode is munge, or auto without tls_directory; no munge on PATH",
          "install munge, with the cluster's key; or security: {tls_directory: …}")),
        # A command of Slurm's that was answered had a credential: then munged listens elsewhere than we asked
        # (AuthInfo=socket=).
        (f.munge_works is False and (f.node_known is None or f.identity == "munge"), Advice("munge", Level.CRITICAL,
          "MUNGE makes no credential: Slurm's commands will be refused here.", "munge -n failed",
          "systemctl status munge; is the clock right, and the key that of the cluster?")),
        (agent and f.py_spy is None, Advice("py_spy", Level.WARNING,
          "There is no py-spy: a hang can't be shown as stacks, and nobody can be named.",
          "neither beside this Python nor on PATH", "pip install py-spy")),
        (cannot_trace, Advice("ptrace_scope", Level.WARNING,
          f"The kernel lets nobody {'' if scope >= PTRACE_NOBODY else 'but root '}look into "
          "a process: there will be no stacks.", f"/proc/sys/kernel/yama/ptrace_scope is {f.ptrace_scope}",
          "sysctl -w kernel.yama.ptrace_scope=1  # 3 lasts until a reboot")),
        (agent and f.hidepid and not f.root, Advice("hidepid", Level.WARNING,
          "Only your own processes can be seen: ranks of other users are missing.", "/proc is mounted with hidepid",
          "let the helper run (slurm-watchdog-helper.service), or mount /proc with gid= of the agent's group")),
        (agent and f.kernel_log is not None, Advice("kernel_log", Level.WARNING,
          "The kernel's log can't be read: faults of GPUs and file systems go unseen.", f"{f.kernel_log}",
          "ls -l /dev/kmsg; the helper opens it for the agent, and needs CAP_SYSLOG (its unit has it)")),
    )  # fmt: skip


RULE_NAMES = tuple(dict.fromkeys(advice.rule for _, advice in _rows(NodeFacts())))
"""What `doctor --only` may name."""


def misspelt(names: Iterable[str]) -> Advice | None:
    """The finding about names of findings that do not exist: waiting for them in vain looks like health."""
    unknown = [name for name in names if name not in RULE_NAMES]
    if not unknown:
        return None
    return Advice(
        "only", Level.UNKNOWN, "Findings are asked for that do not exist, so nothing can be found.",
        f"--only {','.join(unknown)}", f"of: {' '.join(RULE_NAMES)}",
    )  # fmt: skip


def _on_this_node(facts: NodeFacts) -> Iterator[Advice]:
    """What all rows say, each with the node that it is about."""
    yield from (replace(advice, where=facts.node) for holds, advice in _rows(facts) if holds)


NODE_RULES: tuple[Rule[NodeFacts], ...] = (_on_this_node,)
