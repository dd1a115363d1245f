"""Lines of the kernel that begin with, or hold, what a program calls itself: its name, its file's, its arguments.

A program may be called `NVRM: ` and a file `fallen off the bus`; when it crashes, the kernel writes a true
record of its own that reads like a driver's. So such a line is known by its form before any row of
slurm_watchdog.knowledge.kernel_signatures is tried, and gives only the rows that are about programs. A name
has at most 15 characters (TASK_COMM_LEN), a file's name 255, and both may hold any of them.

Sources: arch/*/mm/fault.c, arch/x86/kernel/traps.c, kernel/signal.c, fs/exec.c, mm/oom_kill.c,
mm/page_alloc.c, kernel/exit.c, fs/drop_caches.c, block/blk-core.c, mm/mmap.c, kernel/capability.c,
security/yama, kernel/audit.c, fs/coredump.c, fs/fs_parser.c, fs/super.c, fs/overlayfs, fs/fuse, net/9p, net/ceph,
drivers/net/bonding, mm/vmalloc.c, mm/memfd.c of Linux 4.18 to 6.18.
"""

from __future__ import annotations

import re

import msgspec


class UserText(msgspec.Struct, frozen=True):
    """One form of line that holds a user's words."""

    name: str
    regex: re.Pattern[str]  # Matched from the beginning.
    rows: frozenset[str]  # Names of the signatures that such a line may give.
    samples: tuple[str, ...]  # {comm}, {file} and {pid} are filled in by tests with the words of every other row.


def _form(name: str, regex: str, rows: str, *samples: str) -> UserText:
    return UserText(name, re.compile(regex, re.IGNORECASE), frozenset(rows.split()), samples)


_COMM = r".{0,16}?"
_ENDS = r" sp 00007ffd2b1ffe10 error 4 in {file}[400000+1000] likely on CPU 3 (core 3, socket 0)"

USER_TEXT: tuple[UserText, ...] = (
    _form("launched", r"process '", "", "process '{file}' launched '{file}' with NULL argv: empty string added", "process '{file}' started with executable stack"),
    _form("ptrace", r"ptrace (?:attach|traceme) ", "", 'ptrace attach of "{file}"[{pid}] was attempted by "{file}"[{pid}]'),
    _form("capabilities", r"(?:capability: )?warning: `", "", "warning: `{comm}' uses 32-bit capabilities (legacy support in use)"),
    _form("old calls", r"(?:mmap: |process `|x86/split lock detection: |TCP: request_sock_\w+: )", "",
          "mmap: {comm} ({pid}) uses deprecated remap_file_pages() syscall. See Documentation/mm/remap_file_pages.rst.",
          "process `{comm}' is using obsolete setsockopt SO_BSDCOMPAT",
          "x86/split lock detection: #AC: {comm}/{pid} took a split_lock trap at address: 0x401136"),
    _form("registers", r"(?:CPU: \d+ (?:UID: \d+ )?PID: |Code: |Comm: |Modules linked in: |Hardware name: |RIP: )", "",
          "CPU: 3 UID: 1500 PID: {pid} Comm: {comm} Tainted: P           OE", "CPU: 3 PID: {pid} Comm: {comm} Not tainted 5.14.0", "Code: 48 8b 05 c3"),
    _form("audit", r"audit[:(]|type=\d+ ", "", 'audit: type=1701 audit(1.1:1): auid=1500 uid=1500 comm="{comm}" exe="{file}" sig=11 res=1',
          'audit: type=1326 audit(1.1:2): pid={pid} comm="{comm}" exe="{file}" sig=31'),
    _form("coredump", r"(?:coredump: |Pid \d+\(|Core dump to )", "core_dump_failed", "coredump: {pid}({comm}): over core_pipe_limit, skipping core dump",
          "Pid {pid}({comm}) over core_pipe_limit", "Core dump to |/{file} pipe failed"),
    _form("killed", r"(?:Memory cgroup out of memory|Out of memory)[:( ]", "oom_kill oom_deadlock",
          "Out of memory: Killed process {pid} ({comm}) total-vm:1kB, anon-rss:1kB, file-rss:0kB, UID:1500 pgtables:1kB oom_score_adj:0",
          "Memory cgroup out of memory: Killed process {pid} ({comm}) total-vm:1kB", "Out of memory: Kill process {pid} ({comm}) score 1 or sacrifice child"),
    _form("oom_kill", r"oom-kill:constraint=", "oom_kill",
          "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset={file},mems_allowed=0,oom_memcg=/{file},task_memcg=/{file},task={comm},pid={pid},uid=1500"),
    _form("oom tasks", r"\[\s*\d+\]\s+\d+\s+\d+\s", "", "[  {pid}]  1500  {pid}     1234      567    53248        0             0 {comm}"),
    _form(
        "crash", rf"(?:traps: )?{_COMM}\[\d+\]:? ", "segfault",
        "{comm}[{pid}]: segfault at 0 ip 0000000000401136" + _ENDS,
        "{comm}[{pid}]: segfault (11) at 0 nip 0 lr 0 code 1 in {file}[400000+1000]",
        "traps: {comm}[{pid}] general protection fault ip:401136 sp:7ffd error:0 in {file}[400000+1000]",
        "{comm}[{pid}] general protection ip:401136 sp:7ffd error:0 in {file}[400000+1000]",
        "traps: {comm}[{pid}] trap invalid opcode ip:401136 sp:7ffd error:0 in {file}[400000+1000]",
        "{comm}[{pid}]: unhandled level 2 translation fault (11) at 0x00000000, esr 0x92000006, in {file}[400000+1000]",
        "{comm}[{pid}]: undefined instruction: pc=00000000401136",
        "{comm}[{pid}]: bad frame in rt_sigreturn frame:00007ffd ip:401136 sp:7ffd orax:f in {file}[400000+1000]",
        "{comm}[{pid}] vsyscall attempted with vsyscall=none ip:ffffffffff600000 cs:33 sp:7ffd ax:0 si:0 di:0",
    ),
    _form(
        "comm and pid", rf"{_COMM} \(\d+\)(?:: | used | uses | is )", "",
        "{comm} ({pid}) used greatest stack depth: 11000 bytes left", "{comm} ({pid}): drop_caches: 3",
        "{comm} ({pid}): Attempt to set a LOCK_MAND lock via flock(2). This support has been removed and the request ignored.",
    ),
    _form("oom_invoked", rf"{_COMM} invoked oom-killer: ", "oom_invoked",
          "{comm} invoked oom-killer: gfp_mask=0x100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0"),
    _form("page allocation", rf"(?:warn_alloc: )?{_COMM}: page allocation (?:failure|stalls)", "page_allocation_failed",
          "{comm}: page allocation failure: order:4, mode:0x40cc0(GFP_KERNEL|__GFP_COMP), nodemask=(null),cpuset={file},mems_allowed=0",
          "warn_alloc: {comm}: page allocation stalls for 10000ms, order:0"),
    _form("fatal signal", rf"{_COMM}: potentially unexpected fatal signal ", "", "{comm}: potentially unexpected fatal signal 11."),
    _form("beyond the end", rf"{_COMM}: attempt to access beyond end of device", "disk_error", "{comm}: attempt to access beyond end of device"),
    # fs/fs_parser.c, fs/super.c and the option parsers of filesystems: whoever has a user namespace may mount, with any words
    _form(
        "mount options",
        r"[\w.-]{1,20}(?: error| warning)?(?: \([^()]{0,40}\))?: (?:[\w: ]{0,40})?(?:unknown (?:parameter|mount option|option|subsys)|bad (?:value|option|mount option|or missing)|"
        r"unrecogni[sz]ed (?:mount )?option|(?:invalid|unsupported|unexpected|conflicting) (?:mount )?(?:option|value|argument)|failed to (?:resolve|parse|look ?up|open)|"
        r"no channels available|could not find|can't (?:find|open|look ?up)|special device|duplicate)",
        "",
        "overlayfs: unrecognized mount option \"{file}\" or missing value", "tmpfs: Unknown parameter '{file}'", "fuse: Bad value for '{file}'",
        "overlay: Unknown parameter '{file}'", "overlayfs: failed to resolve '{file}': -2", "libceph: bad option at '{file}'", "ceph: Unknown parameter '{file}'",
        "nfs: Unknown parameter '{file}'", "NFS: bad mount option value specified: {file}", "cifs: Unknown parameter '{file}'", "CIFS: VFS: Unknown mount option {file}",
        "9pnet_virtio: no channels available for device {file}", "9pnet: Could not find request transport: {file}", "cgroup1: Unknown subsys name '{file}'",
        "EXT4-fs (loop0): Unrecognized mount option \"{file}\" or missing value", "F2FS-fs (loop0): Unrecognized mount option \"{file}\"", "xfs: Unknown parameter '{file}'",
        "BTRFS error: unrecognized mount option '{file}'", "gfs2: Unknown parameter '{file}'", "beegfs: Unknown parameter '{file}'", "lustre: Unknown parameter '{file}'",
        "wekafs: Unknown parameter '{file}'", "bpf: Unknown parameter '{file}'", "squashfs: Unknown parameter '{file}'",
    ),
    _form("mount source", r".*: Can't (?:look ?up|open|mount)\b[\w ,]*$", "", "{file}: Can't lookup blockdev", "{file}: Can't open blockdev", "{file}: Can't mount, would change RO state"),
    _form("label", r"BTRFS(?: info)?: device (?:label|fsid) ", "", "BTRFS: device label {file} devid 1 transid 7 /dev/loop0 scanned by {comm} ({pid})"),
    # a bond, bridge or team in a network namespace has any name, and prints the values it is given
    _form("interface option", r"\S{1,15}: option \w+: ", "", "{ifname}: option mode: invalid value ({file})"),
    _form("vmalloc", rf"{_COMM}: vmalloc (?:error|size)", "", "{comm}: vmalloc error: size 4096, failed to allocate pages, mode:0x0(), nodemask=(null),cpuset={file},mems_allowed=0"),
    _form("memfd", r"memfd_create\(\)|\S+: memfd_create\(\)", "", "memfd_create() without MFD_EXEC nor MFD_NOEXEC_SEAL, pid={pid} '{comm}'"),
    _form("program", r"program \S+ is using|futex_wake_op: |sched: |netlink: |printk: |input: |hid-generic |usb \S+: (?:Product|Manufacturer|SerialNumber): ", "",
          "program {comm} is using a deprecated SCSI ioctl, please convert it to SG_IO", "futex_wake_op: {comm} tries to shift op by -1; fix this program",
          "netlink: 4 bytes leftover after parsing attributes in process `{comm}'.", "printk: {comm}: 41 output lines suppressed due to ratelimiting",
          "usb 1-4: Product: {file}", "input: {file} as /devices/virtual/input/input7"),
    _form("promiscuous", r"(?:device )?\S{1,15}: (?:renamed from|entered promiscuous|left promiscuous)", "", "{ifname}: renamed from eth0"),
)  # fmt: skip
"""Those that match a line say what it may give. That a driver's line names a program behind its own prefix
and device is no matter: nobody writes that prefix."""
