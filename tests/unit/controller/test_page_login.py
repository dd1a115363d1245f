"""Who does something from the page, and that no other site's page does it with a person's browser. The attacks with and
without their defence: tests/attacks/test_with_and_without.py."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.controller.api.page_login import Login
from slurm_watchdog.controller.api.web_page import _knows
from slurm_watchdog.controller.policy.access import STRANGER, Person
from tests.builders.page_actions import ACTS_AS, PASSWORD, PROXY, controller, post

MAY_PAUSE = ", may: {pause: [daemon]}"


def test_without_an_option_the_page_changes_nothing(tmp_path: Path) -> None:
    shipped = controller(tmp_path, "")
    assert {post(shipped, path)[0] for path in ("/api/pause", "/api/restart", "/api/silences")} == {404}
    assert post(shipped, "/api/overview", method="GET")[1]["acts_as"] is None


def test_who_gives_the_password_acts_as_the_named_user_with_his_rights_and_in_his_name(tmp_path: Path) -> None:
    page = controller(tmp_path, ACTS_AS + MAY_PAUSE)
    status, answer = post(page, body={"reason": "a new switch"})
    assert (status, answer["paused"]["by"], page.journal.paused()[:2]) == (200, "daemon", ("a new switch", "daemon"))
    status, answer = post(page, "/api/restart", body={"job_id": "7"})
    assert (status, "security.may.restart" in answer["error"]) == (403, True)
    for path, body in (("/api/incidents/abc123/acknowledge", {}), ("/api/silences", {"nodes": ["n1"], "for_s": 60})):
        status, answer = post(page, path, body=body)
        assert (status, "security.operators" in answer["error"]) == (403, True), "the password gives him no right"
    assert post(page, "/api/resume", headers={"Authorization": None})[0] == 401
    assert post(page, "/api/overview", method="GET")[1]["acts_as"] == "daemon"


@pytest.mark.parametrize(
    ("headers", "status", "word"),
    [
        ({"X-Remote-User": "daemon"}, 200, ""),
        ({"X-Remote-User": "games"}, 403, "security.may.pause"),
        ({"X-Remote-User": "root"}, 403, "does nothing from the page"),
        ({"X-Remote-User": "nobody-of-that-name"}, 403, "knows no user"),
        ({"X-Remote-User": "daemon, root"}, 403, "names nobody"),
        ({}, 403, "names nobody"),
        ({"X-Remote-User": "daemon", "Authorization": None}, 401, "token"),
    ],
)
def test_by_a_proxy_each_has_his_own_rights(tmp_path: Path, headers: dict[str, str], status: int, word: str) -> None:
    found, answer = post(controller(tmp_path, PROXY + MAY_PAUSE), headers=headers)
    assert (found, word in answer.get("error", "")) == (status, True)


def test_who_acts_as_an_operator_acknowledges_and_silences(tmp_path: Path) -> None:
    page = controller(tmp_path, ACTS_AS + ", operators: [daemon]")
    assert post(page, "/api/incidents/abc123/acknowledge")[0] == 200
    assert post(page, "/api/silences", body={"nodes": ["n1"], "for_s": 60})[0] == 200


def test_by_a_proxy_nobody_is_shown_what_somebody_else_was(tmp_path: Path) -> None:
    page = controller(tmp_path, PROXY + ", operators: [daemon]")
    seen = {
        user: post(page, "/api/incidents/abc123", method="GET", headers={"X-Remote-User": user})[1]["incident"]
        for user in ("daemon", "games")
    }
    assert ["details_for" in seen[user] for user in ("daemon", "games")] == [False, True]


def test_a_name_service_that_hangs_leaves_the_threads_of_everything_else_alone() -> None:
    answers = threading.Event()

    def look_up(name: str) -> Person:
        answers.wait(20.0)
        return Person(2, name=name)

    async def run() -> int:
        login = Login(parse_config(f"security: {{{PROXY}}}\n").security, STRANGER, look_up=look_up)
        asking: Any = SimpleNamespace(remote="127.0.0.1", headers=CIMultiDict({"X-Remote-User": "daemon"}))
        requests = [asyncio.create_task(login.person(asking)) for _ in range(50)]
        await asyncio.sleep(0.1)
        try:
            return await asyncio.wait_for(asyncio.to_thread(int, "7"), 2.0)
        finally:
            answers.set()
            await asyncio.gather(*requests)

    assert asyncio.run(run()) == 7


def test_a_password_that_is_no_text_is_a_wrong_one() -> None:
    assert not _knows("Bearer \udcff", PASSWORD)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Slurm-Watchdog-Page": None}, None),
        ({"Origin": "https://evil.example"}, None),
        ({"Origin": "null"}, None),
        ({"Sec-Fetch-Site": "cross-site"}, None),
        ({"Sec-Fetch-Site": "same-site"}, None),
        ({"Content-Type": "text/plain"}, "{}"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "reason=x"),
    ],
)
def test_a_request_that_another_sites_page_can_cause_changes_nothing(
    tmp_path: Path, headers: dict[str, str | None], body: str | None
) -> None:
    page = controller(tmp_path, ACTS_AS + MAY_PAUSE)
    assert (post(page, headers=headers, body=body)[0], page.journal.paused()) == (403, None)


@pytest.mark.parametrize(
    ("security", "word"),
    [
        ("page_acts_as: daemon", "page_token_file"),
        ("page_proxy_header: X-Remote-User", "page_token_file"),
        (f"{PROXY}, page_acts_as: daemon", "remove one"),
        ("page_acts_as: root, page_token_file: /x", "name another user"),
        ("page_proxy_header: Cookie, page_token_file: /x", "begins with X-"),
        ("page_proxies: [here]", "no network"),
    ],
)
def test_a_login_that_would_prove_nothing_is_refused(security: str, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(f"security: {{{security}}}\n")
    assert word in str(error.value.lines())
