"""System calls by number, and which of them concern a file: by its descriptor, or by a path in memory.

Numbers are the kernel's own (asm/unistd_64.h for x86_64, asm-generic/unistd.h for aarch64, Linux 6.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slurm_watchdog.knowledge.stack_frames import Place

# Calls in which a thread waits, for Python frames that say nothing, as `with lock:` has none of its own. Those of which
# one cannot tell what they are for (poll, select, read of whatever) are left out.
PLACES_OF_CALLS: Final[Mapping[str, Place]] = {
    "futex": Place.LOCK,  # pthread_mutex, semaphores, condition variables: also a queue inside a library
    "futex_waitv": Place.LOCK,
    "semop": Place.LOCK,
    "semtimedop": Place.LOCK,
    "flock": Place.LOCK,
    "fcntl": Place.LOCK,  # of its commands only those that lock a file wait
    "nanosleep": Place.SLEEP,
    "clock_nanosleep": Place.SLEEP,
    "wait4": Place.SUBPROCESS,
    "waitid": Place.SUBPROCESS,
    "open": Place.FILESYSTEM,
    "openat": Place.FILESYSTEM,
    "stat": Place.FILESYSTEM,
    "newfstatat": Place.FILESYSTEM,
    "fstatat": Place.FILESYSTEM,
    "statx": Place.FILESYSTEM,
    "fsync": Place.FILESYSTEM,
    "fdatasync": Place.FILESYSTEM,
    "getdents64": Place.FILESYSTEM,
    "connect": Place.NETWORK,
    "accept": Place.NETWORK,
    "accept4": Place.NETWORK,
    "recvfrom": Place.NETWORK,
    "recvmsg": Place.NETWORK,
    "sendto": Place.NETWORK,
    "sendmsg": Place.NETWORK,
}
"""Name of a system call -> what it waits for."""


def _table(*runs: tuple[int, str]) -> dict[int, str]:
    return {first + offset: name for first, names in runs for offset, name in enumerate(names.split())}


def _words(text: str) -> list[str]:
    return text.split()


# fmt: off
X86_64 = _table(
    (0, """
        read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
        rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
        shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
        sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
        clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl
        flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink
        symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace
        getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups
        setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending
        rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs
        sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
        sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
        modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2
        swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
        get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
        setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
        lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup
        io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old
        epoll_wait_old remap_file_pages getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
        timer_settime timer_gettime timer_getoverrun timer_delete clock_settime clock_gettime clock_getres
        clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy
        mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr kexec_load waitid add_key request_key
        keyctl ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat
        mknodat fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat
        pselect6 ppoll unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages
        utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4
        signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open
        recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs
        sendmmsg setns getcpu process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr
        renameat2 seccomp getrandom memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2
        copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
    """),
    (424, """
        pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount
        fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr
        quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease
        futex_waitv set_mempolicy_home_node
    """),
)
AARCH64 = _table(
    (0, """
        io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
        listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2
        epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl
        ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root
        nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat
        fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv
        pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat fstatat fstat sync fsync fdatasync
        sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit
        exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer
        kexec_load init_module delete_module timer_create timer_gettime timer_getoverrun timer_settime timer_delete
        clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace sched_setparam sched_setscheduler
        sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
        sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend
        rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority
        reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid
        getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit getrusage umask
        prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo
        mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget
        semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect getsockname
        getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key
        request_key keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall
        mincore madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo
        perf_event_open accept4 recvmmsg
    """),
    (260, """
        wait4 prlimit64 fanotify_init fanotify_mark
    """),
    (266, """
        clock_adjtime syncfs setns sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr
        sched_getattr renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd membarrier mlock2
        copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
    """),
    (403, """
        clock_gettime64 clock_settime64 clock_adjtime64 clock_getres_time64 clock_nanosleep_time64 timer_gettime64
        timer_settime64 timerfd_gettime64 timerfd_settime64 utimensat_time64 pselect6_time64 ppoll_time64
    """),
    (416, """
        io_pgetevents_time64 recvmmsg_time64 mq_timedsend_time64 mq_timedreceive_time64 semtimedop_time64
        rt_sigtimedwait_time64 futex_time64 sched_rr_get_interval_time64 pidfd_send_signal io_uring_setup
        io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount fspick pidfd_open clone3
        close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr quotactl_fd
        landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease futex_waitv
        set_mempolicy_home_node
    """),
)
# fmt: on

TABLES = {"x86_64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}

# Name to the place of the descriptor among the arguments.
FD_ARGUMENT: dict[str, int] = dict.fromkeys(
    _words("""
    read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 fsync fdatasync ftruncate fallocate
    fstat getdents getdents64 lseek sync_file_range sync_file_range2 copy_file_range splice syncfs fadvise64 readahead
    fchmod fchown fstatfs fchdir fsetxattr fgetxattr flistxattr fremovexattr flock fcntl close ioctl
    """),
    0,
) | {"sendfile": 1, "mmap": 4}

# Name to the places of (directory descriptor or None, pointer to the path).
PATH_ARGUMENT: dict[str, tuple[int | None, int]] = {
    **dict.fromkeys(
        _words("""
        open creat stat lstat access truncate chdir rename mkdir rmdir link unlink symlink readlink chmod chown lchown
        utime utimes statfs mknod execve setxattr lsetxattr getxattr lgetxattr listxattr llistxattr removexattr chroot
        umount2 swapon
        """),
        (None, 0),
    ),
    **dict.fromkeys(
        _words("""
        openat openat2 newfstatat fstatat statx faccessat faccessat2 fchmodat fchownat unlinkat mkdirat mknodat renameat
        renameat2 linkat readlinkat utimensat futimesat execveat name_to_handle_at
        """),
        (0, 1),
    ),
}

# Calls that end by adding one to the thread's syscr or syscw: an unchanged sum proves that it is still the same call.
COUNTED = frozenset(_words("read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2"))

# Waiting for another process's lock is no fault of the filesystem; ioctl mostly talks to devices.
NOT_A_FILESYSTEM_WAIT = frozenset({"flock", "fcntl", "ioctl"})

# Calls that wait for someone else, a lock, or a timer, and touch no file: most threads of a trainer stand in
# one of them all the time.
IDLE_CALLS = frozenset(_words("""
    futex futex_waitv poll ppoll select pselect6 epoll_wait epoll_pwait epoll_pwait2 nanosleep clock_nanosleep wait4 waitid pause
    rt_sigsuspend rt_sigtimedwait accept accept4 recvfrom recvmsg restart_syscall io_getevents semop semtimedop
"""))  # fmt: skip

# Wait channels (parts of their names) that mean waiting for a peer, a lock, a timer or a child, not for storage.
HARMLESS_WCHAN = (
    "pipe", "fifo", "wait_for_partner", "futex", "flock", "posix_lock", "locks_", "fcntl_setlk", "ep_poll", "poll_schedule",
    "do_sys_poll", "do_select", "hrtimer", "do_wait", "sigsuspend", "inotify", "eventfd", "tty", "n_tty", "unix_stream",
    "sk_wait", "inet_csk", "wait_woken",
)  # fmt: skip

PAGE_FAULT = "page fault"
"""In place of a system call's name: a thread that touched memory which is mapped from a file, and waits for
its contents. The kernel gives number -1 for it; no argument, no descriptor names the file."""

FAULT_WCHAN = (
    "folio_wait", "folio_lock", "wait_on_page", "lock_page", "filemap_", "io_schedule", "request_wait_answer", "fuse_", "nfs", "rpc_", "cl_sync_io_wait",
    "cl_page", "cl_lock", "osc_", "ll_", "ldlm", "ptlrpc", "ceph", "netfs", "cifs", "smb", "gpfs", "kxPoll", "cxiWait", "wekafs", "beegfs", "FhgfsOps", "9p_",
)  # fmt: skip
"""Wait channels (beginnings of their names, or parts) of a page fault on a file: the kernel's page cache, and
clients of filesystems. FUSE waits in S (`request_wait_answer`, Linux 6.18), or in D for a page that another
thread reads (`folio_wait_bit_common`)."""

FAULTS_IN = IDLE_CALLS | COUNTED | {"sendto", "sendmsg", "sendmmsg", "recvmmsg", "connect"}
"""Calls that may fault while they copy to or from the process's memory, although they are about no file."""

# A descriptor below one of these is no file on a filesystem that can stall (memory, devices, kernel tables).
NOT_STORAGE = ("/dev/", "/proc/", "/sys/", "/memfd:")


def idle_numbers(machine: str) -> frozenset[bytes]:
    """The numbers of IDLE_CALLS, in decimal, on `machine` (as uname -m says)."""
    return frozenset(b"%d" % number for number, name in TABLES.get(machine, {}).items() if name in IDLE_CALLS)


def name_of(number: int, machine: str) -> str:
    """The name of system call `number` on `machine` (as uname -m says), or the number in decimal."""
    return TABLES.get(machine, {}).get(number, str(number))


LOCAL_TYPES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "vfat", "tmpfs", "overlay"})
"""Filesystems that one kernel has for itself, as mountinfo names them: no one else can lose them, or answer for them."""
