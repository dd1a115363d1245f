"""The concepts: what the people's part of the example speaks of is in docs/glossary.md, or plain English."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_watchdog.config.schema import Config
from tools.docs.options import options

PLAIN = """
about action acts address addresses after alarm alert alertmanager all along also and another any api bearer block bot
causes channel comes count dead different digest each empty enabled end event every except external file follow for
goes govslack group half hanging has have heartbeat here hour id incoming invited its json last least line list lost
man many may member mention mentioned message minute most name needed never none notified notify often once one opens
order other others outside own page people per person place postgresql proven pulse reach request rest runbook says
scope secret sent several share shown single slack some sooner straight such switch than that the them this thread
token unless url used user was webhook what when where wherever which who whole whom with would writes xoxb your
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
