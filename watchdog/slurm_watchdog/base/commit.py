"""The commit of which this program was made: as the build has written it down, else that of the checkout around it;
and the version of the JSON that commands print."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
WRITTEN = "COMMIT"  # A file of the package in what was built: tools/commit_hook.py.
DIGITS = 8


def read_commit(package: Path = PACKAGE) -> str:
    """Its first digits; empty where nothing says it. Git itself is not asked."""
    try:
        return (package / WRITTEN).read_text().strip()[:DIGITS]
    except OSError:
        return commit_of(package.parents[1])[:DIGITS]


def commit_of(checkout: Path) -> str:
    """The commit that is checked out there; empty if that is no checkout, or it is not known."""
    place = checkout / ".git"
    try:
        if place.is_file():  # a worktree: it names its directory, which names the one of the branches
            place = checkout / place.read_text().removeprefix("gitdir:").strip()
        common = place / (place / "commondir").read_text().strip() if (place / "commondir").exists() else place
        head = (place / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (common / name).exists():
            return (common / name).read_text().strip()
        lines = (common / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
    except OSError:
        return ""


JSON_SCHEMA_VERSION = 1  # Rises when a key is taken away or changes its meaning, not when one is added.
