"""The concepts: what the people's part of the example speaks of is in docs/glossary.md, or plain English."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_watchdog.config.schema import Config
from tools.docs.options import options

PLAIN = """
about acts after all along and another any comes different each empty event every except for goes half hanging have
here hour invited its last least line list lost man many may minute most name needed never none once one opens order
other others outside own page people per person reach request rest says several share shown some sooner straight such
than that the them this unless used user was what when where wherever which who whole whom with would writes your
action address addresses alarm alert bearer block bot channel count dead digest end file follow group id incoming json member
mention mentioned message notified often place postgresql proven scope secret sent switch thread token url xoxb
api alertmanager external govslack heartbeat notify pulse runbook slack webhook
"""
"""What needs no explanation here: everyday words, and those of the receivers of messages."""


AS_WRITTEN = re.compile(r"\{.*?\}|\[.*?\]|\S*[/:.=_]\S+")
"""Values of the file."""


def terms(checkout: Path) -> list[str]:
    """Those of the glossary."""
    return re.findall(r"^\| (?!term \|)([\w ]+) \|", (checkout / "docs/glossary.md").read_text(), re.MULTILINE)


def test_the_glossary_has_thirty_words(checkout: Path) -> None:
    found = terms(checkout)
    assert len(found) == len(set(found)) <= 30


def test_what_people_set_is_said_in_words_of_the_glossary(checkout: Path) -> None:
    known = {word for term in terms(checkout) for word in term.split()} | set(PLAIN.split())
    people = [each for each in options(Config()) if not each.path.startswith("detectors.")]
    assert {each.path.partition(".")[0] for each in people} >= {"cluster_name", "controller", "restart", "patience"}
    said = " ".join(f"{each.name.replace('_', ' ')} {AS_WRITTEN.sub('', each.text)}" for each in people).lower()
    unknown = {word for word in re.findall(r"[a-z]{3,}", said) if not {word, word.removesuffix("s")} & known}
    assert unknown == set()
