"""What the packages hold, and that what is written about the configuration is what the schema says."""

from __future__ import annotations

import gzip
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_watchdog.cli.main import main
from slurm_watchdog.config.loading import load_config
from slurm_watchdog.config.schema import Config, Expert
from tools.docs import options
from tools.packaging import layout
from tools.packaging.build import make_archive
from tools.packaging.environment import OURS, PackageError, check, copy_distribution, needed
from tools.packaging.pages import COMPLETIONS, MAN, pages


def test_every_option_is_in_the_reference_and_in_the_example_with_its_default(checkout: Path) -> None:
    page, example = options.FILE.read_text(), yaml.safe_load(options.EXAMPLE.read_text())
    for each in options.options(Config()):
        assert each.default is None or f"| `{each.path}` | " in page, each
        assert _in(example, each.path) == _loaded(each.default), each
    for each in options.options(Expert()):
        assert _in(example["expert"], each.path) == _loaded(each.default), each


def _in(values: dict[str, Any], path: str) -> Any:
    found = reduce(dict.__getitem__, path.split("."), values)
    return dict if isinstance(found, dict) and found else found


def _loaded(default: str | None) -> Any:
    return dict if default is None else yaml.safe_load(default)


def test_the_configuration_that_a_package_brings_is_valid_and_observes(checkout: Path) -> None:
    config = load_config(str(checkout / "deploy/config.yaml"))
    assert config.mode == "observe"


def test_every_file_of_systemd_has_its_place_on_a_node(checkout: Path) -> None:
    places = layout.system_files()
    assert {f"systemd/{unit}" for unit in layout.units()} <= set(places)
    assert all(place.startswith("usr/lib/") for place in places.values())
    for unit in layout.units():
        assert layout.PREFIX in (checkout / "systemd" / unit).read_text() or not unit.endswith(".service")


def test_all_that_the_controller_needs_is_packed_and_nothing_of_the_development_tools() -> None:
    names = needed()
    assert {"aiohttp", "jinja2", "py-spy", "msgspec", "sqlalchemy", "uvloop", "nvidia-ml-py"} <= names
    assert not {OURS, "pytest", "mypy", "ruff", "hatchling"} & names


def test_the_node_needs_what_its_table_says_and_no_more() -> None:
    assert needed(frozenset()) == {
        "msgspec", "nvidia-ml-py", "py-spy", "psutil", "pyyaml", "clustershell", "click",
    }  # fmt: skip


def test_a_file_that_was_changed_after_its_installation_is_not_packed(tmp_path: Path) -> None:
    distribution = importlib.metadata.distribution("markupsafe")
    assert distribution.files is not None
    file = next(each for each in distribution.files if each.name == "__init__.py")
    changed = tmp_path / "__init__.py"
    changed.write_bytes(Path(str(distribution.locate_file(file))).read_bytes())
    check(changed, file, "markupsafe")
    changed.write_text(changed.read_text() + "\n")
    with pytest.raises(PackageError, match="was changed after it was installed"):
        check(changed, file, "markupsafe")


def test_programs_that_name_an_interpreter_are_left_out(tmp_path: Path) -> None:
    for name in ("py-spy", "idna"):
        copy_distribution(importlib.metadata.distribution(name), tmp_path / "library", tmp_path / "bin")
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["py-spy"]


def test_an_archive_belongs_to_root_and_is_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    place = tmp_path / "root" / layout.PREFIX[1:]
    place.mkdir(parents=True)
    (place / "pyvenv.cfg").write_text("home = /usr/bin\n")
    file = make_archive(tmp_path, tmp_path / "root", "1.0")
    with tarfile.open(file) as packed:
        members = packed.getmembers()
    assert [member.name for member in members] == ["opt/slurm-watchdog", "opt/slurm-watchdog/pyvenv.cfg"]
    first = file.read_bytes()
    assert make_archive(tmp_path, tmp_path / "root", "1.0").read_bytes() == first
    assert {(member.uid, member.uname, member.mtime) for member in members} == {(0, "root", 1700000000)}


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_a_script_of_the_package_is_valid_and_touches_only_what_is_ours(checkout: Path, script: str) -> None:
    file = checkout / "tools/packaging/debian" / script
    assert subprocess.run(["sh", "-n", str(file)], timeout=20).returncode == 0
    removed = re.findall(r"rm -rf ([^\n;]*)", file.read_text())
    for path in " ".join(removed).replace('"', "").split():
        assert "slurm-watchdog" in path or path in ("/etc/systemd/system/$unit.d", "@OWN@")


def test_the_manual_page_and_completions_are_made_of_the_commands_and_the_same_each_time(
    tmp_path: Path,
) -> None:
    made = dict(pages())
    assert set(made) == {MAN, *COMPLETIONS}
    assert made == dict(pages())
    page = gzip.decompress(made[MAN]).decode()
    assert page.startswith(".TH SLURM")
    for command in (name for name, each in main.commands.items() if not each.hidden):
        assert f'.SS "{command}'.replace("-", "\\-") in page


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_is_valid_for_its_shell(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (place,) = (each for each in COMPLETIONS if each.startswith(shell))
    (tmp_path / "file").write_bytes(dict(pages())[place])
    done = subprocess.run([shell, "-n", str(tmp_path / "file")], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_bash_completes_a_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(dict(pages())["bash-completion/completions/slurm-watchdog"])
    program = tmp_path / "slurm-watchdog"
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from slurm_watchdog.cli.main import main; main(prog_name=\"slurm-watchdog\")'\n"
    )
    program.chmod(0o755)
    text = f"PATH={tmp_path}:$PATH; . {tmp_path}/file; COMP_WORDS=(slurm-watchdog pa); COMP_CWORD=1; _slurm_watchdog_completion slurm-watchdog; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout == "pause\n", done.stderr


def test_what_can_not_be_made_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.packaging", "tarball", "--output", str(tmp_path)],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 2
    assert "unknown: tarball; known: wheel" in done.stderr
    assert not list(tmp_path.iterdir())
