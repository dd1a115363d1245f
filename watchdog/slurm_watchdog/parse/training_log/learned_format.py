"""Progress in a log of unknown format: a number that rises by the same amount, again and again, at a steady
place of a steady line.

A wrong clock hides a hang, or accuses a job that does well. So much has to come together, and one doubt is
enough to stay silent: the line names something that only training has (a loss, a learning rate, an accuracy
…), a number with decimals in it goes up and down as a loss does, the whole number beside it rose RISES times
by the same amount over at least SPAN_S, at a steady pace, and not with the time of day. What is counted is
not known: the number is a count, and never shown as a step.

Pure bookkeeping, one Learner a file, bounded in memory and in time.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from itertools import pairwise

import msgspec

from slurm_watchdog.base.averages import median
from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge.progress_patterns import NOT_PROGRESS
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.text import LogFact, clean_line, split_prefix

KNOWN_AFTER = 3
"""After so many lines of progress in a known format nothing is learnt of a file; a single one may be an accident."""
RISES = 6
SPAN_S = 30.0  # Looks are seconds apart: what rises within one of them has no pace.
MAX_FORMS = 32
MAX_COLUMNS = 8
MAX_CHARS = 400
MAX_BYTES = 8 * 1024  # Of a block so much is looked at, its end.
MAX_RISES_KEPT = 16
LOOSE = 3.0  # Of a steady pace no interval is so many times the median one (and a look longer).
LOOK_S = 10.0
CLOCKS = (1.0, 10.0, 100.0, 1e3, 1e6, 1e9, 1 / 60, 1 / 3600)
"""What rises by so much a second is time: in seconds, ticks, milli-, micro- and nanoseconds, minutes, hours."""
CLOCK_SLACK = 0.12

WORDS = (
    b"loss", b"lr", b"learning", b"grad", b"gnorm", b"acc ", b"acc=", b"acc:", b"accuracy", b"ppl",
    b"perplexity", b"reward", b"nll", b"bpb", b"mse", b"psnr",
    b"mfu", b"verlust", b"perte", b"entropy",
)  # fmt: skip
_TRAINING = late_regex(
    r"(?<![a-z])(?:\w*loss|lr|learning[ _-]?rate|grad(?:ient)?[ _-]?norm|gnorm|acc|accuracy|ppl"
    r"|perplexity|reward|nll|bpb|mse|psnr|mfu"
    r"|verlust|perte|entropy)(?![a-z])",
    re.IGNORECASE,
)
_OTHER = late_regex(
    r"heart-?beat|\balive\b|\bping\b|\bpulse\b|uptime|elapsed|\bpid\b|\bmem(?:ory)?\b|\b[kmg]i?b\b|\butil"
    r"|\btemp|\bwatts?\b|\bcpu\b|\bretr(?:y|ies)"
    r"|\battempt|\bpoll|\bwait|\bsleep|\bqueue|\bmonitor|\bhealth|\bwatchdog|\bstatus\b|\bval(?:id\w*)?\b"
    r"|\beval\w*|\btest\w*|\bcheckpoint|\bsav(?:e|ing)"
    r"|\bnccl\b|\bversion|\bload|\bcache|\bredraw|\bsync\b|\bbest\b|\berror",
    re.IGNORECASE,
)
_TIMES = late_regex(
    r"\d{4}[-/]\d\d[-/]\d\d|\d\d[-/]\d\d[-/]\d{2,4}|\d{1,3}:\d\d(?::\d\d)?(?:[.,]\d+)?"
    r"|\b1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9}|\.\d+)?\b|0x[0-9a-fA-F]+"
)
_NUMBER = late_regex(r"[-+]?\d[\d,_]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
_LETTERS_WITH_NUMBERS = late_regex(r"[A-Za-z_]+\d+\w*")
_BLANKS = late_regex(r"\s+")


class _Column(msgspec.Struct):
    """One number of a form of line."""

    value: float | None = None
    delta: float | None = None
    rises: int = 0
    ups: int = 0
    downs: int = 0
    decimal: bool = False
    seen: deque[tuple[float, float]] = msgspec.field(default_factory=lambda: deque(maxlen=MAX_RISES_KEPT))
    """(when, value) of those that were higher than the one before."""

    def add(self, text: str, at: float, gap: bool) -> None:
        value = float(text.replace(",", "").replace("_", ""))
        self.decimal = self.decimal or "." in text or "e" in text.lower()
        before, self.value = self.value, value
        if before is None:
            self.seen.append((at, value))
            return
        delta = value - before
        if delta == 0:
            return
        self.ups, self.downs = self.ups + (delta > 0), self.downs + (delta < 0)
        if delta < 0:
            self.delta, self.rises = None, 0
            self.seen.clear()
        elif self.delta is None or gap:
            self.delta = delta if self.delta is None else self.delta
        elif delta != self.delta:
            self.delta, self.rises = delta, 0
            self.seen.clear()
        self.rises += delta > 0
        self.seen.append((at, value))

    def counts(self) -> bool:
        """Whether it rises as a count of steps does."""
        if self.decimal or self.rises < RISES or self.downs:
            return False
        (began, low), (ended, high) = self.seen[0], self.seen[-1]
        if ended - began < SPAN_S or not 0 <= low < high < 2**53:
            return False
        moments = sorted({at for at, _ in self.seen})
        pauses = [b - a for a, b in pairwise(moments)]
        if len(pauses) < 2 or max(pauses) > LOOSE * median(pauses) + LOOK_S:
            return False
        return not _is_clock((high - low) / (ended - began))

    def wavers(self) -> bool:
        """Whether it goes up and down as what is measured does."""
        return self.decimal and self.ups > 0 and self.downs > 0


def _is_clock(rate: float) -> bool:
    return any(abs(rate - clock) <= CLOCK_SLACK * clock for clock in CLOCKS)


class _Form(msgspec.Struct):
    columns: list[_Column]
    place: int | None = None  # The column that was found to count.
    reported: float | None = None

    def count_in(self, numbers: list[str], at: float, gap: bool) -> float | None:
        """Takes a line's numbers; returns what it counts, if it is known to count and has risen."""
        for column, number in zip(self.columns, numbers, strict=False):
            column.add(number, at, gap)
        if self.place is None and any(column.wavers() for column in self.columns):
            self.place = next((at for at, each in enumerate(self.columns) if each.counts()), None)
        if self.place is None:
            return None
        column = self.columns[self.place]
        (began, low), (ended, high) = column.seen[0], column.seen[-1]
        if ended - began >= SPAN_S and _is_clock((high - low) / (ended - began)):
            return None
        if column.value is None or column.value == self.reported:
            return None
        self.reported = column.value
        return column.value


class Learner(msgspec.Struct):
    """What is known of the lines of one file whose format is not."""

    _forms: OrderedDict[tuple[int | None, str], _Form] = msgspec.field(default_factory=OrderedDict)
    _chosen: tuple[int | None, str] | None = None
    """The form that counts. Others may count something else, and both together would be no count."""

    def feed(self, block: bytes, at: float) -> list[LogFact]:
        """Takes whole lines that were in the file at `at` (seconds, monotonic); returns those that say progress."""
        gap = len(block) > MAX_BYTES
        if gap:
            block = block[-MAX_BYTES:].partition(b"\n")[2]
        lower = block.lower()
        words = [word for word in WORDS if word in lower]
        found: list[LogFact] = []
        for raw, small in zip(block.split(b"\n"), lower.split(b"\n"), strict=True) if words else ():
            if len(raw) <= MAX_CHARS and any(word in small for word in words):
                line = raw.decode("utf-8", errors="replace")
                count = self._count_of_line(line, at, gap)
                if count is not None:
                    found.append(LogFact(kind=EventKind.PROGRESS, pattern="learnt", count=count, text=line))
        return found

    def _count_of_line(self, line: str, at: float, gap: bool) -> float | None:
        text, who = split_prefix(clean_line(line))
        if not _TRAINING.search(text) or _OTHER.search(text) or NOT_PROGRESS.search(text):
            return None
        text = _LETTERS_WITH_NUMBERS.sub("w", _TIMES.sub("@", text))
        numbers = _NUMBER.findall(text)[:MAX_COLUMNS]
        if len(numbers) < 2:
            return None
        key = (who.get("rank", who.get("local_rank")), _BLANKS.sub(" ", _NUMBER.sub("#", text)))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= MAX_FORMS:
                gone, _ = self._forms.popitem(last=False)
                self._chosen = None if self._chosen == gone else self._chosen
            form = self._forms[key] = _Form([_Column() for _ in numbers])
        self._forms.move_to_end(key)
        count = form.count_in(numbers, at, gap)
        if count is not None and self._chosen is None:
            self._chosen = key
        return count if self._chosen == key else None
