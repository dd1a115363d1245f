"""Every request that people and programs may make, in one table: who may make it, what it has, what is answered.

The local socket answers all of them, the users' port those that are open to users, the page those that it shows, and
two of its own. docs/openapi.json is made of the table.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from inspect import isawaitable
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from slurm_watchdog import __version__
from slurm_watchdog.controller.api import answers, requests
from slurm_watchdog.controller.api.answers import Api, encoded
from slurm_watchdog.controller.api.asking import Asked, RequestRefused, UserLookup, read_body
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.model import documents
from slurm_watchdog.model.documents import DiagnosisProgress
from slurm_watchdog.model.node_events import NodeEvent, NodeEventRequest, NodeHistory, NodeTable
from slurm_watchdog.model.page_documents import JobPage, Overview
from slurm_watchdog.model.run_record import Report
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

FREE = dict[str, Any]  # Type of an answer whose keys depend on what was kept.
PROGRESS = dict[str, documents.ActionRun]  # By incident.


class Route(NamedTuple):
    """One request. The first sentence of its handler's docstring describes it."""

    method: str
    path: str
    handle: Callable[..., Any]
    """Of the Api, what is asked, and the body if there is one; raises RequestRefused, JournalError and what Slurm's
    client raises."""
    answer: Any  # Its type.
    body: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()
    users: bool = False  # Open to users on other machines, for their own jobs.
    page: bool = False  # Shown by the page.


ROUTES = (
    Route("GET", "/v1/status", answers.status, documents.Status, query=("me",), users=True),
    Route("GET", "/v1/incidents", answers.incidents, list[documents.Incident], query=("job",), users=True, page=True),
    Route("GET", "/v1/incidents/{id}", answers.explain, documents.Explanation, users=True, page=True),
    Route("GET", "/v1/incidents/{id}/evidence/{number}", answers.evidence, FREE, users=True, page=True),
    Route("GET", "/v1/report", answers.report, Report, query=("from", "to", "job", "user", "account", "partition")),
    Route("POST", "/v1/diagnose", requests.diagnose, DiagnosisProgress, documents.JobRequest, users=True),
    Route("GET", "/v1/diagnose/{id}", answers.diagnosis, DiagnosisProgress, users=True),
    Route("GET", "/v1/nodes", answers.nodes, NodeTable, page=True),
    Route("GET", "/v1/nodes/{node}", answers.node, NodeHistory, page=True),
    Route("POST", "/v1/nodes/{node}/events", requests.add_node_event, NodeEvent, NodeEventRequest),
    Route("GET", "/v1/silences", requests.silences, documents.Silences),
    Route("POST", "/v1/silences", requests.silence, documents.Silences, documents.SilenceRequest),
    Route("POST", "/v1/silences/{id}/end", requests.end_silence, documents.Silences),
    Route("POST", "/v1/pause", requests.pause, documents.Paused, documents.PauseRequest),
    Route("POST", "/v1/resume", requests.resume, documents.Paused),
    Route("POST", "/v1/restart", requests.restart, documents.Answered, documents.RestartRequest, users=True),
    Route("POST", "/v1/restart/cancel", requests.cancel_restart, documents.Cancelled, documents.JobRequest, users=True),
    Route("GET", "/v1/requests/jobs", requests.selected, list[documents.SelectedJob]),
    Route("POST", "/v1/requests", requests.ask_jobs, list[documents.Answered], documents.SaveRequest),
    Route("POST", "/v1/requests/progress", requests.progress, PROGRESS, documents.FollowRequest, users=True),
)
USER_ROUTES = tuple(each for each in ROUTES if each.users)
PAGE_ROUTES = (
    *(each for each in ROUTES if each.page),
    Route("GET", "/v1/overview", answers.overview, Overview),
    Route("GET", "/v1/jobs/{id}", answers.job, JobPage),
)


class Refused(msgspec.Struct, frozen=True, omit_defaults=True):
    """The document of an error; `code` is a word for programs where there is more to do than to read it."""

    error: str
    code: str = ""


def refusal_of(sentence: str, code: str = "") -> bytes:
    return msgspec.json.encode(Refused(sentence, code))


async def answer(api: Api, routes: Iterable[Route], asked: Asked, users: UserLookup | None = None) -> tuple[int, bytes]:
    """(status, JSON)."""
    status, found = await document_of(api, routes, asked, users)
    return status, encoded(found)


async def document_of(
    api: Api, routes: Iterable[Route], asked: Asked, users: UserLookup | None = None
) -> tuple[int, Any]:
    """(status, what is answered). Every failure that a person can do something about is a sentence. `users`: finds the
    name of the person for requests that need it, for it may hang."""
    try:
        route, named = _found(tuple(routes), asked)
        person = asked.person
        if users is not None and (route.method != "GET" or "id" in named):
            person = await users.named(person)
        asked = replace(asked, named=named, person=person)
        found = route.handle(api, asked, *(() if route.body is None else (read_body(asked, route.body),)))
        return 200, await found if isawaitable(found) else found
    except RequestRefused as error:
        return error.status, Refused(str(error), error.code)
    except JournalError as error:
        return 503, Refused(f"the journal does not work: {error}")
    except SlurmRefused as error:
        return 409, Refused(str(error))
    except SlurmUnavailable as error:
        return 503, Refused(f"Slurm: {error}")
    except Exception:
        log.exception("a request failed: %s %s", asked.method, asked.target[:200])
        return 500, Refused("this request failed; see the log of the controller")


def _found(routes: tuple[Route, ...], asked: Asked) -> tuple[Route, Mapping[str, str]]:
    path = asked.target.partition("?")[0]
    there = [(route, match) for route in routes if (match := _pattern(route.path).fullmatch(path))]
    for route, match in there:
        if route.method == asked.method:
            return route, {name: unquote(part) for name, part in match.groupdict().items()}
    sentence = f"{asked.method} {path[:80]} is not a request that is answered here (release {__version__})"
    raise RequestRefused(405 if there else 404, sentence)


@cache
def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
