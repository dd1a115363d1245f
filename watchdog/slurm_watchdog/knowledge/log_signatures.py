"""Lines of a job's log that look like an error: the rows of `data/log_signatures.conf`, and what all of them
have in common.

Each matches something that programs print when they fail, never the bare word "error", which healthy logs are
full of. A row is tried only if one of its `needles` is in the line. The scanner
(slurm_watchdog.parse.training_log.line_scan) looks for the letters of all needles of all tables in whole
blocks of a log: the fewer different ones there are, the faster it reads. A needle that contains another one
("cuda error: " contains "error") costs it nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields, read_shipped
from slurm_watchdog.knowledge.site_rows import SiteRows

GROUPS = ("header", "from_outside", "storage_full", "after_sigterm", "node_can_cause", "seen_by_others")
"""Values of `group`: see LogTable."""


class Signature(msgspec.Struct, frozen=True):
    """One way to write one error."""

    name: str
    needles: tuple[str, ...]  # In lower case, without digits at their ends; one of them is in every line that matches.
    regex: re.Pattern[str]
    consequence: bool = False  # It follows from something else, which is to be looked for before it.


class LogRow(msgspec.Struct, frozen=True):
    """One section: the signature, and the meaning of its name, given in one of its sections."""

    signature: Signature
    means: str  # Half a sentence; empty if another section of the name has it.
    groups: tuple[str, ...]


def log_row(fields: Fields) -> LogRow:
    """The row of a section [log NAME]."""
    signature = Signature(fields.name(), fields.needles(), fields.expression(re.IGNORECASE), fields.flag("consequence"))
    return LogRow(signature, fields.text("means"), fields.choices("group", GROUPS))


_ROWS = read_shipped("log_signatures.conf", {"log": log_row})["log"]

SIGNATURES: tuple[Signature, ...] = tuple(row.signature for row in _ROWS)
"""The rows of the package. Those in force, a site's included, are `log_table().signatures`."""


class LogTable(msgspec.Struct, frozen=True, eq=False):
    """The rows in force, and the meanings of their names."""

    signatures: tuple[Signature, ...]  # The first that matches names the line.
    means: Mapping[str, str]  # What each name means, half a sentence.
    consequences: frozenset[str]  # Names of the rows that never are a cause.
    from_outside: frozenset[str]  # The run is ended from outside: what comes after such a line follows from it.
    felt: frozenset[str]  # Consequences that a rank itself reports of what another did to it.
    headers: frozenset[str]  # They announce an error; what it is stands in the lines after them.
    storage_full: frozenset[str]
    after_sigterm: frozenset[str]  # What processes print that are ended while they work.
    node_can_cause: frozenset[str]
    """What a node may be the reason of: hardware, filesystems, memory. An exception of Python is the program's."""


def log_table() -> LogTable:
    """The rows in force in this process."""
    return _table(site_rows.current())


@lru_cache(maxsize=2)
def _table(site: SiteRows) -> LogTable:
    rows = site.before("log", _ROWS, lambda row: row.signature.name)

    def names(group: str) -> frozenset[str]:
        return frozenset(row.signature.name for row in rows if group in row.groups)

    consequences = frozenset(row.signature.name for row in rows if row.signature.consequence)
    from_outside = names("from_outside")
    means = {row.signature.name: row.signature.name for row in rows}
    means.update({row.signature.name: row.means for row in reversed(rows) if row.means})
    return LogTable(
        tuple(row.signature for row in rows),
        means,
        consequences,
        from_outside,
        consequences - from_outside - names("seen_by_others"),
        names("header"),
        names("storage_full"),
        names("after_sigterm"),
        names("node_can_cause"),
    )


# Harmless although a row matches: lines that say the program continues, or that only mention an error.
HARMLESS = late_regex(
    r"\bwill (?:be )?(?:retr|reconnect)|(?<!non-)(?<!not )\bretr[iy]able (?:error|exception|failure)|\bretrying\b|\bretry \d|\bignor(?:ed|ing)\b|\bnon-?fatal\b|(?<!un)\bhandled\b|\brecover(?:ed|ing)\b|(?<!\] )\bno error|\b0 errors\b"
    r"|\bfall(?:s|ing)? ?back\b|\bskipp(?:ed|ing)\b|\b(?!Non)[A-Z]\w*Warning\b|\bcontinuing\b|\bthis is (?:expected|harmless|normal)\b|\bsuppress|\bharmless\b|\bNCCL INFO\b|\.\. ?(?:ok|pass(?:ed)?)\s*$"
    # What a tracker of experiments says in its own log: it retries by itself, and the training continues without it.
    r"|(?:^|[\s\]])(?:wandb|swanlab): |\bCOMET (?:ERROR|WARNING|INFO|DEBUG):|\[neptune\]|(?:^|\b(?:ERROR|WARNING|INFO) )mlflow\.(?!exceptions)[\w.]+: |\bclearml\.\w+ - ",
    re.IGNORECASE,
)
HARMLESS_NEEDLES = (
    "retr", "reconnect", "ignor", "non-fatal", "nonfatal", "handled", "recover", "no error", "0 errors", "fall", "skipp", "warning", "continuing",
    "this is ", "suppress", "harmless", ".. ok", "..ok", ".. pass", "..pass", "nccl info", "wandb: ", "swanlab: ", "comet ", "[neptune]", "mlflow.", "clearml.",
)  # fmt: skip
"""One of them is in each lower-cased line that HARMLESS matches: to search for these is much quicker."""

GUESSES = late_regex(
    r"\b(?:potential|possible|common|likely|typical|probable|usual) (?:root )?(?:causes?|reasons?)\b|^\s*(?:\(\d\)|\d\)) (?!(?!(?:the|an?|it|your) )[a-z][\w ]{2,30}: )",
    re.IGNORECASE,
)
"""What stands behind it is a list of what may have happened, and says nothing about what did (Ray: "Some
common causes include: (1) the process was killed by the OOM killer, …"). A number before the name of an error and a
colon is an error's own (`(1) segmentation fault: …`)."""
GUESS_NEEDLES = ("cause", "reason", "1) ", "2) ", "3) ", "4) ", "5) ")
"""One of them is in each lower-cased line that GUESSES matches."""

BOILERPLATE = late_regex(
    r"(?:CUDA|HIP) kernel errors might be asynchronously reported.{0,120}?\bincorrect\b"
    r"|consider passing (?:CUDA_LAUNCH_BLOCKING=1|AMD_SERIALIZE_KERNEL=\d)"
    r"|[Cc]ompile with \W?TORCH_USE_(?:CUDA|HIP)_DSA\W? to enable device-side assertions"
    r"|[Dd]evice-side assertions? (?:tracking was not enabled|were explicitly omitted)"
)
"""What torch puts below every error of CUDA: it says nothing of this one."""

COMMAND_LINE = late_regex(
    r"\s*(?:\d{1,5}: )?(?:\+{1,8} (?!Exception Group\b)"
    r"|(?:(?:if|elif|while|until) )?(?:! )?(?:\[\[ |(?:echo|printf|trap|z?e?grep|awk|sed|case|def) "
    r"|(?:dmesg|journalctl)(?: -[\w-]+)* \|)"
    r"|(?:export|local|declare|readonly) \w+=|# ?(?:SBATCH|TODO|FIXME|echo|export|srun|python3?)\b)"
)
"""A command that the shell prints before it runs it (`set -x`), or a line of a script that a job has printed
(`cat $0`): of what it looks for or would say nothing has happened."""

BEFORE_CHARS = 60
SPOKEN_BEFORE = late_regex(
    r"\b(?:no|without(?: any)?)\s+(?:(?:GPU|rank|node|worker|process|task)s? (?:has|have|is|are|was|were) )?$"
    r"|(?:^|[:;,(|]\s*|\bwill \w+ |\bto \w+ )(?:up)?on (?:an? |the |any )?['\"]?$"
    r"|\bif (?:this|the|your|a) (?:job|run|training|program) (?:fails|crashes|dies|stops|ends) with\b[^.]{0,40}$"
    r"|\s#+ [A-Za-z][^#]*$"
    r"|\bif (?:you (?:see|get|hit|encounter) )?(?:an? |the |any )?['\"][^'\"]{0,40}$",
    re.IGNORECASE,
)
"""What stands before the words of an error that are denied, said of what would be done, or a remark of a script."""
ZERO_BEFORE = late_regex(r"(?:^|[:;,(|=]\s*|\bfound )0 $", re.IGNORECASE)
PLURAL_AFTER = late_regex(r"s\b| (?:errors|events|faults|kills|failures)\b", re.IGNORECASE)
"""`0 uncorrectable ECC errors`: of one thing `rank 0` may be said."""
ZERO_AFTER = late_regex(
    r"(?:(?:s| \w{3,8}s)(?: count| so far)?| count)\s*[:=]\s*0(?![\w.])|(?<=oom_kill) 0(?![\w.])", re.IGNORECASE
)
"""A counter that stands at nothing: `uncorrectable ECC errors: 0`, and `oom_kill 0` of a cgroup's memory.events."""


def is_spoken_of(text: str, begin: int, end: int) -> bool:
    """Whether the words of an error (`begin` to `end`) are only spoken of: in a command, denied, or counted as none."""
    since = max(0, begin - BEFORE_CHARS)
    return (
        COMMAND_LINE.match(text) is not None
        or SPOKEN_BEFORE.search(text, since, begin) is not None
        or ZERO_AFTER.match(text, end) is not None
        or (ZERO_BEFORE.search(text, since, begin) is not None and PLURAL_AFTER.match(text, end) is not None)
    )


COPYING = late_regex(
    r"\s*(?:(?:rsync|scp|curl|wget|git|rclone|s5cmd|gsutil)(?:\[\d+\])?: |client_loop: |packet_write_wait: "
    r"|channel \d+: open failed|Read error \()"
)
"""A program that copies files, or a tunnel of ssh, lost a server, and no rank another one."""

UTILITY = late_regex(
    r"\s*(?:/(?:usr/)?s?bin/)?(?:rm|rmdir|mkdir|mv|cp|ln|ls|cat|touch|chmod|chown|chgrp|stat|find|du|df|tar|unzip|head|tail"
    r"|tee|dd|sysctl|renice|nice|ionice|numactl|taskset|mount|umount|modprobe|readlink|realpath): "
)
"""A command of a script says what it could not do: the script mostly continues."""

SOURCE_LINE = late_regex(
    r"\s*(?:raise|assert|return|yield|await|del|except)[ (](?!.{0,40}(?:failed|error)$)|\s*File \"|\s{4,}(?:[\w.]+ = |if |elif |with |for |while |self\.)"
)
"""A line of a program that Python prints in a traceback, above what the exception itself says."""

LOST_A_RANK = next(row.regex for row in SIGNATURES if "(?P<peer>" in row.regex.pattern)
"""A rank says in words of a program's own that it lost another one, which it names: the only groups are that name."""
