"""What is built says of which commit it is: hatchling's hook for the wheel and the source archive."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "watchdog/slurm_watchdog"


class CommitHook(BuildHookInterface):
    """Adds the file that `slurm_watchdog.base.commit` reads."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("commit", root / PACKAGE / "base/commit.py")
        if version == "editable" or spec is None or spec.loader is None or (root / PACKAGE / "COMMIT").exists():
            return
        commit = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(commit)
        if found := commit.commit_of(root):
            file = Path(tempfile.mkdtemp()) / "COMMIT"
            file.write_text(f"{found}\n")
            inside = "slurm_watchdog" if self.target_name == "wheel" else PACKAGE
            build_data["force_include"][str(file)] = f"{inside}/COMMIT"
