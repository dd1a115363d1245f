"""Programs that hold a GPU by right although they belong to no job: drivers' daemons, monitors, display servers.

A name alone proves nothing: any user may call a program Xorg. It counts together with who runs it: root, a
system account (systemd gives these numbers up to 999), or a service in the system's control groups. Sources:
the names of the programs in the packages of NVIDIA's driver, DCGM, Fabric Manager, NVSM and of the monitors
named; the kernel cuts names to 15 characters.
"""

from __future__ import annotations

MAX_NAME = 15  # TASK_COMM_LEN without its end, linux/sched.h
MAX_SYSTEM_UID = 999  # SYS_UID_MAX, login.defs and systemd

_NAMES = """
    nvidia-persistenced nvidia-persiste nvidia-smi nvidia-fabricmanager nv-fabricmanager nvidia-powerd nvidia-modprobe
    nvidia-cuda-mps-control nvidia-cuda-mps-server nvidia-imex nvidia-bug-report nvidia-settings nvidia-container-cli
    nvidia-device-plugin nvidia-mig-manager gpu-feature-discovery nv-hostengine dcgmi dcgm dcgm-exporter
    dcgmproftester nvsm nvsm_core nvsm-core nvsm_api_gateway nvsm-mqtt nvsm-notifier gpud collectd telegraf
    node_exporter nvidia_gpu_exporter nvidia_gpu_prometheus_exporter prometheus-nvidia-exporter netdata
    nvidia-smi.plugin zabbix_agentd zabbix_agent2 datadog-agent ganglia gmond cgpu monit glances nvtop nvitop gpustat
    slurmd slurmstepd Xorg X Xwayland gnome-shell gdm-x-session gdm-wayland-session kwin_x11 kwin_wayland sddm
    lightdm-gtk-greeter weston containerd dockerd systemd-logind systemd-udevd
"""
COMMS = frozenset(name[:MAX_NAME] for name in _NAMES.split())


def is_daemon(comm: str, uid: int, cgroup: str) -> bool:
    """Whether a process of this name, user and /proc/PID/cgroup (its text) is one of these and no user's pretence."""
    if comm[:MAX_NAME] not in COMMS:
        return False
    return 0 <= uid <= MAX_SYSTEM_UID or is_system_service(cgroup)


def is_system_service(cgroup: str) -> bool:
    """Whether the text of /proc/PID/cgroup names a service of the system manager's; users can't get in there."""
    paths = [line.split(":", 2)[2] for line in cgroup.splitlines() if line.count(":") >= 2]
    return any(path.startswith("/system.slice/") and "/job_" not in path for path in paths)
