"""What is installed, what is packed, what is pinned."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import tomllib

import slurm_watchdog

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[2]


def read_project() -> dict[str, object]:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def canonical(requirement: str) -> str:
    """`SQLAlchemy>=2.0` gives `sqlalchemy`: the name alone, as indexes and locks spell it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]).lower()


def test_nobody_else_provides_our_import_package() -> None:
    # A well-known package for file events has the same import name: with both in one environment, one hides the other.
    # An editable install lists no modules (before Python 3.12 at least), so ours may be absent; the next test finds it.
    providers = set(importlib.metadata.packages_distributions().get("slurm_watchdog", []))
    assert providers <= {"slurm-training-watchdog"}


def test_the_imported_package_is_this_checkout() -> None:
    assert slurm_watchdog.__file__ is not None
    assert Path(slurm_watchdog.__file__).parent == CHECKOUT / "watchdog/slurm_watchdog"
    assert importlib.metadata.version("slurm-training-watchdog") == slurm_watchdog.__version__


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(CHECKOUT)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in packed} == {
        "slurm_watchdog", f"slurm_training_watchdog-{slurm_watchdog.__version__}.dist-info",
    }  # fmt: skip
    assert "slurm_watchdog/py.typed" in packed
    assert not [name for name in packed if name.endswith(".pyc")]


def test_the_lock_pins_every_dependency_but_pyslurm() -> None:
    project = read_project()
    extras = project["optional-dependencies"]
    wanted = {canonical(line) for line in [*project["dependencies"], *extras["controller"], *extras["dev"]]}
    lock = (CHECKOUT / "requirements.lock").read_text()
    pinned = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    assert wanted <= pinned, f"make lock: {sorted(wanted - pinned)}"
    assert "pyslurm" not in pinned, "pyslurm must equal the site's Slurm, so it can't be locked"
    assert "://" not in lock


def test_every_dependency_gives_its_reason() -> None:
    text = (CHECKOUT / "pyproject.toml").read_text()
    section = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    lines = [line for line in section.splitlines() if line.startswith('    "')]
    assert len(lines) > 10
    assert not [line for line in lines if "# " not in line]
