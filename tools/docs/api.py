"""Writes docs/openapi.json, the description of the controller's JSON API, from its answers' types: `python -m tools.docs
api`. tests/unit/controller/test_openapi.py holds it against the routes and the real answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slurm_watchdog.model import documents as api
from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.diagnosis_documents import DiagnosisProgress
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.lost_time import Report
from slurm_watchdog.model.node_documents import NodeEventRequest, NodeHistory, NodeTable

FILE = Path(__file__).parents[2] / "docs/openapi.json"
VERSION = "1"
"""Of the paths' `/v1`: it rises when a field is taken away or changes its meaning, not when one is added."""

Schema = dict[str, Any]


def _text(about: str, **more: Any) -> Schema:
    return {"type": "string", "description": about, **more}


def _texts(about: str) -> Schema:
    return {"type": "array", "items": {"type": "string"}, "description": about}


def _seconds(about: str) -> Schema:
    return {"type": "number", "description": about}


REASON = _text("Kept in the journal.")
JOB = _text("Slurm's number: `4711`, `4711_3`.")
NODE_NAMES = _texts("Names of nodes, one by one.")
DATE = "Seconds since the epoch."


FREE = dict[str, Any]


class Route(NamedTuple):
    """One request."""

    method: str
    path: str
    says: str
    answer: Any
    """Type of the answer; FREE: an object whose keys depend on what was kept."""
    query: Mapping[str, Schema] = {}
    body: Mapping[str, Schema] | type | None = None
    needs: tuple[str, ...] = ()
    """Keys of the body that have to be there."""


ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/status", "What is watched, and whether all is well.", api.Status,
          {"me": _text("`1`: the caller's own jobs alone.", enum=["1"])}),
    Route("GET", "/v1/incidents", "The newest incidents.", list[api.Incident], {"job": JOB}),
    Route("GET", "/v1/incidents/{id}", "One incident: who, since when, why, what was done.", api.Explanation),
    Route("GET", "/v1/incidents/{id}/evidence/{number}", "One piece of its evidence, as a node answered it.", FREE),
    Route("GET", "/v1/report", "Where the jobs' time went.", Report, {
        "from": _text(DATE), "to": _text(DATE),
        "job": JOB, "user": _text("Names, by commas."), "account": _text("Names, by commas."),
        "partition": _text("Names, by commas."),
    }),
    Route("POST", "/v1/diagnose", "All ranks of a running job are asked where they stand.", DiagnosisProgress,
          body={"job_id": JOB}, needs=("job_id",)),
    Route("GET", "/v1/diagnose/{id}", "How far that is, and what came of it.", DiagnosisProgress),
    Route("GET", "/v1/nodes", "Nodes by suspicion.", NodeTable),
    Route("GET", "/v1/nodes/{node}", "One node with what happened to it.", NodeHistory),
    Route("POST", "/v1/nodes/{node}/events", "A test's result, or that a node is mended.", FREE, body=NodeEventRequest),
    Route("GET", "/v1/silences", "The silences that hold.", api.Silences),
    Route("POST", "/v1/silences", "No messages about some kinds, jobs or nodes, for a while.", api.Silences, body={
        "for_s": _seconds("How long."), "reason": REASON, "jobs": _texts("Slurm's numbers."), "nodes": NODE_NAMES,
        "kinds": {"type": "array", "items": {"enum": [str(kind) for kind in IncidentKind]}},
    }, needs=("for_s",)),
    Route("POST", "/v1/silences/{id}/end", "Ends a silence.", api.Silences, body={}),
    Route("POST", "/v1/pause", "No action anywhere until `/v1/resume`.", api.Paused, body={"reason": REASON}),
    Route("POST", "/v1/resume", "Ends a pause.", api.Paused, body={}),
    Route("POST", "/v1/restart", "Moves a job gracefully, off some nodes if given.", api.Accepted, body={
        "job_id": JOB, "exclude": NODE_NAMES, "reason": REASON,
        "now": {"type": "boolean", "description": "Also of a job that hangs and cannot save: from its last checkpoint."},
    }, needs=("job_id",)),
    Route("POST", "/v1/restart/cancel", "Ends a restart that still waits for the job to save.", FREE,
          body={"job_id": JOB}, needs=("job_id",)),
    Route("GET", "/v1/requests/jobs", "The running jobs, each with why it cannot be asked to save.", api.Selected),
    Route("POST", "/v1/requests", "Asks the same of at most 50 jobs.", api.AnsweredAll, body={
        "job_ids": _texts("Slurm's numbers."), "wish": _text("What is asked.", enum=[str(wish) for wish in Wish]),
        "exclude": NODE_NAMES, "before": _seconds(f"The checkpoint has to be there by then. {DATE}"), "reason": REASON,
    }, needs=("job_ids", "wish")),
    Route("POST", "/v1/requests/progress", "How far the actions of these incidents are.", api.Progress,
          body={"incident_ids": _texts("As `/v1/requests` answered them.")}, needs=("incident_ids",)),
)  # fmt: skip
"""Everything that can be asked on the socket (`controller.socket`) and at `controller.user_listen`."""

REFUSALS = {
    "400": "The request is wrong; the sentence says how.",
    "403": "The caller may not (`security.may`), or nobody knows who it is.",
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
    types |= dict.fromkeys(route.body for route in ROUTES if isinstance(route.body, type))
    schemas, components = msgspec.json.schema_components(list(types), ref_template="#/components/schemas/{name}")
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known)
    error = {"$ref": "#/components/schemas/Error"}
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
            "responses": {code: {"description": words, "content": {"application/json": {"schema": error}}} for code, words in REFUSALS.items()},
        },
    }  # fmt: skip
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _operation(route: Route, known: Mapping[Any, Schema]) -> dict[str, Any]:
    named = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    operation: dict[str, Any] = {
        "summary": route.says,
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": known[route.answer]}}},
            **{code: {"$ref": f"#/components/responses/{code}"} for code in REFUSALS},
        },
    }  # fmt: skip
    if route.body is not None:
        schema = (
            known[route.body]
            if isinstance(route.body, type)
            else {"type": "object", "properties": dict(route.body), "required": list(route.needs)}
        )
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
