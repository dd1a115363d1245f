"""The mount namespaces of the units of a compute node are set up while a filesystem is silent; what they
leave out would wait for it.

The steps are those of systemd for the options in the units: a namespace that gets the node's mounts
(MountFlags=slave), /usr and /etc bound read-only (ProtectSystem=full), a directory of its own over /tmp
(PrivateTmp=). ProtectSystem=strict does the second with every mount below `/`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, a filesystem of its own")
SILENT_S = 3.0


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A mount whose server does not answer."""
    point = tmp_path / "silent"
    point.mkdir()
    program = Path(__file__).with_name("fuse_server.py")
    server = subprocess.Popen([sys.executable, program, point], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"mounted\n"
        server.send_signal(signal.SIGSTOP)
        yield point
    finally:
        subprocess.run(["umount", "--lazy", point], check=False)
        server.kill()
        server.wait(30)


def in_namespace(script: str, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    words = [
        "unshare",
        "--mount",
        "--propagation=slave",
        "timeout",
        "--signal=KILL",
        f"{timeout_s:g}",
        "sh",
        "-ec",
        script,
    ]
    return subprocess.run(words, capture_output=True, check=False, timeout=300)


def bound_read_only(place: str | Path) -> str:
    return f"mount --bind {place} {place}; mount -o remount,bind,ro {place};"


def test_what_the_units_set_up_does_not_wait_for_a_silent_filesystem(silent: Path) -> None:
    done = in_namespace(
        f"{bound_read_only('/usr')} {bound_read_only('/etc')} mount -t tmpfs none /var/tmp; ls /etc", 120
    )
    assert done.returncode == 0, done.stderr


def test_what_they_leave_out_would_wait(silent: Path) -> None:
    assert in_namespace(bound_read_only(silent), SILENT_S).returncode != 0


def test_mounts_of_the_node_come_and_go_in_the_namespace_of_a_unit(tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        subprocess.run(["mount", "--make-shared", tmp_path], check=True)
        later.mkdir()
        script = f"echo ready; read go; grep -c ' {later} ' /proc/self/mountinfo; read go; grep -c ' {later} ' /proc/self/mountinfo || true"
        words = ["unshare", "--mount", "--propagation=slave", "sh", "-c", script]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as inside:
            assert inside.stdin is not None and inside.stdout is not None
            assert inside.stdout.readline() == "ready\n"
            subprocess.run(["mount", "-t", "tmpfs", "none", later], check=True)
            inside.stdin.write("go\n")
            inside.stdin.flush()
            assert inside.stdout.readline() == "1\n"
            subprocess.run(["umount", later], check=True)
            inside.stdin.write("go\n")
            inside.stdin.flush()
            assert inside.stdout.readline() == "0\n"
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", tmp_path], check=False)
