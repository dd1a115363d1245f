"""The site's knowledge files: who may write them, and what a configuration with broken ones is."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.agent.settings import settings_of
from slurm_watchdog.config.knowledge_files import MAX_BYTES, read_texts
from slurm_watchdog.config.loading import ConfigError, load_config

ROW = r"""[log acme_license]
means: the ACME licence server refused
needle: acme:
pattern: ACME: no licence for \w+
source: ACME solver 3.2, manual
example: ACME: no licence for fluids
not: ACME: licence taken for fluids
"""


def configured(tmp_path: Path, **files: str) -> str:
    directory = tmp_path / "knowledge.d"
    directory.mkdir(mode=0o755, exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.conf").write_text(text)
        (directory / f"{name}.conf").chmod(0o644)
    file = tmp_path / "config.yaml"
    file.write_text(f"knowledge: {{directory: {directory}}}\n")
    return str(file)


def test_read_texts_of_a_directory_that_is_missing_is_empty_and_fine(tmp_path: Path) -> None:
    assert read_texts(str(tmp_path / "none")) == ((), [])


def test_files_are_taken_by_name_and_others_in_the_directory_are_not(tmp_path: Path) -> None:
    file = configured(tmp_path, b=ROW, a="# nothing\n")
    (tmp_path / "knowledge.d/README").write_text("x")
    (tmp_path / "knowledge.d/.c.conf").write_text("x")
    config = load_config(file)
    assert [Path(each.file).name for each in config.site_texts] == ["a.conf", "b.conf"]
    assert settings_of(config).site_texts == config.site_texts


def test_configurations_differ_if_their_knowledge_files_do(tmp_path: Path) -> None:
    file = configured(tmp_path, a=ROW)
    before = load_config(file)
    assert load_config(file) == before
    configured(tmp_path, a=ROW.replace("refused", "said no"))
    assert load_config(file) != before


def test_a_broken_file_makes_the_configuration_wrong_with_the_place_in_the_file(tmp_path: Path) -> None:
    file = configured(tmp_path, a=ROW.replace("needle: acme:", "needle: ACME:"), b="[lgo x]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    lines = caught.value.lines()
    assert any("a.conf:1: [log acme_license]: needle 'ACME:' has capital letters" in line for line in lines)
    assert any("b.conf:1: [lgo x]: unknown kind 'lgo'" in line for line in lines)
    assert load_config(file, with_knowledge=False).site_texts == ()


@pytest.mark.parametrize("what", ["knowledge.d", "knowledge.d/a.conf"])
def test_a_file_or_directory_that_others_may_write_is_refused(tmp_path: Path, what: str) -> None:
    file = configured(tmp_path, a=ROW)
    (tmp_path / what).chmod(0o777)
    with pytest.raises(ConfigError, match=f"{what} may be written by its group or by others: chmod go-w"):
        load_config(file)


def test_knowledge_directory_with_binary_special_or_too_large_files_is_refused(tmp_path: Path) -> None:
    directory = Path(configured(tmp_path, a="#" * (MAX_BYTES + 1))).parent / "knowledge.d"
    (directory / "b.conf").write_bytes(b"\xff\xfe")
    (directory / "c.conf").mkdir()
    _, problems = read_texts(str(directory))
    assert [problem.removeprefix(f"{directory}") for problem in problems] == [
        "/b.conf is not UTF-8 text (invalid start byte)",
        "/c.conf cannot be read: Is a directory",
        " holds 256 KiB of rows; 256 KiB are possible",
    ]
