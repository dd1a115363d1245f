"""Addresses, namespaces and configuration files of a cluster."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from pathlib import Path

from tests.rig.commands import run_command

# What PID 1 of a node does. Being a shell it reaps what loses its parent, which slurmd as PID 1 would not do.
NODE_INIT = r"""
set -eu
node=$1 dir=$2 family=$3
echo "$node" >/proc/sys/kernel/hostname
umount --recursive --lazy /run/netns || true  # else this node would keep other nodes' networks alive
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/slurm-watchdog/jobs
chown "$4" /run/slurm-watchdog/jobs
mount --bind "$dir/hosts" /etc/hosts
# No name server is in reach of these networks: a program that asks one that is configured waits 10 s, as each start of torch did.
[ ! -e /etc/resolv.conf ] || mount --bind "$dir/resolv.conf" /etc/resolv.conf
mount --bind "$dir/local/$node" "$dir/scratch"
# A copy of a mount in here would keep it alive after its owner, another cluster or node, is gone.
mapfile -t mounts </proc/mounts # at once: the kernel's list moves while we unmount
for line in "${mounts[@]}"; do
    read -r _ point _ <<<"$line"
    case $point in
        "$dir/shared" | "$dir/scratch" | "$dir/place/"*) ;;
        "$family".*) umount "$point" || true ;;
    esac
done
slurmd -D -N "$node" &
while true; do wait || true; sleep 1; done
"""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names and numbers of one cluster; all follow from its directory and index."""

    directory: Path
    index: int
    nodes: tuple[str, ...]

    @property
    def bridge(self) -> str:
        return f"swd{self.index}"

    @property
    def controller_address(self) -> str:
        return f"10.77.{self.index}.1"

    def address(self, node: str) -> str:
        return f"10.77.{self.index}.{11 + self.nodes.index(node)}"

    def network_namespace(self, node: str) -> str:
        return f"{self.bridge}-{node}"

    def link(self, node: str) -> str:
        """The host's end of the node's cable."""
        return f"{self.bridge}{node}"


QUICK: Mapping[str, str] = {
    "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0",
    "KillWait": "3",
    "UnkillableStepTimeout": "20",
    "SlurmctldTimeout": "15",
    "SlurmdTimeout": "15",
}
"""Times of Slurm, so that things happen in seconds. Without them they are as Slurm is shipped (slurm.conf(5)): 30, 60, 120
and 300 s."""
QUICK_CREDENTIALS = ",cred_expire=5"
"""A requeued job waits for as long as credentials last: 120 s as shipped."""


def slurm_settings(layout: Layout, cpus: int, gpus: int, *, shipped_times: bool = False) -> dict[str, str]:
    """The global part of slurm.conf; unless `shipped_times`, tuned so that things happen in seconds."""
    d = layout.directory
    settings = {
        "ClusterName": f"demo{layout.index}",
        "SlurmctldHost": f"{socket.gethostname().partition('.')[0]}({layout.controller_address})",
        "SlurmctldPort": str(16000 + layout.index),  # own port: several controllers on one host
        "SlurmdPort": "6818",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={d}/munge/socket{'' if shipped_times else QUICK_CREDENTIALS}",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": f"{d}/state",
        "SlurmdSpoolDir": f"{d}/nodes/%n/spool",
        "SlurmctldPidFile": f"{d}/state/slurmctld.pid",
        "SlurmdPidFile": f"{d}/nodes/%n/slurmd.pid",
        "SlurmctldLogFile": f"{d}/log/slurmctld.log",
        "SlurmdLogFile": f"{d}/log/slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none",
        "SlurmdParameters": "config_overrides",  # believe CPUs= below, not the machine
        "ReturnToService": "2",
        "MinJobAge": "300",
        "JobRequeue": "1",
    }
    return settings | ({} if shipped_times else dict(QUICK)) | ({"GresTypes": "gpu"} if gpus else {})


def write_configuration(
    layout: Layout, cpus: int, gpus: int, options: Mapping[str, str], *, shipped_times: bool = False
) -> None:
    """Write slurm.conf, cgroup.conf, gres.conf and the nodes' /etc/hosts."""
    d, nodes = layout.directory, layout.nodes
    settings = slurm_settings(layout, cpus, gpus, shipped_times=shipped_times) | dict(options)
    lines = [f"{key}={value}" for key, value in settings.items()]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    for node in nodes:
        lines.append(f"NodeName={node} NodeHostname={node} NodeAddr={layout.address(node)} CPUs={cpus}{gres}")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (d / "slurm.conf").write_text("\n".join(lines) + "\n")
    (d / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    if gpus:  # any device file will do, nobody opens it
        (d / "gres.conf").write_text(f"NodeName={','.join(nodes)} Name=gpu File=/dev/loop[0-{gpus - 1}]\n")
    hosts = ["127.0.0.1 localhost", f"{layout.controller_address} {socket.gethostname()} controller"]
    hosts += [f"{layout.address(node)} {node}" for node in nodes]
    (d / "hosts").write_text("\n".join(hosts) + "\n")
    (d / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody listens there: the answer comes at once
    (d / "node-init").write_text(NODE_INIT)


def make_network(layout: Layout) -> None:
    """A bridge with the controller's address, and a network namespace with a cable to it for each node."""
    host = [
        f"link add {layout.bridge} type bridge",
        f"addr add {layout.controller_address}/24 dev {layout.bridge}",
    ]
    host.append(f"link set {layout.bridge} up")
    for node in layout.nodes:
        space, link = layout.network_namespace(node), layout.link(node)
        run_command(["ip", "netns", "add", space])
        host.append(f"link add {link} type veth peer name eth0 netns {space}")
        host.append(f"link set {link} master {layout.bridge} up")
    run_command(["ip", "-batch", "-"], input="\n".join(host) + "\n")
    for node in layout.nodes:
        inside = f"link set lo up\naddr add {layout.address(node)}/24 dev eth0\nlink set eth0 up\n"
        inside += f"route add default via {layout.controller_address}\n"
        run_command(["ip", "-netns", layout.network_namespace(node), "-batch", "-"], input=inside)
