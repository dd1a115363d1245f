"""Writes docs/openapi.json, the description of the controller's JSON API, from its routes and
their types: `python -m tools.docs api`. tests/unit/controller/test_openapi.py holds it against the routes and the real answers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slurm_watchdog.controller.api.routes import ROUTES, Route

FILE = Path(__file__).parents[2] / "docs/openapi.json"
VERSION = "1"
"""Of the paths' `/v1`: it rises when a field is taken away or changes its meaning, not when one is added."""

Schema = dict[str, Any]


def _text(about: str, **more: Any) -> Schema:
    return {"type": "string", "description": about, **more}


JOB = _text("Slurm's number: `4711`, `4711_3`.")
DATE = "Seconds since the epoch."


QUERY = {
    "me": _text("`1`: the caller's own jobs alone.", enum=["1"]), "job": JOB,
    "from": _text(DATE), "to": _text(DATE),
    "user": _text("Names, by commas."), "account": _text("Names, by commas."), "partition": _text("Names, by commas."),
}  # fmt: skip


REFUSALS = {
    "400": "The request is wrong; the sentence says how.",
    "403": "The caller may not (`security.may`), or is not known.",
    "404": "There is no such incident, job or node, it is not the caller's, or there is no such request in this release.",
    "405": "The path has no such method.",
    "409": "It cannot be done now; `code` is `hangs` where `now` is needed.",
    "413": "The request, or on `controller.user_listen` its answer, is too large.",
    "429": "Too much is asked at once, or is kept already.",
    "503": "The journal or Slurm does not answer.",
}
ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": _text("One sentence."), "code": _text("For programs, where they can do something about it.")},
}  # fmt: skip


def write() -> str:
    """The whole document, OpenAPI 3.1, as JSON."""
    types = dict.fromkeys(route.answer for route in ROUTES)
    types |= dict.fromkeys(route.body for route in ROUTES if route.body is not None)
    schemas, components = msgspec.json.schema_components(list(types), ref_template="#/components/schemas/{name}")
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known)
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    codes = " ".join(f"{code}: {words}" for code, words in REFUSALS.items())
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "slurm-watchdog's controller", "version": VERSION,
            "description": "Asked on a Unix socket (controller.socket), by who its other end is; with MUNGE on controller.user_listen. "
            "Fields may be added: ignore those that you do not know.",
        },
        "servers": [{"url": "http://localhost", "description": "on the socket /run/slurm-watchdog/controller.sock"}],
        "paths": paths,
        "components": {
            "schemas": {**dict(sorted(components.items())), "Error": ERROR},
            "responses": {"Error": {"description": codes, "content": refused}},
        },
    }  # fmt: skip
    return _laid_out(document, 3) + "\n"


def _laid_out(value: Any, levels: int) -> str:
    """JSON, what is deeper than so many levels in one line: a line for each path and each schema."""
    if not levels or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return (
        "{\n" + ",\n".join(f"{json.dumps(key)}: {_laid_out(each, levels - 1)}" for key, each in value.items()) + "\n}"
    )


def _operation(route: Route, known: Mapping[Any, Schema]) -> dict[str, Any]:
    named = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
    parameters += [{"name": name, "in": "query", "schema": QUERY[name]} for name in route.query]
    operation: dict[str, Any] = {
        "summary": inspect.getdoc(route.handle),
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": known[route.answer]}}},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }  # fmt: skip
    if route.body is not None:
        schema = known[route.body]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
