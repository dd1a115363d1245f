"""The `.rpm`: built by rpmbuild, and installed, upgraded and removed by rpm below a directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_watchdog import __version__
from tests.integration import packages
from tools.packaging.build import make
from tools.packaging.layout import services, system_files, units

NEXT = f"{__version__}+1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(this version's package, one of a later version)."""
    if os.geteuid() != 0:
        pytest.skip("installing below another directory needs root")
    packages.ensure("rpmbuild")
    if shutil.which("rpmbuild") is None:
        pytest.skip("rpmbuild is not here")
    package, later = make(["rpm"], tmp_path_factory.mktemp("rpm"), [__version__, NEXT], fast=True)
    return package, later


def rpm(root: Path, *arguments: str) -> str:
    """rpm with a database of its own. What the package needs (an interpreter) is the machine's, so it is not
    asked for."""
    changing = () if "--query" in arguments else ("--nodeps", "--noscripts")
    done = subprocess.run(
        ["rpm", "--root", str(root), *changing, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_the_rpm_brings_what_the_layout_says_and_keeps_a_changed_configuration(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    package, later = made
    rpm(tmp_path, "--install", str(package))
    for place in system_files().values():
        assert (tmp_path / place).is_file(), place
    assert os.readlink(tmp_path / "usr/bin/slurm-watchdog") == "/opt/slurm-watchdog/bin/slurm-watchdog"
    assert os.access(tmp_path / "opt/slurm-watchdog/bin/slurm-watchdog", os.X_OK)
    for place in (
        "man/man1/slurm-watchdog.1.gz",
        "bash-completion/completions/slurm-watchdog",
        "zsh/site-functions/_slurm-watchdog",
        "fish/vendor_completions.d/slurm-watchdog.fish",
    ):
        assert (tmp_path / "usr/share" / place).is_file(), place
    config = tmp_path / "etc/slurm-watchdog/config.yaml"
    config.write_text("cluster_name: ours\n")
    rpm(tmp_path, "--upgrade", str(later))
    assert rpm(tmp_path, "--query", "slurm-watchdog").startswith(f"slurm-watchdog-{NEXT}-1.")
    assert config.read_text() == "cluster_name: ours\n"
    rpm(tmp_path, "--erase", "slurm-watchdog")
    left = [path.relative_to(tmp_path) for path in tmp_path.rglob("*watchdog*")]
    assert [str(path) for path in left] in ([], ["etc/slurm-watchdog"])  # config.yaml.rpmsave: as rpm has it


@pytest.mark.thorough
def test_its_scripts_are_valid_and_name_every_unit(made: tuple[Path, Path]) -> None:
    package, _ = made
    scripts = subprocess.run(
        ["rpm", "--query", "--scripts", "--package", str(package)], capture_output=True, text=True, timeout=60
    ).stdout
    text = "\n".join(line for line in scripts.splitlines() if not line.endswith("scriptlet (using /bin/sh):"))
    assert subprocess.run(["sh", "-n"], input=text, text=True, timeout=20).returncode == 0
    for unit in services():
        assert scripts.count(unit) >= 3
    assert all(unit in scripts for unit in units())
    needs = subprocess.run(
        ["rpm", "--query", "--requires", "--package", str(package)],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    assert any(need.startswith("/usr/bin/python3.") for need in needs)
