"""Builds the packages: `python -m tools.packaging WHAT… [--output DIR]`, and says what it made, a line each."""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slurm_watchdog import __version__
from tools.packaging import layout
from tools.packaging.environment import CHECKOUT, PackageError, build, python_version

KINDS = ("wheel", "sdist", "hooks", "archive", "deb", "rpm")
SPEC = CHECKOUT / "tools/packaging/slurm-watchdog.spec"
CONTROL = """Package: slurm-watchdog
Version: {version}
Architecture: {architecture}
Maintainer: slurm-watchdog maintainers <maintainers@slurm-watchdog.invalid>
Installed-Size: {kib}
Depends: python{python}, systemd
Suggests: slurm-client, munge
Section: admin
Priority: optional
Description: watches large training jobs on Slurm and names what is stuck or broken
 An agent on every compute node, a controller on one node. When a training job
 stops making steps it says which rank on which node and GPU stopped and why,
 keeps the evidence and, where it is allowed to, restarts the job without the
 broken node. Everything lies in a virtual environment of its own below
 /opt/slurm-watchdog. No service is enabled by the installation.
"""


def run(argv: list[str], **options: object) -> str:
    """Standard output of a command. Raises PackageError with what it said."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise PackageError(f"{argv[0]}: {(done.stderr or done.stdout).strip()[-800:]}")
    return str(done.stdout)


def source_date() -> str:
    """Seconds since the epoch that every file in a package gets at most: SOURCE_DATE_EPOCH, else the time of
    the commit, else 1980."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return given
    try:
        return run(["git", "-C", str(CHECKOUT), "log", "-1", "--format=%ct"]).strip() or "315532800"
    except (PackageError, OSError):
        return "315532800"


def make_archive(output: Path, root: Path, version: str) -> Path:
    """The environment of `root` as a tar archive that is unpacked in /: `tar -C / -xzf FILE`."""
    file = output / f"slurm-watchdog-{version}-python{python_version()}-{architecture()}.tar.gz"
    latest = int(source_date())

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = latest
        return member

    with (
        open(file, "wb") as out,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=out, mtime=latest) as stream,
        tarfile.open(fileobj=stream, mode="w") as packed,
    ):
        packed.add(root / layout.PREFIX[1:], layout.PREFIX[1:], filter=plain)
    return file


def make_deb(output: Path, root: Path, version: str, fast: bool = False) -> Path:
    """A `.deb` of the tree `root`; `fast` packs it badly. Raises PackageError."""
    if shutil.which("dpkg-deb") is None:
        raise PackageError("dpkg-deb is not here: a .deb is made on Debian or Ubuntu")
    control = root / "DEBIAN"
    control.mkdir()
    size = sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
    (control / "control").write_text(
        CONTROL.format(version=version, architecture=architecture(), kib=size >> 10, python=python_version())
    )
    (control / "conffiles").write_text(f"/{layout.CONFIG}\n")
    for name in ("postinst", "prerm", "postrm"):
        text = (CHECKOUT / "tools/packaging/debian" / name).read_text()
        (control / name).write_text(text.replace("@UNITS@", " ".join(layout.services())))
        (control / name).chmod(0o755)
    file = output / f"slurm-watchdog_{version}_{architecture()}.deb"
    packing = ["-Zgzip", "-z1"] if fast else ["-Zxz"]
    environment = os.environ | {"SOURCE_DATE_EPOCH": source_date()}
    # Packing takes minutes: under its final name there is a whole package, or none.
    unfinished = file.with_suffix(".deb.part")
    try:
        run(
            ["dpkg-deb", "--root-owner-group", *packing, "--build", str(root), str(unfinished)],
            env=environment,
        )
        unfinished.replace(file)
    finally:
        shutil.rmtree(control)
        unfinished.unlink(missing_ok=True)
    return file


def make_rpm(output: Path, root: Path, version: str, fast: bool = False) -> Path:
    """A `.rpm` of the tree `root`; `fast` packs it badly. Raises PackageError."""
    if shutil.which("rpmbuild") is None:
        raise PackageError("rpmbuild is not here: dnf install rpm-build, on Debian apt-get install rpm")
    files = set(layout.system_files().values())
    marks = {
        f"has_{kind}": "1" for kind in ("sysusers", "tmpfiles") if f"usr/lib/{kind}.d/slurm-watchdog.conf" in files
    }
    with tempfile.TemporaryDirectory() as folder:
        defines = {
            "_topdir": folder, "_rpmdir": folder, "staged": str(root), "our_version": version,
            "python_minor": python_version(), "our_units": " ".join(layout.services()),
            "_binary_payload": "w1.gzdio" if fast else "w9.gzdio",
            "_rpmfilename": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm", **marks,
        }  # fmt: skip
        words = [word for name, value in defines.items() for word in ("--define", f"{name} {value}")]
        run(["rpmbuild", "-bb", *words, str(SPEC)])
        (made,) = Path(folder).glob("*.rpm")
        return Path(shutil.copy(made, output / made.name))


def architecture() -> str:
    """As Debian calls this machine's: amd64, arm64; elsewhere as the kernel does."""
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def tell(what: str) -> None:
    """What is made now, on standard error."""
    print(f"making: {what}", file=sys.stderr, flush=True)


def make(
    kinds: Sequence[str], output: Path, versions: Sequence[str] = (__version__,), fast: bool = False
) -> list[Path]:
    """Makes what `kinds` names in the directory `output`, packages once for each of `versions`; gives the
    files. Raises PackageError."""
    output.mkdir(parents=True, exist_ok=True)
    made = [file for kind in ("wheel", "sdist") if kind in kinds for file in build(kind, output)]
    if "hooks" in kinds:  # what goes into a training's environment, and needs nothing of ours there
        made += [file for kind in ("wheel", "sdist") for file in build(kind, output, CHECKOUT / "hooks")]
    if not {"archive", "deb", "rpm"} & set(kinds):
        return made
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        root.mkdir(mode=0o755)
        tell("environment: every package of the lock, compiled")
        layout.stage_environment(root)
        if "archive" in kinds:
            tell("archive")
            made += [make_archive(output, root, version) for version in versions]
        layout.stage_system(root)
        if "deb" in kinds:
            tell("deb (packing takes minutes)")
            made += [make_deb(output, root, version, fast) for version in versions]
        if "rpm" in kinds:
            tell("rpm (packing takes minutes)")
            made += [make_rpm(output, root, version, fast) for version in versions]
    return made


def main() -> int:
    """The command line. Gives 0, or 1 if something could not be made."""
    parser = argparse.ArgumentParser(prog="python -m tools.packaging", description=__doc__)
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="WHAT",
        help=f"{' '.join(KINDS)}; without any: all that this machine can make",
    )
    parser.add_argument("--output", type=Path, default=CHECKOUT / "dist", help="directory (dist/)")
    parser.add_argument(
        "--version",
        default=__version__,
        help="version of the packages, where a site adds its own number to ours",
    )
    parser.add_argument("--fast", action="store_true", help="pack quickly and badly, to try it")
    given = parser.parse_args()
    if unknown := set(given.kinds) - set(KINDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    if re.fullmatch(r"[0-9][0-9A-Za-z.+~]*", given.version) is None:
        parser.error(f"{given.version!r} is no version")
    tools = {"deb": "dpkg-deb", "rpm": "rpmbuild"}
    missing = {kind for kind, tool in tools.items() if shutil.which(tool) is None}
    kinds = given.kinds or [kind for kind in KINDS if kind not in missing]
    for kind in sorted(missing - set(kinds)) if not given.kinds else ():
        print(f"no {kind}: {tools[kind]} is not here", file=sys.stderr)
    try:
        made = make(kinds, given.output, [given.version], given.fast)
    except PackageError as error:
        print(error, file=sys.stderr)
        return 1
    for file in made:
        print(f"{file.stat().st_size / 1e6:6.1f} MB  {file}")
    return 0
