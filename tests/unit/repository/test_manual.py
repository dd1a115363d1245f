"""The manual page: everything that `--help` says, read by the real man and groff without a warning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from slurm_watchdog.cli.main import main
from tools.packaging import manual
from tools.packaging.manual import roff


@pytest.fixture(scope="module")
def page() -> str:
    return manual.page(main, click.Context(main, info_name="slurm-watchdog", max_content_width=110))


def commands(group: click.Group) -> Iterator[click.Command]:
    """Every command that somebody may type, those below others too."""
    for command in group.commands.values():
        if not command.hidden:
            yield command
            if isinstance(command, click.Group):
                yield from commands(command)


def test_manual_page_has_every_command_with_its_first_sentence_and_every_option(page: str) -> None:
    for command in commands(main):
        assert f"{roff(str(command.name))} " in page
        assert roff((command.help or "").strip().splitlines()[0].strip()) in page
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert roff(parameter.opts[0]) in page, (command.name, parameter.opts)


def test_manual_page_is_ascii_and_escapes_lines_that_look_like_roff_requests(page: str) -> None:
    assert page.isascii()
    known = ["TH", "SH", "SS", "PP", "TP", "B", "nf", "fi"]
    assert {line.split()[0][1:] for line in page.splitlines() if line.startswith(".")} <= set(known)
    assert not [line for line in page.splitlines() if line.startswith("'")]
    assert roff(".x 'y' \\n é-") == "\\&.x \\(aqy\\(aq \\en \\[u00E9]\\-"
    assert roff("'x") == "\\&\\(aqx"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_reads_it_without_a_warning(page: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-rLL=120n"],
        input=page.encode(),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    text = re.sub(r".\x08|\x1b\[[\d;]*m", "", done.stdout.decode())
    assert 'slurm-watchdog pause "moving the storage"' in text


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_man_shows_it(page: str, tmp_path: Path) -> None:
    file = tmp_path / "slurm-watchdog.1"
    file.write_text(page)
    done = subprocess.run(
        ["man", "-l", str(file)], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "MANWIDTH": "80", "MAN_KEEP_FORMATTING": "", "PAGER": "cat", "MANPAGER": "cat"},
    )  # fmt: skip
    if "has been minimized" in done.stdout + done.stderr:
        pytest.skip("this system has no real man, only a note in its place")
    assert done.returncode == 0, done.stderr
    assert "EXIT STATUS" in done.stdout
