"""Names of jobs, users and partitions, log lines and paths are written by users. Whatever they hold: nobody
is mentioned, nothing is a link, nothing is markup, no cursor moves, and there is no series more.

A bounded share of the strings runs here; 100,000 of them, and those of the page in a real Chromium, with
`make hostile`.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from slurm_watchdog.base.text import fold
from slurm_watchdog.notify.slack_messages import card
from tests.builders.evidence_rows import add_evidence, evidence_of
from tests.builders.notices import CALLING, INCIDENT, open_journal, replace
from tests.builders.slack_server import marked
from tests.hostile import page
from tests.hostile.shown import CHANNELS, story
from tests.hostile.text import PIECES, batches, strings

NUMBER = 1000


@pytest.mark.parametrize("channel", CHANNELS)
def test_hostile_text_in_a_message_stays_plain_text(channel: str) -> None:
    for batch in batches(NUMBER):
        CHANNELS[channel](batch)


def test_the_page_is_given_json_that_says_what_was_meant() -> None:
    asyncio.run(page.answers(NUMBER))


def test_in_a_mention_stand_ids_of_the_configuration_only() -> None:
    for text in strings(len(PIECES)):
        message = card(story(text), CALLING)
        assert marked(message) in (["<@U0ANN>"], ["<!here>"], ["<!subteam^S0LARGE>"])


def test_the_journal_keeps_it(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    texts = list(strings(300))
    with journal.together():
        for number, text in enumerate(texts):
            journal.save_incident(replace(INCIDENT, id=f"i{number}", summary=text, job_ids=(text,)))
            journal.add_note("i", float(number), text)
            add_evidence(journal, "i", 1.0, "log", {"line": text})
            journal.outbox.add("slack", "i", {"text": text}, 1.0)
    kept = [text for _, text in journal.timeline("i")]
    assert len(kept) == len(texts)
    assert [text for text in texts if text.isascii() and "\0" not in text] == [
        told for told, text in zip(kept, texts, strict=True) if text.isascii() and "\0" not in text
    ]
    assert len(evidence_of(journal, "i")) == len(journal.incidents(limit=1000)) == len(texts)
    assert len(journal.outbox.pending(1000)) == len(texts)
    journal.pause("\ud800\0", "\udfff", 1.0)
    assert journal.paused() == ("??", "?", 1.0)


def test_folding_loses_no_name() -> None:
    for batch in batches(NUMBER):
        names = [text for text in batch if text]
        folded = "\n".join(fold(names))
        for name in names:
            if not re.search(r"\d$", name):
                assert name in folded
