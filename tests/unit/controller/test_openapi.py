"""docs/openapi.json says what the controller really answers: each route, each key of each answer, each key that a request
has to have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from slurm_watchdog.controller.api.routes import FREE, ROUTES, Route
from slurm_watchdog.controller.policy.access import Person
from tests.builders.open_doors import doors
from tools.docs.api import REFUSALS, write

Answers = dict[str, tuple[int, str]]
ROOT = Person(0)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return doors(ROOT, tmp_path_factory.mktemp("doors"))


def test_the_document_has_every_route_and_no_other() -> None:
    paths = json.loads(write())["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == {
        (route.method, route.path) for route in ROUTES
    }


def test_every_answer_is_of_its_type_and_has_no_key_that_the_document_lacks(answers: Answers) -> None:
    seen, lacking = set(), []
    for asked, (status, body) in answers.items():
        route = _route_of(*asked.split(" ", 1))
        if status != 200 or route.answer is FREE:
            assert status == 200 or (json.loads(body)["error"] and str(status) in REFUSALS), asked
            continue
        known = _with_defaults(msgspec.json.decode(body, type=route.answer))
        lacking += [f"{asked}: {key}" for key in _lacking(json.loads(body), known)]
        seen.add(route.path)
    assert lacking == []
    assert {"/v1/status", "/v1/incidents", "/v1/incidents/{id}", "/v1/nodes", "/v1/silences", "/v1/report"} <= seen


def _route_of(method: str, target: str) -> Route:
    parts = target.partition("?")[0].split("/")
    (found,) = [
        route
        for route in ROUTES
        if route.method == method
        and len(route.path.split("/")) == len(parts)
        and all(one == other or one.startswith("{") for one, other in zip(route.path.split("/"), parts, strict=True))
    ]
    return found


def _with_defaults(value: Any) -> Any:
    """As JSON, with the fields that are left out of it for they have their defaults."""
    if isinstance(value, msgspec.Struct):
        return {each.encode_name: _with_defaults(getattr(value, each.name)) for each in msgspec.structs.fields(value)}
    if isinstance(value, list | tuple):
        return [_with_defaults(each) for each in value]
    return value


def _lacking(answer: Any, known: Any, at: str = "") -> Iterator[str]:
    if isinstance(answer, dict) and isinstance(known, dict):
        for key, value in answer.items():
            if key not in known:
                yield f"{at}.{key}"
            else:
                yield from _lacking(value, known[key], f"{at}.{key}")
    elif isinstance(answer, list) and isinstance(known, list | tuple):
        for one, other in zip(answer, known, strict=True):
            yield from _lacking(one, other, f"{at}[]")
