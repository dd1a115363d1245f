"""The changelog: by release, the newest of which is the version that this is."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_watchdog import __version__

SECTIONS = {"Added", "Changed", "Fixed", "Removed", "Security", "Names: old and new"}


def test_the_changelog_has_what_is_not_released_then_this_version_each_section_once(checkout: Path) -> None:
    text = (checkout / "CHANGELOG.md").read_text()
    releases = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert re.fullmatch(r"\d+\.\d+\.\d+ \(unreleased\)", releases[0].splitlines()[0])
    assert re.fullmatch(rf"{re.escape(__version__)} \(20\d\d-\d\d-\d\d\)", releases[1].splitlines()[0])
    for release in releases:
        sections = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert len(sections) == len(set(sections)) and set(sections) <= SECTIONS, release.splitlines()[0]
