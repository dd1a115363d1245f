"""Which line of the kernel follows from which other: rows read by slurm_watchdog.diagnose.kernel_log.verdict.

A row says: lines of these classes are a consequence if a line of one of those classes stands near by, about
the same thing. Classes are the names in slurm_watchdog.knowledge.kernel_signatures; an Xid's class is
`xid_79`. A name that ends with `*` is a beginning. The order of the lines counts, except where a row says
`either`: the kernel speaks of a stuck task when two minutes are over (hung_task_timeout_secs), of a silent
server when its own limit is, and either may be first.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from slurm_watchdog.model.observations import Fault

Same = Literal["gpu", "disk", "port", "node"]


class Rule(msgspec.Struct, frozen=True):
    """Effects follow from causes, if both are about the same GPU, disk, port of PCIe or (least of all) node, within `within_s`."""

    effects: tuple[str, ...]
    causes: tuple[str, ...]
    same: Same
    within_s: float
    either: bool
    waits_for: tuple[str, ...]  # If the effect's call trace says what the task waits for, it must be one of these.


NETWORK_FILESYSTEM = "nfs lustre gpfs ceph cifs beegfs weka fuse afs gfs2"
SILENT_SERVER = (
    "nfs_server_silent nfs_state_error lustre_connection_lost lustre_evicted lustre_timeout lustre_operation_failed"
    " gpfs_* ceph_session_lost ceph_mds_silent ceph_blocklisted ceph_osd_down cifs_server_silent afs_server_silent"
    " weka_frontend_down beegfs_error gfs2_withdrawn"
)
ADAPTER = ("nic_dead", "nic_stuck", "pcie_device_gone")
"""What the kernel says of a network adapter. Of links it is not believed while jobs run: a user may make interfaces."""
LOCAL_NETWORK = f"{' '.join(ADAPTER)} link_down ipoib_stuck"
DISK_BROKEN = (
    "nvme_dead nvme_down nvme_timeout nvme_media_error disk_offline ata_error disk_error raid_failure raid_controller"
)
GPU_GONE = "xid_79 gpu_off_the_bus gpu_lost amdgpu_lost accelerator_wedged"
GPU_LINE = "xid_* gpu_* amdgpu_* accelerator_*"
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def _rule(effects: str, causes: str, same: Same, within_s: float, waits_for: str = "", *, either: bool = False) -> Rule:
    either = either or bool(waits_for)
    return Rule(tuple(effects.split()), tuple(causes.split()), same, within_s, either, tuple(waits_for.split()))


RULES: tuple[Rule, ...] = (
    # what falls off the bus explains all later lines about it, its links to others, and the
    # programs on them
    _rule(GPU_LINE, GPU_GONE, "gpu", DAY_S),
    _rule("xid_74 xid_155 sxid xid_137", GPU_GONE, "node", 60.0),
    _rule("xid_43 xid_45", GPU_GONE, "node", 600.0),
    _rule("rdma_error", GPU_GONE, "node", 600.0),
    # NVIDIA's catalogue: 63, 64, 94, 95, 171 and 172 go with 48; 13, 31, 43 and 45 are what programs see of it
    _rule("xid_63 xid_64 xid_94 xid_95 xid_160 xid_13 xid_31 xid_43 xid_45",
         "xid_48 xid_140 xid_171 xid_172", "gpu", 120.0),
    _rule("xid_13 xid_31 xid_43 xid_45 xid_63", "xid_94 xid_95", "gpu", 120.0),
    _rule(GPU_LINE, "xid_119 xid_120 xid_62 xid_143 xid_158 xid_167", "gpu", HOUR_S),
    _rule("xid_43 xid_45 xid_137 xid_154 xid_155 xid_174", GPU_LINE, "gpu", 600.0),
    _rule("xid_45", "xid_13 xid_31 xid_48 xid_74 xid_94 xid_95 xid_119 xid_120 sxid", "node", 60.0),
    _rule("gpu_init_failed", "xid_48 xid_64 xid_95 xid_74 xid_110", "gpu", DAY_S),
    _rule("hung_task soft_lockup rcu_stall", GPU_GONE + " xid_119 xid_120 amdgpu_hang", "node", 900.0, "nvidia amdgpu"),
    # a link of this node takes its filesystems with it; a server takes what waits for it
    _rule("nfs_* lustre_* lnet_error gpfs_* ceph_* cifs_* beegfs_error weka_* afs_* iscsi_error nvme_fabric",
         LOCAL_NETWORK, "node", 600.0),
    _rule("rdma_error", LOCAL_NETWORK, "node", 120.0),
    _rule("nic_firmware", "nic_dead", "gpu", 120.0),
    _rule("pcie_recovery_failed", "pcie_fatal", "port", 60.0),
    _rule("amdgpu_firmware", "amdgpu_reset_failed", "gpu", 120.0),
    _rule("xid_74", "sxid", "node", 10.0),
    _rule("lustre_connection_lost lustre_evicted", "lustre_timeout", "node", 300.0),
    _rule("lustre_error lustre_operation_failed lustre_evicted lustre_timeout", "lustre_connection_lost", "node", 900.0),
    _rule("lustre_operation_failed lustre_error", "lustre_evicted", "node", 900.0),
    _rule("nfs_stale nfs_lock_lost nfs_rpc_error nfs_state_error", "nfs_server_silent", "node", HOUR_S),
    _rule("ceph_caps_stale ceph_socket ceph_mds_rejected", "ceph_session_lost ceph_mds_silent ceph_blocklisted", "node", HOUR_S),
    _rule("hung_task", SILENT_SERVER, "node", 900.0, NETWORK_FILESYSTEM),
    _rule("hung_task", LOCAL_NETWORK, "node", 900.0, NETWORK_FILESYSTEM + " network"),
    # a disk takes its filesystem with it, and that its mounts
    _rule("filesystem_error filesystem_warning filesystem_read_only filesystem_shut_down journal_aborted disk_error raid_failure",
         "nvme_dead nvme_down nvme_timeout nvme_media_error disk_offline", "disk", HOUR_S),
    _rule("filesystem_error filesystem_warning filesystem_read_only filesystem_shut_down journal_aborted",
         "disk_error", "disk", HOUR_S),
    _rule("filesystem_read_only filesystem_shut_down journal_aborted filesystem_warning", "filesystem_error", "disk", HOUR_S),
    _rule("filesystem_read_only", "journal_aborted filesystem_shut_down", "disk", HOUR_S),
    _rule("hung_task", DISK_BROKEN, "node", 900.0, "ext4 xfs btrfs block"),
    # what a kernel says after it has broken
    _rule("soft_lockup hard_lockup rcu_stall hung_task kernel_panic workqueue_lockup", "kernel_oops kernel_bug lustre_bug", "node", 900.0),
    _rule("kernel_panic", "hard_lockup soft_lockup hung_task rcu_stall machine_check hardware_error_fatal oom_deadlock machine_check_fatal", "node", 60.0),
    _rule("machine_check_fatal", "machine_check", "node", 10.0),
    _rule("rcu_stall hung_task workqueue_lockup", "soft_lockup hard_lockup", "node", 300.0),
    _rule("oom_invoked", "oom_kill", "node", 10.0, either=True),
    _rule("segfault", "memory_failure filesystem_error disk_error", "node", 10.0),
)  # fmt: skip

ENDS: dict[str, tuple[str, ...]] = {
    "nfs_server_ok": ("nfs_server_silent",),
    "lustre_connection_restored": ("lustre_connection_lost",),
    "ceph_session_ok": ("ceph_session_lost",),
    "ceph_mds_ok": ("ceph_mds_silent",),
    "ceph_osd_up": ("ceph_osd_down",),
    "afs_server_ok": ("afs_server_silent",),
    "link_up": ("link_down",),
    "bond_slave_up": ("bond_slave_down",),
    "cpu_throttled_over": ("cpu_throttled",),
    "amdgpu_reset_done": ("amdgpu_reset", "amdgpu_reset_failed", "amdgpu_firmware"),
    "accelerator_recovered": ("accelerator_wedged", "accelerator_failed"),
    "nic_recovered": ("nic_dead", "nic_firmware"),
    "pcie_recovered": ("pcie_fatal",),
}
"""The line that says that the trouble of others is over, of the same thing."""


def things_of(fact: Fault) -> tuple[str | None, ...]:
    """What a line is about, by each name that another line may give it: an adapter has an address and a device."""
    if fact.part in ("pcie", "nic", "gpu"):
        return tuple(dict.fromkeys(each for each in (fact.device, fact.pci_bus_id) if each)) or (None,)
    return (fact.device or fact.server or fact.pci_bus_id or fact.mount,)


TRACE_WORDS: tuple[tuple[str, str], ...] = (
    ("nfs", r"\[(?:nfs|nfsv[234]|sunrpc|nfs_acl|lockd)\]|\b(?:nfs4?_|rpc_wait|__rpc_|rpc_execute|nlmclnt_)"),
    ("lustre", r"\[(?:lustre|ptlrpc|osc|mdc|lov|lmv|mgc|obdclass|libcfs|lnet|ksocklnd|ko2iblnd|ldlm)\]"),
    ("gpfs", r"\[(?:mmfs26|mmfslinux|tracedev)\]"),
    ("ceph", r"\[(?:ceph|libceph|rbd)\]"),
    ("cifs", r"\[(?:cifs|smb3)\]"),
    ("beegfs", r"\[beegfs\]"),
    ("weka", r"\[weka\w*\]"),
    ("afs", r"\[(?:kafs|openafs|libafs)\]"),
    ("gfs2", r"\[(?:gfs2|dlm)\]"),
    ("fuse", r"\[fuse\]|\b(?:fuse_|request_wait_answer)"),
    ("nvidia", r"\[nvidia(?:_uvm|_drm|_modeset)?\]|\b_nv\d{6}rm\b"),
    ("amdgpu", r"\[(?:amdgpu|amdkfd|ttm)\]"),
    ("network", r"\[(?:ib_core|ib_uverbs|mlx[45]_(?:core|ib)|rdma_cm|rdma_ucm|hfi1|efa)\]|\brtnl_lock"),
    ("ext4", r"\[(?:ext4|jbd2)\]|\b(?:ext4_|jbd2_|__jbd2_)"),
    ("xfs", r"\[xfs\]|\bxfs_"),
    ("btrfs", r"\[btrfs\]|\bbtrfs_"),
    ("block", r"\b(?:blk_mq_|submit_bio_wait|blkdev_|nvme_|dm_|md_)"),
)
"""What a task waits for, by a line of its call trace: the first row that any line matches is what is said."""
