"""The records of a trace, and how one line becomes one. Pure.

A line is believed as far as it makes sense: a field with nonsense in it is unknown, like a missing one, and is counted.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec

MAX_LINE_BYTES = 1 << 20  # A longer line is skipped: the stacks of one process have some hundred KiB.
SHOWN_LINES = 3

Time = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Id = str | int  # People write job ids with and without quotes.
More = dict[str, Any]
S = TypeVar("S", bound=msgspec.Struct)


UNDATED = 0.0  # The `t` of a record that the recorder dates.


class Record(msgspec.Struct, tag_field="kind", kw_only=True, gc=False):
    """What every line has."""

    t: Time


class Job(Record, tag="job", kw_only=True):
    """Slurm's word about a job; what is missing is as it was said last."""

    job_id: Id
    state: str | None = None
    nodes: list[str] | None = None
    restarts: Whole | None = None
    name: str | None = None
    user: str | None = None
    batch_host: str | None = None
    more: More | None = None


class Node(Record, tag="node", kw_only=True):
    """Slurm's word about a node."""

    node: str
    state: str = ""
    reason: str = ""
    more: More | None = None


class Report(Record, tag="report", kw_only=True):
    """The agent of a node reported."""

    node: str
    more: More | None = None

    @property
    def listed(self) -> int | None:
        """So many lines beside it say which processes there were, all of them; only recordings tell."""
        number = self.more.get("listed") if self.more else None
        return number if isinstance(number, int) and not isinstance(number, bool) else None


class Proc(Record, tag="proc", kw_only=True):
    node: str
    job_id: Id | None = None
    rank: Whole | None = None
    pid: Whole | None = None
    start: Amount | None = None
    state: str | None = None
    state_age_s: Amount | None = None
    wchan: str | None = None
    syscall: str | None = None
    path: str | None = None
    mount: str | None = None
    cpu_s: Amount | None = None
    more: More | None = None


class Gpu(Record, tag="gpu", kw_only=True):
    node: str
    job_id: Id | None = None
    gpu: Whole | None = None
    uuid: str | None = None
    util: Amount | None = None  # Per cent.
    sm_clock_mhz: Amount | None = None
    power_w: Amount | None = None
    temp_c: Amount | None = None
    mem_used_mib: Amount | None = None
    throttle: list[str] | None = None
    pids: list[Whole] | None = None
    more: More | None = None


class Log(Record, tag="log", kw_only=True):
    node: str
    job_id: Id
    stream: str | None = None
    line: str | None = None
    more: More | None = None


class Kmsg(Record, tag="kmsg", kw_only=True):
    node: str
    line: str | None = None
    more: More | None = None


class Mount(Record, tag="mount", kw_only=True):
    node: str
    mount: str
    responding: bool | None = None
    probe_s: Amount | None = None
    more: More | None = None


class Checkpoint(Record, tag="checkpoint", kw_only=True):
    node: str
    job_id: Id
    step: Whole | None = None
    complete: bool | None = None
    more: More | None = None


class Stack(Record, tag="stack", kw_only=True):
    """One process's stacks, of a dump of the whole job: only recordings have them."""

    node: str
    job_id: Id
    dump: str
    of: Whole  # So many such lines belong to this node's part of the dump.
    stack: More


class Fault(Record, tag="fault", kw_only=True):
    """From here on something is wrong: for people and for measuring, never for judging."""

    name: str | None = None
    job_id: Id | None = None
    node: str | None = None


class Controller(Record, tag="controller", kw_only=True):
    """What the controller that wrote the recording knew of itself when it judged; written when it changes."""

    paused: str | None = None  # Why nothing was to be done, as a person said; None: it was not paused.
    journal_error: str | None = None
    slurm_problem: str = ""  # Why Slurm's newest answer was of no use, if it was not.
    warming_s: Amount | None = None  # It only observed, for so long in all (a start, a stall); None: it was warm.
    acting: list[str] = []  # The runs (`JOB.RESTARTS`) and processes (`NODE/PID`) that an action was under way for.
    drained: Whole = 0  # Nodes that it had drained.


class Asked(Record, tag="asked", kw_only=True):
    """An operator asked for a restart."""

    job_id: Id
    by: str = ""
    reason: str = ""
    exclude: list[str] = []
    now: bool = False
    wish: str = "restart"  # `restart`, `save` or `hold`.
    within_s: Amount | None = None


class Touched(Record, tag="touched", kw_only=True):
    """An action of the controller touched this run of a job: what it says from then on is our doing."""

    job_id: Id
    restarts: Whole
    age_s: Amount | None = None  # So long ago; None: the run continues, and nothing of it was our doing.


class Ended(Record, tag="ended", kw_only=True):
    """An action of the controller ended."""

    subject: str  # As in `Controller.acting`.
    ok: bool
    detail: str = ""


class BadLine(msgspec.Struct, gc=False):
    """A line stood here that could not be read: no one is missing from what is around it."""

    t: float
    node: str | None = None


Own = Controller | Asked | Touched | Ended  # What a controller says of itself.
Any_ = Job | Node | Report | Proc | Gpu | Log | Kmsg | Mount | Checkpoint | Stack | Fault | Own
KINDS: Final[dict[str, type[Record]]] = {str(each.__struct_config__.tag): each for each in get_args(Any_)}
_decoder: msgspec.json.Decoder[Any_] = msgspec.json.Decoder(Any_)


@dataclass
class ParseStats:
    """What was not used of a trace, and why."""

    lines: int = 0  # Lines that are not empty.
    used: int = 0
    skipped: dict[str, list[int]] = field(default_factory=dict)  # Why -> [how many, numbers of the first lines …].
    ignored: dict[str, list[int]] = field(default_factory=dict)  # Likewise of fields and of records of no use.

    def skip(self, why: str, number: int) -> None:
        _count(self.skipped, why, number)

    def ignore(self, why: str, number: int = 0) -> None:
        """`number` 0: which line it was is not known any more."""
        _count(self.ignored, why, number)

    @property
    def skipped_lines(self) -> int:
        return sum(found[0] for found in self.skipped.values())

    def sentences(self) -> list[str]:
        """One for each reason, the most frequent first."""
        return [
            f"{found[0]} {what if found[0] > 1 else one}: {why}{_where(found)}"
            for table, one, what in (
                (self.skipped, "line skipped", "lines skipped"),
                (self.ignored, "time ignored", "times ignored"),
            )
            for why, found in sorted(table.items(), key=lambda each: (-each[1][0], each[0]))
        ]


def with_more(base: S, more: More | None, tally: ParseStats) -> S | None:
    """`base` with the fields of a line's `more` in place of its own; a `more` that is a whole row, as recordings have
    it, stands alone. None, and counted, if that is none of our values."""
    if not more:
        return base
    for fields in (more, {**msgspec.to_builtins(base), **more}):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(fields, type(base))
    tally.ignore(f"`more` that is not a {type(base).__name__}")
    return None


def _count(table: dict[str, list[int]], why: str, number: int) -> None:
    found = table.setdefault(why, [0])
    found[0] += 1
    if number and len(found) <= SHOWN_LINES:
        found.append(number)


def _where(found: list[int]) -> str:
    total, *numbers = found
    if not numbers:
        return ""
    more = ", …" if total > len(numbers) else ""
    return f" (line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}{more})"


def parse_record(line: bytes, number: int, tally: ParseStats) -> Any_ | BadLine | None:
    """The record in one line without its end; None if it holds none, BadLine if it might have said who is there.

    `tally` counts everything that was not used. A BadLine has no time of its own yet.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _mend(line, number, tally)


def _mend(line: bytes, number: int, tally: ParseStats) -> Any_ | BadLine | None:
    """What can be used of a line that is not as it should be."""
    text = line.decode("utf-8", errors="replace")
    try:
        data = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        tally.skip("no whole JSON in it", number)
        return BadLine(t=0.0)
    if not isinstance(data, dict):
        tally.skip("JSON, but no object", number)
        return None
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        tally.skip("no `kind`" if kind is None else "a `kind` that trace v1 does not have", number)
        return None
    if "\ufffd" in text and b"\xef\xbf\xbd" not in line:
        tally.ignore("bytes that are not UTF-8", number)
    return _field_by_field(kind, data, number, tally)


def _field_by_field(kind: str, data: dict[str, Any], number: int, tally: ParseStats) -> Any_ | BadLine | None:
    wanted = KINDS[kind]
    kept: dict[str, Any] = {"kind": kind}
    for each in msgspec.structs.fields(wanted):
        if each.name not in data:
            if each.required:
                tally.skip(f"{kind} without `{each.name}`", number)
                return _damage(kind, kept)
            continue
        value = data[each.name]
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**62:
            value = int(value)  # 3.0 is a count, too
        try:
            msgspec.convert(value, each.type)
            kept[each.name] = value
        except (msgspec.ValidationError, RecursionError) as error:
            why = f"{kind} with {_what_is_wrong(value, error)} as `{each.name}`"
            if each.required:
                tally.skip(why, number)
                return _damage(kind, kept)
            tally.ignore(why, number)
    record: Any_ = msgspec.convert(kept, Any_)
    return record


def _damage(kind: str, kept: dict[str, Any]) -> BadLine | None:
    node = kept.get("node")
    return BadLine(t=0.0, node=node) if kind in ("proc", "report") else None


def _what_is_wrong(value: object, error: Exception) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    if isinstance(value, str):
        return "a string"
    below, above = (bound in str(error) for bound in (">= ", "<= "))  # the decoder's words for a bound
    return "a negative number" if below else "a number out of range" if above else "something of another type"
