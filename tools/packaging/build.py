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
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_watchdog import __version__
from tools.packaging import layout, parts
from tools.packaging.environment import CHECKOUT, PackageError, build, python_version

VERSION = __version__.replace(".dev", "~dev")
"""As dpkg and rpm write it: a tilde sorts what comes before a release below it."""
KINDS = ("wheel", "sdist", "hooks", "archive", "deb", "rpm")
SPEC = CHECKOUT / "tools/packaging/slurm-watchdog.spec"
CONTROL = """Package: {package}
Version: {version}
Architecture: {architecture}
Maintainer: slurm-watchdog maintainers <maintainers@slurm-watchdog.invalid>
Installed-Size: {kib}
{relations}
Section: admin
Priority: optional
Description: watches large training jobs on Slurm and names what is stuck or broken
 {part}
 When a training job stops making steps it says which rank on which node and
 GPU stopped and why, keeps the evidence and, where it is allowed to, restarts
 the job without the broken node. Everything lies in a virtual environment of
 its own below /opt/slurm-watchdog. No service is enabled by the installation.
"""
RELATIONS = {
    parts.NODE: "Depends: python{python}, systemd\nSuggests: slurm-client, munge",
    # Up to 0.1 one package had everything. No Breaks: its prerm would disable the services for that.
    parts.CONTROLLER: "Depends: {node} (= {version})\nReplaces: {node} (<< {version})",
}
PART = {
    parts.NODE: "The package for compute nodes: the agent, its courier, and `run`.",
    parts.CONTROLLER: "On top of slurm-watchdog, for management and login nodes and for `run` on\n"
    " one's own: the command line, and the controller.",
}
OWN = {
    parts.NODE: "/var/lib/slurm-watchdog-agent /run/slurm-watchdog-agent",
    parts.CONTROLLER: "/var/lib/slurm-watchdog",
}
"""What a purge removes besides the configuration."""


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


def make_deb(output: Path, root: Path, package: str, version: str, fast: bool = False) -> Path:
    """The `.deb` of a package from its tree `root`; `fast` packs it badly. Raises PackageError."""
    if shutil.which("dpkg-deb") is None:
        raise PackageError("dpkg-deb is not here: a .deb is made on Debian or Ubuntu")
    control = root / "DEBIAN"
    control.mkdir()
    size = sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
    relations = RELATIONS[package].format(version=version, python=python_version(), node=parts.NODE)
    (control / "control").write_text(
        CONTROL.format(
            package=package, version=version, architecture=architecture(), kib=size >> 10, relations=relations,
            part=PART[package],
        )
    )  # fmt: skip
    if package == parts.NODE:
        (control / "conffiles").write_text(f"/{layout.CONFIG}\n")
    for name in ("postinst", "prerm", "postrm"):
        text = (CHECKOUT / "tools/packaging/debian" / name).read_text()
        for mark, value in (
            ("@PACKAGE@", package), ("@UNITS@", " ".join(layout.services(package))), ("@OWN@", OWN[package]),
        ):  # fmt: skip
            text = text.replace(mark, value)
        (control / name).write_text(text)
        (control / name).chmod(0o755)
    file = output / f"{package}_{version}_{architecture()}.deb"
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


def make_rpm(output: Path, root: Path, package: str, version: str, fast: bool = False) -> Path:
    """The `.rpm` of a package from its tree `root`; `fast` packs it badly. Raises PackageError."""
    if shutil.which("rpmbuild") is None:
        raise PackageError("rpmbuild is not here: dnf install rpm-build, on Debian apt-get install rpm")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "files"
        listed.write_text("".join(f"{line}\n" for line in rpm_files(root)))
        defines = {
            "_topdir": folder, "_rpmdir": folder, "staged": str(root), "our_version": version,
            "python_minor": python_version(), "our_units": " ".join(layout.services(package)), "listed": str(listed),
            "our_name": package, f"is_{'node' if package == parts.NODE else 'controller'}": "1",
            "_binary_payload": "w1.gzdio" if fast else "w9.gzdio",
            "_rpmfilename": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
        }  # fmt: skip
        words = [word for name, value in defines.items() for word in ("--define", f"{name} {value}")]
        run(["rpmbuild", "-bb", *words, str(SPEC)])
        (made,) = Path(folder).glob("*.rpm")
        return Path(shutil.copy(made, output / made.name))


def rpm_files(root: Path) -> Iterator[str]:
    """The list of files of a recipe: those below `root`, and directories of ours alone."""
    for place in sorted(root.rglob("*")):
        name = f"/{place.relative_to(root)}"
        if place.is_dir() and not place.is_symlink():
            if name.startswith((layout.PREFIX, "/etc/slurm-watchdog", "/usr/share/doc/")) and name != "/usr/share/doc":
                yield f'%dir "{name}"'
        elif name == f"/{layout.CONFIG}":
            yield f'%config(noreplace) "{name}"'
        else:
            yield f'"{name}"'.replace("/usr/share/zsh/vendor-completions", "/usr/share/zsh/site-functions")


def architecture() -> str:
    """As Debian calls this machine's: amd64, arm64; elsewhere as the kernel does."""
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def tell(what: str) -> None:
    """What is made now, on standard error."""
    print(f"making: {what}", file=sys.stderr, flush=True)


def make(kinds: Sequence[str], output: Path, versions: Sequence[str] = (VERSION,), fast: bool = False) -> list[Path]:
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
        top = Path(folder) / "top"
        top.mkdir(mode=0o755)
        layout.split(root, top)
        trees = {parts.NODE: root, parts.CONTROLLER: top}
        for kind, pack in (("deb", make_deb), ("rpm", make_rpm)):
            if kind in kinds:
                tell(f"{kind} (packing takes minutes)")
                made += [pack(output, tree, name, each, fast) for each in versions for name, tree in trees.items()]
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
        default=VERSION,
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
