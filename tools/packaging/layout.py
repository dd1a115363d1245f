"""Where each file of the checkout is installed on a node: one table for the archive, the `.deb` and the `.rpm`."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.packaging import parts
from tools.packaging.environment import CHECKOUT, PackageError, make_environment
from tools.packaging.pages import pages

PREFIX = "/opt/slurm-watchdog"
"""What the units of systemd/ start."""
SHARE = f"{PREFIX[1:]}/share"
SHARED = (
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "config.example.yaml",
    "systemd",
    "docs",
    "deploy/README.md",
    "deploy/config.yaml",
    "deploy/slurm",
    "deploy/ansible",
    "deploy/profiles",
    "deploy/trainers",
    "deploy/prometheus",
    "deploy/node-test",
    "deploy/grafana/dashboards",
    "deploy/grafana/provisioning",
)
"""Files and directories of the checkout that lie below share/ by the same path: links in the documents stay right."""
NOT_SHARED = shutil.ignore_patterns("__pycache__", "__init__.py", "generate.py", "alerts_test.yaml")
CONFIG = "etc/slurm-watchdog/config.yaml"
COPYRIGHT = "usr/share/doc/slurm-watchdog/copyright"


def stage_environment(root: Path) -> None:
    """The environment with its share/ at its place below `root`. Raises PackageError."""
    make_environment(root / PREFIX[1:], PREFIX)
    for source in SHARED:
        origin, place = CHECKOUT / source, root / SHARE / source
        if origin.is_dir():
            shutil.copytree(origin, place, ignore=NOT_SHARED)
        elif origin.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, place)
        else:
            raise PackageError(f"{source} is not in this checkout")
    for script in (root / SHARE / "deploy/slurm").glob("*.sh"):
        script.chmod(0o755)
    stage_pages(root / SHARE)


def stage_pages(share: Path) -> None:
    """The manual page and the completions of bash, zsh and fish below a directory like /usr/share."""
    for name, content in pages():
        place = share / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        place.chmod(0o644)


def stage_system(root: Path) -> None:
    """What a package adds to an environment that was staged below `root`: the command with its manual page
    and completions, units, users, directories, configuration."""
    copy(CHECKOUT / "deploy/config.yaml", root / CONFIG)
    copy(CHECKOUT / "LICENSE", root / COPYRIGHT)
    for source, target in system_files().items():
        copy(CHECKOUT / source, root / target)
    stage_pages(root / "usr/share")
    link = root / "usr/bin/slurm-watchdog"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"{PREFIX}/bin/slurm-watchdog")


def split(root: Path, top: Path) -> None:
    """Moves what the package for nodes lacks from `root` into the new tree `top`. Raises PackageError."""
    (library,) = (root / PREFIX[1:] / "lib").glob("python*/site-packages")
    modules, files = parts.node_modules(library), parts.node_files()
    share = root / SHARE
    shared = [share / each for each in parts.NODE_SHARE]
    for place in sorted(root.rglob("*")):
        if place.is_dir() and not place.is_symlink():
            continue
        if place.is_relative_to(library):
            stays = parts.is_nodes(place, library, modules, files)
        elif place.is_relative_to(share):
            stays = any(place == each or place.is_relative_to(each) for each in shared)
        else:
            stays = place.name != CONTROLLER_UNIT
        if not stays:
            target = top / place.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            place.rename(target)
    for folder in sorted((each for each in root.rglob("*") if each.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    copy(CHECKOUT / "LICENSE", top / f"usr/share/doc/{parts.CONTROLLER}/copyright")


def units() -> list[str]:
    """Names of the units of systemd/, such as `slurm-watchdog-agent.service`."""
    return sorted(path.name for path in (CHECKOUT / "systemd").iterdir() if path.suffix in UNIT_SUFFIXES)


CONTROLLER_UNIT = "slurm-watchdog-controller.service"


def services(package: str) -> list[str]:
    """Those of a package that are restarted by an upgrade."""
    return [name for name in units() if (name == CONTROLLER_UNIT) == (package == parts.CONTROLLER)]


UNIT_SUFFIXES = frozenset({".service", ".socket", ".slice", ".target", ".timer"})


def system_files() -> dict[str, str]:
    """Path in the checkout -> path on a node, of units, sysusers and tmpfiles: whatever systemd/ holds.
    Raises PackageError."""
    found: dict[str, str] = {}
    for path in sorted((CHECKOUT / "systemd").rglob("*")):
        inside = path.relative_to(CHECKOUT).as_posix()
        if not path.is_file():
            continue
        if path.suffix in UNIT_SUFFIXES:
            found[inside] = f"usr/lib/systemd/system/{path.name}"
            continue
        kind = next((kind for kind in ("sysusers", "tmpfiles") if kind in inside), None)
        if kind is not None and path.suffix == ".conf":
            found[inside] = f"usr/lib/{kind}.d/slurm-watchdog.conf"
        elif path.suffix != ".md":
            raise PackageError(f"{inside}: add where it is installed to tools/packaging/layout.py")
    if len(set(found.values())) != len(found):
        raise PackageError("two files of systemd/ would lie in one place (tools/packaging/layout.py)")
    return found


def copy(source: Path, place: Path) -> None:
    """One file, readable by all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)
    place.chmod(0o644)
