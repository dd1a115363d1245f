"""Replies of a controller that means well, of a newer one, and of one that does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slurm_watchdog.agent.delivery import replies
from slurm_watchdog.agent.delivery.replies import parse_reply
from slurm_watchdog.model.protocol import DumpStacks, JobWatch, Reply
from slurm_watchdog.wire.codec import WireError, encode_reply

WATCH = JobWatch(job_id="7", restarts=0, uid=1000, log_paths=("/home/a/7.out",))
STACKS = DumpStacks(id="c1", job_id="7", restarts=0)
REPLY = Reply(controller_id="c", watch=(WATCH,), running=("7",), commands=(STACKS,))


def changed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode_reply(REPLY)) | fields)


def test_an_ordinary_reply_is_taken_as_it_is() -> None:
    assert parse_reply(encode_reply(REPLY)) == REPLY


def test_a_command_of_a_newer_release_is_left_out_and_the_rest_is_taken() -> None:
    known = msgspec.msgpack.decode(encode_reply(REPLY))["commands"]
    newer = {"type": "reset_gpu", "id": "c2"}
    assert parse_reply(changed(commands=[newer, *known, newer])) == REPLY


def test_fields_of_a_newer_release_are_passed_over() -> None:
    assert parse_reply(changed(weather={"sun": [1]})) == REPLY


def test_an_older_controller_that_does_not_say_what_runs_is_understood() -> None:
    older = msgspec.msgpack.decode(encode_reply(REPLY))
    del older["running"]
    assert parse_reply(msgspec.msgpack.encode(older)).running is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff",
        b"\x90",
        b"\xc0",
        b"\x91" * 100_000,
        changed(commands=5),
        changed(commands=[5], watch=5),
        changed(running=5),
    ],
)
def test_what_is_no_reply_is_refused(garbage: bytes) -> None:
    with pytest.raises(WireError):
        parse_reply(garbage)


def test_more_than_a_node_can_have_is_cut_off() -> None:
    names = tuple(map(str, range(20_000)))
    crowd = Reply(
        watch=tuple(
            JobWatch(job_id=name, restarts=0, uid=0, log_paths=names[:100], checkpoint_directories=names[:100])
            for name in names[:1000]
        ),
        commands=tuple(DumpStacks(id=name, job_id="7", restarts=0) for name in names),
    )
    found = parse_reply(encode_reply(crowd))
    assert len(found.watch) == replies.MAX_JOBS
    assert len(found.commands) == replies.MAX_COMMANDS
    assert found.commands[0].id == "0"
    assert {len(each.log_paths) for each in found.watch} == {replies.MAX_LOGS}
    assert {len(each.checkpoint_directories) for each in found.watch} == {replies.MAX_PLACES}
