"""Reads the facts that the rules judge: files, sockets, commands, each with a deadline. A fact that can't be
read has the reason."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slurm_watchdog.base.mounts import mount_of, read_mounts
from slurm_watchdog.doctor.cluster_rules import parse_slurm_config
from slurm_watchdog.doctor.deadline import run
from slurm_watchdog.doctor.endpoints import (
    read_certificates,
    read_controller,
    read_helper_problem,
    read_open_secret,
)
from slurm_watchdog.doctor.node_rules import NodeFacts
from slurm_watchdog.identity.secret_files import TlsFiles

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

PROGRAM_BYTES: Final = 1 << 20
MAX_PROGRAMS: Final = 8
LAST_CHARS: Final = 200
"""Of a command that failed, as evidence."""
NVML_PROGRAM: Final = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"


def read_node(config: Config, service: str, node: str) -> NodeFacts:
    """Everything about this node; `service` is agent or controller."""
    agent = service == "agent"
    directory = config.agent.state_directory if agent else config.controller.state_directory
    filesystem, problem, free = read_directory(directory)
    devices = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdecimal()])
    nvml, gpus = read_nvml() if agent and devices else (None, None)
    scontrol = os.path.join(config.slurm.bin_directory, "scontrol")
    there = shutil.which(scontrol) is not None
    tls = config.security.tls_directory if config.security.identity() == "tls" else ""
    files = TlsFiles(tls, service)
    certificate_problem, certificate_days = read_certificates(files) if tls else (None, None)
    controller_problem, offset_s = (
        read_controller(config.agent.controller_url, files if tls else None)
        if agent and config.agent.controller_url
        else (None, None)
    )
    asked = ((url, read_controller(url, files if tls else None)[0]) for url in config.agent.standby_urls if agent)
    standby_problem = next((f"{url}: {why}" for url, why in asked if why is not None), None)
    unit = f"slurm-watchdog-{service}.service"
    unit_state = read_unit(unit)
    return NodeFacts(
        node=node,
        service=service,
        root=os.geteuid() == 0,
        unit_state=unit_state,
        first_start=unit_state == "inactive" and not os.path.lexists(directory) and not is_enabled(unit),
        py_spy=read_py_spy() if agent else None,
        ptrace_scope=read_number("/proc/sys/kernel/yama/ptrace_scope"),
        hidepid=any("hidepid=" in line and "hidepid=0" not in line and "hidepid=off" not in line
                    for line in read_lines("/proc/self/mountinfo") if " - proc " in line),
        kernel_log=read_kernel_log(config.agent.kernel_log) if agent else None,
        gpu_devices=devices,
        nvml=nvml,
        nvml_gpus=gpus,
        has_munge=shutil.which("munge") is not None,
        munge_works=read_munge(config.security.munge_socket),
        state_directory=directory,
        state_filesystem=filesystem,
        state_problem=problem,
        state_free_bytes=free,
        slurm_commands=there,
        node_known=read_node_known(scontrol, node) if agent and there else None,
        controller_url=config.agent.controller_url,
        controller_problem=controller_problem,
        standby_problem=standby_problem,
        clock_offset_s=offset_s,
        helper_problem=read_helper_problem(config.agent.helper_socket) if agent else None,
        identity=config.security.identity(),
        certificate=files.certificate if tls else "",
        certificate_problem=certificate_problem,
        certificate_days=certificate_days,
        open_secret=None if agent else read_open_secret(config.notify.secret_files()),
    )  # fmt: skip


def read_directory(path: str) -> tuple[str | None, str | None, int | None]:
    """(type of its file system, why it can't be written, free bytes). Asked in a child: it may lie where
    nothing answers."""
    if not path:
        return None, None, None
    mount = mount_of(path, read_mounts())
    probe = (
        "import os,sys; p=sys.argv[1]; s=os.statvfs(p); print(int(os.access(p, os.W_OK|os.X_OK)), "
        "s.f_bavail*s.f_frsize)"
    )
    code, said = run([sys.executable, "-I", "-c", probe, path])
    fs_type = None if mount is None else mount.fs_type
    if code != 0:
        return fs_type, "it is not there" if "FileNotFoundError" in said else said[-100:], None
    writable, free = said.split()
    return fs_type, None if writable == "1" else "not writable for you", int(free)


def read_nvml() -> tuple[str | None, int | None]:
    """(why NVML does not answer, number of GPUs), asked in a child: the driver may hang."""
    code, said = run([sys.executable, "-c", NVML_PROGRAM])
    if code == 0 and said.isdecimal():
        return None, int(said)
    return said.splitlines()[-1][:200] if said else "no answer", None


def read_munge(where: str = "") -> bool | None:
    """Whether it makes a credential; None: there is none. `where`: munged's socket, empty: the usual one."""
    if shutil.which("munge") is None:
        return None
    return run(["munge", "--no-input", *([f"--socket={where}"] if where else [])])[0] == 0


def read_unit(unit: str) -> str | None:
    """State of a unit; None without systemd, or where the unit is not installed."""
    if not Path("/run/systemd/system").is_dir():
        return None
    code, said = run(["systemctl", "show", "--property=LoadState,ActiveState", unit])
    values = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    if code != 0 or "ActiveState" not in values:
        return None
    return values["ActiveState"] if values.get("LoadState") == "loaded" else "not installed"


def is_enabled(unit: str) -> bool:
    """Whether a unit starts with the machine."""
    return run(["systemctl", "is-enabled", "--quiet", unit])[0] == 0


def read_py_spy() -> str | None:
    """Version of the py-spy beside this Python, else of that on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        return None
    code, said = run([found, "--version"])
    return said.removeprefix("py-spy ").strip() if code == 0 else None


def read_kernel_log(path: str) -> str | None:
    """Why it can't be read; None: it can, or it is not configured."""
    if not path:
        return None
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def read_number(path: str) -> int | None:
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def read_lines(path: str) -> list[str]:
    """Lines of a file of the kernel; none if it is not there."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_node_known(scontrol: str, node: str) -> bool | None:
    """Whether Slurm has such a node; None: it does not answer."""
    code, said = run([scontrol, "show", "node", node])
    return True if code == 0 and "NodeName=" in said else False if "not found" in said else None


def read_slurm_config(bin_directory: str) -> tuple[dict[str, str] | None, str]:
    """(`scontrol show config`, why there is none)."""
    code, said = run([os.path.join(bin_directory, "scontrol"), "show", "config"])
    return (parse_slurm_config(said), "") if code == 0 else (None, last_words(said))


def last_words(said: str) -> str:
    """The last line of what a command said, cut at a word: its first lines are mostly what led to it."""
    line = (said.strip().splitlines() or [""])[-1].strip()
    return line if len(line) <= LAST_CHARS else f"… {line[-LAST_CHARS:].partition(' ')[2]}"


def read_slurm_nodes(bin_directory: str) -> tuple[str, ...]:
    """All nodes that may get jobs."""
    code, said = run([os.path.join(bin_directory, "sinfo"), "--noheader", "--Node", "--format=%N"])
    return tuple(dict.fromkeys(said.split())) if code == 0 else ()


def read_partitions(bin_directory: str) -> tuple[str, ...]:
    """All partitions, those that are down or hidden, too."""
    code, said = run([os.path.join(bin_directory, "sinfo"), "--noheader", "--all", "--format=%R"])
    return tuple(dict.fromkeys(said.split())) if code == 0 else ()


def for_partitions(config: Config) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What of the configuration is for some partitions alone: see cluster_rules.ClusterFacts."""
    found = [
        (f"policy.overrides[{number}]", each.match.partition) for number, each in enumerate(config.policy.overrides)
    ]
    found += [(f"thresholds[{number}]", each.match.partition) for number, each in enumerate(config.thresholds)]
    named = (key.removeprefix("partition:") for key in config.notify.slack.mentions if key.startswith("partition:"))
    found += [("notify.slack.mentions", [name]) for name in named]
    return tuple((where, tuple(globs)) for where, globs in found if globs)


def read_operator(bin_directory: str, user: str) -> bool | None:
    """Whether accounting has the user as operator or administrator; None without accounting."""
    code, said = run(
        [os.path.join(bin_directory, "sacctmgr"), "--noheader", "--parsable2", "show", "user", user,
        "format=user,adminlevel"]
    )  # fmt: skip
    if code != 0 or user in ("root", "slurm") or "disabled" in said:
        return None
    level = next((line.split("|")[1] for line in said.splitlines() if line.startswith(f"{user}|")), "None")
    return level in ("Operator", "Administrator")


def read_script(bin_directory: str, job_id: str) -> tuple[str | None, str]:
    """(the batch script that Slurm keeps, why there is none)."""
    code, said = run([os.path.join(bin_directory, "scontrol"), "write", "batch_script", job_id, "-"])
    return (said, "") if code == 0 and said.startswith("#!") else (None, last_words(said) or "no batch script")


def read_job(bin_directory: str, job_id: str) -> dict[str, str]:
    """`scontrol show job`, the fields of its lines; empty if Slurm has none."""
    code, said = run([os.path.join(bin_directory, "scontrol"), "show", "job", job_id, "--oneliner"])
    return dict(re.findall(r"(?:^|\s)([A-Za-z:]+)=(.*?)(?=\s+[A-Za-z:/]+=|$)", said)) if code == 0 else {}


def read_submit_line(bin_directory: str, job_id: str) -> list[str]:
    """The words of the sbatch command that submitted a job; none without accounting."""
    code, said = run(
        [os.path.join(bin_directory, "sacct"), "--noheader", "--parsable2", "--allocations", "-j", job_id, "-o",
        "SubmitLine"]
    )  # fmt: skip
    try:
        words = shlex.split(said.splitlines()[0]) if code == 0 and said else []
    except ValueError:
        return []
    return words[1:] if words and words[0].endswith("sbatch") else []


def read_programs(names: Sequence[str], directory: str) -> dict[str, str]:
    """Texts of the programs that can be read, by their names. Asked in a child with a deadline: they lie on
    file systems of jobs."""
    found = {}
    for name in names[:MAX_PROGRAMS]:
        path = os.path.join(directory, name)
        if "$" in name or "`" in name:
            continue
        code, said = run(["head", "-c", str(PROGRAM_BYTES), "--", path])
        if code == 0:
            found[name] = said
    return found
