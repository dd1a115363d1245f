"""The two `.deb`: unpacked into an empty root; what the node's weighs, and that all that is in it works without the other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.packaging.build import make
from tools.packaging.layout import CONTROLLER_UNIT

MAX_BYTES, MAX_FILES = 40_000_000, 1_500
"""Of the node's package, unpacked: it lies on every node, often in memory."""
IMPORT_ALL = """
import importlib, pkgutil, slurm_watchdog
names = [each.name for each in pkgutil.walk_packages(slurm_watchdog.__path__, "slurm_watchdog.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The node's package, and the one on top."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not here")
    return make(["deb"], tmp_path_factory.mktemp("deb"), fast=True)


def unpack(package: Path, root: Path) -> set[str]:
    """The files of a package, which are `root`'s then."""
    subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True, timeout=200)
    listed = subprocess.run(["dpkg-deb", "-c", str(package)], check=True, capture_output=True, text=True, timeout=200)
    return {line.split()[5] for line in listed.stdout.splitlines() if not line.startswith("d")}


def test_the_nodes_package_is_small_and_whole_and_the_other_one_lies_on_top(made: list[Path], tmp_path: Path) -> None:
    files = unpack(made[0], tmp_path)
    there = [path for path in tmp_path.rglob("*") if path.is_symlink() or path.is_file()]
    size = sum(path.lstat().st_size for path in there)
    assert len(there) <= MAX_FILES and size <= MAX_BYTES, (len(there), size)
    python = tmp_path / "opt/slurm-watchdog/bin/python3"
    if not python.exists():
        python.unlink()
        python.symlink_to(shutil.which("python3") or "python3")

    def said(*words: str) -> str:
        done = subprocess.run([str(python), *words], capture_output=True, text=True, timeout=200, cwd=tmp_path)
        return done.stdout + done.stderr

    command = str(tmp_path / "opt/slurm-watchdog/bin/slurm-watchdog")
    assert int(said("-c", IMPORT_ALL)) > 300
    assert "(commit " in said(command, "--version")
    assert "is fine" in said(command, "check-config", str(tmp_path / "etc/slurm-watchdog/config.yaml"))
    assert "slurm-watchdog status is not in the package for nodes" in said(command, "status")
    assert not any(CONTROLLER_UNIT in file and "/systemd/system/" in file for file in files)

    assert files.isdisjoint(unpack(made[1], tmp_path))
    assert int(said("-c", IMPORT_ALL)) > 500
    assert (tmp_path / "usr/lib/systemd/system" / CONTROLLER_UNIT).is_file()
