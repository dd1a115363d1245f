"""Agent and controller one release apart understand each other, in both directions: nodes are upgraded over days."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import OPEN_LISTS, WireError, decode_reply, decode_report
from tests.builders.wire_fill import filled, promise

CAPTURES = Path(__file__).parents[2] / "captures/wire"
RELEASES = sorted(path.name for path in CAPTURES.iterdir() if path.is_dir())
MESSAGES = {"report": (Report, decode_report), "reply": (Reply, decode_reply)}
UNREAD = {"writing_bytes", "frames"}
"""Fields that nothing read: they are not sent any more."""
OPEN_WORDS = {"EventKind", "FaultSeverity"}
both = pytest.mark.parametrize(("release", "name"), [(release, name) for release in RELEASES for name in MESSAGES])


def captured(release: str, name: str) -> dict[str, Any]:
    return json.loads((CAPTURES / release / f"{name}.json").read_text())


def contains(new: Any, old: Any, path: str = "$") -> list[str]:
    """Where `new` says something else than `old`; what `old` does not name may be anything."""
    if isinstance(old, dict) and isinstance(new, dict):
        kept = {key: value for key, value in old.items() if key not in UNREAD}
        return [line for key, value in kept.items() for line in contains(new.get(key), value, f"{path}.{key}")]
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(new, old, strict=False)
        return [line for at, (one, other) in enumerate(pairs) for line in contains(one, other, f"{path}[{at}]")]
    return [] if new == old else [f"{path}: {old!r} was read as {new!r}"]


@both
def test_all_that_an_earlier_release_says_is_read_and_means_the_same(release: str, name: str) -> None:
    message = captured(release, name)["message"]
    _, decode = MESSAGES[name]
    read = json.loads(msgspec.json.encode(decode(json.dumps(message).encode())))
    message.pop("version", None)  # the default is left off
    assert contains(read, message) == []


RENAMED = {"JobWish": "JobDirectives"}
"""Classes whose name has changed since: it does not go over the wire."""


@both
def test_an_earlier_release_finds_what_it_needs_in_what_is_said_now(release: str, name: str) -> None:
    """Its decoder refuses a message without a field that it needs, one of another type, and a short list that
    became shorter."""
    kind, _ = MESSAGES[name]
    old, new = captured(release, name)["promise"], promise(kind)
    for struct, was in old.items():
        now = new.get(RENAMED.get(struct, struct))
        if isinstance(was, list):
            # A word that it does not know: only where it leaves out the element, not the message (and has learnt to).
            assert now is not None and (set(now) == set(was) or struct in OPEN_WORDS), f"{struct}: {now}"
        elif "items" in was:
            assert now is not None and now["items"] >= was["items"] and now["needed"] <= was["needed"], struct
        else:
            assert now is not None, f"{struct} is gone"
            assert set(now["required"]) == set(was["required"]), (
                f"{struct}: a new field has a default, an old one stays required"
            )
            for field, kinds in was["fields"].items():
                assert set(now["fields"].get(field, kinds)) <= {*kinds, *later(kinds)}, f"{struct}.{field}"


def later(kinds: list[str]) -> set[str]:
    """What may stand in a field from now on without harm to those who read it as before: nothing but a whole
    number for a number."""
    return {"integer"} if "number" in kinds else set()


@both
def test_fields_that_a_later_release_adds_are_passed_over(release: str, name: str) -> None:
    def with_more(value: Any) -> Any:
        if isinstance(value, dict):
            return {"added_later": {"x": [1]}, **{key: with_more(each) for key, each in value.items()}}
        return [with_more(each) for each in value] if isinstance(value, list) else value

    kind, decode = MESSAGES[name]
    message = filled(inspect.type_info(kind))
    assert decode(json.dumps(with_more(message)).encode()) == decode(json.dumps(message).encode())


def test_a_command_that_a_later_controller_has_learnt_costs_no_other_command() -> None:
    reply = filled(inspect.type_info(Reply))
    known = decode_reply(json.dumps(reply).encode())
    reply["commands"].insert(0, {"type": "play_music", "id": "c9", "song": "x"})
    assert decode_reply(json.dumps(reply).encode()) == known
    assert len(known.commands) == len(OPEN_LISTS[Reply]["commands"][1])


@pytest.mark.parametrize(("name", "key"), [("events", "kind"), ("node_events", "severity")])
def test_a_kind_of_event_that_a_later_agent_has_learnt_costs_no_other_event(name: str, key: str) -> None:
    report = filled(inspect.type_info(Report))
    known = decode_report(json.dumps(report).encode())
    report[name].append({**report[name][0], key: "of_tomorrow"})
    assert decode_report(json.dumps(report).encode()) == known


def test_a_process_with_a_word_that_is_not_known_is_never_left_out_for_it_would_look_dead() -> None:
    report = filled(inspect.type_info(Report))
    report["processes"][0]["role"] = "conductor"
    with pytest.raises(WireError, match="conductor"):
        decode_report(json.dumps(report).encode())
    assert "processes" not in OPEN_LISTS[Report]
    assert set(Role) == {"rank", "worker", "helper"}  # a new one takes a new version of the wire


def test_report_with_a_new_word_and_another_error_is_refused() -> None:
    report = filled(inspect.type_info(Report))
    report["events"][0]["kind"] = "of_tomorrow"
    report["sequence"] = "seven"
    with pytest.raises(WireError, match="not a report"):
        decode_report(json.dumps(report).encode())
    with pytest.raises(WireError):
        decode_reply(b'{"commands": [{"type": 7}]}')
    with pytest.raises(WireError):
        decode_reply(b'[{"commands": []}]')


def test_another_version_of_the_wire_is_refused_with_what_to_do() -> None:
    report = filled(inspect.type_info(Report)) | {"version": 2}
    with pytest.raises(WireError, match="bring both to one release"):
        decode_report(json.dumps(report).encode())
