"""How kernels and drivers write that something is wrong: one row for each way, the first that matches is taken.

`heads` are the first three characters of every line that the row can match; a row without heads is for lines that may begin with
anything, such as a program's name. `needle` is in every such line, in lower case. Head and needle are what most lines cost.
`regex` is matched from the beginning of the message, so that a program's name or a file's name inside a line can't play another
line. Its groups are the fields of slurm_watchdog.parse.kernel_log.line.KernelFact. The words of the rows are from the sources: Linux 4.18 to 6.18, NVIDIA's
open-gpu-kernel-modules 470 to 590, amdgpu, Lustre 2.10 to 2.15, libceph and ceph, mlx5 and its peers, and for drivers without
public source (GPFS, WekaFS, BeeGFS) what their users published.

Lines that hold words of users where a driver's stand are in slurm_watchdog.knowledge.kernel_user_text. `as_information`: the driver writes it at
level 6 (dev_info, pci_info); only for rows that demand the device's address, which makes a prefix longer than a program's name.

`may_exclude_node` only for hardware that certainly is broken: never for a filesystem, a program, a user, a remote end,
something corrected, nor for something that came back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_watchdog.model.observations import FaultSeverity

INFO, WARNING, ERROR, CRITICAL = (
    FaultSeverity.INFO, FaultSeverity.WARNING, FaultSeverity.ERROR, FaultSeverity.CRITICAL,
)  # fmt: skip


@dataclass(frozen=True)
class Signature:
    """One way to write one thing."""

    name: str
    heads: tuple[str, ...]
    needle: str
    regex: re.Pattern[str]
    severity: FaultSeverity
    may_exclude_node: bool = False
    consequence: bool = False
    """It follows from something else, which is to be looked for before it."""
    highest_level: int = 4
    """Of lines that may take a node away: the kernel's level (4: warning). Programs that crash write theirs as information (6)."""


PCI = r"(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
DEVICE = r"(?P<device>[\w!.:/-]+?)"
SERVER = r"(?P<server>[^\s,;]+?)"
NID = r"(?P<server>[\w.]{1,64}@(?:o2ib|tcp|gni|kfi|ptlf)\d{0,5})"
"""LNet's name of a node."""
PROCESS = r"(?P<process>.{1,64}?)"
PID = r"(?P<pid>\d+)"
HARDWARE = r"(?:\S+: )?(?:\{\d+\})?\s*\[Hardware Error\]: "
NETDEV = r"(?:[\w.-]+ )?(?:[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]:? |[\w.-]+:\s+)?(?P<device>[a-z][\w.-]{1,15})"
"""`ixgbe 0000:01:00.0 eth0`, `igb: eth0`, `eth0`."""


def _row(  # a table's row
    name: str, heads: str, needle: str, regex: str, severity: FaultSeverity, *, exclude: bool = False, consequence: bool = False,
    as_information: bool = False,
) -> Signature:  # fmt: skip
    compiled = re.compile(regex, re.IGNORECASE)
    return Signature(
        name,
        tuple(filter(None, heads.split("|"))),
        needle,
        compiled,
        severity,
        exclude,
        consequence,
        6 if as_information else 4,
    )


# fmt: off
NVIDIA: tuple[Signature, ...] = (
    # kernel_rc.c, krcReportXid; older drivers leave out `PCI:`, pid and name. What it means: slurm_watchdog.knowledge.xids
    _row("xid", "nvr", "nvrm: xid", rf"NVRM: Xid \((?:PCI:)?{PCI}(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\)(?: \w+)?: (?P<xid>\d+)\b(?:, pid='?(?P<pid>\d+)?[^,]*)?(?:, name=(?P<process>[^,]*))?(?P<rest>.*)", ERROR),
    _row("xid", "nvr", "nvrm: xid", rf"NVRM: Xid \((?:PCI:)?{PCI} (?P<gpu>GPU-[0-9a-f-]{{36}})\): (?P<xid>\d+)\b(?:, pid='?(?P<pid>\d+)?[^,]*)?(?:, name=(?P<process>[^,]*))?(?P<rest>.*)", ERROR),
    _row("sxid", "nvi", "sxid (pci", rf"nvidia-(?P<device>nvswitch\d+): SXid \(PCI:{PCI}\): (?P<sxid>\d+), (?P<rest>.*)", ERROR),
    _row("gpu_identity", "nvr", "nvrm: gpu at", rf"NVRM: GPU at (?:PCI:)?{PCI}: (?P<gpu>GPU-[0-9a-f-]{{36}})", INFO),
    _row("gpu_off_the_bus", "nvr", "fallen off the bus", rf"NVRM: (?:GPU {PCI}: |The NVIDIA GPU (?P<pci2>[0-9a-f:.]{{7,16}}) )?(?:GPU has |(?:NVRM: )?\(PCI ID: [0-9a-f:]{{1,20}}\) installed in this \w+ has (?:NVRM: )?)?fallen off the bus", CRITICAL, exclude=True),
    _row("gpu_lost", "nvr", "gpu is lost", rf"NVRM: (?:GPU {PCI}: )?GPU is lost", CRITICAL, exclude=True),
    _row("gpu_init_failed", "nvr", "rminitadapter failed", rf"NVRM: (?:GPU {PCI}: )?RmInitAdapter failed", CRITICAL, exclude=True),
    _row("gpu_init_failed", "nvr", "rm_init_adapter failed", rf"NVRM: (?:GPU {PCI}: )?rm_init_adapter failed(?:, device minor number \d+)?", CRITICAL, exclude=True),
    _row("gpu_locked", "nvr", "gpu is probably locked", r"NVRM: .*RC watchdog: GPU is probably locked", ERROR),
    _row("gpu_gsp_timeout", "nvr", "gsp timeout", rf"NVRM: (?:GPU\d* )?(?:GPU {PCI}: )?.*\bGSP Timeout\b", ERROR),
    _row("gpu_gsp_timeout", "nvr", "rate limiting gsp rpc error prints", rf"NVRM: Rate limiting GSP RPC error prints for GPU at (?:PCI:)?{PCI}", ERROR, consequence=True),
    # kernel_gsp.c: a driver may name the GPU by its number before the function
    _row("gpu_gsp_timeout", "nvr", "heartbeat timed out", r"NVRM: (?:GPU\d+ )?_kgsp\w+: (?:GSP RM )?[Hh]eartbeat timed out", ERROR),
    _row("gpu_gsp_timeout", "nvr", "rpcrecvpoll timedout", r"NVRM: (?:GPU\d+ )?_\w+: rpcRecvPoll timedout for fn \d+", ERROR, consequence=True),
    _row("gpu_gsp_timeout", "nvr", "gsp rpc timeout detected", r"NVRM: (?:GPU\d+ )?nvAssert\w+: Assertion failed: Back to back GSP RPC timeout detected", ERROR),
    _row("gpu_reset_required", "nvr", "nv_err_reset_required", r"NVRM: (?:GPU\d+ )?nvAssert\w+: Assertion failed: Reset required \[NV_ERR_RESET_REQUIRED\]", ERROR, consequence=True),
    # the first of several lines: the others have no address
    _row("gpu_identity", "nvr", "nvrm: the nvidia gpu", r"NVRM: The NVIDIA GPU (?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?: NVRM:)?(?: \(PCI ID: [0-9a-f:]{9}\))?$", INFO),
    _row("gpu_gsp_crash", "nvr", "gsp-crashcat", r"NVRM: .*GSP-CrashCat Report", ERROR),
    _row("gpu_crash_dump", "nvr", "gpu crash dump", r"NVRM: A GPU crash dump has been created", WARNING, consequence=True),
    _row("gpu_region_invalid", "nvr", "region assigned to your nvidia device is invalid", r"NVRM: This (?:PCI I/O|is a).*region assigned to your NVIDIA device is invalid", ERROR),
    _row("gpu_driver_mismatch", "nvr", "nvrm: api mismatch", r"NVRM: API mismatch:", WARNING),
    _row("gpu_probe_failed", "nvi", "failed with error", rf"nvidia {PCI}: probe with driver nvidia failed with error", ERROR),
    _row("gpu_probe_failed", "nvr", "probe routine failed", r"NVRM: The NVIDIA probe routine failed for \d+ device", ERROR),
    _row("gpu_peer_memory", "nvi", "invalid context", r"nvidia-peermem .*invalid context", WARNING),
)

AMD: tuple[Signature, ...] = (
    _row("amdgpu_lost", "amd", "lost from bus", rf"amdgpu {PCI}: (?:amdgpu: )?.*device lost from bus", CRITICAL, exclude=True),
    _row("amdgpu_uncorrectable", "amd", "uncorrectable hardware error", rf"amdgpu {PCI}: (?:amdgpu: )?.*\b[1-9]\d* (?:new )?uncorrectable hardware errors? detected in (?!total)", CRITICAL, exclude=True, as_information=True),
    _row("amdgpu_uncorrectable", "amd", "uncorrectable hardware error(", rf"amdgpu {PCI}: (?:amdgpu: )?.*uncorrectable hardware error\(.*\) detected", CRITICAL, exclude=True),
    _row("amdgpu_correctable", "amd", "correctable hardware error", rf"amdgpu {PCI}: (?:amdgpu: )?.*\b[1-9]\d* (?:new )?correctable hardware errors? detected in (?!total)", WARNING),
    _row("amdgpu_bad_pages", "amd", "bad page threshold", rf"amdgpu {PCI}: (?:amdgpu: )?.*(?:reach|exceed).*bad page threshold", CRITICAL, exclude=True),
    _row("amdgpu_reset_done", "amd", "gpu reset", rf"amdgpu {PCI}: (?:amdgpu: )?GPU reset ?(?:\(\d+\))? (?:succeeded|end with ret = 0\b)", INFO),
    _row("amdgpu_reset_failed", "amd", "gpu reset", rf"amdgpu {PCI}: (?:amdgpu: )?GPU reset ?(?:\(\d+\))? (?:failed|end with ret = -)", CRITICAL, exclude=True),
    _row("amdgpu_reset", "amd", "gpu reset begin", rf"amdgpu {PCI}: (?:amdgpu: )?GPU reset begin", ERROR, consequence=True),
    _row("amdgpu_ring_timeout", "[dr|amd|rin", "timeout, signaled seq", rf"(?:amdgpu {PCI}: )?(?:amdgpu: |\[drm:amdgpu_job_timedout(?: \[amdgpu\])?\] \*ERROR\* )?ring (?P<device>\S+) timeout, signaled seq", ERROR),
    _row("amdgpu_hang", "amd", "unrecoverable state", rf"(?:amdgpu {PCI}: )?amdgpu: .*cp might be in an unrecoverable state", ERROR),
    _row("amdgpu_hang", "amd", "fence wait loop timeout", rf"(?:amdgpu {PCI}: )?amdgpu: qcm fence wait loop timeout", ERROR),
    _row("amdgpu_hang", "amd", "queue preemption time out", rf"(?:amdgpu {PCI}: )?amdgpu: .*queue preemption time out", ERROR),
    _row("amdgpu_page_fault", "amd", "page fault (src_id", rf"amdgpu {PCI}: (?:amdgpu: )?\[\w+\] (?:no-)?retry page fault \(src_id.*?(?:for process (?P<process>.*?) pid (?P<pid>\d+) thread|$)", WARNING),
)

NETWORK_FILESYSTEMS: tuple[Signature, ...] = (
    # sunrpc/clnt.c, call_timeout: `%s: server %s not responding, still trying`; the first word is the RPC program
    _row("nfs_server_silent", "loc|mou|nfs|nlm|rpc", "not responding", rf"(?:nfs\d?|nfs_acl|lockd|nlm|rpcbind|mountd?|nfsd\w*): server {SERVER} not responding", ERROR),
    _row("nfs_server_ok", "loc|mou|nfs|nlm|rpc", ": server", rf"(?:nfs\d?|nfs_acl|lockd|nlm|rpcbind|mountd?): server {SERVER} OK", INFO),
    _row("nfs_lock_lost", "nfs", "reclaim failed", r"NFS: .*[Ll]ock reclaim failed", ERROR),
    _row("nfs_lock_lost", "nfs", "reclaim failed", r"nfs4_\w+: Lock reclaim failed", ERROR),
    _row("nfs_lock_lost", "loc", "failed to reclaim lock", rf"lockd: failed to reclaim lock for pid {PID}", ERROR),
    _row("nfs_lock_lost", "loc", "server lost", rf"lockd: server {SERVER} (?:lost|has rebooted)", WARNING),
    _row("nfs_state_error", "nfs", "on nfsv4 server", rf"NFS: state manager(?:: | ).*failed on NFSv4 server {SERVER} with error", ERROR),
    _row("nfs_state_error", "nfs", "on nfsv4 server", rf"NFS4: state manager .*failed on NFSv4 server {SERVER} with error", ERROR),
    _row("nfs_state_error", "nfs", "bad sequence-id error", rf"NFS: v4 server {SERVER}\s+returned a bad sequence-id error", WARNING),
    _row("nfs_state_error", "nfs", "state recovery failed", r"NFS\w*: .*state recovery failed", ERROR),
    _row("nfs_server_error", "nfs", "nfs: server", rf"NFS: server {SERVER} error: fileid changed", ERROR),
    _row("nfs_stale", "nfs", "stale", r"(?:NFS|nfs\w*): .*[Ss]tale (?:NFS )?file ?handle|nfs: .*ESTALE", WARNING),
    _row("nfs_rpc_error", "nfs", "rpc call returned error", r"nfs\d?: RPC call returned error", WARNING),
    _row("nfs_rpc_error", "__n|cal|nfs|rpc|xpr|xs_", "unhandled error", r"(?:xs_tcp_setup_socket|xprt\w*|NFS|nfs4\w*|__nfs4\w*|RPC|call_\w+): .*(?:connect returned )?unhandled error", WARNING),
    _row("nfs_rpc_error", "rpc", "rpcrdma: connection", rf"rpcrdma: connection to {SERVER} closed", WARNING),
    _row("lustre_evicted", "lus", "was evicted by", r"Lustre(?:Error)?: .*?This client was evicted by (?P<server>[\w.-]+)", ERROR),
    _row("lustre_connection_lost", "lus", "was lost; in progress", r"Lustre(?:Error)?: .*?Connection to (?:service )?(?P<mount>[\w.-]+?)?(?:-(?:OST|MDT)[0-9a-f]{4})?\s?(?:via nid |\(at )(?P<server>[^)\s]+)\)? was lost; in progress", ERROR),
    _row("lustre_connection_restored", "lus", "connection restored to", r"Lustre: .*?Connection restored to (?:service )?(?:(?P<mount>[\w.-]+?)?(?:-(?:OST|MDT)[0-9a-f]{4})?|[\w.]+@\w+)\s?(?:using nid |\(at )(?P<server>[^)\s]+?)\)?\.?$", INFO),
    _row("lustre_timeout", "lus", "request sent has", r"Lustre(?:Error)?: .*Request sent has (?:timed out|failed due to network error).*?(?:@(?P<server>[\w.]+@\w+)|$)", ERROR),
    _row("lustre_operation_failed", "lus", "failed", r"LustreError: .*?operation \w+ to node (?P<server>\S+) failed: rc = (?:-107|-110|-108|-19|-5|-4|-11|-16|-30)\b", ERROR),
    _row("lustre_operation_failed", "lus", "lustreerror: ", r"LustreError: .*?(?:rc|error|failed)[ =:]+-(?:107|108|110|113|5)\b", ERROR),
    _row("lustre_bug", "lus", "lbug", r"Lustre(?:Error)?: .*\bLBUG\b", CRITICAL),
    _row("lustre_bug", "lus", "lustreerror: ", r"LustreError: .*ASSERTION\(.*\) failed", CRITICAL),
    _row("lnet_error", "lne", "lneterror: ", rf"LNetError: (?:(?=.*?(?<![\w.:])(?:\d+-)?{NID}))?.*?(?:timed out|timeout|failed|error|unreachable|dead).*", WARNING),
    _row("lustre_error", "lus", "lustreerror: ", r"LustreError: (?!Skipped|.*\bmessage)", WARNING),
    _row("gpfs_deadman", "gpf|mmf", "deadman switch", r"(?:GPFS|mmfs).*[Dd]eadman [Ss]witch timer.*expired", CRITICAL),
    _row("gpfs_error", "gpf", "6027-", r"GPFS: 6027-\d+ .*(?:[Dd]isk failure|[Uu]nmount|[Ll]ost|[Ee]xpired|[Pp]anic|[Ff]ailed)", ERROR),
    _row("gpfs_error", "mmf", "lost membership in cluster", r"mmfs.*Lost membership in cluster", ERROR),
    _row("gpfs_error", "gpf|mmf|tra", "mmfs", r"(?:mmfs\w*|GPFS|mmfslinux|tracedev)(?:\[\d+\])?: (?:.*\[[EX]\]|Error=|.*(?:\bpanic|\bassert failed|lost membership|forced unmount|unmounting file system))", ERROR),
    _row("ceph_blocklisted", "cep|lib", "blocklisted", r"(?:lib)?ceph: .*\bb(?:lock|lack)listed", ERROR),
    _row("ceph_blocklisted", "cep|lib", "blacklisted", r"(?:lib)?ceph: .*\bblacklisted", ERROR),
    _row("ceph_session_lost", "lib", "session lost", r"libceph: (?:\(\S+(?: e\d+)?\): |\[\S+ \d+\]: )?(?P<server>mon\d+ (?:\(\d\))?\S+) session lost", ERROR),
    _row("ceph_session_ok", "lib", "session established", r"libceph: (?:\(\S+(?: e\d+)?\): |\[\S+ \d+\]: )?(?P<server>mon\d+ (?:\(\d\))?\S+) session established", INFO),
    _row("ceph_mds_silent", "cep", " hung", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) hung", ERROR),
    _row("ceph_caps_stale", "cep", "caps stale", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) caps stale", WARNING),
    _row("ceph_mds_ok", "cep", "came back", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) came back", INFO),
    _row("ceph_mds_ok", "cep", "caps renewed", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) caps renewed", INFO),
    _row("ceph_mds_ok", "cep", "reconnect success", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) reconnect success", INFO),
    _row("ceph_mds_ok", "cep", "recovery completed", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) recovery completed", INFO),
    _row("ceph_mds_rejected", "cep", "rejected session", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) rejected session", ERROR),
    _row("ceph_mds_rejected", "cep", "reconnect denied", r"ceph: +(?:\[\S+ \d+\]: +)?(?P<server>mds\d+) reconnect denied", ERROR),
    _row("ceph_osd_down", "lib", " down", r"libceph: (?:\(\S+(?: e\d+)?\): |\[\S+ \d+\]: )?(?P<server>osd\d+) down", WARNING),
    _row("ceph_osd_up", "lib", " up", r"libceph: (?:\(\S+(?: e\d+)?\): |\[\S+ \d+\]: )?(?P<server>osd\d+) up\b", INFO),
    _row("ceph_socket", "lib", "socket ", r"libceph: (?:\(\S+(?: e\d+)?\): |\[\S+ \d+\]: )?(?P<server>(?:osd|mon|mds)\d+ (?:\(\d\))?\S+) socket (?:closed|error)", WARNING),
    _row("cifs_server_silent", "cif", "has not responded in", r"CIFS:? (?:VFS: )?(?:\\\\(?P<server>[^\s\\]+)\S*|Server (?P<server2>\S+)) has not responded in", ERROR),
    _row("cifs_error", "cif", "send error in", r"CIFS:? (?:VFS: )?(?:\\\\(?P<server>[^\s\\]+)\S* )?Send error in \w+ = -\d+", WARNING),
    _row("afs_server_silent", "afs|kaf", "lost contact with", r"k?afs: Lost contact with (?:file|volume location) server (?P<server>[\w.:]+)", ERROR),
    _row("afs_server_ok", "afs|kaf", "is back up", r"k?afs: (?:file|volume location) server (?P<server>[\w.:]+) .*is back up", INFO),
    _row("beegfs_error", "bee", "beegfs", r"beegfs(?:\(\d+\))?: (?:(?=.*?\bbeegfs-(?:storage|meta|mgmtd) (?P<server>[\w.-]{1,100})))?.*(?:\berror\b|fail|timed? ?out|unreachable|disconnect|lost)", WARNING),
    _row("weka_frontend_down", "wek", "down", r"weka\w+: .*FEs? (?:was |is |are )?down", ERROR),
    _row("weka_error", "wek", "weka", r"weka\w+: .*(?:\berror\b|\bfail|timed? ?out|unreachable|hang|hung)", WARNING),
    _row("fuse_error", "fus", "fuse: ", r"fuse: (?:.*(?:error|fail|timed? ?out|bad )|trying to steal weird page)", WARNING),
    _row("gfs2_withdrawn", "gfs", "withdraw", r"gfs2: fsid=(?P<mount>\S+?): .*withdraw", ERROR),
    _row("iscsi_error", "con", "detected conn error", r"connection\d+:\d+: detected conn error", ERROR),
    _row("iscsi_error", "ses", "recovery timed out after", r"session\d+: session recovery timed out after", ERROR),
)

STUCK: tuple[Signature, ...] = (
    # hung_task.c; what it waits for is elsewhere: a filesystem, a lock, a device
    _row("hung_task", "inf|tas", " for more than ", rf"(?:INFO: )?task {PROCESS}:{PID} blocked (?:in I/O wait )?for more than \d+ seconds", ERROR, consequence=True),
    _row("hung_task_holder", "inf", "likely owned by task", rf"INFO: task .{{1,64}}?:\d+ .*likely owned by task {PROCESS}:{PID}", WARNING),
    _row("hung_task_holder", "inf", "last held by task", rf"INFO: task .{{1,64}}?:\d+ .*likely last held by task {PROCESS}:{PID}", WARNING),
    _row("soft_lockup", "bug|nmi|wat", "soft lockup", rf"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#\d+ stuck for \d+s! \[{PROCESS}:{PID}\]", ERROR),
    _row("hard_lockup", "cpu|nmi|wat", "hard lockup", r"(?:NMI )?(?:watchdog: )?(?:Watchdog detected hard LOCKUP|CPU\d+: Watchdog detected hard LOCKUP)", CRITICAL),
    _row("rcu_stall", "inf|rcu", "stall", r"(?:rcu: )?INFO: (?:rcu\S*|srcu\S*) (?:self-)?detected (?:expedited )?stalls? on", ERROR),
    _row("rcu_stall", "rcu", "kthread starved", r"(?:rcu: )?rcu\S* kthread starved for", ERROR),
    _row("workqueue_lockup", "bug", "workqueue lockup", r"BUG: workqueue lockup - pool", ERROR),
)

MEMORY: tuple[Signature, ...] = (
    _row("oom_kill", "oom", "oom-kill:constraint", rf"oom-kill:constraint=(?P<constraint>\w+),.*,task={PROCESS},pid={PID},uid=\d+$", ERROR),
    _row("oom_kill", "kil|mem|out", "killed process", rf"(?:Memory cgroup out of memory|Out of memory(?: \(\S+\))?)?:? ?Killed process {PID},? (?:UID \d+, )?\({PROCESS}\)", ERROR),
    _row("oom_kill", "mem|out", "kill process", rf"(?:Memory cgroup out of memory|Out of memory(?: \(\S+\))?): Kill process {PID} \({PROCESS}\)", ERROR),
    _row("oom_invoked", "", "invoked oom-killer", rf"{PROCESS} invoked oom-killer", WARNING, consequence=True),
    _row("oom_unreaped", "oom", "unable to reap pid", rf"oom_reaper: unable to reap pid:{PID} \({PROCESS}\)", ERROR),
    _row("oom_deadlock", "ker", "deadlocked on memory", r"Kernel panic - not syncing: System is deadlocked on memory", CRITICAL),
    _row("oom_deadlock", "mem|out", "out of memory and no killable", r"(?:Memory cgroup )?[Oo]ut of memory and no killable processes", ERROR),
    _row("page_allocation_failed", "", "page allocation", rf"(?:warn_alloc: )?{PROCESS}: page allocation (?:failure|stalls)", WARNING),
    _row("memory_failure", "mce|mem", "hardware memory corruption", rf"(?:Memory failure|MCE): 0x[0-9a-f]+: Killing {PROCESS}:{PID} due to hardware memory corruption", CRITICAL, exclude=True),
    _row("memory_failure", "mem", "memory failure: ", r"Memory failure: 0x[0-9a-f]+: recovery action for [\w -]{1,60}: (?:Ignored|Failed)", CRITICAL, exclude=True),
    _row("memory_failure", "mem", "hardware memory corruption", rf"Memory failure: 0x[0-9a-f]+: Sending SIGBUS to {PROCESS}:{PID} due to hardware memory corruption", CRITICAL, exclude=True),
    _row("memory_failure_recovered", "mem", "memory failure: ", r"Memory failure: 0x[0-9a-f]+: recovery action for .*: (?:Recovered|Delayed)", ERROR),
    _row("memory_uncorrected", "mce", "uncorrected hardware memory error", r"(?:mce|MCE): Uncorrected hardware memory error", CRITICAL, exclude=True),
    _row("memory_uncorrected", "eda", "edac ", r"EDAC (?P<device>\w*MC\d+): (?:\d+ )?UE\b", CRITICAL, exclude=True),
    _row("memory_corrected", "eda", "edac ", r"EDAC (?P<device>\w*MC\d+): (?:\d+ )?CE\b", WARNING),
    _row("pids_limit", "cgr", "fork rejected by pids", r"cgroup: fork rejected by pids controller in (?P<mount>\S+)", WARNING),
)

PROGRAMS: tuple[Signature, ...] = (
    _row("segfault", "", "segfault", rf"{PROCESS}\[{PID}\]: segfault (?:\(\d+\) )?at ", WARNING),
    _row("segfault", "", "general protection", rf"(?:traps: )?{PROCESS}\[{PID}\]:? general protection(?: fault)? ip:", WARNING),
    _row("segfault", "tra", "trap ", rf"traps: {PROCESS}\[{PID}\] trap ", WARNING),
    _row("segfault", "", "fault (", rf"{PROCESS}\[{PID}\]: unhandled .*fault \(", WARNING),
    _row("segfault", "", "bad frame in", rf"{PROCESS}\[{PID}\]:? bad frame in", WARNING),
    _row("core_dump_failed", "cor", "core", rf"(?:coredump: {PID}\({PROCESS}\): .*|Core dump to .*)(?:pipe failed|aborted|fail)", INFO),
    _row("core_dump_failed", "pid", "core_pipe_limit", rf"Pid {PID}\({PROCESS}\) over core_pipe_limit", INFO),
)

DISKS: tuple[Signature, ...] = (
    _row("filesystem_error", "ext", "ext4-fs error", rf"EXT4-fs error \(device {DEVICE}\)", ERROR),
    _row("filesystem_error", "ext", "i/o error while writing superblock", rf"EXT[234]-fs \({DEVICE}\): I/O error while writing superblock", ERROR),
    _row("filesystem_error", "ext", "ext4-fs (", rf"EXT4-fs \({DEVICE}\): (?:.*This should not happen|Delayed block allocation failed .*error (?!-?28\b)|failed to convert unwritten|.*Data will be lost)", ERROR),
    _row("no_space", "ext", "delayed block allocation failed", rf"EXT4-fs \({DEVICE}\): Delayed block allocation failed .*error -?28\b", ERROR),
    _row("filesystem_old_errors", "ext", "error count since last fsck", rf"EXT4-fs \({DEVICE}\): error count since last fsck", WARNING),
    _row("filesystem_read_only", "btr|ext|f2f|fat|xfs", "remounting filesystem read-only", rf"(?:EXT[234]-fs|XFS|BTRFS|F2FS-fs|FAT-fs)(?: \({DEVICE}\))?: Remounting filesystem read-only", ERROR, consequence=True),
    _row("filesystem_read_only", "fat", "has been set read-only", rf"FAT-fs \({DEVICE}\): Filesystem has been set read-only", ERROR, consequence=True),
    _row("filesystem_read_only", "btr", "forced readonly", rf"BTRFS(?: info| warning| error)? \(device {DEVICE}(?: state \w+)?\).*forced readonly", ERROR, consequence=True),
    _row("journal_aborted", "abo|jbd", "aborting journal", rf"(?:JBD2?: )?Aborting journal on device {DEVICE}\.$", ERROR),
    _row("journal_aborted", "jbd", "detected io errors while flushing", rf"JBD2: Detected IO errors while flushing file data on {DEVICE}$", ERROR),
    # ext4_shutdown(): somebody asked for it
    _row("filesystem_shut_down", "ext", "shut down requested", rf"EXT4-fs \({DEVICE}\): shut down requested", WARNING),
    _row("filesystem_shut_down", "xfs", "shut", rf"XFS \({DEVICE}\): .*[Ss]hut(?:ting)? ?down", ERROR),
    _row("filesystem_error", "xfs", "xfs (", rf"XFS \({DEVICE}\): (?:.*I/O error|.*[Cc]orruption|.*writeback error|.*Internal error)", ERROR),
    _row("filesystem_error", "btr", "btrfs", rf"BTRFS(?:: error| error| critical)? \(device {DEVICE}(?: state \w+)?\)(?:: | in ).*(?:errno=-5|errs: wr|corrupt|IO failure|csum failed|I/O error|parent transid)", ERROR),
    _row("filesystem_warning", "btr", "btrfs warning", rf"BTRFS warning \(device {DEVICE}(?: state \w+)?\): .*(?:csum failed|checksum)", WARNING),
    _row("filesystem_warning", "ext", "ext4-fs warning", rf"EXT4-fs warning \(device {DEVICE}\)", WARNING),
    _row("filesystem_error", "ove", "overlayfs: ", r"overlayfs: .*(?:I/O error|failed with error -5|err=-5)", ERROR),
    _row("image_error", "squ", "squashfs error", r"(?:squashfs: )?SQUASHFS error: ", WARNING),
    _row("no_space", "dev", "space", rf"device-mapper: thin: {DEVICE}: (?:.*out of (?:data|metadata) space|switching pool to out-of-data-space)", WARNING),
    _row("no_space", "xfs", "run out of space", rf"XFS \({DEVICE}\): .*may run out of space", WARNING),
    _row("no_space", "btr", "enospc", rf"BTRFS(?: \w+)? \(device {DEVICE}(?: state \w+)?\): .*ENOSPC", WARNING),
    _row("no_space", "", "no space left on device", r".*No space left on device", WARNING),
    _row("no_space", "blk|cri|pri", "critical space allocation", rf"(?:blk_update_request: |print_req_error: )?critical space allocation error, dev {DEVICE},", ERROR),
    _row("disk_error", "blk|cri|pri", "medium error", rf"(?:blk_update_request: |print_req_error: )?critical medium error, dev {DEVICE},", ERROR),
    _row("disk_error", "blk|i/o|pri", "i/o error, dev", rf"(?:blk_update_request: |print_req_error: )?I/O error, dev {DEVICE},", ERROR),
    _row("disk_error", "blk|cri|dev|pri|pro|rec|tim", " error, dev", rf"(?:blk_update_request: |print_req_error: )?(?:critical target|timeout|recoverable transport|protection|device offline) error, dev {DEVICE},", ERROR),
    _row("disk_error", "buf", "buffer i/o error", rf"Buffer I/O error on dev(?:ice)? {DEVICE},", ERROR),
    _row("disk_error", "", "beyond end of device", r"(?:.{1,64}: )?attempt to access beyond end of device", ERROR),
    _row("disk_error", "blo", "no available path", r"block (?P<device>\S+): no (?:available|usable) path", ERROR),
    _row("disk_error", "sd ", "blocks on media errors", rf"sd \S+ \[{DEVICE}\].*media error", ERROR),
    _row("disk_error", "sd ", "sense key", rf"sd \S+ \[{DEVICE}\].*Sense Key : (?:Medium|Hardware) Error", ERROR),
    _row("disk_error", "sd ", "failed result", rf"sd \S+ \[{DEVICE}\].*FAILED Result: hostbyte=(?!DID_OK)", WARNING),
    _row("disk_offline", "scs|sd ", "offline", r"(?:sd|scsi) (?P<device>\S+): .*(?:rejecting I/O to offline device|Device offlined - not ready)", ERROR),
    _row("ata_error", "ata", "exception emask", r"(?P<device>ata[\d.]+): exception Emask", WARNING),
    _row("ata_error", "ata", "failed command", r"(?P<device>ata[\d.]+): failed command", WARNING),
    _row("ata_error", "ata", "link is slow to respond", r"(?P<device>ata[\d.]+): (?:link|port) is slow to respond", WARNING),
    _row("ata_error", "ata", "comreset failed", r"(?P<device>ata[\d.]+): COMRESET failed", WARNING),
    _row("nvme_dead", "nvm", "nvme", r"nvme (?P<device>nvme\d+): (?:Removing after probe failure|Disabling device after reset failure|Device not ready; aborting (?:reset|initiali[sz]ation))", CRITICAL, exclude=True),
    _row("nvme_down", "nvm", "controller is down", r"nvme (?P<device>nvme\d+): controller is down; will reset", ERROR),
    _row("nvme_timeout", "nvm", "timeout", r"nvme (?P<device>nvme\d+): I/O (?:tag )?\d+.* timeout", ERROR),
    _row("nvme_fabric", "nvm", "keep", r"nvme (?P<device>nvme\d+): (?:failed nvme_keep_alive|keep.?alive timer expired|.*keep alive.*(?:fail|timeout))", ERROR),
    _row("nvme_fabric", "nvm", "starting error recovery", r"nvme (?P<device>nvme\d+): starting error recovery", ERROR),
    _row("nvme_media_error", "nvm", "unrecovered read error", r"(?P<device>nvme\d+n?\d*): .*Unrecovered Read Error", ERROR),
    _row("nvme_media_error", "nvm", "i/o error (sct 0x2", r"(?P<device>nvme\d+n?\d*): .*I/O Error \(sct 0x2 /", ERROR),
    _row("nvme_media_error", "nvm", "write fault", r"(?P<device>nvme\d+n?\d*): .*Write Fault", ERROR),
    _row("raid_failure", "md/", "disk failure on", r"md/\w+:(?P<device>\w+): Disk failure on \S+", ERROR),
    _row("raid_failure", "md/", "disk failure on", r"md/raid\d+(?P<device>md\d+): Disk failure on \S+", ERROR),
    _row("raid_failure", "md/", "md/raid", r"md/raid\w*:(?P<device>\w+): .*(?:not enough operational|Cannot continue|Too many read errors|read error not correctable)", ERROR),
    _row("raid_controller", "mpt", "fault_state", r"(?P<device>mpt[23]sas_cm\d+): .*fault_state", ERROR),
    _row("raid_controller", "meg", "megaraid", rf"megaraid_sas {PCI}: .*(?:FW in FAULT state|Controller cannot be recovered|Found FW in FAULT|resetting adapter)", ERROR),
    _row("multipath_failed", "dev", "failing path", r"device-mapper: multipath: (?:\d+:\d+: )?Failing path (?P<device>[\d:]+)", WARNING),
    _row("loop_error", "loo", "error at byte offset", r"loop: (?:Write|Read) error at byte offset", ERROR),
)

CPU_AND_BUS: tuple[Signature, ...] = (
    # `Machine Check: 0 Bank 5: be00000000800400`: bit 61 of the status says that it was not corrected (Intel SDM 3B, 17.3.2.2)
    _row("machine_check", "", "hardware error]", rf"{HARDWARE}.*Machine Check(?: Exception| Event)?: \d+ Bank \d+: (?:0x)?(?P<status>[0-9a-f]{{16}})", WARNING),
    _row("machine_check", "eda", "machine check event", r"EDAC .*Machine Check Event: (?:0x)?\d+ Bank \d+: (?:0x)?(?P<status>[0-9a-f]{16})", WARNING),
    _row("machine_check", "", "hardware error]", rf"{HARDWARE}Machine check events logged", WARNING),
    _row("machine_check", "mce|mac", "machine check events logged", r"(?:mce: )?Machine check events logged", WARNING),
    _row("machine_check_fatal", "ker", "fatal machine check", r"Kernel panic - not syncing: .*[Ff]atal machine check", CRITICAL, exclude=True),
    _row("machine_check_fatal", "ker", "fatal local machine check", r"Kernel panic - not syncing: .*[Ff]atal [Ll]ocal machine check", CRITICAL, exclude=True),
    # with its number, firmware speaks of now (GHES); without, of the boot before, and the part may have been exchanged since (BERT)
    _row("hardware_error_fatal", "", "hardware error]", r"\{\d+\}\[Hardware Error\]: event severity: fatal", CRITICAL, exclude=True),
    _row("hardware_error", "", "hardware error]", rf"{HARDWARE}event severity: fatal", WARNING),
    _row("hardware_error", "", "hardware error]", rf"{HARDWARE}event severity: recoverable", ERROR),
    _row("hardware_corrected", "", "hardware error]", rf"{HARDWARE}event severity: corrected", WARNING),
    _row("hardware_error", "", "hardware error]", rf"{HARDWARE}Uncorrected", CRITICAL, exclude=True),
    _row("hardware_error", "ber", "error records from previous boot", r"BERT: Error records from previous boot", WARNING),
    _row("hardware_corrected", "", "hardware error]", rf"{HARDWARE}Corrected error", WARNING),
    _row("hardware_corrected", "", "hardware error]", rf"{HARDWARE}Deferred error", WARNING),
    _row("cpu_throttled", "cpu|mce", "throttled", r"(?:mce: )?(?P<device>CPU\d+): (?:Core|Package) temperature(?:/speed)? (?:is )?above threshold", WARNING),
    _row("cpu_throttled_over", "cpu|mce", "temperature/speed normal", r"(?:mce: )?(?P<device>CPU\d+): (?:Core|Package) temperature/speed normal", INFO),
    _row("overheated", "the", "critical temperature reached", r"thermal (?P<device>\S+): (?:[\w-]+: )?critical temperature reached", CRITICAL, exclude=True),
    _row("pcie_fatal", "", "pcie bus error", rf"(?P<driver>[\w-]+) {PCI}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)", CRITICAL, exclude=True),
    _row("pcie_uncorrected", "", "pcie bus error", rf"[\w-]+ {PCI}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)", ERROR),
    _row("pcie_corrected", "", "pcie bus error", rf"[\w-]+ {PCI}: (?:AER: )?PCIe Bus Error: severity=Correct(?:ed|able)", WARNING),
    _row("pcie_fatal", "pci", "aer: ", rf"pcieport (?P<pci2>\S+): AER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error (?:message )?received(?:(?:: | from ){PCI})?", CRITICAL, exclude=True, as_information=True),
    _row("pcie_uncorrected", "pci", "aer: ", rf"pcieport (?P<pci2>\S+): AER: (?:Multiple )?Uncorrect(?:ed|able)(?: \(Non-Fatal\))? error (?:message )?received(?:(?:: | from ){PCI})?", ERROR),
    _row("pcie_corrected", "pci", "aer: ", rf"pcieport (?P<pci2>\S+): AER: (?:Multiple )?Correct(?:ed|able) error (?:message )?received(?:(?:: | from ){PCI})?", WARNING),
    _row("pcie_recovered", "", "device recovery", rf"\S+ {PCI}: AER: device recovery successful", INFO),
    _row("pcie_recovery_failed", "", "device recovery", rf"\S+ {PCI}: AER: device recovery failed", CRITICAL, exclude=True, as_information=True),
    _row("pcie_contained", "pci", "error", rf"pcieport {PCI}: (?:DPC|EDR): .*unmasked uncorrectable error", ERROR),
    # dpc.c writes the trigger behind the status, or in a line of its own; `error containment capabilities` is said at boot
    _row("pcie_contained", "pci", "containment event", rf"pcieport {PCI}: (?:DPC|EDR): containment event, status:", ERROR),
    _row("pcie_contained", "pci", "fatal ", rf"pcieport {PCI}: (?:DPC|EDR): ERR_(?:NON)?FATAL (?:detected|received)", ERROR),
    _row("pcie_contained", "pci", "rp pio error", rf"pcieport {PCI}: (?:DPC|EDR): (?:containment event, .*)?RP PIO error", ERROR),
    _row("pcie_link_down", "pci", "link down", rf"(?:pciehp|pcieport) (?:{PCI})?.*Slot\((?P<device>[\w-]+)\): Link Down", ERROR),
    _row("pcie_device_gone", "nvi|amd|nvm|mlx", "device inaccessible", rf"(?:nvidia|amdgpu|nvme|mlx5_core) {PCI}: .*device inaccessible", CRITICAL, exclude=True),
    _row("pcie_device_lost", "", "device inaccessible", rf"\S+ {PCI}: .*device inaccessible", ERROR),
    _row("pcie_device_lost", "pci|nvi|mlx|nvm|amd", "config space inaccessible", rf"\S+ {PCI}: .*config space inaccessible", ERROR),
    _row("pcie_device_lost", "", "giving up", rf"\S+ {PCI}: not ready \d+ms after .*giving up", ERROR),
    _row("iommu_fault", "amd|arm|dma", "fault", r"(?:DMAR|AMD-Vi|arm-smmu\S*)(?: \S+)?: .*(?:fault addr|IO_PAGE_FAULT|Unhandled context fault)", WARNING),
    _row("iommu_stuck", "amd", "completion-wait loop timed out", r"AMD-Vi: Completion-Wait loop timed out", ERROR),
    _row("nmi_error", "nmi", "error", r"NMI: (?:memory parity error|PCI system error|IOCK error)", ERROR),
    _row("nmi_unknown", "uhh", "nmi received", r"Uhhuh\. NMI received for unknown reason", WARNING),
    _row("clock_unstable", "clo|tsc|mar|tim", "unstable", r"(?:clocksource: .*|tsc: )?(?:Marking (?:clocksource '?\w+'?|TSC) (?:as )?unstable|TSC found unstable)|Clocksource \S+ unstable", WARNING),
)

NETWORK: tuple[Signature, ...] = (
    _row("nic_dead", "mlx", "device's health compromised", rf"mlx[45]_core {PCI}: .*device's health compromised", CRITICAL, exclude=True),
    _row("nic_dead", "mlx", "fatal error", rf"mlx[45]_core {PCI}: .*Fatal error \d+ detected", CRITICAL, exclude=True),
    _row("nic_dead", "mlx", "unable to respond to initialization", rf"mlx[45]_core {PCI}: .*FW is unable to respond", CRITICAL, exclude=True),
    _row("nic_dead", "mlx", "health recovery", rf"mlx[45]_core {PCI}: .*health recovery (?:flow )?(?:failed|aborted)", CRITICAL, exclude=True),
    _row("nic_firmware", "mlx", "assert_var", rf"mlx[45]_core {PCI}: .*assert_var\[0\]", WARNING),
    _row("nic_firmware", "mlx", "will cause a leak of a command", rf"mlx[45]_core {PCI}: .*timeout\. Will cause a leak of a command", ERROR),
    _row("nic_firmware", "mlx", "mlx5_cmd_", rf"mlx5_core {PCI}: (?:mlx5_cmd_\w+:\d+:\(pid \d+\): )(?!ACCESS_REG).*(?:failed|timeout)", WARNING),
    _row("nic_firmware", "mlx", "handling bad device", rf"mlx[45]_core {PCI}: .*handling bad device here", ERROR),
    _row("nic_power", "mlx", "insufficient power on the pcie slot", rf"mlx5_core {PCI}: .*insufficient power on the PCIe slot", WARNING),
    _row("nic_hot", "mlx", "high temperature", rf"mlx5_core {PCI}.*High Temperature", WARNING),
    _row("link_module", "mlx", "port module event", r"mlx5_port_module_event:\d+:\(pid \d+\): Port module event\[error\]", ERROR),
    _row("link_module", "mlx", "port module event", rf"mlx5_core {PCI}: .*Port module event.*[Ee]rror", ERROR),
    # also said at boot, of every port that is not used
    _row("link_module_unplugged", "mlx", "port module event", rf"mlx5_core {PCI}: .*Port module event.*unplugged", INFO),
    _row("rdma_error", "inf|mlx", "dump error cqe", r"(?:infiniband )?(?P<device>mlx[45]_\d+)[:_].*dump error cqe", WARNING, consequence=True),
    _row("rdma_error", "inf|mlx", "wc error", r"(?:infiniband )?(?P<device>mlx[45]_\d+)[:_].*WC error: \d+", WARNING, consequence=True),
    _row("rdma_error", "efa", "efa", rf"efa {PCI}: .*(?:timeout|failed|error|didn't send a completion)", WARNING),
    # of the InfiniBand port itself: mlx5_ib and mlx4_ib in OFED's releases, ib_core's word since Linux 6.14
    _row("link_down", "mlx|inf", "port", r"(?:infiniband |mlx[45]_(?:ib|core)[ :]+)?(?P<device>mlx[45]_\d+):? [Pp]ort:? ?\d+ (?:[Ll]ink |state |is )?(?:changed to )?(?:DOWN|[Dd]own)\b", WARNING),
    _row("link_up", "mlx|inf", "port", r"(?:infiniband |mlx[45]_(?:ib|core)[ :]+)?(?P<device>mlx[45]_\d+):? [Pp]ort:? ?\d+ (?:[Ll]ink |state |is )?(?:changed to )?(?:ACTIVE|[Aa]ctive|UP|[Uu]p)\b", INFO),
    _row("link_down", "mlx", "link ", rf"mlx[45]_core {PCI}: [Pp]ort:? ?\d+ (?:logical )?[Ll]ink (?:DOWN|[Dd]own)\b", WARNING),
    _row("link_up", "mlx", "link ", rf"mlx[45]_core {PCI}: [Pp]ort:? ?\d+ (?:logical )?[Ll]ink (?:ACTIVE|[Aa]ctive|UP|[Uu]p)\b", INFO),
    _row("ipoib_stuck", "", "transmit timeout", r"(?P<device>ib\w+|\S+): transmit timeout: latency", ERROR),
    _row("link_down", "hfi", "hfi1", rf"hfi1 {PCI}: (?P<device>hfi1_\d+): .*(?:PORT_DOWN|PHYS_OFFLINE|[Ll]ink (?:is )?down|new OFFLINE)", WARNING),
    _row("link_up", "hfi", "hfi1", rf"hfi1 {PCI}: (?P<device>hfi1_\d+): .*(?:PORT_ACTIVE|PHYS_LINKUP|[Ll]ink up)", INFO),
    _row("nic_dead", "hfi", "hfi1", rf"hfi1 {PCI}: (?P<device>hfi1_\d+): .*(?:entered freeze|8051 (?:crash|timed out))", ERROR),
    _row("link_down", "cxi", "link", rf"cxi\w* {PCI}: (?P<device>cxi\d+)?.*(?:LINK_DOWN|[Ll]ink (?:is )?down)", WARNING),
    _row("link_up", "cxi", "link", rf"cxi\w* {PCI}: (?P<device>cxi\d+)?.*(?:LINK_UP|[Ll]ink (?:is )?up)", INFO),
    _row("bond_slave_down", "", "link status definitely", r"(?P<device>\w+): (?:\(slave \S+\): )?link status definitely down", WARNING),
    _row("bond_slave_up", "", "link status definitely", r"(?P<device>\w+): (?:\(slave \S+\): )?link status definitely up", INFO),
    _row("link_down", "", "without any active interface", r"(?P<device>\w+): now running without any active interface", ERROR),
    _row("nic_stuck", "", "netdev watchdog", rf"(?:{NETDEV}: )?NETDEV WATCHDOG: (?P<device2>(?!CPU:)\S+)?.*transmit queue \d+ timed out", ERROR),
    _row("nic_stuck", "", "unit hang", rf"{NETDEV}: Detected (?:Hardware|Tx) Unit Hang", ERROR),
    _row("nic_stuck", "", "tx timeout", rf"{NETDEV}: .*(?:initiating reset due to tx timeout|TX timeout)", ERROR),
    _row("nic_stuck", "i40|ice|iav", "reset issued", rf"\w+ {PCI}:? .*[TR]X driver issue detected.*reset issued", ERROR),
    _row("nic_stuck", "ena", "time", rf"ena {PCI} ?(?P<device>\S*?):? .*(?:TX hasn't completed on time|Keep alive watchdog timeout|didn't receive.*interrupt)", ERROR),
    # veth, bridges and docks come and go: only a driver of a real card writes `NIC Link` or its PCI address. Also said at boot
    _row("link_down", "", "link is ", rf"{NETDEV}:? .*NIC Link is Down", WARNING),
    _row("link_down", "", ": link ", r"[\w.-]+ [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]:? (?P<device>\w+): Link (?:is )?down", WARNING),
    _row("link_up", "", "link is ", rf"{NETDEV}:? .*NIC Link is Up", INFO),
    _row("link_up", "", ": link ", r"[\w.-]+ [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]:? (?P<device>\w+): Link (?:is )?up", INFO),
)

KERNEL: tuple[Signature, ...] = (
    _row("kernel_panic", "ker", "kernel panic", r"Kernel panic - not syncing", CRITICAL),
    _row("kernel_bug", "ker", "kernel bug at", r"kernel BUG at \S+:\d+!", CRITICAL),
    _row("kernel_oops", "bug", "bug: ", r"BUG: (?:unable to handle|kernel NULL pointer)", CRITICAL),
    _row("kernel_oops", "una", "unable to handle kernel", r"Unable to handle kernel", CRITICAL),
    _row("kernel_oops", "gen", "general protection fault", r"general protection fault(?:, |: )(?:probably|maybe|[0-9a-f]{4})", CRITICAL),
    _row("kernel_oops", "int", "internal error: ", r"Internal error: ", CRITICAL),
    _row("kernel_oops", "div|dou|int|inv|sta", " [#", r"(?:invalid opcode|stack segment|divide error|double fault|int3): [0-9a-f]{4} \[#\d+\]", CRITICAL),
    _row("kernel_oops", "oop", "oops: ", r"Oops: ", CRITICAL),
    _row("kernel_bug", "bug", "bug: ", r"BUG: (?:Bad (?:page|rss|swap)|scheduling while atomic|sleeping function|KASAN|KFENCE|using )", ERROR),
    _row("kernel_bug", "lis|ref|sla", "corrupt", r"(?:list_(?:add|del) corruption|slab .*corrupt|refcount_t: .*corrupt)", ERROR),
    _row("netdevice_stuck", "unr", "unregister_netdevice: waiting", r"unregister_netdevice: waiting for (?P<device>\S+) to become free", WARNING),
    _row("file_limit", "vfs", "file-max limit", r"VFS: file-max limit \d+ reached", WARNING),
    _row("neighbour_table_full", "nei|arp|net", "table overflow", r"(?:neighbou?r: )?(?:arp_cache|ndisc_cache|nd_tbl|neigh\w*): neighbor table overflow", WARNING),
    _row("tcp_memory", "tcp", "out of memory", r"TCP: out of memory -- consider tuning tcp_mem", WARNING),
    _row("accelerator_failed", "hab", "heartbeat failed", r"habanalabs (?P<device>hl\d+): .*heartbeat failed", ERROR),
    _row("conntrack_full", "nf_", "table full, dropping packet", r"nf_conntrack: .*table full, dropping packet", WARNING),
)
# fmt: on

SIGNATURES: tuple[Signature, ...] = (
    *NVIDIA, *AMD, *NETWORK_FILESYSTEMS, *STUCK, *MEMORY, *PROGRAMS, *DISKS, *CPU_AND_BUS, *NETWORK, *KERNEL,
)  # fmt: skip

HARMLESS = re.compile(
    r"audit[:(]|type=\d+ audit|perf: interrupt took too long|\[Firmware (?:Bug|Warn|Info)\]|ACPI (?:BIOS )?(?:Error|Warning)|systemd\[1\]:"
    r"|device-mapper: core: CONFIG_|Command line:|Kernel command line:",
    re.IGNORECASE,
)
"""Beginnings of lines that are about nothing which concerns a job, whatever words they contain."""
