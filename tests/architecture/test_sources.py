"""What every file of the checkout keeps to."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
# Put together here, so that this file passes its own test.
PACKAGE_HOSTS = ["py" + "pi.org", "files." + "pythonhosted.org", "deb." + "debian.org"]
# Paths of the machine on which something was written. Captured text of other people's machines may have a
# home of root's.
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:wor" + r"k|roo" + r"t)/")
MACHINE_PATHS_IN_CAPTURES = re.compile(r"(?<![\w.~-])/wor" + r"k/(?:main|shared|\.)")


def tracked_files() -> list[Path]:
    """What git tracks here and is text; skips the test where there is no git checkout (an unpacked source archive)."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, check=False, timeout=60)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [CHECKOUT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def is_capture(path: Path) -> bool:
    """Text that came from elsewhere and stays as it came."""
    return path.is_relative_to(CHECKOUT / "tests") and path.suffix != ".py"


def test_no_file_names_a_package_host() -> None:
    bad = [
        f"{path.relative_to(CHECKOUT)}: {host}"
        for path in tracked_files()
        for host in PACKAGE_HOSTS
        if host in path.read_text(errors="replace")
    ]
    assert not bad, "\n".join(bad)


def test_no_file_holds_a_path_of_the_machine_it_was_written_on() -> None:
    bad = []
    for path in tracked_files():
        pattern = MACHINE_PATHS_IN_CAPTURES if is_capture(path) else MACHINE_PATHS
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                bad.append(f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()[:120]}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("line", "is_bad"),
    [("cd /wor" + "k/x", True), ("HOME=/roo" + "t/", True), ("/home/ann/work/x", False), ("~/work/", False)],
)
def test_a_machine_path_starts_at_the_root(line: str, is_bad: bool) -> None:
    assert bool(MACHINE_PATHS.search(line)) is is_bad


def test_every_module_says_what_it_is_for() -> None:
    bad = [
        str(path.relative_to(CHECKOUT))
        for path in sorted((CHECKOUT / "watchdog/slurm_watchdog").rglob("*.py"))
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not bad, "No module docstring:\n" + "\n".join(bad)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in (CHECKOUT / "watchdog/slurm_watchdog").rglob("*.py")}
    bad = [str(folder.relative_to(CHECKOUT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not bad, "No __init__.py in:\n" + "\n".join(bad)
