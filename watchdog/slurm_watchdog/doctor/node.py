"""What a node, or the management node, lacks: its facts are read with a deadline each, and judged by rules.conf."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slurm_watchdog.base import clock
from slurm_watchdog.base.mounts import mount_of, read_mounts
from slurm_watchdog.doctor.finding import Advice, Facts, examine, rules
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.identity.tls import make_context, read_expiry

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

DEADLINE_S = 10.0
LAST_CHARS = 200  # Of what a command said.
MUNGE_LIFE_S = 300.0  # A credential's life in a munged that was not told otherwise.
OTHERS = stat.S_IRWXO | stat.S_IWGRP  # Rights to a secret that only its owner, and its group that reads it, may have.
MAX_ANSWER = 8 << 20
TIME = re.compile(r'"time": ?([0-9.]+(?:[eE][0-9]+)?)')
"""In the answer of /healthz. Its metrics would say it, too, and cost it a thousand times as much: all nodes
may ask in one moment, where doctor is Slurm's HealthCheckProgram."""
NVML_PROGRAM = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"
DIRECTORY_PROGRAM = (
    "import os,sys; p=sys.argv[1]; s=os.statvfs(p); print(int(os.access(p, os.W_OK|os.X_OK)), s.f_bavail*s.f_frsize)"
)
UNITS = Path("/run/systemd/system")


def run(argv: Sequence[str], deadline_s: float = DEADLINE_S, stderr: int = STDOUT) -> tuple[int | None, str]:
    """(exit code, output) of a command; (None, why) for one that did not run to its end, and may be left."""
    try:
        process = Popen(list(argv), stdin=DEVNULL, stdout=PIPE, stderr=stderr, start_new_session=True)
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except TimeoutExpired:
        waits = read_wait(process.pid)
        process.kill()  # not waited for: one that sits in the kernel does not end
        return None, f"{argv[0]}: no answer within {deadline_s:g} s; it waits in {waits}"
    return process.returncode, said.decode(errors="replace").strip()


def last_words(said: str) -> str:
    """The last line of what a command said, cut at a word: its first lines are mostly what led to it."""
    line = (said.strip().splitlines() or [""])[-1].strip()
    return line if len(line) <= LAST_CHARS else f"… {line[-LAST_CHARS:].partition(' ')[2]}"


def read_wait(pid: int) -> str:
    """The kernel function in which a process waits, with the command of the child that it waits for, if it has one."""
    places, children = [], ""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    for each in (str(pid), *children.split()):
        with suppress(OSError):
            place, name = Path(f"/proc/{each}/wchan").read_text(), Path(f"/proc/{each}/comm").read_text()
            places.append(f"{name.strip()}: {place if place not in ('', '0') else 'user code'}")
    return ", ".join(places) or "an unknown place"


def misspelt(names: Iterable[str]) -> tuple[Advice, ...]:
    """The finding about names of findings that do not exist: waiting for them in vain looks like health."""
    known = tuple(dict.fromkeys(name for name, *_ in rules()["node"]))
    wrong = [name for name in names if name not in known]
    return examine("look", {"waits": None, "misspelt": ",".join(wrong), "rules": " ".join(known)})


def read_node(config: Config, service: str, node: str) -> Facts:
    """Everything about this node; `service` is agent or controller. None: not known, or not asked."""
    agent = service == "agent"
    directory = config.agent.state_directory if agent else config.controller.state_directory
    filesystem, problem, free = read_directory(directory)
    scontrol = os.path.join(config.slurm.bin_directory, "scontrol")
    has_commands = shutil.which(scontrol) is not None
    code, said = run([scontrol, "show", "node", node]) if agent and has_commands else (None, "")
    node_known = True if code == 0 and "NodeName=" in said else False if "not found" in said else None
    identity = config.security.identity()
    files = TlsFiles(config.security.tls_directory, service) if identity == "tls" else None
    certificate_problem, days = (None, None) if files is None else read_certificates(files)
    unit = f"slurm-watchdog-{service}.service"
    state = read_unit(unit)
    unit_state = state and (state["ActiveState"] if state.get("LoadState") == "loaded" else "not installed")
    is_new = unit_state == "inactive" and not os.path.lexists(directory)
    facts = {
        "where": node,
        "service": service,
        "agent": agent,
        "root": os.geteuid() == 0,
        "unit_state": unit_state,
        "first_start": is_new and run(["systemctl", "is-enabled", "--quiet", unit])[0] != 0,
        "has_munge": shutil.which("munge") is not None,
        "munge_works": read_munge(config.security.munge_socket),
        # A command of Slurm's that was answered had a credential: then munged listens elsewhere than we asked
        # (AuthInfo=socket=).
        "munge_needed": identity == "munge" or node_known is None,
        "state_directory": directory,
        "state_filesystem": filesystem,
        "state_problem": problem,
        "state_free_mib": None if free is None else free >> 20,
        "slurm_commands": has_commands,
        "node_known": node_known,
        "identity": identity,
        "certificate": "" if files is None else files.certificate,
        "certificate_problem": certificate_problem,
        "certificate_days": days,
        "days_ago": -(days or 0),
    }
    if not agent:
        return {**facts, "open_secret": read_open_secret(config.notify.secret_files())}
    devices = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdecimal()])
    code, said = run([sys.executable, "-c", NVML_PROGRAM]) if devices else (0, "")  # in a child: the driver may hang
    gpus = int(said) if code == 0 and said.isdecimal() else None
    url = next(iter(config.controller_urls), "")
    controller_problem, ahead_s = read_controller(url, files) if url else (None, None)
    asked = ((each, read_controller(each, files)[0]) for each in config.controller_urls[1:])
    mounts = (line for line in read_lines("/proc/self/mountinfo") if " - proc " in line)
    beside = str(Path(sys.executable).with_name("py-spy"))
    return {
        **facts,
        "py_spy": run([beside if os.path.exists(beside) else "py-spy", "--version"])[0] == 0,
        "ptrace_scope": "".join(read_lines("/proc/sys/kernel/yama/ptrace_scope")) or None,
        "hidepid": any(re.search("hidepid=(?!0|off)", line) for line in mounts),
        "kernel_log_problem": read_kernel_log(config.agent.kernel_log),
        "gpu_devices": devices,
        "nvml_problem": last_words(said) or "no answer" if devices and gpus is None else None,
        "nvml_gpus": gpus,
        "gpus_missing": None if gpus is None else devices - gpus,
        "controller_url": url,
        "controller_problem": controller_problem,
        "standby_problem": next((f"{each}: {why}" for each, why in asked if why is not None), None),
        "offset_s": None if ahead_s is None else abs(ahead_s),
        "side": "behind" if (ahead_s or 0) < 0 else "ahead of",
        "munge_refuses": identity == "munge" and abs(ahead_s or 0) > MUNGE_LIFE_S,
    }


def read_directory(path: str) -> tuple[str | None, str | None, int | None]:
    """(type of its file system, why it cannot be written, free bytes), asked in a child: nothing may answer there."""
    if not path:
        return None, None, None
    mount = mount_of(path, read_mounts())
    fs_type = None if mount is None else mount.fs_type
    code, said = run([sys.executable, "-I", "-c", DIRECTORY_PROGRAM, path])
    if code != 0:
        return fs_type, "it is not there" if "FileNotFoundError" in said else said[-100:], None
    writable, free = said.split()
    return fs_type, None if writable == "1" else "not writable for you", int(free)


def read_munge(where: str = "") -> bool | None:
    """Whether it makes a credential; None: there is none. `where`: munged's socket, empty: the usual one."""
    if shutil.which("munge") is None:
        return None
    return run(["munge", "--no-input", *([f"--socket={where}"] if where else [])])[0] == 0


def read_unit(unit: str) -> dict[str, str] | None:
    """State and user of a unit, as systemd has them; None: no systemd, or it gives no answer."""
    command = ["systemctl", "show", "--property=LoadState,ActiveState,User", unit]
    code, said = run(command) if UNITS.is_dir() else (None, "")
    values = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    return values if code == 0 and "ActiveState" in values else None


def read_kernel_log(path: str) -> str | None:
    """Why it cannot be read; None: it can, or it is not configured."""
    try:
        if path:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def read_lines(path: str) -> list[str]:
    """Lines of a file of the kernel; none if it is not there."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------ endpoints


def read_controller(url: str, files: TlsFiles | None) -> tuple[str | None, float | None]:
    """(why the controller gives no answer at all, how far our clock is ahead of its); one that says it is not
    well was reached.

    A controller of a release before that does not say its time.
    """
    parts = urlsplit(url)
    try:
        context = make_context(files, server=False) if files is not None and parts.scheme == "https" else None
    except IdentityError:
        return None, None  # the certificates have a finding of their own
    connection = (
        http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=DEADLINE_S, context=context)
        if parts.scheme == "https"
        else http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=DEADLINE_S)
    )
    try:
        connection.request("GET", "/healthz")
        text = connection.getresponse().read(MAX_ANSWER).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__, None
    finally:
        connection.close()
    match = TIME.search(text)
    return None, None if match is None else clock.wall() - float(match[1])


def read_certificates(files: TlsFiles) -> tuple[str | None, int | None]:
    """(why they cannot be used, days until the first of them ends)."""
    try:
        make_context(files, server=files.service == "controller")
        ends = min(read_expiry(files).values())
    except IdentityError as error:
        return str(error), None
    return None, int((ends - clock.wall()) // 86400)


def read_open_secret(paths: Iterable[str]) -> str | None:
    """Which of these files others than owner and group may read or change, the first of them; None: none, or none that
    can be seen from here."""
    modes = ((path, stat.S_IMODE(os.stat(path).st_mode)) for path in paths if os.path.exists(path))
    return next((f"{path} (mode {mode:04o})" for path, mode in modes if mode & OTHERS), None)
