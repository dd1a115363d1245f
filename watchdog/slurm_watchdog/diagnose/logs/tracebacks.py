"""Errors in the lines of a log: interleaved tracebacks put together, chains kept in their order. Pure.

Lines with the same prefix are one stream, and what is said in a stream is said in order. Without a prefix the
ranks' lines lie over each other: then each last line of a traceback is an error of its own, and no one knows
whose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.line import LINE_END, Line, Who, classify
from slurm_watchdog.knowledge.log_signatures import COPYING, UTILITY, log_table
from slurm_watchdog.parse.timestamps import Clock, Stamp

ITEM = late_regex(
    r"\s*(?:\[[A-Za-z][\w.-]*\]:? |[a-z][\w-]*: )?"
    r"(?:program|test(?: ?case)?|submission|solution|sample|problem|snippet|container|trial) #?\d+\b",
    re.IGNORECASE,
)
"""An evaluation says how one of its items went: the code that a model wrote, a sample, a trial."""
_NO_END = late_regex(
    r"\bthrown while requesting (?:HEAD|GET|POST|PUT) "
    r"|\bprevious (?:run|attempt|job)\b.{0,40}\b(?:ended|failed|died|crashed|stopped)\b|\bprevious (?:error|failure): ",
    re.IGNORECASE,
)
_ASYNC_EVENT = late_regex(r"NCCL WARN .*Got async event(?!.*catastrophic)")
"""A port of InfiniBand changed its state: transfers wait, and mostly continue. (An adapter that failed does not.)"""
_QUOTED = late_regex(r"""\s*(?:- )?(?:"[^"]{1,600}"|'[^']{1,600}'),?\s*$""")
"""An entry of a list that a program prints."""
_SETTING = late_regex(
    r"""\s*["'](?!\w*(?:message|msg|text|event|log|err|exc|trace|stack|reason|detail))[\w. -]{1,60}["']: ?[\[{"']"""
    r"""|\s*(?:[\w ]{0,40}\b)?(?:(?:config(?:uration)?|cfg|args|arguments|hparams|settings|options) ?[:=] ?[\[{]"""
    r"""|\w*(?:Namespace|Config|Args|Arguments|Settings|Options)\(\w+=)""",
    re.IGNORECASE,
)
"""A configuration that a program prints, or an entry of it: what it retries on, what it looks for. Under the other
names stands what happened, in a record of several lines."""
_GOES_ON = late_regex(
    r"\bretry|\bretri|\battempt \d+ ?(?:/|of)|\btry(?:ing)? again\b|\bfall(?:ing|s)? ?back\b"
    r"|\bcontinu(?:e|ing)\b|\brecover(?:ed|ing)\b|\bskipp(?:ing|ed)\b|\breconnect"
    r"|(?<!Exception )(?<!Error )\bignor(?:ed|ing)\b|\b(?:de|re)(?:creas|duc)ing (?:the )?batch size\b",
    re.IGNORECASE,
)
_DOES_WITHOUT = late_regex(
    r"\bretrying\b|\bretry \d+ ?(?:/|of)|\b(?:fall|skipp|ignor)ing\b|\bwill (?:re)?try\b|[-,;(] ?using (?:an?|the) "
    r"|\b(?:de|re)(?:creas|duc)ing (?:the )?batch size\b|[-,;(] ?trying (?:the next|another|port|\d)"
    r"|[-,;(] ?(?:using|taking|trying|loading|writing)\b.{0,80}\binstead\b",
    re.IGNORECASE,
)
"""Said in the line of an error itself, it is what its program does now."""
_GIVES_UP = late_regex(
    r"giving up|no more retries|out of retries|max(?:imum)? (?:number of )?retries|after \d+ (?:retries"
    r"|attempts)|failed (?:\d+ times|permanently)",
    re.IGNORECASE,
)
_LAST_TRY = late_regex(r"\battempt (\d+) ?(?:/|of) ?(\d+)", re.IGNORECASE)


def is_in_passing(line: Line) -> bool:
    """Whether the line of an error says itself what its program does now, that it is of an item of an evaluation,
    of an earlier run, of files that are copied, of a command of the script or of a list, or that a port changed
    its state."""
    text = line.text
    tries = _LAST_TRY.search(text)
    again = _DOES_WITHOUT.search(text) is not None or (tries is not None and int(tries[1]) < int(tries[2]))
    if again and not _GIVES_UP.search(text):
        return True
    if any(regex.search(line.raw) for regex in (_NO_END, _ASYNC_EVENT)):
        return True
    return any(regex.match(text) for regex in (ITEM, COPYING, UTILITY, _QUOTED))


def goes_on(text: str) -> bool:
    """Whether a line says that the program does without, or tries again, and that was not its last try."""
    if not _GOES_ON.search(text) or _GIVES_UP.search(text):
        return False
    tries = _LAST_TRY.search(text)
    return tries is None or int(tries[1]) < int(tries[2])


def is_setting(text: str) -> bool:
    """Whether a line is an entry of a configuration that a program prints: what it names has not happened."""
    return _SETTING.match(text) is not None


GAP_LINES = 120  # Between two lines of a traceback; further apart they are none.
DETAIL_LINES = 8  # Lines after an exception that may say what it was.
SLURMS_CLOCK_BEHIND_S, SLURMS_CLOCK_AHEAD_S = 60.0, 1800.0
"""Further from the last time in the log, `CANCELLED AT` was written by a clock of another zone, or long after."""
ENDED = late_regex(r"\*\*\* JOB\b.*CANCELLED AT|CANCELLED AT.*DUE TO")
"""Slurm's word that someone ends the run: what has no time of its own and stands below was said later."""
PROSE_WORDS = 14  # A shorter sentence with a person in it may be a program's.
AFTER_LINES = 6  # Lines after an error in which its stream says that it continues.

_EXCEPTION = late_regex(r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?:\[.*?\]|\(\w+\))?(?::\s|:?$)")
_TYPE = late_regex(
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Fault|Iteration|Empty|Full|Warning|Died|Crashed"
    r"|Expired|Refused)$"
)
_NO_TYPE = frozenset(
    {"Traceback", "During", "The", "File", "Killed", "Aborted", "Terminated", "Exception", "Error", "Original"}
)
_SOURCE = late_regex(r'^\s*(?:File "|frame #\d+|raise\b|#\d+ +0x|\^+|~+|at \S+\()|^\s*(?:\.\.\.|\[repeated \d+)')
_WRAPPER = late_regex(
    r"Caught \w+ in |RayTaskError\(|^The above|ProcessRaisedException|worker raised an exception"
    r"|ExceptionGroup: .*\(\d+ sub-exceptions?\)|CheckpointException ranks:"
)
_GENERAL = late_regex(r"\bCheckpointingException\b")
_OF_DEVICE = late_regex(
    r"\bwait for compute device to finish failed|\b[Tt]he Inner error is reported as above|\bNPU function error: "
)
"""Words of a library above, or below, those that say what it was; an NPU's may be those of one that waited."""
NEAR_LINES = 40
_FATAL = late_regex(r"(?:^|[\s:])(?P<line>F\d{4} \d\d:\d\d:\d\d\.\d.*|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: F .*)")
"""The level of glog's and absl's that ends its process: it is taken off with the rest of what stands in front."""
_PLACE = late_regex(r":\d+\] ")
_LISTED = late_regex(r"\s*/job:\w+/replica:\d+/task:\d+,?\s*$")
"""A line of a list below an error, however long that is."""
_RAY_WHERE = late_regex(r"\(pid=(?P<pid>\d+), ip=(?P<host>[\w.:-]+)")
_DIRECT = "the above exception was the direct cause"
_DURING = "during handling of the above exception"
_IGNORED = late_regex(r"^\s*(?:Exception|Error) ignored in:?|^\s*Error in atexit\b|^\s*--- Logging error ---")
_HEADER = late_regex(
    r"^\W*(?:Exception Group |Original )?Traceback \(|Traceback \(most recent call last\)[^\w'\"]*$", re.IGNORECASE
)
"""Alone, at the beginning of what a line says, or at its end; in the middle of a sentence it is someone's example."""
_RELAYED = late_regex(r"^Traceback \(most recent call last\): \(RANK (?P<rank>\d+)\)\s*$")
"""torch.distributed.checkpoint raises on every rank what one rank said."""
_BESIDE_MAIN = late_regex(r"^\s*(?:Exception in thread |(?:Task|Future) exception was never retrieved\b)")
"""What a thread or a task of asyncio raised: the program continues without it."""
_TASK_SHOWN = late_regex(r"^\s*(?:future|task): <(?:Task|Future) ")
_LOGGED = late_regex(r"\b(?:WARN(?:ING)?|ERROR)\b")
_BESIDE = late_regex(r'File "[^"]*multiprocessing/resource_tracker\.py"')
"""Frames of a process that only tidies up beside the program: nothing ends of what it says."""
_PERSON = late_regex(r"\b(?:[Ww]e|[Oo]ur|I(?!/)|they|[Yy]ou|(?<!\d )us)\b")  # No microseconds, and no I/O.

PREFIX_BLANK = 1
"""Between a launcher's prefix and a line, kept or not with what a logger has before a header; frames have more."""


class FoundError(msgspec.Struct):
    """One thing that went wrong, as the log says it."""

    line: int
    name: str  # The row of the signatures.
    text: str
    who: Who
    at: float | None
    own_time: bool  # Whether the time stands in the line itself or its traceback.
    level: str | None
    traceback: bool
    group_rank: int | None = None
    weak: bool = False  # Said in passing: at the level of a warning, by a thread beside, or by a destructor.
    ignored: bool = False  # Python itself says that it is ignored.
    retried: bool = False  # What its stream says next is that it tries again.
    chained: bool = False  # It was raised because of the one before it in its stream.
    raw_text: str = ""  # The whole line.
    detail: list[str] = msgspec.field(default_factory=list)
    began: int = 0  # The line of its traceback's header, where the stream has a name; else its own.
    source: int = 0  # Which of several files it stands in.
    role: str = "noise"  # What it is for the end of the run: also `cause`, `cascade` or `teardown`.


class _Stream(msgspec.Struct):
    open: int = 0  # Tracebacks that began and have no last line yet.
    indent: int = 0
    began: int = 0
    at: float | None = None
    number: int = 0
    last: FoundError | None = None
    since: int = 0
    chained: bool = False
    during: bool = False
    weak: bool = False
    ignored: bool = False
    caught: bool = False
    """Its last line is a logger's, of an error after which the program continues: a traceback that follows is its."""
    frames: int = 0
    relayed: Who | None = None  # Whose traceback this one is a copy of.


def find_errors(lines: Iterable[Line], origin: Stamp | None = None) -> list[FoundError]:
    """The errors in the lines (in the order of the file, with gaps), in that order; `origin`: of the log's clock."""
    clock = Clock(origin)
    streams: dict[Who, _Stream] = {}
    found: list[FoundError] = []
    latest: float | None = None
    ended: float | None = None
    for line in _apart(lines):
        dated_at = _believed(line, clock.place(line.stamp), latest)
        latest = dated_at if dated_at is not None else latest
        stream = streams.setdefault(line.who, _Stream())
        if line.number - stream.number > GAP_LINES:
            streams[line.who] = stream = _Stream(at=stream.at)
        stream.number = line.number
        own = dated_at is not None
        if dated_at is not None:
            stream.at = dated_at
        at = dated_at if own else stream.at if line.who.named and stream.at is not None else latest
        if own and ENDED.search(line.raw):
            ended = dated_at
        elif not own and at is not None and ended is not None:
            at = max(at, ended)
        error = _read_error(line, stream, at, own)
        if (
            error is None
            and found
            and not line.who.named
            and found[-1].who.named
            and (line.number - found[-1].line <= DETAIL_LINES or _LISTED.match(line.text))
        ):
            found[-1].detail.append(line.text.strip()[:300])  # a message of several lines has its prefix only once
        if error is not None:
            found.append(error)
    _set_general_words_back(found)
    return _without_told_headers(found)


def _believed(line: Line, at: float | None, latest: float | None) -> float | None:
    """A line's time; None for Slurm's own word of the end, if its clock cannot be that of the log (another zone): it is
    printed at once, and stands in the right place."""
    if at is None or latest is None or "CANCELLED AT" not in line.raw:
        return at
    return at if -SLURMS_CLOCK_BEHIND_S <= at - latest <= SLURMS_CLOCK_AHEAD_S else None


def _apart(lines: Iterable[Line]) -> Iterator[Line]:
    for line in lines:
        if LINE_END not in line.text:
            yield line
            continue
        for text in line.text.split(LINE_END):
            yield replace(line, text=text)


def _read_error(line: Line, stream: _Stream, at: float | None, own: bool) -> FoundError | None:
    text = line.text
    lower = text.lower()
    caught, stream.caught = stream.caught, _LOGGED.search(line.raw) is not None and goes_on(text)
    if _DIRECT in lower or _DURING in lower:
        stream.chained, stream.during, stream.open = True, _DURING in lower, 0
        return None
    if _IGNORED.match(text):
        stream.ignored = True
    if _BESIDE_MAIN.match(text):
        stream.weak = True
    if "traceback (most recent call last)" in lower and _HEADER.search(text):
        stream.weak = stream.weak or ITEM.match(text) is not None or (caught and stream.open == 0)
        return _open(line, stream, at, own)
    if stream.open and (line.indent > stream.indent + PREFIX_BLANK or not text.strip()):
        stream.frames += 1
        stream.weak = stream.weak or _BESIDE.search(text) is not None
        return None
    if _SOURCE.match(text):
        stream.frames += 1
        return None
    name = classify(text) if not (stream.weak and _TASK_SHOWN.match(text)) else None
    if name is None and line.level == "error" and (fatal := _FATAL.search(line.raw)) and fatal["line"].endswith(text):
        name = classify(fatal["line"]) if not _PLACE.search(line.raw, 0, fatal.start("line")) else None
    if name == "traceback" or (name is not None and not stream.open and (is_setting(text) or _is_prose(line))):
        return None
    if stream.open and (name is None or name == "python_exception") and _is_exception(text.strip()):
        name = name or "python_exception"
    if name is None:
        _detail(line, stream)
        return None
    if name == "python_exception" and not _is_exception(text.strip()):
        match = _EXCEPTION.match(text.strip())
        if match is None or _TYPE.search(match["name"]) is None:
            return None
    return _error(line, name, stream, at, own)


def _is_prose(line: Line) -> bool:
    """Whether someone tells of errors: a long sentence with a person in it, and nothing of a program in front."""
    if line.who.named or line.stamp is not None or line.level is not None or _EXCEPTION.match(line.text.strip()):
        return False
    return len(line.text.split()) >= PROSE_WORDS and _PERSON.search(line.text) is not None


def _open(line: Line, stream: _Stream, at: float | None, own: bool) -> FoundError | None:
    if stream.open == 0:
        stream.indent, stream.began, stream.frames = line.indent, line.number, 0
    stream.open += 1
    if line.level == "warning" or line.level == "info":
        stream.weak = True
    # A log that is cut off has nothing but the header.
    error = _found(line, "traceback", stream, at, own, True)
    error.weak = stream.weak
    relayed = _RELAYED.match(line.text)
    stream.relayed = Who(rank=int(relayed["rank"])) if relayed else None
    error.who = stream.relayed or error.who
    return error


def _found(line: Line, name: str, stream: _Stream, at: float | None, own: bool, traceback: bool) -> FoundError:
    return FoundError(
        line.number, name, line.text.strip(), line.who, at, own, line.level, traceback, ignored=stream.ignored,
        raw_text=line.raw,
    )  # fmt: skip


def _is_exception(text: str) -> bool:
    match = _EXCEPTION.match(text)
    if match is None or match["name"] in _NO_TYPE:
        return match is not None and match["name"] in ("Exception", "Error") and ": " in text
    head = text.partition(":")[0]
    return (
        bool(_TYPE.search(match["name"]))
        or "." in head
        or (match["name"][0].isupper() and ":" in text and " " not in head)
    )


def _error(line: Line, name: str, stream: _Stream, at: float | None, own: bool) -> FoundError:
    before = stream.last
    error = _found(line, name, stream, at, own, stream.open > 0 or stream.frames > 0)
    error.group_rank = line.group_rank
    error.began = stream.began if stream.open > 0 and line.who.named else line.number
    error.weak = stream.weak or line.level in ("warning", "info")
    if not error.traceback and is_in_passing(line):
        error.weak = True
    if stream.chained and before is not None:
        error.chained = True
        # What a client of HTTP could not reach is a server, and no rank, whatever its socket said of it.
        a_server = before.name == "peer_lost" and name == "network"
        if (
            stream.during
            and (before.name == "python_exception" or a_server)
            and name not in log_table().consequences
            and name not in log_table().headers
        ):
            # A lookup that failed and was handled so: what came of it says more.
            error.chained, before.chained, before.weak = False, True, True
    if (
        before is not None
        and before.name == "python_exception"
        and _WRAPPER.search(before.text)
        and line.number - before.line < GAP_LINES
    ):
        before.chained, error.chained = True, False  # it only wraps the one that comes now
        where = _RAY_WHERE.search(before.text)
        if where is not None and not error.who.named:
            error.who = Who(host=where["host"], pid=where["pid"])
    if stream.relayed is not None:
        error.who, stream.relayed = stream.relayed, None
    stream.open = max(0, stream.open - 1)
    if stream.open == 0:
        stream.chained = stream.during = stream.weak = stream.ignored = False
        stream.frames = 0
    stream.last, stream.since = error, 0
    return error


def _detail(line: Line, stream: _Stream) -> None:
    error = stream.last
    if error is None or not line.text.strip():
        return
    stream.since += not _LISTED.match(line.text)
    if stream.since <= DETAIL_LINES:
        error.detail.append(line.text.strip()[:300])
    if stream.since <= AFTER_LINES and goes_on(line.text):
        error.retried = True


def _set_general_words_back(errors: Sequence[FoundError]) -> None:
    """Marks what only repeats in general words an error that its process reports beside it."""
    table = log_table()
    for error in errors:
        if error.name != "python_exception" or error.chained:
            continue
        of_device = _OF_DEVICE.search(error.text) is not None
        if not of_device and not _GENERAL.search(error.text):
            continue
        for other in errors:
            near = (-NEAR_LINES if of_device else 1) <= other.line - error.line <= NEAR_LINES
            alike = other.who == error.who or not (other.who.named and error.who.named)
            says_more = other.name not in table.headers and other.name != "python_exception"
            if near and alike and says_more and not other.weak and (of_device or other.name not in table.consequences):
                error.chained, other.chained = True, False
                break


def _without_told_headers(errors: list[FoundError]) -> list[FoundError]:
    """Without headers (`Traceback`, `terminate called`) of which a later line of their stream says the rest."""
    next_line: dict[Who, int] = {}
    kept: list[FoundError] = []
    for error in reversed(errors):
        later = kept[-1] if kept else error
        if error.name == later.name == "abort" and later.who == error.who and 0 < later.line - error.line <= GAP_LINES:
            kept[-1] = error  # the same end, and here is of what
            continue
        if error.name not in log_table().headers:
            next_line[error.who] = error.line
        else:
            reach = GAP_LINES * (1 if error.who.named else 3)
            if next_line.get(error.who, error.line + reach + 1) - error.line <= reach:
                continue
        kept.append(error)
    kept.reverse()
    return kept
