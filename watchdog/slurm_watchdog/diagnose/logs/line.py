"""One line of a log taken apart: when, who, how serious, and what it says without all that. Pure.

Launchers, log collectors and loggers each put something in front, in any order: a time, a host, a rank, a
level, a file and line. They are taken off one by one. A local rank is no rank, a worker's number is no rank,
and of a number in front of a host's name only the whole log tells which it is (see
slurm_watchdog.diagnose.logs.ranks).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.parse.timestamps import Stamp, stamp_of
from slurm_watchdog.parse.training_log.line import Rows, parse_line

MAX_CHARS = 2000  # Characters of a line that are looked at.
LINE_END = " ⏎ "  # Between the lines of a record that holds several.
_HOST = r"[A-Za-z][\w-]*(?:\.[\w-]+)*"
_NUMBERED_HOST = (
    r"(?!\w*_)(?=[\w.-]*\d[\w.-]*:)(?![\w.-]+\.(?:py|pyx|cc|cpp|cxx|cu|cuh|c|h|hpp|rs|go|java|js|ts)\d?:)" + _HOST
)
"""In brackets before a number; loggers put a module and its line there (`[core.py:588]`, `[trainer:88]`)."""
_WORD_HOST = (
    r"(?!(?:[dtpecs]p|pg|stage|group|mesh|default|trainer|(?:local_?)?rank|[a-z_]*worker)[_-]?\d+\b)(?=[\w.-]*\d)"
    + _HOST
)
_WORD_RANK = r"(?:global[_ ]?)?rank[ _:=]{0,2}(?P<rank>\d{1,6})(?:/\d+)?(?:[\])>]:?|:| ?\|)"
"""A host with a number, and the word of a rank: a group's number, or a launcher's of a worker, is no host."""
_LOGGER = late_regex(
    r"(?:[A-Za-z][\w.]{0,40} ?[|-] |[a-z][\w.]{0,40}(?<!Error)(?<!Exception)(?<!Failure): "
    r")(?=\[?(?:[Gg]lobal[_ ]?)?[Rr]ank[ =:]{0,2}\d)"
    r"|[a-z][\w.]{0,40}:(?=\[(?:[Gg]lobal[_ ]?)?[Rr]ank[ =:]{0,2}\d)"
)
"""A logger's name is taken off only where a rank stands behind it."""
_ESCAPES = late_regex(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_CONTROL = late_regex(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\u200b]+")

# What names someone. `number` is a rank, a local rank or a task: the launcher decides.
_WHO: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("rank", late_regex(r"\[rank[ _:]{0,2}(?P<rank>\d+)\]:?", re.IGNORECASE)),
    ("host_rank", late_regex(r"\[(?!(?:[dtpecs]p|stage"
        rf"|group)\d+/)(?=[\w.-]*\d[\w.-]*/)(?P<host>{_HOST})/rank[ _:=]?(?P<rank>\d+)\]:?")),
    ("host_word_rank", late_regex(
        rf"[\[(<](?P<host>{_WORD_HOST})(?:[\])>]:?|[ :|,])[ |]?[\[(<]?{_WORD_RANK}", re.IGNORECASE)),
    ("host_word_rank", late_regex(rf"(?P<host>{_WORD_HOST}): ?[\[(<]?{_WORD_RANK}", re.IGNORECASE)),
    ("local", late_regex(r"\[(?:default|[A-Za-z_]*worker|trainer|local_?rank[ :]?)(?P<local>\d+)\]:?", re.IGNORECASE)),
    ("mpi", late_regex(r"\[(?:\d+,)?(?P<rank>\d+)\]\s?<\w+>:")),
    ("sagemaker", late_regex(rf"\[\d+,mpirank:(?P<rank>\d+)(?:,(?P<host>{_HOST}))?\]\s?<\w+>:")),
    ("ucx", late_regex(rf"\[(?P<host>{_HOST}):\d+ ?:\d+:\d+\]")),
    ("ompi", late_regex(rf"\[(?P<host>{_HOST}):0\d+\]")),
    ("host_number", late_regex(rf"\[(?P<host>{_NUMBERED_HOST}):(?P<number>0|[1-9]\d{{0,4}})\]:?")),
    ("ray", late_regex(r"\((?P<actor>[A-Za-z_]\w*(?:\([^)]*\))?)(?: \w+=\S+?)*,? pid=(?P<pid>\d+)(?:, "
        r"ip=(?P<host>[\w.:-]+))?\)(?= |$)")),
    ("raylet", late_regex(r"\(raylet(?:, ip=(?P<host>[\w.:-]+))?\)(?= )")),
    ("task", late_regex(r"(?P<number>\d{1,5}): ")),
    ("nccl", late_regex(rf"(?P<host>{_HOST}):(?P<pid>\d+):\d+ \[(?P<gpu>\d+)\]")),
    ("word", late_regex(r"[\[(<]?\b(?:global[_ ]?)?rank\s?[=:]?\s?(?P<rank>\d{1,5})(?:/\d+)?(?:[\])>]:?|:"
        r"| \||,| -|(?=\s))", re.IGNORECASE)),
    ("letter", late_regex(r"\[R(?P<rank>\d{1,5})\]:?")),
)  # fmt: skip
_GROUP_RANK = late_regex(r"\[(?:PG [^\]]*? ?)?Rank (?P<group_rank>\d+)\]:?\s?")
"""In the words of ProcessGroupNCCL: a rank within its group, which may not be everybody."""
_OF_GROUPS = late_regex(
    r"ProcessGroup|NCCL|[Ww]atchdog|\bWork\b|[Cc]ollective|monitoredBarrier|[Hh]eartbeat|c10d|data inconsistency"
)
"""Other loggers put their own rank of all in the same brackets."""
_HOST_WORD = late_regex(rf"(?P<host>{_HOST}|\d{{1,3}}(?:\.\d{{1,3}}){{3}}): ")
_INDENTED_RANK = late_regex(r"(?: {4}|\t)\s*\[(?:rank|default)\d+\]:")
"""PyTorch's own prefix in a block of code that someone pasted."""
_EXCEPTION_GROUP = late_regex(r" {2,12}(?:\| ?|\+[+-]*(?: \d+ -+$| (?=Exception Group)))")
_SERVICE = late_regex(rf"(?P<host>{_HOST}-\d+)\s+\| ")  # What `docker compose logs` puts in front of a line.
_INNER_RANK = late_regex(r"\[rank(?P<rank>\d+)\]:")
_BAR_OR_POD = late_regex(r"\d(?:s/it|it/s)[^\[\]]*\]|^(?=[\w.]*-)[\w.-]*(?<=\d)(?: [a-z][\w-]*)?\s+$|^\[pod/[^\]]+\] $")
"""What may stand before PyTorch's own prefix: a bar that has no line end of its own, the name of a pod."""
_SYSLOG = late_regex(
    rf"(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d|\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?[+-]\d\d:?\d\d) "
    rf"(?P<host>{_HOST}) [\w.@/-]+\[\d{{1,8}}\]: "
)
"""What journalctl and syslog put in front of a line: a time, a host, a program and its process."""
_NOT_HOSTS = late_regex(
    r"gpu[-_.]?\d?|(?:step|epoch|rank|iter\w*|cuda|layer|worker_?\d*$|device|proc|process|task|stage"
    r"|phase|level|test|train|line|batch|fold|try|attempt|"
    r"stderr|stdout|error|info|warning|debug|fatal|note|file|torch|nccl|srun|slurmstepd|python\w*|http"
    r"|https|utf|sm|fp|bf|int|float|tpu|npu|node_rank)[-_.]?\d*",
    re.IGNORECASE,
)
_LEVEL = late_regex(
    r"[\[(<|*\s-]*\b(?P<level>TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE"
    r"|ERR)\b(?:\s*[\])>|:*-]+\s?|\s|$)"  # what follows keeps its indentation
)
_GLOG = late_regex(r"\[?(?P<letter>[IWEFD])\d{3,4} [\d:.]+(?: +\d+)? (?:(?P<file>[\w./<>-]+:\d+)\])?\s?")
_TORCH_OLD = late_regex(r"\[?(?P<letter>[IWEF]) (?P<file>[\w./-]+:\d+)\] ?")
_STAMP = late_regex(
    r"[\[(<]?(?:\d{4}[-/.]\d\d[-/.]\d\d[T _,-]{1,2}\d\d:\d\d:\d\d(?:[.,:]\d+)?(?: ?(?:Z\b|UTC\b"
    r"|[+-]\d\d:?\d\d\b))?|\d\d/\d\d/\d{4}[ ,T-]+\d\d:\d\d:\d\d(?:[.,]\d+)?(?: [AP]M)?"
    r"|\d\d[/-]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?(?![:\d<])|1[5-9]\d{8}(?:\.\d+)?\b)"
    r"(?: [DTPEC]P\d{1,5}){0,4}[\])>]?[:,]?(?:\s*[|-](?=\s))?\s?"
)
_PLACE = late_regex(
    r"(?:\[[\w./<>-]+:\d+(?::[\w<>.]+)?\]|[\w./<>-]+\.(?:py|cc|cpp|cu|h):\d+(?::[\w<>.]+)?\]?|\[(?:pid"
    r"|PID|tid)?[ =:]?\d{3,8}\]|[\w.<>]+:[\w<>]+:\d+)\s?(?:[-|>:]+\s)?"
)
_NEMO = late_regex(r"\[NeMo (?P<letter>[IWEDF]) [\d: -]+(?: nemo_logging:\d+)?[^\]]*\]\s?")
_HF = late_regex(r"\[(?P<level>INFO|WARNING|ERROR|DEBUG)\|[\w./-]+:\d+\]\s?")
_QUOTE = late_regex(r"(?:> ?)+(?!>)")
_STREAM = late_regex(
    r"(?:\[?(?:stderr|stdout)\]?|err|out)\s?[:|]\s?|(?:stderr|stdout) [FP] |\[pod/[\w.-]+/[\w.-]+\] ", re.IGNORECASE
)
"""Of a launcher, of a container's log (CRI), of `kubectl logs --prefix`."""
_LETTERS = {"I": "info", "D": "info", "W": "warning", "E": "error", "F": "error"}
_LEVELS = {
    "TRACE": "info", "DEBUG": "info", "INFO": "info", "NOTICE": "info", "WARN": "warning", "WARNING": "warning",
}  # fmt: skip
_JSON_WORDS = late_regex(
    r'"(?:message|msg|event|text|error|exc_info|exception|log)"\s*:\s*"(?P<text>(?:[^"\\]|\\.){1,1900})'
)
_JSON_RAISED = late_regex(
    r'"(?:exc|exc_info|exc_text|exception|error\.stack_trace|stack|stack_?trace'
    r'|traceback)"\s*:\s*"(?P<text>(?:[^"\\]|\\.){1,1900})'
)
"""Where loggers put the traceback beside the message."""
_JSON_RANK = late_regex(r'"(?:global_)?rank"\s*:\s*"?(?P<rank>\d{1,5})\b')
_JSON_HOST = late_regex(r'"(?:host|hostname|node|node_name)"\s*:\s*"(?P<host>[\w.-]+)"')
_JSON_LEVEL = late_regex(r'"(?:level|levelname|severity)"\s*:\s*"(?P<level>[A-Za-z]+)"')


class Who(Struct, kw_only=False):
    """The rank or process that a line's beginning names. Two lines of one `Who` are mostly of one process."""

    rank: int | None = None
    local: int | None = None
    number: int | None = None  # A number of the launcher that is a rank, a local rank or a task's number.
    host: str | None = None
    pid: str | None = None

    @property
    def named(self) -> bool:
        return self != NOBODY

    @property
    def labelled(self) -> bool:
        """Whether a number stands in front, as of `srun --label`, and no host."""
        return self.number is not None and self.host is None


NOBODY = Who()


class Line(Struct, kw_only=False):
    """A line of a log; `text` still has its own indentation."""

    number: int
    text: str
    who: Who = NOBODY
    stamp: Stamp | None = None
    level: str | None = None  # `info`, `warning`, `error`; None where the line has none.
    group_rank: int | None = None
    raw: str = ""

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())


def without_numbers(lines: Iterable[Line], which: Callable[[Who], bool]) -> list[Line]:
    """The lines, of those that are meant without the number in front and the host that it belongs to."""
    return [replace(line, who=replace(line.who, host=None, number=None)) if which(line.who) else line for line in lines]


def plain(raw: str) -> str:
    """Without colours and control characters, at most MAX_CHARS characters; tabs stay."""
    text = raw[:MAX_CHARS]
    if not text.isprintable():
        text = _CONTROL.sub(" ", _ESCAPES.sub("", text))
    return text.rstrip()


def read_line(number: int, raw: str, hosts: frozenset[str] = frozenset(), quoted: bool = False) -> Line:
    """Takes a line apart. `hosts`: words before a colon that are known to be hosts; `quoted`: `> ` may be in front."""
    text = plain(raw)
    whole = text
    if quoted:
        match = _QUOTE.match(text)
        text = text[match.end() :] if match else text
    stamp = stamp_of(text)
    found: dict[str, Any] = {}
    level: str | None = None
    if text.startswith("{") and '"' in text:
        return _from_json(number, text, stamp, whole)
    if (match := _SYSLOG.match(text)) and _NOT_HOSTS.fullmatch(match["host"]) is None:
        found["host"], text = match["host"], text[match.end() :]
    for _ in range(9):
        rest, level = _strip(text, found, level, hosts, whole)
        if rest is None:
            break
        text = rest
    if "rank" not in found and (match := _INNER_RANK.search(text)) and _BAR_OR_POD.search(text[: match.start()]):
        found["rank"] = match["rank"]
        text = text[match.end() :].removeprefix(" ")
    who = Who(
        rank=_int(found.get("rank")),
        local=_int(found.get("local")),
        number=_int(found.get("number")),
        host=found.get("host"),
        pid=found.get("pid"),
    )
    return Line(number, text, who, stamp, level, _int(found.get("group_rank")), whole)


def _strip(
    text: str, found: dict[str, Any], level: str | None, hosts: frozenset[str], whole: str
) -> tuple[str | None, str | None]:
    """The text without the first thing in front of it, which goes to `found`; None if there is nothing."""
    bare = text.lstrip() if found or level or _INDENTED_RANK.match(text) else text
    with_logger = bool(found or level) and found.keys().isdisjoint({"rank", "number"})
    for regex in (_STAMP, _GLOG, _TORCH_OLD, _NEMO, _HF, *((_LOGGER,) if with_logger else ())):
        match = regex.match(bare)
        if match and match.end():
            letter = match.groupdict().get("letter")
            word = match.groupdict().get("level")
            level = _LETTERS.get(letter, level) if letter else _LEVELS.get(word or "", "error") if word else level
            found.setdefault("_", True)
            return bare[match.end() :], level
    match = _GROUP_RANK.match(bare)
    if match and "group_rank" not in found and (match[0].startswith("[PG") or _OF_GROUPS.search(whole)):
        found["group_rank"] = match["group_rank"]
        return bare[match.end() :], level
    for name, regex in _WHO:
        match = regex.match(bare)
        if match is None or _means_nobody(name, match, found):
            continue
        for key, value in match.groupdict().items():
            if value is not None and key != "gpu" and (key != "pid" or name == "ray"):
                found[key] = value
        # One blank belongs to the prefix; the others are the program's indentation.
        rest = bare[match.end() :]
        keeps = name in ("rank", "host_word_rank", "local", "mpi", "sagemaker", "host_number", "ray")
        return (
            rest[1:] if rest.startswith(" ") and name not in ("local", "host_number") else rest
        ) if keeps else rest, level
    match = _EXCEPTION_GROUP.match(text) if not found.keys() - {"rank", "_group"} else None
    if match:
        found.setdefault("_group", True)
        return text[match.end() :], level
    match = _SERVICE.match(bare)
    if match and "host" not in found:
        found["host"] = match["host"]
        return bare[match.end() :], level
    match = _HOST_WORD.match(bare)
    if match and "host" not in found and (match["host"] in hosts or _looks_like_host(match["host"])):
        found["host"] = match["host"]
        return bare[match.end() :], level
    for regex in (_LEVEL, _PLACE, _STREAM):
        match = regex.match(bare)
        if match and match.end():
            word = match.groupdict().get("level")
            if word:
                if level is not None:
                    continue
                level = _LEVELS.get(word, "error")
            found.setdefault("_", True)
            return bare[match.end() :], level
    return None, level


def _means_nobody(name: str, match: re.Match[str], found: dict[str, Any]) -> bool:
    """Whether what looks like a prefix is none: a number after a rank, or a word that counts."""
    if name == "task":
        return "number" in found or "rank" in found
    return name in ("host_number", "host_word_rank") and _NOT_HOSTS.fullmatch(match["host"]) is not None


def _looks_like_host(word: str) -> bool:
    """Whether a word before a colon is a host beyond doubt: a name with a dash or a dot, and a number at its end."""
    return bool(re.fullmatch(r"[a-z][\w.]*-[\w.-]*\d|\d{1,3}(?:\.\d{1,3}){3}", word)) and not _NOT_HOSTS.fullmatch(word)


def host_word(raw: str) -> str | None:
    """The word before a colon at a line's beginning that may be a host, for callers that count how often each comes."""
    match = _HOST_WORD.match(raw)
    if match is None:
        return None
    word = match["host"]
    return word if any(c.isdigit() for c in word) and not _NOT_HOSTS.fullmatch(word) else None


def _from_json(number: int, text: str, stamp: Stamp | None, whole: str) -> Line:
    message_match = _JSON_WORDS.search(text)
    rank, host, level = _JSON_RANK.search(text), _JSON_HOST.search(text), _JSON_LEVEL.search(text)
    who = Who(rank=int(rank["rank"]) if rank else None, host=host["host"] if host else None)
    raised = _JSON_RAISED.search(text)
    both = message_match["text"] if message_match else text
    if message_match and raised and raised["text"] != message_match["text"]:
        both = f"{both}\\n{raised['text']}"
    message = both.replace('\\"', '"').replace("\\n", LINE_END) if message_match else text
    return Line(
        number, message, who, stamp, _LEVELS.get(level["level"].upper(), "error") if level else None, None, whole
    )


def _int(text: Any) -> int | None:
    return int(text) if text is not None else None


def classify(text: str) -> str | None:
    """The row of knowledge.log_signatures that a text matches; None if none does, or if it is said to be harmless."""
    fact = parse_line(text, Rows(log_table().signatures, (), (), False))
    return fact.pattern if fact is not None else None
