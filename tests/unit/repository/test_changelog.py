"""The changelog: by release, the newest of which is the version that this one becomes."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_watchdog import __version__

SECTIONS = {"Added", "Changed", "Fixed", "Removed", "Security", "Names: old and new"}


def test_the_changelog_begins_with_this_version_and_has_each_section_once(checkout: Path) -> None:
    text = (checkout / "CHANGELOG.md").read_text()
    releases = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    number, dev, _ = __version__.partition(".dev")
    said = r"\(unreleased\)" if dev else r"\(20\d\d-\d\d-\d\d\)"
    assert re.fullmatch(rf"{re.escape(number)} {said}", releases[0].splitlines()[0])
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(20\d\d-\d\d-\d\d\)", each.splitlines()[0]) for each in releases[1:])
    for release in releases:
        sections = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert len(sections) == len(set(sections)) and set(sections) <= SECTIONS, release.splitlines()[0]
