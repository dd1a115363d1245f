"""Who is shown the page by a proxy of the site, and for whom wrong passwords count. The attacks with and without their
defence: tests/attacks/test_with_and_without.py."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.controller.api.routes import PAGE_ROUTES
from slurm_watchdog.controller.api.web_page import Login, _knows
from slurm_watchdog.controller.policy.access import Person
from tests.builders.page_requests import EVIDENCE, INCIDENT, PASSWORD, PROXY, Headers, controller, get, gets, named


def test_the_page_changes_nothing_whoever_looks() -> None:
    assert {route.method for route in PAGE_ROUTES} == {"GET"}


@pytest.mark.parametrize(
    ("headers", "status", "word"),
    [
        ({"X-Remote-User": "daemon"}, 200, ""),
        ({"X-Remote-User": "games"}, 403, "is for the owner"),
        ({"X-Remote-User": "root"}, 403, "is not shown the page"),
        ({"X-Remote-User": "nobody-of-that-name"}, 403, "knows no user"),
        ({"X-Remote-User": "daemon, root"}, 403, "sends no logged-in user"),
        ({}, 403, "sends no logged-in user"),
        ({"X-Remote-User": "daemon", "Authorization": None}, 401, "token"),
    ],
)
def test_by_a_proxy_each_has_his_own_rights(tmp_path: Path, headers: Headers, status: int, word: str) -> None:
    found, answer = get(controller(tmp_path, PROXY + ", operators: [daemon]"), EVIDENCE, headers=headers)
    assert (found, word in answer.get("error", "")) == (status, True)


def test_wrong_passwords_count_for_the_user_that_the_proxy_names(tmp_path: Path) -> None:
    wrong = [named("games") | {"Authorization": f"Bearer guess {number}"} for number in range(25)]
    of_nobody = [{"Authorization": f"Bearer guess {number}"} for number in range(25)]
    found = gets(controller(tmp_path, PROXY), *wrong, named("games"), named("daemon"), *of_nobody, named("daemon"))
    assert found[:20] == [401] * 20
    assert found[24:27] == [429, 429, 200], "the right password helps games no more, and daemon is not locked out"
    assert found[-2:] == [429, 200], "nor by who is named by no proxy"


def test_by_a_proxy_nobody_is_shown_what_somebody_else_was(tmp_path: Path) -> None:
    page = controller(tmp_path, PROXY + ", operators: [daemon]")
    seen = {user: get(page, INCIDENT, headers=named(user))[1]["incident"] for user in ("daemon", "games")}
    assert [bool(seen[user]["details_for"]) for user in ("daemon", "games")] == [False, True]


def test_a_name_service_that_hangs_leaves_the_threads_of_everything_else_alone() -> None:
    answers = threading.Event()

    def look_up(name: str) -> Person:
        answers.wait(20.0)
        return Person(2, name=name)

    async def run() -> int:
        login = Login(parse_config(f"security: {{{PROXY}}}\n").security, Person(), look_up=look_up)
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
    ("security", "word"),
    [
        ("page_proxy_header: X-Remote-User", "page_token_file"),
        ("page_proxy_header: Cookie, page_token_file: /x", "begins with X-"),
        ("page_proxies: [here]", "nor a network"),
    ],
)
def test_a_login_that_would_prove_nothing_is_refused(security: str, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(f"security: {{{security}}}\n")
    assert word in str(error.value.lines())
