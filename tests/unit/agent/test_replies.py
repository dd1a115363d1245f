"""Replies of a controller that means well, of a newer one, and of one that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurm_watchdog.agent.delivery import channel
from slurm_watchdog.agent.delivery.channel import Proven, parse_reply
from slurm_watchdog.model.protocol import DumpStacks, JobWatch, Reply
from slurm_watchdog.wire.codec import WireError, encode_reply

WATCH = JobWatch(job_id="7", restarts=0, uid=1000, log_paths=("/home/a/7.out",))
STACKS = DumpStacks(id="c1", job_id="7", restarts=0)
REPLY = Reply(controller_id="c", watch=(WATCH,), running=("7",), commands=(STACKS,))


def changed(**fields: Any) -> bytes:
    return json.dumps(json.loads(encode_reply(REPLY)) | fields).encode()


def test_an_ordinary_reply_is_taken_as_it_is() -> None:
    assert parse_reply(Proven(encode_reply(REPLY))) == REPLY


def test_a_command_of_a_newer_release_is_left_out_and_the_rest_is_taken() -> None:
    known = json.loads(encode_reply(REPLY))["commands"]
    newer = {"type": "reset_gpu", "id": "c2"}
    assert parse_reply(Proven(changed(commands=[newer, *known, newer]))) == REPLY


def test_fields_of_a_newer_release_are_passed_over() -> None:
    assert parse_reply(Proven(changed(weather={"sun": [1]}))) == REPLY


def test_an_older_controller_that_does_not_say_what_runs_is_understood() -> None:
    older = json.loads(encode_reply(REPLY))
    del older["running"]
    assert parse_reply(Proven(json.dumps(older).encode())).running is None


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"commands": 5}', b'{"commands": [5], "watch": 5}', changed(running=5),
     b" " * channel.MAX_REPLY_BYTES + b"{}"],
)  # fmt: skip
def test_what_is_no_reply_is_refused(garbage: bytes) -> None:
    with pytest.raises(WireError):
        parse_reply(Proven(garbage))


def test_more_than_a_node_can_have_is_cut_off() -> None:
    names = tuple(map(str, range(20_000)))
    crowd = Reply(
        watch=tuple(
            JobWatch(job_id=name, restarts=0, uid=0, log_paths=names[:100], checkpoint_directories=names[:100])
            for name in names[:1000]
        ),
        commands=tuple(DumpStacks(id=name, job_id="7", restarts=0) for name in names),
    )
    found = channel.bound(crowd)
    assert len(found.watch) == channel.MAX_JOBS
    assert len(found.commands) == channel.MAX_COMMANDS
    assert found.commands[0].id == "0"
    assert {len(each.log_paths) for each in found.watch} == {channel.MAX_LOGS}
    assert {len(each.checkpoint_directories) for each in found.watch} == {channel.MAX_PLACES}
