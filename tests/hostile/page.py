"""The controller's page under names that are meant to harm: what it is given as JSON, and what a real
Chromium makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.node_view import NodeView, SlurmNodeView
from tests.builders import views
from tests.builders.notices import INCIDENT, replace
from tests.hostile.text import batches, well_formed
from tests.integration.chromium import Browser
from tests.page_server import SEES_ALL, FixedController, serving

AT_ONCE = 200
"""Strings of one overview: so many incidents the list of them shows."""
DRAWN_AT_ONCE = 2500
"""Strings that one page draws, each in a row of the jobs and in a node of the map."""
MAX_DRAWN = 300
"""Characters of each: a cell is a cell."""

ELEMENTS = [
    "a",
    "div",
    "span",
    "p",
    "i",
    "h1",
    "h2",
    "ul",
    "ol",
    "li",
    "section",
    "strong",
    "time",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "svg",
    "title",
    "polyline",
    "polygon",
    "rect",
    "line",
    "text",
    "figure",
    "figcaption",
]
ATTRIBUTES = [
    "href",
    "class",
    "title",
    "aria-label",
    "aria-hidden",
    "role",
    "tabindex",
    "scope",
    "datetime",
    "download",
    "points",
    "x",
    "y",
    "x1",
    "x2",
    "y1",
    "y2",
    "width",
    "height",
    "text-anchor",
    "viewBox",
    "preserveAspectRatio",
    "data-of",
]
LOOK = """(() => {
  const elements = new Set(ELEMENTS), attributes = new Set(ATTRIBUTES), bad = [];
  for (const each of document.querySelectorAll("main *")) {
    if (!elements.has(each.tagName.toLowerCase())) bad.push(`<${each.tagName}>`);
    for (const { name, value } of each.attributes) {
      if (!attributes.has(name)) bad.push(`${each.tagName} ${name}`);
      if (name === "href" && !/^(\\?|v1\\/incidents\\/)/.test(value)) bad.push(value.slice(0, 80));
    }
  }
  const hidden = document.querySelector("main").textContent.match(/(?![\\n\\t])[\\p{Cc}\\p{Cf}\\p{Cs}\\p{Co}\\p{Cn}\\u2028\\u2029]/u);
  if (hidden) bad.push(`U+${hidden[0].codePointAt(0).toString(16)}`);
  return { bad: bad.slice(0, 5), rows: document.querySelectorAll("main tbody tr").length, title: document.title };
})()""".replace("ELEMENTS", json.dumps(ELEMENTS)).replace("ATTRIBUTES", json.dumps(ATTRIBUTES))


def controller_of(texts: Sequence[str], mark: str) -> FixedController:
    """A controller that knows a job, an incident and a node for each of them; the jobs' numbers begin with `mark`."""
    jobs = tuple(
        views.job(
            job=views.slurm_job(job_id=f"{mark}x{number}", name=text, user=text, partition=text, nodes=(f"n{number}",))
        )
        for number, text in enumerate(texts)
    )
    view = views.cluster(
        *jobs,
        nodes=tuple(NodeView(name=f"n{number}", reported_at=9_999.0) for number in range(len(texts))),
        slurm_nodes=tuple(SlurmNodeView(name=f"n{n}", state="DOWN", reason=t) for n, t in enumerate(texts)),
    )
    incidents = [
        replace(
            INCIDENT, id=f"{mark}i{number}", summary=text, subject=text, facts=(text,), resolution=text,
            culprits=(Culprit(node=text, reason=text, path=text, mount=text),), job_ids=(f"{mark}x{number}",),
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip
    return FixedController(view, incidents, said=" ".join(texts[:20]))


async def answers(number: int) -> None:
    """Asks the page's API for all of them. Raises AssertionError for an answer that is no plain JSON, or says
    something else."""
    async with aiohttp.ClientSession() as session:
        for texts in batches(number, AT_ONCE):
            async with serving(controller_of(texts, "b"), person=SEES_ALL) as url:
                overview, texts = await _json(session, f"{url}/v1/overview"), list(map(well_formed, texts))
                assert [job["name"] for job in overview["jobs"]] == texts
                assert [each["summary"] for each in overview["open"]] == texts
                newest = await _json(session, f"{url}/v1/incidents")
                assert sorted(each["summary"] for each in newest) == sorted(texts)
                assert (await _json(session, f"{url}/v1/jobs/bx0"))["user"] == texts[0]
                one = await _json(session, f"{url}/v1/incidents/bi0")
                assert one["incident"]["evidence"] == [texts[0]]


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        assert answer.status == 200
        assert answer.content_type == "application/json"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        body = await answer.read()
        return json.loads(body.decode())


async def drawn(number: int) -> int:
    """Draws all of them in Chromium, and an incident and a job of each page. Returns the rows that were drawn.

    Raises AssertionError for an element, an attribute, a link or a character that is not ours, and for
    anything that the browser complains of: a script that ran, an address that was asked for.
    """
    rows = 0
    start = controller_of(("plain",), "p")
    async with serving(start, person=SEES_ALL) as url, Browser(url) as browser:
        for index, texts in enumerate(batches(number, DRAWN_AT_ONCE)):
            mark = f"b{index}"
            # The same controller, another cluster: a page that is open keeps working.
            new = controller_of([text[:MAX_DRAWN] for text in texts], mark)
            start.judge, start.journal, start.state, start.ledger = new.judge, new.journal, new.state, new.ledger
            await browser.sees(f"{mark}x0")
            rows += await _look(browser, len(texts))
            for place in (f"?incident={mark}i1", f"?job={mark}x1", "?incidents", "?node=n1", "?nodes"):
                await browser.goes(place)
                await browser.sees("Nodes with a past" if place == "?nodes" else f"{mark}x1")
                await _look(browser, 0)
            await browser.goes("?")
        assert browser.errors == [], browser.errors[:3]
    return rows


async def _look(browser: Browser, rows: int) -> int:
    seen = await browser.evaluate(LOOK)
    assert seen["bad"] == [], seen
    assert seen["rows"] >= rows, seen
    assert str(seen["title"]).endswith("slurm-watchdog made-up")
    return int(seen["rows"])
