"""What the line of an error says of it itself: that its program does without, that it is of an item of an evaluation
or an entry of a configuration, that it is tried again. Pure."""

from __future__ import annotations

import re

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.line import Line
from slurm_watchdog.knowledge.log_signatures import COPYING, UTILITY

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
"""A port of InfiniBand that has changed its state: transfers wait, and mostly continue. (An adapter that has failed
does not.)"""
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
