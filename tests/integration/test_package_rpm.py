"""The `.rpm`: built by rpmbuild, and installed, upgraded and removed by rpm below a directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration import packages
from tools.packaging.build import VERSION, make
from tools.packaging.layout import CONTROLLER_UNIT, services, system_files, units
from tools.packaging.parts import CONTROLLER, NODE

NEXT = f"{VERSION}+1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """(this version's packages, the node's first; those of a later version)."""
    if os.geteuid() != 0:
        pytest.skip("installing below another directory needs root")
    packages.ensure("rpmbuild")
    if shutil.which("rpmbuild") is None:
        pytest.skip("rpmbuild is not here")
    packages_made = make(["rpm"], tmp_path_factory.mktemp("rpm"), [VERSION, NEXT], fast=True)
    return packages_made[:2], packages_made[2:]


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
    made: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    both, later = made
    rpm(tmp_path, "--install", str(both[0]))
    assert not (tmp_path / "usr/lib/systemd/system" / CONTROLLER_UNIT).exists()
    rpm(tmp_path, "--install", str(both[1]))
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
    rpm(tmp_path, "--upgrade", *map(str, later))
    for name in (NODE, CONTROLLER):
        assert rpm(tmp_path, "--query", name).startswith(f"{name}-{NEXT}-1.")
    assert config.read_text() == "cluster_name: ours\n"
    rpm(tmp_path, "--erase", CONTROLLER)
    assert (tmp_path / "opt/slurm-watchdog/bin/slurm-watchdog").is_file()
    rpm(tmp_path, "--erase", NODE)
    left = [path.relative_to(tmp_path) for path in tmp_path.rglob("*watchdog*")]
    assert [str(path) for path in left] in ([], ["etc/slurm-watchdog"])  # config.yaml.rpmsave: as rpm has it


@pytest.mark.thorough
def test_its_scripts_are_valid_and_name_every_unit(made: tuple[list[Path], list[Path]]) -> None:
    both, _ = made
    told = ""
    for package, name in zip(both, (NODE, CONTROLLER), strict=True):
        scripts = subprocess.run(
            ["rpm", "--query", "--scripts", "--package", str(package)], capture_output=True, text=True, timeout=60
        ).stdout
        text = "\n".join(line for line in scripts.splitlines() if not line.endswith("scriptlet (using /bin/sh):"))
        assert subprocess.run(["sh", "-n"], input=text, text=True, timeout=20).returncode == 0
        for unit in services(name):
            assert scripts.count(unit) >= 3
        told += scripts
    assert all(unit in told for unit in units())
    needs = subprocess.run(
        ["rpm", "--query", "--requires", "--package", str(both[0])],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    assert any(need.startswith("/usr/bin/python3.") for need in needs)
