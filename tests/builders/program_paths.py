"""Paths that programs read or execute: no place for a kill switch."""

from __future__ import annotations

PROGRAM_PATHS = (
    ".ssh/rc", ".bashrc.d/x", ".config/autostart/x.desktop", ".config/systemd/user/x.service", ".local/bin/ls", "bin/ls", "a/bin/ls",
    ".bash_profile", ".pythonrc", "venv/lib/python3.11/site-packages/x.pth", ".git/hooks/pre-commit", "etc/profile.d/x", ".x/y/z", "a/.b/c",
)  # fmt: skip
