"""What a node, or the management node, lacks. Pure: facts in, advice out. None in a fact: it could not be seen."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.doctor.finding import Advice, Level, Rule

NETWORK_FILESYSTEMS = frozenset({
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "panfs", "orangefs", "pvfs2",
    "afs", "9p", "fuse.sshfs",
    "glusterfs", "fuse.glusterfs", "fuse.juicefs", "daosfs", "fuse.daos", "vastnfs", "quobyte", "fuse.ceph",
    "fuse.s3fs", "fuse.gcsfuse",
})  # fmt: skip
"""A state directory there hangs with the file system that is watched."""
MUNGE_SAFE = (0, 5, 18)
"""Older releases leak the key to every user who may connect (CVE-2026-25506)."""
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
    munge: tuple[int, ...] | None = None
    """Version of the installed one; None: there is none."""
    munge_works: bool | None = None
    clock_synchronised: bool | None = None
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
    port: str = ""
    port_holder: str | None = None
    """What answers on our port and is not ours."""


def _advice(facts: NodeFacts, rule: str, level: Level, sentence: str, evidence: str, add: str = "") -> Advice:
    return Advice(rule=rule, level=level, sentence=sentence, evidence=evidence, add=add, where=facts.node)


def _unit(facts: NodeFacts) -> Iterator[Advice]:
    if facts.unit_state not in (None, "active", "activating"):
        unit = f"slurm-watchdog-{facts.service}"
        yield _advice(
            facts, "service", Level.CRITICAL, f"The {facts.service} does not run here: nothing is watched.",
            f"{unit}.service is {facts.unit_state}", f"systemctl enable --now {unit}",
        )  # fmt: skip


def _py_spy(facts: NodeFacts) -> Iterator[Advice]:
    if facts.service == "agent" and facts.py_spy is None:
        yield _advice(
            facts, "py_spy", Level.WARNING,
            "There is no py-spy: a hang can't be shown as stacks, and nobody can be named.",
            "neither beside this Python nor on PATH", "pip install py-spy",
        )  # fmt: skip


def _ptrace(facts: NodeFacts) -> Iterator[Advice]:
    scope = facts.ptrace_scope
    if facts.service != "agent" or scope is None:
        return
    if scope >= PTRACE_NOBODY or (scope == PTRACE_ADMIN and not facts.root):
        who = "nobody" if scope >= PTRACE_NOBODY else "nobody but root"
        yield _advice(
            facts, "ptrace_scope", Level.WARNING,
            f"The kernel lets {who} look into a process: there will be no stacks.",
            f"/proc/sys/kernel/yama/ptrace_scope is {scope}",
            "sysctl -w kernel.yama.ptrace_scope=1  # 3 lasts until a reboot",
        )  # fmt: skip


def _hidepid(facts: NodeFacts) -> Iterator[Advice]:
    if facts.service == "agent" and facts.hidepid and not facts.root:
        yield _advice(
            facts, "hidepid", Level.WARNING,
            "Only your own processes can be seen: ranks of other users are missing.",
            "/proc is mounted with hidepid",
            "let the helper run (systemctl status slurm-watchdog-helper), or mount /proc with gid= of the "
            "agent's group",
        )  # fmt: skip


def _kernel_log(facts: NodeFacts) -> Iterator[Advice]:
    if facts.service == "agent" and facts.kernel_log is not None:
        yield _advice(
            facts, "kernel_log", Level.WARNING,
            "The kernel's log can't be read: faults of GPUs and file systems go unseen.",
            facts.kernel_log,
            "ls -l /dev/kmsg; the helper opens it for the agent, and needs CAP_SYSLOG (its unit has it)",
        )  # fmt: skip


def _nvml(facts: NodeFacts) -> Iterator[Advice]:
    if facts.service != "agent" or not facts.gpu_devices:
        return
    if facts.nvml is not None:
        yield _advice(
            facts, "nvml", Level.CRITICAL,
            "There are GPUs and NVML does not answer: no clock, no fault, no process of a GPU is seen.",
            f"{facts.gpu_devices} devices in /dev; {facts.nvml}", "nvidia-smi; dmesg | grep NVRM",
        )  # fmt: skip
    elif facts.nvml_gpus is not None and facts.nvml_gpus < facts.gpu_devices:
        yield _advice(
            facts, "nvml", Level.CRITICAL,
            "A GPU is there and NVML does not list it: it may have fallen off the bus.",
            f"{facts.gpu_devices} devices in /dev, {facts.nvml_gpus} by NVML",
            "dmesg | grep -i xid; lspci -d 10de:",
        )  # fmt: skip


def _munge(facts: NodeFacts) -> Iterator[Advice]:
    if facts.munge is not None and facts.munge < MUNGE_SAFE:
        version, safe = (".".join(map(str, each)) for each in (facts.munge, MUNGE_SAFE))
        yield _advice(
            facts, "munge_version", Level.HINT,
            "This release of MUNGE may give its key away to local users (CVE-2026-25506).",
            f"munge {version}; mended in {safe}, and in distributions' updates of older ones",
            "upgrade munge, then make a new key",
        )  # fmt: skip
    if facts.munge is None and facts.identity == "munge":
        yield _advice(
            facts, "munge", Level.CRITICAL,
            "There is no MUNGE here, and the configuration wants it: agents and controller refuse each other.",
            "security.mode is munge, or auto without tls_directory; no munge on PATH",
            "install munge, with the cluster's key; or security: {tls_directory: …}",
        )  # fmt: skip
    # A command of Slurm's that was answered had a credential: then munged listens elsewhere than we asked
    # (AuthInfo=socket=).
    if facts.munge_works is False and (facts.node_known is None or facts.identity == "munge"):
        yield _advice(
            facts, "munge", Level.CRITICAL, "MUNGE makes no credential: Slurm's commands will be refused here.",
            "munge -n failed", "systemctl status munge; is the clock right, and the key that of the cluster?",
        )  # fmt: skip


def _clock(facts: NodeFacts) -> Iterator[Advice]:
    if facts.clock_synchronised is False:
        yield _advice(
            facts, "clock", Level.WARNING,
            "The clock is not synchronised: dates in logs of several nodes can't be compared, and MUNGE "
            "refuses at 5 minutes.",
            "the kernel says so (adjtimex: STA_UNSYNC)",
            "systemctl enable --now chronyd  # or systemd-timesyncd",
        )  # fmt: skip


def _state(facts: NodeFacts) -> Iterator[Advice]:
    if not facts.state_directory:
        return
    level = Level.CRITICAL if facts.service == "controller" else Level.WARNING
    if facts.state_problem is not None:
        yield _advice(
            facts, "state_directory", level, f"The {facts.service} can't keep its state.",
            f"{facts.state_directory}: {facts.state_problem}",
            f"install -d -m 750 {facts.state_directory}  # owned by the service's user",
        )  # fmt: skip
    if facts.state_filesystem in NETWORK_FILESYSTEMS:
        yield _advice(
            facts, "state_local", level,
            "The state lies on a network file system: it hangs when that hangs, just when it is needed.",
            f"{facts.state_directory} is on {facts.state_filesystem}",
            f"{facts.service}: {{state_directory: a directory on a local disk}}",
        )  # fmt: skip
    if facts.state_free_bytes is not None and facts.state_free_bytes < MIN_FREE_BYTES:
        yield _advice(
            facts, "state_space", level,
            "The disk of the state is nearly full: nothing can be written down, so nothing will be done.",
            f"{facts.state_free_bytes >> 20} MiB free at {facts.state_directory}",
            "make room there",
        )  # fmt: skip


def _helper(facts: NodeFacts) -> Iterator[Advice]:
    if facts.service == "agent" and facts.helper_problem is not None:
        yield _advice(
            facts, "helper", Level.CRITICAL,
            "The agent's helper can't be reached: without it the agent, which has no rights, sees no stacks, "
            "no logs and no descriptors of users.",
            facts.helper_problem, "systemctl enable --now slurm-watchdog-helper.socket",
        )  # fmt: skip


def _certificates(facts: NodeFacts) -> Iterator[Advice]:
    if facts.certificate_problem is not None:
        yield _advice(
            facts, "certificate", Level.CRITICAL,
            f"The {facts.service} can't prove who it is: agents and controller refuse each other.",
            facts.certificate_problem,
            "slurm-watchdog ca issue …  # on the management node; then copy the three files here",
        )  # fmt: skip
    elif facts.certificate_days is not None and facts.certificate_days < 0:
        yield _advice(
            facts, "certificate_end", Level.CRITICAL,
            "The certificate has ended: agents and controller refuse each other.",
            f"{facts.certificate}, {-facts.certificate_days} days ago",
            "slurm-watchdog ca renew  # on the management node; then copy the three files here",
        )  # fmt: skip
    elif facts.certificate_days is not None and facts.certificate_days < CERTIFICATE_DAYS:
        yield _advice(
            facts, "certificate_end", Level.WARNING,
            "The certificate ends soon: then agents and controller refuse each other.",
            f"{facts.certificate}, in {facts.certificate_days} days",
            "slurm-watchdog ca renew  # on the management node; then copy the three files here",
        )  # fmt: skip


def _clock_offset(facts: NodeFacts) -> Iterator[Advice]:
    offset = facts.clock_offset_s
    if offset is not None and abs(offset) > CLOCK_OFFSET_S:
        way = "ahead of" if offset > 0 else "behind"
        level = Level.CRITICAL if facts.identity == "munge" and abs(offset) > MUNGE_LIFE_S else Level.WARNING
        yield _advice(
            facts, "clock_offset", level,
            "The clock here and the controller's differ: dates of this node's log lines are wrong, and MUNGE "
            "refuses at 5 minutes.",
            f"{abs(offset):.0f} s {way} the controller's",
            "systemctl enable --now chronyd  # or systemd-timesyncd, on both",
        )  # fmt: skip


def _slurm(facts: NodeFacts) -> Iterator[Advice]:
    if not facts.slurm_commands:
        level = Level.CRITICAL if facts.service == "controller" else Level.HINT
        yield _advice(
            facts, "slurm_commands", level, "Slurm's commands are not there.", "scontrol is not on PATH",
            "slurm: {bin_directory: where they are}",
        )  # fmt: skip
    if facts.service == "agent" and facts.node_known is False:
        yield _advice(
            facts, "node_name", Level.CRITICAL,
            "Slurm has no node of this name: reports of this agent are refused.",
            f"scontrol show node {facts.node}", "agent: {node_name: as Slurm has it}  # or SLURMD_NODENAME",
        )  # fmt: skip


def _controller(facts: NodeFacts) -> Iterator[Advice]:
    if facts.service == "agent" and facts.controller_url == "":
        yield _advice(
            facts, "controller", Level.CRITICAL,
            "The agent is not told where its controller is, and does not start: this node is not watched.",
            "agent.controller_url is not set",
            "agent: {controller_url: http://MANAGEMENT_NODE:9765}  # https:// with certificates",
        )  # fmt: skip
    if facts.controller_problem is not None:
        yield _advice(
            facts, "controller", Level.CRITICAL,
            "The controller can't be reached from here: this node is not watched.",
            f"{facts.controller_url}: {facts.controller_problem}",
            "agent: {controller_url: …}; check the firewall, and that controller.listen is not 127.0.0.1",
        )  # fmt: skip


def _port(facts: NodeFacts) -> Iterator[Advice]:
    if facts.port_holder is not None:
        key = "agent.metrics_listen" if facts.service == "agent" else "controller.listen"
        yield _advice(
            facts, "port", Level.WARNING, f"Another program has the port of the {facts.service}.",
            f"{facts.port}: {facts.port_holder}", f"{key}: a free one",
        )  # fmt: skip


NODE_RULES: tuple[Rule[NodeFacts], ...] = (
    _unit, _helper, _controller, _certificates, _clock_offset, _nvml, _state, _slurm, _munge, _py_spy, _ptrace,
    _hidepid, _kernel_log, _clock, _port,
)  # fmt: skip
