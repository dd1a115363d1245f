"""The last test of nodes on the page: taken of operators, whole, of nodes that Slurm knows; strangers read no reasons."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from slurm_watchdog.controller.api.asking import RequestRefused
from slurm_watchdog.controller.api.comparison_api import comparison_json, parse_comparison
from slurm_watchdog.controller.api.local_socket import make_app
from slurm_watchdog.controller.api.web_page import make_page
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.model.node_comparison import NodeComparison
from tests.builders.measured_nodes import compared
from tests.builders.open_doors import STRANGE, Controller

KEPT = compared(8)
BODY: dict[str, Any] = msgspec.to_builtins(KEPT.comparison)


def handed_over(tmp_path: Path, person: Person, known: int = 8) -> tuple[int, dict[str, Any]]:
    """The answer's status, and what the page shows to a stranger afterwards."""
    controller: Any = Controller(tmp_path)
    controller.state.node_addresses = {f"n{at}": "" for at in range(1, known + 1)}

    async def run() -> tuple[int, dict[str, Any]]:
        async with TestClient(TestServer(make_app(controller, lambda _: person))) as client:
            status = (await client.post("/v1/node-tests", json=BODY)).status
        async with TestClient(TestServer(make_page(controller, ""))) as page:
            answer = await page.get("/api/node-tests", headers={"Host": "localhost"})
            return status, await answer.json()

    return asyncio.run(run())


def test_an_operators_test_is_on_the_page(tmp_path: Path) -> None:
    status, shown = handed_over(tmp_path, Person(0))
    assert status == 200
    assert shown["by"] == "root"
    assert [each["name"] for each in shown["test"]["nodes"]][:2] == ["n3", "n8"]
    assert {each["why"] for each in shown["test"]["nodes"]} == {""}


def test_a_strangers_test_and_one_of_unknown_nodes_are_refused(tmp_path: Path) -> None:
    nothing = {"test": None, "by": ""}
    (tmp_path / "other").mkdir()
    assert handed_over(tmp_path, Person(STRANGE)) == (403, nothing)
    assert handed_over(tmp_path / "other", Person(0), known=7) == (404, nothing)


def test_who_sees_everything_reads_the_reasons_and_nobody_else_a_path() -> None:
    comparison = msgspec.structs.replace(
        KEPT.comparison, sentence="n3 is bad: write rate of /scratch/secret is 3 MB/s."
    )
    kept = msgspec.structs.replace(KEPT, comparison=comparison)
    assert "less than the" in comparison_json(kept, sees=True)["test"]["nodes"][0]["why"]
    assert comparison_json(kept, sees=False)["test"]["sentence"] == "n3 is bad: write rate of a directory is 3 MB/s."
    assert "/scratch" in comparison_json(kept, sees=True)["test"]["sentence"]


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": [{"name": "n1", "verdict": "guilty"}], "figures": []},
        {"figures": [{"title": "t", "unit": "u", "worst_share": 0.9, "values": [None]}]},
        {"nodes": [{"name": "n1", "verdict": "ok"}] * 65, "figures": []},
        {"figures": [{"title": "t", "unit": "u", "worst_share": -1.0, "values": []}]},
        {"sentence": "x" * 401},
        {"sentence": 3},
    ],
)
def test_what_is_no_comparison_is_refused_with_a_sentence(change: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        parse_comparison(msgspec.json.encode(BODY | change))
    assert isinstance(parse_comparison(msgspec.json.encode(BODY)), NodeComparison)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"sentence": NaN}', b"[" * 100_000])
def test_what_is_no_document_is_refused(text: bytes) -> None:
    with pytest.raises(RequestRefused):
        parse_comparison(text)
