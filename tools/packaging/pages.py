"""What a shell and `man` read: the manual page and the completions, made of the commands themselves."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from slurm_watchdog.cli.main import main
from tools.packaging import manual

NAME = "slurm-watchdog"
VARIABLE = "_SLURM_WATCHDOG_COMPLETE"
"""By which click is asked for completions: _PROGRAM_COMPLETE."""
MAN = "man/man1/slurm-watchdog.1.gz"
ZSH = "zsh/vendor-completions/_slurm-watchdog"
"""Debian's place; the recipe of the .rpm moves it to Red Hat's, zsh/site-functions."""
COMPLETIONS: dict[str, type[ShellComplete]] = {
    "bash-completion/completions/slurm-watchdog": BashComplete,
    ZSH: ZshComplete,
    "fish/vendor_completions.d/slurm-watchdog.fish": FishComplete,
}
"""Place below share/ -> who writes it."""


def pages() -> Iterator[tuple[str, bytes]]:
    """Each file: its place below share/, and what it holds; the same each time."""
    context = click.Context(main, info_name=NAME, max_content_width=110)
    yield MAN, gzip.compress(manual.page(main, context).encode("ascii"), 9, mtime=0)
    for place, shell in COMPLETIONS.items():
        # Not the shell's own source(): bash's asks the bash of this machine for its version.
        yield place, ShellComplete.source(shell(main, {}, NAME, VARIABLE)).encode()
