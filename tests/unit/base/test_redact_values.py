"""Every text of a report and of a finding is masked, but for what is declared to be none."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from slurm_watchdog.base.redact import MASK, UNMASKED_FIELDS, masked
from slurm_watchdog.model.evidence import NodeEvidence, ProcessStack, RankEvidence
from slurm_watchdog.model.incidents import Finding
from slurm_watchdog.model.observations import Blocked, Process, Role
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import Report
from tests.builders.secret_samples import planted

SECRET = "api_key=Zk3vQ9xB7LmP2sT8"
ROOTS = (Report, Finding, CommandResult)


def _structs(root: type) -> dict[type, None]:
    found: dict[type, None] = {}
    todo = [root]
    while todo:
        cls = todo.pop()
        if cls not in found:
            found[cls] = None
            todo += [each for hint in get_type_hints(cls).values() for each in _in(hint)]
    return found


def _in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for each in get_args(hint):
        yield from _in(each)


def _texts(hint: Any) -> Iterator[Any]:
    """Values of this type with a secret in each of its texts: `str`, `tuple[str, ...]`, pairs and optional ones."""
    if hint is str:
        yield SECRET
    elif getattr(hint, "__origin__", None) is tuple:
        args = get_args(hint)
        of = [args[0]] if args[-1] is Ellipsis else list(args)
        inner = [list(_texts(each)) for each in of]
        if all(inner):
            yield tuple(each[0] for each in inner)
    elif get_args(hint):
        for each in get_args(hint):
            yield from _texts(each)


def _filler(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    return {str: "x", int: 1, float: 1.0, bool: False}.get(hint, ())


FIELDS = [
    (cls, name, value)
    for cls in dict.fromkeys(each for root in ROOTS for each in _structs(root))
    for name, hint in get_type_hints(cls).items()
    for value in list(_texts(hint))[:1]
]


@pytest.mark.parametrize(("cls", "name", "value"), FIELDS, ids=lambda each: getattr(each, "__name__", str(each)[:30]))
def test_each_text_of_what_travels_is_masked_or_declared_to_be_a_name(cls: type, name: str, value: Any) -> None:
    hints = get_type_hints(cls)
    needed = {each.name for each in msgspec.structs.fields(cls) if each.required} - {name}
    made = cls(**{each: _filler(hints[each]) for each in needed}, **{name: value})
    is_name = bool({name, f"{cls.__name__}.{name}"} & UNMASKED_FIELDS)
    assert (SECRET in str(masked(made))) is is_name
    assert (MASK in str(masked(made))) is not is_name


def test_the_declared_names_exist() -> None:
    names = {each for cls, name, _ in FIELDS for each in (name, f"{cls.__name__}.{name}")}
    inside = {name for root in ROOTS for cls in _structs(root) for name in get_type_hints(cls)}
    assert names | inside >= UNMASKED_FIELDS


def test_masking_a_value_without_secrets_returns_the_same_object() -> None:
    process = Process(pid=1, start_ticks=2, job_id="7", role=Role.RANK, comm="python", state="S", uid=1000)
    report = Report(node="n1", boot_id="b", agent_id="a", sequence=1, processes=(process,), problems=("no mount",))
    assert masked(report) is report


def test_a_secret_deep_inside_of_an_answer_is_masked() -> None:
    blocked = Blocked(thread_id=1, seconds=3.0, state="D", path=f"/s/{SECRET}/x", mount="/s")
    rank = RankEvidence(pid=1, start_ticks=2, role=Role.RANK, blocked=blocked)
    evidence = NodeEvidence(node="n1", job_id="7", ranks=(rank,), kernel_lines=("a", SECRET))
    result = masked(CommandResult(command_id="c", ok=True, evidence=evidence))
    assert SECRET.partition("=")[2] not in str(result)
    assert result.evidence is not None
    assert result.evidence.kernel_lines[0] == "a"


def test_a_private_key_in_the_last_lines_of_a_log_is_masked_as_a_whole() -> None:
    lines = ("-----BEGIN RSA PRIVATE KEY-----", "MIIEow", "abc", "-----END RSA PRIVATE KEY-----", "after")
    evidence = NodeEvidence(node="n1", job_id="7", log_lines=(("/log", lines),))
    assert masked(evidence).log_lines == (("/log", (*[MASK] * 4, "after")),)


def test_every_kind_is_masked_in_a_value_as_in_a_line() -> None:
    for _, text, secrets in planted(3):
        stack = ProcessStack(node="n1", pid=1, start_ticks=2, job_id="7", role=Role.RANK, error=text)
        assert not [secret for secret in secrets if secret in (masked(stack).error or "")]
