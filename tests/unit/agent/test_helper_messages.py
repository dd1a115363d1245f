"""What the helper makes of messages: one of two kinds, or a refusal that is counted and told sparingly."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.helper.requests import RefusedError
from slurm_watchdog.agent.helper.server import (
    MAX_CHILDREN,
    STARTS_PER_S,
    Connection,
    Helper,
    user_of,
)
from slurm_watchdog.base.refusals import REFUSALS_SHOWN, Refusals


class Forkless(Helper):
    """Notes what it would start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.started: list[tuple[str, int]] = []

    def _start(self, key: str, uid: int, fd: int, now: float) -> None:
        self.started.append((key, uid))


@pytest.fixture(scope="module")
def helper() -> Iterator[Forkless]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        yield Forkless(listener, frozenset({os.getuid()}), {})


def connection(now: float = 0.0) -> Connection:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    return Connection(ours, 1, asked_at=now)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(message=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()), fds=st.integers(0, 2), flags=st.sampled_from([0, int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)]))  # fmt: skip
def test_a_message_asks_for_a_child_or_is_refused(helper: Forkless, message: bytes, fds: int, flags: int) -> None:
    helper.started.clear()
    try:
        helper._do(connection(), message, [99] * fds, flags, 0.0)
    except RefusedError as error:
        assert str(error)
        assert helper.started == []
        return
    ((key, uid),) = helper.started
    assert fds == 1
    assert isinstance(key, str)
    assert uid == -1 or uid >= 100


def test_children_are_started_for_ordinary_users_so_many_in_a_second_and_so_many_in_all(
    helper: Forkless,
) -> None:
    who, message = connection(), json.dumps(["files:/x:5000", 5000]).encode()
    for uid in (0, 1, 99, 2**32 - 1, 2**70):
        with pytest.raises(RefusedError, match="not an ordinary user"):
            helper._do(who, json.dumps(["a", uid]).encode(), [99], 0, 0.0)
    for _ in range(STARTS_PER_S):
        helper._do(who, message, [99], 0, 0.0)
    with pytest.raises(RefusedError, match="in a second"):
        helper._do(who, message, [99], 0, 0.0)
    helper._do(who, message, [99], 0, 1.0)
    helper.children = dict.fromkeys(range(MAX_CHILDREN), -1)
    with pytest.raises(RefusedError, match="are there already"):
        helper._do(who, message, [99], 0, 2.0)
    helper.children = {}


def test_a_user_is_here_for_an_hour_after_his_last_process_was_seen(helper: Forkless) -> None:
    assert helper._is_here(os.getuid(), 0.0)
    nobody = 2**31 - 7
    assert not helper._is_here(nobody, 0.0)
    helper.seen_here[nobody] = 0.0
    assert helper._is_here(nobody, 3600.0)
    assert not helper._is_here(nobody, 3601.0)


def test_refusals_are_all_counted_and_some_are_told_without_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            refusals.add(f"a\nforged line {number} \x1b[2J", 5.0)
        refusals.add("later", 65.0)
    assert refusals.total == 101
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == REFUSALS_SHOWN + 2
    assert told[-2] == f"{100 - REFUSALS_SHOWN} more requests were refused in the minute before"
    assert all("\n" not in line and "\x1b" not in line for line in told)


def test_a_user_is_named_or_numbered() -> None:
    assert user_of("4711") == (4711, 4711)
    assert user_of("root") == (0, 0)
    with pytest.raises(KeyError):
        user_of("nobody-is-called-so")
