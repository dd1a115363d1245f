"""A virtual environment that may be moved, made without network of what `make venv` has installed from the lock.

The distributions that the controller needs (the agent's are a part of them) are copied file by file as their
RECORD lists them, and each file's hash is checked: what is shipped is what was tested. The interpreter is not
shipped: `bin/python3` is a link to the system's interpreter of the same minor version, for which compiled
modules are built.
"""

from __future__ import annotations

import base64
import compileall
import hashlib
import importlib.metadata
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = "slurm-training-watchdog"
EXTRAS = frozenset({"controller"})
PROGRAMS = frozenset({"py-spy"})
"""Programs of other distributions that are copied; all else in their bin/ are scripts that name an interpreter."""

COMMAND = """#!/bin/sh
# The path of this environment is determined at each start, so that it may be moved. Python reads the rest.
'''exec' "$(dirname -- "$(readlink -f -- "$0")")/python3" -P "$0" "$@"
' '''
import sys

from slurm_watchdog.cli.main import main

sys.exit(main())
"""


class PackageError(Exception):
    """Something could not be packed. The text says what, and what to do next."""


def python_version() -> str:
    """The minor version for which the compiled modules here are built, such as `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def make_environment(target: Path, final: str, interpreter: str = "") -> None:
    """Makes the environment in the new directory `target`; `final` is where it will lie (only tracebacks show
    it), `interpreter` what `bin/python3` will link to (empty: /usr/bin/pythonX.Y). Raises PackageError."""
    interpreter = interpreter or f"/usr/bin/python{python_version()}"
    library = target / "lib" / f"python{python_version()}" / "site-packages"
    library.mkdir(parents=True)
    programs = target / "bin"
    programs.mkdir()
    for name in sorted(needed()):
        copy_distribution(importlib.metadata.distribution(name), library, programs)
    unpack_ours(library)
    compile_all(library, f"{final}/{library.relative_to(target)}")
    (programs / "python3").symlink_to(interpreter)
    (programs / "python").symlink_to("python3")
    command = programs / "slurm-watchdog"
    command.write_text(COMMAND)
    command.chmod(0o755)
    (target / "pyvenv.cfg").write_text(
        f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = false\nversion = {python_version()}\n"
    )


def needed(extras: frozenset[str] = EXTRAS) -> set[str]:
    """Names of all distributions that ours needs with `extras`, as they are installed here. Raises PackageError
    if one is not."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(OURS, extras)]
    while waiting:
        name, wanted = waiting.pop()
        for requirement in _requirements(name, wanted):
            each = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if each not in found:
                found.add(each)
                waiting.append(each)
    return {name for name, _ in found} - {OURS}


def _requirements(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise PackageError(f"{name} is not installed in {sys.prefix}: make venv") from error
    for requirement in map(Requirement, lines):
        wanted = [requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in {"",
            *extras}]  # fmt: skip
        if any(wanted):
            yield requirement


def copy_distribution(distribution: importlib.metadata.Distribution, library: Path, programs: Path) -> None:
    """Copies the files of one distribution, each checked against its RECORD. Raises PackageError."""
    name = distribution.metadata["Name"]
    if not distribution.files:
        raise PackageError(f"{name} has no list of its files: make clean venv")
    for file in distribution.files:
        inside = PurePosixPath(file)
        if inside.suffix == ".pyc" or inside.name in ("INSTALLER", "REQUESTED", "direct_url.json"):
            continue
        if inside.parts[0] == "..":
            if inside.name not in PROGRAMS:
                continue
            place = programs / inside.name
        else:
            place = library / inside
        source = Path(str(distribution.locate_file(file)))
        if inside.name != "RECORD":
            check(source, file, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
        executable = source.stat().st_mode & stat.S_IXUSR
        place.chmod(0o755 if executable else 0o644)


def check(source: Path, file: importlib.metadata.PackagePath, name: str) -> None:
    """That `source` is what its distribution's RECORD says. Raises PackageError."""
    if file.hash is None:
        raise PackageError(f"{name}: {file} has no hash in its RECORD: make clean venv")
    try:
        digest = hashlib.new(file.hash.mode, source.read_bytes()).digest()
    except OSError as error:
        raise PackageError(f"{name}: {file} cannot be read ({error.strerror}): make clean venv") from error
    if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
        raise PackageError(f"{name}: {file} was changed after it was installed: make clean venv")


def unpack_ours(library: Path) -> None:
    """Our own package, as its wheel has it."""
    with tempfile.TemporaryDirectory() as folder:
        for wheel in build("wheel", Path(folder)):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(library)


def build(kind: str, folder: Path, project: Path = CHECKOUT) -> list[Path]:
    """Builds the `wheel` or `sdist` of `project` into `folder`, with the backend that is installed here.
    Raises PackageError."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(project)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        raise PackageError(f"the {kind} could not be built: {(done.stderr or done.stdout)[-500:]}")
    pattern = "*.whl" if kind == "wheel" else "*.tar.gz"
    return sorted({*folder.glob(pattern)} - before or {*folder.glob(pattern)})


def compile_all(library: Path, final: str) -> None:
    """Byte code for every module, valid whatever the files' times: the environment is read-only later.
    Raises PackageError."""
    compileall.compile_dir(
        library,
        stripdir=str(library),
        prependdir=final,
        quiet=2,
        workers=1,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip  (its answer is not asked: some wheels hold templates that are no Python)
